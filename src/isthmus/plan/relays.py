"""Which hosts relay messages between two hosts that have no link.

The path of a pair is the one on which a message of a megabyte takes least time, if every host in between receives it
whole and sends it on. That time is the sum over the path's hops of

    latency + bytes / min(bandwidth of the link, both nics)

Relays are hosts with devices, because a worker there passes the messages on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations, pairwise

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, Link
from isthmus.plan.types import Via
from isthmus.units import BytesPerSecond, Seconds

__all__ = ["joined", "relays"]

_MESSAGE = 1e6  # bytes


def relays(cluster: Cluster) -> tuple[Via, ...]:
    """Return the best path between every two hosts that have devices and no link, where there is a path."""
    hosts = [name for name, host in cluster.hosts.items() if host.devices]
    apart: dict[str, list[str]] = {}
    for a, b in combinations(hosts, 2):
        if cluster.link(a, b) is None:
            apart.setdefault(a, []).append(b)
    found = {a: _paths(cluster, hosts, a) for a in apart}
    return tuple(
        Via(between=(a, b), hosts=found[a][b][1:-1]) for a, others in apart.items() for b in others if b in found[a]
    )


def joined(cluster: Cluster, vias: Sequence[Via]) -> Cluster:
    """Return the cluster with a link for each relayed pair, on which nothing takes longer than over the relay."""
    links = [_whole(cluster, (via.between[0], *via.hosts, via.between[1])) for via in vias]
    return replace(cluster, links=(*cluster.links, *links)) if links else cluster


def _paths(cluster: Cluster, hosts: Sequence[str], source: str) -> dict[str, tuple[str, ...]]:
    """Return the best path to every host that can be reached (Dijkstra's algorithm; ties by the cluster's order)."""
    number = {host: i for i, host in enumerate(hosts)}
    paths: dict[str, tuple[str, ...]] = {}
    queue: list[tuple[float, int, tuple[str, ...]]] = [(0.0, number[source], (source,))]
    while queue:
        spent, _, path = heapq.heappop(queue)
        here = path[-1]
        if here in paths:
            continue
        paths[here] = path
        for other in hosts:
            if other not in paths and (link := cluster.link(here, other)) is not None:
                rate = min(link.bandwidth, cluster.hosts[here].nic, cluster.hosts[other].nic_in)
                wait = link.latency + _MESSAGE / rate if rate else float("inf")
                heapq.heappush(queue, (spent + wait, number[other], (*path, other)))
    return paths


def _whole(cluster: Cluster, path: Sequence[str]) -> Link:
    """Return a link as fast as a path can be: the bandwidth of its narrowest hop, the latency of all hops together."""
    hops = [link for hop in pairwise(path) if (link := cluster.link(*hop)) is not None]
    nics = [cluster.hosts[host].nic_best for host in path]
    return Link(
        between=(path[0], path[-1]),
        bandwidth=BytesPerSecond(min(*nics, *(link.bandwidth for link in hops))),
        latency=Seconds(sum(link.latency for link in hops)),
    )
