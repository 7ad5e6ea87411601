"""The arrays between a plan and its tasks: what tasks are written from, and what has been written so far."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import inlined
from isthmus.plan.schedule import Shape, StageRuns, stage_at

__all__ = [
    "DUPLICATE",
    "FACTORS",
    "GATHERED",
    "REGATHERED",
    "RESIDENT",
    "RING",
    "SCATTERED",
    "SERVER",
    "STREAMED",
    "TREE",
    "WHOLE",
    "Costs",
    "State",
    "Syncs",
    "lowest_blocks",
    "samples_of",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RESIDENT, GATHERED, STREAMED = 0, 1, 2  # Shape.stream: weights stay; come from the other replicas; come over the bus
RING, TREE, SERVER, FACTORS, DUPLICATE = 0, 1, 2, 3, 4  # Syncs.how; sparse is a ring of fewer bytes
# Syncs.layout: all update the whole bucket; some update a piece and gather the rest; all do so
WHOLE, REGATHERED, SCATTERED = 0, 1, 2


class Costs(NamedTuple):
    """Seconds and bytes of the pipeline's blocks."""

    times: Floats  # [rows, 2, blocks + 1]: sums of forward and backward seconds, for a number of samples
    row: Ints  # rows of its smaller and of its larger slices
    recompute: Bools  # [stages]
    weight_bytes: Floats  # [2, blocks + 1]: sums of weight (or gradient) bytes, and of those that groups divide
    stage_bytes: Floats  # [replicas]: weight bytes of its whole stage on each device, ties counted once
    update_seconds: Floats  # [replicas]: of its stage's parameters, on the device or (spilled) on the host
    spill: Ints  # [stages]: 0 none, 1 optimizer, 2 all
    measured: bool  # whether the norm of the whole gradient is needed, to clip or scale it: all devices wait for it


class Syncs(NamedTuple):
    """The buckets of a pipeline, and how each is synchronised."""

    how: Ints
    layout: Ints
    bytes: Floats
    segments: Ints
    root: Ints
    first: Ints  # [syncs + 1] participants of sync b are device[first[b]:first[b + 1]]
    device: Ints  # the device that sends its part
    holder: Ints  # first device of its replica, which computes the gradients
    first_block: Ints  # [syncs + 1] blocks that hold its parameters
    block: Ints
    played: Floats  # bytes that its messages are played with; not `bytes` where its time was measured
    factor_bytes: Floats  # per sample: inputs and output gradients (factors only)
    rebuild_flops: Floats  # per sample: the weight gradient's product (factors only)
    rebuild_rate: Floats  # [replicas] FLOP/s


class State(NamedTuple):
    """What has been written so far."""

    times: Floats  # [runs, slice size, direction, blocks + 1]: cumulative seconds
    base: Ints  # [runs] first operation of each run; operation = base + micro-batch * slices + slice
    begin: Ints  # [2, operations] first task of each forward and backward
    finish: Ints  # [2, operations] last task
    final: Ints  # [runs, blocks] task of the last backward after which the block's gradients are final
    cut: Bools  # [runs, blocks] a part starts at this block
    gate: Ints  # [2, operations, blocks] streamed weights: what the loading of the part at this block waits for
    part: Ints  # [2, operations, blocks] ... and the part's task
    stored: Ints  # [runs, blocks] last task that stores the streamed gradients of the block
    last: Ints  # [devices] last task in the device's order
    recent: Ints  # [devices, 2] its last two streamed parts
    held: Ints  # [devices] first block of the last of them
    behind: Ints  # [devices, 2, 2] operation and first block of its last two backward parts with gathered weights
    room: Ints  # [operations, blocks] ... of each such part: the part that waits until its gradients are summed
    update: Ints  # [devices] its update
    settled: Ints  # [devices] what waits for all its syncs: its update or, before that, its message about its gradients
    fresh: Ints  # [replicas] the task after which its stage's new weights are there


@inlined
def samples_of(runs: StageRuns, u: int, k: int) -> Any:
    """Return the samples [lo, hi) of slice k of run u."""
    share = runs.hi[u] - runs.lo[u]
    return runs.lo[u] + share * k // runs.slices[u], runs.lo[u] + share * (k + 1) // runs.slices[u]


@inlined
def lowest_blocks(shape: Shape, runs: StageRuns, syncs: Syncs, b: int, device: int, lowest: Ints) -> None:
    """Write into `lowest`, for each run on the device, its lowest block with a parameter of bucket b (-1: none)."""
    for u in range(len(lowest)):
        lowest[u] = -1
    for i in range(syncs.first_block[b], syncs.first_block[b + 1]):
        block = syncs.block[i]
        s = stage_at(shape.first, block)
        for q in range(shape.replicas[s], shape.replicas[s + 1]):
            if shape.device[q] == device:
                u = runs.of[q]
                if lowest[u] < 0 or block < lowest[u]:
                    lowest[u] = block
