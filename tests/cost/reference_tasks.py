"""Task graphs of whole plans in plain Python: tasks by object, lanes and resources by name, collectives.

The first half of the judge of what a plan costs (`tests/cost/reference_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.cost.event_engine import Network, Tasks
from isthmus.model.profile import Profile
from isthmus.plan.types import Plan

__all__ = ["Net", "Task", "Writer", "arrays", "ring", "rounds", "server", "tree"]

Road = tuple[tuple[str, ...], float]  # resources and latency
Lane = tuple[str, str]  # what it does, and whose it is


@dataclass(eq=False)
class Task:
    """Fixed work, or a message where there is a `road` (its resources and latency), and `seconds` after its arrival."""

    kind: str
    job: str
    lane: Lane | None = None
    seconds: float = 0.0
    size: float = 0.0
    road: Road | None = None
    after: list[Task] = field(default_factory=list)


class Net:
    """The cluster's resources by name, and the way between two devices as hops."""

    def __init__(self, cluster: Cluster, plan: Plan, profile: Profile) -> None:
        self.cluster = cluster  # as messages see it
        self.costs = {costs.device: costs for costs in profile.devices}
        self.via = {v.between: v.hosts for v in plan.via} | {v.between[::-1]: v.hosts[::-1] for v in plan.via}
        self.capacity: dict[str, float] = {}

    def latency(self, a: str, b: str) -> float:
        return 0.0 if a == b else sum(road[1] for _, road in self.hops(a, b))

    def adding(self, device: str, size: float) -> float:
        """Seconds in which a device adds so many bytes."""
        costs = self.costs.get(self.cluster.devices[device].kind)
        return 0.0 if costs is None or costs.add_bandwidth is None else size / costs.add_bandwidth

    def sending(self, a: str, b: str, size: float) -> float:
        """Seconds in which so many bytes leave, if all goes straight."""
        hops = self.hops(a, b) if a != b else []
        return size / min(self.capacity[name] for name in hops[0][1][0]) if len(hops) == 1 else 0.0

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
        names = {f"{x} nic out": hosts[x].nic, f"{x} to {y}": link.bandwidth, f"{y} nic in": hosts[y].nic_in}
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

    def message(
        self, kind: str, lane: str | None, a: str, b: str, size: float, *after: Task, seconds: float = 0.0
    ) -> Task:
        """Every hop once the hop before has arrived; nothing where a device sends to itself. No lane: it never queues.

        `seconds`: from its arrival to when what waits for it may begin.
        """
        if a == b:
            return after[0]
        waits = list(after)
        for relay, road in self.net.hops(a, b):
            sender = ("relay", relay) if relay is not None else None if lane is None else (lane, a)
            task = self._add(Task(kind, self.job, sender, size=size, road=road, after=waits))
            waits = [task]
        task.seconds = seconds
        return task

    def note(self, a: str, b: str, after: Task) -> Task:
        """A few bytes on a connection of their own."""
        return self.message("totals", None, a, b, 0.0, after)

    def _add(self, task: Task) -> Task:
        self.tasks.append(task)
        return task


# Collectives: for each participant the task after which it is ready -> the task after which it has the result.


def segments_of(size: float, planned: int) -> int:
    """As many as planned, of 64 KiB or more; up to four of 256 KiB or more; so many that none is above 1 MiB."""
    least = -(-size // 1048576)
    return max(1, int(max(min(planned, size // 65536), min(4, size // 262144), least)))


def segment_by_segment(coming: float, adding: float, segments: int, going: float | None) -> float:
    """Segments come evenly, the last at 0, and are added one by one: when all are; or when a message of `going` seconds
    that passes them on may begin, so that it has each of them in time."""
    added, free = [], float("-inf")
    for j in range(segments):
        come = -coming * (1 - (j + 1) / segments)
        free = max(come, free) + adding / segments
        added.append(free)
    if going is None:
        return added[-1]
    return max(at - going * j / segments for j, at in enumerate(added))


def rounds(
    w: Writer, kind: str, devices: list[str], ready: list[Task], chunk: float, planned: int, count: int
) -> list[Task]:
    """Round by round each that is ready sends on what it got; what is synced is added in the first n - 1 rounds.

    In the first round it waits for the note that the next one is ready.
    """
    n, held, net = len(devices), list(ready), w.net
    for k in range(count):
        got = list(held)
        for i in range(n):
            me, to, beyond = devices[i], devices[(i + 1) % n], devices[(i + 2) % n]
            waits = [ready[i]] if 0 < k < n else [ready[(i + 1) % n]] if k == 0 else []
            adding = net.adding(to, chunk) if kind == "sync" and k < n - 1 else 0.0
            going = None if k == count - 1 else net.sending(to, beyond, chunk)
            after = segment_by_segment(net.sending(me, to, chunk), adding, segments_of(chunk, planned), going)
            if k == 0:  # it leaves later by a note, and so does all that follows
                after = net.latency(to, me) + max(after, -net.latency(me, to))
            got[(i + 1) % n] = w.message(kind, "sync", me, to, chunk, held[i], *waits, seconds=after)
        held = got
    return held


def ring(w: Writer, devices: list[str], ready: list[Task], size: float, planned: int) -> list[Task]:
    """An all-reduce: 32 KiB or less, or all of two that are 2 ms apart there and back, goes round whole."""
    n = len(devices)
    apart = w.net.latency(devices[0], devices[-1]) + w.net.latency(devices[-1], devices[0])
    if size <= 32768 or (n == 2 and apart > 0.002):
        return rounds(w, "sync", devices, ready, size, 2 * planned, n - 1)
    return rounds(w, "sync", devices, ready, size / n, planned, 2 * (n - 1))


def tree(w: Writer, devices: list[str], ready: list[Task], whole: float, planned: int) -> list[Task]:
    """Chains to the first of each region, a ring of those, and back along the chains, segment by segment (8 at most).

    On the way there everybody waits for the note of the next; on the way back all are ready.
    """
    parts, net = min(8, segments_of(whole, planned)), w.net
    size = whole / parts
    regions: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        regions.setdefault(net.cluster.host_of(device).region, []).append(i)
    held = list(ready)
    for chain in regions.values():
        come: list[list[Task]] = [[] for _ in range(parts)]
        for far, near in zip(chain[:0:-1], chain[-2::-1], strict=True):
            after = net.adding(devices[near], size) + net.latency(devices[near], devices[far])
            for p in range(parts):
                waits = [ready[far], ready[near], *come[p]]
                come[p] = [w.message("sync", "sync", devices[far], devices[near], size, *waits, seconds=after)]
        if len(chain) > 1:
            held[chain[0]] = w.gate(ready[chain[0]], *(task for tasks in come for task in tasks))
    leaders = [chain[0] for chain in regions.values()]
    summed = [held[i] for i in leaders]
    if len(leaders) > 1:
        summed = ring(w, [devices[i] for i in leaders], summed, whole, planned)
    done = dict(zip(leaders, summed, strict=True))
    for chain in regions.values():
        there = [done[chain[0]]] * parts
        for near, far in pairwise(chain):
            there = [w.message("sync", "sync", devices[near], devices[far], size, task) for task in there]
            done[far] = there[0] if parts == 1 else w.gate(*there)
    return [done[i] for i in range(len(devices))]


def server(w: Writer, devices: list[str], ready: list[Task], whole: float, planned: int, root: str) -> list[Task]:
    """Segment by segment (8 at most); a root that takes part must be ready too, and its note must have come."""
    parts, net, own = min(8, segments_of(whole, planned)), w.net, dict(zip(devices, ready, strict=True)).get(root)
    got: list[list[Task]] = [[] for _ in devices]
    for _ in range(parts):
        size, summed = whole / parts, w.gate()
        for device, task in zip(devices, ready, strict=True):
            waits = [task] if own is None else [task, own]
            after = net.adding(root, size) + (0.0 if own is None else net.latency(root, device))
            summed.after.append(w.message("sync", "sync", device, root, size, *waits, seconds=after))
        for tasks, device in zip(got, devices, strict=True):
            tasks.append(w.message("sync", None, root, device, size, summed))
    return [tasks[0] if parts == 1 else w.gate(*tasks) for tasks in got]


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
