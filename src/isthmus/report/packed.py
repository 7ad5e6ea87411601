"""A timeline as the page draws it: columns of whole numbers by track and lane, with tables for repeated values.

Times are counted in ticks, 10 million to a step. The activities of a lane follow each other, so each is written as the
gap since the one before it (below 0 for a message that is sent at the same time), its length, and the time for which
its message is still on its way after that. `what` numbers rows of (kind, job, label); bytes are numbered too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from isthmus.cluster.spec import Cluster
from isthmus.cost.task_list import KINDS
from isthmus.cost.timeline import Activity, Timeline
from isthmus.report.class_names import device_classes

__all__ = ["LANES", "TICKS", "kept_activities", "pack"]

TICKS = 10_000_000
LANES = ("compute", "send", "sync", "load", "store", "relay", "processor")
MOST = 350_000  # activities: about 7 MB


class _Table:
    """Repeated values, numbered in order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


class _Group(NamedTuple):
    """Tracks that are shown as one row until they are unfolded."""

    name: str
    tracks: list[int]


def pack(timeline: Timeline, cluster: Cluster, together: Mapping[str, int], most: int = MOST) -> dict[str, Any]:
    """Return the timeline for the page.

    `together` counts the devices of each tensor group, by its first device. At most `most` activities are kept: the
    longest of each track.
    """
    tracks: dict[str, list[Activity]] = {}
    for activity in timeline.activities:
        tracks.setdefault(activity.track, []).append(activity)
    kept = kept_activities(tracks, most)
    names = [name for name in (*cluster.devices, *cluster.hosts) if name in kept]
    what, sizes = _Table(), _Table()
    tick = (timeline.step_seconds or 1.0) / TICKS
    packed = [[_shown(name, together), _lanes(kept[name], what, sizes, tick)] for name in names]
    return {
        "step": timeline.step_seconds,
        "ticks": TICKS,
        "kinds": KINDS,
        "lanes": LANES,
        "what": list(what.numbers),
        "bytes": list(sizes.numbers),
        "groups": _groups(cluster, names),
        "tracks": packed,
        "dropped": len(timeline.activities) - sum(map(len, kept.values())),
    }


def kept_activities(tracks: Mapping[str, Sequence[Activity]], most: int) -> dict[str, list[Activity]]:
    """Return the longest activities of each track in order of their start.

    The limit for a track is the largest with which all tracks together have at most `most` activities.
    """
    room = _room([len(activities) for activities in tracks.values()], most)
    return {
        name: sorted(heapq.nlargest(room, activities, key=lambda a: a.end - a.start), key=lambda a: (a.start, a.sent))
        for name, activities in tracks.items()
    }


def _room(counts: Sequence[int], most: int) -> int:
    """Return the largest r for which the sum of min(count, r) is at most `most`."""
    low, high = 0, max(counts, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(count, middle) for count in counts) <= most else (low, middle - 1)
    return low


def _shown(name: str, together: Mapping[str, int]) -> str:
    return f"{name} +{together[name] - 1}" if together.get(name, 1) > 1 else name


def _lanes(activities: Iterable[Activity], what: _Table, sizes: _Table, tick: float) -> list[list[Any]]:
    """Return [lane, whats, gaps, lengths, tails, bytes] for each lane that is used."""
    lanes: dict[int, list[Any]] = {}
    ends: dict[int, int] = {}
    for a in activities:
        number = LANES.index(a.lane)
        columns = lanes.setdefault(number, [number, [], [], [], [], []])
        start = round(a.start / tick)
        if ends.get(number, 0) - start == 1:  # an overlap of one tick comes from rounding
            start += 1
        sent = max(round(a.sent / tick), start)
        row = (
            what.number((KINDS.index(a.kind), a.job, a.label)),
            start - ends.get(number, 0),
            sent - start,
            max(round(a.end / tick) - sent, 0),
            sizes.number(round(a.bytes)),
        )
        for column, value in zip(columns[1:], row, strict=True):
            column.append(value)
        ends[number] = sent
    return [lanes[number] for number in sorted(lanes)]


def _groups(cluster: Cluster, names: Sequence[str]) -> list[_Group]:
    """Return the tracks by class of device, with those of the hosts last."""
    number = {name: index for index, name in enumerate(names)}
    groups = [_Group(c.name, [number[d] for d in c.devices if d in number]) for c in device_classes(cluster)]
    groups.append(_Group("hosts", [number[host] for host in cluster.hosts if host in number]))
    return [group for group in groups if group.tracks]
