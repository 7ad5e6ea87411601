"""Measure what the blocks of a model take on this machine's device: the points of a profile.

The blocks run one after another from the model's synthetic inputs as in a worker: in its precision, with its random
numbers, and with gradients added to those that are there. Of equal blocks the first is measured. A point is the median
of several repeats, with forward and backward measured apart, with gradients of ones and no loss. On an accelerator the
repeats follow each other without waiting, as the blocks of a stage do, and its own clock times them. If there is one
CPU thread, its CPU time counts, so that other processes on the machine do not matter.

Only one block's weights and results are on the device at a time, so the model need not fit into it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from isthmus.errors import IsthmusError, ModelError, UsageError
from isthmus.model import source
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import BlockTime, Profile
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.runtime.block_calls import BlockCalls
from isthmus.runtime.placed_blocks import Draws, on_device
from isthmus.runtime.process_memory import keep_freed_memory
from isthmus.runtime.profiling.machine import MeasuredMachine, free_memory
from isthmus.runtime.profiling.worker_times import device_costs
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.random.randomness import Randomness
from isthmus.runtime.worker import DTYPES
from isthmus.runtime.worker_run import cast_example, cast_module

__all__ = [
    "SAMPLES",
    "LeftOut",
    "Measurement",
    "Timed",
    "measure",
    "profile_model",
]

T = TypeVar("T")

SAMPLES = (1, 2, 4, 8)

_ENOUGH = 0.2  # seconds of repeats
_LEAST, _MOST = 3, 20  # repeats


class Timed(NamedTuple):
    """The seconds of a block on this many samples."""

    block: int
    samples: int
    forward: float
    backward: float


class LeftOut(NamedTuple):
    """A block that did not fit into memory with this many samples."""

    block: str
    samples: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """All points of a model on one machine."""

    graph: BlockGraph
    profile: Profile
    left_out: tuple[LeftOut, ...]


Listen = Callable[[str, int], None]  # a block's name, samples
Room = Callable[[], float]  # bytes


def profile_model(
    spec: str,
    machine: MeasuredMachine,
    *,
    sequence: int | None = None,
    samples: Collection[int] = SAMPLES,
    listen: Listen = lambda block, samples: None,
) -> Measurement:
    """Build a model and measure its distinct blocks on each number of samples.

    This runs the code that `spec` names.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(machine.threads)
    if machine.device.type == "cpu":
        keep_freed_memory()  # as workers do
    try:
        torch.manual_seed(0)
        built, dtype = source.build(spec, sequence), DTYPES[machine.precision]
        example = cast_example(built.example(2), dtype)
        pieces = cut(cast_module(built.module, dtype), example, name=built.name, sequence=built.sequence)
        own = device_costs(machine, spec, built.sequence)
        _check_samples(max(samples), example)
        inputs = {count: cast_example(built.example(count), dtype) for count in sorted({*samples})}
        timed, left_out = measure(pieces, draws_of(pieces, example), inputs, machine.device, listen=listen)
    finally:
        torch.set_num_threads(before)
    points = tuple(_point(pieces.graph, machine, one) for one in timed)
    profile = Profile(origin=_origin(machine), blocks=points, devices=(own,))
    return Measurement(graph=pieces.graph, profile=profile, left_out=tuple(left_out))


def _check_samples(most: int, example: Example) -> None:
    """Raise UsageError if inputs of this many samples do not fit into host memory; the example has two samples."""
    size = sum(value.nbytes for value in (*example.args, *example.kwargs.values())) / 2
    if most * size > free_memory():
        raise UsageError("inputs of that many samples do not fit in memory", found=str(most), next="Choose fewer")


def _point(graph: BlockGraph, machine: MeasuredMachine, timed: Timed) -> BlockTime:
    block = graph.blocks[timed.block]
    return BlockTime(
        block=block.digest,
        name=block.name,
        device=machine.kind,
        precision=machine.precision,
        samples=timed.samples,
        forward_seconds=timed.forward,
        backward_seconds=timed.backward,
    )


def _origin(machine: MeasuredMachine) -> str:
    threads = f", {machine.threads} thread{'s' * (machine.threads > 1)}" if machine.device.type == "cpu" else ""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{machine.name}{threads}, torch {torch.__version__}, {today}, isthmus profile"


# -- measuring


@dataclass(eq=False)
class _Walk:
    """A number of samples on their way through the model: tensors by name."""

    samples: int
    known: dict[str, Any]


def measure(
    pieces: Pieces,
    draws: Draws,
    inputs: Mapping[int, Example],
    device: torch.device,
    *,
    listen: Listen = lambda block, samples: None,
    room: Room = free_memory,
) -> tuple[list[Timed], list[LeftOut]]:
    """Measure distinct blocks on the inputs of each number of samples; return the times and what did not fit.

    Host memory is never exhausted: what a block will need is compared with `room` beforehand.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meter = _Meter(pieces, draws, device, room)
    walks = [_Walk(count, _bound(pieces, example, device)) for count, example in inputs.items()]
    digests = [block.digest for block in pieces.graph.blocks]
    firsts = [index for index, digest in enumerate(digests) if digest not in digests[:index]]
    timed: list[Timed] = []
    left_out: list[LeftOut] = []
    for index in range(firsts[-1] + 1):
        name = pieces.graph.blocks[index].name
        with _lent(pieces.blocks[index], device) as module:
            for walk in [*walks]:
                listen(name, walk.samples)
                found = meter.timed(index, module, walk) if module is not None and index in firsts else None
                if found is not None:
                    timed.append(found)
                elif index in firsts:
                    left_out.append(LeftOut(name, walk.samples))
                if module is None or not meter.forward(index, module, walk):
                    walks.remove(walk)
                    later = [first for first in firsts if first > index]
                    left_out += [LeftOut(pieces.graph.blocks[first].name, walk.samples) for first in later]
        if not walks:
            break
    return timed, left_out


def _bound(pieces: Pieces, example: Example, device: torch.device) -> dict[str, Any]:
    args = tuple(value.to(device) for value in example.args)
    return pieces.bind(args, {key: value.to(device) for key, value in example.kwargs.items()})


@contextmanager
def _lent(module: nn.Module, device: torch.device) -> Iterator[nn.Module | None]:
    """Move a block to the device for the duration of the context; give None if it does not fit there.

    Weights that other blocks use too are the same objects, so at the end they get back what they held.
    """
    held = [(parameter, parameter.data) for parameter in module.parameters()]
    try:
        yield _moved(module, device)
    finally:
        for parameter, content in held:
            parameter.grad, parameter.data = None, content
        if device.type != "cpu":
            module.to("cpu")
            torch.cuda.empty_cache()


def _moved(module: nn.Module, device: torch.device) -> nn.Module | None:
    try:
        return on_device(module, device)
    except torch.OutOfMemoryError:
        return None


class _Meter:
    """Runs blocks as a worker does, and times them."""

    def __init__(self, pieces: Pieces, draws: Draws, device: torch.device, room: Room) -> None:
        self._pieces, self._device, self._room = pieces, device, room
        self._calls = BlockCalls(Randomness(0, pieces.graph, draws), pieces, device)
        self._grad = {tensor.name for tensor in pieces.graph.tensors if tensor.grad and tensor.source >= 0}
        self._width = max((p.element_size() for block in pieces.blocks for p in block.parameters()), default=4)

    def timed(self, index: int, module: nn.Module, walk: _Walk) -> Timed | None:
        """Return the medians over repeats after an uncounted first one; None if the block does not fit into memory."""
        marks = self._tried(lambda: self._repeated(index, module, walk), index, walk)
        if marks is None:
            return None
        forward, backward = zip(*map(_seconds, marks), strict=True)
        return Timed(index, walk.samples, median(forward), median(backward))

    def _tried(self, work: Callable[[], T], index: int, walk: _Walk) -> T | None:
        """Return the result of `work`, or None if memory is short; raise ModelError if the block fails otherwise."""
        block = self._pieces.graph.blocks[index]
        if self._device.type == "cpu" and walk.samples * (block.saved + block.workspace) * self._width > self._room():
            return None
        try:
            return work()
        except IsthmusError:
            raise
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
                return None
            raise ModelError(
                "a block cannot be measured",
                where=f"block {block.name}",
                found=f"{type(error).__name__} on {walk.samples} samples: {error}",
                next="If it needs more samples than that, choose them: --samples 2,4,8",
            ) from error

    def _repeated(self, index: int, module: nn.Module, walk: _Walk) -> list[Sequence[Any]]:
        self._both(index, module, walk)
        marks = [self._both(index, module, walk)]
        self._wait()
        repeats = int(_ENOUGH / max(sum(_seconds(marks[0])), 1e-9))
        marks += [self._both(index, module, walk) for _ in range(min(max(repeats, _LEAST), _MOST) - 1)]
        self._wait()
        return marks

    def _both(self, index: int, module: nn.Module, walk: _Walk) -> Sequence[Any]:
        """Run one forward and one backward, and return the moments at which each began and ended."""
        taken = [self._begun(name, walk.known[name]) for name in self._pieces.incoming[index]]
        call = self._calls.of(0, index, module, range(walk.samples))
        begin = self._now()
        given = call(*taken)
        end = self._now()
        roots = [tensor for tensor in given if isinstance(tensor, Tensor) and tensor.requires_grad]
        ones = [torch.ones_like(tensor) for tensor in roots]
        back = self._now()
        if roots:
            torch.autograd.backward(roots, ones)
        return begin, end, back, self._now()

    def _begun(self, name: str, tensor: Any) -> Any:
        if name not in self._grad or not tensor.is_floating_point():
            return tensor
        return tensor.detach().requires_grad_()

    def forward(self, index: int, module: nn.Module, walk: _Walk) -> bool:
        """Run a block and drop what no later block uses; return False if it does not fit into memory."""
        incoming = self._pieces.incoming

        def compute() -> Sequence[Any]:
            with torch.no_grad():
                return self._calls.of(0, index, module, range(walk.samples))(
                    *(walk.known[name] for name in incoming[index])
                )

        given = self._tried(compute, index, walk)
        if given is None:
            return False
        later = {name for names in incoming[index + 1 :] for name in names}
        walk.known |= zip(self._pieces.outgoing[index], given, strict=True)
        walk.known = {name: tensor for name, tensor in walk.known.items() if name in later}
        return True

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return thread_time() if torch.get_num_threads() == 1 else perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize()


def _seconds(marks: Sequence[Any]) -> tuple[float, float]:
    begin, end, back, done = marks
    if isinstance(begin, float):
        return end - begin, done - back
    return begin.elapsed_time(end) / 1e3, back.elapsed_time(done) / 1e3
