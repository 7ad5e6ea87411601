"""Checks that a model does the same operations with the same numbers in every call.

An export records the numbers of one call. They could come from anywhere: a clock, an iterator, a generator of random
numbers, an array. Two more calls without data show whether they are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["recorded_call"]

_FEW = 1024  # elements of a tensor that comes from outside of the call


def recorded_call(call: Callable[..., object], args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> list[str]:
    """Return the operations of a call without data, each with what it takes besides tensors."""
    recorder = _Recorder()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor, static_shapes=True)

        taken = [fake(one) for one in args], {name: fake(one) for name, one in kwargs.items()}
        with recorder:
            call(*taken[0], **taken[1])
    return recorder.lines


class _Recorder(TorchFunctionMode):
    """Writes a line for each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [_text(leaf) for leaf in pytree.tree_leaves((args, kwargs or {}))]
        self.lines.append(f"{resolve_name(func) or func.__name__} {' '.join(given)}")
        return func(*args, **(kwargs or {}))


def _text(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"tensor{list(leaf.shape)}" if _has_no_numbers(leaf) else _numbers(leaf)
    if isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device, type(None))):
        return repr(leaf)
    numbers = getattr(leaf, "tobytes", None)  # an array of numpy's
    return str(numbers()) if callable(numbers) else type(leaf).__name__


def _has_no_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor is one of the call's, or too large to be compared, as weights are."""
    return isinstance(tensor, (FakeTensor, nn.Parameter)) or tensor.is_meta or tensor.numel() > _FEW


def _numbers(tensor: Tensor) -> str:
    with _disable_current_modes():
        return str(tensor.detach().tolist())
