"""BERT: a bidirectional encoder that predicts masked tokens. Devlin et al. 2019.

The large model with its masked-token head has 335,174,458 parameters (the head's weight is the token embedding).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens

__all__ = ["Bert", "bert"]

_EPSILON = 1e-12
_MASK_TOKEN = 103  # [MASK] in the published vocabulary


class Embeddings(nn.Module):
    """Sum of token, position and segment embeddings; all tokens are of segment 0 here."""

    def __init__(self, width: int, longest: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(longest, width)
        self.token_type_embeddings = nn.Embedding(2, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] -> [batch, sequence, width]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        out: Tensor = self.dropout(self.LayerNorm(x + self.position_embeddings(positions)))
        return out


class SelfAttention(nn.Module):
    """Every position attends to every other."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        batch, sequence, width = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return y.transpose(1, 2).reshape(batch, sequence, width)


class Output(nn.Module):
    """A linear layer, added to the residual and normed."""

    def __init__(self, inputs: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """norm(dropout(dense(x)) + residual)."""
        out: Tensor = self.LayerNorm(self.dropout(self.dense(x)) + residual)
        return out


class Attention(nn.Module):
    """Self-attention and its output layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = SelfAttention(width, heads, dropout)
        self.output = Output(width, width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        out: Tensor = self.output(self.self(x), x)
        return out


class Dense(nn.Module):
    """A linear layer and GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """gelu(dense(x))."""
        return F.gelu(self.dense(x))


class Layer(nn.Module):
    """Attention, then two linear layers with GELU between; the norm comes after each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.intermediate = Dense(width, 4 * width)
        self.output = Output(4 * width, width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        x = self.attention(x)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class Encoder(nn.Module):
    """The layers, one after another."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        for layer in self.layer:
            x = layer(x)
        return x


class Trunk(nn.Module):
    """Embeddings and encoder."""

    def __init__(self, layers: int, width: int, heads: int, longest: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embeddings = Embeddings(width, longest, vocabulary, dropout)
        self.encoder = Encoder(layers, width, heads, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] -> [batch, sequence, width]."""
        out: Tensor = self.encoder(self.embeddings(tokens))
        return out


class Transform(Dense):
    """What the head does before its logits: a linear layer, GELU, norm."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.LayerNorm = nn.LayerNorm(width, eps=_EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        out: Tensor = self.LayerNorm(super().forward(x))
        return out


class Predictions(nn.Module):
    """The head: transform, then logits."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.transform = Transform(width)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> [batch, sequence, vocabulary]."""
        out: Tensor = self.decoder(self.transform(x))
        return out


class Head(nn.Module):
    """Holds the predictions, under the name that the well-known implementation gives them."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.predictions = Predictions(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> [batch, sequence, vocabulary]."""
        out: Tensor = self.predictions(x)
        return out


class Bert(nn.Module):
    """Token numbers [batch, sequence] -> logits [batch, sequence, vocabulary]; the head shares the embedding."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        longest: int = 512,
        vocabulary: int = 30522,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.bert = Trunk(layers, width, heads, longest, vocabulary, dropout)
        self.cls = Head(width, vocabulary)
        self.cls.predictions.decoder.weight = self.bert.embeddings.word_embeddings.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token at each position."""
        out: Tensor = self.cls(self.bert(tokens))
        return out


def bert(
    *,
    name: str,
    sequence: int,
    layers: int,
    width: int,
    heads: int,
    longest: int,
    vocabulary: int = 30522,
    dropout: float = 0.1,
) -> BuiltModel:
    """A BERT with masked-token prediction."""
    module = Bert(layers=layers, width=width, heads=heads, longest=longest, vocabulary=vocabulary, dropout=dropout)
    draw = partial(masked_tokens, vocabulary=vocabulary, sequence=sequence, mask=min(_MASK_TOKEN, vocabulary - 1))
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
