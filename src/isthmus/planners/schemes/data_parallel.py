"""The whole model on every device: `data-even` with equal shares, `data` with shares by speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial

from isthmus.cost.tables import ALONE
from isthmus.plan.types import How, Plan
from isthmus.planners.layout.build_plan import RingBound, build_stages, last_bucket, least_ring, least_update, make_plan
from isthmus.planners.layout.layout_types import Need, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.pipeline_bounds import way_seconds
from isthmus.planners.layout.shares import even_shares, fair_shares, micro_batch_counts
from isthmus.planners.problem import Floats, Problem
from isthmus.planners.proposal import Idea, Version
from isthmus.planners.schemes.device_sets import device_sets, fastest
from isthmus.planners.schemes.fix import Fix

__all__ = ["data", "data_even", "replicated"]

_WAYS = (StageOptions(), StageOptions(recompute=True))


def data_even(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose equal shares on every device that holds the model."""
    for devices in _holders(problem, memory):
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            shares = even_shares(problem.job.batch // count, len(devices))
            yield replicated(problem, memory, devices, shares, count, "ring")


def data(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose shares by speed on every device that holds the model; a device with nothing to do is left out."""
    times = cache(partial(_whole_seconds, problem))
    per_kind = {kind: partial(times, kind) for kind in problem.cluster.kinds}
    for devices in _holders(problem, memory):
        kinds = [problem.cluster.devices[device].kind for device in devices]
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            shares = fair_shares(problem.job.batch // count, [per_kind[kind] for kind in kinds], least=0)
            busy = [(device, share) for device, share in zip(devices, shares, strict=True) if share]
            used, taken = tuple(device for device, _ in busy), [share for _, share in busy]
            yield replicated(problem, memory, used, taken, count, "ring")
            if len({problem.cluster.host_of(device).region for device in used}) > 1:
                yield replicated(problem, memory, used, taken, count, "tree")


def _whole_seconds(problem: Problem, kind: str, samples: int) -> float:
    """Return the seconds of the whole model on one device."""
    return float(problem.table.seconds(kind, ALONE, samples)[:, -1].sum()) if samples else 0.0


def _holders(problem: Problem, memory: MemoryFit) -> list[tuple[str, ...]]:
    """Return device sets without devices that cannot hold the model and one sample, or may not; no larger than the
    batch.

    All devices that may hold it, if none can.
    """
    may = [device for device in problem.usable if problem.allowed(device).all()]
    needs = {device: Need((device,), 1, 1, 1, 1) for device in may}
    able = {device for device in may if memory.fits(needs[device], StageOptions(recompute=True))[0, -1]} or set(may)
    sets = [[device for device in devices if device in able] for devices in device_sets(problem)]
    return list(dict.fromkeys(fastest(problem, members, problem.job.batch) for members in sets if members))


def replicated(
    problem: Problem, memory: MemoryFit, devices: tuple[str, ...], shares: Sequence[int], count: int, how: How
) -> Idea:
    """Propose the whole model on every device."""
    kinds = [problem.cluster.devices[device].kind for device in devices]
    most: dict[str, tuple[int, str]] = {}
    for kind, share, device in zip(kinds, shares, devices, strict=True):
        most[kind] = max(most.get(kind, (0, "")), (share, device))
    rows = {kind: problem.block_seconds(kind, ALONE, share).sum(axis=1) for kind, (share, _) in most.items()}
    pairs = dict.fromkeys(zip(kinds, shares, strict=True))
    every = [problem.block_seconds(kind, ALONE, share).sum(axis=1) for kind, share in pairs]
    elements = problem.table.span(0, len(problem.graph.blocks) - 1).elements
    last = last_bucket(problem, 0, len(problem.graph.blocks))
    synced = elements * (problem.kept or 1.0)
    ring = least_ring(problem, devices, synced, last=last) if how == "ring" else RingBound(0.0, 0.0)
    update = min(least_update(problem, kind, elements) for kind in rows)
    seconds = {way: _least(every, count, way, ring) + update for way in _WAYS}
    members = [[((device,), share) for device, share in zip(devices, shares, strict=True)]]

    def make(way: StageOptions) -> Plan:
        return make_plan(problem, build_stages(problem, [0], members, way), count, how=how)

    def versions() -> list[Version]:
        needs = [Need((device,), 1, len(devices), share, 1) for share, device in most.values()]
        ways = [way for way in _WAYS if all(memory.fits(need, way)[0, -1] for need in needs)]
        return [Version(seconds[way], partial(make, way)) for way in ways]

    total = sum(problem.cluster.kinds[kind].memory for kind in kinds)
    return Idea(seconds[_WAYS[0]], total, max(shares), versions, partial(make, _WAYS[-1]))


def _least(rows: Sequence[Floats], count: int, way: StageOptions, ring: RingBound) -> float:
    """Return the replicas' least seconds: the slowest computes, or the quickest syncs after its last gradients."""
    both = [float(way_seconds(row, way)) for row in rows]
    first = min((count - 1) * whole + float(row[0]) for whole, row in zip(both, rows, strict=True))
    return max(count * max(both), first + ring.sending, count * min(both) + ring.travel)
