"""The sets of devices that a user would try."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.planners.problem import Problem

__all__ = ["device_sets", "fastest"]


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
    """Return so many of the devices, the fastest, in the order in which they are given."""
    if len(devices) <= count:
        return tuple(devices)
    chosen = set(sorted(devices, key=lambda device: -problem.speed(device))[:count])
    return tuple(device for device in devices if device in chosen)
