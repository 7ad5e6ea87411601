"""The first transformer: an encoder-decoder for translation, with a norm after each part. Vaswani et al. 2017.

The base model has 63,045,632 parameters with the paper's 37,000 shared tokens (the paper says 65 million).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, token_pairs

__all__ = ["Transformer", "transformer"]


class Attention(nn.Module):
    """Attention from one sequence to another or to itself; the projections have no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        """Return the attended values, [batch, sequence, width].

        x is [batch, sequence, width], the memory that it attends to [batch, other sequence, width].
        """
        batch, sequence, width = x.shape
        q, k, v = (
            projection(source).view(batch, source.shape[1], self.heads, width // self.heads).transpose(1, 2)
            for projection, source in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out: Tensor = self.output(y.transpose(1, 2).reshape(batch, sequence, width))
        return out


class MLP(nn.Sequential):
    """Two linear layers with ReLU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


class EncoderLayer(nn.Module):
    """Self-attention and an MLP; the result of each is added to its input, then normed."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width)
        self.mlp, self.mlp_norm = MLP(width, inner), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = self.attention_norm(x + self.dropout(self.attention(x, x)))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out


class DecoderLayer(EncoderLayer):
    """Causal self-attention, attention to the encoder's result, and an MLP; each is added to its input, then normed."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__(width, heads, inner, dropout)
        self.cross, self.cross_norm = Attention(width, heads), nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = self.attention_norm(x + self.dropout(self.attention(x, x, causal=True)))
        x = self.cross_norm(x + self.dropout(self.cross(x, memory)))
        out: Tensor = self.mlp_norm(x + self.dropout(self.mlp(x)))
        return out


def waves(sequence: int, width: int, device: torch.device) -> Tensor:
    """Return sinusoidal positions [sequence, width]: sin(t / 10000^(2i / width)) at 2i, the cosine at 2i + 1."""
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    angles = torch.outer(torch.arange(sequence, device=device, dtype=torch.float32), 10000.0**-exponents)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class Transformer(nn.Module):
    """Maps tokens to read and tokens written so far (both [batch, sequence]) to logits [batch, sequence, vocabulary].

    With `shared`, one table embeds both sequences and is the head; without it, each has its own.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        inner: int,
        vocabulary: int,
        shared: bool = True,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.width = width
        self.source = nn.Embedding(vocabulary, width)
        self.target = self.source if shared else nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, inner, dropout) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(width, heads, inner, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if shared:
            self.head.weight = self.source.weight
        self.dropout = nn.Dropout(dropout)
        self._initialise()

    def forward(self, source: Tensor, written: Tensor) -> Tensor:
        """Return the logits of the next token at each written position, [batch, sequence, vocabulary]."""
        memory = self._embed(self.source, source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embed(self.target, written)
        for layer in self.decoder:
            x = layer(x, memory)
        out: Tensor = self.head(x)
        return out

    def _embed(self, table: nn.Module, tokens: Tensor) -> Tensor:
        x = table(tokens) * self.width**0.5
        out: Tensor = self.dropout(x + waves(tokens.shape[1], self.width, tokens.device).to(x.dtype))
        return out

    def _initialise(self) -> None:
        """Draw tables with deviation 1 / sqrt(width) and other matrices by Glorot's rule, and set biases to zero."""
        for name, parameter in self.named_parameters():
            if name in ("source.weight", "target.weight", "head.weight"):
                nn.init.normal_(parameter, std=self.width**-0.5)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def transformer(*, name: str, sequence: int, vocabulary: int, shared: bool = True, **sizes: int) -> BuiltModel:
    """Build a transformer that translates a sequence into another of equal length."""
    module = Transformer(vocabulary=vocabulary, shared=shared, **sizes)
    draw = partial(token_pairs, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
