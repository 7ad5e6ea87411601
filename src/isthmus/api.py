"""The verbs, in Python: load a cluster, capture a model, plan, simulate, train. All on plain frozen objects.

A model is given by its name (`zoo:NAME`, `hf:CONFIG.json`, `package.module:function`, `MODEL.json`), as a job or a
workload (a file or an object), or as a captured block graph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from isthmus.cluster.load import load_cluster, parse_cluster
from isthmus.cluster.spec import Cluster, Precision
from isthmus.compiled import telling
from isthmus.cost.simulate import Prepared, Price, Simulator
from isthmus.cost.sources import TimesUsed, times_used
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import DataError, PlanError, UsageError
from isthmus.model import hf, source
from isthmus.model.graph import Block, BlockGraph, Parameter
from isthmus.model.job import Job, Workload
from isthmus.model.load_job import check_job, load_jobs, named_code
from isthmus.model.profile import Profile, load_profile
from isthmus.plan.file import PlanFile, inputs_digest, load_plan
from isthmus.plan.paths import check_data
from isthmus.plan.schedule import render_orders
from isthmus.plan.types import Pipeline, Plan
from isthmus.plan.validate import check
from isthmus.planners.layout.cuts import balanced_cut, pipelines_seconds
from isthmus.planners.layout.device_groups import all_bundles
from isthmus.planners.layout.layout_types import LaneSettings
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.portfolio import Choice, choose_plan, parse_fix
from isthmus.planners.problem import build_problem
from isthmus.report.times import times_facts

if TYPE_CHECKING:
    from torch import nn

    from isthmus.deploy.engine import Engine
    from isthmus.deploy.join import Joined
    from isthmus.deploy.training import Listener, RunResult

__all__ = [
    "Simulated",
    "capture",
    "check_contracts",
    "check_functions",
    "check_trust",
    "emulated_profile",
    "jobs_of",
    "jobs_of_plan",
    "join",
    "load_cluster",
    "load_profile",
    "models_of",
    "names_plan",
    "plan",
    "prepare_simulator",
    "simulate",
    "train",
]

Measured = Profile | str | Path | Sequence[str | Path] | None  # a profile, its file, several files that are joined

_BATCH = 32  # samples, where neither a job nor a flag says


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A plan that keeps every rule, on its cluster, with what the simulator says of it."""

    plan: Plan
    cluster: Cluster
    models: Mapping[str, BlockGraph]
    price: Price
    profile: Profile | None = None  # measured times that it was priced with
    inputs_match: bool | None = None  # whether the plan was made from just this; None: it does not say from what

    @property
    def memory_of_models(self) -> dict[str, float]:
        """Peak bytes by device, without what a driver takes before there is a model."""
        kinds, context = self.cluster.devices, self._simulator.context
        return {device: bytes - context[kinds[device].kind] for device, bytes in self.price.memory.items()}

    @cached_property
    def timeline(self) -> Timeline:
        """One step of it, task by task."""
        return timeline(self._simulator.play(self.plan))

    @cached_property
    def orders(self) -> str:
        """Return every device's actions of a pipeline in order, a line each: `va1/A100-40GB/0 | 0F0 0F1 0B0 ...`."""
        net = self._simulator.fabric(self.plan)
        parts = [self._simulator.prepare(part, net) for part in self.plan.parts if isinstance(part, Pipeline)]
        texts = [render_orders(p.orders, p.runs, list(net.devices)) for p in parts if isinstance(p, Prepared)]
        return "\n".join(texts)

    @cached_property
    def times(self) -> TimesUsed:
        """Return how many of the plan's times were measured, interpolated, or taken from the catalog."""
        return times_used(self._simulator, self.plan)

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self.cluster, self.models, profile=self.profile)


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

    return modules.capture(model, modules.Example.of(example), name=name or type(model).__name__, sequence=sequence)


def emulated_profile(
    model: str,
    cluster: Cluster,
    *,
    sequence: int | None = None,
    precision: Precision = "fp32",
    samples: Collection[int] | None = None,
    listen: Callable[[str, int], None] = lambda block, samples: None,
) -> Profile:
    """Return a model's profile on a cluster's devices as emulated on this machine; runs the code that `model` names.

    One core is measured, and slowed down as each kind of device will be.
    """
    from isthmus.emulate.act import as_emulated, paces
    from isthmus.runtime.profiling.block_times import SAMPLES, profile_model
    from isthmus.runtime.profiling.machine import find_machine

    machine = find_machine("CPU", precision, 1)
    found = profile_model(model, machine, sequence=sequence, samples=samples or SAMPLES, listen=listen)
    return as_emulated(found.profile, paces(cluster))


def plan(
    what: str | Path | Job | Workload | BlockGraph,
    cluster: Cluster | str | Path,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
    trust_independent_samples: bool | None = None,
    profile: Measured = None,
    planner: str = "auto",
    fix: str | None = None,
    budget: float | None = None,
    calls: int | None = None,
    seed: int = 0,
) -> Choice:
    """Finds the fastest plan for training `what` on `cluster`, and prices the usual schemes beside it.

    `what` is a model's name, a job or workload file, a `Job`, a `Workload`, or a model that `isthmus.capture` gave;
    `cluster` is a file or a `Cluster`. Raises NoPlanError where nothing fits.

    batch: samples a step (default: the job's; 32 for a model without a job).
    sequence: length of the samples, for models that have one (default: the job's, else the model's own).
    precision: "fp32", "bf16" or "fp16" (default: the job's, else the fastest that every used device has).
    trust_independent_samples: split the batch also where it is not proven that samples stay apart (default: no).
    profile: measured times (a `Profile`, a file or several), used before what the catalog and the links say; the last
        notes of the result tell how many were (default: none).
    planner: who searches: "auto", or one scheme, as `isthmus plan --help` lists them (default: "auto").
    fix: degrees that the plan must have, like "tp=2,pp=4,dp=1" (default: none).
    budget: seconds after which the search ends (default: none, the usual effort).
    calls: plans after whose pricing the search ends, counted in simulator calls: unlike `budget`, the same plan comes
        out on every machine (default: none).
    seed: of the search's random choices; the same inputs, seed and calls give the same plan (default: 0).
    """
    pinned = parse_fix(fix) if fix is not None else None
    _check_kind(what)
    machines = _machines(cluster)
    measured, name = _profile(profile)
    jobs = jobs_of(
        what,
        batch=batch,
        sequence=sequence,
        precision=precision,
        trust_independent_samples=trust_independent_samples,
    )
    models = {jobs[0].name: what} if isinstance(what, BlockGraph) else models_of(jobs)
    prepare_simulator()
    problem = build_problem(machines, jobs, models, seed, measured)
    choice = choose_plan(problem, planner=planner, fix=pinned, budget=budget, calls=calls)
    facts = times_facts(times_used(problem.simulator, choice.plan), measured, name)
    return choice._replace(notes=(*choice.notes, *(f"{word}: {text}" for word, text in facts)))


def simulate(
    plan: Plan | PlanFile | str | Path,
    cluster: Cluster | None = None,
    models: Mapping[str, BlockGraph] | None = None,
    *,
    profile: Measured = None,
    trusted: Collection[str] = (),
) -> Simulated:
    """Checks a plan and prices it. `models` gives block graphs by job; others are loaded from what the plan names.

    Code that a plan names is imported only if `trusted` names it too. `profile`: measured times, as in `plan`.
    """
    measured, _ = _profile(profile)
    file, machines = _planned(plan, cluster)
    jobs = [job for job in jobs_of_plan(file.plan) if job.name not in (models or {})]
    check_trust(jobs, trusted)
    known = {**(models or {}), **models_of(jobs)}
    check(file.plan, machines, known)
    price = Simulator(machines, known, profile=measured).price(file.plan)
    digests = {job.name: known[job.name].digest for job in jobs_of_plan(file.plan)}
    inputs = inputs_digest(machines, jobs_of_plan(file.plan), digests, measured)
    same = file.inputs == inputs if file.inputs else None
    return Simulated(plan=file.plan, cluster=machines, models=known, price=price, profile=measured, inputs_match=same)


def train(
    what: Simulated | Plan | PlanFile | Job | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    steps: int | None = None,
    engine: Engine | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    resume: bool = False,
    export: str | Path | None = None,
    record: bool = False,
    trusted: Collection[str] = (),
    listen: Listener | None = None,
) -> RunResult:
    """Trains one job: by a plan (a file or an object), or by the one that `plan` finds for a job on a cluster.

    Returns when the last step is done, with the losses and the time of a step.

    cluster: the machines, a file or a `Cluster`; needed where `what` is no plan file that holds them.
    steps: the last step, counted from the very beginning also when resumed (default: the job's).
    engine: what starts the workers (default: processes on this machine, one for each device).
    checkpoint: a folder to save to, at the end and after `every` steps (default: nothing is saved).
    every: steps from one checkpoint to the next (default: at the end only).
    resume: go on from the newest whole checkpoint in that folder, if there is one (default: begin anew).
    export: a file for the trained weights, in safetensors' format (default: none).
    record: keep the timeline of the last step in the result (default: no).
    trusted: code that a plan names and that may run, like ["mine:build", "mine:data"]. A plan is data, so its code runs
        only if you name it too; what a job names that you give here, in place of a plan, is trusted.
    listen: called with everything that happens: steps, checkpoints, what workers say (default: nobody listens).
    """
    from isthmus.deploy import training
    from isthmus.deploy.local import LocalEngine
    from isthmus.runtime.program import programs

    priced = what if isinstance(what, Simulated) else _priced(what, cluster, trusted)
    part = _only_part(priced.plan)
    check_trust([part.job], (*trusted, *_named_by(what)), runs=True)
    settings = training.RunSettings(
        stop=steps or part.job.steps,
        folder=Path(checkpoint) if checkpoint is not None else None,
        every=every,
        resume=resume,
        export=Path(export) if export is not None else None,
        record=record,
    )
    made = programs(priced.plan, priced.cluster, priced.models)
    graph = priced.models[part.job.name]
    engine = engine or LocalEngine()
    own = priced.memory_of_models
    engine.check_memory({device: own.get(device, 0.0) for device in made}, _building_bytes(graph, part.precision))
    result = training.train(made, graph, engine, settings, listen or (lambda notice: None))
    return replace(result, predicted_step_seconds=priced.price.step_seconds)


def _building_bytes(graph: BlockGraph, precision: Precision) -> float:
    """Bytes of the whole model, which each worker builds in fp32, and of its copy in another precision."""
    return sum(item.elements for item in graph.parameters) * (4.0 if precision == "fp32" else 6.0)


def join(
    plan: Plan | PlanFile | Choice | str | Path,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    cluster: Cluster | None = None,
    resume: str | Path | None = None,
    trusted: Collection[str] = (),
) -> Joined:
    """A plan for a loop of one's own: per step `loss = run.step((inputs, targets))`; see `deploy.join.Joined`.

    `model` is the module that the plan was made for (absent: what the plan's job names, from its seed), `loss(output,
    targets)` gives the sum of the losses and how many were summed (absent: the job's). Both stay in this process.
    """
    from isthmus.deploy.join import Joined
    from isthmus.runtime.worker_run import build_model

    file, machines = _planned(plan.plan if isinstance(plan, Choice) else plan, cluster)
    part = _only_part(file.plan)
    sequence = part.job.sequence
    if model is None:
        check_trust([part.job], trusted, runs=True)
        built, own = build_model(part.job)
        model, loss, sequence = built.module, loss or own, built.sequence
    if loss is None:
        raise UsageError("a module of your own needs its loss", expected="join(plan, module, loss)")
    begin = Path(resume) if resume is not None else None
    return Joined(file.plan, part, machines, model, loss, sequence=sequence, resume=begin)


def jobs_of(
    what: str | Path | Job | Workload | BlockGraph,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
    trust_independent_samples: bool | None = None,
) -> tuple[Job, ...]:
    """The jobs that are meant; what is given beside a job or a model wins over what it says itself."""
    given = {
        "batch": batch,
        "sequence": sequence,
        "precision": precision,
        "trust_independent_samples": trust_independent_samples,
    }
    _check_kind(what)
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


def _check_kind(what: object) -> None:
    """Refuses what is neither a job nor a model, with what to do about it."""
    if isinstance(what, (str, Path, Job, Workload, BlockGraph)):
        return
    kind = type(what)
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in kind.__mro__):
        raise UsageError("a module must be captured first", next="isthmus.capture(module, example)")
    raise UsageError(
        "this is no job and no model",
        found=f"an object of type {kind.__name__}",
        expected="a name or a file, a Job, a Workload, or what isthmus.capture gives",
    )


def _machines(given: object) -> Cluster:
    """The cluster itself, read where it is a file."""
    if isinstance(given, Cluster):
        return given
    if isinstance(given, (str, Path)):
        return load_cluster(given)
    kind = type(given).__name__
    raise UsageError("this is no cluster", found=f"an object of type {kind}", expected="a file, or a Cluster")


def jobs_of_plan(plan: Plan) -> tuple[Job, ...]:
    """Every job of a plan, in order."""
    parts = [(part,) if isinstance(part, Pipeline) else part.jobs for part in plan.parts]
    return tuple(item.job for part in parts for item in part)


def models_of(jobs: Collection[Job]) -> dict[str, BlockGraph]:
    """The block graph of each job, by the job's name."""
    return {job.name: source.load_graph(job.model, sequence=job.sequence) for job in jobs}


def prepare_simulator(compiling: Callable[[], None] = lambda: None) -> None:
    """Compiles simulator and planner (up to a minute, once) or loads what was compiled before, outside any budget.

    `compiling` is called when something has to be compiled.
    """
    text = "{kind: cluster, version: 1, name: one, hosts: {a: {region: r, devices: {CPU: 2}}}}"
    block = Block(
        name="b", digest="", parameters=("w",), forward_flops=1.0, backward_flops=2.0, saved=1.0, moved=1.0,
        weights_moved=1.0, operations=1,
    )  # fmt: skip
    graph = BlockGraph(
        name="one", blocks=(block,), tensors=(), parameters=(Parameter(name="w", elements=1, shape=(1,)),)
    )
    job = Job(name="one", model="one.json", batch=2)
    with telling(compiling):
        problem = build_problem(parse_cluster(text), (job,), {"one": graph})
        lanes = LaneMaker(problem, MemoryFit(problem))
        layout = lanes.complete([(bundle,) for bundle in all_bundles(problem)], LaneSettings(1))
        assert layout is not None
        problem.simulator.play(problem.price(lanes_plan(problem, layout)).plan)
        balanced_cut([np.ones(1)])
        pipelines_seconds(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 0)), np.ones(1, np.int64), 1)
        lanes.settled(((("a/CPU/0",),),), 1, LaneSettings(1), 0)


def check_trust(jobs: Collection[Job], trusted: Collection[str], *, runs: bool = False, flags: bool = False) -> None:
    """Refuses code that only a plan names, all of it in one error: plans are data.

    Pricing a plan imports its models; where the jobs run, their data and losses are imported as well. `flags`: the
    caller is a command, and the error says what to type.
    """
    named = [(job, name) for job in jobs for name in named_code(job) if runs or name == job.model]
    missing = {name: job.name for job, name in named if name not in trusted}
    if missing:
        raise PlanError(
            "trust",
            f"the plan names code for job {', '.join(dict.fromkeys(missing.values()))}, "
            "and a plan alone is no reason to run code",
            where="plan",
            found=", ".join(missing),
            next=f"If you trust it, name it yourself: {_named(missing, flags=flags)}",
        )


def _named(names: Collection[str], *, flags: bool) -> str:
    if flags:
        return " ".join(f"--model {name}" for name in names)
    quoted = [f'"{name}"' for name in names]
    return f"trusted=[{', '.join(quoted)}]"


def check_contracts(jobs: Collection[Job]) -> None:
    """Tries data and losses that jobs name, and that are trusted, on two samples: before anything long is done."""
    from isthmus.model.targets import check_targets
    from isthmus.runtime.data import contracts

    for job in jobs:
        check_targets(job)
        contracts.check_contracts(job)


def check_functions(jobs: Collection[Job]) -> None:
    """Imports the data and losses that jobs name, and that are trusted, so that a misspelt name is known at once."""
    for job in jobs:
        named = [name for name in (job.data, job.loss) if name in named_code(job)]
        if named:
            from isthmus.model.function import find

            for name in named:
                find(name, DataError)


def _planned(plan: Plan | PlanFile | str | Path, cluster: Cluster | None) -> tuple[PlanFile, Cluster]:
    """A plan, with the machines that it is to run on."""
    file = _plan_file(plan)
    machines = cluster or file.cluster
    if machines is None:
        raise UsageError("the plan does not hold its cluster", next="Give the cluster: --cluster FILE")
    return file, machines


def _plan_file(given: object) -> PlanFile:
    """The plan with what its file would say, read where it is a file."""
    if isinstance(given, PlanFile):
        return given
    if isinstance(given, Plan):
        return PlanFile(plan=given)
    if isinstance(given, (str, Path)):
        return load_plan(given)
    kind = type(given).__name__
    raise UsageError("this is no plan", found=f"an object of type {kind}", expected="a file, a Plan or a PlanFile")


def names_plan(what: object) -> bool:
    """Return whether an object is a plan or the path of one, and not something that must be planned first."""
    if isinstance(what, (str, Path)):
        return str(what).endswith((".json", ".plan", ".txt")) and not str(what).startswith("hf:")
    return isinstance(what, Plan | PlanFile)


def _priced(
    what: Plan | PlanFile | Job | str | Path, cluster: Cluster | str | Path | None, trusted: Collection[str]
) -> Simulated:
    """A plan that keeps every rule, found first where a job was given."""
    machines = None if cluster is None else _machines(cluster)
    if names_plan(what):
        file, _ = _planned(what, machines)  # type: ignore[arg-type]
        if isinstance(what, (str, Path)):
            check_data(file.plan, Path(what))
        jobs = jobs_of_plan(file.plan)
        check_trust(jobs, trusted, runs=True)
        check_contracts(jobs)
        return simulate(file, machines, trusted=trusted)
    if machines is None:
        raise UsageError("a job needs a cluster to be planned for", next="Give the cluster: --cluster FILE")
    check_contracts(jobs_of(what))  # type: ignore[arg-type]
    choice = plan(what, machines)  # type: ignore[arg-type]
    jobs = jobs_of_plan(choice.plan)
    return simulate(choice.plan, machines, trusted=[name for job in jobs for name in named_code(job)])


def _named_by(what: object) -> tuple[str, ...]:
    """Code that the caller named by giving a job, a model or a job file."""
    if isinstance(what, Simulated) or names_plan(what):
        return ()
    return tuple(name for job in jobs_of(what) for name in named_code(job))  # type: ignore[arg-type]


def _only_part(plan: Plan) -> Pipeline:
    """The pipeline of a plan for one job."""
    part = plan.parts[0]
    if len(plan.parts) > 1 or not isinstance(part, Pipeline):
        jobs = ", ".join(job.name for job in jobs_of_plan(plan))
        raise UsageError(
            "several jobs cannot be trained at once yet",
            found=f"a plan for {jobs}" if len(plan.parts) > 1 else "a pool",
            expected="one pipeline",
            next="Plan and train them one by one",
        )
    return part


def _profile(given: Measured) -> tuple[Profile | None, str]:
    """The profile, and what to call it."""
    if given is None or isinstance(given, Profile):
        return given, given.origin if given and given.origin else "the profile"
    paths = (given,) if isinstance(given, (str, Path)) else tuple(given)
    return load_profile(*paths) if paths else None, ", ".join(map(str, paths))


def _job_of(spec: str) -> Job:
    match source.parse(spec):
        case source.Zoo(name=name) | source.Function(function=name):
            pass
        case source.Config(path=path):
            name = hf.name_of(path)
        case source.SavedModel(path=path):
            name = path.stem
    return Job(name=_job_name(name), model=spec, batch=_BATCH)


def _job_name(text: str) -> str:
    """The text with what no job name may have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64].lstrip(".-") or "job"
