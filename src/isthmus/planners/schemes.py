"""The usual ways to train, each as good as its users would make it. They are what a planner must beat.

- `data-even`: every device that holds the model has all of it and takes an equal share; gradients by ring.
- `data`: the same with shares that make all finish together, gradients by ring or tree.
- `pipeline`: one chain of stages, cut so that the slowest stage is as fast as can be and every stage fits.
- `grid`: equal tensor x pipeline x data degrees (Megatron): the same cut and shares for all (see `grid`).

Each tries the device sets of `devices`, several micro-batch sizes, and recompute on and off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from isthmus.cost.tables import ALONE
from isthmus.plan.types import How, Plan
from isthmus.planners.cuts import balanced_cut, best_cut, pipeline_seconds, stage_sums
from isthmus.planners.devices import device_sets, fastest
from isthmus.planners.grid import Fix, grid
from isthmus.planners.ideas import Idea, Version
from isthmus.planners.pieces import build_stages, make_plan, ring_seconds
from isthmus.planners.problem import Floats, Problem, divided_work
from isthmus.planners.room import Need, Room, Way
from isthmus.planners.shares import even_shares, fair_shares, micro_batch_counts

__all__ = ["SCHEMES", "Scheme", "data", "data_even", "pipeline"]

Scheme = Callable[[Problem, Room, Fix], Iterator[Idea]]
_WAYS = (Way(), Way(recompute=True))


def data_even(problem: Problem, room: Room, fix: Fix) -> Iterator[Idea]:
    """Equal shares on every device that holds the model."""
    for devices in _holders(problem, room):
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            shares = even_shares(problem.job.batch // count, len(devices))
            yield _replicated(problem, room, devices, shares, count, "ring")


def data(problem: Problem, room: Room, fix: Fix) -> Iterator[Idea]:
    """Shares by speed on every device that holds the model; a device with nothing to do is left out."""
    times = cache(partial(_whole_seconds, problem))
    per_kind = {kind: partial(times, kind) for kind in problem.cluster.kinds}
    for devices in _holders(problem, room):
        kinds = [problem.cluster.devices[device].kind for device in devices]
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            shares = fair_shares(problem.job.batch // count, [per_kind[kind] for kind in kinds], least=0)
            busy = [(device, share) for device, share in zip(devices, shares, strict=True) if share]
            used, taken = tuple(device for device, _ in busy), [share for _, share in busy]
            yield _replicated(problem, room, used, taken, count, "ring")
            if len({problem.cluster.host_of(device).region for device in used}) > 1:
                yield _replicated(problem, room, used, taken, count, "tree")


def _whole_seconds(problem: Problem, kind: str, samples: int) -> float:
    """Of the whole model on one device."""
    return float(problem.table.seconds(kind, ALONE, samples)[:, -1].sum()) if samples else 0.0


def _holders(problem: Problem, room: Room) -> list[tuple[str, ...]]:
    """Device sets without devices that cannot hold the model and one sample, or may not; no larger than the batch.

    All devices that may hold it, if none can.
    """
    may = [device for device in problem.usable if problem.allowed(device).all()]
    needs = {device: Need((device,), 1, 1, 1, 1) for device in may}
    able = {device for device in may if room.fits(needs[device], Way(recompute=True))[0, -1]} or set(may)
    sets = [[device for device in devices if device in able] for devices in device_sets(problem)]
    return list(dict.fromkeys(fastest(problem, members, problem.job.batch) for members in sets if members))


def _replicated(
    problem: Problem, room: Room, devices: tuple[str, ...], shares: Sequence[int], count: int, how: How
) -> Idea:
    """The whole model on every device."""
    kinds = [problem.cluster.devices[device].kind for device in devices]
    most: dict[str, tuple[int, str]] = {}
    for kind, share, device in zip(kinds, shares, devices, strict=True):
        most[kind] = max(most.get(kind, (0, "")), (share, device))
    forward = {kind: problem.block_seconds(kind, ALONE, share).sum(axis=1) for kind, (share, _) in most.items()}
    elements = problem.table.span(0, len(problem.graph.blocks) - 1).elements * (problem.kept or 1.0)
    sending = ring_seconds(problem, devices, elements) if how == "ring" else 0.0
    seconds = {way: max(sending, *(count * _both(f, way) for f in forward.values())) for way in _WAYS}
    members = [[((device,), share) for device, share in zip(devices, shares, strict=True)]]

    def make(way: Way) -> Plan:
        return make_plan(problem, build_stages(problem, [0], members, way), count, how=how)

    def versions() -> list[Version]:
        needs = [Need((device,), 1, len(devices), share, 1) for share, device in most.values()]
        ways = [way for way in _WAYS if all(room.fits(need, way)[0, -1] for need in needs)]
        return [Version(seconds[way], partial(make, way)) for way in ways]

    memory = sum(problem.cluster.kinds[kind].memory for kind in kinds)
    return Idea(seconds[_WAYS[0]], memory, max(shares), versions, partial(make, _WAYS[-1]))


def _both(seconds: Floats, way: Way) -> float:
    """Forward and backward; forward again where activations are recomputed."""
    return float((2 if way.recompute else 1) * seconds[0] + seconds[1])


def pipeline(problem: Problem, room: Room, fix: Fix) -> Iterator[Idea]:
    """One stage a device, in the order of the cluster file."""
    chains = [fastest(problem, devices, len(problem.graph.blocks)) for devices in device_sets(problem)]
    for chain in dict.fromkeys(chains):
        for count in micro_batch_counts(problem.job.batch, 1):
            yield _chain(problem, room, chain, count)


def _chain(problem: Problem, room: Room, chain: tuple[str, ...], count: int) -> Idea:
    size = problem.job.batch // count
    kinds = [problem.cluster.devices[device].kind for device in chain]
    both = {kind: problem.block_seconds(kind, ALONE, size) for kind in kinds}
    sums = {kind: rows.sum(axis=0) for kind, rows in both.items()}
    least = min(float(row.sum()) for row in sums.values())
    needs = [Need((device,), 1, 1, size, min(len(chain) - s, count)) for s, device in enumerate(chain)]
    members = [[((device,), size)] for device in chain]

    def make(firsts: list[int], way: Way) -> Plan:
        return make_plan(problem, build_stages(problem, firsts, members, way), count)

    def versions() -> list[Version]:
        found = []
        for way in _WAYS:
            rows = {kind: sums[kind] + (both[kind][0] if way.recompute else 0.0) for kind in sums}
            firsts = balanced_cut([rows[kind] for kind in kinds], [room.fits(need, way) for need in needs])
            if firsts is not None:
                stages = np.array([stage_sums(rows[kind], firsts)[s] for s, kind in enumerate(kinds)])
                found.append(Version(pipeline_seconds(stages, count), partial(make, firsts, way)))
        return found

    def nearest() -> Plan | None:
        firsts = best_cut(room.filled(need, _WAYS[-1]) for need in needs)
        return None if firsts is None else make(firsts, _WAYS[-1])

    seconds = max(least, count * divided_work(sums, Counter(kinds)))
    memory = sum(problem.cluster.kinds[kind].memory for kind in kinds)
    return Idea(seconds, memory, size, versions, nearest)


SCHEMES: dict[str, Scheme] = {"data-even": data_even, "data": data, "pipeline": pipeline, "grid": grid}
