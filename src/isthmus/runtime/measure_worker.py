"""What a worker needs beside its blocks on this machine: updating, adding up, its own memory.

Rates are bytes read and written over seconds, as the cost model counts them: an update with Adam moves 28 bytes an
element (weight, gradient and two moments in fp32, all but the gradient written back); adding moves what comes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from isthmus.model.export import Example
from isthmus.model.pieces import Pieces
from isthmus.model.profile import DeviceCosts
from isthmus.runtime.machine import Machine
from isthmus.runtime.memory import keep_freed_memory, peak_bytes, share_freed_memory, start_peak

__all__ = ["device_costs"]

_ELEMENTS = 1 << 21  # that are updated: more than a cache holds
_MOVED = 28  # bytes of an element that an update with Adam reads and writes
_SEGMENT = 1 << 18  # elements that are added at once, as syncs do
_REPEATS = 7
_COUNTS = (6, 16)  # samples


def device_costs(machine: Machine, spec: str, sequence: int | None) -> DeviceCosts:
    """Of a processor that trains a model; an accelerator's are as the catalog says."""
    if machine.device.type != "cpu":
        return DeviceCosts(device=machine.kind)
    held = _held(spec, sequence)
    return DeviceCosts(
        device=machine.kind,
        update_bandwidth=_ELEMENTS * _MOVED / _update_seconds(),
        add_bandwidth=_SEGMENT * 4 / _add_seconds(),
        context_bytes=held.context if held is not None else None,
        held=held.ratio if held is not None else 1.0,
    )


def _update_seconds() -> float:
    """Of what a worker does in a step for each element: the gradient is zeroed and scaled, the weight updated."""
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
    """What a process holds beside its tensors, and for each byte of activations."""

    context: float
    ratio: float


def _held(spec: str, sequence: int | None) -> _Held | None:
    """Of a fresh process that builds and cuts the model, then computes; None where the system does not say."""
    command = [sys.executable, "-P", "-m", "isthmus.runtime.measure_worker", spec, str(sequence or 0)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    found = done.stdout.split()[-2:]
    return _Held(*map(float, found)) if done.returncode == 0 and len(found) == 2 else None


def main() -> None:
    """What `_held` runs.

    With a bytes of activations per sample (those that the block graph counts), w of weights, the process peaks at
    context + 2 w + ratio a s where it computes s samples, forward and backward. Two numbers of samples give both.
    """
    from isthmus.model import source
    from isthmus.model.pieces import cut
    from isthmus.runtime.serving import cast_example

    spec, sequence = sys.argv[1], int(sys.argv[2]) or None
    share_freed_memory()
    torch.set_num_threads(1)
    built, device = source.build(spec, sequence), torch.device("cpu")
    inputs = {count: cast_example(built.example(count), torch.float32) for count in (2, *_COUNTS)}
    pieces = cut(built.module, inputs[2], name=built.name, sequence=built.sequence)
    start_peak(device)
    keep_freed_memory()
    peaks = []
    for count in _COUNTS:
        _compute(pieces, inputs[count])
        peaks.append(peak_bytes(device))
    low, high = _COUNTS
    slope = (peaks[1] - peaks[0]) / (high - low)
    weights = sum(parameter.nbytes for parameter in built.module.parameters() if parameter.requires_grad)
    blocks = pieces.graph.blocks
    counted = 4.0 * (sum(block.saved for block in blocks) + max(block.workspace for block in blocks))
    print(max(0.0, peaks[1] - 2 * weights - slope * high), max(1.0, slope / counted))


def _compute(pieces: Pieces, example: Example) -> None:
    """All blocks forward, then backward, with gradients of ones: twice, as the first time also makes room."""
    for _ in range(2):
        known = pieces.bind(example.args, example.kwargs)
        for index, block in enumerate(pieces.blocks):
            given = block(*[known[name] for name in pieces.incoming[index]])
            known |= dict(zip(pieces.outgoing[index], given, strict=True))
        roots = [known[name] for name in pieces.outputs if isinstance(name, str) and known[name].requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


if __name__ == "__main__":
    main()
