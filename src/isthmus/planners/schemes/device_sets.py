"""Which devices a plan may use: the sets that a user would try, and the tensor groups among them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, groupby

from isthmus.cluster.spec import Cluster
from isthmus.planners.problem import Problem

__all__ = ["best_link", "device_sets", "fastest", "largest_host", "tensor_groups"]


def device_sets(problem: Problem) -> list[tuple[str, ...]]:
    """Return the device sets to try: all; the fastest 1, 2, 4, ... hosts; each region, host and kind; one of a kind.

    Of hosts that are equal in all but their name the first stands for all. Devices keep the order of the cluster file.
    """
    cluster, usable = problem.cluster, problem.usable
    by_host: dict[str, list[str]] = {}
    for device in usable:
        by_host.setdefault(cluster.devices[device].host, []).append(device)
    ranked = sorted(by_host, key=lambda host: -sum(problem.speed(device) for device in by_host[host]))
    leading = [set(ranked[: 2**i]) for i in range(len(ranked).bit_length())]
    shapes = {_shape(problem, host): host for host in reversed(by_host)}
    sets = [
        usable,
        *(tuple(d for d in usable if cluster.devices[d].host in hosts) for hosts in leading),
        *(tuple(d for d in usable if cluster.host_of(d).region == region) for region in cluster.regions),
        *(tuple(by_host[host]) for host in by_host if host in shapes.values()),
    ]
    kinds = [tuple(d for d in usable if cluster.devices[d].kind == kind) for kind in cluster.kinds]
    sets += [*kinds, *(kind[:1] for kind in kinds)]
    return list(dict.fromkeys(members for members in sets if members))


def _shape(problem: Problem, host: str) -> tuple[object, ...]:
    """Return what distinguishes a host from another one where each is looked at alone."""
    places = tuple(target for _, target, _ in problem.places if target == host)
    return (*problem.cluster.hosts[host].shape, places)


def fastest(problem: Problem, devices: Sequence[str], count: int) -> tuple[str, ...]:
    """So many of the devices, the fastest, in the order in which they are given."""
    if len(devices) <= count:
        return tuple(devices)
    chosen = set(sorted(devices, key=lambda device: -problem.speed(device))[:count])
    return tuple(device for device in devices if device in chosen)


def largest_host(problem: Problem) -> int:
    """Devices of one kind on the host that has most."""
    return max(max(host.devices.values(), default=0) for host in problem.cluster.hosts.values())


def best_link(cluster: Cluster, a: str, b: str) -> tuple[float, float] | None:
    """The largest bandwidth and, as a negative number, the least latency of links between hosts of two regions."""
    where = {name: host.region for name, host in cluster.hosts.items()}
    links = [link for link in cluster.links if sorted(where.get(end, end) for end in link.between) == sorted((a, b))]
    if not links:
        return None
    return max(float(link.bandwidth) for link in links), -min(float(link.latency) for link in links)


def tensor_groups(problem: Problem, devices: Sequence[str], degree: int) -> list[tuple[str, ...]]:
    """Groups of equal devices of one host, or of several hosts if none is large enough; a rest stays idle."""
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
