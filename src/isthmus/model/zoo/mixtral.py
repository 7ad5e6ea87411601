"""Mixtral: Llama's attention, with eight experts in place of each MLP, of which every token uses two.

Jiang et al. 2024.

Shapes are static, without a capacity and without dropped tokens: a router chooses k experts per token, the k · tokens
copies are sorted by expert, and each linear layer of all experts is one grouped matrix product over the sorted rows
(`grouped_mm`: rows [offsets[e - 1], offsets[e]) times matrix e). However the tokens are spread, k · tokens rows are
multiplied, so that exactly the FLOPs of the chosen experts are done and counted. The auxiliary loss that balances the
experts is left out.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.model.built import BuiltModel
from isthmus.model.zoo.grouped import grouped_mm
from isthmus.model.zoo.llama import LlamaAttention, LlamaTrunk
from isthmus.model.zoo.synthetic import cross_entropy, next_tokens

__all__ = ["Mixtral", "Mixture", "mixtral"]

_EPSILON = 1e-5
_BASE = 1e6  # of the rotary positions


class Experts(nn.Module):
    """The gated MLPs of all experts, stacked: down(silu(gate(x)) * up(x)) with the matrices of each row's expert."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' results, [rows, width] like the input.

        The rows are sorted by expert; offsets[e] is the end of expert e's rows.
        """
        gate, up = grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offsets).chunk(2, dim=-1)
        out: Tensor = grouped_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), offsets)
        return out


class Mixture(nn.Module):
    """The chosen experts of each token, weighted by the softmax of their scores."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, inner, experts)

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the experts' results, [batch, sequence, width] like the input."""
        tokens = x.flatten(0, 1)
        scores, experts = self.gate(tokens).topk(self.chosen, dim=-1)
        weights = scores.float().softmax(dim=-1).to(x.dtype)
        by_expert, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self.gate.out_features, device=x.device)
        offsets = torch.searchsorted(by_expert, numbers, right=True).int()
        results = self.experts(tokens[order // self.chosen], offsets)
        back = results[order.argsort()].view(-1, self.chosen, x.shape[-1])
        out: Tensor = (back * weights[..., None]).sum(dim=1).view_as(x)
        return out


class MixtralLayer(nn.Module):
    """Attention and a mixture of experts, each after an RMS norm and added to its input."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=_EPSILON)
        self.self_attn = LlamaAttention(width, heads, kv_heads, _BASE)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=_EPSILON)
        self.mlp = Mixture(width, inner, experts, chosen)

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, [batch, sequence, width] like the input."""
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Mixtral(nn.Module):
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
        vocabulary: int,
        experts: int = 8,
        chosen: int = 2,
    ) -> None:
        super().__init__()
        parts = [MixtralLayer(width, heads, kv_heads, inner, experts, chosen) for _ in range(layers)]
        self.model = LlamaTrunk(vocabulary, width, parts)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at each position, [batch, sequence, vocabulary]."""
        out: Tensor = self.lm_head(self.model(tokens))
        return out


def mixtral(*, name: str, sequence: int, vocabulary: int = 32000, **sizes: int) -> BuiltModel:
    """Build a Mixtral with next-token prediction."""
    module = Mixtral(vocabulary=vocabulary, **sizes)
    draw = partial(next_tokens, vocabulary=vocabulary, sequence=sequence)
    return BuiltModel(name=name, module=module, sequence=sequence, draw=draw, loss=cross_entropy)
