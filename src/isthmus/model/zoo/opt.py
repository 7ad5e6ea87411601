"""OPT: a decoder-only transformer with learned positions (counted from 2), ReLU and a tied head. Zhang et al. 2022.

Dropout is 0.1 throughout, except for the embeddings, which have none.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, next_tokens

__all__ = ["OPT", "opt"]

_OFFSET = 2  # row of the position table that belongs to position 0


class OptAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, [batch, sequence, width] like the input."""
        batch, sequence, width = x.shape
        q, k, v = (
            projection(x).view(batch, sequence, self.heads, width // self.heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(batch, sequence, width))
        return out


class OptLayer(nn.Module):
    """Attention, and two linear layers with ReLU between them.

    Each part comes after a layer norm and is added to its input.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = OptAttention(width, heads, dropout)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x)))
        out: Tensor = x + self.dropout(self.fc2(F.relu(self.fc1(self.final_layer_norm(x)))))
        return out


class Decoder(nn.Module):
    """The embeddings, the layers and the last norm."""

    def __init__(self, *, layers: int, width: int, heads: int, longest: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.embed_positions = nn.Embedding(_OFFSET + longest, width)
        self.layers = nn.ModuleList(OptLayer(width, heads, dropout) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        positions = torch.arange(_OFFSET, _OFFSET + tokens.shape[1], device=tokens.device)
        x: Tensor = self.embed_tokens(tokens) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.final_layer_norm(x)
        return out


class OptTrunk(nn.Module):
    """Holds the decoder, under the name that it has in the well-known implementation."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        out: Tensor = self.decoder(tokens)
        return out


class OPT(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary].

    The head shares the token embedding.
    """

    def __init__(
        self, *, layers: int, width: int, heads: int, longest: int, vocabulary: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        decoder = Decoder(
            layers=layers, width=width, heads=heads, longest=longest, vocabulary=vocabulary, dropout=dropout
        )
        self.model = OptTrunk(decoder)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = decoder.embed_tokens.weight
        self._initialise(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out

    def _initialise(self, layers: int) -> None:
        """Draw weights from a normal distribution with deviation 0.006, and set biases to zero.

        Layers that end on the residual path have the deviation 0.006 / sqrt(2 layers).
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("out_proj.weight", "fc2.weight")):
                nn.init.normal_(parameter, std=0.006 / (2 * layers) ** 0.5)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.006)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def opt(*, name: str, sequence: int, vocabulary: int = 50272, **sizes: int) -> BuiltModel:
    """Build an OPT with next-token prediction."""
    module = OPT(vocabulary=vocabulary, **sizes)
    draw = partial(next_tokens, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
