"""The first lines of the page: how fast the plan is (measured if there was a run), its bound, and what limits it."""

from __future__ import annotations

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline
from isthmus.model.job import Job
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Plan
from isthmus.report.columns import rate, sentence, times
from isthmus.report.limits import limit_words
from isthmus.report.markup import Markup, join, prose, tag
from isthmus.report.plan_text import precisions, shortage_line
from isthmus.report.remarks import Remark, remarks
from isthmus.report.run import RunRecord
from isthmus.units import format_seconds

__all__ = ["headline"]


def headline(
    file: PlanFile,
    cluster: Cluster,
    price: Price,
    timeline: Timeline,
    same: bool,
    match: bool | None = None,
    run: RunRecord | None = None,
) -> Markup:
    """Return the figures that people ask for first, what limits the plan, warnings, and a table of several jobs."""
    jobs = file.plan.jobs
    figures = [
        *(_predicted(jobs, price) if run is None else _measured(run, jobs, price)),
        *_bound(file, price, same),
        _figure("planner", file.planner or "by hand", f"seed {file.seed}"),
        _figure(
            "precision", " ".join(dict.fromkeys(precisions(file.plan).values())), _count(len(price.memory), cluster)
        ),
    ]
    warning = [] if price.fits else [tag("p", prose(sentence(shortage_line(price))), class_="alert", role="alert")]
    table = [_jobs(jobs, file.plan, price)] if len(jobs) > 1 else []
    words = tag("p", prose(limit_words(timeline)), class_="limit")
    said = map(_remark, remarks(file, cluster, price, timeline, match))
    return join([tag("dl", *figures, class_="figures"), words, *warning, *said, *table])


def _predicted(jobs: tuple[Job, ...], price: Price) -> list[Markup]:
    return [
        _figure("step time", format_seconds(price.step_seconds), "predicted by the simulator", "first"),
        _figure("samples a second", _rate(jobs, price), _batch(jobs)),
    ]


def _measured(run: RunRecord, jobs: tuple[Job, ...], price: Price) -> list[Markup]:
    """Return the figures that the run measured, with the prediction beside them."""
    median, predicted = run.step_seconds, run.predicted or price.step_seconds
    ratio = f"the run takes {times(median / predicted)}" if run.compares else "for other devices"
    samples = rate(sum(job.batch for job in jobs) / median)
    return [
        _figure("step time, measured", format_seconds(median), run.middle, "first"),
        _figure("samples a second, measured", samples, _batch(jobs)),
        _figure("step time, predicted", format_seconds(predicted), ratio),
    ]


def _batch(jobs: tuple[Job, ...]) -> str:
    return f"batch {sum(job.batch for job in jobs):,}"


def _figure(name: str, value: str, below: str, kind: str | None = None) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value), tag("dd", below, class_="below"), class_=kind)


def _rate(jobs: tuple[Job, ...], price: Price) -> str:
    seconds = [(job.batch, price.jobs[job.name]) for job in jobs]
    return rate(sum(batch / time for batch, time in seconds if time > 0))


def _count(used: int, cluster: Cluster) -> str:
    total = len(cluster.devices)
    return f"{used:,} device{'' if used == 1 else 's'}" if used == total else f"{used:,} of {total:,} devices"


def _bound(file: PlanFile, price: Price, same: bool) -> list[Markup]:
    bound = file.predicted.lower_bound_seconds if file.predicted and same else None
    if not bound:
        return []
    return [_figure("lower bound", format_seconds(bound), f"the plan takes {times(price.step_seconds / bound)}")]


def _remark(remark: Remark) -> Markup:
    return tag("p", prose(sentence(remark.text)), class_="note warn" if remark.kind == "warning" else "note")


def _jobs(jobs: tuple[Job, ...], plan: Plan, price: Price) -> Markup:
    computed = precisions(plan)
    head = tag(
        "tr", *(tag("th", word, scope="col") for word in ("job", "step time", "samples/s", "batch", "precision"))
    )
    rows = []
    for job in jobs:
        seconds = price.jobs[job.name]
        cells = (format_seconds(seconds), _rate((job,), price), f"{job.batch:,}", computed[job.name])
        rows.append(tag("tr", tag("th", job.name, scope="row"), *(tag("td", cell) for cell in cells)))
    return tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="scroll")
