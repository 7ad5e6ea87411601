"""The order in which a ring of devices crosses slow links least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle, islice, pairwise

from isthmus.cost.network import Fabric

__all__ = ["NO_WAY", "pass_seconds", "ring_order"]

NO_WAY = 1e12  # seconds of a hop between devices that cannot talk: orders with fewer of them are better
_MOST_HOPS = 20_000  # of all orders that are looked at for one ring


def ring_order(net: Fabric, members: Sequence[str], size: float) -> tuple[str, ...]:
    """Return the members in the fastest order found for `size` bytes to go around.

    With a ring of hops h over resources r, each hop passing the same bytes, that is the order with the least

        2 size max_r |hops over r| / capacity[r] + 2 sum_h latency[h]

    Devices of a host stay together, as leaving a host and coming back only loads its nic. The order of hosts is that
    of the plan or, if that is better, from each host to the nearest (same region, then bandwidth, then latency); then
    pieces of it are turned around as long as that helps.
    """
    hosts: dict[int, list[str]] = {}
    for name in members:
        hosts.setdefault(int(net.wires.host_of[net.number[name]]), []).append(name)
    if len(members) < 3:
        return tuple(members)

    def flat(tour: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for host in tour for name in hosts[host])

    def seconds(tour: Sequence[int]) -> float:
        order = flat(tour)
        return pass_seconds(net, [*pairwise(order), (order[-1], order[0])], size)

    nearest = min([list(hosts), _nearest_tour(net, hosts)], key=seconds)
    best = _turned(nearest, seconds, _MOST_HOPS // len(members))
    kept = pass_seconds(net, list(pairwise((*members, members[0]))), size)
    return tuple(members) if kept <= seconds(best) else flat(best)


def _turned(tour: list[int], seconds: Callable[[list[int]], float], tries: int) -> list[int]:
    """Turn pieces of the tour around as long as that helps; so many are tried at most."""
    least, since = seconds(tour), 0  # turns without success
    turns = [(i, j) for i in range(1, len(tour) - 1) for j in range(i + 1, len(tour))]
    for i, j in islice(cycle(turns), tries):
        other = tour[:i] + tour[i : j + 1][::-1] + tour[j + 1 :]
        found, since = seconds(other), since + 1
        if found < least * (1.0 - 1e-9):
            tour, least, since = other, found, 0
        if since == len(turns):
            break
    return tour


def _nearest_tour(net: Fabric, hosts: Mapping[int, Sequence[str]]) -> list[int]:
    """Return the tour that goes from each host to the nearest that is left."""
    wires, lead = net.wires, {host: net.number[members[0]] for host, members in hosts.items()}
    tour = [next(iter(hosts))]
    left = set(hosts) - set(tour)

    def distance(host: int) -> tuple[bool, bool, float, float, int]:
        here, there = lead[tour[-1]], lead[host]
        route = wires.route_of[here, there]
        if route < 0:
            return True, True, 0.0, 0.0, host
        far = wires.region_of[here] != wires.region_of[there]
        return False, bool(far), -float(wires.rate[route]), float(wires.latency[route]), host

    while left:
        tour.append(min(left, key=distance))
        left.remove(tour[-1])
    return tour


def pass_seconds(net: Fabric, hops: Iterable[tuple[str, str]], size: float) -> float:
    """Return the seconds in which every hop passes `size` bytes twice at once, and then one message passes all hops
    twice.
    """
    loads: dict[int, float] = {}
    latency = 0.0
    for a, b in hops:
        if a == b:
            continue
        route = int(net.wires.route_of[net.number[a], net.number[b]])
        if route < 0:
            latency += NO_WAY
        while route >= 0:
            latency += float(net.wires.latency[route])
            for r in net.network.resources[route].tolist():
                if r >= 0:
                    loads[r] = loads.get(r, 0.0) + 1.0 / float(net.network.capacity[r])
            route = int(net.wires.hops[0, route])
    return 2.0 * (size * max(loads.values(), default=0.0) + latency)
