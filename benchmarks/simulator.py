"""How fast plans are priced, and how fast the event engine under it plays tasks.

The case: 16 unequal devices in 3 regions with contended trunks (cases/simulator.yaml), gpt2-xl as captured (98 blocks,
its embedding tied to its head), 8 micro-batches, 40 buckets. Every plan is random, checked once by `plan.validate`, and
priced by a simulator that has not seen it: a Plan object in, step seconds and peak memory out, on one thread. Rows are
measured in turn, round after round, and the medians of the rounds are claimed.

Beside the engine a plain Python one (_plain_engine.py) plays the same tasks; their times must agree. Only where
thousands of random messages contend are they apart, by 1e-7 of the end: each that contends passes on more rounding than
it got. That row is shown, not claimed.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from _plain_engine import run as plain_run
from _results import ROOT, at_least, at_most, finish, options

from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cost.event_engine import Network, Tasks, Times
from isthmus.cost.event_engine import run as engine_run
from isthmus.cost.simulate import Simulator
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.model.source import load_graph
from isthmus.plan.types import How, Pipeline, Plan, Replica, Schedule, Stage, Sync
from isthmus.plan.validate import check

MODEL, BATCH, MICRO_BATCHES, BUCKETS = "zoo:gpt2-xl", 256, 8, 40
MICRO_BATCH = BATCH // MICRO_BATCHES
PIPELINE = "4 stages x 4 replicas, ring"


class Form(NamedTuple):
    """A family of random plans."""

    name: str
    stages: int
    replicas: int
    how: How = "ring"
    schedule: Schedule = "1f1b"


FORMS = (
    Form(PIPELINE, 4, 4),
    Form("4 stages x 4 replicas, tree", 4, 4, how="tree"),
    Form("8 stages x 4 replicas, interleaved", 8, 4, schedule="interleaved"),
    Form("1 stage x 16 replicas, ring", 1, 16),
)


class Case(NamedTuple):
    """One call of the engine."""

    tasks: Tasks
    lanes: int
    network: Network


def random_plan(form: Form, cluster: Cluster, graph: BlockGraph, rng: random.Random) -> Plan:
    """Devices in random order, random cuts, random shares. With more stages than groups of devices they come again."""
    names = [block.name for block in graph.blocks]
    devices = list(cluster.devices)
    rng.shuffle(devices)
    ends = [0, *sorted(rng.sample(range(2, len(names) - 2, 2), form.stages - 1)), len(names)]
    groups = [devices[i : i + form.replicas] for i in range(0, len(devices), form.replicas)]
    shares = {group[0]: random_shares(form.replicas, rng) for group in groups}
    stages = []
    for number in range(form.stages):
        group = groups[number % len(groups)]
        replicas = [Replica(devices=(name,), share=n) for name, n in zip(group, shares[group[0]], strict=True)]
        stages.append(Stage(first=names[ends[number]], last=names[ends[number + 1] - 1], replicas=tuple(replicas)))
    pipeline = Pipeline(
        job=Job(name="gpt2-xl", model=MODEL, batch=BATCH),
        model_digest=graph.digest,
        precision="fp16",
        micro_batches=MICRO_BATCHES,
        stages=tuple(stages),
        syncs=tuple(random_syncs(form, graph, stages, ends, rng)),
        schedule=form.schedule,
    )
    return Plan(cluster=cluster.name, parts=(pipeline,))


def random_shares(replicas: int, rng: random.Random) -> list[int]:
    cuts = [0, *sorted(rng.sample(range(1, MICRO_BATCH), replicas - 1)), MICRO_BATCH]
    return [b - a for a, b in itertools.pairwise(cuts)]


def random_syncs(
    form: Form, graph: BlockGraph, stages: Sequence[Stage], ends: Sequence[int], rng: random.Random
) -> Iterator[Sync]:
    """40 buckets: the tied embedding with all its holders, the other blocks in runs, stage by stage."""
    tied = next(parameter.name for parameter in graph.parameters if parameter.ties)
    holders = dict.fromkeys(r.devices[0] for stage in (stages[0], stages[-1]) for r in stage.replicas)
    yield Sync(bucket=tied, how=form.how, parameters=(tied,), participants=tuple(holders))
    left = BUCKETS - 1
    for number, stage in enumerate(stages):
        blocks = [
            f"[{block.name}]"
            for block in graph.blocks[ends[number] : ends[number + 1]]
            if set(block.parameters) != {tied}
        ]
        buckets = min(len(blocks), left // (len(stages) - number))
        left -= buckets
        ring = [replica.devices[0] for replica in stage.replicas]
        rng.shuffle(ring)
        for k in range(buckets):
            words = blocks[len(blocks) * k // buckets : len(blocks) * (k + 1) // buckets]
            yield Sync(bucket=f"{number}.{k}", how=form.how, parameters=tuple(words), participants=tuple(ring))


def random_graphs(count: int, seed: int, messages: float) -> list[Case]:
    """DAGs of 5,000 tasks on 96 lanes, each task after two earlier ones; a part of them messages that share links."""
    network = Network(
        np.array([[i, 16 + i // 4, -1, -1] for i in range(16)], np.int32),
        np.full(16, 0.01),
        np.repeat([1e6, 2e6], [16, 4]),
    )
    cases, size = [], 5000
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        lane = rng.integers(0, 96, size).astype(np.int32)
        after = np.tile(np.arange(1, size), 2).astype(np.int32)
        before = np.maximum(0, after - rng.integers(1, 100, len(after))).astype(np.int32)
        route = np.where(rng.random(size) < messages, lane % 16, -1).astype(np.int32)
        tasks = Tasks(lane, rng.random(size), rng.random(size) * 1e6, route, before, after)
        cases.append(Case(tasks, 96, network))
    return cases


def tasks_of(simulator: Simulator, plans: Sequence[Plan]) -> list[Case]:
    played = [simulator.play(plan) for plan in plans]
    return [Case(one.tasks.tasks(), one.tasks.lanes, one.fabric.network) for one in played]


def clocked(work: Callable[[Any], object], items: Sequence[Any]) -> tuple[float, float]:
    """CPU and wall seconds of the work on all items; results are dropped."""
    wall, cpu = time.perf_counter(), time.process_time()
    for item in items:
        work(item)
    return time.process_time() - cpu, time.perf_counter() - wall


def play(case: Case) -> Times:
    return engine_run(*case)


def play_plainly(case: Case) -> Times:
    return plain_run(*case)


def largest_difference(a: Times, b: Times) -> float:
    """Between the times of two engines, relative to the end."""
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True)) / float(a.end.max())


class Measured:
    """What the rounds gave for one row."""

    def __init__(self, name: str, plans: Sequence[Plan], cases: Sequence[Case], peers: int) -> None:
        self.name, self.plans, self.cases, self.peers = name, plans, cases, cases[:peers]
        self.price: list[tuple[float, float]] = []
        self.engine: list[float] = []
        self.plain: list[float] = []
        self.apart = 0.0

    def round(self, fresh: Callable[[], Simulator] | None) -> None:
        """Measure all of it once more."""
        if fresh is not None:
            self.price.append(clocked(fresh().price, self.plans))
        self.engine.append(clocked(play, self.cases)[0] / tasks_in(self.cases))
        self.plain.append(clocked(play_plainly, self.peers)[0] / tasks_in(self.peers))

    def compare(self) -> None:
        """How far the two engines are apart, which also warms them up."""
        self.apart = max(largest_difference(play(case), play_plainly(case)) for case in self.peers)

    def row(self) -> dict[str, Any]:
        """Medians of the rounds."""
        engine, plain = statistics.median(self.engine), statistics.median(self.plain)
        row: dict[str, Any] = {"tasks of": self.name, "distinct": len(self.plans) or len(self.cases)}
        row["tasks_each"] = tasks_in(self.cases) // len(self.cases)
        if self.price:
            row["plans_per_cpu_second"] = len(self.plans) / statistics.median(cpu for cpu, _ in self.price)
            row["plans_per_second"] = len(self.plans) / statistics.median(wall for _, wall in self.price)
        row |= {"engine_tasks_per_cpu_second": 1 / engine, "engine_ns_per_task": engine * 1e9}
        return row | {"plain_tasks_per_cpu_second": 1 / plain, "times_faster": plain / engine, "apart": self.apart}


def tasks_in(cases: Sequence[Case]) -> int:
    return sum(len(case.tasks.lane) for case in cases)


def pieces(simulator: Simulator, plans: Sequence[Plan]) -> dict[str, float]:
    """Microseconds a plan, piece by piece: from the plan to arrays and orders, to tasks, and playing them."""
    net = simulator.fabric(plans[0])
    prepared = [simulator.prepare(plan.parts[0], net) for plan in plans]
    cases = tasks_of(simulator, plans)
    parts: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
        "plan to arrays and orders": (lambda plan: simulator.prepare(plan.parts[0], net), plans),
        "arrays to tasks": (lambda one: simulator._write([one], net, simulator._out), prepared),
        "playing tasks": (play, cases),
        "memory": (lambda one: simulator._memory([one], net), prepared),
        "whole": (simulator.price, plans),
    }
    return {name: clocked(*part)[0] / len(plans) * 1e6 for name, part in parts.items()}


def floor(case: Case) -> float:
    """Nanoseconds a task to copy once, within the cache, the bytes that the engine keeps and is given for it."""
    edges = len(case.tasks.before) / len(case.tasks.lane)
    bytes_each = 64 + 4 * 8 + 16 + 3 * 4 + 3 * 8 + 2 * 4 + 2 * 8 + edges * (2 * 4 + 4)  # records, slots, lists; rows
    source = np.zeros(1 << 18, np.uint8)
    target = np.zeros_like(source)
    copies = clocked(lambda _: np.copyto(target, source), range(2000))[0]
    return bytes_each * copies / 2000 / len(source) * 1e9


def main() -> int:
    called = options("simulator", __doc__)
    distinct, graphs, rounds, peers = (150, 20, 3, 1) if called.quick else (400, 50, 7, 3)
    cluster, graph = load_cluster(ROOT / "benchmarks" / "cases" / "simulator.yaml"), load_graph(MODEL)
    models = {"gpt2-xl": graph}
    simulator = Simulator(cluster, models)
    measured = []
    for form in FORMS:
        rng = random.Random(f"{called.seed} {form.name}")
        count = distinct if form.name == PIPELINE else distinct // 4
        plans = [random_plan(form, cluster, graph, rng) for _ in range(count)]
        assert len({msgspec.json.encode(plan) for plan in plans}) == count
        for plan in plans:
            check(plan, cluster, models)
        measured.append(Measured(form.name, plans, tasks_of(simulator, plans[: count // 2]), peers))
    for name, part in (("random graphs", 0.0), ("random graphs, half messages", 0.5)):
        measured.append(Measured(name, (), random_graphs(graphs, called.seed, part), peers))
    other = random_plan(FORMS[0], cluster, graph, random.Random("not one of the others"))

    def fresh() -> Simulator:
        """A simulator that has its tables but has seen none of the plans."""
        new = Simulator(cluster, models)
        new.price(other)
        return new

    for one in measured:
        one.compare()
    for _ in range(rounds):
        for one in measured:
            one.round(fresh if one.plans else None)
    rows = [one.row() for one in measured]
    by_name = {row["tasks of"]: row for row in rows}
    first, plain = by_name[PIPELINE], by_name["random graphs"]
    apart = max(row["apart"] for row in rows if row is not by_name["random graphs, half messages"])
    claims = [
        at_least("Plans priced per CPU second", first["plans_per_cpu_second"], 1000),
        at_least("Plans priced per second", first["plans_per_second"], 1000),
        at_least("Simulated tasks per CPU second, measured on whole plans", first["engine_tasks_per_cpu_second"], 5e6),
        at_least("Simulated tasks per CPU second, tasks of random graphs", plain["engine_tasks_per_cpu_second"], 5e6),
        at_most("Largest relative difference between the event engine and a plain Python one", apart, 1e-9),
    ]
    others = {
        "microseconds_a_plan": pieces(simulator, measured[0].plans),
        "floor_ns_per_task": floor(measured[0].cases[0]),
    }
    return finish(called, rows, claims, others=others)


if __name__ == "__main__":
    sys.exit(main())
