"""A priced plan as one page of HTML, which contains everything, loads nothing from outside and sends nothing anywhere.

Bars and the map are drawn here, as HTML and SVG that need no script. The timeline is packed as JSON and drawn by the
page's own script, which also shows tooltips. Styles, scripts and the frame of the page are in `page/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import msgspec

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline
from isthmus.explain.link_trials import WhyUnused
from isthmus.files import write_whole
from isthmus.plan.file import PlanFile
from isthmus.plan.text import render
from isthmus.report.bars import groups_of, memory_bars, memory_limits, scheme_bars, spent_time, time_bars
from isthmus.report.footer import notes
from isthmus.report.headline import headline
from isthmus.report.map import map_figure
from isthmus.report.markup import Markup, escape, tag
from isthmus.report.outcomes import comparison, with_everywhere
from isthmus.report.packed import pack
from isthmus.report.run import RunRecord, run_section
from isthmus.report.unused_devices import unused_section
from isthmus.units import format_seconds

__all__ = ["Subject", "report_html", "write_report"]

_SCRIPTS = ("page.js", "gantt.js")
_NONE_FASTER = "no plan on these devices is faster."
_LONGEST_TEXT = 1_000_000  # characters of a plan


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a report: a plan file, and what the simulator says of its plan on a cluster.

    `same` says whether that is the cluster for which the plan was made. `match` says whether cluster, jobs, models and
    profile are all those of the plan (None: the file does not say). The file's bound and schemes apply only if neither
    is false.
    """

    file: PlanFile
    cluster: Cluster
    price: Price
    timeline: Timeline
    made: str  # when, and by which version, the page was made
    same: bool = True
    match: bool | None = None
    times: tuple[tuple[str, str], ...] = ()  # where its times come from
    run: RunRecord | None = None  # what happened when the plan was run
    unused: tuple[WhyUnused, ...] = ()  # why devices are not used

    @property
    def compares(self) -> bool:
        """Return whether the file's own prediction was made under the same conditions as this one."""
        return self.same and self.match is not False


def write_report(subject: Subject, path: str | Path) -> None:
    """Write the page, whole or not at all."""
    write_whole(Path(path), report_html(subject).encode())


def report_html(subject: Subject) -> str:
    """Return the page as HTML."""
    plan, cluster, timeline = subject.file.plan, subject.cluster, subject.timeline
    groups = groups_of(plan)
    packed = pack(timeline, cluster, {first: len(devices) for first, devices in groups.items()})
    names = ", ".join(job.name for job in plan.jobs)
    facts = (*subject.times, *_no_schemes(subject))
    return Template(_piece("frame.html")).substitute(
        title=escape(f"{names} on {cluster.name}"),
        style=_piece("style.css"),
        script="\n".join(_piece(name) for name in _SCRIPTS),
        headline=headline(subject.file, cluster, subject.price, timeline, subject.compares, subject.match, subject.run),
        run=run_section(subject.run, subject.price.step_seconds),
        schemes=_schemes(subject),
        time=time_bars(cluster, spent_time(timeline, groups), timeline.step_seconds or 1.0),
        unused=unused_section(subject.unused, subject.price.step_seconds),
        map=map_figure(cluster, timeline),
        timeline_notes=_timeline_notes(packed),
        memory=memory_bars(cluster, subject.price.memory, memory_limits(plan, cluster)),
        plan=_plan_text(subject.file),
        notes=notes(subject.file, cluster, facts, subject.made, subject.same, subject.run is not None),
        data=_json(packed),
    )


def _piece(name: str) -> str:
    return (files("isthmus.report") / "page" / name).read_text("utf-8")


def _json(value: Any) -> Markup:
    """Return JSON that is safe in a script element: nothing in it can end the element or begin another."""
    text = msgspec.json.encode(value).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _schemes(subject: Subject) -> Markup:
    """Return the section of schemes, which is empty if there is nothing to compare with."""
    predicted = subject.file.predicted if subject.compares else None
    if predicted is None or not predicted.outcomes:
        return Markup()
    bound = predicted.lower_bound_seconds
    shown = with_everywhere(predicted.outcomes, predicted.everywhere)
    bars = scheme_bars(shown, subject.file.planner, subject.price.step_seconds, bound)
    said = []
    if compared := comparison(predicted.outcomes, subject.file.planner, subject.price.step_seconds):
        said.append(f"{compared[0].upper()}{compared[1:]}.")
    if bound is not None:
        said.append(f"The line is the lower bound, {format_seconds(bound)}: {_NONE_FASTER}")
    return tag(
        "section",
        tag("h2", "Beside the usual schemes", id="schemes-title"),
        tag("p", "Predicted seconds a step, and how many devices are used. Shorter is better.", class_="lead"),
        bars,
        *(tag("p", text, class_="note") for text in said),
        aria_labelledby="schemes-title",
    )


def _no_schemes(subject: Subject) -> list[tuple[str, str]]:
    """Return as a fact why no schemes are shown."""
    if subject.file.predicted and subject.file.predicted.outcomes:
        said = [] if subject.compares else ["the plan file has them, but they were priced with other inputs"]
    else:
        said = ["the plan file holds no schemes to compare with; isthmus plan -o FILE.json writes them"]
    return [("schemes", text) for text in said]


def _timeline_notes(packed: dict[str, Any]) -> Markup:
    if not packed["dropped"]:
        return Markup()
    text = f"{packed['dropped']:,} activities are left out to keep this page small: the shortest of each track. "
    return tag("p", text + "isthmus simulate PLAN --trace FILE writes all of them.", class_="note warn")


def _plan_text(file: PlanFile) -> Markup:
    text = render(file.plan)
    left = len(text) - _LONGEST_TEXT
    shown = text if left <= 0 else text[:_LONGEST_TEXT] + f"\n... {left:,} more characters are in the plan file\n"
    lines = f"{text.count(chr(10)):,} lines"
    return tag(
        "details",
        tag("summary", "The plan as text ", tag("small", lines)),
        tag("button", "Copy", type="button", id="copy"),
        tag("pre", tag("code", shown, id="plan-text"), tabindex="0"),
        open="open" if text.count("\n") <= 40 else None,
    )
