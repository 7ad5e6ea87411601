"""A cluster as shared resources: what every message between two devices passes through.

A message between devices of one host passes the sender's way out and the receiver's way in, each with the host's own
bandwidth. Between hosts it passes the sender's nic, the link of the two hosts, the trunk of the two regions if there is
one, and the receiver's nic. Each direction is a resource of its own, since links are full duplex. Spilled state passes
the device's bus.

Where a plan relays messages over other hosts (`via`), each of these hosts receives a message whole and then sends it
on.

What was measured of messages (`NetworkCosts`) goes into the cluster before anything is priced on it: headers take their
part of nics, links and trunks, and every message, inside a host too, takes some seconds beside the latency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster
from isthmus.compiled import compiled, inlined
from isthmus.cost.event_engine import WIDTH, Network
from isthmus.model.profile import DeviceCosts, NetworkCosts
from isthmus.units import BytesPerSecond, Seconds

__all__ = [
    "COMPUTE",
    "Fabric",
    "Wires",
    "by_way",
    "device_overheads",
    "fabric",
    "flows_of",
    "hops_of",
    "latency_between",
    "members_of",
    "seconds_to_send",
    "with_overheads",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

# Lanes of device d: lane kind * devices + d. A host's processor and its relay lane come after all of those.
COMPUTE, SEND, SYNC, LOAD, STORE = 0, 1, 2, 3, 4
LANE_KINDS = 5
ACTION, STEP, ADDING = 0, 1, 2  # rows of Wires.overheads
WIDE, SINGLE = 0, 1  # rows of Wires.ways


class Wires(NamedTuple):
    """The route that a message between two devices takes, and the overheads of devices, for compiled code.

    In a folded plan (`cost.replicas.folding`) there are a few copies here, which stand for all of them.
    """

    route_of: Ints  # [devices, devices], -1: they cannot talk
    hops: Ints  # [2, routes]: the route on which a relay sends on, and the lane of the relay that sends on this one
    latency: Floats  # [routes]
    rate: Floats  # [routes]: bytes a second of a message alone
    bus: Ints  # [2, devices]: routes from host memory to the device and back
    host_of: Ints  # [devices]
    region_of: Ints  # [devices]
    overheads: Floats  # [3, devices]: seconds around an action, of each step, and for each byte that is added
    ways: Ints  # [2, devices, devices], if folded: routes of what a device sends to all, and of what is sent only once
    copy_of: Ints  # [devices]
    stands: float  # for how many copies each copy stands; 1: nothing is folded
    across: float  # for how many steps from a copy to another each such step stands
    rounds: int  # the most rounds of a ring that are played


@inlined
def latency_between(wires: Wires, source: int, target: int) -> float:
    """Return the seconds that a message of no bytes takes; 0 if there is no route."""
    route = wires.route_of[source, target] if source != target else -1
    seconds = 0.0
    while route >= 0:
        seconds += wires.latency[route]
        route = wires.hops[0, route]
    return seconds


@inlined
def seconds_to_send(wires: Wires, source: int, target: int, size: float) -> float:
    """Return the seconds in which `size` bytes leave when alone; 0 over a relay, which must have all first."""
    route = wires.route_of[source, target] if source != target else -1
    return size / wires.rate[route] if route >= 0 and wires.hops[0, route] < 0 else 0.0


@inlined
def members_of(wires: Wires, n: int) -> int:
    """Return the number of participants of a sync for which n stand."""
    return int(n * wires.stands + 0.5)


@inlined
def hops_of(wires: Wires, a: int, b: int) -> float:
    """Return for how many hops of a ring or chain the one from a to b stands (see `cost.replicas.folding`)."""
    if wires.copy_of[a] == wires.copy_of[b]:
        return wires.stands
    return 1.0 if wires.copy_of[b] == 0 else wires.across


@inlined
def flows_of(wires: Wires, a: int, b: int) -> float:
    """Return for how many messages the one from a to b stands when a sends to all."""
    return 1.0 if wires.copy_of[a] == wires.copy_of[b] else wires.across


@compiled
def by_way(wires: Wires, way: int) -> Wires:
    """Return the wires for messages to all participants (WIDE) or for messages sent only once (SINGLE).

    A SINGLE message is sent once, however many copies there are.
    """
    if wires.stands == 1.0:
        return wires
    stands, across = (wires.stands, wires.across) if way == WIDE else (1.0, 1.0)
    return Wires(
        wires.ways[way], wires.hops, wires.latency, wires.rate, wires.bus, wires.host_of, wires.region_of,
        wires.overheads, wires.ways, wires.copy_of, stands, across, wires.rounds,
    )  # fmt: skip


class Fabric(NamedTuple):
    """A cluster's devices, lanes and network."""

    devices: tuple[str, ...]
    number: Mapping[str, int]
    hosts: tuple[str, ...]
    regions: tuple[str, ...]
    wires: Wires
    network: Network
    resources: tuple[str, ...]  # a name of each resource for people
    remembered: dict[tuple[object, ...], float]  # bytes with which measured syncs are played (`cost.measured_syncs`)

    @property
    def lanes(self) -> int:
        """Return the number of lanes: those of all devices, then one processor and one relay lane for each host."""
        return LANE_KINDS * len(self.devices) + 2 * len(self.hosts)

    def lane_name(self, lane: int) -> tuple[str, str]:
        """Return the device or host that the lane belongs to, and what the lane does."""
        kinds = ("compute", "send", "sync", "load", "store")
        if lane < LANE_KINDS * len(self.devices):
            return self.devices[lane % len(self.devices)], kinds[lane // len(self.devices)]
        lane -= LANE_KINDS * len(self.devices)
        return self.hosts[lane % len(self.hosts)], ("processor", "relay")[lane // len(self.hosts)]


class _Table:
    """Routes and resources while they are being numbered."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.capacity: list[float] = []
        self.rows: list[tuple[tuple[int, ...], float]] = []
        self.next_hop: list[int] = []
        self.hop_lane: list[int] = []

    def resource(self, name: str, capacity: float) -> int:
        self.names.append(name)
        self.capacity.append(capacity)
        return len(self.names) - 1

    def route(self, resources: Sequence[int], latency: float, *, next_hop: int = -1, hop_lane: int = -1) -> int:
        self.rows.append((tuple(resources), latency))
        self.next_hop.append(next_hop)
        self.hop_lane.append(hop_lane)
        return len(self.rows) - 1

    def network(self) -> Network:
        resources = np.full((max(1, len(self.rows)), WIDTH), -1, np.int32)
        for i, (row, _) in enumerate(self.rows):
            resources[i, : len(row)] = row
        latency = np.array([latency for _, latency in self.rows] or [0.0])
        return Network(resources, latency, np.array(self.capacity), np.ones(len(latency), np.int32))


def with_overheads(cluster: Cluster, costs: NetworkCosts | None) -> Cluster:
    """Return the cluster with the rates and latencies that messages meet."""
    if costs is None:
        return cluster

    def rate(given: BytesPerSecond) -> BytesPerSecond:
        return BytesPerSecond(given * costs.payload)

    def wait(given: Seconds) -> Seconds:
        return Seconds(given + costs.message_seconds)

    return replace(
        cluster,
        hosts={
            name: replace(host, nic=rate(host.nic), down=rate(host.nic_in), latency=wait(host.latency))
            for name, host in cluster.hosts.items()
        },
        links=tuple(
            replace(
                link,
                bandwidth=rate(link.bandwidth),
                latency=wait(link.latency),
                trunk=None if link.trunk is None else rate(link.trunk),
            )
            for link in cluster.links
        ),
    )


def fabric(
    cluster: Cluster,
    via: Mapping[tuple[str, str], tuple[str, ...]] | None = None,
    costs: Mapping[str, DeviceCosts] | None = None,
) -> Fabric:
    """Return the fabric of a cluster.

    `via` gives the relay hosts of pairs of hosts, in both directions, and `costs` what was measured of device kinds.
    """
    devices = tuple(cluster.devices)
    hosts, regions = tuple(cluster.hosts), cluster.regions
    host_number = {name: i for i, name in enumerate(hosts)}
    table = _Table()
    nic_out = [table.resource(f"{h.name} nic out", h.nic) for h in cluster.hosts.values()]
    nic_in = [table.resource(f"{h.name} nic in", h.nic_in) for h in cluster.hosts.values()]
    out = [table.resource(f"{d} out", cluster.host_of(d).bandwidth) for d in devices]
    into = [table.resource(f"{d} in", cluster.host_of(d).bandwidth) for d in devices]
    trunks = {
        (a, b): table.resource(f"{a} to {b} trunk", trunk)
        for a in regions
        for b in regions
        if (trunk := cluster.trunk(a, b)) is not None
    }

    known: dict[tuple[str, str], list[int]] = {}

    def hop(a: str, b: str) -> list[int] | None:
        """Return the resources between two hosts, or None if they have no link."""
        if (a, b) not in known:
            link = cluster.link(a, b)
            if link is None:
                return None
            pair = table.resource(f"{a} to {b}", link.bandwidth)
            trunk = trunks.get((cluster.hosts[a].region, cluster.hosts[b].region))
            middle = [pair] if trunk is None else [pair, trunk]
            known[a, b] = [nic_out[host_number[a]], *middle, nic_in[host_number[b]]]
        return known[a, b]

    def relayed(path: Sequence[str]) -> int:
        """Number the routes along a path of hosts, from its last hop to its first, and return the first hop's route."""
        after = -1
        for index in range(len(path) - 2, -1, -1):
            a, b = path[index], path[index + 1]
            resources, link = hop(a, b), cluster.link(a, b)
            if resources is None or link is None:
                return -1
            lane = LANE_KINDS * len(devices) + len(hosts) + host_number[a] if index else -1
            after = table.route(resources, link.latency, next_hop=after, hop_lane=lane)
        return after

    between = np.full((len(hosts), len(hosts)), -1, np.int32)
    for i, a in enumerate(hosts):
        for j, b in enumerate(hosts):
            if i != j:
                between[i, j] = relayed((a, *(via or {}).get((a, b), ()), b))
    host_of = np.array([host_number[cluster.devices[d].host] for d in devices], np.int32)
    route_of = between[np.ix_(host_of, host_of)]
    _inside(cluster, devices, host_of, route_of, table, out, into)
    bus_in = [table.resource(f"{d} bus in", cluster.host_of(d).bus) for d in devices]
    bus_out = [table.resource(f"{d} bus out", cluster.host_of(d).bus) for d in devices]
    load = np.array([table.route([r], 0.0) for r in bus_in], np.int32)
    store = np.array([table.route([r], 0.0) for r in bus_out], np.int32)
    region_number = {name: i for i, name in enumerate(regions)}
    region_of = np.array([region_number[cluster.host_of(d).region] for d in devices], np.int32)
    hops, network = np.array([table.next_hop, table.hop_lane], np.int32), table.network()
    rate = np.append(network.capacity, np.inf)[network.resources].min(axis=1)  # index -1: no resource
    overheads = device_overheads([cluster.devices[d].kind for d in devices], costs or {})
    bus = np.stack([load, store])
    ways, copy_of = np.empty((0, 0, 0), np.int32), np.zeros(len(devices), np.int32)
    wires = Wires(route_of, hops, network.latency, rate, bus, host_of, region_of, overheads, ways, copy_of, 1.0, 1.0, 0)
    number = {name: i for i, name in enumerate(devices)}
    return Fabric(devices, number, hosts, regions, wires, network, tuple(table.names), {})


def device_overheads(kinds: Sequence[str], costs: Mapping[str, DeviceCosts]) -> Floats:
    """Return the overheads of each device, by its kind, in the rows ACTION, STEP and ADDING."""
    found = np.zeros((3, len(kinds)))
    for d, kind in enumerate(kinds):
        if (own := costs.get(kind)) is not None:
            adding = 0.0 if own.add_bandwidth is None else 1.0 / own.add_bandwidth
            found[:, d] = own.action_seconds, own.step_seconds, adding
    return found


def _inside(
    cluster: Cluster,
    devices: tuple[str, ...],
    host_of: Ints,
    route_of: Ints,
    table: _Table,
    out: list[int],
    into: list[int],
) -> None:
    """Add the routes between devices of one host."""
    by_host: dict[int, list[int]] = {}
    for d, host in enumerate(host_of):
        by_host.setdefault(int(host), []).append(d)
    for members in by_host.values():
        latency = cluster.host_of(devices[members[0]]).latency
        for i in members:
            for j in members:
                if i != j:
                    route_of[i, j] = table.route([out[i], into[j]], latency)
