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
from isthmus.report.chart import chart
from isthmus.report.columns import times
from isthmus.report.markup import Markup, prose, tag
from isthmus.units import format_bytes, format_seconds

__all__ = ["RunRecord", "check_run", "read_run", "run_section"]

_LARGEST = 256 * 2**20  # bytes
_CHANGED = 0.005  # of a step; predictions that differ by more are different


class _Line(msgspec.Struct, frozen=True):
    """The fields of an event that are used."""

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
    predicted_step_seconds: float | None = None
    shaped: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The steps of a run, in order; `error` says why it ended early.

    `job`, `model`, `batch` and `plan` (its digest) are those of what was trained; None if the events do not say.
    `predicted` is the seconds a step that `isthmus train` predicted. `shaped` says whether the cluster's links were
    emulated; it is None if the cluster was not emulated at all.
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
    predicted: float | None = None
    shaped: bool | None = None

    @property
    def step_seconds(self) -> float:
        """Return the median step time, without the first step if there are others."""
        return statistics.median(self.seconds[1:] or self.seconds)

    @property
    def middle(self) -> str:
        """Return in words the steps of which `step_seconds` is the median."""
        return f"median of steps {self.steps[1]} to {self.steps[-1]}" if len(self.steps) > 1 else "one step"

    @property
    def compares(self) -> bool:
        """Return whether the prediction is for the devices of the run: the cluster was emulated, links included."""
        return self.shaped is True


def read_run(path: str | Path) -> RunRecord:
    """Read the events of a run."""
    with expecting(path, "events"):
        return _record(path)


def _record(path: str | Path) -> RunRecord:
    lines = []
    for number, text in enumerate(read_text(Path(path), _LARGEST, FileError).splitlines(), start=1):
        try:
            lines.append(msgspec.json.decode(text, type=_Line))
        except msgspec.DecodeError as problem:
            where = f"{path} line {number}"
            raise FileError(
                "this is not an event", where=where, found=str(problem), expected="one JSON object"
            ) from None
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
        predicted=begin.predicted_step_seconds or None,
        shaped=begin.shaped,
    )


def check_run(run: RunRecord, plan: Plan) -> None:
    """Refuse a run of another job, or by another plan, than the plan it would be shown beside."""
    jobs = plan.jobs
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
                found=_named(what, found),
                expected=" or ".join(_named(what, one) for one in expected),
                next="Give the plan that was trained, or the events of training this one",
            )


def _named(what: str, value: object) -> str:
    return f"digest {str(value)[:12]}" if what == "plan" else f"{what} {value}"


def run_section(run: RunRecord | None, predicted: float) -> Markup:
    """Return what was measured, step by step, beside the prediction if the two compare; empty if there was no run."""
    if run is None:
        return Markup()
    priced, predicted = predicted, run.predicted or predicted
    ended = [tag("p", prose(f"It ended early: {run.error}"), class_="note warn")] if run.error else []
    marked = predicted if run.compares else None
    charts = [
        chart("loss", run.steps, run.losses, lambda loss: f"{loss:.4g}"),
        chart("seconds a step", run.steps, run.seconds, format_seconds, least=0.0, marked=marked),
    ]
    return tag(
        "section",
        tag("h2", "The run", id="run-title"),
        tag("p", _said(run, predicted), class_="lead"),
        *([tag("p", prose(_other(priced)), class_="note")] if abs(priced - predicted) > _CHANGED * predicted else []),
        *ended,
        tag("div", *charts, class_="charts"),
        aria_labelledby="run-title",
    )


def _other(priced: float) -> str:
    """Return why the rest of the page has another prediction than the run."""
    return (
        f"The run's prediction used other times than this page, which predicts {format_seconds(priced)}: `--profile` "
        "gives the page the times that were measured."
    )


def _said(run: RunRecord, predicted: float) -> str:
    measured = run.step_seconds
    took = f"{format_seconds(measured)} measured ({run.middle}), {format_seconds(predicted)} predicted"
    sent = f"{format_bytes(run.bytes_sent)} sent in all."
    if run.compares:
        return f"A step: {took} for the emulated devices, {times(measured / predicted)}. {sent}"
    where = "on this machine with links as they are" if run.shaped is False else "on other devices than the plan's"
    return f"A step: {took} for the plan's devices. The run was {where}, so the two cannot be compared. {sent}"
