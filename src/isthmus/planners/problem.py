"""A problem: what is to be trained where. Planners take one and give a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from isthmus.cluster.spec import PRECISIONS, Cluster, Precision
from isthmus.cost.compute import rate
from isthmus.cost.simulate import Price, Simulator
from isthmus.cost.tables import ModelTable
from isthmus.errors import NoPlanError, UsageError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.types import Plan

__all__ = ["Candidate", "Problem", "build_problem", "lower_bound", "pick_precision"]


class Candidate(NamedTuple):
    """A plan with its price."""

    plan: Plan
    price: Price


class Problem:
    """One job on one cluster, with the simulator that judges plans for it; counts its calls."""

    def __init__(self, cluster: Cluster, job: Job, graph: BlockGraph, precision: Precision, seed: int) -> None:
        self.cluster, self.job, self.graph, self.precision, self.seed = cluster, job, graph, precision, seed
        self.simulator = Simulator(cluster, {job.name: graph})
        self.calls = 0
        self.usable = tuple(d.name for d in cluster.devices.values() if usable(cluster, d.kind, job, precision))
        if not self.usable:
            raise NoPlanError(
                f"no device computes in {precision}",
                where=f"cluster {cluster.name}",
                found=", ".join(cluster.kinds),
                expected=f"a kind with a {precision} rate not below its fp32 rate",
                next="Choose another precision, or let such devices compute in fp32 with `mixed: true`",
            )

    @property
    def table(self) -> ModelTable:
        """The model's sums and times in the job's precision."""
        return self.simulator.table(self.job.name, self.precision, self.job.mixed)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Kinds that do not take part because they lack the precision or are slow in it."""
        used = {self.cluster.devices[name].kind for name in self.usable}
        return tuple(kind for kind in self.cluster.kinds if kind not in used)

    def price(self, plan: Plan) -> Candidate:
        """The plan with its price."""
        self.calls += 1
        return Candidate(plan, self.simulator.price(plan))


def usable(cluster: Cluster, kind: str, job: Job, precision: Precision) -> bool:
    """Whether a kind has the precision and is not slower in it than in fp32 (or the job is mixed)."""
    rates = cluster.kinds[kind].compute
    if job.mixed:
        return rate(cluster.kinds[kind], precision, True) is not None
    return precision in rates and rates[precision] >= rates.get("fp32", 0.0)


def pick_precision(cluster: Cluster, job: Job) -> Precision:
    """The job's own; else the fastest that every kind of the cluster has, by the sum of all devices' rates."""
    if job.precision is not None:
        return job.precision
    kinds = [cluster.kinds[device.kind].compute for device in cluster.devices.values()]
    offered = [p for p in PRECISIONS if all(p in rates for rates in kinds)]
    return max(offered, key=lambda p: sum(rates[p] for rates in kinds), default="fp32")


def build_problem(cluster: Cluster, jobs: tuple[Job, ...], models: Mapping[str, BlockGraph], seed: int = 0) -> Problem:
    """The problem of training one job on a cluster."""
    if len(jobs) != 1:
        raise UsageError(
            "planning several jobs at once is not offered yet",
            found=f"{len(jobs)} jobs",
            expected="one job",
            next="Plan each job on its own part of the cluster; `isthmus simulate` prices a plan of several jobs",
        )
    job = jobs[0]
    return Problem(cluster, job, models[job.name], pick_precision(cluster, job), seed)


def lower_bound(problem: Problem) -> float:
    """Seconds that no plan for these devices can go below: perfectly divided computing, nothing else.

    With x[d, b] samples of block b on device d, and c[d, b] seconds each, the least T with sum_d x[d, b] = batch and
    sum_b c[d, b] x[d, b] <= T is a linear programme. Its dual gives a bound for any weights z[d] that add up to 1:

        T >= batch * sum_b min_d z[d] c[d, b]

    With z[d] in proportion to 1 / sum_b c[d, b] this is the optimum itself when kinds differ by one factor.
    """
    kinds = {problem.cluster.devices[name].kind for name in problem.usable}
    per_kind: dict[str, list[float]] = {kind: problem.table.least(kind).tolist() for kind in kinds}
    totals = {kind: sum(column) for kind, column in per_kind.items()}
    speed = sum(1.0 / totals[problem.cluster.devices[name].kind] for name in problem.usable)
    blocks = range(len(problem.graph.blocks))
    return problem.job.batch * sum(min(c[b] / totals[k] for k, c in per_kind.items()) for b in blocks) / speed
