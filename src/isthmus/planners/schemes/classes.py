"""Stages of one device class each: even layers, equal replicas, any kind in any place.

This is the space of the best published planner (Sailor, SOSP 2025), which never cuts layers by speed. A class is all
devices of one kind in one region. With d equal replicas, tensor degree t[c] and n[c] stages of class c, which takes
n[c] d t[c] of its devices, the p = sum n stages have layers as even as can be: none weighs more than the limit E(p). So
the stages of c have at least W - E(p) (p - n[c]) of the layers' weight W, the busiest of them an n[c]-th part of it.
Mixes are taken in the order of that bound (and of what must pass between regions), in every order of their classes,
each class standing together.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, combinations, permutations, product
from math import prod
from typing import NamedTuple

import numpy as np

from isthmus.planners.layout.cuts import even_limits, span_sums
from isthmus.planners.layout.device_groups import best_link, divides_heads, tensor_groups
from isthmus.planners.layout.layout_types import Stage, Staged
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.shares import divisors
from isthmus.planners.problem import Bools, Floats, Problem
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.staged_ideas import even_layers, micro_sizes, staged_ideas, versions, ways_of

__all__ = ["classes"]

_MOST_IDEAS = 120  # mixes of the same classes, times orders of these classes
_ALL_SUBSETS = 4  # classes: of more, only the strongest are tried together
_ALL_DEGREES = 64  # combinations of tensor degrees: of more, only equal ones
_ALL_SPREADS = 8  # ways to give each class its number of stages: of more, only the extremes
_ALL_ORDERS = 3  # classes: of more, only orders that follow the best links
_DEGREES = 10  # numbers of replicas


class _Class(NamedTuple):
    """Devices of one kind in one region, as tensor groups of each degree, host by host."""

    groups: dict[int, list[tuple[str, ...]]]

    @property
    def lead(self) -> str:
        """Return the first device of the class."""
        return self.groups[1][0][0]


class _Mix(NamedTuple):
    """A number of stages for each class of a subset, with their replicas."""

    seconds: float  # no plan of it is faster
    subset: tuple[_Class, ...]
    degrees: tuple[int, ...]
    stages: tuple[int, ...]
    replicas: int
    micro: int  # samples of a micro-batch on one replica


def classes(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose, for all classes that may work together, the mixes with the best bounds, in every order."""
    layers = _layers(problem)
    limits, sums = even_limits(layers), span_sums(layers)
    for subset in _subsets(_classes(problem)):
        orders = list(_orders(problem, subset))
        most = max(1, _MOST_IDEAS // len(orders))
        for mix in heapq.nsmallest(most, _mixes(problem, subset, layers, limits), key=lambda mix: mix.seconds):
            allowed = sums <= limits[sum(mix.stages) - 1] * (1 + 1e-9)
            yield from (_idea(problem, memory, mix, order, layers, allowed) for order in orders)


def _idea(problem: Problem, memory: MemoryFit, mix: _Mix, order: Sequence[int], layers: Floats, allowed: Bools) -> Idea:
    stages = [stage for c in order for stage in _stages(mix, c)]
    staged = Staged(tuple(stages), problem.job.batch // (mix.replicas * mix.micro))
    borders = [end - 1 for end in accumulate(mix.stages[c] for c in order)][:-1]
    ways, cuts = ways_of(mix.replicas), [partial(_even, [layers] * len(stages))]
    (idea,) = staged_ideas(problem, memory, staged, cuts, ways, borders)
    made = partial(versions, problem, memory, staged, cuts, ways, allowed)
    return idea._replace(seconds=max(idea.seconds, mix.seconds), versions=made)


def _even(rows: list[Floats], way: object) -> list[Floats]:
    return rows


def _layers(problem: Problem) -> Floats:
    """Return what stages should share evenly: the work of repeated blocks, else of all blocks, else their number."""
    rows = (even_layers(problem), np.array([block.forward_flops for block in problem.graph.blocks]))
    return next((row for row in rows if row.any()), np.ones(len(problem.graph.blocks)))


def _classes(problem: Problem) -> list[_Class]:
    """Return the classes of the cluster, the strongest first."""
    members: dict[tuple[str, str], list[str]] = {}
    for device in problem.usable:
        key = problem.cluster.host_of(device).region, problem.cluster.devices[device].kind
        members.setdefault(key, []).append(device)
    found = []
    for devices in sorted(members.values(), key=lambda row: -len(row) * problem.speed(row[0])):
        most = max(problem.cluster.host_of(d).devices[problem.cluster.devices[d].kind] for d in devices)
        degrees = [1, *(t for t in range(2, most + 1) if divides_heads(problem, t))]
        found.append(_Class({t: tensor_groups(problem, devices, t) for t in degrees}))
    return found


def _subsets(found: Sequence[_Class]) -> Iterator[tuple[_Class, ...]]:
    """Yield classes that work together: any, or each alone and the strongest."""
    if len(found) <= _ALL_SUBSETS:
        for size in range(1, len(found) + 1):
            yield from combinations(found, size)
    else:
        yield from ((member,) for member in found)
        yield from (tuple(found[:size]) for size in range(2, len(found) + 1))


def _tensor_degrees(subset: Sequence[_Class]) -> list[tuple[int, ...]]:
    """Return a degree for each class: any, or the same for all as far as they have it."""
    own = [sorted(member.groups) for member in subset]
    if prod(len(degrees) for degrees in own) <= _ALL_DEGREES:
        return list(product(*own))
    largest = max(own, key=len)
    return [tuple(max(t for t in degrees if t <= degree) for degrees in own) for degree in largest]


def _mixes(problem: Problem, subset: tuple[_Class, ...], layers: Floats, limits: Floats) -> Iterator[_Mix]:
    """Yield all tensor degrees, replicas, depths and micro-batches, with their bounds."""
    most, blocks = max(len(member.groups[1]) for member in subset), len(layers)
    replicas = _thinned([d for d in divisors(problem.job.batch) if d <= most], _DEGREES)
    gap, counted = _gap(problem, subset), layers > 0.0
    for degrees, count in product(_tensor_degrees(subset), replicas):
        caps = [len(member.groups[t]) // count for member, t in zip(subset, degrees, strict=True)]
        if not all(caps):
            continue
        kinds = [problem.replica_kind(member.groups[t][0]) for member, t in zip(subset, degrees, strict=True)]
        spreads = list(_spreads(problem, subset, caps, blocks))
        for micro in micro_sizes(problem, count):
            rows = [problem.block_seconds(*kind, micro).sum(axis=0) for kind in kinds]
            per_weight = [float((row[counted] / layers[counted]).min()) for row in rows]
            around = float(np.min(rows, axis=0).sum()) + gap.travel if problem.serial else 0.0
            micro_batches = problem.job.batch // (count * micro)
            for stages in spreads:
                busiest = _busiest(per_weight, float(layers.sum()), stages, float(limits[sum(stages) - 1]))
                trips = -(-micro_batches // sum(stages)) * around
                seconds = max(micro_batches * busiest, trips, gap.whole, gap.single / count)
                yield _Mix(seconds, subset, degrees, stages, count, micro)


class _Gap(NamedTuple):
    """The least seconds of messages between the regions of a subset."""

    travel: float  # of one micro-batch, to the last region and back
    single: float  # of all samples, between two hosts
    whole: float  # of all samples, over the trunk of two regions


def _gap(problem: Problem, subset: Sequence[_Class]) -> _Gap:
    """Return what passes between regions. Each region is next to another one: at least all samples pass to its best
    neighbour.
    """
    cluster, size = problem.network, problem.job.batch * problem.thinnest
    regions = list(dict.fromkeys(cluster.host_of(member.lead).region for member in subset))
    if len(regions) < 2:
        return _Gap(0.0, 0.0, 0.0)
    links = {(a, b): best_link(cluster, a, b) for a, b in permutations(regions, 2)}
    single, whole = 0.0, 0.0
    for a in regions:
        near = [(b, link) for b in regions if b != a and (link := links[a, b]) is not None]
        if not near:
            return _Gap(float("inf"), 0.0, 0.0)
        single = max(single, min(size / link[0] for _, link in near))
        whole = max(whole, min(size / (cluster.trunk(a, b) or float("inf")) for b, _ in near))
    least = min(-link[1] for link in links.values() if link is not None)
    return _Gap(2 * (len(regions) - 1) * least, single, whole)


def _thinned(numbers: Sequence[int], most: int) -> list[int]:
    """Return so many of the numbers at most, spread out, the first and the last among them."""
    if len(numbers) <= most:
        return list(numbers)
    step = (len(numbers) - 1) / (most - 1)
    return [numbers[round(i * step)] for i in range(most)]


def _busiest(per_weight: Sequence[float], weight: float, stages: Sequence[int], limit: float) -> float:
    """Return the least seconds that the busiest stage of some class computes a micro-batch."""
    depth = sum(stages)
    pairs = zip(per_weight, stages, strict=True)
    return max(seconds * max(0.0, weight - limit * (depth - own)) / own for seconds, own in pairs)


def _spreads(problem: Problem, subset: Sequence[_Class], caps: Sequence[int], blocks: int) -> Iterator[tuple[int, ...]]:
    """Yield how many stages each class has: all ways or, for usual depths, most for the fastest,
    or for those with most memory.
    """
    ways = prod(caps)
    if ways <= _ALL_SPREADS:
        yield from (way for way in product(*(range(1, cap + 1) for cap in caps)) if sum(way) <= blocks)
        return
    first = range(len(subset))
    quick = sorted(first, key=lambda i: -problem.speed(subset[i].lead))
    large = sorted(first, key=lambda i: -problem.cluster.kind_of(subset[i].lead).memory)
    most = min(sum(caps), blocks)
    usual = {most, *range(1, 9), *(d for d in divisors(blocks)), *(2**i for i in range(most.bit_length()))}
    for depth in sorted(d for d in usual if len(subset) <= d <= most):
        yield from dict.fromkeys(_filled(depth, caps, order) for order in (quick, large))


def _filled(depth: int, caps: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Give each class one stage, and the rest to the first of the order that can take more."""
    stages, left = [1] * len(caps), depth - len(caps)
    for i in order:
        more = min(left, caps[i] - 1)
        stages[i], left = stages[i] + more, left - more
    return tuple(stages)


def _orders(problem: Problem, subset: Sequence[_Class]) -> Iterator[tuple[int, ...]]:
    """Yield every order or, of many classes, the chains along the best links."""
    if len(subset) <= _ALL_ORDERS:
        yield from permutations(range(len(subset)))
        return
    for first in range(len(subset)):
        chain, left = [first], [c for c in range(len(subset)) if c != first]
        while left:
            last = subset[chain[-1]]
            chain.append(max(left, key=lambda c: _nearness(problem, last, subset[c])))
            left.remove(chain[-1])
        yield tuple(chain)


def _nearness(problem: Problem, a: _Class, b: _Class) -> float:
    """Return the bytes a second between the first devices of two classes."""
    hosts = problem.cluster.host_of(a.lead), problem.cluster.host_of(b.lead)
    if hosts[0].name == hosts[1].name:
        return float("inf")
    link = problem.network.link(hosts[0].name, hosts[1].name)
    return 0.0 if link is None else float(link.bandwidth)


def _stages(mix: _Mix, c: int) -> list[Stage]:
    groups = [(group, mix.micro) for group in mix.subset[c].groups[mix.degrees[c]]]
    return [tuple(groups[s * mix.replicas : (s + 1) * mix.replicas]) for s in range(mix.stages[c])]
