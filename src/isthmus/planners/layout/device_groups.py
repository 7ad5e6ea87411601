"""What a plan is put together from: bundles of devices, and the orders in which they may follow each other.

A *bundle* is one or more replicas (tensor groups, or single devices) that always stand in the same stage. On a small
cluster every replica is a bundle of its own; on a large one the equal replicas of a host, or of several hosts, are
taken together, so that the number of bundles stays small however many devices there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import ceil
from typing import NamedTuple

from isthmus.planners.problem import Problem
from isthmus.planners.schemes.device_sets import best_link, tensor_groups
from isthmus.planners.schemes.grid import divides_heads

__all__ = ["Bundle", "Groups", "all_bundles", "bundle_of", "orders", "tensor_degrees"]

Groups = tuple[tuple[str, ...], ...]

MOST_BUNDLES = 24
_ALL_ORDERS = 3  # regions: of more, only chains along the best links
_MOST_ORDERS = 8
_RETURNING = 3  # of them, that are also tried coming back to where they began


class Bundle(NamedTuple):
    """Replicas that stand in the same stage: of one kind, on one host or on equal hosts of one region."""

    groups: Groups
    kind: str
    host: str  # of the first
    region: str
    hosts: int
    speed: float  # samples a second

    @property
    def devices(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(device for group in self.groups for device in group)


def all_bundles(problem: Problem, degree: int = 1, most: int = MOST_BUNDLES) -> tuple[Bundle, ...]:
    """All usable devices as bundles, host by host; equal ones are taken together as far as needed to have few."""
    single = [bundle_of(problem, (group,)) for group in tensor_groups(problem, problem.usable, degree)]
    if len(single) <= most:
        return tuple(single)
    by_host: dict[tuple[str, str], list[Bundle]] = {}
    for bundle in single:
        by_host.setdefault((bundle.host, bundle.kind), []).append(bundle)
    whole = [_joined(problem, members) for members in by_host.values()]
    if len(whole) <= most:
        return tuple(whole)
    by_class: dict[tuple[str, str, int], list[Bundle]] = {}
    for bundle in whole:
        by_class.setdefault((bundle.region, bundle.kind, len(bundle.groups)), []).append(bundle)
    parts = max(1, most // len(by_class))
    bundles = []
    for members in by_class.values():
        size = ceil(len(members) / parts)
        bundles += [_joined(problem, members[i : i + size]) for i in range(0, len(members), size)]
    return tuple(bundles)


def bundle_of(problem: Problem, groups: Groups) -> Bundle:
    """Replicas as one bundle."""
    lead = groups[0][0]
    hosts = {problem.cluster.devices[group[0]].host for group in groups}
    kind, host = problem.cluster.devices[lead].kind, problem.cluster.host_of(lead)
    speed = problem.speed(lead) * sum(len(group) for group in groups)
    return Bundle(groups, kind, host.name, host.region, len(hosts), speed)


def _joined(problem: Problem, members: Sequence[Bundle]) -> Bundle:
    return bundle_of(problem, tuple(group for bundle in members for group in bundle.groups))


def tensor_degrees(problem: Problem) -> list[int]:
    """Sizes of tensor groups that the heads and the hosts allow."""
    usable = Counter(device.rpartition("/")[0] for device in problem.usable)  # of one kind on one host
    most = max(usable.values())
    return [1, *(degree for degree in range(2, most + 1) if divides_heads(problem, degree))]


def orders(problem: Problem, bundles: Sequence[Bundle]) -> list[tuple[Bundle, ...]]:
    """In which order stages may have the bundles: regions along good links, in each the fastest or roomiest first."""
    regions = dict.fromkeys(bundle.region for bundle in bundles)
    memory = {bundle.kind: problem.cluster.kinds[bundle.kind].memory for bundle in bundles}
    within = [
        sorted(bundles, key=lambda bundle: (-bundle.speed / len(bundle.groups), bundle.host)),
        sorted(bundles, key=lambda bundle: (bundle.speed / len(bundle.groups), bundle.host)),
        sorted(bundles, key=lambda bundle: (-memory[bundle.kind], bundle.host)),
    ]
    chains = list(_chains(problem, tuple(regions)))
    found = dict.fromkeys(
        tuple(bundle for region in chain for bundle in within[(turn + shift) % 3] if bundle.region == region)
        for shift in range(3)
        for turn, chain in enumerate(chains)
    )
    first = list(found)[:_MOST_ORDERS]
    ends = {0, len(problem.graph.blocks) - 1}
    tied = any(ends <= set(users) for users, _ in problem.table.tied)
    return list(dict.fromkeys((*first, *(_returning(first, len(regions)) if tied or len(regions) > 1 else ()))))


def _returning(found: Sequence[tuple[Bundle, ...]], regions: int) -> Iterator[tuple[Bundle, ...]]:
    """Orders that come back to the first region (of one region: to the first host), at the end or after the next one.

    Weights that the first block and the last share are then synced inside it; where regions are several, places in
    between can be kept.
    """
    for order in found[: _RETURNING if regions > 1 else 1]:
        at = [bundle.region if regions > 1 else bundle.host for bundle in order]
        home = [bundle for bundle, place in zip(order, at, strict=True) if place == at[0]]
        away = [(bundle, place) for bundle, place in zip(order, at, strict=True) if place != at[0]]
        if len(home) > 1 and away:
            half = (len(home) + 1) // 2
            next_one = [bundle for bundle, place in away if place == away[0][1]]
            others = [bundle for bundle, place in away if place != away[0][1]]
            yield (*home[:half], *(bundle for bundle, _ in away), *home[half:])
            yield (*home[:half], *next_one, *home[half:], *others)


def _chains(problem: Problem, regions: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Orders of regions: all or, of many, from each region always on to the one with the best link, both ways round."""
    if len(regions) <= _ALL_ORDERS:
        yield from permutations(regions)
        return
    for first in regions[: _MOST_ORDERS // 2]:
        chain, left = [first], [region for region in regions if region != first]
        while left:
            last = chain[-1]
            chain.append(max(left, key=lambda region: best_link(problem.cluster, last, region) or (0.0, 0.0)))
            left.remove(chain[-1])
        yield tuple(chain)
        yield tuple(chain[::-1])
