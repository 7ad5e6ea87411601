"""Greedy by region: a pipeline of regions, as one would lay it out by hand.

It starts in the strongest region and goes on to the region with the best link from there, and so on; it may end after
any of them, and run the other way round. Inside a region its devices, or those of its strongest kind, stand in rows of
a few stages: one for all of them, one a host, one a device, or something between. Replicas of a stage have shares by
their speed, the cut makes all stages equally fast as far as memory lets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import accumulate, product
from typing import NamedTuple

from isthmus.planners.layout.device_groups import best_link, divides_heads, tensor_groups
from isthmus.planners.layout.layout_types import Stage, Staged
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.shares import even_shares, fair_shares, micro_batch_counts
from isthmus.planners.problem import Problem
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.staged_ideas import own_times, staged_ideas, ways_of

__all__ = ["region"]

Groups = tuple[tuple[str, ...], ...]

_AHEAD = (0, 2, 8)  # micro-batches beyond the depth of the pipeline
_MOST_MIXES = 64  # ways to give each region of a chain rows of its own


class _Rows(NamedTuple):
    """The layout of a region: tensor groups of a degree, in so many stages."""

    strongest: bool  # only devices of the kind that computes most
    degree: int
    stages: int  # 0: one a host; -1: one a group


def region(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose every chain of regions with every way to stand that all of them share, or, if there are few, each with
    its own.
    """
    if len({problem.cluster.host_of(device).region for device in problem.usable}) < 2:
        return
    stand = cache(partial(_stand, problem))
    seen = set()
    for chain in _chains(problem):
        for mix in _mixes(problem, len(chain)):
            stands = [stand(name, how) for name, how in zip(chain, mix, strict=True)]
            rows = tuple(stage for stages in stands for stage in stages)
            if rows in seen or not all(stands) or len(rows) > len(problem.graph.blocks):
                continue
            seen.add(rows)
            ends = list(accumulate(len(stages) for stages in stands))
            yield from _ideas(problem, memory, rows, [end - 1 for end in ends[:-1]])


def _chains(problem: Problem) -> Iterator[tuple[str, ...]]:
    """Yield each region alone, and the greedy chain from the strongest one, ended after each region,
    both ways round.
    """
    power: dict[str, float] = {}
    for device in problem.usable:
        name = problem.cluster.host_of(device).region
        power[name] = power.get(name, 0.0) + problem.speed(device)
    chain = [max(power, key=lambda name: power[name])]
    while joined := [
        name for name in power if name not in chain and best_link(problem.cluster, chain[-1], name) is not None
    ]:
        chain.append(max(joined, key=lambda name: best_link(problem.cluster, chain[-1], name) or (0.0, 0.0)))
    for name in power:
        yield (name,)
    for end in range(2, len(chain) + 1):
        yield tuple(chain[:end])
        yield tuple(chain[end - 1 :: -1])


def _mixes(problem: Problem, regions: int) -> Iterator[tuple[_Rows, ...]]:
    """Yield how to arrange the regions: all alike or, where that is not too much, each in one of the usual ways."""
    largest = max(max(host.devices.values(), default=0) for host in problem.cluster.hosts.values())
    degrees = [1, *(t for t in range(2, largest + 1) if divides_heads(problem, t))]
    for strongest, degree in product((False, True), degrees):
        for stages in (1, 0, -1, *(2**i for i in range(1, len(problem.usable).bit_length()))):
            yield (_Rows(strongest, degree, stages),) * regions
    usual = [_Rows(False, degree, stages) for degree in degrees[:1] + degrees[1:][-1:] for stages in (1, 0, -1)]
    if len(usual) ** regions <= _MOST_MIXES:
        yield from product(usual, repeat=regions)


def _stand(problem: Problem, name: str, how: _Rows) -> tuple[Groups, ...]:
    """Return the stages of one region; none where it has no such groups."""
    devices = [device for device in problem.usable if problem.cluster.host_of(device).region == name]
    if how.strongest:
        kinds: dict[str, float] = {}
        for device in devices:
            kind = problem.cluster.devices[device].kind
            kinds[kind] = kinds.get(kind, 0.0) + problem.speed(device)
        best = max(kinds, key=lambda kind: kinds[kind])
        devices = [device for device in devices if problem.cluster.devices[device].kind == best]
    groups = tensor_groups(problem, devices, how.degree)
    if how.stages == 0:
        hosts: dict[str, list[tuple[str, ...]]] = {}
        for group in groups:
            hosts.setdefault(problem.cluster.devices[group[0]].host, []).append(group)
        return tuple(tuple(members) for members in hosts.values())
    sizes = even_shares(len(groups), len(groups) if how.stages < 0 else min(how.stages, len(groups))) if groups else []
    ends = [sum(sizes[: s + 1]) for s in range(len(sizes))]
    return tuple(tuple(groups[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def _ideas(problem: Problem, memory: MemoryFit, rows: Sequence[Groups], borders: Sequence[int]) -> Iterator[Idea]:
    """Yield ideas with several numbers of micro-batches, and of those that are let in to keep far regions busy."""
    for count in micro_batch_counts(problem.job.batch, 1):
        stages = tuple(_shared(problem, groups, problem.job.batch // count) for groups in rows)
        ways = ways_of(max(len(stage) for stage in stages))
        staged, cuts = Staged(stages, count), [own_times(problem, stages)]
        yield from staged_ideas(problem, memory, staged, cuts, ways, borders, _AHEAD if borders else (0,))


def _shared(problem: Problem, groups: Groups, samples: int) -> Stage:
    """Return shares that make all groups finish together; a group with nothing to do is left out."""
    kinds = [problem.replica_kind(group) for group in groups]
    if len(set(kinds)) == 1:
        shares = even_shares(samples, len(groups))
    else:
        times = {kind: partial(problem.whole_seconds, *kind) for kind in dict.fromkeys(kinds)}
        shares = fair_shares(samples, [times[kind] for kind in kinds], least=0)
    return tuple((group, share) for group, share in zip(groups, shares, strict=True) if share)
