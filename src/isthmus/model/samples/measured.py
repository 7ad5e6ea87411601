"""Measures whether a part of a model keeps samples apart, if nothing proves it.

Some samples go through the part together, each alone, and in unequal groups, and the results are compared. If the
results, the gradients and what the part keeps in buffers are the same for several draws, it is taken to keep samples
apart. Dropout is left out, and batch norm takes fixed statistics: what replicas do about both is known. Anything else
that is random differs from run to run, and counts as mixing; so does anything that differs from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from isthmus.model.graph import UNMEASURED
from isthmus.model.hidden_state import HiddenState
from isthmus.model.restored_state import kept_state, state_of
from isthmus.model.samples.fixed_norms import fixed_norms
from isthmus.model.torch_export import Example, training
from isthmus.model.trace import tensors_of

__all__ = ["measured_mixing", "own_buffers"]

_DRAWS = 3
_SPLITS = ((1,) * 8, (3, 5), (7, 1))
_MANY = ((9, 15),)  # finds what depends on the number of samples
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
_TOLERANCE = {torch.float16: 5e-2, torch.bfloat16: 5e-2, torch.float64: 1e-9}
_NOISE, _MOST_NOISE = 4, 4e-3  # rounding errors of numbers around 1, and their largest size: less is ignored

Call = Callable[[Sequence[Tensor]], Any]
Named = Sequence[tuple[str, nn.Module]]


class _NoDropout(TorchFunctionMode):
    """Makes dropout return its input, and refuses tables whose rows are made shorter where a sample reads them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.embedding, F.embedding_bag) and (args[3:4] or (kwargs.get("max_norm"),))[0] is not None:
            raise ValueError("max_norm writes into the rows that a batch reads")
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def measured_mixing(model: nn.Module, runs: Sequence[Named], example: Example) -> list[str | None]:
    """Return for each run of modules why it may mix samples, or None.

    A run is a list of modules (with their paths) that are called one after another. The first run takes samples like
    the example's; each further one takes what the run before it gave. The model is left as it was.
    """
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return [UNMEASURED] * len(runs)
    try:
        with kept_state(model, weights=True), _measuring(model):
            return _measured(runs, example, next(iter(model.parameters()), torch.empty(0)).device)
    except Exception as fault:  # the user's code may fail on samples that it was not made for
        said = f"{type(fault).__name__}: {fault}".splitlines()[0][:100]
        return [f"torch.export cannot follow it, and measuring failed ({said})"] * len(runs)


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Hold the model in training mode with gradients on, which hooks need; afterwards put back the gradients it had."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with torch.enable_grad(), torch.random.fork_rng(), training(model), _NoDropout():
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _measured(runs: Sequence[Named], example: Example, device: torch.device) -> list[str | None]:
    found: list[str | None] = [None] * len(runs)
    for draw in range(_DRAWS + 1):
        splits = _SPLITS if draw else _MANY
        torch.manual_seed(draw)
        inputs = [_drawn(tensor, sum(splits[0])).to(device) for tensor in (*example.args, *example.kwargs.values())]
        for number, run in enumerate(runs):
            one = _Measured(run, _called([module for _, module in run], example if number == 0 else None))
            found[number] = found[number] or one.mixing(inputs, splits, draw)
            given = one.given(inputs)
            inputs = [given.detach()] if isinstance(given, Tensor) else []
    return found


def _called(run: Sequence[nn.Module], example: Example | None) -> Call:
    """Return a function that runs modules one after another; the first one is given its inputs as in the example."""

    def call(inputs: Sequence[Tensor]) -> Any:
        names = list(example.kwargs) if example is not None else []
        named = dict(zip(names, inputs[len(inputs) - len(names) :], strict=True))
        result = run[0](*inputs[: len(inputs) - len(names)], **named)
        for module in run[1:]:
            result = module(result)
        return result

    return call


def _drawn(like: Tensor, samples: int) -> Tensor:
    """Return samples that differ, of the example's shape.

    Whole numbers are drawn from the range of the example's numbers, or from 0 and 1.
    """
    shape = (samples, *like.shape[1:])
    if like.is_floating_point() or like.is_complex():
        return torch.randn(shape, dtype=like.dtype)
    if like.dtype is torch.bool:
        return torch.rand(shape) < 0.5
    low, high = (0, 1) if like.is_meta or like.numel() == 0 else (int(like.min()), int(like.max()))
    if low == high:
        low, high = 0, 1
    return torch.randint(low, high + 1, shape, dtype=like.dtype)


@dataclass
class _Run:
    """The results of a run of modules, and what it left behind."""

    results: list[Tensor]
    backward: list[Tensor]  # gradients of the inputs
    gradients: dict[str, Tensor]  # of parameters
    buffers: dict[str, Tensor]
    rows: list[int]  # the rows of each batch norm
    weights: list[tuple[float, float]]  # sum and length of each parameter afterwards


class _Measured:
    """Runs modules on samples, always from the state that they had at first."""

    def __init__(self, run: Named, call: Call) -> None:
        self._named, self._call = run, call
        self._all = nn.ModuleList([module for _, module in run])
        self._back = state_of(self._all)

    def _buffers(self) -> dict[str, Tensor]:
        named = ((path, own_buffers(module)) for path, module in self._named)
        return {f"{path}.{name}".strip("."): one.clone() for path, found in named for name, one in found.items()}

    def given(self, inputs: Sequence[Tensor]) -> Any:
        """Return the modules' result as it is."""
        try:
            with fixed_norms(self._all):
                return self._call(inputs)
        finally:
            self._back()

    def mixing(self, inputs: Sequence[Tensor], splits: Sequence[Sequence[int]], seed: int) -> str | None:
        """Return why the modules may mix these samples, or None if they do not."""
        before, samples = self._buffers(), sum(splits[0])
        whole, numbers = self._run(inputs, seed), HiddenState(self._all).numbers()
        again, later = self._run(inputs, seed), HiddenState(self._all).numbers()
        self._back()
        for name, buffer in whole.buffers.items():
            if not _equal(buffer, before.get(name)):
                return f"measured: it keeps a buffer that changes with each call ({name})"
        if not _all_alike(whole.results, [again.results]):
            return "measured: the same samples twice give other numbers: it keeps something from call to call"
        for name, number in numbers.items():
            if later.get(name, number) != number:
                return f"measured: it keeps a number that changes with each call ({name})"
        if whole.weights != again.weights:
            return "measured: each call changes its parameters"
        for sizes in splits:
            where = f"{samples} samples at once and in parts of {', '.join(map(str, sizes))}"
            parts = [self._part(part, lo, seed) for part, lo in _parts(inputs, sizes)]
            if not _all_alike(whole.results, [part.results for part in parts]):
                return f"measured: {where} give other numbers"
            if wrong := _otherwise(whole, parts):
                return f"measured: {where} {wrong}"
        return None

    def _part(self, inputs: Sequence[Tensor], lo: int, seed: int) -> _Run:
        try:
            return self._run(inputs, seed, lo)
        finally:
            self._back()

    def _run(self, inputs: Sequence[Tensor], seed: int, lo: int = 0) -> _Run:
        """Run forward, and backward from gradients that are drawn for each sample.

        `lo` is the place of the first sample.
        """
        torch.manual_seed(seed + lo)
        taken = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
        named = ((path, module.named_parameters()) for path, module in self._named)
        parameters = {f"{path}.{name}".strip("."): p for path, found in named for name, p in found if p.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None
        with fixed_norms(self._all) as rows:
            given = tensors_of(self._call([one * 1 if one.requires_grad else one for one in taken]))
            roots = [tensor for tensor in given if tensor.requires_grad]
            if roots:
                torch.autograd.backward(
                    roots, [_seeds(root, lo, len(taken[0]) if taken else 1, seed) for root in roots]
                )
        return _Run(
            results=[tensor.detach() for tensor in given],
            backward=[_gradient(one) for one in taken if one.requires_grad],
            gradients={
                name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
                for name, p in parameters.items()
            },
            buffers=self._buffers(),
            rows=rows,
            weights=[(float(p.detach().sum().abs()), float(p.detach().norm())) for p in parameters.values()],
        )


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach().clone()


def _seeds(root: Tensor, lo: int, samples: int, seed: int) -> Tensor:
    """Return a gradient for each sample from its place on, which does not depend on the other samples."""
    drawn = torch.Generator().manual_seed(1000 + seed)
    rows = len(root) if root.ndim else 1
    lo *= rows // samples
    each = torch.rand((lo + rows, 2), generator=drawn, dtype=torch.float64)[lo:]
    wave = torch.arange(root[0].numel() if root.ndim and rows else 1, dtype=torch.float64)
    seeds = torch.sin(each[:, :1] * 6.3 + (1 + each[:, 1:]) * wave)
    return seeds.reshape(root.shape).to(root.device, root.dtype)


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return buffers by name, without those of batch norms, which replicas keep equal."""
    norms = {id(buffer) for one in module.modules() if isinstance(one, _BatchNorm) for buffer in one.buffers(False)}
    return {name: buffer for name, buffer in module.named_buffers() if id(buffer) not in norms}


def _otherwise(whole: _Run, parts: Sequence[_Run]) -> str | None:
    """Return how the parts differ from the whole, beside the results, or None if they do not differ."""
    if not _all_alike(whole.backward, [part.backward for part in parts]):
        return "give other gradients"
    size = max((float(gradient.double().norm()) for gradient in whole.gradients.values()), default=0.0)
    for name, gradient in whole.gradients.items():
        if not _adds_up(gradient, [part.gradients[name] for part in parts], size):
            return f"give gradients of {name} that do not add up"
    for name, buffer in whole.buffers.items():
        if not all(_equal(buffer, part.buffers.get(name)) for part in parts):
            return f"keep other numbers in the buffer {name}"
    if any(part.weights != whole.weights for part in parts):
        return "write other numbers into parameters"
    if any(len(part.rows) != len(whole.rows) for part in parts):
        return "take the statistics of a batch norm in other groups"
    if any(rows != sum(others) for rows, *others in zip(whole.rows, *(part.rows for part in parts), strict=True)):
        return "take the statistics of a batch norm in other groups"
    return None


def _parts(inputs: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[tuple[list[Tensor], int]]:
    """Yield the samples of all inputs in consecutive parts of these sizes, each with the place of its first sample."""
    split = [torch.split(tensor, list(sizes)) for tensor in inputs]
    return ((list(part), sum(sizes[:number])) for number, part in enumerate(zip(*split, strict=True)))


def _all_alike(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]]) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return False
    return all(_alike(tensor, [part[number] for part in parts]) for number, tensor in enumerate(whole))


def _alike(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether the parts together match the whole: |whole - parts| / |whole| in the L2 norm, sample by sample."""
    if whole.ndim == 0:
        return len(parts) == 1 and _alike(whole[None], [parts[0][None]])
    joined = torch.cat(list(parts))
    if joined.shape != whole.shape or joined.dtype != whole.dtype:
        return False
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(whole, joined)
    a, b = _wide(whole).reshape(len(whole), -1), _wide(joined).reshape(len(whole), -1)
    finite = torch.isfinite(a)
    gap, size = torch.where(finite, a - b, 0.0).norm(dim=1), torch.where(finite, a, 0.0).norm(dim=1)
    limit = _TOLERANCE.get(whole.dtype, 1e-3)
    least = max(1e-3 * float(size.max()), _noise(whole.dtype) * a.shape[1] ** 0.5 / limit)
    return torch.equal(finite, torch.isfinite(b)) and bool((gap <= limit * size.clamp_min(least)).all())


def _adds_up(whole: Tensor, parts: Sequence[Tensor], largest: float) -> bool:
    """Return whether the parts' gradients of a parameter add up to the whole's.

    `largest` is the largest norm that the gradient of any parameter has.
    """
    a, b = _wide(whole), _wide(torch.stack(list(parts))).sum(0)
    if not torch.isfinite(a).all():
        return True  # the comparison says nothing
    limit = _TOLERANCE.get(whole.dtype, 1e-3)
    return float((a - b).norm()) <= limit * (float(a.norm()) + 1e-2 * largest)


def _noise(dtype: torch.dtype) -> float:
    return min(_NOISE * torch.finfo(dtype).eps, _MOST_NOISE)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in 64 bits, with the two parts of complex numbers side by side."""
    return torch.view_as_real(tensor.detach()).double() if tensor.is_complex() else tensor.detach().double()


def _equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or one.shape != other.shape:
        return False
    return torch.equal(one, other) if not one.is_floating_point() else torch.allclose(one, other, 1e-4, 1e-7, True)
