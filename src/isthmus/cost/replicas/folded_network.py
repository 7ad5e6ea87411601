"""The network of a folded plan: C copies of F, whose messages stand for several (`cost.replicas.folding`).

A host stands for itself: its nic, bus and devices carry what they carry in the whole plan. So does a pair of hosts, for
what one of them sends to the other. A trunk is shared by many copies, and a message gets of it what it would get among
all the messages that it stands for:

| from, to | stands for | its trunk |
|---|---|---|
| a copy, the same copy | F / C messages, one in each copy | C / F of the trunk |
| a copy, the next | w = (F - 1) / (C - 1) hops, from copy to copy | (C - 1) / F of it: all F hops, with the last |
| the last copy, the first; SINGLE | itself: where a ring goes on, or the ring of a tree's leaders | all of it |
| WIDE, to another copy | w messages, as one of all their bytes, over w pairs of hosts | C / F of it |

Messages of different rows do not meet on a trunk here, although they do in the whole plan. A message that goes to all
shares nics, links and trunks as all the messages that it stands for would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster, Host
from isthmus.cost.event_engine import Network
from isthmus.cost.network import Fabric, Wires, device_overheads
from isthmus.model.profile import DeviceCosts

__all__ = ["folded_fabric", "with_copies"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

# Sorts of resources, in the order of their numbers.
NIC_OUT, NIC_IN, OUT, INTO, BUS_IN, BUS_OUT, PAIR, WIDE_PAIR, SHARED, FOLLOWING, WHOLE = range(11)


def _starts(hosts: int, devices: int, regions: int) -> list[int]:
    """Return the number of the first resource of each sort; the last three sorts are trunks."""
    sizes = [hosts] * 2 + [devices] * 4 + [hosts**2] * 2 + [regions**2] * 3
    return list(accumulate(sizes, initial=0))


def folded_fabric(
    cluster: Cluster, names: Sequence[str], copies: Sequence[int], costs: Mapping[str, DeviceCosts] | None = None
) -> Fabric:
    """Return the fabric of the named hosts, each in a copy; `with_copies` sets for how many copies these stand."""
    hosts = [cluster.hosts[name] for name in names]
    own = [[f"{host.name}/{kind}/{i}" for kind, n in host.devices.items() for i in range(n)] for host in hosts]
    devices = tuple(name for group in own for name in group)
    numbers = {name: i for i, name in enumerate(cluster.regions)}
    host_of = np.repeat(np.arange(len(hosts), dtype=np.int32), [len(group) for group in own])
    region = np.array([numbers[host.region] for host in hosts], np.int32)
    copy = np.array(copies, np.int32)
    links, trunks = _links(cluster, hosts, region), _trunks(cluster)
    at = _starts(len(hosts), len(devices), len(numbers))
    near = np.nonzero((host_of[:, None] == host_of) & ~np.eye(len(devices), dtype=np.bool_))
    inside = np.stack((at[OUT] + near[0], at[INTO] + near[1]), axis=1)
    buses = np.arange(at[BUS_IN], at[BUS_IN] + 2 * len(devices))
    paths = np.full((3 * len(hosts) ** 2 + len(inside) + len(buses), 4), -1, np.int32)
    latency = np.zeros(len(paths))
    first = 3 * len(hosts) ** 2
    paths[:first] = _between(at, region, copy, np.isfinite(trunks)).reshape(-1, 4)
    latency[:first] = np.tile(np.where(np.isfinite(links[1]), links[1], 0.0).ravel(), 3)
    paths[first : first + len(inside), :2] = inside
    latency[first : first + len(inside)] = np.array([host.latency for host in hosts])[host_of[near[0]]]
    paths[first + len(inside) :, 0] = buses
    network = Network(paths, latency, _capacity(hosts, host_of, links[0], trunks))
    routes = np.where(np.isfinite(links[1]), np.arange(first).reshape(3, len(hosts), -1), -1)
    routes = routes[:, host_of[:, None], host_of].astype(np.int32)
    routes[:, np.arange(len(devices)), np.arange(len(devices))] = -1
    routes[:, near[0], near[1]] = np.arange(first, first + len(inside))
    wires = Wires(
        routes[0].copy(), np.full((2, len(paths)), -1, np.int32), latency, _rates(network),
        np.arange(first + len(inside), len(paths), dtype=np.int32).reshape(2, -1), host_of, region[host_of],
        device_overheads([cluster.devices[d].kind for d in devices], costs or {}), routes[1:].copy(),
        copy[host_of], 1.0, 1.0, 0,
    )  # fmt: skip
    number = {name: i for i, name in enumerate(devices)}
    return Fabric(devices, number, tuple(names), cluster.regions, wires, network, _names(names, devices, cluster), {})


def with_copies(net: Fabric, kept: int, copies: int, senders: npt.ArrayLike, rounds: int) -> Fabric:
    """Return the fabric where `kept` copies stand for `copies`, and at most `rounds` rounds of a ring are played.

    `senders` has, for each host, how many of its devices are sharded together: a message from it to all stands for
    theirs.
    """
    at = _starts(len(net.hosts), len(net.devices), len(net.regions))
    across = (copies - 1.0) / (kept - 1.0)
    capacity = net.network.capacity.copy()
    for sort, part in ((WIDE_PAIR, across), (SHARED, kept / copies), (FOLLOWING, (kept - 1.0) / copies)):
        capacity[at[sort] : at[sort + 1]] *= part
    home = np.zeros(len(net.hosts), np.int32)
    home[net.wires.host_of] = net.wires.copy_of
    apart = home[:, None] != home
    weight = np.ones(len(net.network.latency), np.int32)
    weight[apart.size : 2 * apart.size] = (np.asarray(senders)[:, None] * np.where(apart, round(across), 1)).ravel()
    network = net.network._replace(capacity=capacity, weight=weight)
    wires = net.wires._replace(rate=_rates(network), stands=copies / kept, across=across, rounds=rounds)
    return net._replace(wires=wires, network=network)


def _between(at: Sequence[int], region: Ints, copy: Ints, limited: npt.NDArray[np.bool_]) -> Ints:
    """Return what messages between two hosts pass, [3, hosts, hosts, 4]: usually, when sent to all, when sent once."""
    n = len(region)
    here, there = np.arange(n)[:, None], np.arange(n)[None, :]
    found = np.full((3, n, n, 4), -1, np.int32)
    found[..., 0], found[..., 1], found[..., 2] = at[NIC_OUT] + here, at[NIC_IN] + there, at[PAIR] + here * n + there
    apart = copy[:, None] != copy
    found[1, ..., 2] += np.where(apart, at[WIDE_PAIR] - at[PAIR], 0)
    trunk = region[:, None] * len(limited) + region
    first = np.full((3, n, n), at[SHARED])
    first[0] = np.where(apart, np.where(copy == 0, at[WHOLE], at[FOLLOWING]), at[SHARED])
    first[2] = at[WHOLE]
    found[..., 3] = np.where(limited[region[:, None], region], first + trunk, -1)
    return found


def _links(cluster: Cluster, hosts: Sequence[Host], region: Ints) -> Floats:
    """Return the bandwidth and latency between hosts, [2, hosts, hosts]; both are infinite where there is no link."""
    numbers = {name: i for i, name in enumerate(cluster.regions)}
    regions = np.full((2, len(numbers), len(numbers)), np.inf)
    _enter(cluster, numbers, regions)
    found = regions[:, region[:, None], region]
    _enter(cluster, {host.name: i for i, host in enumerate(hosts)}, found)
    return found


def _enter(cluster: Cluster, numbers: Mapping[str, int], table: Floats) -> None:
    for link in cluster.links:
        a, b = (numbers.get(end, -1) for end in link.between)
        if a >= 0 and b >= 0:
            table[:, a, b] = table[:, b, a] = link.bandwidth, link.latency


def _trunks(cluster: Cluster) -> Floats:
    """Return the trunk that all flows between two regions share, [regions, regions]; infinite where none is given."""
    found = [[cluster.trunk(a, b) for b in cluster.regions] for a in cluster.regions]
    return np.array([[np.inf if trunk is None else trunk for trunk in row] for row in found])


def _capacity(hosts: Sequence[Host], host_of: Ints, bandwidth: Floats, trunks: Floats) -> Floats:
    """Return the capacity of every resource, in the order of the resources."""
    nics = [np.array([getattr(host, way) for host in hosts], np.float64) for way in ("nic", "nic_in")]
    inner = np.array([host.bandwidth for host in hosts], np.float64)[host_of]
    bus = np.array([host.bus for host in hosts], np.float64)[host_of]
    pairs = [bandwidth.ravel()] * 2
    return np.concatenate((*nics, inner, inner, bus, bus, *pairs, *[trunks.ravel()] * 3))


def _rates(network: Network) -> Floats:
    """Return the bytes a second of a message alone on each route."""
    return np.asarray(np.append(network.capacity, np.inf)[network.resources].min(axis=1))  # index -1: no resource


def _names(hosts: Sequence[str], devices: Sequence[str], cluster: Cluster) -> tuple[str, ...]:
    """Return a name of each resource for people."""
    ends = [f"{host} nic {way}" for way in ("out", "in") for host in hosts]
    ends += [f"{device} {way}" for way in ("out", "in", "bus in", "bus out") for device in devices]
    pairs = [f"{a} to {b}" for a in hosts for b in hosts]
    trunks = [f"{a} to {b} trunk" for a in cluster.regions for b in cluster.regions]
    return (*ends, *pairs, *pairs, *trunks, *trunks, *trunks)
