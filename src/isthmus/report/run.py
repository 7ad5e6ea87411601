"""A run beside its plan: what `isthmus train --events FILE` wrote, as a section of the page."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import FileError
from isthmus.files import expecting
from isthmus.files.document import read_text
from isthmus.plan.file import plan_digest
from isthmus.plan.types import Plan
from isthmus.report.headline import plan_jobs
from isthmus.report.markup import Markup, join, tag
from isthmus.report.text import times
from isthmus.units import format_bytes, format_seconds

__all__ = ["RunRecord", "check_run", "read_run", "run_section"]

_LARGEST = 256 * 2**20  # bytes
_POINTS = 400  # of the drawn curve
_WIDTH, _HEIGHT = 640.0, 120.0


class _Line(msgspec.Struct, frozen=True):
    """What of an event is looked at."""

    event: str
    step: int | None = None
    loss: float | None = None
    seconds: float | None = None
    bytes_sent: int | None = None
    error: str | None = None
    job: str | None = None
    model: str | None = None
    batch: int | None = None
    plan: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The steps of a run, in order; `error` says why it ended early.

    `job`, `model`, `batch` and `plan` (its digest) are of what was trained; None where the events do not say.
    """

    path: str
    job: str | None
    model: str | None
    batch: int | None
    plan: str | None
    steps: tuple[int, ...]
    losses: tuple[float | None, ...]
    seconds: tuple[float, ...]
    bytes_sent: int
    error: str | None

    @property
    def step_seconds(self) -> float:
        """The median, without the first step if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)


def read_run(path: str | Path) -> RunRecord:
    """Reads the events of a run."""
    with expecting(path, "events"):
        return _record(path)


def _record(path: str | Path) -> RunRecord:
    lines = []
    for number, text in enumerate(read_text(Path(path), _LARGEST, FileError).splitlines(), start=1):
        try:
            lines.append(msgspec.json.decode(text, type=_Line))
        except msgspec.DecodeError as problem:
            where = f"{path} line {number}"
            raise FileError("this is no event", where=where, found=str(problem), expected="one JSON object") from None
    steps = [line for line in lines if line.event == "step" and line.step is not None and (line.seconds or 0) > 0]
    if not steps:
        raise FileError("the run has no steps", where=str(path), expected="what isthmus train --events FILE wrote")
    begin = next((line for line in lines if line.event == "begin"), _Line(event="begin"))
    return RunRecord(
        path=str(path),
        job=begin.job,
        model=begin.model,
        batch=begin.batch,
        plan=begin.plan,
        steps=tuple(line.step or 0 for line in steps),
        losses=tuple(line.loss for line in steps),
        seconds=tuple(line.seconds or 0.0 for line in steps),
        bytes_sent=sum(line.bytes_sent or 0 for line in lines if line.event == "done"),
        error=next((line.error for line in lines if line.event == "end"), None),
    )


def check_run(run: RunRecord, plan: Plan) -> None:
    """Refuses a run of another job or by another plan than the one it would stand beside."""
    jobs = plan_jobs(plan)
    known: list[tuple[str, object, list[Any]]] = [
        ("job", run.job, [job.name for job in jobs]),
        ("model", run.model, [job.model for job in jobs]),
        ("batch", run.batch, [job.batch for job in jobs]),
        ("plan", run.plan, [plan_digest(plan)]),
    ]
    for what, found, expected in known:
        if found is not None and found not in expected:
            raise FileError(
                f"this run is of another {what} than the plan",
                where=run.path,
                found=_said(what, found),
                expected=" or ".join(_said(what, one) for one in expected),
                next="Give the plan that was trained, or the events of training this one",
            )


def _said(what: str, value: object) -> str:
    return f"digest {str(value)[:12]}" if what == "plan" else f"{what} {value}"


def run_section(run: RunRecord | None, predicted: float) -> Markup:
    """Measured beside predicted, and the loss over the steps; nothing where there was no run."""
    if run is None:
        return Markup()
    measured = run.step_seconds
    longest = max(measured, predicted)
    rows = [_row("measured", measured, longest, "mine"), _row("predicted", predicted, longest, "")]
    count = f"{len(run.steps)} steps" if len(run.steps) > 1 else "1 step"
    said = f"{count}, {times(measured / predicted)} the predicted time; {format_bytes(run.bytes_sent)} sent."
    ended = [tag("p", f"It ended early: {run.error}", class_="note warn")] if run.error else []
    return tag(
        "section",
        tag("h2", "The run", id="run-title"),
        tag("p", "Seconds a step: the median measured, and what was predicted for the plan's devices.", class_="lead"),
        tag("ul", *rows, class_="bars"),
        tag("p", said, class_="note"),
        *ended,
        _curve(run),
        aria_labelledby="run-title",
    )


def _row(name: str, seconds: float, longest: float, kind: str) -> Markup:
    bar = tag("i", class_="scheme", style=f"width:{100 * seconds / longest:.2f}%")
    return tag(
        "li",
        tag("span", name, class_="name"),
        tag("span", bar, class_="track"),
        tag("span", format_seconds(seconds), class_="value"),
        class_=kind or None,
    )


def _curve(run: RunRecord) -> Markup:
    """The loss over the steps, as a line."""
    known = [(step, loss) for step, loss in zip(run.steps, run.losses, strict=True) if loss is not None]
    if len(known) < 2:
        return Markup()
    shown = known[:: max(1, len(known) // _POINTS)]
    first, last = shown[0][0], shown[-1][0]
    low, high = min(loss for _, loss in shown), max(loss for _, loss in shown)
    points = " ".join(
        f"{_WIDTH * (step - first) / max(last - first, 1):.1f},{_HEIGHT * (high - loss) / ((high - low) or 1.0):.1f}"
        for step, loss in shown
    )
    line = tag("polyline", points=points)
    label = f"Loss from {known[0][1]:.4g} at step {known[0][0]} to {known[-1][1]:.4g} at step {known[-1][0]}; "
    label += f"the highest drawn is {high:.4g}, the lowest {low:.4g}."
    box = f"-2 -2 {_WIDTH + 4:.0f} {_HEIGHT + 4:.0f}"
    drawn = tag("svg", line, viewBox=box, role="img", aria_label=label, class_="curve", preserveAspectRatio="none")
    return join([drawn, tag("p", label, class_="note")])
