"""Devices that a plan does not use: why, and which links would make them useful, for people, programs and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isthmus.explain.link_trials import MARGIN, WhyUnused
from isthmus.report.columns import columns, percent
from isthmus.report.markup import Markup, prose, tag
from isthmus.units import format_seconds

__all__ = ["unused_lines", "unused_section", "unused_values"]

_TRIED = "each was found by planning anew for a cluster with such links; a longer search may find more"
_NOT_TRIED = "not tried: only for the largest groups of devices, in clusters of up to 64"
_OTHERWISE = {
    "precision": "another precision, or `mixed: true` in the job; faster links would not help",
    "memory": "more memory; faster links would not help",
    "place": "other places in the job; faster links would not help",
    "link": _NOT_TRIED,
    "slower": _NOT_TRIED,
}  # if no links were tried


def remedy(each: WhyUnused, step: float) -> str:
    """Return in words what would make the devices useful."""
    if each.useful is not None:
        saves = percent(1.0 - each.useful.step_seconds / step)
        return f"{each.useful.change}: {format_seconds(each.useful.step_seconds)} a step, {saves} less"
    if each.tried:
        return f"no faster links: even with {each.tried} no faster plan with {each.idle.them} was found"
    if each.with_them is not None and each.with_them < (1 - MARGIN) * step:
        return "the links that there are, in another plan"
    return _OTHERWISE[each.idle.reason]


def unused_lines(unused: Sequence[WhyUnused], step: float) -> list[str]:
    """Return a few lines for each group of devices: which they are, why, and what would make them useful."""
    lines = ["devices that are not used"]
    for each in unused:
        rows = [("why", each.why), ("useful with", remedy(each, step))]
        lines += [f"{each.idle}", *(f"  {line}" for line in columns(rows))]
    return [*lines, *([f"({_TRIED})"] if any(each.tried for each in unused) else [])]


def unused_values(unused: Sequence[WhyUnused], step: float) -> list[dict[str, Any]]:
    """Return the groups for `--json`."""
    return [
        {
            "devices": list(each.idle.devices),
            "reason": each.idle.reason,
            "why": each.why,
            "step_seconds": each.with_them,
            "tried": each.tried or None,
            "useful_with": None
            if each.useful is None
            else {**each.useful._asdict(), "saves": 1.0 - each.useful.step_seconds / step},
        }
        for each in unused
    ]


def unused_section(unused: Sequence[WhyUnused], step: float) -> Markup:
    """Return a table of the groups, or nothing if every device is used."""
    if not unused:
        return Markup()
    head = tag("tr", *(tag("th", word, scope="col") for word in ("devices", "why", "would be useful with")))
    rows = [
        tag("tr", tag("th", str(each.idle), scope="row"), tag("td", each.why), tag("td", prose(remedy(each, step))))
        for each in unused
    ]
    note = [tag("p", f"{_TRIED[0].upper()}{_TRIED[1:]}.", class_="note")] if any(each.tried for each in unused) else []
    return tag(
        "section",
        tag("h2", "Devices that are not used", id="unused-title"),
        tag("div", tag("table", tag("thead", head), tag("tbody", *rows), class_="words"), class_="scroll"),
        *note,
        aria_labelledby="unused-title",
    )
