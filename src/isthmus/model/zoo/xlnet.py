"""XLNet: a bidirectional encoder whose attention uses distances in place of positions. Yang et al. 2019.

This is the content stream, which fine-tuning uses. Pre-training by permutation adds a second, query stream over the
same weights, with one more vector (`mask_emb`); it is left out, and so is the memory of earlier segments. The two
halves of a sequence are its two segments.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.synthetic import cross_entropy, masked_tokens

__all__ = ["XLNet", "xlnet"]

_EPSILON = 1e-12
_MASK_TOKEN = 6  # <mask> in the published vocabulary


def distances(sequence: int, width: int, like: Tensor) -> Tensor:
    """Return sines, then cosines, of the distances sequence, sequence - 1, …, 1 - sequence, as [2 sequence, width]."""
    exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width
    steps = torch.arange(sequence, -sequence, -1, device=like.device, dtype=torch.float32)
    angles = torch.outer(steps, 10000.0**-exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(like.dtype)


def shift(scores: Tensor) -> Tensor:
    """Return scores by key j = i - d, [batch, heads, i, j], from scores by distance d, [batch, heads, i, sequence - d].

    Row i moves left by sequence - i.
    """
    batch, heads, sequence, count = scores.shape
    turned = scores.reshape(batch, heads, count, sequence)[:, :, 1:]
    return turned.reshape(batch, heads, sequence, count - 1)[..., :sequence]


class XLNetAttention(nn.Module):
    """Self-attention that scores query q_i and key k_j, all over sqrt(size), as

        (q_i + u) k_j + (q_i + v) r_(i-j) + (q_i + w) s_(same segment or not),

    with r projected from sines of the distance.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.r = nn.Linear(width, width, bias=False)
        self.r_r_bias = nn.Parameter(torch.zeros(heads, self.size))
        self.r_s_bias = nn.Parameter(torch.zeros(heads, self.size))
        self.r_w_bias = nn.Parameter(torch.zeros(heads, self.size))
        self.seg_embed = nn.Parameter(torch.zeros(2, heads, self.size))
        self.layer_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return norm(x + attention), [batch, sequence, width] like the input."""
        scores = self._scores(x) * self.size**-0.5
        y = self.dropout(scores.softmax(dim=-1)) @ self._by_head(self.v(x))
        out: Tensor = self.layer_norm(x + self.dropout(self.o(y.transpose(1, 2).reshape(x.shape))))
        return out

    def _scores(self, x: Tensor) -> Tensor:
        """Return the scores before scaling, [batch, heads, sequence, sequence]."""
        sequence, width = x.shape[1:]
        q, k = self._by_head(self.q(x)), self._by_head(self.k(x))
        r = self.r(distances(sequence, width, x)).view(-1, self.heads, self.size).permute(1, 2, 0)
        content = (q + self.r_w_bias[:, None]) @ k.transpose(2, 3)
        place = shift((q + self.r_r_bias[:, None]) @ r)
        segment = (q + self.r_s_bias[:, None]) @ self.seg_embed.permute(1, 2, 0)
        second = torch.arange(sequence, device=x.device) >= sequence // 2
        return content + place + torch.where(second[:, None] == second, segment[..., :1], segment[..., 1:])

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)


class XLNetMLP(nn.Module):
    """The MLP part of a layer: norm(x + two linear layers with GELU between them)."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(width, eps=_EPSILON)
        self.layer_1 = nn.Linear(width, inner)
        self.layer_2 = nn.Linear(inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the part, [batch, sequence, width] like the input."""
        y = self.layer_2(self.dropout(F.gelu(self.layer_1(x))))
        out: Tensor = self.layer_norm(x + self.dropout(y))
        return out


class XLNetLayer(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.rel_attn = XLNetAttention(width, heads, dropout)
        self.ff = XLNetMLP(width, inner, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        out: Tensor = self.ff(self.rel_attn(x))
        return out


class XLNetTrunk(nn.Module):
    """The embedding and the layers."""

    def __init__(self, vocabulary: int, layers: list[XLNetLayer], width: int, dropout: float) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(vocabulary, width)
        self.layer = nn.ModuleList(layers)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of token numbers [batch, sequence], [batch, sequence, width]."""
        x: Tensor = self.dropout(self.word_embedding(tokens))
        for layer in self.layer:
            x = layer(x)
        out: Tensor = self.dropout(x)
        return out


class XLNet(nn.Module):
    """Maps token numbers [batch, sequence] to logits [batch, sequence, vocabulary]; the head shares the embedding."""

    def __init__(
        self, *, layers: int, width: int, heads: int, inner: int, vocabulary: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        parts = [XLNetLayer(width, heads, inner, dropout) for _ in range(layers)]
        self.transformer = XLNetTrunk(vocabulary, parts, width, dropout)
        self.lm_loss = nn.Linear(width, vocabulary)
        self.lm_loss.weight = self.transformer.word_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_loss(self.transformer(tokens))
        return out


def xlnet(*, name: str, sequence: int, vocabulary: int = 32000, **sizes: int) -> BuiltModel:
    """Build an XLNet with masked-token prediction, in place of prediction by permutation."""
    module = XLNet(vocabulary=vocabulary, **sizes)
    draw = partial(masked_tokens, vocabulary=vocabulary, sequence=sequence, mask=min(_MASK_TOKEN, vocabulary - 1))
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
