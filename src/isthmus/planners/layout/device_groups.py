"""Tensor groups, bundles of devices, and the orders in which bundles may follow each other.

A *bundle* is one or more replicas (tensor groups, or single devices) that always stand in the same stage. On a small
cluster every replica is a bundle of its own; on a large one the equal replicas of a host, or of several hosts, are
taken together, so that the number of bundles stays small however many devices there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby, permutations
from math import ceil

from isthmus.cluster.spec import Cluster
from isthmus.planners.layout.layout_types import Bundle, Groups
from isthmus.planners.problem import Problem

__all__ = [
    "all_bundles",
    "best_link",
    "bundle_of",
    "divides_heads",
    "largest_host",
    "orders",
    "tensor_degrees",
    "tensor_groups",
]


MOST_BUNDLES = 24
_ALL_ORDERS = 3  # regions: of more, only chains along the best links
_MOST_ORDERS = 8
_RETURNING = 3  # of them, that are also tried coming back to where they began


def all_bundles(problem: Problem, degree: int = 1, most: int = MOST_BUNDLES) -> tuple[Bundle, ...]:
    """Return all usable devices as bundles, host by host; equal ones are joined as far as needed to have few."""
    single = [bundle_of(problem, (group,)) for group in tensor_groups(problem, problem.usable, degree)]
    if len(single) <= most:
        return tuple(single)
    by_host: dict[tuple[str, str], list[Bundle]] = {}
    for bundle in single:
        by_host.setdefault((bundle.host, bundle.kind), []).append(bundle)
    whole = [_one_bundle(problem, members) for members in by_host.values()]
    if len(whole) <= most:
        return tuple(whole)
    by_class: dict[tuple[str, str, int], list[Bundle]] = {}
    for bundle in whole:
        by_class.setdefault((bundle.region, bundle.kind, len(bundle.groups)), []).append(bundle)
    parts = max(1, most // len(by_class))
    bundles = []
    for members in by_class.values():
        size = ceil(len(members) / parts)
        bundles += [_one_bundle(problem, members[i : i + size]) for i in range(0, len(members), size)]
    return tuple(bundles)


def bundle_of(problem: Problem, groups: Groups) -> Bundle:
    """Return replicas as one bundle."""
    lead = groups[0][0]
    hosts = {problem.cluster.devices[group[0]].host for group in groups}
    kind, host = problem.cluster.devices[lead].kind, problem.cluster.host_of(lead)
    speed = problem.speed(lead) * sum(len(group) for group in groups)
    return Bundle(groups, kind, host.name, host.region, len(hosts), speed)


def _one_bundle(problem: Problem, members: Sequence[Bundle]) -> Bundle:
    return bundle_of(problem, tuple(group for bundle in members for group in bundle.groups))


def tensor_degrees(problem: Problem) -> list[int]:
    """Return the sizes of tensor groups that the heads and the hosts allow."""
    usable = Counter(device.rpartition("/")[0] for device in problem.usable)  # of one kind on one host
    most = max(usable.values())
    return [1, *(degree for degree in range(2, most + 1) if divides_heads(problem, degree))]


def orders(problem: Problem, bundles: Sequence[Bundle]) -> list[tuple[Bundle, ...]]:
    """Return the orders in which stages may have the bundles: regions along good links, in each the fastest or those
    with most memory first.
    """
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
    """Yield orders that come back to the first region (of one region: to the first host), at the end or after the next
    one.

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
    """Yield orders of regions: all or, of many, from each region always on to the one with the best link, both ways
    round.
    """
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


def tensor_groups(problem: Problem, devices: Sequence[str], degree: int) -> list[tuple[str, ...]]:
    """Return groups of equal devices of one host, or of several hosts if none is large enough; a rest stays idle."""
    cluster = problem.cluster
    wide = degree > max(Counter(device.rpartition("/")[0] for device in devices).values())
    groups: list[tuple[str, ...]] = []
    for _, members in groupby(devices, key=lambda d: cluster.devices[d].kind if wide else d.rpartition("/")[0]):
        row = list(members)
        groups.extend(tuple(row[i : i + degree]) for i in range(0, len(row) - degree + 1, degree))
    return [group for group in groups if _joined(problem, group)] if wide else groups


def _joined(problem: Problem, group: Sequence[str]) -> bool:
    """Return whether all hosts of a group can talk directly."""
    hosts = dict.fromkeys(problem.cluster.devices[device].host for device in group)
    return all(problem.cluster.link(a, b) is not None for a, b in combinations(hosts, 2))


def divides_heads(problem: Problem, tp: int) -> bool:
    """Return whether some block can be split, and every block that can be split can be split `tp` ways."""
    heads = {block.tensor.heads for block in problem.graph.blocks if block.tensor is not None}
    return bool(heads) and all(head % tp == 0 for head in heads)


def largest_host(problem: Problem) -> int:
    """Count the devices of one kind on the host that has most."""
    return max(max(host.devices.values(), default=0) for host in problem.cluster.hosts.values())


def best_link(cluster: Cluster, a: str, b: str) -> tuple[float, float] | None:
    """Return the largest bandwidth and, as a negative number,
    the least latency of links between hosts of two regions.
    """
    where = {name: host.region for name, host in cluster.hosts.items()}
    links = [link for link in cluster.links if sorted(where.get(end, end) for end in link.between) == sorted((a, b))]
    if not links:
        return None
    return max(float(link.bandwidth) for link in links), -min(float(link.latency) for link in links)
