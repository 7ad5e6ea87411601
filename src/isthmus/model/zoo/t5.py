"""T5 (version 1.0): an encoder-decoder transformer with relative position biases. Raffel et al. 2020.

The 11B model has 11,307,321,344 parameters. Its layers have no biases and their attention is not scaled; the two linear
layers of each MLP have ReLU between them (the gated form came with version 1.1).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, token_pairs

__all__ = ["T5", "buckets", "t5"]

_EPSILON = 1e-6
_BUCKETS = 32
_FARTHEST = 128  # all greater distances share one bucket


def buckets(sequence: int, *, causal: bool, device: torch.device) -> Tensor:
    """Return which of 32 biases a query at position i adds for the key at position j, as [i, j].

    Half of the buckets are for one distance each, the others for ranges that grow geometrically up to 128. Keys behind
    and ahead have 16 buckets each; in causal attention, which sees nothing ahead, all 32 are for keys behind.
    """
    positions = torch.arange(sequence, device=device)
    ahead = positions[None, :] - positions[:, None]
    count = _BUCKETS if causal else _BUCKETS // 2
    distance = -ahead.clamp(max=0) if causal else ahead.abs()
    exact = count // 2
    scale = (count - exact) / math.log(_FARTHEST / exact)
    far = exact + ((distance.clamp(min=1) / exact).log() * scale).long()
    bucket = torch.where(distance < exact, distance, far.clamp(max=count - 1))
    return bucket if causal else bucket + count * (ahead > 0)


class T5Attention(nn.Module):
    """Attention from one sequence to another or to itself.

    `biases`, if given, has one bias for each distance and head.
    """

    def __init__(self, width: int, heads: int, size: int, dropout: float, biases: nn.Embedding | None) -> None:
        super().__init__()
        self.size, self.dropout = size, dropout
        self.q = nn.Linear(width, heads * size, bias=False)
        self.k = nn.Linear(width, heads * size, bias=False)
        self.v = nn.Linear(width, heads * size, bias=False)
        self.o = nn.Linear(heads * size, width, bias=False)
        self.relative_attention_bias = biases

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        """Return the attended values, [batch, sequence, width].

        x is [batch, sequence, width], the memory that it attends to [batch, other sequence, width].
        """
        batch, sequence, _ = x.shape
        q, k, v = (
            projection(source).view(batch, source.shape[1], -1, self.size).transpose(1, 2)
            for projection, source in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        dropout = self.dropout if self.training else 0.0
        bias = None if self.relative_attention_bias is None else self._bias(sequence, causal, x.device)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0)
        out: Tensor = self.o(y.transpose(1, 2).reshape(batch, sequence, -1))
        return out

    def _bias(self, sequence: int, causal: bool, device: torch.device) -> Tensor:
        """Return the biases, [heads, sequence, sequence], from the stack's one table.

        They are looked up anew in each layer, because sending the biases along would cost far more than the activations
        do.
        """
        assert self.relative_attention_bias is not None
        bias: Tensor = self.relative_attention_bias(buckets(sequence, causal=causal, device=device)).permute(2, 0, 1)
        if not causal:
            return bias
        seen = torch.ones((sequence, sequence), dtype=torch.bool, device=device).tril()
        return bias.masked_fill(~seen, -math.inf)


class T5SelfAttention(nn.Module):
    """The self-attention part of a layer: x + attention(norm(x))."""

    def __init__(
        self, width: int, heads: int, size: int, dropout: float, *, biases: nn.Embedding, causal: bool
    ) -> None:
        super().__init__()
        self.causal = causal
        self.SelfAttention = T5Attention(width, heads, size, dropout, biases)
        self.layer_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Return the result of the part, [batch, sequence, width] like the input; the encoder's result is not used."""
        normed = self.layer_norm(x)
        out: Tensor = x + self.dropout(self.SelfAttention(normed, normed, causal=self.causal))
        return out


class CrossAttention(nn.Module):
    """The cross-attention part of a layer: x + attention from norm(x) to the encoder's result."""

    def __init__(self, width: int, heads: int, size: int, dropout: float) -> None:
        super().__init__()
        self.EncDecAttention = T5Attention(width, heads, size, dropout, None)
        self.layer_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return the result of the part, [batch, sequence, width] like the input."""
        out: Tensor = x + self.dropout(self.EncDecAttention(self.layer_norm(x), memory))
        return out


class T5Dense(nn.Module):
    """Two linear layers with ReLU between them."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.wi = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of both linear layers, [batch, sequence, width] like the input."""
        out: Tensor = self.wo(self.dropout(F.relu(self.wi(x))))
        return out


class T5MLP(nn.Module):
    """The MLP part of a layer: x + dense(norm(x))."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.DenseReluDense = T5Dense(width, inner, dropout)
        self.layer_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Return the result of the part, [batch, sequence, width] like the input; the encoder's result is not used."""
        out: Tensor = x + self.dropout(self.DenseReluDense(self.layer_norm(x)))
        return out


class T5Layer(nn.Module):
    """Self-attention, then (in the decoder only) attention to the encoder's result, then the MLP."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.layer = nn.ModuleList(parts)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        for part in self.layer:
            x = part(x, memory)
        return x


class Stack(nn.Module):
    """The encoder or the decoder."""

    def __init__(
        self, *, layers: int, width: int, heads: int, size: int, inner: int, dropout: float, decoder: bool
    ) -> None:
        super().__init__()
        biases = nn.Embedding(_BUCKETS, heads)
        self.block = nn.ModuleList(
            T5Layer(
                T5SelfAttention(width, heads, size, dropout, biases=biases, causal=decoder),
                *([CrossAttention(width, heads, size, dropout)] if decoder else []),
                T5MLP(width, inner, dropout),
            )
            for _ in range(layers)
        )
        self.final_layer_norm = nn.RMSNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return the result of the stack, [batch, sequence, width] like the input."""
        x = self.dropout(x)
        for block in self.block:
            x = block(x, memory)
        out: Tensor = self.dropout(self.final_layer_norm(x))
        return out


class T5(nn.Module):
    """Maps tokens to read and tokens written so far (both [batch, sequence]) to logits [batch, sequence, vocabulary].

    One table embeds both sequences and is, divided by sqrt(width), the head.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        size: int,
        inner: int,
        vocabulary: int,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.width = width
        self.shared = nn.Embedding(vocabulary, width)
        sizes = {"layers": layers, "width": width, "heads": heads, "size": size, "inner": inner}
        self.encoder = Stack(**sizes, dropout=dropout, decoder=False)
        self.decoder = Stack(**sizes, dropout=dropout, decoder=True)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.shared.weight
        self._initialise(size)

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        """Return the logits of the next token at each written position, [batch, sequence, vocabulary]."""
        memory = self.encoder(self.shared(source))
        out: Tensor = self.lm_head(self.decoder(self.shared(written), memory) * self.width**-0.5)
        return out

    def _initialise(self, size: int) -> None:
        """Draw weights from normal distributions whose deviations keep each matrix's results at about one.

        The deviation of q is smaller by sqrt(size), so that the attention scores, which are not scaled, are about one
        too.
        """
        for name, parameter in self.named_parameters():
            if name == "shared.weight":
                nn.init.normal_(parameter)
            elif parameter.dim() == 2:
                inputs = self.width if name.endswith("relative_attention_bias.weight") else parameter.shape[1]
                nn.init.normal_(parameter, std=(inputs * (size if name.endswith(".q.weight") else 1)) ** -0.5)


def t5(*, name: str, sequence: int, vocabulary: int = 32128, **sizes: int) -> BuiltModel:
    """Build a T5 that rewrites one sequence into another of equal length."""
    module = T5(vocabulary=vocabulary, **sizes)
    draw = partial(token_pairs, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
