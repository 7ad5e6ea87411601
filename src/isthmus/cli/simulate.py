"""The command `isthmus simulate PLAN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from isthmus.api import Simulated, simulate
from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cli.summary import facts_of, price_values, remarks_on
from isthmus.cluster.load import load_cluster
from isthmus.errors import UsageError
from isthmus.files import close_name
from isthmus.model.job import Job
from isthmus.model.load_job import named_code
from isthmus.model.load_profile import load_profile
from isthmus.plan.file import PlanFile, load_plan
from isthmus.plan.schedule import parse_orders
from isthmus.plan.trust import check_trust
from isthmus.planners.warm_up import warm_up
from isthmus.report.chrome_trace import write_trace
from isthmus.report.columns import columns
from isthmus.report.plan_text import device_lines, job_lines, link_lines, plan_lines, shortage_line
from isthmus.report.times import times_values

__all__ = ["check_models", "price_again", "run"]

_USUAL = ("synthetic", "default")  # data and loss of a job that names none


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Price a plan again; if asked, return each device's order, and write one step as a trace."""
    check_folder(args.trace)
    file = load_plan(args.plan)
    result = price_again(args, file, progress)
    if args.trace:
        write_trace(result.timeline, args.trace)
    values = {
        **price_values(result.cluster, result.plan.jobs, result.plan, result.price),
        "predicted_step_seconds": file.predicted.step_seconds if file.predicted else None,
        "planner": file.planner or None,
        "inputs_match": result.inputs_match,
        "notes": [remark.text for remark in remarks_on(file, result)],
        "times": times_values(result.times, result.profile, ", ".join(args.profile) or None),
        "trace": args.trace,
    }
    if args.orders:
        values["orders"] = parse_orders(result.orders)
    failure = None if result.price.fits else shortage_line(result.price)
    return Answer(values=values, text="\n".join(_lines(args, file, result)), failure=failure)


def price_again(args: argparse.Namespace, file: PlanFile, progress: ProgressLine) -> Simulated:
    """Return the plan of a file, priced on its own cluster or on the given one."""
    check_models(args.model, file)
    cluster = load_cluster(args.cluster) if args.cluster else None
    profile = load_profile(*args.profile) if args.profile else None
    check_trust(file.plan.jobs, args.model, flags=True)
    warm_up(progress.compiling)
    progress.phase(f"Simulating {args.plan}")
    return simulate(file, cluster, profile=profile, trusted=args.model)


def check_models(given: Sequence[str], file: PlanFile) -> None:
    """Refuse a --model that the plan does not name: a plan is for its own model, data and loss."""
    jobs = file.plan.jobs
    named = dict.fromkeys(name for job in jobs for name in (job.model, job.data, job.loss))
    for name in given:
        if name not in named:
            raise UsageError(
                "the plan does not use this model",
                where="--model",
                found=name,
                expected=f"what the plan names: {', '.join(name for name in named if name not in _USUAL)}",
                next=close_name(name, named) or _instead(jobs),
            )


def _instead(jobs: Sequence[Job]) -> str:
    functions = list(dict.fromkeys(name for job in jobs for name in named_code(job)))
    if functions:
        return f"Name the plan's own code: {' '.join(f'--model {name}' for name in functions)}"
    return "Leave it out, or plan again for the model: isthmus plan"


def _lines(args: argparse.Namespace, file: PlanFile, result: Simulated) -> list[str]:
    jobs = result.plan.jobs
    by = f", by planner {file.planner}" if file.planner else ""
    return [
        f"{', '.join(job.name for job in jobs)} on {result.cluster.name}{by}",
        "",
        *job_lines(jobs, result.plan, result.price),
        "",
        *columns(facts_of(file, result, ", ".join(args.profile))),
        "",
        *device_lines(result.cluster, result.price, result.timeline),
        "",
        *link_lines(result.timeline),
        "",
        *plan_lines(result.plan, f"all of it is in {args.plan}"),
        *(["", result.orders] if args.orders else []),
        *([f"\ntimeline written to {args.trace}: open it in ui.perfetto.dev"] if args.trace else []),
    ]
