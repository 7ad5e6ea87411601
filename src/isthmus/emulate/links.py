"""A cluster as its router sees it: the resources that packets pass, and the route of each pair of hosts over them.

A packet between two hosts passes the sender's NIC, the link of the pair, the trunk between the two regions if there is
one, and the receiver's NIC; then it travels for the latency. Each direction has its own resources. This is the same
model that `cost.network.fabric` uses for messages. Resources that can never hold anything up are left out:

- a NIC or a trunk, if all the pairs that pass it cannot exceed it together;
- the link of a pair, if its route keeps a NIC or a trunk that is not faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from isthmus.cluster.spec import Cluster
from isthmus.errors import UsageError
from isthmus.units import Bytes, BytesPerSecond, Seconds

__all__ = ["MOST_HOSTS", "Links", "Route", "check_values"]

MOST_HOSTS = 500  # the router waits for all hosts in one `select`, which takes at most 1024 files
_LEAST_BUFFER, _MOST_BUFFER = 1 << 20, 1 << 29  # bytes of a socket buffer
_PAUSE = 0.05  # seconds that a process on a busy machine may wait for a processor without its link becoming idle


class Route(msgspec.Struct, kw_only=True):
    """The present state of the way from one host to another."""

    bandwidth: BytesPerSecond
    latency: Seconds
    loss: float = 0.0
    cut: bool = False


class _Resource(NamedTuple):
    number: int
    rate: BytesPerSecond


class Links:
    """All routes between some hosts of a cluster. Routes may change while the world runs."""

    def __init__(self, cluster: Cluster, hosts: Sequence[str]) -> None:
        self._cluster, self.hosts = cluster, tuple(hosts)
        self._routes: dict[tuple[str, str], Route] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        for pair in self._pairs(self.hosts, self.hosts):
            self._mend(pair)

    def __contains__(self, pair: tuple[str, str]) -> bool:
        return pair in self._routes

    def change(
        self,
        a: str,
        b: str,
        *,
        bandwidth: BytesPerSecond | None = None,
        latency: Seconds | None = None,
        loss: float | None = None,
        cut: bool | None = None,
    ) -> None:
        """Change the links in both directions between two hosts, or between all hosts of two regions.

        A value of None leaves that property as it is.
        """
        check_values(bandwidth, latency, loss)
        for pair in self.pairs(a, b):
            route = self._routes[pair]
            route.bandwidth = route.bandwidth if bandwidth is None else bandwidth
            route.latency = route.latency if latency is None else latency
            route.loss = route.loss if loss is None else loss
            route.cut = route.cut if cut is None else cut

    def mend(self, a: str, b: str) -> None:
        """Reset the links between two hosts or regions to the values of the cluster file."""
        for pair in self.pairs(a, b):
            self._mend(pair)

    def reach(self, a: str, b: str) -> BytesPerSecond:
        """Return the bandwidth that one pair of hosts can reach when no other host sends."""
        trunk = self._trunk(a, b)
        nics = (self._cluster.hosts[a].nic, self._cluster.hosts[b].nic_in)
        return BytesPerSecond(min(self._routes[a, b].bandwidth, *nics, *([trunk] if trunk is not None else [])))

    def window(self, a: str, b: str) -> Bytes:
        """Return the bandwidth-delay product of a pair: the bytes in flight or being acknowledged at full rate."""
        return Bytes(self.reach(a, b) * 2 * self._routes[a, b].latency)

    def buffers(self) -> dict[str, int]:
        """Return the socket buffer size in bytes of each host.

        A buffer holds three times what the host's best route carries during a round trip and a pause of its process.
        """
        needs = dict.fromkeys(self.hosts, float(_LEAST_BUFFER))
        for a, b in self._routes:
            need = 3 * (self.window(a, b) + self.reach(a, b) * _PAUSE)
            needs[a], needs[b] = max(needs[a], need), max(needs[b], need)
        return {host: round(min(need, _MOST_BUFFER)) for host, need in needs.items()}

    def table(self) -> dict[str, Any]:
        """Return the router's table: each route with the rates of its resources, and the buffer size of each host."""
        kept = self._kept()
        number = {host: index for index, host in enumerate(self.hosts)}
        rows = {}
        for (a, b), route in self._routes.items():
            resources = [resource for name in self._shared(a, b) if (resource := kept.get(name)) is not None]
            if all(resource.rate > route.bandwidth for resource in resources):
                resources.insert(0, _Resource(self._number(("pair", a, b)), route.bandwidth))
            rows[f"{number[a]} {number[b]}"] = {
                "resources": {resource.number: resource.rate for resource in resources},
                "latency": route.latency,
                "loss": route.loss,
                "cut": route.cut,
            }
        return {"routes": rows, "buffers": {str(number[host]): size for host, size in self.buffers().items()}}

    def _kept(self) -> Mapping[tuple[str, ...], _Resource]:
        """Return the NICs and trunks that can hold something up."""
        asked: dict[tuple[str, ...], float] = {}
        for (a, b), route in self._routes.items():
            for name in self._shared(a, b):
                asked[name] = asked.get(name, 0.0) + route.bandwidth
        rates = {name: self._rate(name) for name in asked}
        return {name: _Resource(self._number(name), rate) for name, rate in rates.items() if rate < asked[name]}

    def _shared(self, a: str, b: str) -> Iterator[tuple[str, ...]]:
        """Yield the resources of a route that other pairs pass too."""
        yield "nic out", a
        if self._trunk(a, b) is not None:
            yield "trunk", self._cluster.hosts[a].region, self._cluster.hosts[b].region
        yield "nic in", b

    def _rate(self, name: tuple[str, ...]) -> BytesPerSecond:
        if name[0] != "trunk":
            host = self._cluster.hosts[name[1]]
            return host.nic if name[0] == "nic out" else host.nic_in
        rate = self._cluster.trunk(name[1], name[2])
        assert rate is not None
        return rate

    def _number(self, name: tuple[str, ...]) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _trunk(self, a: str, b: str) -> BytesPerSecond | None:
        return self._cluster.trunk(self._cluster.hosts[a].region, self._cluster.hosts[b].region)

    def _mend(self, pair: tuple[str, str]) -> None:
        link = self._cluster.link(*pair)
        assert link is not None
        self._routes[pair] = Route(bandwidth=link.bandwidth, latency=link.latency)

    def _pairs(self, ones: Sequence[str], others: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield the ordered pairs of hosts that have a link, in both directions."""
        both = {pair for a in ones for b in others for pair in ((a, b), (b, a)) if a != b}
        yield from sorted(pair for pair in both if self._cluster.link(*pair) is not None)

    def pairs(self, a: str, b: str) -> list[tuple[str, str]]:
        """Return the linked ordered pairs of hosts between two hosts or regions; raise UsageError if there are none."""
        pairs = list(self._pairs(self._members(a), self._members(b)))
        if not pairs:
            raise UsageError(f"no link between {a} and {b}", next="Change only links that the cluster file has")
        return pairs

    def _members(self, name: str) -> list[str]:
        """Return the host of this name, or all hosts of the region of this name."""
        found = [host for host in self.hosts if name in (host, self._cluster.hosts[host].region)]
        if not found:
            regions = dict.fromkeys(self._cluster.hosts[host].region for host in self.hosts)
            raise UsageError(
                f"no host or region {name!r} in this world", expected=f"one of {', '.join([*self.hosts, *regions])}"
            )
        return found


def check_values(bandwidth: float | None = None, latency: float | None = None, loss: float | None = None) -> None:
    """Raise UsageError if a link cannot have these values."""
    if bandwidth is not None and not (math.isfinite(bandwidth) and bandwidth > 0):
        raise UsageError(
            "the bandwidth must be above 0", found=str(bandwidth), next="To stop all packets, cut the link"
        )
    if latency is not None and not (math.isfinite(latency) and latency >= 0):
        raise UsageError("the latency must be 0 or more", found=str(latency))
    if loss is not None and not 0 <= loss <= 1:
        raise UsageError("the loss must be a fraction of the packets", found=str(loss), expected="0 to 1")
