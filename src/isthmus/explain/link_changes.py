"""Clusters with better links for some hosts: links that are faster, and links where there are none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice, product
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.explain.what_if import Culprit
from isthmus.units import BytesPerSecond, Seconds, format_bit_rate, format_seconds

__all__ = ["FasterLinks", "LinkChange", "NewLinks"]

_PAIRS = 20_000  # of hosts whose links are looked at
_NAMED = 2  # links that are written out
_SLOWEST = 1.25e6  # bytes a second (10 Mbit/s): the slowest new link that is tried
_NEAR = 1e-3  # seconds: latency of a new link in a region


class LinkChange(Protocol):
    """A change of a cluster's links, by one of the factors of `ladder`: each is twice the one before."""

    ladder: tuple[int, ...]
    most: str  # the largest change, in words

    def by(self, factor: int) -> Cluster:
        """Return the cluster with the change."""

    def words(self, factor: int) -> str:
        """Return the change in words."""


class FasterLinks:
    """Links of some hosts to the hosts of a plan, with more bandwidth; and inside a host that a plan uses in part.

    A nic that is narrower than such a link becomes as wide. With `latency` it falls as the bandwidth grows.
    """

    ladder = tuple(2**n for n in range(1, 11))

    def __init__(self, cluster: Cluster, hosts: Sequence[str], used: Collection[str], latency: bool) -> None:
        self.cluster, self.latency = cluster, latency
        self.ends = {*hosts, *used}
        pairs = islice(product(hosts, sorted(used)), _PAIRS)
        between = {link.between for a, b in pairs if a != b and (link := cluster.link(a, b)) is not None}
        self.links = [link for link in cluster.links if link.between in between]
        self.inside = [name for name in hosts if name in used]
        self.most = f"links of {self.ladder[-1]} times the bandwidth{' and as many times less latency' * latency}"

    def by(self, factor: int) -> Cluster:
        """Return the cluster with bandwidth times `factor`, and latency divided by it."""
        faster = {link.between: self._link(link, factor) for link in self.links}
        links = tuple(faster.get(link.between, link) for link in self.cluster.links)
        widest = max((link.bandwidth for link in faster.values()), default=0.0)
        return replace(self.cluster, links=links, hosts=self._hosts(factor, widest))

    def _link(self, link: Link, factor: int) -> Link:
        trunk = None if link.trunk is None else BytesPerSecond(factor * link.trunk)
        latency = Seconds(link.latency / factor) if self.latency else link.latency
        return replace(link, bandwidth=BytesPerSecond(factor * link.bandwidth), trunk=trunk, latency=latency)

    def _hosts(self, factor: int, widest: float) -> dict[str, Host]:
        hosts = _widened(self.cluster, self.ends, widest)
        for name in self.inside:
            hosts[name] = replace(hosts[name], bandwidth=BytesPerSecond(factor * hosts[name].bandwidth))
        return hosts

    def words(self, factor: int) -> str:
        """Describe the change: `link virginia - frankfurt at 16 Gbit/s instead of 2 Gbit/s, 5.5 ms instead of 44 ms one
        way`.
        """
        named = [self._words(link, factor) for link in self.links[:_NAMED]]
        rest = len(self.links) - _NAMED
        named += [f"{rest} more link{'s' * (rest > 1)} {factor} times as fast"] if rest > 0 else []
        if self.inside:
            like = " and its like" * (len(self.inside) > 1)
            named.append(f"links inside {self.inside[0]}{like} {factor} times as fast")
        return " and ".join(named)

    def _words(self, link: Link, factor: int) -> str:
        new = self._link(link, factor)
        words = f"{Culprit('link', link.between)} at {format_bit_rate(new.bandwidth)}"
        words += f" instead of {format_bit_rate(link.bandwidth)}"
        if self.latency:
            words += f", {format_seconds(new.latency)} instead of {format_seconds(link.latency)} one way"
        return words


class NewLinks:
    """Links between the regions of some hosts and of the hosts of a plan, where there are none.

    `latency`: one way, between two regions.
    """

    ladder = tuple(2**n for n in range(14))

    def __init__(self, cluster: Cluster, hosts: Sequence[str], used: Collection[str], latency: float) -> None:
        self.cluster, self.latency, self.ends = cluster, latency, {*hosts, *used}
        there = {frozenset(link.between) for link in cluster.links}
        regions = Counter(cluster.hosts[name].region for name in sorted(self.ends))
        new = dict.fromkeys(cluster.hosts[name].region for name in hosts)
        pairs = {frozenset((a, b)): (a, b) for b in new for a in regions if a != b or regions[a] > 1}
        self.pairs = [pair for ends, pair in pairs.items() if ends not in there]
        widest = format_bit_rate(BytesPerSecond(self.ladder[-1] * _SLOWEST))
        self.most = f"new links of {widest}, {format_seconds(Seconds(latency))} one way"

    def by(self, factor: int) -> Cluster:
        """Return the cluster with links of 10 Mbit/s times `factor`."""
        links = [self._link(pair, factor) for pair in self.pairs]
        hosts = _widened(self.cluster, self.ends, factor * _SLOWEST)
        return replace(self.cluster, links=(*self.cluster.links, *links), hosts=hosts)

    def _link(self, pair: tuple[str, str], factor: int) -> Link:
        latency = Seconds(min(_NEAR, self.latency) if pair[0] == pair[1] else self.latency)
        return Link(between=pair, bandwidth=BytesPerSecond(factor * _SLOWEST), latency=latency)

    def words(self, factor: int) -> str:
        """Describe the change: `a new link oslo - lima of 160 Mbit/s, 20 ms one way`."""
        named = [self._words(self._link(pair, factor)) for pair in self.pairs[:_NAMED]]
        rest = len(self.pairs) - _NAMED
        return " and ".join([*named, *([f"{rest} more like {'them' if rest > 1 else 'it'}"] if rest > 0 else [])])

    def _words(self, link: Link) -> str:
        figures = f"of {format_bit_rate(link.bandwidth)}, {format_seconds(link.latency)} one way"
        return f"new {Culprit('link', link.between)} {figures}"


def _widened(cluster: Cluster, names: set[str], widest: float) -> dict[str, Host]:
    """Return all hosts; the nics of those named do not hold such a link back."""
    return {name: _wider(host, widest) if name in names else host for name, host in cluster.hosts.items()}


def _wider(host: Host, least: float) -> Host:
    """Return a host whose nic sends and receives at this rate or a higher one."""
    changed = replace(host, nic=BytesPerSecond(max(host.nic, least)))
    return changed if host.down is UNSET else replace(changed, down=BytesPerSecond(max(host.nic_in, least)))
