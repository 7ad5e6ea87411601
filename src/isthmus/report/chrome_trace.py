"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

There is one process for each device or host, one thread for each of its lanes (and more where messages are sent at the
same time), and one complete event ("X", in microseconds) for each task, as long as the task holds its lane. A message
is on its way until `arrives_us`. Predicted and measured times are in one file as two groups of processes with those
names.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.cost.timeline import Activity, Timeline
from isthmus.files import write_json

__all__ = ["trace_events", "write_trace"]

_LANES = ("compute", "send", "sync", "load", "store", "relay", "processor")
_MICRO = 1e6  # the format counts microseconds
_ROUNDS = ("sync", "rebuild")  # kinds whose turn is a round of a collective, not a micro-batch


def write_trace(timeline: Timeline, path: str | Path, measured: Timeline | None = None) -> None:
    """Write the trace, whole or not at all, with a measured step beside the predicted one if there is one."""
    events = trace_events(timeline, "predicted " if measured else "")
    if measured is not None:
        events += trace_events(measured, "measured ", first=1 + max((event["pid"] for event in events), default=0))
    write_json(path, {"displayTimeUnit": "ms", "traceEvents": events})


def trace_events(timeline: Timeline, group: str = "", first: int = 1) -> list[dict[str, Any]]:
    """Return the names of processes (numbered from `first`) and threads, then the events in order of their start."""
    names = dict.fromkeys(a.track for a in timeline.activities)
    tracks = {name: number for number, name in enumerate(names, start=first)}
    ordered = _rowed(timeline.activities)
    threads = dict.fromkeys((activity.track, activity.lane, row) for activity, row in ordered)
    events = [_named("process_name", tracks[track], 0, f"{group}{track}") for track in tracks]
    for track, lane, row in threads:
        events.append(_named("thread_name", tracks[track], _thread(lane, row), f"{lane} {row + 1}" if row else lane))
    return events + [_event(activity, tracks[activity.track], _thread(activity.lane, row)) for activity, row in ordered]


def _rowed(activities: Iterable[Activity]) -> list[tuple[Activity, int]]:
    """Return the activities in order of their start, each with the first row of its lane that is free."""
    ends: dict[tuple[str, str], list[float]] = {}
    found = []
    for activity in sorted(activities, key=lambda activity: (activity.start, activity.sent)):
        rows = ends.setdefault((activity.track, activity.lane), [])
        row = next((row for row, end in enumerate(rows) if end <= activity.start), len(rows))
        rows[row : row + 1] = [activity.sent]
        found.append((activity, row))
    return found


def _thread(lane: str, row: int) -> int:
    return _LANES.index(lane) + row * len(_LANES)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _event(activity: Activity, process: int, thread: int) -> dict[str, Any]:
    args: dict[str, Any] = {"job": activity.job}
    _, _, turn = activity.label.rpartition("#")
    if turn.isdecimal():
        args["round" if activity.kind in _ROUNDS else "micro_batch"] = int(turn)
    if activity.bytes:
        args |= {"bytes": activity.bytes, "arrives_us": activity.end * _MICRO}
    return {
        "ph": "X",
        "name": activity.label,
        "cat": activity.kind,
        "pid": process,
        "tid": thread,
        "ts": activity.start * _MICRO,
        "dur": (activity.sent - activity.start) * _MICRO,
        "args": args,
    }
