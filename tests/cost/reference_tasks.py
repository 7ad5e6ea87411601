"""Task graphs of whole plans in plain Python: tasks by object, lanes and resources by name, collectives.

The first half of the judge of what a plan costs (`tests/cost/reference_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.cost.engine import Network, Tasks
from isthmus.plan.types import Plan

__all__ = ["Net", "Task", "Writer", "arrays", "ring", "server", "tree"]

Road = tuple[tuple[str, ...], float]  # resources and latency
Lane = tuple[str, str]  # what it does, and whose it is


@dataclass(eq=False)
class Task:
    """Fixed work, or a message where there is a `road` (its resources and latency)."""

    kind: str
    job: str
    lane: Lane | None = None
    seconds: float = 0.0
    size: float = 0.0
    road: Road | None = None
    after: list[Task] = field(default_factory=list)


class Net:
    """The cluster's resources by name, and the way between two devices as hops."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.via = {v.between: v.hosts for v in plan.via} | {v.between[::-1]: v.hosts[::-1] for v in plan.via}
        self.capacity: dict[str, float] = {}

    def hops(self, a: str, b: str) -> list[tuple[str | None, Road]]:
        """(relay that sends, None for the device itself; road) from device a to device b."""
        one, other = self.cluster.host_of(a), self.cluster.host_of(b)
        if one.name == other.name:
            names = {f"{a} out": one.bandwidth, f"{b} in": one.bandwidth}
            return [(None, self.road(names, one.latency))]
        path = (one.name, *self.via.get((one.name, other.name), ()), other.name)
        pairs = list(pairwise(path))
        return [(None if i == 0 else x, self.between(x, y)) for i, (x, y) in enumerate(pairs)]

    def between(self, x: str, y: str) -> Road:
        hosts, link = self.cluster.hosts, self.cluster.link(x, y)
        assert link is not None
        names = {f"{x} nic out": hosts[x].nic, f"{x} to {y}": link.bandwidth, f"{y} nic in": hosts[y].nic}
        trunk = self.cluster.trunk(hosts[x].region, hosts[y].region)
        if trunk is not None:
            names[f"{hosts[x].region} to {hosts[y].region} trunk"] = trunk
        return self.road(names, link.latency)

    def bus(self, device: str, way: str) -> Road:
        return self.road({f"{device} bus {way}": self.cluster.host_of(device).bus}, 0.0)

    def road(self, names: dict[str, float], latency: float) -> Road:
        self.capacity.update(names)
        return tuple(names), latency


class Writer:
    """Tasks of one job, in order: among tasks that become ready together the one written first goes first."""

    def __init__(self, net: Net, job: str, tasks: list[Task]) -> None:
        self.net, self.job, self.tasks = net, job, tasks

    def fixed(self, kind: str, lane: Lane | None, seconds: float, *after: Task | None) -> Task:
        return self._add(Task(kind, self.job, lane, seconds=seconds, after=[t for t in after if t]))

    def gate(self, *after: Task | None) -> Task:
        return self.fixed("gate", None, 0.0, *after)

    def bus(self, kind: str, device: str, size: float, *after: Task | None) -> Task:
        lane, way = ("load", "in") if kind == "load" else ("store", "out")
        road = self.net.bus(device, way)
        return self._add(Task(kind, self.job, (lane, device), size=size, road=road, after=[t for t in after if t]))

    def message(self, kind: str, lane: str, a: str, b: str, size: float, *after: Task) -> Task:
        """Every hop once the hop before has arrived; nothing where a device sends to itself."""
        if a == b:
            return after[0]
        waits = list(after)
        for relay, road in self.net.hops(a, b):
            sender = (lane, a) if relay is None else ("relay", relay)
            task = self._add(Task(kind, self.job, sender, size=size, road=road, after=waits))
            waits = [task]
        return task

    def _add(self, task: Task) -> Task:
        self.tasks.append(task)
        return task


# Collectives: for each participant the task after which it is ready -> the task after which it has the result.


def ring(w: Writer, kind: str, devices: list[str], ready: list[Task], size: float, rounds: int) -> list[Task]:
    """Round by round each sends on what it got; a reducing participant adds its own part until round n - 1."""
    n, held = len(devices), list(ready)
    for k in range(rounds):
        got = list(held)
        for i in range(n):
            own = [ready[i]] if kind == "sync" and 0 < k < n else []
            got[(i + 1) % n] = w.message(kind, "sync", devices[i], devices[(i + 1) % n], size / n, held[i], *own)
        held = got
    return held


def tree(w: Writer, devices: list[str], ready: list[Task], size: float) -> list[Task]:
    """Chains to the first of each region, a ring of those, and back along the chains."""
    regions: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        regions.setdefault(w.net.cluster.host_of(device).region, []).append(i)
    held = list(ready)
    for chain in regions.values():
        for far, near in zip(chain[:0:-1], chain[-2::-1], strict=True):
            got = w.message("sync", "sync", devices[far], devices[near], size, held[far])
            held[near] = w.gate(held[near], got)
    leaders = [chain[0] for chain in regions.values()]
    rounds = 2 * (len(leaders) - 1)
    summed = ring(w, "sync", [devices[i] for i in leaders], [held[i] for i in leaders], size, rounds)
    done = dict(zip(leaders, summed, strict=True))
    for chain in regions.values():
        for near, far in pairwise(chain):
            done[far] = w.message("sync", "sync", devices[near], devices[far], size, done[near])
    return [done[i] for i in range(len(devices))]


def server(w: Writer, devices: list[str], ready: list[Task], size: float, root: str) -> list[Task]:
    summed = w.gate()
    for device, task in zip(devices, ready, strict=True):
        summed.after.append(w.message("sync", "sync", device, root, size, task))
    return [w.message("sync", "sync", root, device, size, summed) for device in devices]


def arrays(tasks: list[Task], net: Net) -> tuple[Tasks, int, Network]:
    """The arguments of `cost.engine.run`: every lane, road and resource by the number of its first use."""
    number = {id(task): i for i, task in enumerate(tasks)}
    lanes: dict[Lane | None, int] = {None: -1}
    roads: dict[Road | None, int] = {None: -1}
    for task in tasks:
        lanes.setdefault(task.lane, len(lanes) - 1)
        roads.setdefault(task.road, len(roads) - 1)
    resource = {name: i for i, name in enumerate(net.capacity)}
    edges = [(number[id(b)], i) for i, task in enumerate(tasks) for b in task.after]
    rows = [[resource[name] for name in road[0]] for road in roads if road] or [[]]
    network = Network(
        resources=np.array([[*row, *[-1] * (4 - len(row))] for row in rows], np.int32),
        latency=np.array([road[1] for road in roads if road] or [0.0]),
        capacity=np.array(list(net.capacity.values())),
    )
    pairs = np.array(edges, np.int32).reshape(-1, 2)
    return (
        Tasks(
            lane=np.array([lanes[task.lane] for task in tasks], np.int32),
            seconds=np.array([task.seconds for task in tasks], np.float64),
            bytes=np.array([task.size for task in tasks], np.float64),
            route=np.array([roads[task.road] for task in tasks], np.int32),
            before=pairs[:, 0].copy(),
            after=pairs[:, 1].copy(),
        ),
        len(lanes) - 1,
        network,
    )
