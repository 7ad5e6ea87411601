"""Measures whether a part of a model keeps samples apart, where nothing proves it: whole and in parts, and compared.

Some samples go through the part together, each alone, and in two unequal groups. If the results are the same for
several draws, the part is taken to keep samples apart. Dropout is left out, and batch norm takes fixed statistics: what
replicas do about both is known. Anything else that is random differs from run to run, and counts as mixing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isthmus.model.export import Example, training
from isthmus.model.graph import UNMEASURED
from isthmus.model.trace import tensors_of

__all__ = ["measured_mixing"]

_SAMPLES, _DRAWS = 8, 3
_SPLITS = ((1,) * _SAMPLES, (3, 5), (7, 1))
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2, torch.float64: 1e-9}


class _Still(TorchFunctionMode):
    """Leaves dropout out, and lets batch norm use fixed statistics."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.batch_norm:
            return _affine(*args, **kwargs)
        return func(*args, **kwargs)


def _affine(x: Tensor, mean: Any, var: Any, weight: Any = None, bias: Any = None, *rest: Any, **more: Any) -> Tensor:
    """Batch norm with mean 0 and variance 1."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    scaled = x if weight is None else x * weight.reshape(shape)
    return scaled if bias is None else scaled + bias.reshape(shape)


def measured_mixing(model: nn.Module, runs: Sequence[Sequence[nn.Module]], example: Example) -> list[str | None]:
    """For each run of modules that are called one after another: why it may mix samples, or None.

    The first takes samples like the example's; each further one what the run before it gave.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return [UNMEASURED] * len(runs)
    try:
        with torch.enable_grad(), torch.random.fork_rng(), training(model), _Still():  # hooks want gradients
            return _measured(runs, example, next(iter(model.parameters()), torch.empty(0)).device)
    except Exception as fault:  # whatever the user's code does with samples that it was not made for
        said = f"{type(fault).__name__}: {fault}".splitlines()[0][:100]
        return [f"torch.export cannot follow it, and measuring failed ({said})"] * len(runs)


def _measured(runs: Sequence[Sequence[nn.Module]], example: Example, device: torch.device) -> list[str | None]:
    found: list[str | None] = [None] * len(runs)
    for draw in range(_DRAWS):
        torch.manual_seed(draw)
        inputs = [_drawn(tensor).to(device) for tensor in (*example.args, *example.kwargs.values())]
        for number, run in enumerate(runs):
            call = _called(run, example if number == 0 else None)
            found[number] = found[number] or _mixing(call, inputs)
            given = call(inputs)
            inputs = [given.detach()] if isinstance(given, Tensor) else []
    return found


def _called(run: Sequence[nn.Module], example: Example | None) -> Callable[[Sequence[Tensor]], Any]:
    """Runs modules one after another; the first one is given its inputs as in the example."""

    def call(inputs: Sequence[Tensor]) -> Any:
        names = list(example.kwargs) if example is not None else []
        named = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
        result = run[0](*inputs[: len(inputs) - len(names)], **named)
        for module in run[1:]:
            result = module(result)
        return result

    return call


def _drawn(like: Tensor) -> Tensor:
    """Samples that differ, of the example's shape; whole numbers are among those of the example, or 0 and 1."""
    shape = (_SAMPLES, *like.shape[1:])
    if like.is_floating_point() or like.is_complex():
        return torch.randn(shape, dtype=like.dtype)
    if like.dtype is torch.bool:
        return torch.rand(shape) < 0.5
    low, high = (0, 1) if like.is_meta or like.numel() == 0 else (int(like.min()), int(like.max()))
    if low == high:
        low, high = 0, 1
    return torch.randint(low, high + 1, shape, dtype=like.dtype)


def _mixing(call: Callable[[Sequence[Tensor]], Any], inputs: Sequence[Tensor]) -> str | None:
    whole = [tensor.detach() for tensor in tensors_of(call(inputs))]
    for sizes in _SPLITS:
        parts = [tensors_of(call(part)) for part in _parts(inputs, sizes)]
        if not all(_alike(tensor, [part[number].detach() for part in parts]) for number, tensor in enumerate(whole)):
            said = ", ".join(map(str, sizes))
            return f"measured: {_SAMPLES} samples at once and in parts of {said} give other numbers"
    return None


def _parts(inputs: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[list[Tensor]]:
    """The samples of all inputs in consecutive parts of these sizes."""
    split = [torch.split(tensor, list(sizes)) for tensor in inputs]
    return (list(part) for part in zip(*split, strict=True))


def _alike(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the parts together are the whole: |whole - parts| / |whole| in the L2 norm, sample by sample."""
    joined = torch.cat(list(parts)) if whole.ndim else whole.new_full((), float("nan"))
    if joined.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(whole, joined)
    a, b = whole.double().reshape(len(whole), -1), joined.double().reshape(len(whole), -1)
    finite = torch.isfinite(a)
    gap, size = torch.where(finite, a - b, 0.0).norm(dim=1), torch.where(finite, a, 0.0).norm(dim=1)
    least = 1e-3 * float(size.max())
    limit = _TOLERANCE.get(whole.dtype, 1e-3)
    return torch.equal(finite, torch.isfinite(b)) and bool((gap <= limit * size.clamp_min(least)).all())
