"""The command `isthmus train PLAN|JOB`."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.api import (
    Simulated,
    check_contracts,
    check_trust,
    emulated_profile,
    jobs_of,
    jobs_of_plan,
    models_of,
    names_plan,
    prepare_simulator,
    simulate,
    train,
)
from isthmus.cli.console import Answer, Progress, check_checkpoints, check_folder
from isthmus.cli.simulate import check_models
from isthmus.cli.watch import Bar, Board, EventFile, check_tensorboard
from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster, Precision
from isthmus.deploy.engine import Notice
from isthmus.deploy.local import LocalEngine
from isthmus.deploy.training import RunResult
from isthmus.errors import UsageError
from isthmus.model.job import Job, Optimizer
from isthmus.model.load_job import named_code
from isthmus.model.profile import Profile, load_profile
from isthmus.plan.file import load_plan
from isthmus.plan.paths import check_data
from isthmus.plan.types import Pipeline
from isthmus.planners.notes import unreached
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import build_problem
from isthmus.report.chrome_trace import write_trace
from isthmus.report.columns import columns, times
from isthmus.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from isthmus.emulate.act import Emulation

__all__ = ["run"]


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Plan if needed, train, and return the result beside the prediction."""
    for path in (args.export, args.trace):
        check_folder(path)
    check_folder(args.events, pipe=True)
    check_checkpoints(args.checkpoint)
    if args.tensorboard:
        check_tensorboard()
    if (args.resume or args.every) and args.checkpoint is None:
        option = "--resume" if args.resume else "--every"
        raise UsageError(f"{option} needs a folder of checkpoints", where="isthmus train", next="Add --checkpoint DIR")
    priced, trusted = _plan_file(args, progress) if names_plan(args.what) else _planned_now(args, progress)
    result, shaped = _trained(args, progress, priced, trusted)
    if args.trace and result.timeline is not None:
        write_trace(priced.timeline, args.trace, result.timeline)
    failure = None
    if result.interrupted:
        saved = (
            f"; saved in {result.checkpoint}: --resume goes on from there" if result.checkpoint else "; nothing saved"
        )
        failure = f"interrupted after step {result.last_step}{saved}"
    text = "\n".join(_lines(args, priced, result, shaped))
    values = {**_values(args, result), "shaped": shaped}
    return Answer(values=values, text=text, failure=failure, exit_code=130)


def _plan_file(args: argparse.Namespace, progress: Progress) -> tuple[Simulated, list[str]]:
    """Return the plan of a file, priced as it is, and the code that may be imported for it."""
    for flag in ("batch", "sequence", "precision", "trust-independent-samples"):
        if getattr(args, flag.replace("-", "_")) is not None:
            raise UsageError(f"--{flag} cannot be given for a plan", where="isthmus train", next="Plan again with it")
    cluster = load_cluster(args.cluster) if args.cluster else None
    file = load_plan(args.what)
    check_data(file.plan, Path(args.what))
    check_models(args.model, file)
    check_trust(jobs_of_plan(file.plan), args.model, runs=True, flags=True)
    check_contracts(jobs_of_plan(file.plan))
    prepare_simulator(progress.compiling)
    progress.phase(f"Checking {args.what}")
    priced = simulate(file, cluster, profile=args.profile or None, trusted=args.model)
    if args.emulate and not args.profile:
        (job,) = jobs_of_plan(priced.plan)[:1]
        part = priced.plan.parts[0]
        precision = part.precision if isinstance(part, Pipeline) else "fp32"
        profile = _emulated(progress, job, priced.cluster, precision)
        priced = simulate(priced.plan, priced.cluster, priced.models, profile=profile)
    return priced, args.model


def _planned_now(args: argparse.Namespace, progress: Progress) -> tuple[Simulated, list[str]]:
    """Return the plan that the default planner finds, and the code that the job names.

    That code is trusted, because whoever gave the job named it.
    """
    if args.model:
        raise UsageError(
            "--model is for plans only", where="isthmus train", found=args.model[0],
            next=f"Leave it out: {args.what} says what is trained",
        )  # fmt: skip
    precision: Precision | None = args.precision
    if args.emulate and precision is None:
        precision = "fp32"  # the precision in which a processor computes best
    jobs = jobs_of(
        args.what,
        batch=args.batch,
        sequence=args.sequence,
        precision=precision,
        trust_independent_samples=args.trust_independent_samples,
    )
    if args.cluster is None:
        raise UsageError("a job needs a cluster to be planned for", where="isthmus train", next="Add --cluster FILE")
    cluster = load_cluster(args.cluster)
    check_contracts(jobs)
    progress.phase(f"Reading {', '.join(dict.fromkeys(job.model for job in jobs))}")
    models = models_of(jobs)
    prepare_simulator(progress.compiling)
    profile = load_profile(*args.profile) if args.profile else None
    if args.emulate and profile is None:
        profile = _emulated(progress, jobs[0], cluster, jobs[0].precision or "fp32")
    progress.phase("Planning")
    choice = choose_plan(
        build_problem(cluster, jobs, models, 0, profile),
        progress=lambda scheme, calls: progress.detail(f"{scheme}, {calls} plans priced"),
    )
    if choice.interrupted:
        raise KeyboardInterrupt
    trusted = [name for job in jobs for name in named_code(job)]
    return simulate(choice.plan, cluster, models, profile=profile), trusted


def _emulated(progress: Progress, job: Job, cluster: Cluster, precision: Precision) -> Profile:
    """Measure the times of the emulated devices; without them the prediction would be for the real devices."""
    progress.phase(f"Measuring {job.model} on one core (isthmus profile --emulate writes this down, for --profile)")
    return emulated_profile(
        job.model,
        cluster,
        sequence=job.sequence,
        precision=precision,
        listen=lambda block, samples: progress.detail(f"{block}, samples: {samples}"),
    )


def _trained(
    args: argparse.Namespace, progress: Progress, priced: Simulated, trusted: list[str]
) -> tuple[RunResult, bool | None]:
    """Train the plan; return the result, and whether links were as in the cluster (None: not asked for)."""
    from isthmus.runtime.checkpoint.reading import latest

    (job,) = jobs_of_plan(priced.plan)[:1]
    workers = len(priced.price.memory)
    if args.resume:
        some = latest(args.checkpoint)
        text = (
            "Looking for the newest whole checkpoint in" if some else "Beginning at step 1: there is no checkpoint in"
        )
        progress.phase(f"{text} {args.checkpoint}")
    steps = args.steps or job.steps
    with contextlib.ExitStack() as open_files:
        emulation = _emulation(args, priced, open_files)
        engine = LocalEngine(emulation, nccl=args.nccl, ignore_memory=args.ignore_memory)
        progress.phase(engine.describe(workers))
        progress.phase(_optimizer(job.optimizer))
        left_out = (text for graph in priced.models.values() for text in unreached(graph))
        for note in (*left_out, *(emulation.world.notes if emulation is not None else ())):
            progress.phase(f"note: {note}")
        shaped = emulation.world.shaped if emulation is not None else None
        progress.rest()
        shown: list[Any] = [
            open_files.enter_context(Bar(steps, job.batch, priced.price.step_seconds if shaped else None))
        ]
        if args.events:
            events = EventFile(args.events, job, priced.plan, steps, priced.price.step_seconds, shaped)
            shown.append(open_files.enter_context(events))
        if args.tensorboard:
            shown.append(open_files.enter_context(Board(args.tensorboard, job.batch)))

        def listen(notice: Notice) -> None:
            for one in shown:
                one.hear(notice)

        result = train(
            priced,
            steps=steps,
            engine=engine,
            checkpoint=args.checkpoint,
            every=args.every,
            resume=args.resume,
            export=args.export,
            record=args.trace is not None,
            trusted=trusted,
            listen=listen,
        )
        return result, shaped


def _optimizer(used: Optimizer) -> str:
    """Return the optimizer and all its settings as text, including those that were not given.

    For example: `Updating with adamw: learning rate 0.001, betas 0.9 and 0.999, weight decay 0.01`.
    """
    own = f"momentum {used.momentum:g}" if used.name == "sgd" else f"betas {used.betas[0]:g} and {used.betas[1]:g}"
    clipped = f", gradients clipped to norm {used.clip:g}" if used.clip is not None else ""
    return (
        f"Updating with {used.name}: learning rate {used.learning_rate:g}, {own}, weight decay {used.decay:g}{clipped}"
    )


def _emulation(args: argparse.Namespace, priced: Simulated, opened: contextlib.ExitStack) -> Emulation | None:
    """Start the emulation of the hosts that the plan uses, if it was asked for."""
    if not args.emulate:
        return None
    from isthmus.emulate.act import Emulation

    hosts = dict.fromkeys(priced.cluster.devices[device].host for device in priced.price.memory)
    hosts.update((host, None) for via in priced.plan.via for host in via.hosts)
    return opened.enter_context(Emulation(priced.cluster, list(hosts)))


def _values(args: argparse.Namespace, result: RunResult) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "last_step": result.last_step,
        "loss": result.loss,
        "step_seconds": result.step_seconds,
        "predicted_step_seconds": result.predicted_step_seconds,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "bytes_sent": result.bytes_sent,
        "workers": list(result.workers),
        "memory": dict(result.memory),
        "interrupted": result.interrupted,
        "engine": args.engine,
        "trace": args.trace,
        "events": args.events,
        "export": args.export,
    }


def _lines(args: argparse.Namespace, priced: Simulated, result: RunResult, shaped: bool | None) -> list[str]:
    (job,) = jobs_of_plan(priced.plan)[:1]
    where = f"{job.name} on {priced.cluster.name}"
    if not result.losses:
        return [f"{where}: no step was made, as {result.last_step} were done already"]
    head = f"{where}: {_made(result)}"
    measured, predicted = result.step_seconds or 0.0, priced.price.step_seconds
    facts = [
        ("loss", f"{_loss(result.losses[0])} at first, {_loss(result.loss)} in the last step"),
        ("step", _compared(measured, predicted, emulated=args.emulate, shaped=shaped)),
        ("samples", f"{job.batch / measured:.4g} a second"),
        ("sent", f"{format_bytes(result.bytes_sent)} by {len(result.workers)} worker{'s' * (len(result.workers) > 1)}"),
        ("memory", f"{format_bytes(max(result.memory.values(), default=0))} at most in one worker"),
    ]  # fmt: skip
    written = [("checkpoint", result.checkpoint), ("weights", args.export), ("timeline", args.trace)]
    facts += [(word, str(path)) for word, path in written if path]
    return [head, "", *columns(facts)]


def _compared(measured: float, predicted: float, *, emulated: bool, shaped: bool | None) -> str:
    """Return the measured time beside the predicted one, with a ratio only if devices and links are the same."""
    here, whose = format_seconds(measured), "the emulated" if emulated else "the plan's"
    said = f"{here} measured here; {format_seconds(predicted)} predicted for {whose} devices"
    if not emulated:
        return f"{said}, which this machine is not: the two times cannot be compared"
    if shaped is False:
        return f"{said} and links, which are not shaped here: the two times cannot be compared"
    return f"{said}: this is {times(measured / predicted)}"


def _made(result: RunResult) -> str:
    """Return the number of steps, `4 steps`, with their range after a checkpoint, `4 steps, 7 to 10`."""
    count = f"{result.steps} step{'s' * (result.steps > 1)}"
    first = result.last_step - result.steps + 1
    return count if first == 1 else f"{count}, {first} to {result.last_step}"


def _loss(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5g}"
