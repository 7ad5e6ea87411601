"""The trace of every golden plan, against the timeline that it was made from."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isthmus
from isthmus.cost.timeline import Timeline, covered_length
from isthmus.report.chrome_trace import trace_events, write_trace
from tests.plan.golden_files import NAMES, cluster, golden, models

Events = list[dict[str, Any]]


def played(name: str) -> Timeline:
    plan = golden(name)
    return isthmus.simulate(plan, cluster(), models(plan)).timeline


def names(events: Events, what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == what}


@pytest.mark.parametrize("name", NAMES)
def test_trace(name: str, tmp_path: Path) -> None:
    timeline, path = played(name), tmp_path / "trace.json"
    write_trace(timeline, path)
    events: Events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    processes = {process: track for (process, _), track in names(events, "process_name").items()}
    threads = names(events, "thread_name")
    step, slack = timeline.step_seconds * 1e6, timeline.step_seconds * 1e-3  # microseconds; 1e-9 of a step
    held: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for event in spans:
        held[processes[event["pid"]], threads[event["pid"], event["tid"]]].append((event["ts"], event["dur"]))
    for lane in held.values():
        ordered = sorted(lane)
        for (start, length), (following, _) in pairwise(ordered):
            assert length >= 0 and start + length <= following + slack, "one thing at a time"
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(step)
    assert max(event["args"].get("arrives_us", 0.0) for event in spans) <= step + slack
    used = {device.name: device for device in timeline.devices}
    for (track, lane), lengths in held.items():
        if lane == "compute":
            assert sum(length for _, length in lengths) == pytest.approx(used[track].computing * 1e6)
        if lane == "send":
            busy = sum(covered(held, track, kind) for kind in ("send", "sync"))
            assert busy == pytest.approx(used[track].sending * 1e6)


def covered(held: dict[tuple[str, str], list[tuple[float, float]]], track: str, lane: str) -> float:
    """Microseconds in which one of the rows of a lane is used."""
    rows = [spans for (where, row), spans in held.items() if where == track and row.startswith(lane)]
    ends = [(start, start + length) for spans in rows for start, length in spans]
    return covered_length(np.array(ends).reshape(-1, 2))


def test_events_say_what_they_are() -> None:
    timeline = played("two-depths")
    spans = [event for event in trace_events(timeline) if event["ph"] == "X"]
    assert {event["args"]["job"] for event in spans} == {activity.job for activity in timeline.activities}
    forwards = [event for event in spans if event["cat"] == "forward"]
    pipeline = golden("two-depths").parts[0]
    assert {event["args"]["micro_batch"] for event in forwards} == set(range(pipeline.micro_batches))
    assert sum(e["args"].get("bytes", 0.0) for e in spans) == pytest.approx(sum(a.bytes for a in timeline.activities))
    assert any("round" in event["args"] for event in spans if event["cat"] == "sync")
