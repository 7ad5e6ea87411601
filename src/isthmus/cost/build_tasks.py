"""The tasks of one step of a pipeline: what every device computes and sends.

*Computing.* Each forward or backward of a run on a slice of a micro-batch is one task, and the tasks of a device are
chained in the device's order. The last backward of a run is cut where buckets become final, so that their syncs
overlap the rest of it. Where weights stream in (state `sharded-all`, spill `all`) every forward and backward is cut in
this way. Each part then waits for its weights, and one set of weights is prefetched. With `sharded-all` every replica
has a piece of the weights: a replica that is about to need them asks all others, and each of those sends its piece at
once, whatever it is doing itself.

*Sending.* Stage runs (`plan.schedule`) send each other the samples that they have in common, and buckets are
synchronised (`cost.bucket_tasks`). When the syncs of a device are done and the totals are known (`cost.total_tasks`),
it does one update.

Tasks that become ready together on one lane go in the order in which they are written: computing, device by device;
activations and then gradients (by micro-batch, receiving run, sending stage and slices); updates; totals (counts to
the leader, counts from it, and then for each device what it tells the leader and what it is told); gathering (by
stage, direction, slice, part, receiver and sender); and syncs (with factors first the products, participant by
participant, and then the messages), each followed by the gathering of its new weights.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled, inlined, lean
from isthmus.cost.bucket_tasks import new_weights, sync
from isthmus.cost.network import (
    ACTION,
    COMPUTE,
    LANE_KINDS,
    LOAD,
    STEP,
    STORE,
    SYNC,
    WIDE,
    Wires,
    by_way,
    flows_of,
    latency_between,
)
from isthmus.cost.task_list import (
    ACTIVATION,
    BACKWARD,
    FORWARD,
    GATE,
    GRADIENT,
    HOST_UPDATE,
    LOADING,
    STORING,
    UPDATE,
    TaskList,
    beside,
    edge,
    message,
    task,
)
from isthmus.cost.task_types import (
    DUPLICATE,
    GATHERED,
    RESIDENT,
    STREAMED,
    WHOLE,
    Costs,
    State,
    Syncs,
    lowest_blocks,
    samples_of,
)
from isthmus.cost.total_tasks import totals
from isthmus.plan.schedule import Edges, Orders, Shape, StageRuns, stage_at

__all__ = ["lower"]

Floats = npt.NDArray[np.float64]


@compiled
def lower(
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, forward: Edges, backward: Edges, orders: Orders,
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
    totals(out, wires, shape, runs, costs, state, micro_batches)
    gathers(out, wires, shape, runs, costs, state, micro_batches)
    for b in range(len(syncs.how)):
        sync(out, wires, shape, runs, syncs, state, b, micro_batches)
        if syncs.layout[b] != WHOLE and syncs.how[b] != DUPLICATE:
            new_weights(out, wires, shape, runs, syncs, state, b)


@compiled
def new_state(shape: Shape, runs: StageRuns, syncs: Syncs, devices: int, costs: Costs, micro_batches: int) -> State:
    """Return a state in which nothing is written and the places where operations are cut are marked."""
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
    state = State(
        run_times(shape, runs, costs), base,
        np.full((2, operations), -1, np.int32), np.full((2, operations), -1, np.int32),
        np.full((n_runs, blocks), -1, np.int32), cut,
        np.full((2, operations if streams else 0, blocks), -1, np.int32),
        np.full((2, operations if streams else 0, blocks), -1, np.int32),
        np.full((n_runs, blocks), -1, np.int32),
        np.full(devices, -1, np.int32), np.full((devices, 2), -1, np.int32), np.full(devices, -1, np.int32),
        np.full((devices, 2, 2), -1, np.int32), np.full((operations if streams else 0, blocks), -1, np.int32),
        np.full(devices, -1, np.int32), np.full(devices, -1, np.int32), np.full(len(shape.device), -1, np.int32),
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


@compiled
def run_times(shape: Shape, runs: StageRuns, costs: Costs) -> Floats:
    """Return cumulative seconds over a run's blocks, [runs, slice size, direction, blocks + 1].

    The seconds of a backward include recomputation.
    """
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
def seconds_of(runs: StageRuns, state: State, u: int, low: int, high: int, samples: int, which: int) -> float:
    """Return the seconds of blocks low .. high - 1 of run u, forward (0) or backward (1), on a slice of `samples`."""
    large = 1 if samples > (runs.hi[u] - runs.lo[u]) // runs.slices[u] else 0
    return float(state.times[u, large, which, high] - state.times[u, large, which, low])


@inlined
def bytes_of(costs: Costs, low: int, high: int, degree: int) -> float:
    """Return the bytes of the weights of blocks low .. high - 1 on each device of a tensor group."""
    whole = costs.weight_bytes[0, high] - costs.weight_bytes[0, low]
    return float(whole - (costs.weight_bytes[1, high] - costs.weight_bytes[1, low]) * (1.0 - 1.0 / degree))


@inlined
def operation(
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, costs: Costs, state: State, u: int, m: int, back: bool,
    micro_batches: int,
) -> None:  # fmt: skip
    """Write one forward or backward of run u on micro-batch m, slice by slice, cut into parts where needed."""
    d = runs.device[u]
    kind = BACKWARD if back else FORWARD
    which = 1 if back else 0
    bottom, top = shape.first[runs.first[u]], shape.last[runs.last[u]] + 1
    stream = shape.stream[runs.first[u]]
    for k in range(runs.slices[u]):
        lo, hi = samples_of(runs, u, k)
        op = state.base[u] + m * runs.slices[u] + k
        final = back and m == micro_batches - 1 and k == runs.slices[u] - 1
        around = wires.overheads[ACTION, d]
        if not final and stream == RESIDENT:
            seconds = seconds_of(runs, state, u, bottom, top, hi - lo, which) + around
            t = task(out, COMPUTE + d, seconds, 0.0, -1, kind, u, m)
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
            seconds = seconds_of(runs, state, u, low, high, hi - lo, which) + around
            t = task(out, COMPUTE + d, seconds, 0.0, -1, kind, u, m)
            around = 0.0  # counts once, however many parts there are
            edge(out, state.last[d], t)
            state.last[d] = t
            if state.begin[which, op] < 0:
                state.begin[which, op] = t
            if final:
                state.final[u, low:high] = t
            if stream != RESIDENT:
                size = bytes_of(costs, low, high, shape.size[runs.replica[u]])
                if stream == STREAMED:
                    loaded(out, wires, state, u, d, m, low, t, which, size)
                elif size > 0.0:
                    asked(out, wires, shape, state, u, d, m, op, low, t, which)
            at = low if back else high
        state.finish[which, op] = state.last[d]


@inlined
def loaded(
    out: TaskList, wires: Wires, state: State, u: int, d: int, m: int, low: int, t: int, which: int, size: float
) -> None:
    """Load the weights of part t over the bus while the part before computes; after a backward, store its gradients."""
    devices = len(wires.host_of)
    load = task(out, LOAD * devices + d, 0.0, size, wires.bus[0, d], LOADING, u, m)
    edge(out, state.recent[d, 0], load)
    edge(out, load, t)
    if which == 1:
        state.stored[u, low] = task(out, STORE * devices + d, 0.0, size, wires.bus[1, d], STORING, u, m)
        edge(out, t, state.stored[u, low])
    state.recent[d, 0], state.recent[d, 1] = state.recent[d, 1], t


@inlined
def asked(
    out: TaskList, wires: Wires, shape: Shape, state: State, u: int, d: int, m: int, op: int, low: int, t: int,
    which: int,
) -> None:  # fmt: skip
    """Ask for the weights of part t while the part before computes, unless that part has them; `gathers` sends them.

    A replica that is asked knows of it after one latency; here all know when the farthest one does. A backward part
    also needs memory for its gradients. Those of the part before may still be on their way to be summed, but those of
    the part before that must have been summed; and so must those of the part before, if they are of the same blocks.
    """
    if low != state.held[d]:
        s = stage_at(shape.first, low)
        farthest = 0.0
        for q in range(shape.replicas[s], shape.replicas[s + 1]):
            farthest = max(farthest, latency_between(wires, d, shape.device[q]))
        gate = task(out, -1, farthest, 0.0, -1, GATE, u, m)
        edge(out, state.recent[d, 0], gate)
        state.gate[which, op, low] = gate
    state.held[d] = low
    state.recent[d, 0], state.recent[d, 1] = state.recent[d, 1], t
    state.part[which, op, low] = t
    if which == 1:
        behind = state.behind[d]
        if behind[1, 0] >= 0 and behind[1, 1] == low:
            state.room[behind[1, 0], low] = t
        if behind[0, 0] >= 0 and state.room[behind[0, 0], behind[0, 1]] < 0:
            state.room[behind[0, 0], behind[0, 1]] = t
        behind[0, 0], behind[0, 1] = behind[1, 0], behind[1, 1]
        behind[1, 0], behind[1, 1] = op, low


@lean
def between_runs(
    out: TaskList, wires: Wires, runs: StageRuns, edges: Edges, state: State, micro_batches: int, back: bool
) -> None:
    """Write the messages from run to run, one for each pair of slices that have samples in common.

    Receivers are always ready for them. Messages to one run leave in order, and messages to different runs leave at the
    same time.
    """
    which = 1 if back else 0
    kind = GRADIENT if back else ACTIVATION
    lanes = out.size[4]
    out.size[4] += len(edges.source)
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
                        out, wires, done, -1, lanes + e, runs.device[u], runs.device[v], size, 0.0, kind, u, m,
                    )  # fmt: skip
                    edge(out, got, state.begin[which, state.base[v] + m * runs.slices[v] + j])


@compiled
def updates(out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, costs: Costs, state: State) -> None:
    """Write one update for each device, after everything that it computes.

    The gradients of a spilled optimizer go out to the host, and its new weights come in.
    """
    devices = len(wires.host_of)
    for d in range(devices):
        if state.last[d] < 0:
            continue
        here = wires.overheads[STEP, d]
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
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, costs: Costs, state: State, micro_batches: int
) -> None:
    """Write, for state `sharded-all`, the messages that bring every replica the others' pieces of its weights.

    They come before each part, all at once. The first device of a tensor group stands for the others.
    """
    lanes, wide = SYNC * len(wires.host_of), by_way(wires, WIDE)
    for s in range(len(shape.first)):
        if shape.stream[s] != GATHERED:
            continue
        a, n = shape.replicas[s], shape.replicas[s + 1] - shape.replicas[s]
        slices, together = shape.slices[a], senders(wires, shape, s)
        members = float(shape.size[a])  # of a tensor group: each gets its own piece, between hosts over the same links
        for which in range(2):
            for piece in range(micro_batches * slices):
                low = shape.first[s]
                while low <= shape.last[s]:
                    high = low + 1
                    while high <= shape.last[s] and not state.cut[runs.of[a], high]:
                        high += 1
                    size = bytes_of(costs, low, high, shape.size[a]) / (n * wires.stands)
                    for j in range(a, a + n):
                        op, here = state.base[runs.of[j]] + piece, shape.device[j]
                        for i in range(a, a + n):
                            there = shape.device[i]
                            near = wires.host_of[here] == wires.host_of[there]
                            pieces = 1.0 if near else members * together[i - a] * flows_of(wires, there, here)
                            if i != j and pieces > 0.0 and state.gate[which, op, low] >= 0:
                                lane = beside(lanes + there)
                                got = message(
                                    out, wide, state.gate[which, op, low], -1, lane, there, here, size * pieces, 0.0,
                                    LOADING, runs.of[j], piece // slices,
                                )  # fmt: skip
                                edge(out, got, state.part[which, op, low])
                    low = high


@compiled
def senders(wires: Wires, shape: Shape, s: int) -> Floats:
    """Return the number of pieces that each replica of a stage sends to other hosts at once.

    That is one, its own. In a folded plan the first replica of each host sends the pieces of all replicas of the host,
    because they pass the same links.
    """
    a, b = shape.replicas[s], shape.replicas[s + 1]
    together = np.ones(b - a)
    for i in range(a, b if wires.stands != 1.0 else a):
        for first in range(a, i):
            if wires.host_of[shape.device[first]] == wires.host_of[shape.device[i]]:
                together[first - a] += 1.0
                together[i - a] = 0.0
                break
    return together
