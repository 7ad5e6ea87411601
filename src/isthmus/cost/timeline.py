"""A played step for people: what every device does when, and how loaded every link is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from isthmus.cost.network import SEND, SYNC
from isthmus.cost.simulate import Played
from isthmus.cost.task_list import GATE, KINDS, SYNCING

__all__ = ["Activity", "DeviceUse", "LinkUse", "Timeline", "covered_length", "timeline"]


class Activity(NamedTuple):
    """One task.

    A message holds its lane from `start` to `sent`; at `end` it has arrived and, if need be, has been added. Messages
    that do not wait for each other can be on one lane at the same time.
    """

    track: str  # device or host
    lane: str  # its lane: compute, send, sync, load, store, relay, processor
    kind: str  # one of cost.task_list.KINDS
    job: str
    label: str
    start: float
    sent: float
    end: float
    bytes: float


class DeviceUse(NamedTuple):
    """The seconds of a device in one step; sending overlaps computing, and waiting is all time without computing."""

    name: str
    computing: float
    sending: float
    waiting: float


class LinkUse(NamedTuple):
    """One shared resource: its bytes in one step, and the part of its capacity that they take."""

    name: str
    bytes: float
    capacity: float
    load: float


class Timeline(NamedTuple):
    """The timeline of one step."""

    step_seconds: float
    devices: tuple[DeviceUse, ...]  # those that compute
    links: tuple[LinkUse, ...]  # those that carry something
    activities: Sequence[Activity]


class _Activities(Sequence[Activity]):
    """The tasks of a played step, without zero-length gates; made when first used, as there can be millions."""

    def __init__(self, played: Played) -> None:
        self._played = played

    @cached_property
    def _made(self) -> tuple[Activity, ...]:
        return _activities(self._played)

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, index: int) -> Activity: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Activity]: ...
    def __getitem__(self, index: int | slice) -> Activity | Sequence[Activity]:
        return self._made[index]


def timeline(played: Played) -> Timeline:
    """Return the timeline of a played step: its length, the use of devices and links, and the activities."""
    step = float(played.times.end.max(initial=0.0))
    return Timeline(step, _devices(played, step), _links(played, step), _Activities(played))


def _devices(played: Played, step: float) -> tuple[DeviceUse, ...]:
    count = len(played.fabric.devices)
    held = _held(played)
    computing = held[:count]
    sending = held[SEND * count : (SEND + 1) * count] + held[SYNC * count : (SYNC + 1) * count]
    for first, members in played.groups.items():  # a tensor group computes as one
        for member in members:
            computing[member] = computing[first]
    return tuple(
        DeviceUse(name, float(computing[d]), float(sending[d]), step - float(computing[d]))
        for d, name in enumerate(played.fabric.devices)
        if computing[d] > 0.0 or sending[d] > 0.0
    )


def _held(played: Played) -> npt.NDArray[np.float64]:
    """Return the seconds in which each lane of the fabric has something to do."""
    lanes, times = shown_lanes(played), played.times
    held = np.zeros(played.fabric.lanes)
    if (lanes == played.tasks.tasks().lane).all():  # one thing at a time
        np.add.at(held, lanes[lanes >= 0], (times.sent - times.start)[lanes >= 0])
        return held
    order = np.lexsort((times.start, lanes))
    order = order[np.searchsorted(lanes[order], 0) :]
    spans, lanes = np.stack((times.start, times.sent), axis=1)[order], lanes[order]
    for part in np.split(np.arange(len(lanes)), np.flatnonzero(np.diff(lanes)) + 1):
        if len(part):
            held[lanes[part[0]]] = covered_length(spans[part])
    return held


def shown_lanes(played: Played) -> npt.NDArray[np.int32]:
    """Return the lane of the fabric on which each task is shown.

    That is its own lane; the lane whose queue it bypasses (`cost.task_list.beside`); or, for a message between runs,
    the sending lane of the device.
    """
    lanes, first = played.tasks.tasks().lane, played.fabric.lanes
    lanes = np.where(lanes < -1, -2 - lanes, lanes)
    between = lanes >= first
    lanes[between] = SEND * len(played.fabric.devices) + played.senders[lanes[between] - first]
    return lanes


def covered_length(spans: npt.NDArray[np.float64]) -> float:
    """Return the length of the union of intervals, [n, 2]."""
    if not len(spans):
        return 0.0
    ordered = spans[np.argsort(spans[:, 0])]
    covered = np.maximum.accumulate(ordered[:, 1])
    start = np.maximum(ordered[:, 0], np.concatenate(([-np.inf], covered[:-1])))
    return float(np.maximum(ordered[:, 1] - start, 0.0).sum())


def _links(played: Played, step: float) -> tuple[LinkUse, ...]:
    network, tasks = played.fabric.network, played.tasks.tasks()
    carried = np.zeros(len(network.capacity))
    messages = tasks.route >= 0
    for column in network.resources[tasks.route[messages]].T:
        np.add.at(carried, column[column >= 0], tasks.bytes[messages][column >= 0])
    return tuple(
        LinkUse(played.fabric.resources[r], float(carried[r]), float(network.capacity[r]), load)
        for r in np.flatnonzero(carried).tolist()
        for load in [float(carried[r] / network.capacity[r] / step)]
    )


def _activities(played: Played) -> tuple[Activity, ...]:
    tasks, times, rows = played.tasks.tasks(), played.times, played.tasks
    found, lanes = [], shown_lanes(played)
    for t in np.flatnonzero((rows.kind != GATE) & (lanes >= 0)).tolist():
        track, lane = played.fabric.lane_name(int(lanes[t]))
        kind, part = int(rows.kind[t]), int(rows.part[t])
        names = played.labels[part][1 if kind == SYNCING or KINDS[kind] == "rebuild" else 0]
        owner = names[rows.owner[t]] if 0 <= rows.owner[t] < len(names) else ""
        label = f"{KINDS[kind]} {owner} #{rows.turn[t]}" if owner else KINDS[kind]
        found.append(
            Activity(
                track, lane, KINDS[kind], played.jobs[part], label, float(times.start[t]), float(times.sent[t]),
                float(times.end[t]), float(tasks.bytes[t]) if tasks.route[t] >= 0 else 0.0,
            )
        )  # fmt: skip
    return tuple(found)
