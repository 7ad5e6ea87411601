"""From a pipeline in numbers to tasks: what every device computes and sends in one step.

Computing: one task for each forward or backward of a run on a slice of a micro-batch, chained in the device's order.
The last backward of a run is cut where buckets become final, so that their syncs overlap the rest of it. Where weights
stream in (state `sharded-all`, spill `all`) every forward and backward is cut so, and each part waits for its weights,
of which one set is fetched ahead.

Sending: messages between runs by intersection of their samples; syncs (`cost.collectives`); then one update a device.
By `factors` every participant redoes the others' part of a micro-batch's product as soon as it has their factors.
A sync of replicated state whose time was measured is one task of that length, and sends nothing.

State `sharded-optimizer`: a participant updates its piece of a bucket only. A ring then stops after n - 1 rounds, when
each has the sum of its piece, if all that the bucket holds is so sharded; however the gradient came, the new weights go
around the ring in n - 1 rounds once they are there (updated and, where spilled, loaded).

Tasks that become ready together on one lane go in the order they are written in: computing device by device,
activations and then gradients (by micro-batch, receiving run, sending stage, slices), updates, gathering, syncs (by
factors: products participant by participant, then messages), each followed by the gathering of its new weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled, inlined, lean
from isthmus.cost.collectives import server, spread, steps_of_ring, tree
from isthmus.cost.emit import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    GATE,
    GRADIENT,
    HOST_UPDATE,
    LOADING,
    REBUILD,
    STORING,
    SYNCING,
    UPDATE,
    TaskList,
    edge,
    message,
    task,
)
from isthmus.cost.network import COMPUTE, LANE_KINDS, LOAD, SEND, STORE, SYNC, Wires
from isthmus.plan.schedule import Edges, Orders, Runs, Shape, stage_at

__all__ = [
    "FACTORS",
    "GATHERED",
    "REGATHERED",
    "RESIDENT",
    "SCATTERED",
    "STREAMED",
    "WHOLE",
    "Costs",
    "Syncs",
    "lower",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RESIDENT, GATHERED, STREAMED = 0, 1, 2  # Shape.stream: weights stay; come from the other replicas; come over the bus
RING, TREE, SERVER, FACTORS, DUPLICATE = 0, 1, 2, 3, 4  # Syncs.how; sparse is a ring of fewer bytes
# Syncs.layout: everybody updates all of the bucket; some update a piece and gather the rest; all do
WHOLE, REGATHERED, SCATTERED = 0, 1, 2


class Costs(NamedTuple):
    """Seconds and bytes of the pipeline's blocks."""

    times: Floats  # [rows, 2, blocks + 1]: sums of forward and backward seconds, for a number of samples
    row: Ints  # [replicas, 2]: of its smaller and of its larger slices
    recompute: Bools  # [stages]
    weight_bytes: Floats  # [2, blocks + 1]: sums of weight (or gradient) bytes, and of those that groups divide
    stage_bytes: Floats  # [replicas]: the same of its whole stage on each device, ties counted once
    update_seconds: Floats  # [replicas]: of its stage's parameters, on the device or (spilled) on the host
    spill: Ints  # [stages]: 0 none, 1 optimizer, 2 all


class Syncs(NamedTuple):
    """Buckets."""

    how: Ints
    layout: Ints
    bytes: Floats
    segments: Ints
    root: Ints
    first: Ints  # [syncs + 1] participants of sync b are device[first[b]:first[b + 1]]
    device: Ints  # that sends its part
    holder: Ints  # first device of its replica: that computes the gradients
    first_block: Ints  # [syncs + 1] blocks that hold its parameters
    block: Ints
    measured: Floats  # seconds of the whole sync, as measured; below 0: its messages are played
    factor_bytes: Floats  # per sample: inputs and output gradients (factors only)
    rebuild_flops: Floats  # per sample: the weight gradient's product (factors only)
    rebuild_rate: Floats  # [replicas] FLOP/s


class _State(NamedTuple):
    """What has been written so far."""

    times: Floats  # [runs, 2, 2, blocks + 1]
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
    update: Ints  # [devices] its update
    fresh: Ints  # [replicas] the task after which its stage's new weights are there


@compiled
def lower(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, forward: Edges, backward: Edges, orders: Orders,
    costs: Costs, syncs: Syncs, micro_batches: int,
) -> None:  # fmt: skip
    """Write all tasks of one step of one pipeline."""
    state = new_state(shape, runs, syncs, len(wires.host_of), costs, micro_batches)
    for d in range(len(wires.host_of)):
        for i in range(orders.first[d], orders.first[d + 1]):
            operation(out, wires, shape, runs, costs, state, orders.run[i], orders.micro_batch[i], orders.backward[i],
                      micro_batches)  # fmt: skip
    between_runs(out, wires, runs, forward, state, micro_batches, False)
    between_runs(out, wires, runs, backward, state, micro_batches, True)
    updates(out, wires, shape, runs, costs, state)
    gathers(out, wires, shape, runs, costs, state, micro_batches)
    for b in range(len(syncs.how)):
        sync(out, wires, shape, runs, syncs, state, b, micro_batches)
        if syncs.layout[b] != WHOLE and syncs.how[b] != DUPLICATE:
            new_weights(out, wires, shape, runs, syncs, state, b)


@compiled
def new_state(shape: Shape, runs: Runs, syncs: Syncs, devices: int, costs: Costs, micro_batches: int) -> _State:
    """Nothing written; the places where operations are cut are marked."""
    n_runs, blocks = len(runs.device), int(shape.last[-1]) + 1
    base = np.zeros(n_runs, np.int32)
    for u in range(1, n_runs):
        base[u] = base[u - 1] + micro_batches * runs.slices[u - 1]
    operations = base[-1] + micro_batches * runs.slices[-1]
    cut = np.zeros((n_runs, blocks), np.bool_)
    streams = False
    for u in range(n_runs):
        for s in range(runs.first[u], runs.last[u] + 1):
            if shape.stream[s] != RESIDENT:
                streams = True
                cut[u, shape.first[s]] = True
                if shape.stream[s] == STREAMED:
                    cut[u, shape.first[s] : shape.last[s] + 1] = True
        cut[u, shape.first[runs.first[u]]] = True
    state = _State(
        run_times(shape, runs, costs), base,
        np.full((2, operations), -1, np.int32), np.full((2, operations), -1, np.int32),
        np.full((n_runs, blocks), -1, np.int32), cut,
        np.full((2, operations if streams else 0, blocks), -1, np.int32),
        np.full((2, operations if streams else 0, blocks), -1, np.int32),
        np.full((n_runs, blocks), -1, np.int32),
        np.full(devices, -1, np.int32), np.full((devices, 2), -1, np.int32), np.full(devices, -1, np.int32),
        np.full(len(shape.device), -1, np.int32),
    )  # fmt: skip
    lowest = np.empty(n_runs, np.int32)
    for b in range(len(syncs.how)):
        if syncs.how[b] != DUPLICATE:
            for i in range(syncs.first[b], syncs.first[b + 1]):
                lowest_blocks(shape, runs, syncs, b, syncs.holder[i], lowest)
                for u in range(n_runs):
                    if lowest[u] >= 0:
                        cut[u, lowest[u]] = True
    return state


@inlined
def lowest_blocks(shape: Shape, runs: Runs, syncs: Syncs, b: int, device: int, lowest: Ints) -> None:
    """For each run on the device, its lowest block that holds a parameter of bucket b (-1: none)."""
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


@inlined
def samples_of(runs: Runs, u: int, k: int) -> Any:
    """The samples [lo, hi) of slice k of run u."""
    share = runs.hi[u] - runs.lo[u]
    return runs.lo[u] + share * k // runs.slices[u], runs.lo[u] + share * (k + 1) // runs.slices[u]


@compiled
def run_times(shape: Shape, runs: Runs, costs: Costs) -> Floats:
    """[runs, slice size, direction, blocks + 1]: sums of seconds over a run's blocks; backward with recomputing."""
    blocks = costs.times.shape[2]
    sums = np.zeros((len(runs.device), 2, 2, blocks))
    for u in range(len(runs.device)):
        for large in range(2):
            times = costs.times[costs.row[runs.replica[u], large]]
            for s in range(runs.first[u], runs.last[u] + 1):
                for b in range(shape.first[s], shape.last[s] + 1):
                    forward = times[0, b + 1] - times[0, b]
                    again = forward if costs.recompute[s] else 0.0
                    sums[u, large, 0, b + 1] = sums[u, large, 0, b] + forward
                    sums[u, large, 1, b + 1] = sums[u, large, 1, b] + times[1, b + 1] - times[1, b] + again
    return sums


@inlined
def seconds_of(runs: Runs, state: _State, u: int, low: int, high: int, samples: int, which: int) -> float:
    """Time of blocks low .. high - 1 of run u, forward (0) or backward (1), on a slice of so many samples."""
    large = 1 if samples > (runs.hi[u] - runs.lo[u]) // runs.slices[u] else 0
    return float(state.times[u, large, which, high] - state.times[u, large, which, low])


@inlined
def bytes_of(costs: Costs, low: int, high: int, degree: int) -> float:
    """Weights of blocks low .. high - 1 on each device of a tensor group."""
    whole = costs.weight_bytes[0, high] - costs.weight_bytes[0, low]
    return float(whole - (costs.weight_bytes[1, high] - costs.weight_bytes[1, low]) * (1.0 - 1.0 / degree))


@inlined
def operation(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, costs: Costs, state: _State, u: int, m: int, back: bool,
    micro_batches: int,
) -> None:  # fmt: skip
    """One forward or backward of run u on micro-batch m, slice by slice, cut into parts where needed."""
    d = runs.device[u]
    kind = BACKWARD if back else FORWARD
    which = 1 if back else 0
    bottom, top = shape.first[runs.first[u]], shape.last[runs.last[u]] + 1
    stream = shape.stream[runs.first[u]]
    for k in range(runs.slices[u]):
        lo, hi = samples_of(runs, u, k)
        op = state.base[u] + m * runs.slices[u] + k
        final = back and m == micro_batches - 1 and k == runs.slices[u] - 1
        if not final and stream == RESIDENT:
            t = task(out, COMPUTE + d, seconds_of(runs, state, u, bottom, top, hi - lo, which), 0.0, -1, kind, u, m)
            edge(out, state.last[d], t)
            state.last[d] = state.begin[which, op] = state.finish[which, op] = t
            continue
        at = top if back else bottom
        while (at > bottom) if back else (at < top):
            low, high = at, at + 1
            if back:
                low, high = at - 1, at
                while not state.cut[u, low]:
                    low -= 1
            else:
                while high < top and not state.cut[u, high]:
                    high += 1
            t = task(out, COMPUTE + d, seconds_of(runs, state, u, low, high, hi - lo, which), 0.0, -1, kind, u, m)
            edge(out, state.last[d], t)
            state.last[d] = t
            if state.begin[which, op] < 0:
                state.begin[which, op] = t
            if final:
                state.final[u, low:high] = t
            if stream != RESIDENT:
                size = bytes_of(costs, low, high, shape.size[runs.replica[u]])
                weights(out, wires, state, u, d, m, op, low, t, which, stream, size)
            at = low if back else high
        state.finish[which, op] = state.last[d]


@inlined
def weights(
    out: TaskList, wires: Wires, state: _State, u: int, d: int, m: int, op: int, low: int, t: int, which: int,
    stream: int, size: float,
) -> None:  # fmt: skip
    """The weights that part t needs: over the bus at once, or gathered later (`gathers`); gradients go back out."""
    devices = len(wires.host_of)
    if stream == STREAMED:
        load = task(out, LOAD * devices + d, 0.0, size, wires.bus[0, d], LOADING, u, m)
        edge(out, state.recent[d, 0], load)
        edge(out, load, t)
        if which == 1:
            state.stored[u, low] = task(out, STORE * devices + d, 0.0, size, wires.bus[1, d], STORING, u, m)
            edge(out, t, state.stored[u, low])
    else:
        gate = task(out, -1, 0.0, 0.0, -1, GATE, u, m)
        edge(out, state.recent[d, 0], gate)
        state.gate[which, op, low] = gate
        state.part[which, op, low] = t
    state.recent[d, 0] = state.recent[d, 1]
    state.recent[d, 1] = t


@lean
def between_runs(
    out: TaskList, wires: Wires, runs: Runs, edges: Edges, state: _State, micro_batches: int, back: bool
) -> None:
    """Messages from run to run: for each pair of slices, the samples that both have."""
    which = 1 if back else 0
    kind = GRADIENT if back else ACTIVATION
    lanes = SEND * len(wires.host_of)
    for m in range(micro_batches):
        for e in range(len(edges.source)):
            u, v = edges.source[e], edges.target[e]
            for k in range(runs.slices[u]):
                lo, hi = samples_of(runs, u, k)
                for j in range(runs.slices[v]):
                    low, high = samples_of(runs, v, j)
                    both = min(hi, high) - max(lo, low)
                    if both <= 0:
                        continue
                    done = state.finish[which, state.base[u] + m * runs.slices[u] + k]
                    size = both * edges.per_sample[e] + edges.fixed[e]
                    got = message(
                        out, wires, done, -1, lanes + runs.device[u], runs.device[u], runs.device[v], size, kind, u, m
                    )
                    edge(out, got, state.begin[which, state.base[v] + m * runs.slices[v] + j])


@compiled
def updates(out: TaskList, wires: Wires, shape: Shape, runs: Runs, costs: Costs, state: _State) -> None:
    """One update a device after all it computes; a spilled optimizer's gradients go out and its weights come in."""
    devices = len(wires.host_of)
    for d in range(devices):
        if state.last[d] < 0:
            continue
        here = 0.0
        for q in range(len(shape.device)):
            if shape.device[q] == d and costs.spill[shape.stage[q]] == 0:
                here += costs.update_seconds[q]
        state.update[d] = task(out, COMPUTE + d, here, 0.0, -1, UPDATE, -1, 0)
        edge(out, state.last[d], state.update[d])
        for q in range(len(shape.device)):
            s = shape.stage[q]
            if shape.device[q] != d:
                continue
            done = state.fresh[q] = state.update[d]
            if costs.spill[s] == 0:
                continue
            size = costs.stage_bytes[q]
            if costs.spill[s] == 1:
                done = task(out, STORE * devices + d, 0.0, size, wires.bus[1, d], STORING, runs.of[q], 0)
                edge(out, state.update[d], done)
            lane = LANE_KINDS * devices + wires.host_of[d]
            host = task(out, lane, costs.update_seconds[q], 0.0, -1, HOST_UPDATE, runs.of[q], 0)
            edge(out, done, host)
            state.fresh[q] = host
            if shape.stream[s] == STREAMED:  # stores leave in order: the lowest block's is the last
                edge(out, state.stored[runs.of[q], shape.first[s]], host)
            if costs.spill[s] == 1:
                state.fresh[q] = task(out, LOAD * devices + d, 0.0, size, wires.bus[0, d], LOADING, runs.of[q], 0)
                edge(out, host, state.fresh[q])


@compiled
def gathers(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, costs: Costs, state: _State, micro_batches: int
) -> None:
    """State `sharded-all`: before each part its replicas gather the weights, each sending its piece around the ring."""
    for s in range(len(shape.first)):
        if shape.stream[s] != GATHERED:
            continue
        a, n = shape.replicas[s], shape.replicas[s + 1] - shape.replicas[s]
        ready, done = np.empty(n, np.int32), np.empty(n, np.int32)
        slices = shape.slices[a]
        for which in range(2):
            for piece in range(micro_batches * slices):
                low = shape.first[s]
                while low <= shape.last[s]:
                    high = low + 1
                    while high <= shape.last[s] and not state.cut[runs.of[a], high]:
                        high += 1
                    for i in range(n):
                        ready[i] = state.gate[which, state.base[runs.of[a + i]] + piece, low]
                    size = bytes_of(costs, low, high, shape.size[a])
                    steps_of_ring(out, wires, shape.device[a : a + n], ready, done, size, n - 1, LOADING, runs.of[a])
                    for i in range(n):
                        edge(out, done[i], state.part[which, state.base[runs.of[a + i]] + piece, low])
                    low = high


@compiled
def sync(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: _State, b: int, micro_batches: int
) -> None:
    """One bucket becomes equal on its participants; their updates wait for it."""
    how = syncs.how[b]
    if how == DUPLICATE:
        return
    devices = syncs.device[syncs.first[b] : syncs.first[b + 1]]
    holders = syncs.holder[syncs.first[b] : syncs.first[b + 1]]
    n = len(devices)
    ready, done = np.empty(n, np.int32), np.empty(n, np.int32)
    if how == FACTORS:
        factors(out, wires, shape, runs, syncs, state, b, devices, holders, micro_batches)
        return
    if syncs.measured[b] >= 0.0:
        measured_sync(out, wires, shape, runs, syncs, state, b, devices, holders)
        return
    s = stage_at(shape.first, syncs.block[syncs.first_block[b]])
    sharded = shape.stream[s] == GATHERED
    pieces = micro_batches * shape.slices[shape.replicas[s]] if sharded else 1
    rounds = (n - 1) * (1 if sharded or syncs.layout[b] == SCATTERED else 2)
    for piece in range(pieces):
        final_tasks(out, shape, runs, syncs, state, b, holders, ready, piece if sharded else -1)
        for _ in range(syncs.segments[b]):
            size = syncs.bytes[b] / syncs.segments[b]
            if how == SERVER:
                server(out, wires, devices, ready, done, size, syncs.root[b], b)
            elif how == TREE:
                tree(out, wires, devices, ready, done, size, b)
            else:
                steps_of_ring(out, wires, devices, ready, done, size, rounds, SYNCING, b)
            for i in range(n):
                edge(out, done[i], state.update[holders[i]])


@compiled
def measured_sync(
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: _State, b: int, devices: Ints,
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
        edge(out, t, state.update[holders[i]])


@compiled
def final_tasks(
    out: TaskList, shape: Shape, runs: Runs, syncs: Syncs, state: _State, b: int, holders: Ints, ready: Ints, piece: int
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
    out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: _State, b: int, devices: Ints,
    holders: Ints, micro_batches: int,
) -> None:  # fmt: skip
    """Every participant sends its factors after each backward; of each micro-batch it rebuilds the others' part."""
    n = len(devices)
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
        others = total - (runs.hi[run[i]] - runs.lo[run[i]])
        seconds = others * syncs.rebuild_flops[b] / syncs.rebuild_rate[runs.replica[run[i]]]
        for m in range(micro_batches):
            got[m, i] = task(out, COMPUTE + devices[i], seconds, 0.0, -1, REBUILD, b, m)
            edge(out, got[m, i], state.update[holders[i]])
    for i in range(n):
        u = run[i]
        for piece in range(micro_batches * runs.slices[u]):
            lo, hi = samples_of(runs, u, piece % runs.slices[u])
            size = (hi - lo) * syncs.factor_bytes[b]
            done = state.finish[1, state.base[u] + piece]
            spread(out, wires, devices, i, done, size, got[piece // runs.slices[u]], b)


@compiled
def new_weights(out: TaskList, wires: Wires, shape: Shape, runs: Runs, syncs: Syncs, state: _State, b: int) -> None:
    """Each participant's piece of bucket b's new weights goes around the ring, once it is there."""
    devices = syncs.device[syncs.first[b] : syncs.first[b + 1]]
    holders = syncs.holder[syncs.first[b] : syncs.first[b + 1]]
    n = len(devices)
    ready, done = np.empty(n, np.int32), np.empty(n, np.int32)
    owner = -1
    for i in range(n):
        ready[i] = task(out, -1, 0.0, 0.0, -1, GATE, b, 0)
        last = -1
        for k in range(syncs.first_block[b], syncs.first_block[b + 1]):
            s = stage_at(shape.first, syncs.block[k])
            for q in range(shape.replicas[s], shape.replicas[s + 1]):
                if shape.device[q] == holders[i] and state.fresh[q] != last:
                    last = state.fresh[q]
                    owner = runs.of[q]
                    edge(out, last, ready[i])
    for _ in range(syncs.segments[b]):
        size = syncs.bytes[b] / syncs.segments[b]
        steps_of_ring(out, wires, devices, ready, done, size, n - 1, LOADING, owner)
