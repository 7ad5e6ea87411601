"""Pipelines whose devices and shares are settled: which blocks each stage has, and how it holds them, is still open.

What such a pipeline needs at least, for m micro-batches, with S[s] seconds in which a replica of stage s computes one
micro-batch both ways (the slowest replica's, or the quickest's: s[s]) and h[s] seconds that messages to the next stage
and back need:

    one micro-batch goes through all stages and back                  sum s + sum h
    every stage waits for those before it, at both ends               m S[s] + sum over j < s of s[j] + h[j]
    1f1b lets k micro-batches into stage s (`flights`): one comes
    in when another has been to the end and back                      the same with ceil(m / k) (S[s] + sum over j > s
                                                                      of s[j] + sum over j >= s of h[j]) for m S[s]
    all samples cross the links, nics and trunks between stages
    gradients are summed up around a ring, none of them before the
    last backward of a replica; weights are updated after that        (m - 1) s[s] + its forward + ring + update
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cost.compute import Group
from isthmus.cost.tables import stage_links
from isthmus.plan.types import Layout
from isthmus.planners.layout.build_plan import last_bucket, least_ring, least_update
from isthmus.planners.layout.cuts import (
    Parts,
    pipeline_times,
    pipelines_seconds,
    span_sums,
    stage_sums,
)
from isthmus.planners.layout.layout_types import Need, Stage, Staged, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.problem import Bools, Floats, Problem, divided_work

__all__ = [
    "cut_bounds",
    "cut_times",
    "flights",
    "floor",
    "gathers_of",
    "least_seconds",
    "measured",
    "round_trips",
    "stage_fits",
    "stage_needs",
    "timed_replicas",
    "way_seconds",
]

_Timed = tuple[str, Group, int]  # kind and links of a replica, and its share


class _Crossing(NamedTuple):
    """The times of messages between two stages, for one byte a sample."""

    latency: float  # least of all pairs that talk
    message: float  # seconds of the shortest message
    total: float  # seconds that one micro-batch takes of the busiest link, nic or trunk


def way_seconds(seconds: Floats, way: StageOptions) -> Floats:
    """Add up both ways of [2, ...], with the forward twice where activations are recomputed."""
    return np.asarray(seconds[0] * (2 if way.recompute else 1) + seconds[1])


def least_seconds(problem: Problem, staged: Staged, borders: Sequence[int] = ()) -> float:
    """Return the pipeline's least seconds, however it is cut: evenly divided work, or round trips of all blocks."""
    seconds, around = floor(problem, staged, borders)
    return max(seconds, round_trips(problem, staged, around))


def floor(problem: Problem, staged: Staged, borders: Sequence[int]) -> tuple[float, float]:
    """Return the least seconds whatever is in flight, and the least seconds of one micro-batch's round trip."""
    slowest, quickest, counts = dict[_Timed, Floats](), dict[_Timed, Floats](), dict[_Timed, int]()
    for stage in staged.stages:
        replicas = timed_replicas(problem, stage)
        most = max(replicas, key=lambda replica: problem.whole_seconds(*replica))
        slowest[most], counts[most] = problem.both_seconds(*most), counts.get(most, 0) + 1
        quickest.update((replica, problem.both_seconds(*replica)) for replica in replicas if replica not in quickest)
    count, around = staged.micro_batches, 0.0
    seconds = max(count * divided_work(slowest, counts), _tied_ends(problem, staged))
    if problem.serial:
        around = float(np.min(list(quickest.values()), axis=0).sum())
        for crossing in (_crossing(problem, staged.stages[s], staged.stages[s + 1]) for s in borders):
            around += 2 * (crossing.latency + crossing.message * problem.thinnest)
            seconds = max(seconds, count * crossing.total * problem.thinnest)
    return seconds, around


def round_trips(problem: Problem, staged: Staged, around: float) -> float:
    """Return the seconds of all micro-batches, of which the first stage lets only some in at a time."""
    return -(-staged.micro_batches // flights(problem, staged)[0]) * around if around else 0.0


def _tied_ends(problem: Problem, staged: Staged) -> float:
    """Return the seconds of the rings of weights that the first block and the last share,
    all around both their stages.
    """
    ends, edges = {0, len(problem.graph.blocks) - 1}, (staged.stages[0], staged.stages[-1])
    shared = sum(count for users, count in problem.table.tied if ends <= set(users))
    if len(staged.stages) < 2 or not shared:
        return 0.0
    degrees = {len(devices) for stage in edges for devices, _ in stage}
    whole = shared * (problem.kept or 1.0) / (degrees.pop() if len(degrees) == 1 else 1)
    return least_ring(problem, [devices[0] for stage in edges for devices, _ in stage], whole).sending


def timed_replicas(problem: Problem, stage: Stage) -> list[_Timed]:
    """Return what distinguishes the stage's replicas, as far as time goes."""
    return list(dict.fromkeys((*problem.replica_kind(devices), share) for devices, share in stage))


def flights(problem: Problem, staged: Staged) -> list[int]:
    """Return the most micro-batches that may be in flight in each stage (`plan.schedule`)."""
    hosts = [{problem.cluster.devices[devices[0]].host for devices, _ in stage} for stage in staged.stages]
    regions = [{problem.cluster.hosts[host].region for host in members} for members in hosts]
    named = regions if len(set().union(*regions)) > 1 else hosts
    found = [1]
    for here, after in reversed(list(pairwise(named))):
        found.append(found[-1] + 1 + (staged.ahead if len(here | after) > 1 else 0))
    return found[::-1]


def stage_needs(problem: Problem, staged: Staged) -> Iterator[list[Need]]:
    """Yield for each stage the needs of its replicas, one for all that are alike in kind, degree and share."""
    most = flights(problem, staged)
    for s, stage in enumerate(staged.stages):
        alike: dict[tuple[str, int, int], list[str]] = {}
        for devices, share in stage:
            key = problem.cluster.devices[devices[0]].kind, len(devices), share
            alike.setdefault(key, []).extend(devices)
        flight = min(most[s], staged.micro_batches)
        yield [Need(tuple(devices), degree, len(stage), share, flight) for (_, degree, share), devices in alike.items()]


def stage_fits(memory: MemoryFit, needs: Sequence[Need], way: StageOptions, allowed: Bools | None) -> Bools:
    """Return which runs of blocks all replicas of a stage can hold, of those that are allowed."""
    fits = memory.fits(needs[0], way)
    for need in needs[1:]:
        fits &= memory.fits(need, way)
    return fits if allowed is None else fits & allowed


def cut_times(
    problem: Problem, staged: Staged, firsts: Sequence[int], ways: Sequence[StageOptions], *, rings: bool = True
) -> tuple[float, float]:
    """Return the pipeline's least and estimated seconds with this cut, where each stage is held in its own way.

    `rings`: gradients go around the replicas of a stage and nobody else. Else the bound knows nothing of syncs, nor of
    updates that others have a part of.
    """
    parts = measured(problem, staged, firsts, ways)
    own = np.array([(rings, rings, rings or way.state == "replicated") for way in ways])
    least, about = pipeline_times(parts, np.where(own, parts.ends, 0.0), gathers_of(ways), staged.micro_batches)
    return least, max(least, about + _tied_ends(problem, staged))


def cut_bounds(
    problem: Problem, memory: MemoryFit, staged: Staged, held: StageOptions, firsts: npt.NDArray[np.intp]
) -> tuple[Floats, Bools, Floats]:
    """Return bounds for many cuts, [cuts, stages].

    They are the pipeline's least seconds, which stages must recompute to fit at all, and the seconds of the quickest
    stage for a micro-batch. Infinite where they do not fit even so. Syncs and updates are not counted, of messages
    those between neighbours.
    """
    count, blocks = staged.micro_batches, len(problem.graph.blocks)
    ends = np.column_stack((firsts[:, 1:], np.full(len(firsts), blocks)))
    again = np.zeros(firsts.shape, np.bool_)
    most, least = np.zeros(firsts.shape), np.zeros(firsts.shape)
    for s, (stage, needs) in enumerate(zip(staged.stages, stage_needs(problem, staged), strict=True)):
        a, b = firsts[:, s], ends[:, s]
        plain, second = (stage_fits(memory, needs, held._replace(recompute=r), None)[a, b] for r in (False, True))
        again[:, s] = ~plain
        rows = [problem.block_seconds(*replica) for replica in timed_replicas(problem, stage)]
        times = [span_sums(row.sum(axis=0))[a, b] + again[:, s] * span_sums(row[0])[a, b] for row in rows]
        most[:, s], least[:, s] = np.max(times, axis=0), np.min(times, axis=0)
        most[~(plain | second), s] = np.inf
    seconds = count * most.max(axis=1)
    if problem.serial and len(staged.stages) > 1:
        latency, message, total = _crossings(problem, staged.stages).T
        size = problem.steps[firsts[:, 1:] - 1]
        hops = 2 * (latency + message * size)
        seconds = np.maximum(seconds, (count * total * size).max(axis=1))
        fits = np.isfinite(seconds)
        most, quickest, let_in = most[fits], least[fits], np.array(flights(problem, staged))
        seconds[fits] = np.maximum(seconds[fits], pipelines_seconds(most, quickest, hops[fits], let_in, count))
    return seconds, again, least.min(axis=1)


def measured(problem: Problem, staged: Staged, firsts: Sequence[int], ways: Sequence[StageOptions]) -> Parts:
    """Return the seconds and bytes of every stage of a pipeline that is cut so."""
    replicas = [timed_replicas(problem, stage) for stage in staged.stages]
    rows = {replica: problem.block_seconds(*replica) for stage in replicas for replica in stage}
    forth = {replica: stage_sums(row[0], firsts) for replica, row in rows.items()}
    again = np.array([way.recompute for way in ways])
    back = {replica: (stage_sums(row[1], firsts) + again * forth[replica]).tolist() for replica, row in rows.items()}
    ahead = {replica: row.tolist() for replica, row in forth.items()}
    pairs = [[(ahead[replica][s], back[replica][s]) for replica in stage] for s, stage in enumerate(replicas)]
    links = stage_links(np.array(firsts, np.int32), problem.table.tensors)
    return Parts(
        most=np.array([max([a + b for a, b in stage]) for stage in pairs]),
        least=np.array([min([a + b for a, b in stage]) for stage in pairs]),
        start=np.array([min(stage)[0] for stage in pairs]),
        back=np.array([max([b for _, b in stage]) for stage in pairs]),
        there=np.diagonal(links[0], 1).copy(),
        home=np.diagonal(links[2], 1).copy(),
        crossings=_crossings(problem, staged.stages),
        flights=np.array(flights(problem, staged)),
        ends=np.array(list(_ends(problem, staged, firsts, ways))),
    )


def gathers_of(ways: Sequence[StageOptions]) -> Bools:
    """Return which stages gather their weights after their update."""
    return np.array([way.state == "sharded-optimizer" for way in ways])


def _crossings(problem: Problem, stages: Sequence[Stage]) -> Floats:
    """Return what messages between stages meet, [stages - 1, 3], for one byte a sample."""
    return np.array([_crossing(problem, a, b) for a, b in pairwise(stages)]).reshape(-1, 3)


def _ends(
    problem: Problem, staged: Staged, firsts: Sequence[int], ways: Sequence[StageOptions]
) -> Iterator[tuple[float, float, float]]:
    """Yield for each stage the times of its ring of gradients and the seconds of its update; each is looked up once."""
    spans = pairwise((*firsts, len(problem.graph.blocks)))
    for stage, (a, b), way in zip(staged.stages, spans, ways, strict=True):
        key = (tuple(devices for devices, _ in stage), a, b, way.state, way.spill, len(firsts) > 1)
        yield problem.remembered(_end, *key)


def _end(
    problem: Problem, groups: Sequence[tuple[str, ...]], a: int, b: int, state: Layout, spill: bool, others: bool
) -> tuple[float, float, float]:
    """Return the times of the ring of gradients and of the update of the stage of blocks a .. b - 1; where there are
    `others`, tied weights have rings of their own.
    """
    degrees, kinds = {len(devices) for devices in groups}, {problem.replica_kind(devices)[0] for devices in groups}
    degree, span = max(degrees), problem.table.span(a, b - 1)
    elements = span.elements - span.split_elements * (1.0 - 1.0 / degree)
    parts = 1 if state == "replicated" else len(groups)
    update = 0.0 if spill else min(least_update(problem, kind, elements / parts) for kind in kinds)
    tied = sum(count for users, count in problem.table.tied if any(a <= user < b for user in users))
    synced = max(0.0, elements - tied if others else elements) if len(degrees) == 1 else 0.0
    rings = 1 if any(_spans(problem, devices) for devices in groups) else degree
    last = last_bucket(problem, a, b, degree) if state == "replicated" else None
    leads = [devices[0] for devices in groups]
    return (*least_ring(problem, leads, synced * (problem.kept or 1.0), rings, last), update)


def _spans(problem: Problem, devices: Sequence[str]) -> bool:
    """Return whether a tensor group is on several hosts."""
    return len(devices) > 1 and len({problem.cluster.devices[device].host for device in devices}) > 1


def _crossing(problem: Problem, senders: Stage, receivers: Stage) -> _Crossing:
    """Return what messages between two stages meet; replicas talk where their samples meet. Inside a host, and for
    groups of several, only the latency is counted.
    """
    return problem.remembered(_met, senders, receivers)


def _met(problem: Problem, senders: Stage, receivers: Stage) -> _Crossing:
    if any(_spans(problem, devices) for devices, _ in (*senders, *receivers)):
        return _Crossing(0.0, 0.0, 0.0)
    cluster, latency, message = problem.network, float("inf"), float("inf")
    load = dict[tuple[str, ...], float]()
    capacity = dict[tuple[str, ...], float]()
    for a, b, samples in _meetings(senders, receivers):
        host, other = cluster.host_of(a), cluster.host_of(b)
        if host.name == other.name:
            latency, message = min(latency, host.latency), 0.0
            continue
        link = cluster.link(host.name, other.name)
        if link is None:
            return _Crossing(float("inf"), 0.0, 0.0)
        latency = min(latency, link.latency)
        trunk = cluster.trunk(host.region, other.region)
        passed: dict[tuple[str, ...], float] = {("out", host.name): host.nic, ("in", other.name): other.nic_in}
        passed["pair", host.name, other.name] = link.bandwidth
        if trunk is not None:
            passed["trunk", host.region, other.region] = trunk
        capacity.update(passed)
        message = min(message, samples / min(passed.values()))
        for resource in passed:
            load[resource] = load.get(resource, 0.0) + samples
    return _Crossing(latency, message, max((load[name] / capacity[name] for name in load), default=0.0))


def _meetings(senders: Stage, receivers: Stage) -> Iterator[tuple[str, str, int]]:
    """Yield the first devices of a sender and a receiver, and how many samples both have."""
    i = j = 0
    left, right = senders[0][1], receivers[0][1]
    while True:
        both = min(left, right)
        yield senders[i][0][0], receivers[j][0][0], both
        left, right = left - both, right - both
        if not left:
            i += 1
            if i == len(senders):
                return
            left = senders[i][1]
        if not right:
            j += 1
            right = receivers[j][1]
