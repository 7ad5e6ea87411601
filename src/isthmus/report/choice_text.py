"""What `isthmus plan` prints: the plan that was found, beside its bound, the usual schemes, devices and links."""

from __future__ import annotations

from isthmus.planners.portfolio import Choice
from isthmus.report.columns import columns, times
from isthmus.report.plan_text import device_lines, job_lines, link_lines, plan_lines, scheme_lines
from isthmus.units import format_seconds

__all__ = ["choice_lines"]


def choice_lines(choice: Choice, written: str) -> list[str]:
    """Return the lines that people read of a choice; `written` says where the whole plan is."""
    problem, step, bound = choice.problem, choice.price.step_seconds, choice.lower_bound
    compared = f"; the plan takes {times(step / bound)}" if bound else ""
    facts = [
        ("lower bound", f"{format_seconds(bound)} a step{compared}"),
        ("planning", f"{format_seconds(choice.seconds)}, {choice.calls} plans priced, seed {problem.seed}"),
        *choice.sources,
        *(("note", note) for note in choice.decisions),
    ]
    return [
        f"{problem.job.name} on {problem.cluster.name}: planner {choice.planner}",
        "",
        *job_lines(choice.plan.jobs, choice.plan, choice.price),
        "",
        *columns(facts),
        "",
        *scheme_lines(choice.outcomes, choice.planner, step, choice.everywhere),
        "",
        *device_lines(problem.cluster, choice.price, choice.timeline),
        "",
        *link_lines(choice.timeline),
        "",
        *plan_lines(choice.plan, written),
        "",
        written,
    ]
