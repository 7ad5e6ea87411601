"""The tasks that synchronise gradient buckets: when each sync may start, and which tasks wait for it.

With `factors` every participant recomputes the others' part of a micro-batch's product as soon as it has their
factors. A sync of replicated state whose time was measured is played with a number of bytes that is not its own
(`cost.measured_syncs`).

In state `sharded-optimizer` a participant updates only its piece of a bucket. If everything that the bucket holds is
sharded in this way, a ring stops after n - 1 rounds, when each participant has the sum of its piece. However the
gradient was synchronised, the new weights then go around the ring in n - 1 rounds, once they are there (updated and,
where spilled, loaded).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.cost.collectives import all_reduce, server, spread, steps_of_ring, tree
from isthmus.cost.network import COMPUTE, WIDE, Wires, by_way, members_of
from isthmus.cost.task_list import GATE, LOADING, REBUILD, SYNCING, TaskList, edge, task
from isthmus.cost.task_types import (
    DUPLICATE,
    FACTORS,
    GATHERED,
    RING,
    SCATTERED,
    SERVER,
    TREE,
    State,
    Syncs,
    lowest_blocks,
    samples_of,
)
from isthmus.plan.schedule import Shape, StageRuns, stage_at

__all__ = ["new_weights", "sync", "sync_alone"]

Ints = npt.NDArray[np.int32]


@compiled
def sync(
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, syncs: Syncs, state: State, b: int, micro_batches: int
) -> None:
    """Write the sync of one bucket, and let the updates of its participants wait for it."""
    how = syncs.how[b]
    if how == DUPLICATE:
        return
    devices = syncs.device[syncs.first[b] : syncs.first[b + 1]]
    holders = syncs.holder[syncs.first[b] : syncs.first[b + 1]]
    n = members_of(wires, len(devices))
    ready, done = np.empty(len(devices), np.int32), np.empty(len(devices), np.int32)
    if how == FACTORS:
        factors(out, wires, shape, runs, syncs, state, b, devices, holders, micro_batches)
        return
    s = stage_at(shape.first, syncs.block[syncs.first_block[b]])
    sharded = shape.stream[s] == GATHERED
    pieces = micro_batches * shape.slices[shape.replicas[s]] if sharded else 1
    whole, planned = syncs.played[b], syncs.segments[b]
    for piece in range(pieces):
        final_tasks(out, shape, runs, syncs, state, b, holders, ready, piece if sharded else -1)
        if how == RING and (sharded or syncs.layout[b] == SCATTERED):
            steps_of_ring(out, wires, devices, ready, done, whole / n, planned, n - 1, n - 1, SYNCING, b)
        else:
            reduce(out, wires, how, devices, ready, done, whole, planned, syncs.root[b], b)
        for i in range(len(devices)):
            edge(out, done[i], state.settled[holders[i]])
            if sharded:
                room(out, shape, runs, syncs, state, b, holders[i], piece, done[i])


@compiled
def room(
    out: TaskList, shape: Shape, runs: StageRuns, syncs: Syncs, state: State, b: int, holder: int, piece: int, done: int
) -> None:
    """Let the part that needs the memory of these gradients wait until they have been summed (state `sharded-all`)."""
    lowest = np.empty(len(runs.device), np.int32)
    lowest_blocks(shape, runs, syncs, b, holder, lowest)
    for u in range(len(lowest)):
        if lowest[u] >= 0:
            edge(out, done, state.room[state.base[u] + piece, lowest[u]])


@compiled
def reduce(
    out: TaskList, wires: Wires, how: int, devices: Ints, ready: Ints, done: Ints, whole: float, planned: int,
    root: int, b: int,
) -> None:  # fmt: skip
    """Write the messages after which every participant has the sum of a bucket.

    `how` is RING, TREE or SERVER; `sync` writes the other kinds itself. Any other number is refused.
    """
    if how == SERVER:
        server(out, wires, devices, ready, done, whole, planned, root, b)
    elif how == TREE:
        tree(out, wires, devices, ready, done, whole, planned, b)
    elif how == RING:
        all_reduce(out, wires, devices, ready, done, whole, planned, b)
    else:
        raise ValueError("this sync has no messages in cost.bucket_tasks.reduce")


@compiled
def sync_alone(
    out: TaskList, wires: Wires, how: int, devices: Ints, whole: float, planned: int, root: int
) -> None:  # fmt: skip
    """Write the sync of one bucket and nothing else, with all participants ready."""
    ready, done = np.empty(len(devices), np.int32), np.empty(len(devices), np.int32)
    for i in range(len(devices)):
        ready[i] = task(out, -1, 0.0, 0.0, -1, GATE, 0, 0)
    reduce(out, wires, how, devices, ready, done, whole, planned, root, 0)


@compiled
def final_tasks(
    out: TaskList, shape: Shape, runs: StageRuns, syncs: Syncs, state: State, b: int, holders: Ints, ready: Ints,
    piece: int,
) -> None:  # fmt: skip
    """Write into `ready`, for each participant, the task after which its gradients of bucket b are final.

    A `piece` of 0 or more asks for the gradients of that piece alone, as sharded state needs them.
    """
    lowest = np.empty(len(runs.device), np.int32)
    for i in range(len(holders)):
        lowest_blocks(shape, runs, syncs, b, holders[i], lowest)
        ready[i] = -1
        gate = -1
        for u in range(len(lowest)):
            if lowest[u] < 0:
                continue
            t = state.final[u, lowest[u]] if piece < 0 else state.part[1, state.base[u] + piece, lowest[u]]
            if ready[i] < 0:
                ready[i] = t
                continue
            if gate < 0:  # a bucket over several runs of one device
                gate = task(out, -1, 0.0, 0.0, -1, GATE, b, 0)
                edge(out, ready[i], gate)
                ready[i] = gate
            edge(out, t, gate)


@compiled
def factors(
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, syncs: Syncs, state: State, b: int, devices: Ints,
    holders: Ints, micro_batches: int,
) -> None:  # fmt: skip
    """Write a sync by factors.

    Every participant sends its factors after each backward, and rebuilds the others' part of each micro-batch.
    """
    n, wide = len(devices), by_way(wires, WIDE)
    got = np.empty((micro_batches, n), np.int32)
    run = np.empty(n, np.int32)
    lowest = np.empty(len(runs.device), np.int32)
    total = 0
    for i in range(n):
        lowest_blocks(shape, runs, syncs, b, holders[i], lowest)
        for u in range(len(lowest)):  # a linear weight belongs to one run of each participant
            if lowest[u] >= 0:
                run[i] = u
        total += runs.hi[run[i]] - runs.lo[run[i]]
    for i in range(n):
        others = total * wires.stands - (runs.hi[run[i]] - runs.lo[run[i]])
        seconds = others * syncs.rebuild_flops[b] / syncs.rebuild_rate[runs.replica[run[i]]]
        for m in range(micro_batches):
            got[m, i] = task(out, COMPUTE + devices[i], seconds, 0.0, -1, REBUILD, b, m)
            edge(out, got[m, i], state.settled[holders[i]])
    for i in range(n):
        u = run[i]
        for piece in range(micro_batches * runs.slices[u]):
            lo, hi = samples_of(runs, u, piece % runs.slices[u])
            size = (hi - lo) * syncs.factor_bytes[b]
            done = state.finish[1, state.base[u] + piece]
            spread(out, wide, devices, i, done, size, got[piece // runs.slices[u]], b)


@compiled
def new_weights(out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, syncs: Syncs, state: State, b: int) -> None:
    """Write the ring that spreads each participant's piece of bucket b's new weights, once the piece is there."""
    devices = syncs.device[syncs.first[b] : syncs.first[b + 1]]
    holders = syncs.holder[syncs.first[b] : syncs.first[b + 1]]
    n = members_of(wires, len(devices))
    ready, done = np.empty(len(devices), np.int32), np.empty(len(devices), np.int32)
    owner = -1
    for i in range(len(devices)):
        ready[i] = task(out, -1, 0.0, 0.0, -1, GATE, b, 0)
        last = -1
        for k in range(syncs.first_block[b], syncs.first_block[b + 1]):
            s = stage_at(shape.first, syncs.block[k])
            for q in range(shape.replicas[s], shape.replicas[s + 1]):
                if shape.device[q] == holders[i] and state.fresh[q] != last:
                    last = state.fresh[q]
                    owner = runs.of[q]
                    edge(out, last, ready[i])
    steps_of_ring(out, wires, devices, ready, done, syncs.bytes[b] / n, syncs.segments[b], n - 1, 0, LOADING, owner)
