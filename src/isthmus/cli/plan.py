"""The command `isthmus plan MODEL|JOB|WORKLOAD --cluster FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import msgspec

from isthmus.api import check_functions, jobs_of, models_of, prepare_simulator
from isthmus.cli.arguments import unknown
from isthmus.cli.console import Answer, Progress, check_folder
from isthmus.cli.summary import price_values
from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cost.sources import times_used
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.model.profile import load_profile
from isthmus.plan.file import PlanFile, inputs_digest, save_plan
from isthmus.plan.types import Prediction
from isthmus.planners.portfolio import PLANNERS, Choice, choose_plan, parse_fix
from isthmus.planners.problem import Problem, build_problem
from isthmus.report.columns import columns, times
from isthmus.report.plan_text import device_lines, job_lines, link_lines, plan_lines, scheme_lines
from isthmus.report.times import times_facts, times_values
from isthmus.units import format_seconds

__all__ = ["run"]


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Find a plan, price the usual schemes beside it, and write it if asked."""
    if args.planner not in PLANNERS:
        raise unknown("no planner", args.planner, PLANNERS, "isthmus plan")
    fix = parse_fix(args.fix) if args.fix is not None else None
    check_folder(args.output)
    cluster = load_cluster(args.cluster)
    profile = load_profile(*args.profile) if args.profile else None
    jobs = jobs_of(
        args.what,
        batch=args.batch,
        sequence=args.sequence,
        precision=args.precision,
        trust_independent_samples=args.trust_independent_samples,
    )
    check_functions(jobs)
    progress.phase(f"Reading {', '.join(dict.fromkeys(job.model for job in jobs))}")
    models = models_of(jobs)
    problem = build_problem(cluster, jobs, models, args.seed, profile)
    prepare_simulator(progress.compiling)
    progress.phase("Planning")
    choice = choose_plan(
        problem,
        planner=args.planner,
        fix=fix,
        budget=args.budget,
        calls=args.calls,
        progress=lambda scheme, calls: progress.detail(f"{scheme}, {calls} plans priced"),
    )
    if args.output:
        save_plan(args.output, _file(problem, jobs, models, choice))
    used = times_used(problem.simulator, choice.plan)
    measured = ", ".join(args.profile)
    values = {**_values(args, cluster, jobs, choice), "times": times_values(used, profile, measured or None)}
    facts = times_facts(used, profile, measured)
    return Answer(values=values, text=_text(args, cluster, jobs, choice, facts))


def _file(problem: Problem, jobs: tuple[Job, ...], models: Mapping[str, BlockGraph], choice: Choice) -> PlanFile:
    digests = {name: graph.digest for name, graph in models.items()}
    predicted = Prediction(
        step_seconds=choice.price.step_seconds,
        jobs=dict(choice.price.jobs),
        memory=dict(choice.price.memory),
        lower_bound_seconds=choice.lower_bound,
        baselines=choice.schemes,
        baseline_outcomes=dict(choice.outcomes),
        everywhere=choice.everywhere,
    )
    return PlanFile(
        planner=choice.planner,
        seed=problem.seed,
        inputs=inputs_digest(problem.cluster, jobs, digests, problem.profile),
        plan=choice.plan,
        cluster=problem.cluster,
        predicted=predicted,
    )


def _values(args: argparse.Namespace, cluster: Cluster, jobs: tuple[Job, ...], choice: Choice) -> dict[str, Any]:
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
        "notes": list(choice.notes),
        **price_values(cluster, jobs, choice.plan, choice.price),
    }


def _text(
    args: argparse.Namespace, cluster: Cluster, jobs: tuple[Job, ...], choice: Choice, times_from: list[tuple[str, str]]
) -> str:
    step, bound = choice.price.step_seconds, choice.lower_bound
    compared = f"; the plan takes {times(step / bound)}" if bound else ""
    facts = [
        ("lower bound", f"{format_seconds(bound)} a step{compared}"),
        ("planning", f"{format_seconds(choice.seconds)}, {choice.calls} plans priced, seed {args.seed}"),
        *times_from,
        *(("note", note) for note in choice.notes),
    ]
    written = f"written to {args.output}" if args.output else "-o FILE writes the whole plan"
    return "\n".join(
        [
            f"{', '.join(job.name for job in jobs)} on {cluster.name}: planner {choice.planner}",
            "",
            *job_lines(jobs, choice.plan, choice.price),
            "",
            *columns(facts),
            "",
            *scheme_lines(choice.outcomes, choice.planner, step, choice.everywhere),
            "",
            *device_lines(cluster, choice.price, choice.timeline),
            "",
            *link_lines(choice.timeline),
            "",
            *plan_lines(choice.plan, written),
            "",
            written,
        ]
    )
