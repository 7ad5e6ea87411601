"""GPT-2 and GPT-3: decoder-only transformers with learned positions and a tied head.

Radford et al. 2019, Brown et al. 2020. GPT-3 alternates dense and banded attention; here all layers are dense.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, next_tokens

__all__ = ["GPT", "gpt"]


class GptAttention(nn.Module):
    """Causal self-attention; query, key and value come from one linear layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, [batch, sequence, width] like the input."""
        batch, sequence, width = x.shape
        q, k, v = (
            part.view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, sequence, width)))
        return out


class GptMLP(nn.Module):
    """Two linear layers with GELU (tanh form) between them; the inner width is four times the outer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the MLP, [batch, sequence, width] like the input."""
        out: Tensor = self.dropout(self.c_proj(self.act(self.c_fc(x))))
        return out


class GptLayer(nn.Module):
    """Attention and an MLP, each after a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = GptAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = GptMLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GptTransformer(nn.Module):
    """The embeddings, the layers and the last norm."""

    def __init__(self, *, layers: int, width: int, heads: int, longest: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(longest, width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(GptLayer(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.drop(self.wte(tokens) + self.wpe(positions))
        for layer in self.h:
            x = layer(x)
        out: Tensor = self.ln_f(x)
        return out


class GPT(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary].

    The head shares the token embedding.
    """

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        longest: int,
        vocabulary: int = 50257,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.transformer = GptTransformer(
            layers=layers, width=width, heads=heads, longest=longest, vocabulary=vocabulary, dropout=dropout
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_head(self.transformer(tokens))
        return out

    def _initialise(self, layers: int) -> None:
        """Draw weights from a normal distribution with deviation 0.02, and set biases to zero.

        Layers that end on the residual path have the deviation 0.02 / sqrt(2 layers).
        """
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def gpt(
    *,
    name: str,
    sequence: int,
    layers: int,
    width: int,
    heads: int,
    longest: int,
    vocabulary: int = 50257,
    dropout: float = 0.1,
) -> BuiltModel:
    """Build a GPT with next-token prediction."""
    module = GPT(layers=layers, width=width, heads=heads, longest=longest, vocabulary=vocabulary, dropout=dropout)
    draw = partial(next_tokens, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
