"""Attention with dropout whose mask is a function of the samples: by a tiled kernel, or by its plain formula."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.runtime.random.draws import Split
from isthmus.runtime.random.dropout import hashed_dropout

__all__ = ["attention_by_sample"]


def attention_by_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    *,
    p: float,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    gqa: bool,
    dim: int,
    split: Split | None,
) -> Tensor:
    """Return torch's scaled dot product attention, with dropout by the keys of the samples in dimension `dim`."""
    return _plain(query, key, value, keys, p, mask, causal, scale, gqa, dim, split)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, p: float, mask: Tensor | None, causal: bool,
    scale: float | None, gqa: bool, dim: int, split: Split | None,
) -> Tensor:  # fmt: skip
    """Return softmax(scale query key' + mask) with dropout, times the value."""
    if gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(times, -3) for t in (key, value))
    if causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    root = (query.shape[-1] ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key * root).transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return hashed_dropout(F.softmax(scores, -1), keys, p, dim, split) @ value
