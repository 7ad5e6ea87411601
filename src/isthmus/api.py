"""The verbs, in Python: load a cluster, capture a model, plan, simulate. All on plain frozen objects.

A model is given by its name (`zoo:NAME`, `hf:CONFIG.json`, `package.module:function`, `MODEL.json`), as a job or a
workload (a file or an object), or as a captured block graph.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.cluster.load import load_cluster, parse_cluster
from isthmus.cluster.spec import Cluster, Precision
from isthmus.cost.simulate import Prepared, Price, Simulator
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import PlanError, UsageError
from isthmus.model import hf, source
from isthmus.model.graph import Block, BlockGraph, Parameter
from isthmus.model.job import Job, Workload
from isthmus.model.load_job import check_job, load_jobs
from isthmus.plan.file import PlanFile, inputs_digest, load_plan
from isthmus.plan.schedule import render_orders
from isthmus.plan.types import Pipeline, Plan, Replica, Stage
from isthmus.plan.validate import check
from isthmus.planners.portfolio import Choice, choose_plan, parse_fix
from isthmus.planners.problem import build_problem

if TYPE_CHECKING:
    from torch import nn

    from isthmus.model.capture import Example

__all__ = [
    "Simulated",
    "capture",
    "jobs_of",
    "jobs_of_plan",
    "load_cluster",
    "models_of",
    "plan",
    "prepare_simulator",
    "simulate",
]

_BATCH = 32  # samples, where neither a job nor a flag says


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A plan that keeps every rule, on its cluster, with what the simulator says of it."""

    plan: Plan
    cluster: Cluster
    models: Mapping[str, BlockGraph]
    price: Price
    inputs_match: bool | None = None  # whether the plan was made from just this; None: it does not say from what

    @cached_property
    def timeline(self) -> Timeline:
        """One step of it, task by task."""
        return timeline(self._simulator.play(self.plan))

    @cached_property
    def orders(self) -> str:
        """What every device of a pipeline does in which order, a line each: `va1/A100-40GB/0 | 0F0 0F1 0B0 ...`."""
        net = self._simulator.fabric(self.plan)
        parts = [self._simulator.prepare(part, net) for part in self.plan.parts if isinstance(part, Pipeline)]
        texts = [render_orders(p.orders, p.runs, list(net.devices)) for p in parts if isinstance(p, Prepared)]
        return "\n".join(texts)

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self.cluster, self.models)


def capture(
    model: str | nn.Module, example: Any = None, *, name: str | None = None, sequence: int | None = None
) -> BlockGraph:
    """The block graph of a model: of one that is named, or of a module with example inputs (batch first)."""
    if isinstance(model, str):
        graph = source.load_graph(model, sequence=sequence)
        return msgspec.structs.replace(graph, name=name) if name else graph
    if example is None:
        raise UsageError("a module alone does not say what it takes", expected="capture(module, example inputs)")
    from isthmus.model import capture as modules

    return modules.capture(model, _example(example), name=name or type(model).__name__, sequence=sequence)


def plan(
    what: str | Path | Job | Workload | BlockGraph,
    cluster: Cluster | str | Path,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
    planner: str = "auto",
    fix: str | None = None,
    budget: float | None = None,
    calls: int | None = None,
    seed: int = 0,
) -> Choice:
    """The best plan found within `budget` seconds or `calls` simulator calls; NoPlanError where nothing fits."""
    pinned = parse_fix(fix) if fix is not None else None
    machines = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    jobs = jobs_of(what, batch=batch, sequence=sequence, precision=precision)
    models = {jobs[0].name: what} if isinstance(what, BlockGraph) else models_of(jobs)
    prepare_simulator()
    problem = build_problem(machines, jobs, models, seed)
    return choose_plan(problem, planner=planner, fix=pinned, budget=budget, calls=calls)


def simulate(
    plan: Plan | PlanFile | str | Path,
    cluster: Cluster | None = None,
    models: Mapping[str, BlockGraph] | None = None,
    *,
    trusted: Collection[str] = (),
) -> Simulated:
    """Checks a plan and prices it. `models` gives block graphs by job; others are loaded from what the plan names.

    Code that a plan names is imported only if `trusted` names it too.
    """
    file = plan if isinstance(plan, PlanFile) else PlanFile(plan=plan) if isinstance(plan, Plan) else load_plan(plan)
    machines = cluster or file.cluster
    if machines is None:
        raise UsageError("the plan does not hold its cluster", next="Give the cluster: --cluster FILE")
    jobs = [job for job in jobs_of_plan(file.plan) if job.name not in (models or {})]
    for job in jobs:
        _check_trust(job, trusted)
    known = {**(models or {}), **models_of(jobs)}
    check(file.plan, machines, known)
    price = Simulator(machines, known).price(file.plan)
    digests = {job.name: known[job.name].digest for job in jobs_of_plan(file.plan)}
    same = file.inputs == inputs_digest(machines, jobs_of_plan(file.plan), digests) if file.inputs else None
    return Simulated(plan=file.plan, cluster=machines, models=known, price=price, inputs_match=same)


def jobs_of(
    what: str | Path | Job | Workload | BlockGraph,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
) -> tuple[Job, ...]:
    """The jobs that are meant; what is given beside a job or a model wins over what it says itself."""
    given = {"batch": batch, "sequence": sequence, "precision": precision}
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if isinstance(what, (str, Path)):
        what = load_jobs(what) if str(what).endswith((".yaml", ".yml")) else _job_of(str(what))
    if isinstance(what, Workload):
        if changes:
            fields = ", ".join(changes)
            raise UsageError(f"{fields} cannot be given for a whole workload", next="Write it in the workload's jobs")
        return what.jobs
    if isinstance(what, BlockGraph):
        what = Job(name=_job_name(what.name), model=f"{_job_name(what.name)}.json", batch=_BATCH)
    return (check_job(msgspec.structs.replace(what, **changes)),)


def jobs_of_plan(plan: Plan) -> tuple[Job, ...]:
    """Every job of a plan, in order."""
    parts = [(part,) if isinstance(part, Pipeline) else part.jobs for part in plan.parts]
    return tuple(item.job for part in parts for item in part)


def models_of(jobs: Collection[Job]) -> dict[str, BlockGraph]:
    """The block graph of each job, by the job's name."""
    return {job.name: source.load_graph(job.model, sequence=job.sequence) for job in jobs}


def prepare_simulator() -> None:
    """Compiles the simulator (up to a minute, once) or loads what was compiled before, outside any budget."""
    text = "{kind: cluster, version: 1, name: one, hosts: {a: {region: r, devices: {CPU: 1}}}}"
    block = Block(
        name="b", digest="", parameters=("w",), forward_flops=1.0, backward_flops=2.0, saved=1.0, moved=1.0,
        weights_moved=1.0, operations=1,
    )  # fmt: skip
    graph = BlockGraph(
        name="one", blocks=(block,), tensors=(), parameters=(Parameter(name="w", elements=1, shape=(1,)),)
    )
    stage = Stage(first="b", last="b", replicas=(Replica(devices=("a/CPU/0",), share=1),))
    job = Job(name="one", model="one.json", batch=1)
    pipeline = Pipeline(job=job, model_digest="", precision="fp32", micro_batches=1, stages=(stage,))
    Simulator(parse_cluster(text), {"one": graph}).price(Plan(cluster="one", parts=(pipeline,)))


def _example(given: Any) -> Example:
    """Example inputs: a tensor, several, or some by name."""
    from isthmus.model.capture import Example

    if isinstance(given, Example):
        return given
    if isinstance(given, Mapping):
        return Example(args=(), kwargs=dict(given))
    return Example(args=tuple(given) if isinstance(given, (tuple, list)) else (given,), kwargs={})


def _job_of(spec: str) -> Job:
    match source.parse(spec):
        case source.Zoo(name=name) | source.Function(function=name):
            pass
        case source.Config(path=path):
            name = hf.name_of(path)
        case source.Saved(path=path):
            name = path.stem
    return Job(name=_job_name(name), model=spec, batch=_BATCH)


def _job_name(text: str) -> str:
    """The text with what no job name may have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64].lstrip(".-") or "job"


def _check_trust(job: Job, trusted: Collection[str]) -> None:
    """Plans are data: code is imported only because the user named it."""
    if isinstance(source.parse(job.model), source.Function) and job.model not in trusted:
        raise PlanError(
            "trust",
            f"the plan names code for job {job.name}, and a plan alone is no reason to run code",
            where="plan",
            found=job.model,
            next=f"If you trust it, name it yourself: --model {job.model}",
        )
