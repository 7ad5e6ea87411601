"""BERT: a bidirectional encoder that predicts masked tokens, or where an answer starts and ends. Devlin et al. 2019.

The large model with its masked-token head has 335,174,458 parameters (the head's weight is the token embedding). The
small one is that of Turc et al. 2019. RoBERTa has the same trunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens, spans

__all__ = ["Bert", "BertSpans", "BertTrunk", "Sizes", "bert", "bert_spans", "initialise"]

_MASK_TOKEN = 103  # [MASK] in the published vocabulary


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of the trunk; position 0 has row `offset` of the position table."""

    layers: int
    width: int
    heads: int
    inner: int
    longest: int
    vocabulary: int
    segments: int = 2
    offset: int = 0
    epsilon: float = 1e-12
    dropout: float = 0.1


class BertEmbeddings(nn.Module):
    """The sum of token, position and segment embeddings; all tokens belong to segment 0 here."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.offset = sizes.offset
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position_embeddings = nn.Embedding(sizes.offset + sizes.longest, sizes.width)
        self.token_type_embeddings = nn.Embedding(sizes.segments, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of token numbers [batch, sequence], [batch, sequence, width]."""
        positions = torch.arange(self.offset, self.offset + tokens.shape[1], device=tokens.device)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        out: Tensor = self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))
        return out


class BertSelfAttention(nn.Module):
    """Self-attention in which every position attends to every other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = sizes.heads, sizes.dropout
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, [batch, sequence, width] like the input."""
        batch, sequence, width = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return y.transpose(1, 2).reshape(batch, sequence, width)


class Output(nn.Module):
    """A linear layer whose result is added to the residual and normed."""

    def __init__(self, inputs: int, sizes: Sizes) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return norm(dropout(dense(x)) + residual)."""
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class BertAttention(nn.Module):
    """Self-attention and its output layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.self = BertSelfAttention(sizes)
        self.output = Output(sizes.width, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the attention part, [batch, sequence, width] like the input."""
        out: Tensor = self.output(self.self(x), x)
        return out


class BertDense(nn.Module):
    """A linear layer and GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return gelu(dense(x))."""
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    """Attention, then two linear layers with GELU between them; the norm comes after each part."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = BertAttention(sizes)
        self.intermediate = BertDense(sizes.width, sizes.inner)
        self.output = Output(sizes.inner, sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = self.attention(x)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Encoder(nn.Module):
    """The layers, one after another."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(sizes) for _ in range(sizes.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the last layer, [batch, sequence, width] like the input."""
        for layer in self.layer:
            x = layer(x)
        return x


class BertTrunk(nn.Module):
    """The embeddings and the encoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings(sizes)
        self.encoder = Encoder(sizes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        out: Tensor = self.encoder(self.embeddings(tokens))
        return out


class Transform(BertDense):
    """The part of the head before its logits: a linear layer, GELU and a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.width, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=sizes.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed hidden states, [batch, sequence, width] like the input."""
        out: Tensor = self.LayerNorm(super().forward(x))
        return out


class Predictions(nn.Module):
    """The head: the transform, then the logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.transform = Transform(sizes)
        self.decoder = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states [batch, sequence, width], [batch, sequence, vocabulary]."""
        out: Tensor = self.decoder(self.transform(x))
        return out


class BertHead(nn.Module):
    """Holds the predictions, under the name that they have in the well-known implementation."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.predictions = Predictions(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states [batch, sequence, width], [batch, sequence, vocabulary]."""
        out: Tensor = self.predictions(x)
        return out


class Bert(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary]; the head shares the embedding."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bert = BertTrunk(sizes)
        self.cls = BertHead(sizes)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.cls(self.bert(tokens))
        return out


class BertSpans(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, 2, sequence] for the start and the end of an answer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bert = BertTrunk(sizes)
        self.qa_outputs = nn.Linear(sizes.width, 2)
        initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each position as start and as end of the answer, [batch, 2, sequence]."""
        out: Tensor = self.qa_outputs(self.bert(tokens)).transpose(1, 2)
        return out


def initialise(model: nn.Module) -> None:
    """Draw matrices from a normal distribution with deviation 0.02, and set biases to zero."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def bert(*, name: str, sequence: int, vocabulary: int = 30522, **sizes: int) -> BuiltModel:
    """Build a BERT with masked-token prediction."""
    module = Bert(Sizes(vocabulary=vocabulary, **sizes))
    draw = partial(masked_tokens, vocabulary=vocabulary, sequence=sequence, mask=min(_MASK_TOKEN, vocabulary - 1))
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)


def bert_spans(*, name: str, sequence: int, vocabulary: int, **sizes: int) -> BuiltModel:
    """Build a BERT that finds answers in a text, as for SQuAD."""
    module = BertSpans(Sizes(vocabulary=vocabulary, **sizes))
    draw = partial(spans, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
