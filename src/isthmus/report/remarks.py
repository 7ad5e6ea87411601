"""Remarks on a plan that was priced again; they are the same in the terminal and on the page."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline
from isthmus.plan.file import PlanFile
from isthmus.planners.notes import assumed
from isthmus.report.columns import times
from isthmus.units import format_seconds

__all__ = ["Remark", "remarks"]

_CHANGED = 1e-9  # of a step: a price that differs by more is said to differ


class Remark(NamedTuple):
    """A sentence without its full stop; `kind` is `note` or `warning`."""

    kind: str
    text: str


def remarks(
    file: PlanFile, cluster: Cluster, price: Price, timeline: Timeline, match: bool | None = None
) -> list[Remark]:
    """Return remarks: the file's own prediction if it differs, other inputs than the plan's, and what was assumed.

    `match` says whether the plan was made from exactly what it is priced with. Memory that does not suffice is not
    among the remarks, because it is a failure.
    """
    found, before = [], file.predicted.step_seconds if file.predicted else None
    if before and abs(price.step_seconds - before) > _CHANGED * before:
        ratio = times(price.step_seconds / before)
        found.append(Remark("note", f"the plan file predicts {format_seconds(before)}; the time here is {ratio} that"))
    if match is False:
        text = "the plan was made from another cluster, job, model or profile than those priced here"
        found.append(Remark("warning", text))
    return found + [Remark("note", text) for text in assumed(cluster, timeline)]
