"""Buckets that become equal on their participants, as tasks: when each may start, and who waits for it.

By `factors` every participant redoes the others' part of a micro-batch's product as soon as it has their factors. A
sync of replicated state whose time was measured is one task of that length, and sends nothing.

State `sharded-optimizer`: a participant updates its piece of a bucket only. A ring then stops after n - 1 rounds, when
each has the sum of its piece, if all that the bucket holds is so sharded; however the gradient came, the new weights go
around the ring in n - 1 rounds once they are there (updated and, where spilled, loaded).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.cost.collectives import all_reduce, server, spread, steps_of_ring, tree
from isthmus.cost.columns import (
    DUPLICATE,
    FACTORS,
    GATHERED,
    SCATTERED,
    SERVER,
    TREE,
    State,
    Syncs,
    lowest_blocks,
    samples_of,
)
from isthmus.cost.emit import GATE, LOADING, REBUILD, SYNCING, TaskList, edge, task
from isthmus.cost.network import COMPUTE, SYNC, WIDE, Wires, by_way, members_of
from isthmus.plan.schedule import Runs, Shape, stage_at

__all__ = ["new_weights", "sync"]

Ints = npt.NDArray[np.int32]


@compiled
def sync(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int, micro_batches: int
) -> None:
    """One bucket becomes equal on its participants; their updates wait for it."""
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
    if syncs.measured[b] >= 0.0:
        measured_sync(out, wires, shape, runs, syncs, state, b, devices, holders)
        return
    s = stage_at(shape.first, syncs.block[syncs.first_block[b]])
    sharded = shape.stream[s] == GATHERED
    pieces = micro_batches * shape.slices[shape.replicas[s]] if sharded else 1
    whole, planned = syncs.bytes[b], syncs.segments[b]
    for piece in range(pieces):
        final_tasks(out, shape, runs, syncs, state, b, holders, ready, piece if sharded else -1)
        if how == SERVER:
            server(out, wires, devices, ready, done, whole, planned, syncs.root[b], b)
        elif how == TREE:
            tree(out, wires, devices, ready, done, whole, planned, b)
        elif sharded or syncs.layout[b] == SCATTERED:
            steps_of_ring(out, wires, devices, ready, done, whole / n, planned, n - 1, n - 1, SYNCING, b)
        else:
            all_reduce(out, wires, devices, ready, done, whole, planned, b)
        for i in range(len(devices)):
            edge(out, done[i], state.settled[holders[i]])
            if sharded:
                room(out, shape, runs, syncs, state, b, holders[i], piece, done[i])


@compiled
def room(
    out: TaskList, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int, holder: int, piece: int, done: int
) -> None:
    """State `sharded-all`: when gradients have been summed, the room they had is another's."""
    lowest = np.empty(len(runs.device), np.int32)
    lowest_blocks(shape, runs, syncs, b, holder, lowest)
    for u in range(len(lowest)):
        if lowest[u] >= 0:
            edge(out, done, state.room[state.base[u] + piece, lowest[u]])


@compiled
def measured_sync(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int, devices: Ints,
    holders: Ints,
) -> None:  # fmt: skip
    """One task for all of a sync, once all participants are ready; it sends nothing.

    It holds the sync lane of its lowest device, so that the measured syncs of one set of participants take turns.
    """
    ready = np.empty(len(devices), np.int32)
    final_tasks(out, shape, runs, syncs, state, b, holders, ready, -1)
    lane = SYNC * len(wires.host_of) + devices.min()
    t = task(out, lane, syncs.measured[b], 0.0, -1, SYNCING, b, 0)
    for i in range(len(devices)):
        edge(out, ready[i], t)
        edge(out, t, state.settled[holders[i]])


@compiled
def final_tasks(
    out: TaskList, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int, holders: Ints, ready: Ints, piece: int
) -> None:
    """For each participant the task after which its gradients of bucket b are final (of one piece, where sharded)."""
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
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int, devices: Ints,
    holders: Ints, micro_batches: int,
) -> None:  # fmt: skip
    """Every participant sends its factors after each backward; of each micro-batch it rebuilds the others' part."""
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
def new_weights(out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: State, b: int) -> None:
    """Each participant's piece of bucket b's new weights goes around the ring, once it is there."""
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
