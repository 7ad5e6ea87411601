"""`isthmus simulate PLAN`."""

from __future__ import annotations

import argparse

from isthmus.api import Simulated, jobs_of_plan, prepare_simulator, simulate
from isthmus.cli.console import Answer, Progress, check_folder
from isthmus.cli.summary import price_values
from isthmus.cluster.load import load_cluster
from isthmus.model.profile import load_profile
from isthmus.plan.file import PlanFile, load_plan
from isthmus.plan.schedule import parse_orders
from isthmus.report.plan import device_lines, job_lines, link_lines, plan_lines, shortage_line
from isthmus.report.text import columns, times
from isthmus.report.times import times_facts, times_values
from isthmus.report.trace import write_trace
from isthmus.units import format_seconds

__all__ = ["price_again", "run"]


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Prices a plan again; says each device's order, and writes one step as a trace, where asked."""
    check_folder(args.trace)
    file, result = price_again(args, progress)
    if args.trace:
        write_trace(result.timeline, args.trace)
    values = {
        **price_values(result.cluster, jobs_of_plan(result.plan), result.plan, result.price),
        "predicted_step_seconds": file.predicted.step_seconds if file.predicted else None,
        "planner": file.planner or None,
        "inputs_match": result.inputs_match,
        "times": times_values(result.times, result.profile, args.profile),
        "trace": args.trace,
    }
    if args.orders:
        values["orders"] = parse_orders(result.orders)
    failure = None if result.price.fits else shortage_line(result.price)
    return Answer(values=values, text="\n".join(_lines(args, file, result)), failure=failure)


def price_again(args: argparse.Namespace, progress: Progress) -> tuple[PlanFile, Simulated]:
    """The plan file that the command names, priced on its own cluster or on the one given."""
    file = load_plan(args.plan)
    cluster = load_cluster(args.cluster) if args.cluster else None
    profile = load_profile(args.profile) if args.profile is not None else None
    progress.phase("Preparing the simulator (compiled the first time: up to a minute)")
    prepare_simulator()
    progress.phase(f"Simulating {args.plan}")
    return file, simulate(file, cluster, profile=profile, trusted=args.model)


def _lines(args: argparse.Namespace, file: PlanFile, result: Simulated) -> list[str]:
    jobs = jobs_of_plan(result.plan)
    by = f", by planner {file.planner}" if file.planner else ""
    return [
        f"{', '.join(job.name for job in jobs)} on {result.cluster.name}{by}",
        "",
        *job_lines(jobs, result.plan, result.price),
        *_compared(file, result),
        "",
        *columns(times_facts(result.times, result.profile, args.profile or "")),
        "",
        *device_lines(result.cluster, result.price, result.timeline),
        "",
        *link_lines(result.timeline),
        "",
        *plan_lines(result.plan, f"all of it is in {args.plan}"),
        *(["", result.orders] if args.orders else []),
        *([f"\ntimeline written to {args.trace}: open it in ui.perfetto.dev"] if args.trace else []),
    ]


def _compared(file: PlanFile, result: Simulated) -> list[str]:
    """What the file itself predicts, and what it was made from, where that is something else."""
    lines, seconds = [], result.price.step_seconds
    before = file.predicted.step_seconds if file.predicted else None
    if before and abs(seconds - before) > 1e-9 * before:
        lines.append(f"the file predicts {format_seconds(before)}; this is {times(seconds / before)} that")
    if result.inputs_match is False:
        lines.append("the plan was made from another cluster, job, model or profile than those priced here")
    return lines
