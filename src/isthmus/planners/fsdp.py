"""State sharded over all devices that take part, each with an equal share: FSDP, and ZeRO-1 beside it.

The model is one stage. `sharded-all`: what is gathered at a time, forwards and again backwards, is a bucket of
neighbouring blocks, and its gradients are reduced as soon as they are there; users call it a unit. Small units need
little memory, large ones few messages. `sharded-optimizer` keeps weights and gradients whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from isthmus.cost.tables import ALONE
from isthmus.plan.types import Layout, Plan
from isthmus.planners.devices import device_sets, fastest
from isthmus.planners.grid import Fix
from isthmus.planners.ideas import Idea, Version
from isthmus.planners.pieces import build_stages, least_ring, least_update, make_plan
from isthmus.planners.problem import Problem
from isthmus.planners.room import BUCKET, Need, Room, Way
from isthmus.planners.shares import even_shares, micro_batch_counts
from isthmus.planners.staged import way_seconds

__all__ = ["fsdp"]

_PARTS = (32, 8)  # units of the whole model, beside units as large as other schemes' buckets


def fsdp(problem: Problem, room: Room, fix: Fix) -> Iterator[Idea]:
    """Every device set, as far as its devices have room for their part, and every size of units."""
    whole = problem.graph.elements * problem.table.width
    units = [BUCKET, *(whole / parts for parts in _PARTS)]  # bytes
    for devices in _holders(problem, room):
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            for unit in units:
                yield _sharded(problem, room, devices, count, "sharded-all", unit)
            yield _sharded(problem, room, devices, count, "sharded-optimizer", BUCKET)


def _holders(problem: Problem, room: Room) -> list[tuple[str, ...]]:
    """Device sets of two or more, without devices that cannot hold their part and one sample, or may not.

    Those that leave make the others' parts larger, so it is asked again. All that may hold it, if none can.
    """
    way, may = Way(recompute=True, state="sharded-all"), {d for d in problem.usable if problem.allowed(d).all()}
    found = []
    for devices in device_sets(problem):
        members = fastest(problem, [device for device in devices if device in may], problem.job.batch)
        able: tuple[str, ...] = members
        before: tuple[str, ...] = ()
        while len(able) > 1 and able != before:
            kinds = {problem.cluster.devices[device].kind: device for device in able}
            fits = {k: room.fits(Need((d,), 1, len(able), 1, 1), way)[0, -1] for k, d in kinds.items()}
            able, before = tuple(d for d in able if fits[problem.cluster.devices[d].kind]), able
        found.append(able if len(able) > 1 else members)
    return list(dict.fromkeys(members for members in found if len(members) > 1))


def _sharded(problem: Problem, room: Room, devices: tuple[str, ...], count: int, state: Layout, unit: float) -> Idea:
    """One device set; nothing is faster than its slowest device, or than the bytes that must pass its slowest link."""
    shares = even_shares(problem.job.batch // count, len(devices))
    kinds = {problem.cluster.devices[device].kind: device for device in reversed(devices)}  # first: the larger share
    share = dict(zip(devices, shares, strict=True))
    rows = [problem.block_seconds(kind, ALONE, share[device]).sum(axis=1) for kind, device in kinds.items()]
    elements = problem.table.span(0, len(problem.graph.blocks) - 1).elements
    often = 1.5 * count if state == "sharded-all" else problem.kept or 1.0
    sending = often * least_ring(problem, devices, elements).sending
    ways = [Way(recompute, state) for recompute in (False, True)]
    update = min(least_update(problem, kind, elements / len(devices)) for kind in kinds)
    seconds = {way: max(sending, *(count * float(way_seconds(row, way)) for row in rows)) + update for way in ways}

    def versions() -> list[Version]:
        needs = [Need((device,), 1, len(devices), share[device], 1) for device in kinds.values()]
        fitting = [way for way in ways if all(room.fits(need, way)[0, -1] for need in needs)]
        return [Version(seconds[way], partial(_plan, problem, devices, shares, count, way, unit)) for way in fitting]

    return Idea(
        seconds=seconds[ways[0]],
        memory=sum(problem.cluster.kind_of(device).memory for device in devices),
        samples=max(shares),
        versions=versions,
        nearest=partial(_plan, problem, devices, shares, count, ways[-1], unit),
    )


def _plan(problem: Problem, devices: Sequence[str], shares: Sequence[int], count: int, way: Way, unit: float) -> Plan:
    members = [((device,), share) for device, share in zip(devices, shares, strict=True)]
    return make_plan(problem, build_stages(problem, [0], [members], way), count, bucket=unit)
