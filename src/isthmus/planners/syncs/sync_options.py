"""Ways in which each bucket of a plan could become equal: orders of rings, roots of servers, weights by factors.

A bucket is offered as it is in the plan; around a ring in an order that crosses slow links least; by a tree; by a
server at each of the three best roots; and the linear weights in it by factors, where those are not much more than a
ring sends: with `batch` samples a step of `rows` rows each, every device of n sends (n - 1) / n times

    factors: batch * rows * (inputs + outputs)        ring: 2 * inputs * outputs * kept
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cost.network import Fabric
from isthmus.plan.types import How, Pipeline, Plan, Sync
from isthmus.planners.layout.build_plan import only_pipeline
from isthmus.planners.problem import Problem
from isthmus.planners.syncs.ring_order import NO_WAY, pass_seconds, ring_order

__all__ = ["GIVEN", "Offer", "Offers", "make_offers"]

GIVEN = "given"  # the way that the plan has
_ROOTS = 3
_MOST_BUCKETS = 48  # more are joined, so that the programme stays small
_MOST_MESSAGES = 200_000  # of all buckets one way: what plays in a fifth of a second
_MOST_FACTORS = 2.0  # times a ring's bytes: beyond that, factors that leave earlier cannot make up for it
_LINEAR = ".linear"  # ends the names of buckets that were taken out of others


class Offer(NamedTuple):
    """One bucket, and the syncs that could be its own, by the name of the way; the first is the plan's."""

    ways: Mapping[str, Sync]
    whole: tuple[str, ...]  # what the bucket had before its linear weights were taken out

    @property
    def bucket(self) -> str:
        """Return the bucket's name."""
        return self.ways[GIVEN].bucket


class Offers(NamedTuple):
    """A plan as buckets with ways to choose from; `fixed` syncs stay as they are."""

    plan: Plan
    offers: tuple[Offer, ...]
    fixed: tuple[Sync, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """Return all ways that some bucket has."""
        return tuple(dict.fromkeys(way for offer in self.offers for way in offer.ways))

    def planned(self, ways: Sequence[str], *, joined: bool = True) -> Plan:
        """Return the plan with each bucket synced in the given way, or as it was where it lacks that.

        `joined`: weights taken out of a bucket go back into it if both are synced alike after all.
        """
        syncs = [offer.ways.get(way, offer.ways[GIVEN]) for offer, way in zip(self.offers, ways, strict=True)]
        part = only_pipeline(self.plan)
        kept = tuple(_joined(self.offers, syncs)) if joined else tuple(syncs)
        return replace(self.plan, parts=(replace(part, syncs=kept + self.fixed),))


def make_offers(problem: Problem, plan: Plan) -> Offers:
    """Return each bucket with its ways. Syncs of state that is sharded whole and of duplicates are left alone."""
    part, net = only_pipeline(plan), problem.simulator.fabric(plan)
    whole = {replica.devices[0] for s in part.stages if s.state == "sharded-all" for replica in s.replicas}
    fixed = [sync for sync in part.syncs if sync.how == "duplicate" or not whole.isdisjoint(sync.participants)]
    syncs = _merged([sync for sync in part.syncs if sync not in fixed])
    pieces = [(piece, sync.parameters) for sync in syncs for piece in _parted(problem, part, sync, fixed, syncs)]
    parted = [piece for piece, _ in pieces]
    sizes = _sizes(problem, [*parted, *fixed])
    totals: dict[tuple[str, ...], float] = {}
    for sync, size in zip(parted, sizes, strict=False):
        totals[sync.participants] = totals.get(sync.participants, 0.0) + size
    stars = {members: _Ways(net, members, size, len(parted)) for members, size in totals.items()}
    offers = tuple(Offer(_ways(problem, part, sync, stars[sync.participants]), whole) for sync, whole in pieces)
    return Offers(plan, offers, tuple(fixed))


def _sizes(problem: Problem, syncs: Sequence[Sync]) -> list[float]:
    """Return the bytes of each sync."""
    named = frozenset(name for sync in syncs for name in sync.parameters if name[0] != "[")
    return [problem.table.bucket(sync.parameters, named).elements * problem.table.width for sync in syncs]


# -- which buckets


def _merged(syncs: list[Sync]) -> list[Sync]:
    """Join neighbours that are alike two by two while there are too many."""
    while len(syncs) > _MOST_BUCKETS:
        found: list[Sync] = []
        single = False  # whether the last is still one
        for sync in syncs:
            if single and sync == replace(found[-1], bucket=sync.bucket, parameters=sync.parameters):
                found[-1] = replace(found[-1], parameters=found[-1].parameters + sync.parameters)
                single = False
            else:
                found.append(sync)
                single = True
        if len(found) == len(syncs):
            break
        syncs = found
    return syncs


def _parted(
    problem: Problem, part: Pipeline, sync: Sync, fixed: Sequence[Sync], syncs: Sequence[Sync]
) -> Iterator[Sync]:
    """Yield a bucket, or the linear weights in it that may go by factors and the rest."""
    named = {name for other in (*syncs, *fixed) for name in other.parameters if name[0] != "["}
    names = list(_expanded(problem, sync, named))
    weights = tuple(name for name in names if _by_factors(problem, part, name))
    if not weights or sync.how == "factors" or len(weights) == len(names):
        yield sync
        return
    rest = tuple(word for word in sync.parameters if _left(problem, word, named | set(weights)))
    yield replace(sync, parameters=tuple(word for word in rest if word not in weights))
    yield replace(sync, bucket=sync.bucket + _LINEAR, parameters=weights)


def _expanded(problem: Problem, sync: Sync, named: set[str]) -> Iterator[str]:
    for word in sync.parameters:
        if word[0] == "[":
            block = problem.graph.blocks[problem.graph.by_name[word[1:-1]]]
            yield from (name for name in block.parameters if name not in named)
        else:
            yield word


def _left(problem: Problem, word: str, named: set[str]) -> bool:
    """Return whether a word of a bucket still stands for anything without the `named` parameters."""
    if word[0] != "[":
        return True
    block = problem.graph.blocks[problem.graph.by_name[word[1:-1]]]
    return any(name not in named for name in block.parameters)


def _by_factors(problem: Problem, part: Pipeline, name: str) -> bool:
    """Return whether a weight is linear, untied, held alike by all replicas, and its factors are not too much."""
    parameter, users = problem.graph.parameter[name], problem.table.users[name]
    linear = parameter.linear
    if linear is None or parameter.ties or len(users) != 1:
        return False
    by_name = problem.graph.by_name
    stage = next(s for s in part.stages if by_name[s.first] <= users[0] <= by_name[s.last])
    if len({len(replica.devices) for replica in stage.replicas}) > 1:
        return False
    factors = part.job.batch * linear.rows * (linear.inputs + linear.outputs)
    return factors <= _MOST_FACTORS * 2.0 * linear.inputs * linear.outputs * (stage.kept or 1.0)


def _joined(offers: Sequence[Offer], syncs: Sequence[Sync]) -> Iterator[Sync]:
    """Put weights back that were taken out of the bucket before them, where they are synced like it."""
    last: Sync | None = None
    for offer, sync in zip(offers, syncs, strict=True):
        if last is not None and sync == replace(last, bucket=last.bucket + _LINEAR, parameters=sync.parameters):
            last = replace(last, parameters=offer.whole)
            continue
        if last is not None:
            yield last
        last = sync
    if last is not None:
        yield last


# -- which ways


def _ways(problem: Problem, part: Pipeline, sync: Sync, star: _Ways) -> dict[str, Sync]:
    """Return the syncs that a bucket could have, none twice; a ring that is too much to play gives way to a tree."""
    ring: How = "ring" if problem.kept is None else "sparse"
    offered: list[tuple[str, Sync]] = []
    plain = replace(sync, how=ring, root=None)
    if star.around(sync.participants) and star.affordable(2):
        offered.append(("ring", plain))
    if star.around(star.order) and star.affordable(2):
        offered.append(("ordered", replace(plain, participants=star.order)))
    if len(sync.participants) > 2:
        if star.climbs():
            offered.append(("tree", replace(plain, how="tree", participants=star.order)))
        for number, root in enumerate(star.roots):
            offered.append((f"server {number}", replace(plain, how="server", root=root)))
    weights = all(name[0] != "[" and _by_factors(problem, part, name) for name in sync.parameters)
    slices = max(replica.slices for stage in part.stages for replica in stage.replicas)
    if weights and star.affordable(part.micro_batches * slices) and star.meet():
        offered.append(("factors", replace(plain, how="factors")))
    first = sync if star.affordable(2) else dict(offered).get("tree", sync)
    found = {GIVEN: first}
    for way, other in offered:
        if other not in found.values():
            found[way] = other
    return found


class _Ways:
    """The routes, loads and orders that participants of a sync can use."""

    def __init__(self, net: Fabric, members: tuple[str, ...], size: float, buckets: int) -> None:
        """Take the members of a sync. `size`: bytes that they sync in all; `buckets`: of all participants."""
        self.net, self.members, self.buckets = net, members, buckets
        self.order = ring_order(net, members, size)
        self.roots = self._roots(size) if len(members) > 2 else ()

    def affordable(self, rounds: int) -> bool:
        """Return whether so many rounds of all-to-all messages are not too many to play."""
        n = len(self.members)
        return rounds * n * (n - 1) * self.buckets <= _MOST_MESSAGES

    def around(self, order: Sequence[str]) -> bool:
        """Return whether every member can send to the next one around a ring in this order."""
        return self._all(pairwise((*order, order[0])))

    def climbs(self) -> bool:
        """Return whether messages can pass both ways along the chains of all regions, and around their leaders."""
        regions: dict[int, list[str]] = {}
        for name in self.order:
            regions.setdefault(int(self.net.wires.region_of[self.net.number[name]]), []).append(name)
        leaders = [chain[0] for chain in regions.values()]
        hops = [hop for chain in regions.values() for hop in pairwise(chain)]
        return self._all([*hops, *((b, a) for a, b in hops), *pairwise((*leaders, leaders[0]))])

    def meet(self) -> bool:
        """Return whether everyone can send to everyone."""
        return self._all((a, b) for a in self.members for b in self.members)

    def _all(self, pairs: Iterable[tuple[str, str]]) -> bool:
        number, routes = self.net.number, self.net.wires.route_of
        return all(a == b or routes[number[a], number[b]] >= 0 for a, b in pairs)

    def _roots(self, size: float) -> tuple[str, ...]:
        """Return the participants that serve all others fastest, one of each host."""
        hosts: dict[int, str] = {}
        for name in self.members:
            hosts.setdefault(int(self.net.wires.host_of[self.net.number[name]]), name)
        stars = {
            root: pass_seconds(self.net, [*((a, root) for a in self.members), *((root, a) for a in self.members)], size)
            for root in sorted(hosts.values(), key=self._reach, reverse=True)[: 2 * _ROOTS]
        }
        fast = sorted((seconds, root) for root, seconds in stars.items() if seconds < NO_WAY)
        return tuple(root for _, root in fast[:_ROOTS])

    def _reach(self, root: str) -> float:
        """Return the bytes a second of all messages from a participant, each alone."""
        net, here = self.net, self.net.number[root]
        routes = net.wires.route_of[here, [net.number[name] for name in self.members if name != root]]
        return float(net.wires.rate[routes[routes >= 0]].sum())
