"""Measure the links of a cluster: tell probers on its hosts which pairs to measure when, and collect what they find.

Pairs that are measured at the same time share nothing: a host is in at most one pair, and two different regions have at
most one pair between them, as has a region with a trunk of its own. Each pair goes into the first round that has room,
in the order of a round-robin tournament; if all hosts are in one region, that gives the fewest possible rounds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from isthmus.cluster.spec import TCP_PAYLOAD, Cluster
from isthmus.deploy.probing.prober import (
    LONGEST,
    ROUND_TRIPS,
    Listen,
    Listening,
    Measure,
    Order,
    PairFailed,
    PairMeasured,
    Read,
    ReadClock,
    Told,
)
from isthmus.units import BytesPerSecond, Seconds

__all__ = [
    "Pair",
    "PairFound",
    "ProbeResult",
    "ProbeSettings",
    "Probers",
    "Round",
    "SharedCapacity",
    "expected_seconds",
    "host_pairs",
    "probe",
    "rounds",
]

_WELL_BELOW = 0.8  # flows that reach less than this fraction of what each reaches alone share something
_BEYOND = 60.0  # seconds that a round may take longer than expected
_SIGN_OF_LIFE = 10.0  # seconds in which every prober that is not frozen answers what its clock reads

Pair = tuple[str, str]
Round = tuple[Pair, ...]
K = TypeVar("K")


class Probers(Protocol):
    """The hosts that take part, however they are reached."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Return the address at which each host listens."""

    def tell(self, host: str, order: Order) -> None:
        """Send an order to one of the hosts; do nothing if it is gone."""

    def next(self, timeout: float) -> tuple[str, Told | None] | None:
        """Return a host and its message; None as the message means that the host is gone.

        Return None if nothing came in `timeout` seconds.
        """


@dataclass(frozen=True, kw_only=True)
class ProbeSettings:
    """How to measure links.

    `seconds` is the least time of sending in each direction, `pings` the most round trips to measure. `trunks` and
    `nics` say whether to look for capacity that flows share.
    """

    seconds: float = 2.0
    pings: int = 100
    trunks: bool = False
    nics: bool = False


@dataclass(frozen=True, kw_only=True)
class PairFound:
    """What a pair of hosts reaches. The latencies are one way: half of the round trip."""

    latency: Seconds  # the least of many
    latency_median: Seconds
    bandwidth: tuple[BytesPerSecond, BytesPerSecond]  # from the first to the second, and back
    steady: bool

    @property
    def lower(self) -> BytesPerSecond:
        """Return the lower bandwidth of the two directions."""
        return min(self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class SharedCapacity:
    """The rate that flows reach together, in the slower direction.

    `holds` says whether that is well below the sum of what they reach one by one.
    """

    rate: BytesPerSecond
    holds: bool


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What each pair reaches, or why it was not measured; trunks and NICs if they were looked for."""

    pairs: Mapping[Pair, PairFound]
    failed: Mapping[Pair, str]
    lost: tuple[str, ...]
    trunks: Mapping[Pair, SharedCapacity]  # by two regions, in the cluster's order
    nics: Mapping[str, SharedCapacity]
    seconds: float


def host_pairs(hosts: Collection[str]) -> list[Pair]:
    """Return every pair of the hosts, in their order."""
    return list(itertools.combinations(hosts, 2))


def rounds(cluster: Cluster, pairs: Sequence[Pair], most: int | None = None) -> list[Round]:
    """Split the pairs into rounds of at most `most` pairs, so that no two pairs of a round share anything."""
    found: list[tuple[list[Pair], set[object]]] = []
    for pair in _tournament(pairs):
        taken = {*pair, *_between(cluster, pair)}
        room = (entry for entry in found if len(entry[0]) != most and not taken & entry[1])
        entry = next(room, None)
        if entry is None:
            found.append(entry := ([], set()))
        entry[0].append(pair)
        entry[1].update(taken)
    return [tuple(members) for members, _ in found]


def _tournament(pairs: Sequence[Pair]) -> list[Pair]:
    """Sort the pairs by the day on which they play in a round-robin tournament of all hosts (the circle method).

    With n hosts (n even), i meets j on day i + j modulo n - 1, and n - 1 meets the one left over. Each host plays once
    a day.
    """
    names = list(dict.fromkeys(host for pair in pairs for host in pair))
    number = {host: index for index, host in enumerate(names)}
    days = len(names) + len(names) % 2 - 1

    def day(pair: Pair) -> int:
        low, high = sorted(number[host] for host in pair)
        return (2 * low if high == days else low + high) % days

    return sorted(pairs, key=day)


def _between(cluster: Cluster, pair: Pair) -> list[frozenset[str]]:
    """Return what a pair may share with other pairs on the way: the path between regions, or a region's trunk."""
    a, b = (cluster.hosts[host].region for host in pair)
    return [frozenset((a, b))] if a != b or cluster.trunk(a, b) is not None else []


def expected_seconds(cluster: Cluster, schedule: Sequence[Round], settings: ProbeSettings) -> float:
    """Return about how many seconds the rounds take, if latencies are what the cluster says."""
    links = [[cluster.link(*pair) for pair in pairs] for pairs in schedule]
    trips = [max((2 * link.latency for link in group if link is not None), default=0.0) for group in links]
    drain = 4  # round trips until the last bytes have come
    return sum(
        2 * (max(settings.seconds, ROUND_TRIPS * trip) + drain * trip) + min(1.0, settings.pings * trip)
        for trip in trips
    )


def probe(
    cluster: Cluster,
    probers: Probers,
    schedule: Sequence[Round],
    settings: ProbeSettings,
    listen: Callable[[str, int, int, Round], None],
) -> ProbeResult:
    """Measure round after round; then measure what flows share, if the settings ask for it.

    `listen` is told of every round: its purpose, how many rounds of that purpose are done and how many there are, and
    its pairs.
    """
    start = time.monotonic()
    run = _Run(cluster, probers, settings.seconds)
    results: dict[Pair, PairFound | str] = {}
    for done, pairs in enumerate(schedule):
        listen("pairs", done, len(schedule), pairs)
        results |= run.together(pairs, settings.seconds, settings.pings)
    alone = {pair: result for pair, result in results.items() if isinstance(result, PairFound)}

    def shared(name: str, groups: Mapping[K, Round]) -> dict[K, SharedCapacity]:
        rates: dict[K, SharedCapacity] = {}
        for done, (what, pairs) in enumerate(groups.items()):
            listen(name, done, len(groups), pairs)
            if (rate := run.sharing(pairs, alone)) is not None:
                rates[what] = rate
        return rates

    return ProbeResult(
        pairs=alone,
        failed={pair: result for pair, result in results.items() if isinstance(result, str)},
        trunks=shared("trunks", _trunks(cluster, alone)) if settings.trunks else {},
        nics=shared("nics", _nics(cluster, alone)) if settings.nics else {},
        lost=tuple(run.lost),
        seconds=time.monotonic() - start,
    )


def _trunks(cluster: Cluster, alone: Collection[Pair]) -> dict[Pair, Round]:
    """Return pairs that share no host, for each two regions (in the cluster's order) that have at least two."""
    groups: dict[Pair, list[Pair]] = {}
    place = {region: number for number, region in enumerate(cluster.regions)}
    for pair in alone:
        a, b = sorted(pair, key=lambda host: place[cluster.hosts[host].region])
        group = groups.setdefault((cluster.hosts[a].region, cluster.hosts[b].region), [])
        if not {a, b} & {host for pair in group for host in pair}:
            group.append((a, b))
    return {regions: tuple(group) for regions, group in groups.items() if len(group) > 1}


def _nics(cluster: Cluster, alone: Collection[Pair]) -> dict[str, Round]:
    """Return pairs of each host that share nothing but this host, for each host that has two or more of them."""
    groups: dict[str, Round] = {}
    for host in dict.fromkeys(itertools.chain.from_iterable(alone)):
        taken: set[object] = set()
        group: list[Pair] = []
        for pair in alone:
            between = _between(cluster, pair)
            if host in pair and not taken & set(between):
                group.append((host, pair[pair[0] == host]))
                taken.update(between)
        if len(group) > 1:
            groups[host] = tuple(group)
    return groups


class _Run:
    """A probe in progress."""

    def __init__(self, cluster: Cluster, probers: Probers, seconds: float) -> None:
        self._cluster, self._probers, self._seconds = cluster, probers, seconds
        self._numbers = itertools.count(1)
        self.lost: dict[str, None] = {}

    def together(self, pairs: Round, seconds: float, pings: int) -> dict[Pair, PairFound | str]:
        """Measure the pairs at the same time; a text in the result says why a pair was not measured."""
        results: dict[Pair, PairFound | str] = {}
        waiting: dict[int, Pair] = {}
        for pair in pairs:
            gone = [host for host in pair if host in self.lost]
            if gone:
                results[pair] = f"{gone[0]} is gone"
                continue
            number = next(self._numbers)
            waiting[number] = pair
            self._probers.tell(pair[1], Listen(pair=number))
        expected = expected_seconds(self._cluster, [pairs], ProbeSettings(seconds=seconds, pings=pings))
        end = time.monotonic() + expected + _BEYOND
        while waiting:
            host, told = self._probers.next(end - time.monotonic()) or ("", None)
            match told:
                case None if host:
                    over = [number for number, pair in waiting.items() if host in pair]
                    results |= {waiting.pop(number): f"{host} is gone" for number in over}
                    self.lost[host] = None
                case None:
                    self._lose_frozen({host for pair in waiting.values() for host in pair})
                    results |= dict.fromkeys(waiting.values(), "no answer came")
                    break
                case Listening(pair=number, port=port) if number in waiting:
                    a, b = waiting[number]
                    address = self._probers.addresses[b]
                    order = Measure(pair=number, address=address, port=port, seconds=seconds, pings=pings)
                    self._probers.tell(a, order)
                case PairMeasured(pair=number) if number in waiting:
                    results[waiting.pop(number)] = _pair_found(told)
                case PairFailed(pair=number, why=why) if number in waiting:
                    results[waiting.pop(number)] = why
                case _:
                    pass  # of a pair that is over, from the other end of one that failed
        return results

    def _lose_frozen(self, asked: set[str]) -> None:
        """Mark those hosts as lost that do not even answer what their clock reads, which needs no measuring."""
        number = next(self._numbers)
        for host in asked:
            self._probers.tell(host, ReadClock(number=number))
        end = time.monotonic() + _SIGN_OF_LIFE
        while asked and (heard := self._probers.next(end - time.monotonic())) is not None:
            host, told = heard
            if told is None:
                self.lost[host] = None
            elif isinstance(told, Read) and told.number == number:
                asked.discard(host)
        self.lost |= dict.fromkeys(sorted(asked))

    def sharing(self, pairs: Round, alone: Mapping[Pair, PairFound]) -> SharedCapacity | None:
        """Measure the pairs at the same time, all sending equally long; return None if one fails."""
        single = [alone.get((a, b)) or _turned(alone[b, a]) for a, b in pairs]
        trip = 2 * max(one.latency_median for one in single)
        found = self.together(pairs, min(LONGEST, max(self._seconds, ROUND_TRIPS * trip)), pings=1).values()
        joint = [one for one in found if isinstance(one, PairFound)]
        if len(joint) < len(pairs):
            return None
        sums = [(sum(one.bandwidth[way] for one in joint), sum(one.bandwidth[way] for one in single)) for way in (0, 1)]
        held = [together for together, apart in sums if together < _WELL_BELOW * apart]
        return SharedCapacity(rate=BytesPerSecond(min(held or [together for together, _ in sums])), holds=bool(held))


def _pair_found(told: PairMeasured) -> PairFound:
    return PairFound(
        latency=Seconds(told.least / 2),
        latency_median=Seconds(told.median / 2),
        bandwidth=(
            BytesPerSecond(told.there.bytes_per_second / TCP_PAYLOAD),
            BytesPerSecond(told.back.bytes_per_second / TCP_PAYLOAD),
        ),
        steady=told.there.steady and told.back.steady,
    )


def _turned(found: PairFound) -> PairFound:
    there, back = found.bandwidth
    return PairFound(
        latency=found.latency, latency_median=found.latency_median, bandwidth=(back, there), steady=found.steady
    )
