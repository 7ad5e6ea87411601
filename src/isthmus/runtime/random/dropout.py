"""Dropout whose mask is a hash of each element's sample and place, in one pass over memory.

For an element x with the bits h of `hashed.py`, read as a signed number, the result is

    y = x / (1 - p)   where  h < round((1 - p) 2^32) - 2^31,   else 0

and the gradient of x is that of y with the same mask and factor. On a GPU one kernel reads x and writes y, and the
backward pass computes the mask again, so no mask is kept. Inside `torch.compile` the same formula is written in torch's
operations, which the compiler fuses with those around it. On a CPU the mask is kept, as it takes longer to compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.runtime.random.draws import Split
from isthmus.runtime.random.hashed import Form, bits, threshold

__all__ = ["hashed_dropout"]


def hashed_dropout(x: Tensor, keys: Tensor, p: float, dim: int, split: Split | None = None) -> Tensor:
    """Return the dropout of x with probability p, 0 < p < 1.

    `keys` has two numbers for each sample (`hashed.sample_keys`), and the samples lie in dimension `dim` of x. `split`
    says which part of a dimension x is, if it is not all of it.
    """
    below = threshold(1 - p)
    if below >= 1 << 31:  # so little is dropped that 32 bits do not tell it
        return x * (1 / (1 - p))
    form = Form.of(x.shape, len(keys), dim, split)
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return x * (bits(keys, form) < below) * (1 / (1 - p))
    dropped: Tensor = _Dropout.apply(x, keys, p, form)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    """The kernel, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, p: float, form: Form) -> Tensor:
        from isthmus.runtime.random.dropout_kernel import dropout

        ctx.keys, ctx.p, ctx.form = keys, p, form
        return dropout(x, keys, p, form)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from isthmus.runtime.random.dropout_kernel import dropout

        return dropout(grads[0], ctx.keys, ctx.p, ctx.form), None, None, None
