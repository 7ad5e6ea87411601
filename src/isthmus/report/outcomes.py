"""The outcomes of the schemes, in the same words everywhere, and how a plan compares with the best scheme."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.plan.types import Outcome
from isthmus.report.columns import times
from isthmus.units import format_seconds

__all__ = ["comparison", "in_order", "outcome_words", "with_everywhere"]


def with_everywhere(outcomes: Mapping[str, Outcome], everywhere: Outcome | None) -> dict[str, Outcome]:
    """Return the outcomes that a table shows: those of the schemes and, if it was priced, of DDP on all devices."""
    if everywhere is None:
        return dict(outcomes)
    return {**outcomes, f"DDP on all {everywhere.devices}" if everywhere.devices else "DDP on all": everywhere}


def in_order(outcomes: Mapping[str, Outcome]) -> list[tuple[str, Outcome]]:
    """Return the schemes in the order shown: found ones first, by speed, and those that cannot run last."""
    return sorted(outcomes.items(), key=lambda item: _rank(item[1]))


def _rank(outcome: Outcome) -> tuple[int, float]:
    order = ("found", "unfinished", "cannot run").index(outcome.state)
    seconds = outcome.seconds if outcome.state == "found" else outcome.best_so_far
    return order, float("inf") if seconds is None else seconds


def outcome_words(outcome: Outcome) -> str:
    """Return why a scheme has no seconds, or nothing if it has."""
    if outcome.state == "found":
        return ""
    if outcome.state == "cannot run":
        return f"cannot run: {outcome.reason}"
    best = "nothing found" if outcome.best_so_far is None else format_seconds(outcome.best_so_far)
    return f"not searched to the end, best so far: {best}" + (f" ({outcome.reason})" if outcome.reason else "")


def comparison(outcomes: Mapping[str, Outcome], chosen: str, step_seconds: float) -> str | None:
    """Return how a plan compares with the best scheme that was searched to its end, and which schemes were not."""
    found = {name: outcome.seconds for name, outcome in outcomes.items() if outcome.seconds is not None}
    left = [name for name, outcome in outcomes.items() if outcome.state == "unfinished"]
    unsaid = f"{', '.join(left)} {'was' if len(left) == 1 else 'were'} not searched to the end" if left else ""
    if not found or not step_seconds:
        return f"not compared with a scheme: {unsaid}" if unsaid else None
    best = min(found, key=lambda name: (found[name], name != chosen))
    if best == chosen:
        said = f"the plan is that of the best scheme, {best}"
    elif found[best] < step_seconds:
        said = f"the best scheme, {best}, is {times(step_seconds / found[best])} as fast as the plan"
    else:
        said = f"the plan is {times(found[best] / step_seconds)} as fast as the best scheme, {best}"
    return f"{said}, of those searched to the end; {unsaid}" if unsaid else said
