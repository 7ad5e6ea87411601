"""Exports a model's operations by `torch.export`, with the batch size left open.

Sizes are computed from symbolic shapes at two batch sizes (the *probes*) p < q. A size f is then taken as the line
`f(batch) = slope * batch + fixed` through (p, f(p)) and (q, f(q)). A model whose code takes the batch size as a plain
number is not exported: its operations might be others for another batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection, export
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode

from isthmus.errors import ModelError
from isthmus.model.gradients import plain_gradients
from isthmus.model.hidden_state import ChangedError, settled, unchanged_by_calls
from isthmus.model.regions import open_regions
from isthmus.model.repeated_calls import recorded_call
from isthmus.model.restored_state import kept_state
from isthmus.model.seen_by import has_own_code

__all__ = ["Example", "Exported", "LinearSize", "NotExportedError", "example_of", "export_model", "probes_of"]
__all__ += ["training"]

_HOMES = (PurePath(torch.__file__).parent, PurePath(__file__).parent)

_PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43)  # probes: sizes that are rarely another dimension of a model


@dataclass(frozen=True, kw_only=True)
class Example:
    """Inputs of a model; meta or real tensors, dimension 0 of each is the batch. Only shapes and dtypes are read."""

    args: tuple[torch.Tensor, ...] = ()
    kwargs: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def of(given: Any) -> Example:
        """Return an example of a tensor, of several, or of some by name."""
        if isinstance(given, Example):
            return given
        if isinstance(given, Mapping):
            return Example(args=(), kwargs=dict(given))
        return Example(args=tuple(given) if isinstance(given, (tuple, list)) else (given,), kwargs={})


@dataclass(frozen=True)
class LinearSize:
    """A size that is a line on the batch: `slope * batch + fixed`."""

    slope: float
    fixed: float

    @classmethod
    def through(cls, probes: tuple[int, int], low: float, high: float) -> LinearSize:
        """Return the line through both sizes; a size that grows otherwise is taken as proportional to the batch."""
        slope = (high - low) / (probes[1] - probes[0])
        fixed = low - slope * probes[0]
        return cls(slope, fixed) if slope >= 0 and fixed >= 0 else cls(high / probes[1], 0.0)


@dataclass(frozen=True, eq=False)
class Exported:
    """An exported model, whose sizes are expressions of the batch."""

    program: ExportedProgram
    probes: tuple[int, int]


class NotExportedError(Exception):
    """Says why a model is not exported: `torch.export` cannot follow it, or would lose a part of what it does."""


def export_model(model: nn.Module, example: Example) -> Exported:
    """Export the model's operations; raise a NotExportedError that says why if this is impossible."""
    _check_example(example)
    probes = probes_of(example)
    with training(model):
        return Exported(_export(model, example_of(model, example, probes[1])), probes)


def _check_example(example: Example) -> None:
    for index, tensor in enumerate([*example.args, *example.kwargs.values()]):
        if tensor.ndim == 0:
            raise ModelError(
                "an example input has no batch dimension",
                where=f"input {index}",
                found="a tensor without dimensions",
                expected="dimension 0 of every input to be the batch",
            )
    if not example.args and not example.kwargs:
        raise ModelError("the example has no inputs", expected="at least one tensor whose dimension 0 is the batch")


def probes_of(example: Example) -> tuple[int, int]:
    """Return two batch sizes that are no other dimension of the inputs."""
    taken = {size for t in [*example.args, *example.kwargs.values()] for size in t.shape[1:]}
    low, high, *_ = [prime for prime in _PRIMES if prime not in taken] + [101, 103]
    return low, high


def example_of(model: nn.Module, example: Example, batch: int) -> Example:
    """Return inputs of that batch on the model's device.

    Each is a new tensor, because export takes a tensor that is used twice for one input.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros((batch, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    return Example(args=tuple(map(fresh, example.args)), kwargs={k: fresh(t) for k, t in example.kwargs.items()})


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Hold a model in training mode, and afterwards put back every module's own mode and every buffer's content."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)


def _export(model: nn.Module, example: Example) -> ExportedProgram:
    batch = Dim("batch", min=2)
    collection = ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in [*example.args, *example.kwargs.values()]:
        collection[tensor] = {0: batch}
    shapes = collection.dynamic_shapes(model, example.args, example.kwargs)  # type: ignore[no-untyped-call]

    def exported() -> ExportedProgram:
        with _SureCoins(), plain_gradients(), _no_guess_about_masks():
            return export(model, example.args, example.kwargs, dynamic_shapes=shapes, strict=False)

    try:
        try:
            with unchanged_by_calls(model):
                program = exported()
        except ChangedError:
            program = settled(model, lambda: model(*example.args, **example.kwargs), exported)
        if has_own_code(model):
            _check_repeats(model, example, program, exported)
    except Exception as error:  # export may fail on anything in the model; the caller has another way
        raise NotExportedError(_reason(error)) from error
    open_regions(program)
    return program


def _check_repeats(
    model: nn.Module, example: Example, program: ExportedProgram, exported: Callable[[], ExportedProgram]
) -> None:
    """Raise ChangedError for a model that does something else in the next call, although it holds the same."""
    calls = []
    try:
        for _ in range(2):
            with kept_state(model), torch.random.fork_rng(), _SureCoins(), _no_guess_about_masks():
                calls.append(recorded_call(model, example.args, example.kwargs))
    except Exception:  # what export can follow but a call without data cannot
        with kept_state(model):
            calls = [str(program.graph).splitlines(), str(exported().graph).splitlines()]
    if calls[0] != calls[1]:
        line = next((one for one, other in zip(*calls, strict=False) if one != other), "how many there are")
        raise ChangedError(f"calls of the model do other operations, or with other numbers: {line[:80]}")


def _reason(error: Exception) -> str:
    """Return the beginning of an error's text, and the line of the model's code where it was raised."""
    text = " ".join(str(error).split())[:300] or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(PurePath(frame.filename))]
    if not frames:
        return text
    place = f"line {frames[-1].lineno} of {PurePath(frames[-1].filename).name}"
    return f"{text.rstrip('.')} ({place}: {(frames[-1].line or '').strip()[:80]})"


def _is_users(path: PurePath) -> bool:
    """Return whether a file belongs neither to torch nor to Isthmus; `<string>` is code that torch wrote."""
    return path.is_absolute() and not any(path.is_relative_to(home) for home in _HOMES)


@contextmanager
def _no_guess_about_masks() -> Iterator[None]:
    """Keep `nn.TransformerEncoder` from searching its mask for a causal one, which only chooses a faster kernel."""
    usual = transformer._detect_is_causal_mask

    def told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    transformer._detect_is_causal_mask = told
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = usual


class _SureCoins(TorchFunctionMode):
    """Answers `torch.rand([]) < p` if p <= 0 or p >= 1 decides it, as for layers that may be dropped but are not.

    Export could not go on: it needs a truth value that depends on data. Nothing reads the number afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.lt, torch.Tensor.__lt__) and any(args[0] is drawn for drawn in self._drawn):
            limit, written = args[1], args[0]._version
            if isinstance(limit, (int, float)) and not (written or 0 < limit < 1):
                return limit >= 1
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.ndim == 0:
            self._drawn.append(result)
        return result
