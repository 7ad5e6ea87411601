"""The modules through which a tensor enters or leaves the part of a block that a tensor group divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.model.tensor_parallel.member_slices import ParameterSlice

__all__ = ["Enter", "Leave", "Reduce", "TakePart"]

Reduce = Callable[[Tensor], Tensor]  # adds a tensor over the members; all get the same sum; may work in place


class Enter(nn.Module):
    """The identity; the gradient is added over the members, because each has only what its part contributes."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor as it is."""
        out: Tensor = _Enter.apply(x, self.reduce)  # type: ignore[no-untyped-call]
        return out


class Leave(nn.Module):
    """The sum over the members; the gradient passes unchanged, because each member already has all of it."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the members."""
        out: Tensor = _Leave.apply(x, self.reduce)  # type: ignore[no-untyped-call]
        return out


class TakePart(nn.Module):
    """Cuts the member's part out of a tensor that every member has whole."""

    def __init__(self, part: ParameterSlice) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        """Return the member's part."""
        return self.part.cut(x)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Reduce) -> Tensor:
        ctx.reduce = reduce
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.reduce(gradient.contiguous()), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Reduce) -> Tensor:
        total = reduce(x.contiguous())
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
