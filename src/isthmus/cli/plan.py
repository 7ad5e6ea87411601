"""The command `isthmus plan MODEL|JOB|WORKLOAD --cluster FILE`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from isthmus.api import plan
from isthmus.cli.arguments import unknown
from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cli.summary import price_values
from isthmus.plan.file import save_plan
from isthmus.planners.portfolio import PLANNERS, Choice
from isthmus.report.choice_text import choice_lines
from isthmus.report.times import times_values

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Find a plan, price the usual schemes beside it, and write it if asked."""
    if args.planner not in PLANNERS:
        raise unknown("no planner", args.planner, PLANNERS, "isthmus plan")
    check_folder(args.output)
    choice = plan(
        args.what,
        args.cluster,
        batch=args.batch,
        sequence=args.sequence,
        precision=args.precision,
        trust_independent_samples=args.trust_independent_samples,
        profile=args.profile,
        planner=args.planner,
        fix=args.fix,
        budget=args.budget,
        calls=args.calls,
        seed=args.seed,
        progress=progress,
    )
    if args.output:
        save_plan(args.output, choice.file)
    written = f"written to {args.output}" if args.output else "-o FILE writes the whole plan"
    return Answer(values=_values(args, choice), text="\n".join(choice_lines(choice, written)))


def _values(args: argparse.Namespace, choice: Choice) -> dict[str, Any]:
    problem = choice.problem
    return {
        "planner": choice.planner,
        "lower_bound_seconds": choice.lower_bound,
        "planning_seconds": choice.seconds,
        "baselines": choice.schemes,
        "baseline_outcomes": {name: msgspec.structs.asdict(outcome) for name, outcome in choice.outcomes.items()},
        "everywhere": msgspec.structs.asdict(choice.everywhere) if choice.everywhere else None,
        "plan": args.output,
        "seed": args.seed,
        "calls": choice.calls,
        "notes": list(choice.decisions),
        **price_values(problem.cluster, choice.plan.jobs, choice.plan, choice.price),
        "times": times_values(choice.times, problem.profile, ", ".join(args.profile) or None),
    }
