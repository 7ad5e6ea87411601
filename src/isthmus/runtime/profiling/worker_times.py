"""Measure what a worker needs besides its blocks on this machine: updates, additions and its own memory.

Rates are bytes read and written per second, as the cost model counts them. An update with Adam moves 28 bytes per
element (weight, gradient and two moments in fp32, all but the gradient written back); adding moves what comes in.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.model.graph import BlockGraph
from isthmus.model.profile import DeviceCosts
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.torch_export import Example
from isthmus.runtime.process_memory import keep_freed_memory, peak_bytes, share_freed_memory, start_peak
from isthmus.runtime.profiling.machine import MeasuredMachine

__all__ = ["device_costs"]

_ELEMENTS = 1 << 21  # elements that are updated: more than a cache holds
_MOVED = 28  # bytes per element that an update with Adam reads and writes
_SEGMENT = 1 << 18  # elements that are added at once, as in syncs
_REPEATS = 7
_COUNTS = (3, 10, 4, 10)  # batch sizes of successive runs: a worker asks for tensors of many sizes, too
_ENOUGH, _MOST = 32e6, 10_000  # bytes of activations that are measurable; most samples


def device_costs(machine: MeasuredMachine, spec: str, sequence: int | None) -> DeviceCosts:
    """Return the measured costs of a CPU that trains a model; those of an accelerator are left to the catalog."""
    if machine.device.type != "cpu":
        return DeviceCosts(device=machine.kind)
    held = _held(spec, sequence)
    return DeviceCosts(
        device=machine.kind,
        update_bandwidth=_ELEMENTS * _MOVED / _update_seconds(),
        add_bandwidth=_SEGMENT * 4 / _add_seconds(),
        context_bytes=held.context if held is not None else None,
        held=held.ratio if held is not None else 1.0,
        held_recomputed=held.recomputed if held is not None else 1.0,
    )


def _update_seconds() -> float:
    """Return the seconds of a worker's update of `_ELEMENTS` elements: zero and scale gradients, update weights."""
    weights = nn.Parameter(torch.zeros(_ELEMENTS))
    gradient = torch.zeros(_ELEMENTS)
    optimizer = torch.optim.AdamW([weights], fused=True)

    def update() -> None:
        weights.grad = gradient.zero_().mul_(0.5)
        optimizer.step()

    return _timed(update)


def _add_seconds() -> float:
    into, part = np.zeros(_SEGMENT, np.float32), np.zeros(_SEGMENT, np.float32)
    return _timed(lambda: np.add(into, part, out=into))


def _timed(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return median(times)


class _Held(NamedTuple):
    """The memory that a process holds.

    `context` is held besides tensors. The other two are bytes held per byte of activations: as they come, and
    recomputed.
    """

    context: float
    ratio: float
    recomputed: float


def _held(spec: str, sequence: int | None) -> _Held | None:
    """Return the memory held by a fresh process that builds, cuts and computes the model; None if it is unknown."""
    command = [sys.executable, "-P", "-m", "isthmus.runtime.profiling.worker_times", spec, str(sequence or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    found = done.stdout.split()[-3:]
    return _Held(*map(float, found)) if done.returncode == 0 and len(found) == 3 else None


def main() -> None:
    """Measure the memory that this process holds for a model, and print it for `_held`.

    With a bytes of activations per sample (those that the block graph counts), w of weights, the process peaks at
    context + 2 w + ratio a s where it computes s samples, forward and backward. One sample gives the context, the last
    number of samples the ratio.
    """
    from isthmus.model import source
    from isthmus.model.runnable_blocks import cut
    from isthmus.runtime.worker_run import cast_example

    spec, sequence = sys.argv[1], int(sys.argv[2]) or None
    share_freed_memory()
    torch.set_num_threads(1)
    built = source.build(spec, sequence)
    example = cast_example(built.example(2), torch.float32)
    pieces = cut(built.module, example, name=built.name, sequence=built.sequence)
    _update_seconds()  # a worker has an optimizer, too
    weights = sum(parameter.nbytes for parameter in built.module.parameters() if parameter.requires_grad)
    plain, again = (_counted(pieces.graph, recompute) for recompute in (False, True))
    times = math.ceil(min(_ENOUGH / (plain * _COUNTS[-1]), _MOST / _COUNTS[-1]))
    counts = (1, *(times * count for count in _COUNTS))
    inputs = [cast_example(built.example(count), torch.float32) for count in counts]
    first, last = _peaks(pieces, inputs, False)
    context = max(0.0, first - 2 * weights - plain)
    above = last - 2 * weights - context, _peaks(pieces, inputs, True)[1] - 2 * weights - context
    print(context, *(max(1.0, size / (a * counts[-1])) for size, a in zip(above, (plain, again), strict=True)))


def _peaks(pieces: Pieces, inputs: Sequence[Example], recompute: bool) -> tuple[float, float]:
    """Return the peak bytes of this process after the first inputs, and after the last."""
    device, peaks = torch.device("cpu"), []
    start_peak(device)  # releases what was needed before
    keep_freed_memory()
    for example in inputs:
        _compute(pieces, example, recompute)
        peaks.append(float(peak_bytes(device)))
    return peaks[0], peaks[-1]


def _counted(graph: BlockGraph, recompute: bool) -> float:
    """Return the bytes of activations per sample in fp32, as the cost model counts them for one stage."""
    workspace, saved = max(block.workspace for block in graph.blocks), [block.saved for block in graph.blocks]
    if not recompute:
        return 4.0 * (sum(saved) + workspace)
    inputs = sum(tensor.elements * len(tensor.targets) for tensor in graph.tensors)
    return 4.0 * (inputs + max(saved) + workspace)


def _compute(pieces: Pieces, example: Example, recompute: bool) -> None:
    """Run all blocks forward, then backward with gradients of ones; twice, as the first run also allocates memory."""
    for _ in range(2):
        roots = _forward(pieces, example, recompute)
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def _forward(pieces: Pieces, example: Example, recompute: bool) -> list[Tensor]:
    known = pieces.bind(example.args, example.kwargs)
    for index, block in enumerate(pieces.blocks):
        taken = [known[name] for name in pieces.incoming[index]]
        given = checkpoint(block, *taken, use_reentrant=False, preserve_rng_state=False) if recompute else block(*taken)
        known |= dict(zip(pieces.outgoing[index], given, strict=True))
    return [known[name] for name in pieces.outputs if isinstance(name, str) and known[name].requires_grad]


if __name__ == "__main__":
    main()
