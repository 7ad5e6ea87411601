"""Bars for memory against its limits, for where the time goes, and for the schemes; HTML that fits any width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.cost.timeline import Timeline, covered_length
from isthmus.plan.types import Outcome, Pipeline, Plan, Pool
from isthmus.report.class_names import device_classes
from isthmus.report.columns import percent, times
from isthmus.report.markup import Markup, join, tag
from isthmus.report.outcomes import in_order, outcome_words
from isthmus.units import format_bytes, format_seconds

__all__ = [
    "Spent",
    "groups_of",
    "memory_bars",
    "memory_limits",
    "scheme_bars",
    "spent_time",
    "time_bars",
]

_EACH = 16  # devices that are shown one by one; more are shown by class
_ROWS = 40
_TIGHT = 0.9
_LONGEST = 2.5  # times the plan's step; longer bars are cut
_SENDING = ("send", "sync")


class Spent(NamedTuple):
    """How one device spends a step: three times that add up to it; sending counts only while nothing is computed."""

    computing: float
    sending: float
    waiting: float


def groups_of(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the tensor groups of a plan by their first device."""
    pipelines = [part for part in plan.parts if isinstance(part, Pipeline)]
    replicas = [replica for part in pipelines for stage in part.stages for replica in stage.replicas]
    return {replica.devices[0]: replica.devices for replica in replicas if len(replica.devices) > 1}


def memory_limits(plan: Plan, cluster: Cluster) -> dict[str, float]:
    """Return the bytes of memory that each device may use: its own memory, or the cap of its pool."""
    limits: dict[str, float] = {name: cluster.kind_of(name).memory for name in cluster.devices}
    for part in plan.parts:
        if isinstance(part, Pool):
            limits |= zip(part.devices, part.caps, strict=True)
    return limits


def spent_time(timeline: Timeline, groups: Mapping[str, tuple[str, ...]]) -> dict[str, Spent]:
    """Return how each device spends the step; sending is the union of what it computes and sends, less computing."""
    first = {member: devices[0] for devices in groups.values() for member in devices}
    computed: dict[str, list[tuple[float, float]]] = {}
    sent: dict[str, list[tuple[float, float]]] = {}
    for a in timeline.activities:
        if a.lane == "compute" or a.lane in _SENDING:
            (computed if a.lane == "compute" else sent).setdefault(a.track, []).append((a.start, a.sent))
    found = {}
    for use in timeline.devices:
        spans = computed.get(first.get(use.name, use.name), []) + sent.get(use.name, [])
        sending = max(0.0, covered_length(np.array(spans).reshape(-1, 2)) - use.computing)
        found[use.name] = Spent(use.computing, sending, max(0.0, timeline.step_seconds - use.computing - sending))
    return found


def _rows(cluster: Cluster, used: Mapping[str, object]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the devices that are used, one by one if they are few, else by class."""
    if len(used) <= _EACH:
        return [(name, (name,)) for name in cluster.devices if name in used]
    classes = [(c.name, tuple(name for name in c.devices if name in used)) for c in device_classes(cluster)]
    return [(name, devices) for name, devices in classes if devices]


def _bars(rows: Sequence[Markup]) -> Markup:
    left = len(rows) - _ROWS
    more = [tag("p", f"and {left} more", class_="note")] if left > 0 else []
    return join([tag("ul", *rows[:_ROWS], class_="bars"), *more])


def _row(name: str, number: int, track: Sequence[str], value: str, tip: str, kind: str = "") -> Markup:
    count = [tag("small", f" × {number}")] if number > 1 else []
    return tag(
        "li",
        tag("span", name, *count, class_="name", title=name),
        tag("span", *track, class_="track"),
        tag("span", value, class_="value"),
        class_=kind or None,
        data_tip=tip,
        tabindex="0",
    )


def _fill(kind: str, part: float) -> Markup:
    return tag("i", class_=kind, style=f"width:{100 * min(max(part, 0.0), 1.0):.2f}%")


def memory_bars(cluster: Cluster, memory: Mapping[str, float], limits: Mapping[str, float]) -> Markup:
    """Draw the predicted peak against the limit, for each device or for the fullest device in each class."""
    rows = []
    for name, devices in _rows(cluster, memory):
        fullest = max(devices, key=lambda device: memory[device] / limits[device])
        peak, limit = memory[fullest], limits[fullest]
        kind = "over" if peak > limit else "tight" if peak > _TIGHT * limit else ""
        free = format_bytes(max(0.0, limit - peak))
        tip = f"{fullest}\npeak {format_bytes(peak)}\nlimit {format_bytes(limit)}\nfree {free}"
        if len(devices) > 1:
            tip += f"\nleast full of {len(devices)}: {format_bytes(min(memory[device] for device in devices))}"
        value = f"{format_bytes(peak)} of {format_bytes(limit)}"
        rows.append(_row(name, len(devices), [_fill("memory", peak / limit)], value, tip, kind))
    return _bars(rows)


def time_bars(cluster: Cluster, spent: Mapping[str, Spent], step: float) -> Markup:
    """Draw the step of each device, or of the mean device of each class: computing, only sending, waiting."""
    rows = []
    for name, devices in _rows(cluster, spent):
        parts = [sum(column) / len(devices) for column in zip(*(spent[device] for device in devices), strict=True)]
        shares = [part / step for part in parts]
        words = [
            f"{kind} {percent(share)}, {format_seconds(part)}"
            for kind, share, part in zip(("computing", "only sending", "waiting"), shares, parts, strict=True)
        ]
        track = [_fill("computing", shares[0]), _fill("sending", shares[1])]
        mean = [f"mean of {len(devices)}"] if len(devices) > 1 else []
        rows.append(_row(name, len(devices), track, percent(shares[0]), "\n".join([name, *mean, *words])))
    return _bars(rows)


def scheme_bars(outcomes: Mapping[str, Outcome], chosen: str, step: float, bound: float | None) -> Markup:
    """Draw the schemes, fastest first (those without seconds last), with a line at the bound that no plan can beat."""
    all_ = {**outcomes, chosen or "this plan": Outcome(state="found", seconds=step)}
    longest = max(outcome.seconds for outcome in all_.values() if outcome.seconds is not None)
    scale = min(longest, _LONGEST * step)
    line = [tag("b", class_="bound", style=f"left:{100 * bound / scale:.2f}%")] if bound is not None else []
    rows = []
    for name, outcome in in_order(all_):
        seconds = outcome.seconds
        if seconds is None:
            short = "cannot run" if outcome.state == "cannot run" else "not searched to the end"
            rows.append(_row(name, 1, line, short, f"{name}\n{outcome_words(outcome)}", "none"))
            continue
        mine = name == (chosen or "this plan")
        shown = f"{name}, {outcome.devices}" if outcome.devices and str(outcome.devices) not in name else name
        ratio = "this plan" if mine else times(seconds / step)
        kind = "mine" if mine else "cut" if seconds > scale else ""
        on = f"\non {outcome.devices} device{'s' * (outcome.devices > 1)}" if outcome.devices else ""
        tip = f"{name}\n{format_seconds(seconds)} a step\n{ratio}{on}"
        rows.append(
            _row(shown, 1, [_fill("scheme", seconds / scale), *line], f"{format_seconds(seconds)} · {ratio}", tip, kind)
        )
    return _bars(rows)
