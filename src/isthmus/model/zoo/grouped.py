"""One matrix product per group of rows, as a single operation that can be captured without data.

torch's own `grouped_mm` computes it in any precision, but says its shapes without data only for bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_mm"]


@torch.library.custom_op("isthmus::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Rows [n, inputs], weights [groups, inputs, outputs] -> [n, outputs].

    Group g's rows are [offsets[g - 1], offsets[g]), the first begins at 0, the last ends at n; offsets are int32.
    """
    return F.grouped_mm(rows, weights, offs=offsets)


@grouped_mm.register_fake
def _shape(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """Rows: gradient · weightsᵀ; weights: rowsᵀ · gradient, both group by group."""
    rows, weights, offsets = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_rows = grouped_mm(gradient, weights.transpose(1, 2), offsets)
    return for_rows, F.grouped_mm(rows.T, gradient, offs=offsets), None


grouped_mm.register_autograd(_backward, setup_context=_keep)
