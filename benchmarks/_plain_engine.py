"""The event engine as one would write it in plain Python, on floats and `heapq`: the peer of the compiled one.

The same rules (docs/events.md). Rates of all messages are found again whenever one starts or is through; an event that
a new rate made obsolete stays in the heap and is passed over.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable

import numpy as np

from isthmus.cost.event_engine import Network, Tasks, Times

__all__ = ["run"]


def run(tasks: Tasks, lanes: int, network: Network) -> Times:
    """The same call as `isthmus.cost.event_engine.run`."""
    return _Engine(tasks, lanes, network).run()


class _Engine:
    def __init__(self, tasks: Tasks, lanes: int, network: Network) -> None:
        count = len(tasks.lane)
        self.lane, self.route = tasks.lane.tolist(), tasks.route.tolist()
        self.seconds, self.bytes = tasks.seconds.tolist(), tasks.bytes.tolist()
        self.paths = [[r for r in row if r >= 0] for row in network.resources.tolist()]
        self.latency, self.capacity = network.latency.tolist(), network.capacity.tolist()
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.waits = [0] * count
        for before, after in zip(tasks.before.tolist(), tasks.after.tolist(), strict=True):
            self.after[before].append(after)
            self.waits[after] += 1
        self.queues: list[deque[int]] = [deque() for _ in range(lanes)]
        self.busy = [False] * lanes
        self.start, self.sent, self.end = [-1.0] * count, [-1.0] * count, [-1.0] * count
        self.rate: dict[int, float] = {}  # of each message being sent
        self.left: dict[int, float] = {}  # its bytes at the instant its rate was set
        self.since: dict[int, float] = {}
        self.due = [0.0] * count  # the time of its next event
        self.heap: list[tuple[float, int]] = []
        self.now = 0.0

    def run(self) -> Times:
        ready = [task for task, waits in enumerate(self.waits) if waits == 0]
        while ready or self.heap:
            changed = False
            if not ready:
                self.now = self.heap[0][0]
            while ready or (self.heap and self.heap[0][0] <= self.now):
                free, done, gone = self.finish()
                started = self.take(free, sorted(ready + done))
                changed = changed or gone or started
                ready = []
            if changed:
                self.share()
            while self.heap and self.heap[0][0] != self.due[self.heap[0][1]]:
                heapq.heappop(self.heap)
        return Times(np.array(self.start), np.array(self.sent), np.array(self.end))

    def finish(self) -> tuple[list[int], list[int], bool]:
        """All finishes of this instant: lanes that are free, tasks that are ready, whether a message is through."""
        free, ready, gone = [], [], False
        while self.heap and self.heap[0][0] <= self.now:
            time, task = heapq.heappop(self.heap)
            if time != self.due[task]:
                continue
            if self.sent[task] < 0:
                self.sent[task] = self.now
                if self.lane[task] >= 0:
                    self.busy[self.lane[task]] = False
                    free.append(self.lane[task])
                if self.route[task] >= 0:
                    gone = self.rate.pop(task, None) is not None or gone
                    wait = self.latency[self.route[task]] + self.seconds[task]
                    if wait > 0:
                        self.put(task, self.now + wait)
                        continue
            self.due[task] = -1.0
            self.end[task] = self.now
            for after in self.after[task]:
                self.waits[after] -= 1
                if self.waits[after] == 0:
                    ready.append(after)
        return free, ready, gone

    def take(self, free: list[int], ready: Iterable[int]) -> bool:
        """Queue what is ready; free lanes take their next task. Returns whether a message was started."""
        started = False
        for task in ready:
            if self.lane[task] < 0:
                started = self.begin(task) or started
            else:
                self.queues[self.lane[task]].append(task)
                free.append(self.lane[task])
        for lane in free:
            if self.queues[lane] and not self.busy[lane]:
                self.busy[lane] = True
                started = self.begin(self.queues[lane].popleft()) or started
        return started

    def begin(self, task: int) -> bool:
        self.start[task] = self.now
        if self.route[task] < 0:
            self.put(task, self.now + self.seconds[task])
        elif self.bytes[task] > 0 and self.paths[self.route[task]]:
            self.rate[task], self.left[task], self.since[task] = 0.0, self.bytes[task], self.now
            return True
        else:
            self.put(task, self.now)
        return False

    def put(self, task: int, time: float) -> None:
        self.due[task] = time
        heapq.heappush(self.heap, (time, task))

    def share(self) -> None:
        """Max-min fair rates of all messages; those whose rate changed get a new time."""
        for task, rate in self.fair().items():
            old = self.rate[task]
            if rate != old:
                self.left[task] = max(0.0, self.left[task] - old * (self.now - self.since[task]))
                self.since[task], self.rate[task] = self.now, rate
                self.put(task, self.now + self.left[task] / rate)

    def fair(self) -> dict[int, float]:
        """Progressive filling: the resource with the least share for each of its messages is full first."""
        users: dict[int, set[int]] = {}
        for task in self.rate:
            for resource in self.paths[self.route[task]]:
                users.setdefault(resource, set()).add(task)
        left = {resource: self.capacity[resource] for resource in users}
        rates: dict[int, float] = {}
        while users:
            full = min(users, key=lambda r: left[r] / len(users[r]))
            level = left[full] / len(users[full])
            for task in list(users[full]):
                rates[task] = level
                for resource in self.paths[self.route[task]]:
                    left[resource] = max(0.0, left[resource] - level)
                    users[resource].discard(task)
                    if not users[resource]:
                        del users[resource]
        return rates
