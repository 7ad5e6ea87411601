"""Compute attention with dropout by its plain formula, because the fused kernels draw their own numbers inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["PlainAttention"]

_ATTENTION = (F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default)


class PlainAttention(TorchFunctionMode):
    """A mode in which the dropout of attention is an operation of its own; attention without dropout is unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attention if func in _ATTENTION else func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    others: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if dropout_p == 0:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **others)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the formula only adds a mask to the scores
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    plain = torch.ops.aten._scaled_dot_product_attention_math.default
    result: tuple[Tensor, Tensor] = plain(query, key, value, attn_mask, dropout_p, is_causal, None, **others)
    return result[0]
