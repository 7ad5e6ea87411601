"""The command `isthmus explain PLAN`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import msgspec

from isthmus.api import Simulated
from isthmus.cli.console import Answer, ProgressLine
from isthmus.cli.simulate import price_again
from isthmus.cli.summary import unused_in
from isthmus.explain.binding import Explanation, SchemeBinding, explain, explain_schemes
from isthmus.explain.link_trials import WhyUnused
from isthmus.explain.what_if import PricedPlan
from isthmus.plan.file import PlanFile, load_plan
from isthmus.planners.problem import build_problem
from isthmus.report.columns import columns, cut, percent, times, wrapped
from isthmus.report.outcomes import comparison, in_order, outcome_words, with_everywhere
from isthmus.report.plan_text import shortage_line
from isthmus.report.unused_devices import unused_lines, unused_values
from isthmus.units import format_seconds

__all__ = ["run"]

_PARTS = 6  # shown to people; programs get all
_CHANGES = 5
_TITLES = "the same plan, played again; a new plan may do better"


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Explain what binds a plan, what would help, why devices are unused and, if asked, what binds each scheme."""
    file = load_plan(args.plan)
    result = price_again(args, file, progress)
    progress.phase("Trying what would help")
    given = PricedPlan(result.plan, result.cluster, result.models, result.profile)
    found = explain(given, progress.detail)
    unused = unused_in(file, result, progress)
    schemes = _schemes(args, file, result, progress)
    values = {
        "step_seconds": found.step_seconds,
        "feasible": result.price.fits,
        "binding": found.binding._asdict(),
        "parts": _part_values(found),
        "what_if": [
            {**each._asdict(), "saves": 1.0 - each.step_seconds / found.step_seconds} for each in found.what_if
        ],
        "unused": unused_values(unused, found.step_seconds),
        "schemes": {name: _scheme_values(each) for name, each in schemes.items()},
    }
    failure = None if result.price.fits else shortage_line(result.price)
    return Answer(values=values, text="\n".join(_lines(file, result, found, unused, schemes)), failure=failure)


def _schemes(
    args: argparse.Namespace, file: PlanFile, result: Simulated, progress: ProgressLine
) -> dict[str, SchemeBinding]:
    """Return the schemes, planned again if asked, and otherwise as the file has them."""
    if args.schemes:
        progress.phase("Planning every scheme again")
        problem = build_problem(result.cluster, result.plan.jobs, result.models, file.seed, profile=result.profile)
        return explain_schemes(problem, args.budget, progress.detail)
    known = file.predicted.outcomes if file.predicted else {}
    return {name: SchemeBinding(outcome, None, "") for name, outcome in known.items()}


def _part_values(found: Explanation) -> list[dict[str, Any]]:
    return [
        {
            "what": part.what,
            "sort": part.place.sort,
            "where": str(part.place),
            "seconds": part.seconds,
            "kinds": dict(part.kinds),
        }
        for part in found.parts
    ]


def _scheme_values(scheme: SchemeBinding) -> dict[str, Any]:
    return {
        "step_seconds": scheme.outcome.seconds,
        "outcome": msgspec.structs.asdict(scheme.outcome),
        "binding": scheme.binding._asdict() if scheme.binding else None,
        "why": scheme.why or outcome_words(scheme.outcome) or None,
    }


def _lines(
    file: PlanFile,
    result: Simulated,
    found: Explanation,
    unused: Sequence[WhyUnused],
    schemes: dict[str, SchemeBinding],
) -> list[str]:
    jobs = ", ".join(job.name for job in result.plan.jobs)
    by = f", by planner {file.planner}" if file.planner else ""
    return [
        f"{jobs} on {result.cluster.name}{by}: {format_seconds(found.step_seconds)} a step",
        "",
        f"binding  {found.binding.text}",
        "",
        *_part_lines(found),
        "",
        *_change_lines(found),
        *(["", *unused_lines(unused, found.step_seconds)] if unused else []),
        *(["", *_scheme_lines(found, file, schemes)] if schemes else []),
    ]


def _part_lines(found: Explanation) -> list[str]:
    rows = [("the step", "where", "seconds", "")]
    for part in found.parts[:_PARTS]:
        share = percent(part.seconds / found.step_seconds)
        rows.append((part.what, str(part.place), format_seconds(part.seconds), share))
    rest = sum(part.seconds for part in found.parts[_PARTS:])
    if rest > 0.0:
        left = f"{len(found.parts) - _PARTS} smaller parts"
        rows.append(("rest", left, format_seconds(rest), percent(rest / found.step_seconds)))
    return columns(rows, right=(2, 3))


def _change_lines(found: Explanation) -> list[str]:
    if not found.what_if:
        return ["what would help: no change that was tried saves 1 % of the step"]
    rows = [("what would help", "step time", "saves")]
    for each in found.what_if[:_CHANGES]:
        saves = 1.0 - each.step_seconds / found.step_seconds
        rows.append((each.change, format_seconds(each.step_seconds), percent(saves)))
    return [*columns(rows, right=(1, 2)), f"({_TITLES})"]


def _scheme_lines(found: Explanation, file: PlanFile, schemes: dict[str, SchemeBinding]) -> list[str]:
    rows = [("scheme", "step time", "", "")]
    outcomes = {name: scheme.outcome for name, scheme in schemes.items()}
    everywhere = file.predicted.everywhere if file.predicted else None
    for name, outcome in in_order(with_everywhere(outcomes, everywhere)):
        seconds, why = outcome.seconds, schemes[name].why if name in schemes else ""
        shown = ("-", "") if seconds is None else (format_seconds(seconds), times(seconds / found.step_seconds))
        rows.append((name, *shown, "; ".join(text for text in (outcome_words(outcome), why) if text)))
    told = any(scheme.binding for scheme in schemes.values())
    said = comparison(outcomes, file.planner, found.step_seconds)
    return [
        *map(cut, columns(rows, right=(1, 2))),
        *(wrapped(f"({said})") if said else []),
        *([] if told else ["(--schemes says what limits each of them)"]),
    ]
