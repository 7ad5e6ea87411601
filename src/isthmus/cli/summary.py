"""What several commands report of a priced plan: figures for programs, facts for people."""

from __future__ import annotations

from typing import Any

from isthmus.api import Simulated
from isthmus.cli.console import ProgressLine
from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.explain.link_trials import WhyUnused, explain_unused
from isthmus.model.job import Job
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Pipeline, Plan
from isthmus.planners.problem import make_problem
from isthmus.report.plan_text import precisions
from isthmus.report.remarks import Remark, remarks
from isthmus.report.times import times_facts

__all__ = ["facts_of", "price_values", "remarks_on", "unused_in"]


def remarks_on(file: PlanFile, result: Simulated) -> list[Remark]:
    """Return remarks on what to beware of in a plan that was priced again."""
    return remarks(file, result.cluster, result.price, result.timeline, result.inputs_match)


def facts_of(file: PlanFile, result: Simulated, profile: str) -> list[tuple[str, str]]:
    """Return where the times come from, and then the remarks, in two columns; `profile` names the measured times."""
    return [*times_facts(result.times, result.profile, profile), *remarks_on(file, result)]


def unused_in(file: PlanFile, result: Simulated, progress: ProgressLine) -> tuple[WhyUnused, ...]:
    """Return why devices are unused, and which links would make them useful, for a plan of one job in one pipeline."""
    jobs, parts = result.plan.jobs, result.plan.parts
    if len(jobs) != 1 or len(parts) != 1 or not isinstance(parts[0], Pipeline):
        return ()
    (job,), precision = jobs, parts[0].precision
    problem = make_problem(result.cluster, job, result.models[job.name], precision, file.seed, result.profile)
    return explain_unused(problem, result.price, progress.detail)


def price_values(cluster: Cluster, jobs: tuple[Job, ...], plan: Plan, price: Price) -> dict[str, Any]:
    """Return step times, and memory with its limit by device; `precision` is null if the jobs differ in it."""
    computed = precisions(plan)
    distinct = set(computed.values())
    return {
        "step_seconds": price.step_seconds,
        "feasible": price.fits,
        "precision": distinct.pop() if len(distinct) == 1 else None,
        "jobs": {
            job.name: {
                "model": job.model,
                "batch": job.batch,
                "precision": computed[job.name],
                "step_seconds": price.jobs[job.name],
            }
            for job in jobs
        },
        "memory": dict(price.memory),
        "limits": {device: cluster.kind_of(device).memory for device in price.memory},
        "shortages": [shortage._asdict() for shortage in price.shortages],
    }
