"""A priced plan as text: its speed, its bound, memory, where the time goes, and the plan itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline
from isthmus.model.job import Job
from isthmus.plan.text import render
from isthmus.plan.types import Outcome, Plan
from isthmus.report.class_names import device_classes
from isthmus.report.columns import columns, cut, excerpt, percent, rate, times, wrapped
from isthmus.report.outcomes import comparison, in_order, outcome_words, with_everywhere
from isthmus.units import format_bandwidth, format_bytes, format_seconds

__all__ = [
    "device_lines",
    "job_lines",
    "link_lines",
    "plan_lines",
    "precisions",
    "scheme_lines",
    "shortage_line",
]

_LINKS = 4  # most loaded ones shown
_EXCERPT = 40  # lines of a plan
_RUN = 4  # lines of one form in a row


def precisions(plan: Plan) -> dict[str, str]:
    """Return the precision in which each job computes."""
    return {item.job.name: item.precision for item in plan.job_parts}


def job_lines(jobs: tuple[Job, ...], plan: Plan, price: Price) -> list[str]:
    """Return a table with the step time and samples a second of each job."""
    computed = precisions(plan)
    rows = [("job", "step time", "samples/s", "batch", "precision")]
    for job in jobs:
        seconds = price.jobs[job.name]
        samples = rate(job.batch / seconds) if seconds > 0 else "-"
        rows.append((job.name, format_seconds(seconds), samples, str(job.batch), computed[job.name]))
    return columns(rows, right=(1, 2, 3))


def scheme_lines(
    outcomes: Mapping[str, Outcome], chosen: str, step_seconds: float, everywhere: Outcome | None = None
) -> list[str]:
    """Return the table of schemes, fastest first, and a sentence that compares the plan with the best of them."""
    rows = [("scheme", "devices", "step time", "")]
    for name, outcome in in_order(with_everywhere(outcomes, everywhere)):
        used, seconds = str(outcome.devices or "-"), outcome.seconds
        if seconds is None:
            rows.append((name, used, "-", "this plan; " * (name == chosen) + outcome_words(outcome)))
        else:
            ratio = "this plan" if name == chosen else times(seconds / step_seconds)
            rows.append((name, used, format_seconds(seconds), ratio))
    said = comparison(outcomes, chosen, step_seconds)
    return [*map(cut, columns(rows, right=(1, 2))), *(wrapped(f"({said})") if said else [])]


def device_lines(cluster: Cluster, price: Price, timeline: Timeline) -> list[str]:
    """Return a table of memory against its limit (of the fullest device) and mean times, by class of device."""
    rows: list[tuple[str, ...]] = [("devices", "used", "memory", "of", "", "computing", "sending", "waiting")]
    use = {device.name: device for device in timeline.devices}
    for group in device_classes(cluster):
        used = [use[name] for name in group.devices if name in use]
        memory = max((price.memory.get(name, 0.0) for name in group.devices), default=0.0)
        limit = cluster.kinds[group.kind].memory
        total = len(used) * timeline.step_seconds
        shares = [
            percent(sum(part) / total) if total else "-"
            for part in ([u.computing for u in used], [u.sending for u in used], [u.waiting for u in used])
        ]
        number = f"{len(used)}/{len(group.devices)}"
        rows.append((group.name, number, format_bytes(memory), format_bytes(limit), percent(memory / limit), *shares))
    return columns(rows, right=range(1, 8))


def link_lines(timeline: Timeline) -> list[str]:
    """Return a table of the most loaded links: their bytes in a step, and the part of it for which they are full."""
    busiest = sorted(timeline.links, key=lambda link: -link.load)[:_LINKS]
    rows = [("links", "bytes a step", "of", "load")]
    rows += [(u.name, format_bytes(u.bytes), format_bandwidth(u.capacity), percent(u.load)) for u in busiest]
    return columns(rows, right=(1, 2, 3)) if busiest else ["links: nothing is sent"]


def plan_lines(plan: Plan, more: str) -> list[str]:
    """Return the plan's own text, cut short; `more` says where the rest is."""
    return excerpt("\n".join(_gathered(render(plan).splitlines())), _EXCERPT, more)


def _gathered(lines: list[str]) -> Iterator[str]:
    """Yield the lines, but only count the middle of every long run of syncs, replicas, shards or devices."""
    for word, group in groupby(lines, key=_word):
        run = list(group)
        left = len(run) - _RUN
        yield from run[: _RUN if left > 1 else None]
        if left > 1:
            indent = " " * (len(run[0]) - len(run[0].lstrip()))
            yield f"{indent}... {left} more {word}s"


def _word(line: str) -> str:
    """Return what a line of a plan's text is about; the line of a replica begins with its device."""
    word = line.split(maxsplit=1)[0]
    return "replica" if line.startswith("    ") and word not in ("shard", "job") else word


def shortage_line(price: Price) -> str:
    """Return one line that says what does not fit."""
    parts = [
        f"{s.where} needs {format_bytes(s.needed)} and has {format_bytes(s.available)}" for s in price.shortages[:3]
    ]
    rest = len(price.shortages) - len(parts)
    return "the plan does not fit: " + "; ".join(parts) + (f"; and {rest} more" if rest else "")
