"""Who computes what in which order: stages merged into stage runs, messages between them, and each device's order.

*Stage runs.* Neighbouring stages on one device that handle the same samples are computed as one, with no transfer.
They form a stage run (below: a run).

*Edges.* A replica gets every sample of its interval from exactly one replica of each stage that feeds it. That is the
replica whose interval has the sample or, if the sender is a duplicate stage (every replica has all samples), the
nearest one (same device, host, region; equally near ones take turns). Activations flow forwards in this way, and
gradients backwards.

*Order.* The pipeline is played in ticks. Every run takes its micro-batches in order, every forward or backward takes
one tick, and in each tick each device takes one operation that is ready:

- `fill-drain`: a forward if it has any left, and backwards only after its last forward;
- `1f1b`: a backward if one is ready, and else a forward, as long as the run has fewer micro-batches in flight than its
  depth (the runs from it to the end, itself included) plus `ahead` for each far edge on the way. What passes a far edge
  arrives `ahead` ticks later, so that the runs before it go on with forwards meanwhile. An edge is far if it leaves a
  region or, in pipelines of one region, a host;
- `interleaved`: the same without that limit.

Among several forwards the deepest run (the last by number) goes first, and among backwards the earliest micro-batch
(then the first run). An order that was played cannot deadlock. If an `interleaved` pipeline is regular, and Megatron's
order for it can be played to its end, it gets that order, whose bubble is v times smaller than 1f1b's. It is regular if
every device has v runs, p runs apart, and p divides the micro-batches. Forwards then go in groups of p micro-batches
through the device's runs, and backwards go in the same groups through its runs from the last one. After
2(p - rank - 1) + (v - 1)p forwards, forwards and backwards alternate.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.errors import PlanError

__all__ = [
    "SCHEDULES",
    "Edges",
    "Orders",
    "Shape",
    "StageRuns",
    "make_orders",
    "merge_stages",
    "parse_orders",
    "render_orders",
    "run_edges",
    "stage_at",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SCHEDULES = {"fill-drain": 0, "1f1b": 1, "interleaved": 2}


class Shape(NamedTuple):
    """The form of one pipeline in numbers: stages in order, their replicas stage by stage."""

    first: Ints  # [stages] first block
    last: Ints  # [stages] last block
    duplicate: Bools  # [stages]
    stream: Ints  # [stages] where weights come from: stages that differ in it do not merge
    replicas: Ints  # [stages + 1] replicas of stage s are replicas[s]:replicas[s + 1]
    stage: Ints  # [replicas]
    device: Ints  # [replicas] first device
    size: Ints  # [replicas] devices of the tensor group
    lo: Ints  # [replicas] samples of each micro-batch
    hi: Ints
    slices: Ints
    host_of: Ints  # [devices of the cluster]
    region_of: Ints


class StageRuns(NamedTuple):
    """Neighbouring stages of one device, merged."""

    device: Ints
    lo: Ints
    hi: Ints
    slices: Ints
    first: Ints  # first stage
    last: Ints  # last stage
    replica: Ints  # a replica of its first stage: its kind and group
    of: Ints  # [replicas] the run of each replica


class Edges(NamedTuple):
    """What one run sends another: bytes for every sample, and bytes of every message whatever its samples."""

    source: Ints
    target: Ints
    per_sample: Floats
    fixed: Floats


class Orders(NamedTuple):
    """The operations of the devices, in order; those of device d are the rows first[d]:first[d + 1]."""

    first: Ints
    run: Ints
    micro_batch: Ints
    backward: Bools


@compiled
def stage_at(first: Ints, block: int) -> int:
    """Return the stage that holds a block; `first` has the first block of each stage."""
    low, high = 0, len(first) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle] <= block:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def merge_stages(shape: Shape) -> StageRuns:
    """Return the stages merged into runs, numbered by first stage, then replica."""
    count = len(shape.device)
    of = np.full(count, -1, np.int32)
    first, last, replica = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    runs = 0
    for r in range(count):
        s = shape.stage[r]
        if s > 0 and shape.stream[s] == shape.stream[s - 1]:
            for q in range(shape.replicas[s - 1], shape.replicas[s]):
                if (
                    shape.device[q] == shape.device[r]
                    and shape.size[q] == shape.size[r]
                    and shape.lo[q] == shape.lo[r]
                    and shape.hi[q] == shape.hi[r]
                    and shape.slices[q] == shape.slices[r]
                ):
                    of[r] = of[q]
                    last[of[r]] = s
                    break
        if of[r] < 0:
            of[r] = runs
            first[runs] = last[runs] = s
            replica[runs] = r
            runs += 1
    own = replica[:runs]
    return StageRuns(
        shape.device[own], shape.lo[own], shape.hi[own], shape.slices[own], first[:runs], last[:runs], own, of
    )


@compiled
def nearest(shape: Shape, sender: int, receiver: int) -> int:
    """Return the replica of a duplicate stage that serves the receiver."""
    best, ties = 4, 0
    for pick in range(2):  # find the least distance, then the receiver's turn among the equally near
        turn = (receiver - shape.replicas[shape.stage[receiver]]) % ties if pick else 0
        for q in range(shape.replicas[sender], shape.replicas[sender + 1]):
            a, b = shape.device[q], shape.device[receiver]
            if a == b:
                distance = 0
            elif shape.host_of[a] == shape.host_of[b]:
                distance = 1
            else:
                distance = 2 if shape.region_of[a] == shape.region_of[b] else 3
            if pick:
                if distance == best:
                    if turn == 0:
                        return q
                    turn -= 1
            elif distance < best:
                best, ties = distance, 1
            elif distance == best:
                ties += 1
    return -1


@compiled
def run_edges(shape: Shape, runs: StageRuns, per_sample: Floats, fixed: Floats, backward: bool) -> Edges:
    """Return the edges between runs; `per_sample` and `fixed` have the bytes between stages, [from, to] of the forward.

    With `backward` the same pairs are reversed.
    """
    n_runs, n_stages = len(runs.device), len(shape.first)
    source, target = np.empty(64, np.int32), np.empty(64, np.int32)
    sizes, constants = np.empty(64), np.empty(64)
    count = 0
    slot = np.full(n_runs, -1, np.int32)  # edge of each source run into the present target
    for v in range(n_runs):
        begin = count
        for t in range(runs.first[v], runs.last[v] + 1):
            receiver = runs.replica[v]
            for q in range(shape.replicas[t], shape.replicas[t + 1]):
                if runs.of[q] == v:
                    receiver = q
            for s in range(n_stages):
                size = per_sample[t, s] if backward else per_sample[s, t]
                constant = fixed[t, s] if backward else fixed[s, t]
                if size + constant <= 0.0:
                    continue
                only = nearest(shape, s, receiver) if shape.duplicate[s] else -1
                for q in range(shape.replicas[s], shape.replicas[s + 1]):
                    u = runs.of[q]
                    overlap = min(shape.hi[q], shape.hi[receiver]) - max(shape.lo[q], shape.lo[receiver])
                    if u == v or overlap <= 0 or (only >= 0 and q != only):
                        continue
                    if slot[u] < begin:
                        if count == len(source):
                            source, target = twice(source), twice(target)
                            sizes, constants = twice(sizes), twice(constants)
                        slot[u] = count
                        source[count], target[count], sizes[count], constants[count] = u, v, 0.0, 0.0
                        count += 1
                    sizes[slot[u]] += size
                    constants[slot[u]] += constant
    return Edges(source[:count], target[:count], sizes[:count], constants[:count])


@compiled
def twice(array: Any) -> Any:
    """Return an array with the same values and twice the length."""
    longer = np.empty(2 * len(array), array.dtype)
    for i in range(len(array)):
        longer[i] = array[i]
    return longer


@compiled
def first_rows(runs: StageRuns, devices: int, micro_batches: int) -> Ints:
    """Return the row at which each device's operations start."""
    first = np.zeros(devices + 1, np.int32)
    for u in range(len(runs.device)):
        first[runs.device[u] + 1] += 2 * micro_batches
    for d in range(devices):
        first[d + 1] += first[d]
    return first


@compiled
def depths(runs: int, forward: Edges) -> Ints:
    """Return the number of runs on the longest way from each run to the end, itself included."""
    depth = np.ones(runs, np.int32)
    changed = True
    while changed:
        changed = False
        for e in range(len(forward.source) - 1, -1, -1):
            if depth[forward.source[e]] < depth[forward.target[e]] + 1:
                depth[forward.source[e]] = depth[forward.target[e]] + 1
                changed = True
    return depth


@compiled
def far_edges(shape: Shape, runs: StageRuns, edges: Edges) -> Bools:
    """Return which edges leave a region or, where all runs are in one, a host."""
    where = shape.host_of
    for u in range(1, len(runs.device)):
        if shape.region_of[runs.device[u]] != shape.region_of[runs.device[0]]:
            where = shape.region_of
    far = np.zeros(len(edges.source), np.bool_)
    for e in range(len(edges.source)):
        far[e] = where[runs.device[edges.source[e]]] != where[runs.device[edges.target[e]]]
    return far


@compiled
def limits(depth: Ints, forward: Edges, far: Bools, ahead: int) -> Ints:
    """Return the micro-batches that may be in flight in each run.

    That is the most, over the ways from the run to the end, of the number of runs plus `ahead` for each far edge.
    """
    limit = depth.copy()
    changed = ahead > 0
    while changed:
        changed = False
        for e in range(len(forward.source) - 1, -1, -1):
            most = limit[forward.target[e]] + 1 + (ahead if far[e] else 0)
            if limit[forward.source[e]] < most:
                limit[forward.source[e]] = most
                changed = True
    return limit


@compiled
def make_orders(
    shape: Shape,
    runs: StageRuns,
    forward: Edges,
    backward: Edges,
    devices: int,
    micro_batches: int,
    how: int,
    ahead: int,
) -> Orders:
    """Return each device's order by the rules in the module's docstring; `how` is a value of SCHEDULES."""
    depth = depths(len(runs.device), forward)
    if how == 2:
        apart = distance(runs, depth, devices)
        if apart > 0 and micro_batches % apart == 0:
            orders = looped_orders(runs, depth, devices, micro_batches, apart)
            if completes(orders, runs, forward, backward, devices):
                return orders
    there, home = far_edges(shape, runs, forward), far_edges(shape, runs, backward)
    late = min(ahead, micro_batches) if how == 1 else 0
    limit = limits(depth, forward, there, late)
    return play_orders(runs, forward, backward, there, home, devices, micro_batches, how, limit, late)


@compiled
def distance(runs: StageRuns, depth: Ints, devices: int) -> int:
    """Return how many runs lie between two of a device if that is the same everywhere and all have as many, else 0."""
    last, count = np.zeros(devices, np.int32), np.zeros(devices, np.int32)
    apart = 0
    for u in range(len(runs.device)):
        d = runs.device[u]
        if count[d]:
            gap = last[d] - depth[u]
            if gap <= 0 or (apart and gap != apart):
                return 0
            apart = gap
        last[d] = depth[u]
        count[d] += 1
    for d in range(devices):
        if count[d] and count[d] != count.max():
            return 0
    return int(apart)


@compiled
def looped_orders(runs: StageRuns, depth: Ints, devices: int, micro_batches: int, apart: int) -> Orders:
    """Return Megatron's interleaved order for a regular pipeline."""
    first = first_rows(runs, devices, micro_batches)
    total = first[-1]
    run, micro, back = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.bool_)
    mine = np.empty(len(runs.device), np.int32)  # runs of the present device
    for d in range(devices):
        chunks = 0
        for u in range(len(runs.device)):
            if runs.device[u] == d:
                mine[chunks] = u
                chunks += 1
        if chunks == 0:
            continue
        operations = chunks * micro_batches
        rank = depth.max() - depth[mine[0]]
        warm_up = min(operations, 2 * (apart - rank - 1) + (chunks - 1) * apart)
        forwards = backwards = 0
        for i in range(first[d], first[d + 1]):
            back[i] = forwards == operations or (forwards > warm_up and forwards - warm_up > backwards)
            n = backwards if back[i] else forwards
            chunk = n // apart % chunks
            micro[i] = n // (apart * chunks) * apart + n % apart
            run[i] = mine[chunks - 1 - chunk if back[i] else chunk]
            if back[i]:
                backwards += 1
            else:
                forwards += 1
    return Orders(first, run, micro, back)


@compiled
def completes(orders: Orders, runs: StageRuns, forward: Edges, backward: Edges, devices: int) -> bool:
    """Return whether the orders can be played to their end, without a deadlock."""
    done = np.zeros((2, len(runs.device)), np.int32)
    at = orders.first[:-1].copy()
    progress = True
    while progress:
        progress = False
        for d in range(devices):
            while at[d] < orders.first[d + 1]:
                u, m, b = orders.run[at[d]], orders.micro_batch[at[d]], 1 if orders.backward[at[d]] else 0
                edges = backward if b else forward
                ready = done[b, u] == m and (b == 0 or done[0, u] > m)
                for e in range(len(edges.source)):
                    ready = ready and (edges.target[e] != u or done[b, edges.source[e]] > m)
                if not ready:
                    break
                done[b, u] += 1
                at[d] += 1
                progress = True
    left = 0
    for d in range(devices):
        left += orders.first[d + 1] - at[d]
    return left == 0


@compiled
def play_orders(
    runs: StageRuns, forward: Edges, backward: Edges, there: Bools, home: Bools, devices: int, micro_batches: int,
    how: int, limit: Ints, late: int,
) -> Orders:  # fmt: skip
    """Return each device's order from playing the pipeline tick by tick; far edges take `late` ticks more."""
    n_runs = len(runs.device)
    done = np.zeros((2, n_runs), np.int32)  # micro-batches through, forwards and backwards
    before = np.zeros((late + 1, 2, n_runs), np.int32)  # the same, at the start of this tick and of those before it
    ready = np.zeros((2, n_runs), np.int32)  # micro-batches that may be taken
    first = first_rows(runs, devices, micro_batches)
    place = first[:-1].copy()
    total = first[-1]
    run, micro, back = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.bool_)
    forwards_left = np.zeros(devices, np.int32)
    for u in range(n_runs):
        forwards_left[runs.device[u]] += micro_batches
    choice = np.full(devices, -1, np.int32)
    taken = tick = 0
    while taken < total:
        now, then = tick % (late + 1), (tick + 1) % (late + 1)  # then: the oldest that is kept
        tick += 1
        for u in range(n_runs):
            before[now, 0, u], before[now, 1, u] = done[0, u], done[1, u]
            ready[0, u], ready[1, u] = micro_batches, done[0, u]
        for e in range(len(forward.source)):
            came = before[then if there[e] else now, 0, forward.source[e]]
            ready[0, forward.target[e]] = min(ready[0, forward.target[e]], came)
        for e in range(len(backward.source)):
            came = before[then if home[e] else now, 1, backward.source[e]]
            ready[1, backward.target[e]] = min(ready[1, backward.target[e]], came)
        for d in range(devices):
            choice[d] = -1
        for u in range(n_runs):
            d = runs.device[u]
            may_forward = done[0, u] < ready[0, u] and (how != 1 or done[0, u] - done[1, u] < limit[u])
            may_backward = done[1, u] < ready[1, u] and (how != 0 or forwards_left[d] == 0)
            if may_backward:
                known = choice[d] >= 0 and choice[d] & 1
                if not known or done[1, u] < done[1, choice[d] >> 1]:
                    choice[d] = 2 * u + 1
            elif may_forward and (choice[d] < 0 or not choice[d] & 1):
                choice[d] = 2 * u
        for d in range(devices):
            if choice[d] < 0:
                continue
            u, b = choice[d] >> 1, choice[d] & 1
            run[place[d]], micro[place[d]], back[place[d]] = u, done[b, u], b == 1
            place[d] += 1
            done[b, u] += 1
            if b == 0:
                forwards_left[d] -= 1
            taken += 1
    return Orders(first, run, micro, back)


_ACTION = re.compile(r"([0-9]+)([FB])([0-9]+)")


def render_orders(orders: Orders, runs: StageRuns, names: list[str]) -> str:
    """Return one line a device: `va1/A100-40GB/0 | 0F0 0F1 0B0 ...` (stage, forward or backward, micro-batch)."""
    lines = []
    for d, name in enumerate(names):
        rows = range(orders.first[d], orders.first[d + 1])
        actions = (
            f"{runs.first[orders.run[i]]}{'B' if orders.backward[i] else 'F'}{orders.micro_batch[i]}" for i in rows
        )
        if len(rows):
            lines.append(f"{name} | {' '.join(actions)}")
    return "\n".join(lines)


def parse_orders(text: str) -> dict[str, tuple[tuple[int, str, int], ...]]:
    """Return the orders that `render_orders` wrote: device -> (stage, "F" or "B", micro-batch)."""
    orders: dict[str, tuple[tuple[int, str, int], ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        name, bar, actions = line.partition(" | ")
        matches = [_ACTION.fullmatch(action) for action in actions.split()]
        if not bar or not all(matches):
            raise PlanError(
                "schedule-text", "a line of a schedule cannot be read", where=f"schedule line {number}", found=line,
                expected="device | 0F0 0F1 0B0 ...",
            )  # fmt: skip
        orders[name] = tuple((int(m[1]), m[2], int(m[3])) for m in matches if m)
    return orders
