"""Compute when each packet arrives: packets between emulated hosts wait here until they would have arrived.

A packet passes the resources of its route one after another, then travels for the latency. A *resource* is anything
with a rate. It sends one packet at a time and is shared fairly between flows (TCP connections) by start-time fair
queueing (Goyal, Vin and Cheng, 1996):

    tag of a packet = max(tag of the packet that is being sent, tag of its flow's last packet + that one's size)

The waiting packet with the smallest tag goes next. Flows that have packets waiting get equal rates, and the first
packet of a flow that was silent waits for one packet at most, however many packets of other flows are waiting. A packet
begins at the next resource when it begins at this one, and has left when its last byte is through the slowest of them,
so resources in a row add no delay of their own. All times are when things should happen, not when this process gets
to them, so being late once does not lower the rate.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["FLAGS", "Packet", "Queues", "Resource", "RouteQueue", "wire_bytes"]

FLAGS = 10  # bytes of struct virtio_net_hdr, in front of everything that a TUN device hands over
_HEADERS = 40  # bytes of IP and TCP in front of each packet
_HELD = 2 << 30  # bytes that may wait in all: a sender that no receiver slows down must not take all memory


class Packet:
    """A packet, or a run of packets handed over as one, on its way."""

    __slots__ = ("data", "flow", "resources", "route", "size", "step", "through")

    def __init__(self, data: bytes, route: RouteQueue) -> None:
        self.data, self.route = data, route
        self.size = wire_bytes(data)
        self.flow = data[FLAGS + 12 : FLAGS + 24]  # both addresses and both ports
        self.resources = route.resources
        self.step = 0  # index of the next resource
        self.through = 0.0  # when its last byte has left the resources passed so far


class Resource:
    """Something with a rate, in bytes per second, that packets pass one at a time."""

    __slots__ = ("busy", "free", "last", "rate", "tag", "waiting")

    def __init__(self) -> None:
        self.rate = 1.0
        self.busy = False
        self.free = 0.0  # when the last byte of the packet that is being sent, or was sent last, is through
        self.tag = 0.0  # the tag of the packet that is being sent
        self.last: dict[bytes, float] = {}  # by flow: the smallest tag that its next packet may have
        self.waiting: list[tuple[float, int, Packet]] = []


class RouteQueue:
    """The route from one host to another."""

    __slots__ = ("cut", "latency", "loss", "resources", "target")

    def __init__(self, target: int) -> None:
        self.target = target  # the file of the receiver's TUN device
        self.resources: tuple[Resource, ...] = ()
        self.latency, self.loss, self.cut = 0.0, 0.0, False


def wire_bytes(data: bytes) -> int:
    """Return the bytes on the wire of a packet, or of a run of packets that is handed over as one."""
    whole = len(data) - FLAGS
    segment = data[4] | data[5] << 8  # payload of each packet of the run; 0 means a single packet
    if data[1] == 0 or segment == 0 or whole <= _HEADERS:
        return whole
    packets = -(-(whole - _HEADERS) // segment)
    return whole + _HEADERS * (packets - 1)


class Queues:
    """All resources and routes, and the events that are still to happen. `write` hands a packet to a host."""

    def __init__(self, write: Callable[[int, bytes], object] = os.write, seed: int = 0) -> None:
        self._write = write
        self._chance = random.Random(seed)
        self._resources: dict[str, Resource] = {}
        self._number = itertools.count()  # keeps events at the same instant in order
        self._events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._held = 0
        self.ways: dict[int, dict[bytes, RouteQueue]] = {}  # by the sender's file, by the receiver's address
        self.dropped = 0

    def change(self, route: RouteQueue, row: dict[str, Any]) -> None:
        """Set a route to the values of a row of the table; packets that have begun to leave keep their old route."""
        resources = []
        for number, rate in row["resources"].items():
            resource = self._resources.setdefault(number, Resource())
            resource.rate = rate
            resources.append(resource)
        route.resources = tuple(resources)
        route.latency, route.loss, route.cut = row["latency"], row["loss"], row["cut"]

    def take(self, sender: int, data: bytes, now: float) -> None:
        """Accept a packet that a host sends now."""
        route = self.ways[sender].get(data[FLAGS + 16 : FLAGS + 20]) if data[FLAGS] >> 4 == 4 else None
        if route is None or self._held > _HELD:
            self.dropped += 1
            return
        self._held += len(data)
        self._arrive(Packet(data, route), now)

    def run_until(self, now: float) -> float | None:
        """Run everything that is due, and return when the next event is; None if there is none."""
        events = self._events
        while events and events[0][0] <= now:
            when, _, act, what = heappop(events)
            act(what, when)
        return events[0][0] if events else None

    def _at(self, when: float, act: Callable[[Any, float], None], what: object) -> None:
        heappush(self._events, (when, next(self._number), act, what))

    def _arrive(self, packet: Packet, now: float) -> None:
        """Add a packet to its next resource, or deliver it after the latency if it has begun to pass the last one."""
        if packet.step == len(packet.resources):
            self._at(max(packet.through, now) + packet.route.latency, self._deliver, packet)
            return
        resource = packet.resources[packet.step]
        tag = max(resource.tag, resource.last.get(packet.flow, 0.0))
        resource.last[packet.flow] = tag + packet.size
        heappush(resource.waiting, (tag, next(self._number), packet))
        if not resource.busy:
            self._send(resource, now)

    def _send(self, resource: Resource, now: float) -> None:
        """Let a free resource send the waiting packet with the smallest tag."""
        resource.busy = bool(resource.waiting)
        if not resource.busy:
            resource.last.clear()
            resource.tag = 0.0
            return
        resource.tag, _, packet = heappop(resource.waiting)
        start = max(now, resource.free)
        resource.free = start + packet.size / resource.rate
        packet.through = max(packet.through, resource.free)
        packet.step += 1
        self._at(resource.free, self._send, resource)
        if packet.step == len(packet.resources) and self._lost(packet.route):
            self._held -= len(packet.data)
            self.dropped += 1
        else:
            self._arrive(packet, start)

    def _lost(self, route: RouteQueue) -> bool:
        return route.cut or (route.loss > 0 and self._chance.random() < route.loss)

    def _deliver(self, packet: Packet, now: float) -> None:
        self._held -= len(packet.data)
        try:
            self._write(packet.route.target, packet.data)
        except OSError:  # the host does not accept it: its device is down, or the packet is malformed
            self.dropped += 1
