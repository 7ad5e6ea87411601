"""Llama 3: decoder-only transformers with rotary positions, grouped-query attention and gated MLPs.

Grattafiori et al. 2024.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, next_tokens

__all__ = ["Llama", "llama"]


class LlamaAttention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, width: int, heads: int, kv_heads: int, base: float) -> None:
        super().__init__()
        self.size, self.base = width // heads, base
        self.q_proj = nn.Linear(width, heads * self.size, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, [batch, sequence, width] like the input."""
        batch, sequence, _ = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, -1, self.size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = turns(q, self.base)
        y = F.scaled_dot_product_attention(rotate(q, *angles), rotate(k, *angles), v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, sequence, -1))
        return out


def turns(x: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Return the rotary positions: cosine and sine of the angle t / base^(2i / size) of the pair i at position t.

    They are computed anew in each layer: it is little work, and no table has to follow a layer to its device.
    """
    sequence, size = x.shape[-2:]
    exponents = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angles = torch.outer(torch.arange(sequence, device=x.device, dtype=torch.float32), base**-exponents)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + size / 2]) by its angle."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class LlamaMLP(nn.Module):
    """The gated MLP down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the MLP, [batch, sequence, width] like the input."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaLayer(nn.Module):
    """Attention and an MLP, each after an RMS norm and added to its input."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, base: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.self_attn = LlamaAttention(width, heads, kv_heads, base)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.mlp = LlamaMLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LlamaTrunk(nn.Module):
    """The embedding, the layers and the last norm."""

    def __init__(self, vocabulary: int, width: int, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(width, eps=1e-5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        x: Tensor = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Llama(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary].

    The head has a weight of its own.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        kv_heads: int,
        inner: int,
        vocabulary: int = 128256,
        base: float = 500000.0,
    ) -> None:
        super().__init__()
        parts = (LlamaLayer(width, heads, kv_heads, inner, base) for _ in range(layers))
        self.model = LlamaTrunk(vocabulary, width, parts)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out


def llama(
    *,
    name: str,
    sequence: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int = 128256,
) -> BuiltModel:
    """Build a Llama with next-token prediction."""
    module = Llama(layers=layers, width=width, heads=heads, kv_heads=kv_heads, inner=inner, vocabulary=vocabulary)
    draw = partial(next_tokens, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
