"""Peak memory of each device: state, activations in flight by the device's own order, workspace.

State per element, with Adam: weights and gradients in the job's width, fp32 master weights (16-bit jobs) and two fp32
moments: 16 bytes either way. A mask keeps dense weights and, for the kept fraction f, gradients, an fp32 gradient copy
(16-bit), master, moments, a 4-byte index and a temporary: 2 + 24 f in 16 bits. `sharded-optimizer` divides the
optimizer's part by the replicas, `sharded-all` everything (plus two parts of gathered weights); `spill` moves it to the
host (plus two parts in flight). A replica that computes a 16-bit job in fp32 holds state as the others do and, of the
weights that are on the device, an fp32 copy to compute with: 4 bytes an element more. Its activations have 4 bytes.

Activations: walk the device's order; a forward adds the saved bytes of its samples, a backward takes them away, and
while one computes it needs its largest slice's workspace. `recompute` keeps block inputs only and needs the largest
block's saved bytes while it computes. A device that takes part in a sync, the root of a server included, has a buffer
as large as the largest bucket of the pipeline; by `factors` it also holds what it receives of one micro-batch. The
model's buffers (batch statistics, fp32) count whole on every device that has a stage. CONTEXT is what the driver and
libraries take on a GPU; a profile may say what a worker really has before its model.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Precision
from isthmus.compiled import compiled
from isthmus.cost.compute import WIDTH_OF
from isthmus.model.job import Optimizer
from isthmus.model.profile import DeviceCosts
from isthmus.plan.schedule import Orders, Runs

__all__ = ["CONTEXT", "StateBytes", "activation_peaks", "context_bytes", "moment_bytes", "state_bytes"]

Floats = npt.NDArray[np.float64]

CONTEXT = 0.6e9  # bytes


def context_bytes(kind: str, costs: DeviceCosts | None) -> float:
    """Bytes of a worker on a device of this kind before its model: as measured, else the usual."""
    if costs is not None and costs.context_bytes is not None:
        return costs.context_bytes
    return CONTEXT if kind != "CPU" else 0.0


class StateBytes(NamedTuple):
    """Bytes per trained element."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weight + self.gradient + self.optimizer


def moment_bytes(optimizer: Optimizer) -> float:
    """Bytes of optimizer moments per element."""
    if optimizer.name == "sgd":
        return 4.0 if optimizer.momentum else 0.0
    return 8.0


def state_bytes(precision: Precision, optimizer: Optimizer, kept: float = 1.0, masked: bool = False) -> StateBytes:
    """Bytes per element; `kept` counts exempt tensors as kept."""
    width = WIDTH_OF[precision]
    half = width == 2
    state = (4.0 if half else 0.0) + moment_bytes(optimizer)
    if not masked:
        return StateBytes(width, width, state)
    return StateBytes(width, kept * (width + (4 if half else 0)), kept * (state + 4 + width))


@compiled
def activation_peaks(runs: Runs, orders: Orders, replicas: Floats, devices: int) -> Floats:
    """Largest sum of live activations of each device; `replicas`, [2, replicas]: bytes per sample, saved and transient.

    Of the replicas of a run all are saved, and one is computed at a time.
    """
    peaks, saved, transient = np.zeros(devices), np.zeros(len(runs.device)), np.zeros(len(runs.device))
    for q in range(replicas.shape[1]):
        saved[runs.of[q]] += replicas[0, q]
        transient[runs.of[q]] = max(transient[runs.of[q]], replicas[1, q])
    for d in range(devices):
        live = 0.0
        for i in range(orders.first[d], orders.first[d + 1]):
            u = orders.run[i]
            share = runs.hi[u] - runs.lo[u]
            piece = -(-share // runs.slices[u])
            if not orders.backward[i]:
                live += share * saved[u]
            peaks[d] = max(peaks[d], live + piece * transient[u])
            if orders.backward[i]:
                live -= share * saved[u]
    return peaks
