"""Task graphs for the engine's tests: a builder to write them by hand, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost.event_engine import Network, Tasks

__all__ = ["Case", "Graph", "random_case", "tied_case", "twice"]

WIDTH = 4  # resources on a route, at most


class Case(NamedTuple):
    """The arguments of one call of the engine."""

    tasks: Tasks
    lanes: int
    network: Network


class Graph:
    """Tasks, routes and resources in the order in which they are added; each call returns the new one's number."""

    def __init__(self) -> None:
        self._tasks: list[tuple[int, float, float, int]] = []
        self._edges: list[tuple[int, int]] = []
        self._routes: list[tuple[list[int], float]] = []
        self._capacity: list[float] = []

    def resource(self, capacity: float) -> int:
        self._capacity.append(capacity)
        return len(self._capacity) - 1

    def route(self, *resources: int, latency: float = 0.0) -> int:
        self._routes.append(([*resources, *[-1] * (WIDTH - len(resources))], latency))
        return len(self._routes) - 1

    def fixed(self, seconds: float, *, lane: int = -1, after: Sequence[int] = ()) -> int:
        return self._add(lane, seconds, 0.0, -1, after)

    def message(self, size: float, route: int, *, lane: int = -1, after: Sequence[int] = ()) -> int:
        return self._add(lane, 0.0, size, route, after)

    def edge(self, before: int, after: int) -> None:
        self._edges.append((before, after))

    def _add(self, lane: int, seconds: float, size: float, route: int, after: Sequence[int]) -> int:
        self._tasks.append((lane, seconds, size, route))
        task = len(self._tasks) - 1
        self._edges.extend((before, task) for before in after)
        return task

    def case(self) -> Case:
        rows = np.array(self._tasks, dtype=np.float64).reshape(-1, 4).T
        edges = np.array(self._edges, dtype=np.int32).reshape(-1, 2)
        tasks = Tasks(
            lane=rows[0].astype(np.int32),
            seconds=rows[1].copy(),
            bytes=rows[2].copy(),
            route=rows[3].astype(np.int32),
            before=edges[:, 0].copy(),
            after=edges[:, 1].copy(),
        )
        network = Network(
            resources=np.array([row for row, _ in self._routes], dtype=np.int32).reshape(-1, WIDTH),
            latency=np.array([latency for _, latency in self._routes], dtype=np.float64),
            capacity=np.array(self._capacity, dtype=np.float64),
        )
        return Case(tasks, max([lane for lane, *_ in self._tasks], default=-1) + 1, network)


def _shuffled(random: np.random.Generator, graph: Graph, count: int, most: int) -> None:
    """Adds edges that agree with a random order of the tasks, so that numbers do not follow time."""
    order = random.permutation(count)
    for place in range(1, count):
        for earlier in random.integers(0, place, size=random.integers(0, most + 1)):
            graph.edge(int(order[earlier]), int(order[place]))


def _spread(random: np.random.Generator, middle: float, decades: float) -> float:
    return float(middle * 10 ** random.uniform(-decades / 2, decades / 2))


def _pick(random: np.random.Generator, resources: int) -> list[int]:
    """One to four different resources."""
    count = random.integers(1, min(WIDTH, resources) + 1)
    return [int(r) for r in random.choice(resources, size=count, replace=False)]


def random_case(*, seed: int, tasks: int, lanes: int, resources: int, decades: float) -> Case:
    """Fixed tasks and messages that contend, all amounts over a range of `decades` powers of ten.

    Durations are continuous, and what lasts only a latency (no bytes, or no resource) has a route of its own: no two
    sums of different durations are equal, so rounding cannot change the order of events.
    """
    random = np.random.default_rng(seed)
    graph = Graph()
    for _ in range(resources):
        graph.resource(_spread(random, 10.0, decades))
    shared = [graph.route(*_pick(random, resources), latency=_spread(random, 0.3, decades)) for _ in range(resources)]
    for _ in range(tasks):
        lane = int(random.integers(-1, lanes))
        size = _spread(random, 10.0, decades)
        match random.choice(["fixed", "message", "empty", "unlimited"], p=[0.3, 0.55, 0.08, 0.07]):
            case "fixed":
                graph.fixed(_spread(random, 1.0, decades), lane=lane)
            case "message":
                graph.message(size, int(random.choice(shared)), lane=lane)
            case "empty":
                own = graph.route(*_pick(random, resources), latency=_spread(random, 0.3, decades))
                graph.message(0.0, own, lane=lane)
            case "unlimited":
                graph.message(size, graph.route(latency=_spread(random, 0.3, decades)), lane=lane)
    _shuffled(random, graph, tasks, most=2)
    return graph.case()


def tied_case(*, seed: int, tasks: int, lanes: int, shortest: int) -> Case:
    """Whole small durations from `shortest` seconds on, a resource for each message alone: many ties, no rounding."""
    random = np.random.default_rng(seed)
    graph = Graph()
    for _ in range(tasks):
        lane = int(random.integers(-1, lanes))
        seconds = int(random.integers(shortest, 4))
        if random.random() < 0.5:
            graph.fixed(seconds, lane=lane)
        else:
            capacity = float(2 ** random.integers(0, 4))
            own = graph.route(graph.resource(capacity), latency=float(random.integers(0, 3)))
            graph.message(seconds * capacity, own, lane=lane)
    _shuffled(random, graph, tasks, most=2)
    return graph.case()


def twice(case: Case) -> Case:
    """The case beside a copy of itself, on lanes and resources of its own; task 2t and its copy 2t + 1 are the same."""
    tasks, lanes, network = case
    copies = np.tile(np.array([0, 1], dtype=np.int32), len(tasks.lane))
    edges = np.tile(np.array([0, 1], dtype=np.int32), len(tasks.before))

    def beside(values: np.ndarray, count: int) -> np.ndarray:
        """Each value twice, the second moved up by `count`; -1 stays -1."""
        both = np.repeat(values, 2)
        return np.where(both < 0, both, both + count * copies).astype(np.int32)

    rows, slots = network.resources, len(network.capacity)
    return Case(
        Tasks(
            lane=beside(tasks.lane, lanes),
            seconds=np.repeat(tasks.seconds, 2),
            bytes=np.repeat(tasks.bytes, 2),
            route=beside(tasks.route, len(rows)),
            before=2 * np.repeat(tasks.before, 2) + edges,
            after=2 * np.repeat(tasks.after, 2) + edges,
        ),
        2 * lanes,
        Network(
            resources=np.concatenate([rows, np.where(rows < 0, rows, rows + slots).astype(np.int32)]),
            latency=np.tile(network.latency, 2),
            capacity=np.tile(network.capacity, 2),
        ),
    )
