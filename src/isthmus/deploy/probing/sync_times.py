"""Measure all-reduces among hosts of a cluster, by the runtime's own syncs: ring, tree and server.

**What is timed.** Participants begin at a time that is agreed on beforehand, and report when they began and when they
had the sum. A host's clock is known from asking for it: it was read in the middle between asking and the answer, with
an error of at most half that time, and it is asked for again for every size, as clocks drift. With begins b_i and ends
e_i on one clock, the time is

    max e_i - max b_i,    which is between  min (e_i - b_i)  and  max (e_i - b_i)

from when all were ready to when all had the sum, so waiting of early participants is not counted. The bounds hold
because the last to begin takes at least its own time, and the last to end began no later than the last to begin. They
need no clock but each host's own, so a time outside of them is moved to the nearer one. Repeats back to back would be
simpler, but the next would begin before the slowest has ended the last, so that n of them take less than n times one.

**Sizes** grow by a constant factor as long as the measured links let an all-reduce take no more than `LONGEST`. No size
is begun if the one before took so long that this one would take twice `LONGEST`. Each size is measured several times
after one uncounted run, which opens the windows of its connections; the median is kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, get_args

from isthmus.cluster.spec import Cluster
from isthmus.deploy.probing.probe import Probers
from isthmus.deploy.probing.prober import Dismiss, Pass, ProbeRelayed, Read, ReadClock, Told
from isthmus.deploy.probing.sync_participants import (
    LARGEST,
    Entered,
    JoinSync,
    Reduce,
    Reduced,
    Said,
    StoreEntry,
    Trouble,
)
from isthmus.model.profile import Collective, CollectiveTime

__all__ = [
    "HOW",
    "SIZES",
    "Collectives",
    "SyncMeasurement",
    "collectives",
    "elapsed",
    "expected_seconds",
    "measurements",
    "usual_sets",
]

HOW: tuple[Collective, ...] = get_args(Collective)
GROWTH = 4
SIZES = tuple(LARGEST // GROWTH**power for power in range(5, -1, -1))  # 64 kB to 66 MB
REPEATS = 3
LONGEST = 5.0  # seconds that an all-reduce should take
MOST = 64  # participants
_ASKED = 3  # times that a clock is asked for
_LEAD = 0.02  # seconds between when the last participant has its order and when all begin
_BETWEEN = 0.05  # about how many seconds pass between two all-reduces
_PATIENCE = 60.0  # seconds beyond what was expected; starting takes long if many processes share a core

Hosts = tuple[str, ...]
M = TypeVar("M", bound=Entered | Reduced)


class SyncMeasurement(NamedTuple):
    """One sync to measure among hosts, with one entry for each participant in ring order; the first is the server."""

    how: Collective
    hosts: Hosts
    sizes: tuple[int, ...]
    seconds: float  # about how long the whole measurement takes
    cannot: str | None = None  # why it cannot be measured


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """What was measured, why some syncs cannot be measured here, and why others failed."""

    times: tuple[CollectiveTime, ...]
    skipped: Mapping[tuple[Collective, Hosts], str]
    failed: Mapping[tuple[Collective, Hosts], str]
    seconds: float


class _Problem(Exception):
    """A sync cannot be measured."""


def usual_sets(cluster: Cluster, hosts: Collection[str]) -> list[Hosts]:
    """Return these sets: all hosts, those of each region, those of each two regions; hosts are ordered by region."""
    regions = {region: [name for name in hosts if cluster.hosts[name].region == region] for region in cluster.regions}
    groups = [tuple(regions), *((one,) for one in regions), *itertools.combinations(regions, 2)]
    sets = [tuple(host for region in group for host in regions[region]) for group in groups]
    return list(dict.fromkeys(members for members in sets if len(members) > 1))


def measurements(cluster: Cluster, sets: Iterable[Hosts]) -> list[SyncMeasurement]:
    """Return the measurements to make among these sets, in a cluster whose links were measured."""
    return [_measurement(cluster, how, hosts) for hosts in sets for how in HOW]


def _measurement(cluster: Cluster, how: Collective, hosts: Hosts) -> SyncMeasurement:
    apart = [pair for pair in _neighbours(cluster, how, hosts) if _hop(cluster, *pair) is None]
    if apart:
        return SyncMeasurement(how, hosts, (), 0.0, f"no link between {' and '.join(apart[0])}")
    if len(hosts) > MOST:
        return SyncMeasurement(how, hosts, (), 0.0, f"more than {MOST} participants")
    times = {size: expected_seconds(cluster, how, hosts, size) for size in SIZES}
    sizes = tuple(size for size, seconds in times.items() if seconds <= LONGEST)
    cannot = None if sizes else f"even the smallest, {SIZES[0]} bytes would take {times[SIZES[0]]:.0f} s"
    seconds = (1 + REPEATS) * sum(times[size] + _BETWEEN for size in sizes)
    return SyncMeasurement(how, hosts, sizes, seconds, cannot)


def _hop(cluster: Cluster, a: str, b: str) -> tuple[float, float] | None:
    """Return the latency and the bytes per second from one participant's host to another's; None without a link."""
    if a == b:
        return cluster.hosts[a].latency, cluster.hosts[a].bandwidth
    link = cluster.link(a, b)
    if link is None:
        return None
    return link.latency, min(link.bandwidth, cluster.hosts[a].nic, cluster.hosts[b].nic_in)


def _chains(cluster: Cluster, hosts: Hosts) -> list[list[str]]:
    """Return a tree's participants by region; the first of each chain is its leader."""
    chains: dict[str, list[str]] = {}
    for host in hosts:
        chains.setdefault(cluster.hosts[host].region, []).append(host)
    return list(chains.values())


def _around(hosts: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(hosts, (*hosts[1:], hosts[0]), strict=True)) if len(hosts) > 1 else []


def _neighbours(cluster: Cluster, how: Collective, hosts: Hosts) -> list[tuple[str, str]]:
    """Return the pairs of hosts between which the collective sends."""
    if how == "ring":
        return _around(hosts)
    if how == "server":
        return [(hosts[0], host) for host in hosts[1:]]
    chains = _chains(cluster, hosts)
    return [*_around([chain[0] for chain in chains]), *(pair for chain in chains for pair in itertools.pairwise(chain))]


def expected_seconds(cluster: Cluster, how: Collective, hosts: Hosts, size: float) -> float:
    """Estimate the seconds that an all-reduce of `size` bytes takes.

    With S = size and n participants, on links of latency l and rate r:

        ring      2 (n - 1) (max l + S / (n min r))
        tree      2 max over chains (sum l + S / min r), plus the ring of the leaders
        server    2 (max l + S max(1 / min r, (n - 1) / nic of the server))

    This is good enough to choose sizes by; it ignores that flows may share a trunk.
    """
    if how == "tree":
        chains = _chains(cluster, hosts)
        inside = [_pass(cluster, list(itertools.pairwise(chain)), size) for chain in chains]
        return 2 * max(inside) + expected_seconds(cluster, "ring", tuple(chain[0] for chain in chains), size)
    n = len(hosts)
    if n == 1:
        return 0.0
    hops = [hop for pair in _neighbours(cluster, how, hosts) if (hop := _hop(cluster, *pair)) is not None]
    latency, rate = max(hop[0] for hop in hops), min(hop[1] for hop in hops)
    if how == "ring":
        return 2 * (n - 1) * (latency + size / n / rate)
    return 2 * (
        latency + size * max(1 / rate, (n - 1) / min(cluster.hosts[hosts[0]].nic, cluster.hosts[hosts[0]].nic_in))
    )


def _pass(cluster: Cluster, pairs: Sequence[tuple[str, str]], size: float) -> float:
    """Return the seconds it takes to send `size` bytes along a chain, in parts that are passed on as they come."""
    hops = [hop for pair in pairs if (hop := _hop(cluster, *pair)) is not None]
    return sum(hop[0] for hop in hops) + size / min(hop[1] for hop in hops) if hops else 0.0


def elapsed(times: Sequence[tuple[float, float]]) -> float:
    """Return the seconds from when the last participant was ready to when the last had the sum.

    `times` are begins and ends on clocks that may differ slightly.
    """
    own = [end - begin for begin, end in times]
    both = max(end for _, end in times) - max(begin for begin, _ in times)
    return min(max(both, min(own)), max(own))


def collectives(
    cluster: Cluster,
    probers: Probers,
    todo: Sequence[SyncMeasurement],
    listen: Callable[[SyncMeasurement, int, int], None],
    lost: Collection[str] = (),
) -> Collectives:
    """Measure one sync after the other.

    `listen` is told of each: which it is, how many are done, and how many there are.
    """
    start = time.monotonic()
    run = _Run(cluster, probers, set(lost))
    times: list[CollectiveTime] = []
    failed: dict[tuple[Collective, Hosts], str] = {}
    can = [one for one in todo if one.cannot is None]
    for done, one in enumerate(can):
        listen(one, done, len(can))
        try:
            times.extend(list(run.measured(one)))  # all sizes or none: a line through small sizes alone says little
        except _Problem as problem:
            failed[one.how, one.hosts] = str(problem)
            run.dismiss()
    run.dismiss()
    skipped = {(one.how, one.hosts): one.cannot for one in todo if one.cannot is not None}
    return Collectives(times=tuple(times), skipped=skipped, failed=failed, seconds=time.monotonic() - start)


@dataclass(frozen=True)
class _Group:
    """The participants of one sync, by name."""

    number: int
    members: dict[str, tuple[str, int]] = field(default_factory=dict)  # host, and number on it

    @property
    def hosts(self) -> list[str]:
        return list(dict.fromkeys(host for host, _ in self.members.values()))


class _Run:
    """A measurement in progress."""

    def __init__(self, cluster: Cluster, probers: Probers, lost: set[str]) -> None:
        self._cluster, self._probers, self._lost = cluster, probers, lost
        self._numbers = itertools.count(1)

    def measured(self, one: SyncMeasurement) -> Iterator[CollectiveTime]:
        """Yield the time of each size as it is measured."""
        group = self._entered(one)
        root = one.hosts[0] if one.how == "server" else None
        for size in one.sizes:
            seconds = self._point(group, one, size)
            yield CollectiveTime(how=one.how, hosts=one.hosts, bytes=size, seconds=seconds, root=root)
            if GROWTH * seconds > 2 * LONGEST:
                break

    def dismiss(self) -> None:
        """End all participants."""
        for host in self._probers.addresses:
            if host not in self._lost:
                self._probers.tell(host, Dismiss())

    def _entered(self, one: SyncMeasurement) -> _Group:
        """Have all participants connect for a sync, and return them."""
        group, slots = _Group(next(self._numbers)), Counter[str]()
        for host in one.hosts:
            group.members[f"{host}/{slots[host]}"] = host, slots[host]
            slots[host] += 1
        names = tuple(group.members)
        regions = tuple(self._cluster.hosts[host].region for host in one.hosts)
        root = names[0] if one.how == "server" else None
        for me in names:
            order = JoinSync(number=group.number, how=one.how, me=me, members=names, regions=regions, root=root)
            self._tell(group, me, order)
        self._hear(group, Entered, _PATIENCE)
        return group

    def _point(self, group: _Group, one: SyncMeasurement, size: int) -> float:
        """Measure one size several times and return the median."""
        clocks = self._clocks(group)
        lead = max(trip for trip, _ in clocks.values()) + _LEAD
        patience = _PATIENCE + 10 * expected_seconds(self._cluster, one.how, one.hosts, size)
        taken = []
        for _ in range(1 + REPEATS):
            at = time.monotonic() + lead
            for me, (host, _) in group.members.items():
                self._tell(group, me, Reduce(number=group.number, bytes=size, at=at + clocks[host][1]))
            said = self._hear(group, Reduced, patience)
            ahead = {me: clocks[host][1] for me, (host, _) in group.members.items()}
            taken.append(elapsed([(said[me].begin - ahead[me], said[me].end - ahead[me]) for me in said]))
        return statistics.median(taken[1:])

    def _clocks(self, group: _Group) -> dict[str, tuple[float, float]]:
        """Return for each host the shortest time of asking for its clock and the lead of its clock, in seconds."""
        best: dict[str, tuple[float, float]] = {}
        for _ in range(_ASKED):
            number, asked = next(self._numbers), dict[str, float]()
            for host in group.hosts:
                asked[host] = time.monotonic()
                self._probers.tell(host, ReadClock(number=number))
            end = time.monotonic() + _PATIENCE
            while asked:
                host, told = self._next(group, end)
                if isinstance(told, Read) and told.number == number:
                    now, begin = time.monotonic(), asked.pop(host)
                    read = (now - begin, told.now - (begin + now) / 2)
                    best[host] = min(best.get(host, read), read)
        return best

    def _tell(self, group: _Group, member: str, order: StoreEntry | JoinSync | Reduce) -> None:
        host, slot = group.members[member]
        self._probers.tell(host, Pass(slot=slot, order=order))

    def _hear(self, group: _Group, kind: type[M], patience: float) -> dict[str, M]:
        """Wait at most `patience` seconds for an answer of every member, and return the answers by name."""
        names = {place: name for name, place in group.members.items()}
        answers: dict[str, M] = {}
        end = time.monotonic() + patience
        while len(answers) < len(names):
            host, told = self._next(group, end)
            if isinstance(told, ProbeRelayed) and (host, told.slot) in names:
                self._heard(group, names[host, told.slot], told.said, kind, answers)
        return answers

    def _heard(self, group: _Group, member: str, said: Said, kind: type[M], answers: dict[str, M]) -> None:
        if isinstance(said, StoreEntry):
            for other in group.members:
                if other != member:
                    self._tell(group, other, said)
        elif said.number != group.number:
            return  # of a sync that is over
        elif isinstance(said, Trouble):
            raise _Problem(f"{group.members[member][0]}: {said.why}")
        elif isinstance(said, kind):
            answers[member] = said

    def _next(self, group: _Group, end: float) -> tuple[str, Told]:
        """Return the next message of a host; raise _Problem if one of the group is gone or no message came."""
        if gone := [host for host in group.hosts if host in self._lost]:
            raise _Problem(f"{gone[0]} is gone")
        host, told = self._probers.next(end - time.monotonic()) or ("", None)
        if not host:
            raise _Problem("no answer came")
        if told is None:
            self._lost.add(host)
            return self._next(group, end)
        return host, told
