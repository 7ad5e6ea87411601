"""The command `isthmus train PLAN|JOB`."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.api import Simulated, names_plan, plan_to_train, train
from isthmus.cli.console import Answer, ProgressLine, check_checkpoints, check_folder
from isthmus.cli.simulate import check_models
from isthmus.cli.watch import Bar, Board, EventFile, WandbRun, check_tensorboard, check_wandb
from isthmus.cluster.load import load_cluster
from isthmus.deploy.engine import Notice
from isthmus.deploy.local import LocalEngine
from isthmus.deploy.training import RunResult
from isthmus.errors import UsageError
from isthmus.model.job import Job, Optimizer, RateSchedule
from isthmus.plan.file import load_plan
from isthmus.plan.paths import check_data
from isthmus.plan.trust import check_trust
from isthmus.planners.notes import unreached
from isthmus.report.chrome_trace import write_trace
from isthmus.report.columns import columns, times
from isthmus.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from isthmus.emulate.act import Emulation

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Plan if needed, train, and return the result beside the prediction."""
    for path in (args.export, args.trace):
        check_folder(path)
    check_folder(args.events, pipe=True)
    check_checkpoints(args.checkpoint)
    if args.tensorboard:
        check_tensorboard()
    if args.wandb:
        check_wandb()
    if (args.resume or args.every) and args.checkpoint is None:
        option = "--resume" if args.resume else "--every"
        raise UsageError(f"{option} needs a folder of checkpoints", where="isthmus train", next="Add --checkpoint DIR")
    priced = _priced(args, progress)
    result, shaped = _trained(args, progress, priced)
    if args.trace and result.timeline is not None:
        write_trace(priced.timeline, args.trace, result.timeline)
    failure = None
    if result.interrupted:
        saved = (
            f"; saved in {result.checkpoint}: --resume continues from there" if result.checkpoint else "; nothing saved"
        )
        failure = f"interrupted after step {result.last_step}{saved}"
    text = "\n".join(_lines(args, priced, result, shaped))
    job = priced.plan.jobs[0]
    values = {**_values(args, job, priced.models[job.name].sequence, result), "shaped": shaped}
    return Answer(values=values, text=text, failure=failure, exit_code=130)


def _priced(args: argparse.Namespace, progress: ProgressLine) -> Simulated:
    """Return the plan that was given, or the one found for a job. Errors name the flags of the command."""
    if args.model and not names_plan(args.what):
        raise UsageError(
            "--model is for plans only", where="isthmus train", found=args.model[0],
            next=f"Leave it out: {args.what} says what is trained",
        )  # fmt: skip
    cluster = load_cluster(args.cluster) if args.cluster else None
    if names_plan(args.what):
        for flag in ("batch", "sequence", "precision", "trust-independent-samples"):
            if getattr(args, flag.replace("-", "_")) is not None:
                raise UsageError(
                    f"--{flag} cannot be given for a plan",
                    where="isthmus train",
                    next="Give it to isthmus plan, and train the new plan",
                )
        file = load_plan(args.what)
        check_data(file.plan, Path(args.what))
        check_models(args.model, file)
        check_trust(file.plan.jobs, args.model, runs=True, flags=True)
    return plan_to_train(
        args.what,
        cluster,
        batch=args.batch,
        sequence=args.sequence,
        precision=args.precision,
        trust_independent_samples=args.trust_independent_samples,
        profile=args.profile,
        emulated=args.emulate,
        resume=args.resume,
        trusted=args.model,
        progress=progress,
    )


def _trained(args: argparse.Namespace, progress: ProgressLine, priced: Simulated) -> tuple[RunResult, bool | None]:
    """Train the plan; return the result and whether links were as in the cluster (None: that was not asked for)."""
    from isthmus.runtime.checkpoint.reading import latest

    job = priced.plan.jobs[0]
    workers = len(priced.price.memory)
    if args.resume:
        some = latest(args.checkpoint)
        text = "Looking for the newest whole checkpoint in" if some else "Starting at step 1: there is no checkpoint in"
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
            open_files.enter_context(
                Bar(steps, job.batch, priced.price.step_seconds if shaped else None, priced.models[job.name].sequence)
            )
        ]
        if args.events:
            predicted = priced.price.step_seconds
            events = EventFile(args.events, job, priced.plan, steps, predicted, shaped, resumed=args.resume)
            shown.append(open_files.enter_context(events))
        if args.tensorboard:
            shown.append(open_files.enter_context(Board(args.tensorboard, job.batch)))
        if args.wandb:
            shown.append(open_files.enter_context(WandbRun(args.wandb, job)))

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
            listen=listen,
        )
        return result, shaped


def _optimizer(used: Optimizer) -> str:
    """Return the optimizer and its main settings as text, including those that were not given.

    For example: `Updating with adamw: learning rate 0.001, betas 0.9 and 0.999, weight decay 0.01`.
    """
    own = f"momentum {used.momentum:g}" if used.name == "sgd" else f"betas {used.betas[0]:g} and {used.betas[1]:g}"
    clipped = f", gradients clipped to norm {used.clip:g}" if used.clip is not None else ""
    rates = used.schedule
    parts = [
        f"learning rate {used.learning_rate:g}" + ("" if rates == RateSchedule() else f" ({_rates(rates)})"),
        own,
        f"weight decay {used.decay:g}{clipped}",
        *([f"{len(used.groups)} parameter group{'s' * (len(used.groups) > 1)}"] if used.groups else []),
        *([f"average with decay {used.average:g}"] if used.average is not None else []),
    ]
    return f"Updating with {used.name}: {', '.join(parts)}"


def _rates(used: RateSchedule) -> str:
    """Return a learning-rate schedule as text: `cosine after 100 steps of warm-up`."""
    return used.shape + (f" after {used.warmup} steps of warm-up" if used.warmup else "")


def _emulation(args: argparse.Namespace, priced: Simulated, opened: contextlib.ExitStack) -> Emulation | None:
    """Start the emulation of the hosts that the plan uses, if it was asked for."""
    if not args.emulate:
        return None
    from isthmus.emulate.act import Emulation

    hosts = dict.fromkeys(priced.cluster.devices[device].host for device in priced.price.memory)
    hosts.update((host, None) for via in priced.plan.via for host in via.hosts)
    return opened.enter_context(Emulation(priced.cluster, list(hosts)))


def _values(args: argparse.Namespace, job: Job, sequence: int | None, result: RunResult) -> dict[str, Any]:
    samples = job.batch / result.step_seconds if result.step_seconds else None
    return {
        "steps": result.steps,
        "last_step": result.last_step,
        "loss": result.loss,
        "step_seconds": result.step_seconds,
        "samples_per_second": samples,
        "tokens_per_second": samples * sequence if samples and sequence else None,
        "seconds": sum(result.seconds),
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
    job = priced.plan.jobs[0]
    where = f"{job.name} on {priced.cluster.name}"
    if not result.losses:
        return [f"{where}: nothing to do: all {result.last_step} steps were done already"]
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
        return f"{said}, which are not on this machine, so the two times cannot be compared"
    if shaped is False:
        return f"{said} and links; links are not emulated here, so the two times cannot be compared"
    return f"{said}: this is {times(measured / predicted)}"


def _made(result: RunResult) -> str:
    """Return the number of steps, `4 steps`, with their range after a checkpoint, `4 steps, 7 to 10`."""
    count = f"{result.steps} step{'s' * (result.steps > 1)}"
    first = result.last_step - result.steps + 1
    return count if first == 1 else f"{count}, {first} to {result.last_step}"


def _loss(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.5g}"
