"""The critical path of a step: the chain of tasks and messages that makes the step as long as it is.

The chain is found from its end. The engine begins a task at one of three moments: at 0, when the last of the tasks that
it waits for ends, or when its lane becomes free. So another task ends at the very moment at which a task of the chain
begins, and the chain fills the step without a gap:

    step = sum of the lengths of its legs

A message has up to three legs: sending (over the resource on its route that limited it, which is the one that was
fullest while it was sent), latency, and what the receiver does with it. A task that waited for its lane waited until
the task before it on that lane was sent, so the time that people call queueing is a leg of the task that was ahead in
the queue. Equal devices make many critical paths, of which one is reported: of several tasks that end at the same
moment, one on the same lane is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cost.network import ADDING
from isthmus.cost.simulate import Played
from isthmus.cost.task_list import GATE, HOST_UPDATE, KINDS, TOTALS, UPDATE

__all__ = ["Leg", "What", "critical_path"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
What = Literal["computing", "updating", "sending", "latency", "adding"]

_EQUAL = 1.0 + 1e-6  # rates and loads that differ by less count as equal


class Leg(NamedTuple):
    """One piece of the chain, from `start` to `end`.

    `what` is computing or updating on a device or on a host's processor; sending over a resource; the latency of the
    link (or host) that the resource is part of; or adding up, on a device or host, what has arrived.
    """

    what: What
    kind: str  # of the task: one of cost.task_list.KINDS
    where: str  # a device, a host, or one of Fabric.resources
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return the length of the leg in seconds."""
        return self.end - self.start


def critical_path(played: Played) -> tuple[Leg, ...]:
    """Return the critical path of a played step in order of time; it is empty if nothing takes any time."""
    if not len(played.times.end):
        return ()
    chain, legs = _Chain(played), list[Leg]()
    task, arrived = int(np.argmax(played.times.end)), True
    while task >= 0:
        legs.extend(leg for leg in reversed(list(chain.legs(task, arrived))) if leg.end > leg.start)
        task, arrived = chain.before(task)
    return tuple(reversed(legs))


class _Chain:
    """A played step, with the indices that are needed to go backwards in it."""

    def __init__(self, played: Played) -> None:
        self.played, self.tasks, self.times = played, played.tasks.tasks(), played.times
        self.network, self.names = played.fabric.network, played.fabric.resources
        self.adds = bool((played.fabric.wires.overheads[ADDING] > 0.0).any())
        self._carried: dict[int, tuple[Floats, Floats]] = {}

    @cached_property
    def _edges(self) -> tuple[Ints, Ints]:
        """Return (first, found): the tasks before task t are `found[first[t] : first[t + 1]]`."""
        order = np.argsort(self.tasks.after, kind="stable")
        first = np.searchsorted(self.tasks.after[order], np.arange(len(self.tasks.lane) + 1))
        return first, self.tasks.before[order].astype(np.int64)

    @cached_property
    def _queues(self) -> tuple[Ints, Ints]:
        """Return (first, found): the tasks of lane n, in the order they began, are `found[first[n] : first[n + 1]]`."""
        order = np.lexsort((self.times.start, self.tasks.lane))
        first = np.searchsorted(self.tasks.lane[order], np.arange(self.played.tasks.lanes + 1))
        return first, order

    def before(self, task: int) -> tuple[int, bool]:
        """Return the task that ended (True) or left the lane (False) when this task began; -1 if it began at 0."""
        began, lane = self.times.start[task], self.tasks.lane[task]
        if began <= 0.0:
            return -1, True
        first, found = self._edges
        waited = found[first[task] : first[task + 1]]
        last = waited[self.times.end[waited] >= began] if len(waited) else waited
        if len(last):
            here = last[self.tasks.lane[last] == lane]
            return int(here[0] if len(here) else last[0]), True
        first, found = self._queues
        queue = found[first[lane] : first[lane + 1]]
        return int(queue[np.searchsorted(self.times.start[queue], began) - 1]), False

    def legs(self, task: int, arrived: bool) -> Iterator[Leg]:
        """Yield the legs of a task in order; for a message that only had to leave its lane, yield its sending alone."""
        start, sent, end = (float(each[task]) for each in self.times)
        number, route = int(self.played.tasks.kind[task]), int(self.tasks.route[task])
        kind = KINDS[number]
        if route < 0:
            yield Leg(*self._fixed(task, number), start=start, end=end)
            return
        yield Leg("sending", kind, self._tightest(task, route, start, sent), start, sent)
        if arrived:
            there = max(sent, end - self._adding(task, number, route))
            yield Leg("latency", kind, self._link(route), sent, there)
            yield Leg("adding", kind, self._receiver(route), there, end)

    def _fixed(self, task: int, number: int) -> tuple[What, str, str]:
        """Return what a task that sends nothing does, the task's kind, and where it does it."""
        if number == GATE:  # a request for weights: it takes until the farthest replica knows of it
            follow = self.tasks.after[self.tasks.before == task]
            routes = self.tasks.route[follow][self.tasks.route[follow] >= 0]
            far = int(routes[np.argmax(self.network.latency[routes])]) if len(routes) else -1
            return "latency", KINDS[number], self._link(far) if far >= 0 else ""
        where, _ = self.played.fabric.lane_name(int(self.tasks.lane[task]))
        return "updating" if number in (UPDATE, HOST_UPDATE) else "computing", KINDS[number], where

    def _adding(self, task: int, number: int, route: int) -> float:
        """Return the seconds in which what has arrived is added.

        That is what a message takes beyond its latency, with two exceptions. The first message to a receiver also waits
        for the note that the receiver is ready (`cost.collectives`), which takes one latency more; and messages without
        bytes wait for nothing else.
        """
        beyond = float(self.tasks.seconds[task])
        if not self.adds or number == TOTALS:
            return 0.0
        note = float(self.network.latency[route]) if self.played.tasks.turn[task] == 0 else 0.0
        return max(0.0, beyond - note)

    def _row(self, route: int) -> list[int]:
        return [r for r in self.network.resources[route].tolist() if r >= 0]

    def _link(self, route: int) -> str:
        """Return the resource that stands for a route's latency: what joins two hosts, else a device's way out."""
        row = self._row(route)
        return self.names[row[1] if len(row) > 2 else row[0]]

    def _receiver(self, route: int) -> str:
        """Return the host that a route leads to or, inside a host, the device."""
        return self.names[self._row(route)[-1]].removesuffix(" in").removesuffix(" nic")

    def _tightest(self, task: int, route: int, start: float, sent: float) -> str:
        """Return the resource that was fullest while a message was sent.

        If several were, prefer one that is neither a nic nor a device's way in or out.
        """
        row, size = self._row(route), float(self.tasks.bytes[task])
        if not row:
            return ""
        rates = [float(self.network.capacity[r]) for r in row]
        full = [size / rate for rate in rates]  # a message alone takes as long as its narrowest resource
        if sent - start > max(full) * _EQUAL:
            full = [self._between(r, start, sent) / rate for r, rate in zip(row, rates, strict=True)]
        found = [self.names[r] for r, load in zip(row, full, strict=True) if load * _EQUAL >= max(full)]
        return min(found, key=lambda name: name.endswith((" in", " out")))

    def _between(self, resource: int, start: float, end: float) -> float:
        """Return the bytes that a resource carries from start to end, if each message is sent evenly."""
        if resource not in self._carried:
            routes = np.append((self.network.resources == resource).any(axis=1), False)  # the last row: no route
            on = np.flatnonzero(routes[self.tasks.route] & (self.times.sent > self.times.start))
            times = np.concatenate((self.times.start[on], self.times.sent[on]))
            rates = self.tasks.bytes[on] / (self.times.sent[on] - self.times.start[on])
            order = np.argsort(times, kind="stable")
            times, rate = times[order], np.cumsum(np.concatenate((rates, -rates))[order])
            self._carried[resource] = times, np.concatenate(([0.0], np.cumsum(rate[:-1] * np.diff(times))))
        times, carried = self._carried[resource]
        return float(np.interp(end, times, carried) - np.interp(start, times, carried))
