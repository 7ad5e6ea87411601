"""`isthmus train PLAN|JOB`."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from isthmus.api import Simulated, jobs_of, jobs_of_plan, models_of, names_plan, prepare_simulator, simulate, train
from isthmus.cli.console import Answer, Progress, check_folder
from isthmus.cli.watch import Bar, Board, EventFile
from isthmus.cluster.load import load_cluster
from isthmus.deploy.engine import Notice
from isthmus.deploy.local import LocalEngine
from isthmus.deploy.training import RunResult
from isthmus.errors import UsageError
from isthmus.model.load_job import named_code
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import build_problem
from isthmus.report.text import columns, times
from isthmus.report.trace import write_trace
from isthmus.units import format_bytes, format_seconds

__all__ = ["run"]


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Plans where it must, trains, and says what came of it beside what was predicted."""
    for path in (args.export, args.trace, args.events):
        check_folder(path)
    if (args.resume or args.every) and args.checkpoint is None:
        option = "--resume" if args.resume else "--every"
        raise UsageError(f"{option} needs a folder of checkpoints", where="isthmus train", next="Add --checkpoint DIR")
    priced, trusted = _plan_file(args, progress) if names_plan(args.what) else _planned_now(args, progress)
    result = _trained(args, progress, priced, trusted)
    if args.trace and result.timeline is not None:
        write_trace(priced.timeline, args.trace, result.timeline)
    failure = None
    if result.interrupted:
        saved = (
            f"; saved in {result.checkpoint}: --resume goes on from there" if result.checkpoint else "; nothing saved"
        )
        failure = f"interrupted after step {result.steps}{saved}"
    text = "\n".join(_lines(args, priced, result))
    return Answer(values=_values(args, result), text=text, failure=failure, exit_code=130)


def _plan_file(args: argparse.Namespace, progress: Progress) -> tuple[Simulated, list[str]]:
    """The plan as it is."""
    for flag in ("batch", "sequence", "precision"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag} cannot be given for a plan", where="isthmus train", next="Plan again with it")
    progress.phase("Preparing the simulator (compiled the first time: up to a minute)")
    prepare_simulator()
    progress.phase(f"Checking {args.what}")
    cluster = load_cluster(args.cluster) if args.cluster else None
    return simulate(args.what, cluster, trusted=args.model), args.model


def _planned_now(args: argparse.Namespace, progress: Progress) -> tuple[Simulated, list[str]]:
    """The plan that the default planner finds; code that the job names is named by whoever gave the job."""
    jobs = jobs_of(args.what, batch=args.batch, sequence=args.sequence, precision=args.precision)
    if args.cluster is None:
        raise UsageError("a job needs a cluster to be planned for", where="isthmus train", next="Add --cluster FILE")
    cluster = load_cluster(args.cluster)
    progress.phase(f"Reading {', '.join(dict.fromkeys(job.model for job in jobs))}")
    models = models_of(jobs)
    progress.phase("Preparing the simulator (compiled the first time: up to a minute)")
    prepare_simulator()
    progress.phase("Planning")
    choice = choose_plan(build_problem(cluster, jobs, models, 0))
    trusted = [name for job in jobs for name in named_code(job)]
    return simulate(choice.plan, cluster, models), trusted


def _trained(args: argparse.Namespace, progress: Progress, priced: Simulated, trusted: list[str]) -> RunResult:
    from isthmus.runtime.checkpoint import latest

    (job,) = jobs_of_plan(priced.plan)[:1]
    engine = LocalEngine()
    workers = len(priced.price.memory)
    progress.phase(engine.describe(workers))
    if args.resume:
        newest = latest(args.checkpoint)
        progress.phase(f"Going on from {newest}" if newest else f"No checkpoint in {args.checkpoint}: from step 1")
    progress.rest()
    steps = args.steps or job.steps
    with contextlib.ExitStack() as open_files:
        shown: list[Any] = [open_files.enter_context(Bar(steps, job.batch, priced.price.step_seconds))]
        if args.events:
            shown.append(open_files.enter_context(EventFile(args.events, job, steps, priced.price.step_seconds)))
        if args.tensorboard:
            shown.append(open_files.enter_context(Board(args.tensorboard, job.batch)))

        def listen(notice: Notice) -> None:
            for one in shown:
                one.hear(notice)

        return train(
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


def _values(args: argparse.Namespace, result: RunResult) -> dict[str, Any]:
    return {
        "steps": result.steps,
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


def _lines(args: argparse.Namespace, priced: Simulated, result: RunResult) -> list[str]:
    (job,) = jobs_of_plan(priced.plan)[:1]
    head = f"{job.name} on {priced.cluster.name}: {result.steps} steps"
    if not result.losses:
        return [f"{head} were done already"]
    measured, predicted = result.step_seconds or 0.0, priced.price.step_seconds
    facts = [
        ("loss", f"{_loss(result.losses[0])} at first, {_loss(result.loss)} in the last step"),
        ("step", f"{format_seconds(measured)} measured here; {format_seconds(predicted)} predicted for the plan's "
                 f"devices: this is {times(measured / predicted)}"),
        ("samples", f"{job.batch / measured:.4g} a second"),
        ("sent", f"{format_bytes(result.bytes_sent)} by {len(result.workers)} worker{'s' * (len(result.workers) > 1)}"),
        ("memory", f"{format_bytes(max(result.memory.values(), default=0))} at most in one worker"),
    ]  # fmt: skip
    written = [("checkpoint", result.checkpoint), ("weights", args.export), ("timeline", args.trace)]
    facts += [(word, str(path)) for word, path in written if path]
    return [head, "", *columns(facts)]


def _loss(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5g}"
