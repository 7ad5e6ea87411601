"""The event engine again, slow and plain: the judge of `isthmus.cost.event_engine`.

Written from the rules in docs/events.md alone. All arithmetic is on exact fractions: ties are real ties, and no
tolerance hides anywhere. It also keeps a record of the rates, for the tests of fairness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from isthmus.cost.event_engine import Network, Tasks

__all__ = ["Interval", "Record", "fair_rates", "run"]

Rates = dict[int, Fraction]


class Interval(NamedTuple):
    """Between two instants no message starts or finishes sending: every rate (task -> bytes a second) is constant."""

    begin: Fraction
    end: Fraction
    rates: Rates


class Record(NamedTuple):
    start: np.ndarray
    sent: np.ndarray
    end: np.ndarray
    intervals: list[Interval]


def fair_rates(uses: Mapping[int, frozenset[int]], capacity: Mapping[int, Fraction]) -> Rates:
    """Max-min fair rates by progressive filling; `uses` lists the resources of each message (at least one).

    All rates rise together from 0. The first resource to fill up is the one with the least (capacity left) / (messages
    still rising); its messages stop there, and the others rise on.
    """
    rates: Rates = {}
    left = dict(capacity)
    while rising := [message for message in uses if message not in rates]:
        sharers = {r: [m for m in rising if r in uses[m]] for r in {r for m in rising for r in uses[m]}}
        full = min(sharers, key=lambda r: left[r] / len(sharers[r]))
        level = left[full] / len(sharers[full])
        for message in sharers[full]:
            rates[message] = level
            for resource in uses[message]:
                left[resource] -= level
    return rates


class _Engine:
    def __init__(self, tasks: Tasks, lanes: int, network: Network) -> None:
        count = len(tasks.lane)
        self.lane = [int(lane) for lane in tasks.lane]
        self.route = [int(route) for route in tasks.route]
        self.seconds = [Fraction(float(s)) for s in tasks.seconds]
        self.bytes = [Fraction(float(b)) for b in tasks.bytes]
        self.resources = [frozenset(int(r) for r in row if r >= 0) for row in network.resources]
        self.latency = [Fraction(float(a)) for a in network.latency]
        self.capacity = {c: Fraction(float(rate)) for c, rate in enumerate(network.capacity)}
        self.edges = list(zip(map(int, tasks.before), map(int, tasks.after), strict=True))

        self.now = Fraction(0)
        self.round = 0
        self.waits_for = [{b for b, a in self.edges if a == task} for task in range(count)]
        self.ready: dict[int, int] = {}  # queued task -> the round in which it became ready
        self.at_work: dict[int, int] = {}  # lane -> task
        self.working: dict[int, Fraction] = {}  # fixed task -> the instant it will end
        self.sending: dict[int, Fraction] = {}  # message -> bytes left
        self.travelling: dict[
            int, Fraction
        ] = {}  # message sent -> the instant it will have arrived and been dealt with
        self.start: dict[int, Fraction] = {}
        self.sent: dict[int, Fraction] = {}
        self.end: dict[int, Fraction] = {}
        self.intervals: list[Interval] = []

    def run(self) -> Record:
        count = len(self.lane)
        self.queue(task for task in range(count) if not self.waits_for[task])
        self.take()
        while self.working or self.sending or self.travelling:
            self.advance()
            self.queue(self.finish())
            self.take()
        if len(self.end) < count:
            raise ValueError(f"{count - len(self.end)} tasks never ran")
        times = (np.array([float(t[i]) for i in range(count)]) for t in (self.start, self.sent, self.end))
        return Record(*times, self.intervals)

    def queue(self, tasks: Iterable[int]) -> None:
        for task in tasks:
            self.ready[task] = self.round

    def take(self) -> None:
        """Every free lane takes its first task: first ready, then least number. Without a lane: all start."""
        for task in sorted(self.ready, key=lambda t: (self.ready[t], t)):
            lane = self.lane[task]
            if lane in self.at_work:
                continue
            if lane >= 0:
                self.at_work[lane] = task
            del self.ready[task]
            self.begin(task)

    def begin(self, task: int) -> None:
        self.start[task] = self.now
        if self.route[task] < 0:
            self.working[task] = self.now + self.seconds[task]
        else:
            limited = bool(self.resources[self.route[task]])
            self.sending[task] = self.bytes[task] if limited else Fraction(0)

    def advance(self) -> None:
        """To the next instant at which anything finishes, which may be the present one."""
        uses = {m: self.resources[self.route[m]] for m, left in self.sending.items() if left > 0}
        rates = fair_rates(uses, self.capacity)
        finishes = [self.now + left / rates[m] if left > 0 else self.now for m, left in self.sending.items()]
        then = min([*finishes, *self.working.values(), *self.travelling.values()])
        for message, rate in rates.items():
            self.sending[message] -= rate * (then - self.now)
        if then > self.now:
            self.intervals.append(Interval(self.now, then, rates))
        self.now = then
        self.round += 1

    def finish(self) -> list[int]:
        """Handles all finishes of this instant; returns the tasks that are ready by them."""
        for message in [m for m, left in self.sending.items() if left == 0]:
            del self.sending[message]
            self.sent[message] = self.now
            self.free(message)
            after = self.latency[self.route[message]] + self.seconds[message]
            self.travelling[message] = self.now + max(after, Fraction(0))
        arrived = [m for m, arrival in self.travelling.items() if arrival == self.now]
        done = [task for task, end in self.working.items() if end == self.now]
        for task in done:
            self.sent[task] = self.now
            self.free(task)
        self.working = {t: end for t, end in self.working.items() if t not in done}
        self.travelling = {m: arrival for m, arrival in self.travelling.items() if m not in arrived}
        return self.release(arrived + done)

    def free(self, task: int) -> None:
        if self.lane[task] >= 0:
            del self.at_work[self.lane[task]]

    def release(self, ended: list[int]) -> list[int]:
        ready = set()
        for task in ended:
            self.end[task] = self.now
            for after in {a for b, a in self.edges if b == task}:
                self.waits_for[after].discard(task)
                if not self.waits_for[after]:
                    ready.add(after)
        return sorted(ready)


def run(tasks: Tasks, lanes: int, network: Network) -> Record:
    """The same call as `isthmus.cost.event_engine.run`, with the record of rates beside the times."""
    return _Engine(tasks, lanes, network).run()
