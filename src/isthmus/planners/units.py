"""What a plan is put together from: units of devices, and the orders in which they may follow each other.

A *unit* is one or more replicas (tensor groups, or single devices) that always stand in the same stage. On a small
cluster every replica is a unit of its own; on a large one the equal replicas of a host, or of several hosts, are taken
together, so that the number of units stays small however many devices there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import permutations
from math import ceil
from typing import NamedTuple

from isthmus.planners.devices import best_link, tensor_groups
from isthmus.planners.grid import divides_heads
from isthmus.planners.problem import Problem

__all__ = ["Groups", "Unit", "all_units", "orders", "tensor_degrees", "unit_of"]

Groups = tuple[tuple[str, ...], ...]

MOST_UNITS = 24
_ALL_ORDERS = 3  # regions: of more, only chains along the best links
_MOST_ORDERS = 8
_RETURNING = 3  # of them, that are also tried coming back to where they began


class Unit(NamedTuple):
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


def all_units(problem: Problem, degree: int = 1, most: int = MOST_UNITS) -> tuple[Unit, ...]:
    """All usable devices as units, host by host; equal ones are taken together as far as needed to have few."""
    single = [unit_of(problem, (group,)) for group in tensor_groups(problem, problem.usable, degree)]
    if len(single) <= most:
        return tuple(single)
    by_host: dict[tuple[str, str], list[Unit]] = {}
    for unit in single:
        by_host.setdefault((unit.host, unit.kind), []).append(unit)
    whole = [_joined(problem, members) for members in by_host.values()]
    if len(whole) <= most:
        return tuple(whole)
    by_class: dict[tuple[str, str, int], list[Unit]] = {}
    for unit in whole:
        by_class.setdefault((unit.region, unit.kind, len(unit.groups)), []).append(unit)
    parts = max(1, most // len(by_class))
    bundles = []
    for members in by_class.values():
        size = ceil(len(members) / parts)
        bundles += [_joined(problem, members[i : i + size]) for i in range(0, len(members), size)]
    return tuple(bundles)


def unit_of(problem: Problem, groups: Groups) -> Unit:
    """Replicas as one unit."""
    lead = groups[0][0]
    hosts = {problem.cluster.devices[group[0]].host for group in groups}
    kind, host = problem.cluster.devices[lead].kind, problem.cluster.host_of(lead)
    speed = problem.speed(lead) * sum(len(group) for group in groups)
    return Unit(groups, kind, host.name, host.region, len(hosts), speed)


def _joined(problem: Problem, members: Sequence[Unit]) -> Unit:
    return unit_of(problem, tuple(group for unit in members for group in unit.groups))


def tensor_degrees(problem: Problem) -> list[int]:
    """Sizes of tensor groups that the heads and the hosts allow."""
    usable = Counter(device.rpartition("/")[0] for device in problem.usable)  # of one kind on one host
    most = max(usable.values())
    return [1, *(degree for degree in range(2, most + 1) if divides_heads(problem, degree))]


def orders(problem: Problem, units: Sequence[Unit]) -> list[tuple[Unit, ...]]:
    """In which order the stages may have the units: regions along good links, in each the fastest or roomiest first."""
    regions = dict.fromkeys(unit.region for unit in units)
    memory = {unit.kind: problem.cluster.kinds[unit.kind].memory for unit in units}
    within = [
        sorted(units, key=lambda unit: (-unit.speed / len(unit.groups), unit.host)),
        sorted(units, key=lambda unit: (unit.speed / len(unit.groups), unit.host)),
        sorted(units, key=lambda unit: (-memory[unit.kind], unit.host)),
    ]
    chains = list(_chains(problem, tuple(regions)))
    found = dict.fromkeys(
        tuple(unit for region in chain for unit in within[(turn + shift) % 3] if unit.region == region)
        for shift in range(3)
        for turn, chain in enumerate(chains)
    )
    first = list(found)[:_MOST_ORDERS]
    return list(dict.fromkeys((*first, *_returning(first, len(regions)))))


def _returning(found: Sequence[tuple[Unit, ...]], regions: int) -> Iterator[tuple[Unit, ...]]:
    """Orders that come back to the first region, at the end or after the next one.

    Weights that the first block and the last share are then synced inside a region, and places in between can be kept.
    """
    for order in found[:_RETURNING] if regions > 1 else ():
        home = [unit for unit in order if unit.region == order[0].region]
        away = [unit for unit in order if unit.region != order[0].region]
        if len(home) > 1:
            half = (len(home) + 1) // 2
            next_one = [unit for unit in away if unit.region == away[0].region]
            others = [unit for unit in away if unit.region != away[0].region]
            yield (*home[:half], *away, *home[half:])
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
