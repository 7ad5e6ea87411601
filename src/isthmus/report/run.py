"""A run beside its plan: what `isthmus train --events FILE` wrote, as a section of the page."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

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

__all__ = ["Curve", "RunRecord", "check_run", "read_run", "run_section"]

_LARGEST = 256 * 2**20  # bytes
_CHANGED = 0.005  # of a step; predictions that differ by more are different


class _Line(msgspec.Struct, frozen=True):
    """The fields of an event that are used."""

    event: str
    step: int | None = None
    loss: float | None = None
    seconds: float | None = None
    metrics: dict[str, float | None] = {}
    bytes_sent: int | None = None
    error: str | None = None
    job: str | None = None
    model: str | None = None
    batch: int | None = None
    plan: str | None = None
    predicted_step_seconds: float | None = None
    shaped: bool | None = None


class Curve(NamedTuple):
    """Values at some steps, in order."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The steps of a run, in order, over all the times that it was resumed; `error` says why it ended early.

    `job`, `model`, `batch` and `plan` (its digest) are those of the last part, which is what was trained since the run
    was last resumed; they are None if the events do not say. `began` is the first step of each part, `other_plans` the
    number of earlier parts that another plan trained. `predicted` is the seconds a step that `isthmus train` predicted
    for the last part. `shaped` says whether the cluster's links were emulated; it is None if the cluster was not
    emulated at all.
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
    began: tuple[int, ...] = ()
    other_plans: int = 0
    held_out: Mapping[str, Curve] = field(default_factory=dict)  # the loss and the metrics of evaluations, by name

    @property
    def _last(self) -> int:
        """Return where the steps of the last part begin."""
        return bisect_left(self.steps, self.began[-1]) if self.began else 0

    @property
    def step_seconds(self) -> float:
        """Return the median step time of the last part, without its first step if there are others."""
        seconds = self.seconds[self._last :]
        return statistics.median(seconds[1:] or seconds)

    @property
    def middle(self) -> str:
        """Return in words the steps of which `step_seconds` is the median."""
        steps = self.steps[self._last :]
        return f"median of steps {steps[1]} to {steps[-1]}" if len(steps) > 1 else "one step"

    @property
    def compares(self) -> bool:
        """Return whether the prediction is for the devices of the run: the cluster was emulated, links included."""
        return self.shaped is True


def read_run(path: str | Path) -> RunRecord:
    """Read the events of a run, with all parts of it that one file holds."""
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
    parts = [part for part in _parts(lines) if part.steps]
    if not parts:
        raise FileError("the run has no steps", where=str(path), expected="what isthmus train --events FILE wrote")
    last, begin = parts[-1], parts[-1].begin
    other = next((p.begin for p in parts if (p.begin.job, p.begin.model) != (begin.job, begin.model)), None)
    if other is not None:
        raise FileError(
            "the file holds runs of several jobs", where=str(path), found=f"job {other.job} and job {begin.job}",
            expected="one job, begun once and then resumed", next="Give each job a file of events of its own",
        )  # fmt: skip
    kept = _joined(parts)
    return RunRecord(
        path=str(path),
        job=begin.job,
        model=begin.model,
        batch=begin.batch,
        plan=begin.plan,
        steps=tuple(line.step or 0 for line in kept),
        losses=tuple(line.loss for line in kept),
        seconds=tuple(line.seconds or 0.0 for line in kept),
        bytes_sent=sum(line.bytes_sent or 0 for line in lines if line.event == "done"),
        error=last.error,
        predicted=begin.predicted_step_seconds or None,
        shaped=begin.shaped,
        began=tuple(part.steps[0].step or 0 for part in parts),
        other_plans=sum(part.begin.plan != begin.plan for part in parts),
        held_out=_held_out(parts),
    )


@dataclass
class _Part:
    """What was written between the beginning of a run, or of its continuation, and the end of it."""

    begin: _Line
    steps: list[_Line] = field(default_factory=list)
    evaluations: list[_Line] = field(default_factory=list)
    error: str | None = None


def _parts(lines: Iterable[_Line]) -> list[_Part]:
    """Return the parts of a run: each has a first line of its own."""
    parts = [_Part(_Line(event="begin"))]
    for line in lines:
        if line.event == "begin":
            parts.append(_Part(line))
        elif line.event == "step" and line.step is not None and (line.seconds or 0) > 0:
            parts[-1].steps.append(line)
        elif line.event == "evaluation" and line.step is not None:
            parts[-1].evaluations.append(line)
        elif line.event == "end":
            parts[-1].error = line.error
    return parts


def _joined(parts: Sequence[_Part]) -> list[_Line]:
    """Return the steps of all parts; a part that was resumed from a checkpoint replaces the steps after it."""
    kept: list[_Line] = []
    for part in parts:
        first = part.steps[0].step or 0
        kept = [line for line in kept if (line.step or 0) < first] + part.steps
    return kept


def _held_out(parts: Sequence[_Part]) -> dict[str, Curve]:
    """Return the curves of the held-out loss and of each metric, without what a later part did again."""
    kept: list[_Line] = []
    for part in parts:
        first = part.steps[0].step or 0
        kept = [line for line in kept if (line.step or 0) < first] + part.evaluations
    steps = tuple(line.step or 0 for line in kept)
    names = dict.fromkeys(name for line in kept for name in line.metrics)
    curves = {name: Curve(steps, tuple(line.metrics.get(name) for line in kept)) for name in names}
    return {"loss": Curve(steps, tuple(line.loss for line in kept)), **curves} if kept else {}


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
    resumed = run.began[1:]
    held_out = run.held_out.get("loss")
    charts = [
        chart("loss", run.steps, run.losses, _short, resumed=resumed, held_out=held_out),
        *(
            chart(f"{name}, held-out", *run.held_out[name], _short, resumed=resumed)
            for name in run.held_out
            if name != "loss"
        ),
        chart("seconds a step", run.steps, run.seconds, format_seconds, least=0.0, marked=marked, resumed=resumed),
    ]
    return tag(
        "section",
        tag("h2", "The run", id="run-title"),
        tag("p", _said(run, predicted), class_="lead"),
        *([tag("p", prose(_other(priced)), class_="note")] if abs(priced - predicted) > _CHANGED * predicted else []),
        *([tag("p", prose(_resumed(run)), class_="note")] if resumed else []),
        *ended,
        tag("div", *charts, class_="charts"),
        aria_labelledby="run-title",
    )


def _short(value: float) -> str:
    return f"{value:.4g}"


def _resumed(run: RunRecord) -> str:
    """Return at which steps the run was resumed, and whether other plans trained the steps before."""
    steps = ", ".join(f"{step:,}" for step in run.began[1:])
    others = run.other_plans
    by = f" Other plans trained {others} of its {len(run.began)} parts." if others else ""
    return f"The run was resumed at step {steps}.{by} The measured step time is that of the last part."


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
