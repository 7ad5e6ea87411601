"""The verbs, in Python: load a cluster, capture a model, plan, simulate, train. All on plain frozen objects.

A model is given by its name (`zoo:NAME`, `hf:CONFIG.json`, `package.module:function`, `MODEL.json`), as a job or a
workload (a file or an object), or as a captured block graph. The command line calls the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster, Precision
from isthmus.cost.simulate import Prepared, Price, Simulator
from isthmus.cost.sources import TimesUsed, times_used
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import UsageError
from isthmus.model import source
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Workload
from isthmus.model.load_job import named_code
from isthmus.model.load_profile import load_profile
from isthmus.model.profile import Profile
from isthmus.model.requests import Request, check_functions, check_kind, models_of, requested_jobs
from isthmus.plan.file import PlanFile, inputs_digest, load_plan
from isthmus.plan.paths import check_data
from isthmus.plan.schedule import render_orders
from isthmus.plan.trust import check_trust
from isthmus.plan.types import Pipeline, Plan
from isthmus.plan.validate import check
from isthmus.planners.portfolio import Choice, choose_plan, parse_fix
from isthmus.planners.problem import build_problem
from isthmus.planners.warm_up import warm_up
from isthmus.progress import SILENT, Progress
from isthmus.report.times import times_facts

if TYPE_CHECKING:
    from torch import nn

    from isthmus.deploy.engine import Engine
    from isthmus.deploy.join import Joined
    from isthmus.deploy.training import Listener, RunResult

__all__ = [
    "Simulated",
    "capture",
    "emulated_profile",
    "join",
    "load_cluster",
    "load_profile",
    "names_plan",
    "plan",
    "plan_to_train",
    "simulate",
    "train",
]

Measured = Profile | str | Path | Sequence[str | Path] | None  # a profile, its file, several files that are joined


def plan(
    what: Request,
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
    progress: Progress = SILENT,
) -> Choice:
    """Find the fastest plan for training `what` on `cluster`, and price the usual schemes beside it.

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
    progress: told about each phase of the work (default: nobody is).
    """
    pinned = parse_fix(fix) if fix is not None else None
    check_kind(what)
    machines = _read_cluster(cluster)
    measured, name = _read_profile(profile)
    jobs = requested_jobs(
        what,
        batch=batch,
        sequence=sequence,
        precision=precision,
        trust_independent_samples=trust_independent_samples,
    )
    check_functions(jobs)
    progress.phase(f"Reading {', '.join(dict.fromkeys(job.model for job in jobs))}")
    models = {jobs[0].name: what} if isinstance(what, BlockGraph) else models_of(jobs)
    problem = build_problem(machines, jobs, models, seed, measured)
    warm_up(progress.compiling)
    progress.phase("Planning")
    choice = choose_plan(
        problem,
        planner=planner,
        fix=pinned,
        budget=budget,
        calls=calls,
        progress=lambda scheme, calls: progress.detail(f"{scheme}, {calls} plans priced"),
    )
    return choice._replace(sources=tuple(times_facts(choice.times, measured, name)))


def simulate(
    plan: Plan | PlanFile | str | Path,
    cluster: Cluster | None = None,
    models: Mapping[str, BlockGraph] | None = None,
    *,
    profile: Measured = None,
    trusted: Collection[str] = (),
) -> Simulated:
    """Check a plan and price it. `models` gives block graphs by job; others are loaded from what the plan names.

    Code that a plan names is imported only if `trusted` names it too. `profile`: measured times, as in `plan`.
    """
    measured, _ = _read_profile(profile)
    file, machines = _read_plan(plan, cluster)
    jobs = [job for job in file.plan.jobs if job.name not in (models or {})]
    check_trust(jobs, trusted)
    known = {**(models or {}), **models_of(jobs)}
    check(file.plan, machines, known)
    price = Simulator(machines, known, profile=measured).price(file.plan)
    digests = {job.name: known[job.name].digest for job in file.plan.jobs}
    inputs = inputs_digest(machines, file.plan.jobs, digests, measured)
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
    progress: Progress = SILENT,
) -> RunResult:
    """Train one job: by a plan (a file or an object), or by the one that `plan` finds for a job on a cluster.

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
    progress: told about each phase of the work before the first step (default: nobody is).
    """
    from isthmus.deploy import training
    from isthmus.deploy.local import LocalEngine
    from isthmus.runtime.program import programs

    if not isinstance(what, Simulated):
        what = plan_to_train(what, cluster, resume=resume, trusted=trusted, progress=progress)
    part = _only_part(what.plan)
    check_trust([part.job], (*trusted, *what.trusted), runs=True)
    settings = training.RunSettings(
        stop=steps or part.job.steps,
        folder=Path(checkpoint) if checkpoint is not None else None,
        every=every,
        resume=resume,
        export=Path(export) if export is not None else None,
        record=record,
    )
    made = programs(what.plan, what.cluster, what.models)
    graph = what.models[part.job.name]
    engine = engine or LocalEngine()
    own = what.memory_of_models
    engine.check_memory({device: own.get(device, 0.0) for device in made}, _building_bytes(graph, part.precision))
    result = training.train(made, graph, engine, settings, listen or (lambda notice: None))
    return replace(result, predicted_step_seconds=what.price.step_seconds)


def plan_to_train(
    what: Plan | PlanFile | Job | str | Path,
    cluster: Cluster | str | Path | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
    trust_independent_samples: bool | None = None,
    profile: Measured = None,
    emulated: bool = False,
    resume: bool = False,
    trusted: Collection[str] = (),
    progress: Progress = SILENT,
) -> Simulated:
    """Return the plan that training follows, checked and priced: the one given, or the one that `plan` finds.

    `batch`, `sequence`, `precision` and `trust_independent_samples` are for jobs. `emulated`: the devices are emulated
    on this machine; without a profile, their times are measured here first. Data and losses are tried on two samples
    before anything long is done, and starting weights are checked unless a run is resumed from a checkpoint.
    """
    measured, _ = _read_profile(profile)
    machines = None if cluster is None else _read_cluster(cluster)
    if names_plan(what):
        return _given_plan(
            what, machines, measured, emulated=emulated, resume=resume, trusted=trusted, progress=progress
        )
    jobs = requested_jobs(
        what,  # type: ignore[arg-type]
        batch=batch,
        sequence=sequence,
        precision=precision or ("fp32" if emulated else None),  # what a processor computes best in
        trust_independent_samples=trust_independent_samples,
    )
    if machines is None:
        raise UsageError("a job needs a cluster to be planned for", next="Add --cluster FILE (in Python: cluster=FILE)")
    _try_contracts(jobs, resume)
    if emulated and measured is None:
        measured = _measure_emulated(jobs[0], machines, jobs[0].precision or "fp32", progress)
    meant = jobs[0] if len(jobs) == 1 else Workload(name="jobs", jobs=jobs)
    choice = plan(meant, machines, profile=measured, progress=progress)
    if choice.interrupted:
        raise KeyboardInterrupt
    problem = choice.problem
    priced = simulate(choice.plan, machines, {problem.job.name: problem.graph}, profile=measured)
    return replace(priced, trusted=tuple(name for job in jobs for name in named_code(job)))


def _given_plan(
    what: Any,
    cluster: Cluster | None,
    profile: Profile | None,
    *,
    emulated: bool,
    resume: bool,
    trusted: Collection[str],
    progress: Progress,
) -> Simulated:
    """Return a plan as it was given, priced; the code that it names must be trusted."""
    file, machines = _read_plan(what, cluster)
    if isinstance(what, (str, Path)):
        check_data(file.plan, Path(what))
    check_trust(file.plan.jobs, trusted, runs=True)
    _try_contracts(file.plan.jobs, resume)
    warm_up(progress.compiling)
    progress.phase(f"Checking {what if isinstance(what, (str, Path)) else 'the plan'}")
    priced = simulate(file, machines, profile=profile, trusted=trusted)
    if emulated and profile is None:
        part = file.plan.job_parts[0]
        measured = _measure_emulated(part.job, machines, part.precision, progress)
        priced = simulate(file.plan, machines, priced.models, profile=measured)
    return replace(priced, trusted=tuple(trusted))


def join(
    plan: Plan | PlanFile | Choice | str | Path,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    cluster: Cluster | None = None,
    resume: str | Path | None = None,
    trusted: Collection[str] = (),
) -> Joined:
    """Run a plan in a loop of one's own: per step `loss = run.step((inputs, targets))`; see `deploy.join.Joined`.

    `model` is the module that the plan was made for (absent: what the plan's job names, from its seed), `loss(output,
    targets)` gives the sum of the losses and how many were summed (absent: the job's). Both stay in this process.
    """
    from isthmus.deploy.join import Joined
    from isthmus.runtime.starting_weights import StartingWeights
    from isthmus.runtime.worker_run import build_model

    file, machines = _read_plan(plan.plan if isinstance(plan, Choice) else plan, cluster)
    part = _only_part(file.plan)
    sequence = part.job.sequence
    if model is None:
        check_trust([part.job], trusted, runs=True)
        built, own = build_model(part.job)
        model, loss, sequence = built.module, loss or own, built.sequence
        if part.job.weights is not None:
            StartingWeights(Path(part.job.weights)).load(model)
    if loss is None:
        raise UsageError("a module of your own needs its loss", expected="join(plan, module, loss)")
    begin = Path(resume) if resume is not None else None
    return Joined(file.plan, part, machines, model, loss, sequence=sequence, resume=begin)


def capture(
    model: str | nn.Module, example: Any = None, *, name: str | None = None, sequence: int | None = None
) -> BlockGraph:
    """Return the block graph of a model: of one that is named, or of a module with example inputs (batch first)."""
    if isinstance(model, str):
        graph = source.load_graph(model, sequence=sequence)
        return msgspec.structs.replace(graph, name=name) if name else graph
    if example is None:
        raise UsageError(
            "a module cannot be captured without example inputs", expected="capture(module, example inputs)"
        )
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


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """A plan that keeps every rule, on its cluster, with what the simulator says of it."""

    plan: Plan
    cluster: Cluster
    models: Mapping[str, BlockGraph]
    price: Price
    profile: Profile | None = None  # measured times that it was priced with
    inputs_match: bool | None = None  # whether the plan was made from just this; None: it does not say from what
    trusted: tuple[str, ...] = ()  # code of its jobs that the caller named, and that may run

    @property
    def memory_of_models(self) -> dict[str, float]:
        """Return the peak bytes by device, without what a driver takes before there is a model."""
        kinds, context = self.cluster.devices, self._simulator.context
        return {device: bytes - context[kinds[device].kind] for device, bytes in self.price.memory.items()}

    @cached_property
    def timeline(self) -> Timeline:
        """Return one step of the plan, task by task."""
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


def names_plan(what: object) -> bool:
    """Return whether an object is a plan or the path of one, and not something that must be planned first."""
    if isinstance(what, (str, Path)):
        return str(what).endswith((".json", ".plan", ".txt")) and not str(what).startswith("hf:")
    return isinstance(what, Plan | PlanFile)


def _read_cluster(given: object) -> Cluster:
    """Return the cluster itself, read where it is a file."""
    if isinstance(given, Cluster):
        return given
    if isinstance(given, (str, Path)):
        return load_cluster(given)
    kind = type(given).__name__
    raise UsageError("this is not a cluster", found=f"an object of type {kind}", expected="a file, or a Cluster")


def _read_profile(given: Measured) -> tuple[Profile | None, str]:
    """Return the profile, read where it is a file or several, and what to call it."""
    if given is None or isinstance(given, Profile):
        return given, given.origin if given and given.origin else "the profile"
    paths = (given,) if isinstance(given, (str, Path)) else tuple(given)
    return load_profile(*paths) if paths else None, ", ".join(map(str, paths))


def _read_plan(given: object, cluster: Cluster | None) -> tuple[PlanFile, Cluster]:
    """Return the plan with what its file would say, read where it is a file, and the machines that it is to run on."""
    if isinstance(given, Plan):
        file = PlanFile(plan=given)
    elif isinstance(given, (str, Path)):
        file = load_plan(given)
    elif isinstance(given, PlanFile):
        file = given
    else:
        kind = type(given).__name__
        raise UsageError(
            "this is not a plan", found=f"an object of type {kind}", expected="a file, a Plan or a PlanFile"
        )
    machines = cluster or file.cluster
    if machines is None:
        raise UsageError("the plan does not hold its cluster", next="Give the cluster: --cluster FILE")
    return file, machines


def _only_part(plan: Plan) -> Pipeline:
    """Return the pipeline of a plan for one job."""
    part = plan.parts[0]
    if len(plan.parts) > 1 or not isinstance(part, Pipeline):
        jobs = ", ".join(job.name for job in plan.jobs)
        raise UsageError(
            "several jobs cannot be trained at once yet",
            found=f"a plan for {jobs}" if len(plan.parts) > 1 else "a pool",
            expected="one pipeline",
            next="Plan and train them one by one",
        )
    return part


def _try_contracts(jobs: Collection[Job], resume: bool) -> None:
    """Try data and losses that jobs name, and that are trusted, on two samples; check weights that will be read."""
    from isthmus.model.targets import check_targets
    from isthmus.runtime.data.contracts import check_contracts

    for job in jobs:
        check_targets(job)
        check_contracts(msgspec.structs.replace(job, weights=None) if resume else job)


def _measure_emulated(job: Job, cluster: Cluster, precision: Precision, progress: Progress) -> Profile:
    """Measure the times of the emulated devices: without them a prediction would be of the real ones."""
    progress.phase(f"Measuring {job.model} on one core (isthmus profile --emulate saves these times for --profile)")
    return emulated_profile(
        job.model,
        cluster,
        sequence=job.sequence,
        precision=precision,
        listen=lambda block, samples: progress.detail(f"{block}, samples: {samples}"),
    )


def _building_bytes(graph: BlockGraph, precision: Precision) -> float:
    """Return the bytes of the whole model, which each worker builds in fp32, and of its copy in another precision."""
    return sum(item.elements for item in graph.parameters) * (4.0 if precision == "fp32" else 6.0)
