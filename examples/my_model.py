"""A model of one's own, ready for Isthmus: a function that gives the module and example inputs.

    isthmus model show examples.my_model:build
    isthmus plan examples.my_model:build --cluster examples/clusters/demo.yaml --batch 32

Run it from the root of the repository. In your own project the name is `package.module:function`, as in Python.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, LAYERS, HEADS = 1000, 128, 4, 4


class Layer(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, WIDTH) -> the same shape."""
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    """A small language model whose head is its table of tokens: the two share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (samples, tokens) -> a score for each word (samples, tokens, VOCABULARY)."""
        return self.head(self.layers(self.tokens(tokens)))


def build(sequence: int = 64) -> tuple[nn.Module, Tensor]:
    """The module and an example of its input: two samples. `--sequence N` arrives as the argument."""
    return Writer(), torch.zeros(2, sequence, dtype=torch.long)


if __name__ == "__main__":
    module, tokens = build()
    print(f"{sum(parameter.numel() for parameter in module.parameters()):,} parameters")
    print(f"{tuple(tokens.shape)} -> {tuple(module(tokens).shape)}")
