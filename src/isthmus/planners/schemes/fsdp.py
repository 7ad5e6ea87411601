"""State sharded over all devices that take part, each with an equal share: FSDP, and ZeRO-1 beside it.

The model is one stage. `sharded-all`: what is gathered at a time, forwards and again backwards, is a bucket of
neighbouring blocks, and its gradients are reduced as soon as they are there; users call it a unit. Small units need
little memory, large ones few messages. `sharded-optimizer` keeps weights and gradients whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, permutations
from math import inf

from isthmus.cluster.spec import Cluster
from isthmus.cost.tables import ALONE
from isthmus.plan.types import Layout, Plan
from isthmus.planners.layout.build_plan import build_stages, least_ring, least_update, make_plan, unit_bytes
from isthmus.planners.layout.layout_types import BUCKET, Need, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.pipeline_bounds import way_seconds
from isthmus.planners.layout.shares import even_shares, micro_batch_counts
from isthmus.planners.problem import Problem
from isthmus.planners.proposal import Idea, Version
from isthmus.planners.schemes.device_sets import device_sets, fastest
from isthmus.planners.schemes.fix import Fix

__all__ = ["fsdp"]

_PARTS = (32, 8)  # units of the whole model, beside units as large as other schemes' buckets


def fsdp(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose every device set whose devices have memory for their part, with every size of units."""
    whole = problem.graph.elements * problem.table.width
    units = [BUCKET, *(whole / parts for parts in _PARTS)]  # bytes
    for devices in _holders(problem, memory):
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            for unit in units:
                yield _sharded(problem, memory, devices, count, "sharded-all", unit)
            yield _sharded(problem, memory, devices, count, "sharded-optimizer", BUCKET)


def _holders(problem: Problem, memory: MemoryFit) -> list[tuple[str, ...]]:
    """Return device sets of two or more, without devices that cannot hold their part and one sample, or may not.

    Those that leave make the others' parts larger, so it is asked again. All that may hold it, if none can.
    """
    way, may = (
        StageOptions(recompute=True, state="sharded-all"),
        {d for d in problem.usable if problem.allowed(d).all()},
    )
    found = []
    for devices in device_sets(problem):
        members = fastest(problem, [device for device in devices if device in may], problem.job.batch)
        able: tuple[str, ...] = members
        before: tuple[str, ...] = ()
        while len(able) > 1 and able != before:
            kinds = {problem.cluster.devices[device].kind: device for device in able}
            fits = {k: memory.fits(Need((d,), 1, len(able), 1, 1), way)[0, -1] for k, d in kinds.items()}
            able, before = tuple(d for d in able if fits[problem.cluster.devices[d].kind]), able
        found.append(able if len(able) > 1 else members)
    return list(dict.fromkeys(members for members in found if len(members) > 1))


def _sharded(
    problem: Problem, memory: MemoryFit, devices: tuple[str, ...], count: int, state: Layout, unit: float
) -> Idea:
    """Propose one device set; nothing is faster than its slowest device, or than the bytes that must pass its slowest
    link.
    """
    shares = even_shares(problem.job.batch // count, len(devices))
    kinds = {problem.cluster.devices[device].kind: device for device in reversed(devices)}  # first: the larger share
    share = dict(zip(devices, shares, strict=True))
    rows = [problem.block_seconds(kind, ALONE, share[device]).sum(axis=1) for kind, device in kinds.items()]
    elements = problem.table.span(0, len(problem.graph.blocks) - 1).elements
    if state == "sharded-all":
        sending = _exchange(problem, devices, count, unit)
    else:
        sending = least_ring(problem, devices, elements * (problem.kept or 1.0)).sending
    ways = [StageOptions(recompute, state) for recompute in (False, True)]
    update = min(least_update(problem, kind, elements / len(devices)) for kind in kinds)
    seconds = {way: max(sending, *(count * float(way_seconds(row, way)) for row in rows)) + update for way in ways}

    def versions() -> list[Version]:
        needs = [Need((device,), 1, len(devices), share[device], 1) for device in kinds.values()]
        fitting = [way for way in ways if all(memory.fits(need, way)[0, -1] for need in needs)]
        return [Version(seconds[way], partial(_plan, problem, devices, shares, count, way, unit)) for way in fitting]

    return Idea(
        seconds=seconds[ways[0]],
        memory=sum(problem.cluster.kind_of(device).memory for device in devices),
        samples=max(shares),
        versions=versions,
        nearest=partial(_plan, problem, devices, shares, count, ways[-1], unit),
    )


def _exchange(problem: Problem, devices: Sequence[str], count: int, unit: float) -> float:
    """Return the least seconds in which the busiest of what messages pass carries all gathers and sums of a step.

    Of n devices each sends every other its n-th of the weights, for each forward and each backward, and the next one
    n - 1 such parts of each micro-batch's gradients. A unit that two turns in a row use is sent once: the last one's
    backward follows its forward, the first one's forward its backward of the micro-batch before.
    """
    table, n, cluster = problem.table, len(devices), problem.network
    blocks = len(problem.graph.blocks)
    tied = sum(elements for _, elements in table.tied)
    own = unit_bytes(table.span(0, blocks - 1).elements * table.width, unit, count, n) / table.width
    largest = own + max(table.span(b, b).elements for b in range(blocks)) + tied
    whole = float(table.sums.elements[-1])
    fetched = max(2 * count * whole - (2 * count - 1) * largest, whole) / n
    summed = count * table.span(0, blocks - 1).elements * (n - 1) / n
    hosts = Counter(cluster.devices[device].host for device in devices)
    pairs = {(a, b): fetched * hosts[a] * hosts[b] for a, b in permutations(hosts, 2)}
    for a, b in pairwise(cluster.devices[device].host for device in (*devices, devices[0])):
        if a != b:
            pairs[a, b] += summed
    seconds = dict[tuple[str, ...], float]()
    for (a, b), elements in pairs.items():
        for resource, rate in _passed(cluster, a, b):
            seconds[resource] = seconds.get(resource, 0.0) + (elements * table.width / rate if rate else inf)
    return max(seconds.values(), default=0.0)


def _passed(cluster: Cluster, a: str, b: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield what messages between two hosts pass, each with its bytes a second: 0 where they cannot talk."""
    link, here, there = cluster.link(a, b), cluster.hosts[a], cluster.hosts[b]
    yield ("pair", a, b), 0.0 if link is None else link.bandwidth
    yield ("out", a), here.nic
    yield ("in", b), there.nic_in
    if (trunk := cluster.trunk(here.region, there.region)) is not None:
        yield ("trunk", here.region, there.region), trunk


def _plan(
    problem: Problem, devices: Sequence[str], shares: Sequence[int], count: int, way: StageOptions, unit: float
) -> Plan:
    members = [((device,), share) for device, share in zip(devices, shares, strict=True)]
    return make_plan(problem, build_stages(problem, [0], [members], way), count, bucket=unit)
