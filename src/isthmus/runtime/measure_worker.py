"""What a worker needs beside its blocks on this machine: updating, adding up, its own memory.

Rates are bytes read and written over seconds, as the cost model counts them: an update with Adam moves 28 bytes an
element (weight, gradient and two moments in fp32, all but the gradient written back); adding moves what comes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import nn

from isthmus.model.profile import DeviceCosts
from isthmus.runtime.machine import Machine
from isthmus.runtime.memory import start_peak

__all__ = ["device_costs"]

_ELEMENTS = 1 << 21  # that are updated: more than a cache holds
_MOVED = 28  # bytes of an element that an update with Adam reads and writes
_SEGMENT = 1 << 18  # elements that are added at once, as syncs do
_REPEATS = 7


def device_costs(machine: Machine, spec: str, sequence: int | None) -> DeviceCosts:
    """Of a processor that trains a model; an accelerator's are as the catalog says."""
    if machine.device.type != "cpu":
        return DeviceCosts(device=machine.kind)
    return DeviceCosts(
        device=machine.kind,
        update_bandwidth=_ELEMENTS * _MOVED / _update_seconds(),
        add_bandwidth=_SEGMENT * 4 / _add_seconds(),
        context_bytes=_context(spec, sequence),
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


def _context(spec: str, sequence: int | None) -> float | None:
    """Bytes of a process that has built and cut the model, less the model's own; None where the system does not say."""
    command = [sys.executable, "-P", "-m", "isthmus.runtime.measure_worker", spec, str(sequence or 0)]
    path = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}  # where the model's code may lie
    done = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False, text=True)
    last = done.stdout.split()[-1:]
    return float(last[0]) if done.returncode == 0 and last and float(last[0]) > 0.0 else None


def main() -> None:
    """What `_context` runs: the bytes of this process, with a model in its blocks and without its weights."""
    from isthmus.model import source
    from isthmus.model.pieces import cut
    from isthmus.runtime import serving

    spec, sequence = sys.argv[1], int(sys.argv[2]) or None
    built = source.build(spec, sequence)
    example = serving.cast_example(built.example(2), torch.float32)
    pieces = cut(built.module, example, name=built.name, sequence=built.sequence)
    weights = sum(parameter.nbytes for parameter in built.module.parameters())
    start_peak(torch.device("cpu"))
    print(max(0.0, _resident() - weights) if pieces else 0.0)


def _resident() -> float:
    """Bytes of this process; 0 where the system does not say."""
    try:
        found = re.search(r"^VmRSS:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0.0
    return int(found[1]) * 1024.0 if found else 0.0


if __name__ == "__main__":
    main()
