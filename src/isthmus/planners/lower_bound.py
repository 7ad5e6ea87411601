"""The lower bound: seconds per step that no plan for these devices can go below.

**Computing.** Give every block b a worth w[b] such that no device of kind k earns more than v[k] a second, whatever it
computes: with c[k, b] the least seconds of a sample of b on k and C[k] their sum over blocks, w[b] = min over k of
c[k, b] / C[k] and v[k] = 1 / C[k] will do. A step has to earn batch * W, W = sum of w, so it takes at least that over
the sum of all v.

**Traffic.** An *island* is a host or a region; X(T) is what it can send to others in T seconds, and get from them. For
every island but one, its home, a plan has the choice:

    whole samples   other samples are computed elsewhere, so the gradients of all weights must pass in and out: of each
                    weight all of it, or (both directions together) the factors of the whole batch, whichever is less
    parts of some   the activations of each such sample pass one way, their gradients the other: X(T) / thin samples at
                    most, with thin the fewest bytes a sample between neighbouring blocks

Where T is too short for all gradients, an island so earns no more than W for each of these samples. (Two islands with
whole samples could do without gradients if the blocks they share with nobody saw all other samples; those pass the
home's border then, so the samples that may pass there are added.) The bound is the least T at which, with the best
home, all islands together earn enough. Blocks that do not simply follow each other have no `thin`: then only computing
counts. Tensor groups are taken to stay inside a host, as those that can run do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.planners.layout.layout_types import Lane
from isthmus.planners.problem import Floats, Problem

__all__ = ["Borders", "Worth", "lower_bound", "passing_seconds", "worth_of"]

_PRECISE = 1e-6  # part of the bound by which it may be too low


class Worth(NamedTuple):
    """The worth of a sample of the whole model, and of a second of each kind."""

    sample: float
    kinds: dict[str, float]


class _Islands(NamedTuple):
    """Hosts or regions; those that are alike stand in one row."""

    number: Floats
    speed: Floats  # worth a second of each
    rate: Floats  # bytes a second that pass its border, each way, at most
    latency: Floats  # seconds of the shortest way over its border


def lower_bound(problem: Problem) -> float:
    """Return the seconds that no plan for these devices can go below."""
    counts, worth = Counter(problem.cluster.devices[name].kind for name in problem.usable), worth_of(problem)
    if worth is None:
        return 0.0
    needed = problem.job.batch * worth.sample
    bound = needed / sum(count * worth.kinds[kind] for kind, count in counts.items())
    measured = problem.profile is not None and problem.profile.collectives
    if measured or not problem.serial or problem.thinnest <= 0.0 or len(problem.graph.blocks) < 2:
        return bound
    ways = (_islands(problem, worth, by_region=by_region) for by_region in (False, True))
    return max(bound, *(_least_time(problem, islands, worth, bound) for islands in ways))


def worth_of(problem: Problem) -> Worth | None:
    """Return what a sample, and a second of each kind, is worth; None where some kind takes no time at all."""
    kinds = dict.fromkeys(problem.cluster.devices[name].kind for name in problem.usable)
    least = {kind: problem.table.least(kind, problem.job.batch) for kind in kinds}
    totals = {kind: float(seconds.sum()) for kind, seconds in least.items()}
    if min(totals.values()) <= 0.0:
        return None
    sample = float(np.min([least[kind] / totals[kind] for kind in kinds], axis=0).sum())
    return Worth(sample, {kind: 1.0 / total for kind, total in totals.items()})


def _islands(problem: Problem, worth: Worth, *, by_region: bool) -> _Islands:
    cluster = problem.simulator.priced_cluster
    speeds: dict[str, float] = {}
    for name in problem.usable:
        host = cluster.host_of(name)
        island = host.region if by_region else host.name
        speeds[island] = speeds.get(island, 0.0) + worth.kinds[cluster.devices[name].kind]
    borders = _region_borders(cluster) if by_region else _host_borders(cluster)
    alike = Counter((speed, *borders[name]) for name, speed in speeds.items())
    columns = np.array([(count, *row) for row, count in alike.items()]).T
    return _Islands(*columns)


def _region_borders(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return for every region the most bytes a second that can leave it, and the least latency."""
    hosts: dict[str, list[str]] = {}
    for host in cluster.hosts.values():
        hosts.setdefault(host.region, []).append(host.name)
    nics = {region: sum(cluster.hosts[name].nic_best for name in members) for region, members in hosts.items()}
    rates, waits = dict.fromkeys(hosts, 0.0), dict.fromkeys(hosts, float("inf"))
    for a, b, bandwidth, latency in _pairs(cluster, hosts):
        trunk = cluster.trunk(a, b)
        rate = min(nics[a], nics[b], bandwidth * len(hosts[a]) * len(hosts[b]))
        rates[a] += rate if trunk is None else min(rate, trunk)
        waits[a] = min(waits[a], latency)
    return {region: (min(nics[region], rates[region]), waits[region]) for region in hosts}


def _host_borders(cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Return for every host the most bytes a second that can leave it, and the least latency; its region's best link
    stands for all.
    """
    hosts: dict[str, list[str]] = {}
    for host in cluster.hosts.values():
        hosts.setdefault(host.region, []).append(host.name)
    rates, waits = dict.fromkeys(hosts, 0.0), dict.fromkeys(hosts, float("inf"))
    for a, b, bandwidth, latency in _pairs(cluster, hosts, inside=True):
        rates[a] += bandwidth * (len(hosts[b]) - (a == b))
        waits[a] = min(waits[a], latency)
    return {host.name: (min(host.nic_best, rates[host.region]), waits[host.region]) for host in cluster.hosts.values()}


def _pairs(
    cluster: Cluster, hosts: dict[str, list[str]], *, inside: bool = False
) -> list[tuple[str, str, float, float]]:
    """Return pairs of regions that can talk, both ways, with the bandwidth and the latency of their best links."""
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for link in cluster.links:
        ends = [end if end in hosts else cluster.hosts[end].region for end in link.between]
        for pair in {(ends[0], ends[1]), (ends[1], ends[0])}:
            bandwidth, latency = best.get(pair, (0.0, float("inf")))
            best[pair] = max(bandwidth, link.bandwidth), min(latency, link.latency)
    return [(*pair, *how) for pair, how in best.items() if inside or pair[0] != pair[1]]


def _gradient_bytes(problem: Problem) -> float:
    """Return the least gradient bytes that pass in and out together, where both sides have samples of every weight."""
    batch, kept, elements = problem.job.batch, problem.kept or 1.0, 0.0
    for parameter in problem.graph.parameters:
        whole, linear = 2.0 * parameter.elements * kept, parameter.linear
        factors = whole if linear is None else batch * linear.rows * (linear.inputs + linear.outputs)
        elements += min(whole, factors)
    return elements * problem.table.width


def _border(problem: Problem, own: Iterable[str], others: Iterable[str]) -> tuple[float, float]:
    """Return the bytes a second that can pass between some hosts and others, each way, and the least latency; 0 if
    nothing can.
    """
    cluster, own, others = problem.network, tuple(own), tuple(others)
    rates: dict[tuple[str, str], float] = {}
    latency = float("inf")
    for a in own:
        for b in others:
            if (link := cluster.link(a, b)) is not None:
                regions = cluster.hosts[a].region, cluster.hosts[b].region
                rates[regions] = rates.get(regions, 0.0) + link.bandwidth
                latency = min(latency, link.latency)
    caps = {regions: trunk for regions in rates if (trunk := cluster.trunk(*regions)) is not None}
    nics = (sum(cluster.hosts[name].nic_best for name in side) for side in (own, others))
    return min(sum(min(rate, caps.get(regions, rate)) for regions, rate in rates.items()), *nics), latency


class Borders:
    """The seconds in which gradients pass between hosts and between regions, around rings or along trees.

    Blocks that a host has are the bits of a number.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        users, width = problem.table.users, problem.table.width * (problem.kept or 1.0)
        self._bytes = [  # of each block; what several blocks share is left out
            sum(problem.graph.parameter[name].elements for name in block.parameters if len(users[name]) == 1) * width
            for block in problem.graph.blocks
        ]
        self._sizes: dict[int, float] = {}
        self._known: dict[tuple[frozenset[str], frozenset[str]], tuple[float, float]] = {}
        self._islands: dict[frozenset[str], list[tuple[frozenset[str], frozenset[str]]]] = {}

    def seconds(self, lanes: Sequence[Lane]) -> float:
        """Return the seconds, from the first gradient that is final on, in which all weights that are held on both
        sides pass, each way.
        """
        if self.problem.profile is not None and self.problem.profile.collectives:
            return 0.0
        held: dict[str, int] = {}
        blocks, devices = len(self._bytes), self.problem.cluster.devices
        for lane in lanes:
            for stage, a, b in zip(lane.stages, lane.firsts, (*lane.firsts[1:], blocks), strict=True):
                for group, _ in stage:
                    host = devices[group[0]].host
                    held[host] = held.get(host, 0) | (1 << b) - (1 << a)
        return max((self._passing(held, *sides) for sides in self._sides(frozenset(held))), default=0.0)

    def _sides(self, hosts: frozenset[str]) -> list[tuple[frozenset[str], frozenset[str]]]:
        """Return every host and every region, each with all other hosts."""
        if hosts not in self._islands:
            regions: dict[str, frozenset[str]] = {}
            for host in hosts:
                region = self.problem.cluster.hosts[host].region
                regions[region] = regions.get(region, frozenset()) | {host}
            islands = {frozenset((host,)) for host in hosts} | set(regions.values())
            self._islands[hosts] = [(own, hosts - own) for own in islands if hosts - own]
        return self._islands[hosts]

    def _passing(self, held: Mapping[str, int], own: frozenset[str], others: frozenset[str]) -> float:
        here = there = 0
        for host in own:
            here |= held[host]
        for host in others:
            there |= held[host]
        size = self._size(here & there)
        if not size:
            return 0.0
        if (own, others) not in self._known:
            self._known[own, others] = _border(self.problem, own, others)
        rate, latency = self._known[own, others]
        return latency + size / rate if rate > 0.0 else float("inf")

    def _size(self, blocks: int) -> float:
        if blocks not in self._sizes:
            self._sizes[blocks] = float(sum(size for b, size in enumerate(self._bytes) if blocks >> b & 1))
        return self._sizes[blocks]


def passing_seconds(problem: Problem, own: Iterable[str], others: Iterable[str]) -> float:
    """Return the seconds in which all gradients pass between some hosts and others, each of which has samples of all
    blocks.
    """
    if problem.profile is not None and problem.profile.collectives:
        return 0.0
    rate, latency = _border(problem, own, others)
    return latency + _gradient_bytes(problem) / 2.0 / rate if rate > 0.0 else float("inf")


def _least_time(problem: Problem, islands: _Islands, worth: Worth, bound: float) -> float:
    """Find the least T at which the islands earn enough, by bisection: what they can do grows with it."""
    needed, gradients = problem.job.batch * worth.sample, _gradient_bytes(problem)

    def enough(seconds: float) -> bool:
        passed = islands.rate * np.maximum(0.0, seconds - islands.latency)
        able = np.where(2.0 * passed >= gradients, np.inf, passed / problem.thinnest * worth.sample)
        own = islands.speed * seconds
        # With home h: all that h can do, and of each other what it can do and is able to take part in.
        others = np.minimum(own[None, :], able[None, :] + np.where(np.isinf(able), 0.0, able)[:, None])
        earned = (others * islands.number).sum(axis=1) - np.diagonal(others) + own
        return bool(earned.max() >= needed)

    low, high = bound, needed / float(islands.speed.max())
    while high - low > _PRECISE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low
