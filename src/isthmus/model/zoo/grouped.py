"""One matrix product per group of rows, as a single operation that can be captured without data.

torch's own `grouped_mm` computes it in any precision, but gives its shapes without data only for bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["grouped_mm"]


@torch.library.custom_op("isthmus::grouped_mm", mutates_args=())
def grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return the product of each row with the matrix of its group, [n, outputs].

    The rows are [n, inputs], the weights [groups, inputs, outputs]. Group g has the rows [offsets[g - 1], offsets[g]);
    the first group begins at 0, the last ends at n. Offsets are int32.
    """
    return F.grouped_mm(rows, weights, offs=offsets)


@grouped_mm.register_fake
def _shape(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return the gradients: gradient · weightsᵀ for the rows, rowsᵀ · gradient for the weights, both group by group."""
    rows, weights, offsets = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_rows = grouped_mm(gradient, weights.transpose(1, 2), offsets)
    return for_rows, F.grouped_mm(rows.T, gradient, offs=offsets), None


grouped_mm.register_autograd(_backward, setup_context=_keep)
