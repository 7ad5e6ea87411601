"""The loads of every way to sync a bucket on links and devices, and when: read off simulated steps.

The simulator writes each sync as the messages that the runtime sends. So the plan is played once for each way, with all
buckets that have it synced that way, and the tasks of each bucket are added up: bytes over capacity for everything that
its messages pass, seconds for the lanes of devices that they hold, or on which others' factors are multiplied.

No forward or backward waits for a sync that is to be chosen, so the first play says when gradients are final (their
`release`), whatever is chosen. By factors each micro-batch's messages have a release of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cost.event_engine import Tasks, run
from isthmus.cost.simulate import Played
from isthmus.cost.task_list import GATE, HOST_UPDATE, LOADING, REBUILD, SYNCING, TOTALS, UPDATE
from isthmus.errors import PlanError
from isthmus.planners.search_state import SearchState
from isthmus.planners.syncs.sync_options import GIVEN, Offers

__all__ = ["Programme", "make_programme"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MOST_TIMES = 24  # release times that get constraints; more are thinned out
_MOST_ROWS = 800  # constraints; more are thinned out to those that could bind most


class Programme(NamedTuple):
    """Ways of all buckets as numbers. The choices of one bucket stand together, in the order of its offer.

    `needs[i, c] x[c]` are the seconds that choice c asks of some resource at or after some time, `base[i]` that time
    and all that the resource has to do then anyway.
    """

    bucket: Ints  # [choices]
    ways: tuple[str, ...]  # [choices]
    needs: Floats  # [rows, choices]
    base: Floats  # [rows]
    tail: Floats  # [choices] when the bucket is done if nothing else is under way
    alone: Floats  # [choices] seconds that its sync takes alone
    plays: tuple[tuple[str, float], ...]  # ways, and seconds per step with all buckets synced so

    def finish(self, chosen: Sequence[int]) -> float:
        """Return when all is done at the earliest: the largest of all constraints."""
        columns = list(chosen)
        rows = self.base + self.needs[:, columns].sum(axis=1)
        return float(max(rows.max(initial=0.0), self.tail[columns].max(initial=0.0)))


class _Read(NamedTuple):
    """The sync tasks of one play, for the buckets that are synced in its way."""

    task: Ints
    bucket: Ints  # of each task
    release: Floats  # of each task
    entries: tuple[Ints, Ints, Floats]  # of each load: position in `task`, resource, seconds
    final: Floats  # [buckets] release of the last task
    own: Floats  # [buckets] seconds from then on, alone
    alone: Floats  # [buckets] seconds in all, alone


def make_programme(state: SearchState, offers: Offers) -> Programme | None:
    """Write the programme of a plan; None where it cannot be played or there is nothing to choose."""
    plays: dict[str, Played] = {}
    for way in offers.ways:
        state.count_call()
        try:
            plays[way] = state.problem.simulator.play(offers.planned([way] * len(offers.offers), joined=False))
        except PlanError:
            if way == GIVEN:
                return None
    names = {offer.bucket: b for b, offer in enumerate(offers.offers)}
    known: dict[tuple[bytes, ...], float] = {}
    reads = {
        way: _read(played, plays[GIVEN], names, [way in offer.ways for offer in offers.offers], known)
        for way, played in plays.items()
    }
    pairs = [(b, way) for b, offer in enumerate(offers.offers) for way in offer.ways if way in reads]
    if len(pairs) == len(offers.offers):
        return None
    bucket, ways = np.array([b for b, _ in pairs]), tuple(way for _, way in pairs)
    tail = np.array([reads[way].final[b] + reads[way].own[b] for b, way in pairs])
    alone = np.array([reads[way].alone[b] for b, way in pairs])
    needs, base = _binding(*_constraints(plays[GIVEN], names, reads, pairs), tail, bucket)
    ends = tuple((way, float(played.times.end.max())) for way, played in plays.items())
    return Programme(bucket, ways, needs, base, tail, alone, ends)


def _constraints(
    played: Played, names: dict[str, int], reads: dict[str, _Read], pairs: list[tuple[int, str]]
) -> tuple[Floats, Floats]:
    """Return what each choice needs of each resource at or after each moment, and what is there without it."""
    column = {pair: c for c, pair in enumerate(pairs)}
    loads = [_columns(read, way, column) for way, read in reads.items()]
    choice, resource, seconds, release = (np.concatenate(part) for part in zip(*loads, strict=True))
    loaded, resource = np.unique(resource, return_inverse=True)
    others, moments = _others(played, names, loaded), _moments(reads)
    needs = np.zeros((len(moments), len(loaded), len(pairs)))
    for k, moment in enumerate(moments):
        late = release >= moment * (1.0 - 1e-9)
        np.add.at(needs[k], (resource[late], choice[late]), seconds[late])
    base = np.array([moment + _after(others, moment, len(loaded)) for moment in moments])
    return needs.reshape(-1, len(pairs)), base.reshape(-1)


def _columns(read: _Read, way: str, column: dict[tuple[int, str], int]) -> tuple[Ints, Ints, Floats, Floats]:
    """Return choice, resource, seconds and release of each load."""
    number = np.full(len(read.final), -1)
    for (b, other), c in column.items():
        if other == way:
            number[b] = c
    at, resource, seconds = read.entries
    return number[read.bucket[at]], resource, seconds, read.release[at]


def _moments(reads: dict[str, _Read]) -> Floats:
    """Return the times from which on work is counted: when buckets are final, and some when factors are."""
    final = np.unique(np.concatenate([read.final[np.isfinite(read.final)] for read in reads.values()]))
    early = np.unique(np.concatenate([read.release for read in reads.values()]))
    return np.unique(np.concatenate((_thinned(final, _MOST_TIMES), _thinned(early, _MOST_TIMES // 2))))


def _thinned(values: Floats, most: int) -> Floats:
    if len(values) <= most:
        return values
    return values[np.unique(np.linspace(0, len(values) - 1, most).round().astype(np.int64))]


def _binding(needs: Floats, base: Floats, tail: Floats, bucket: Ints) -> tuple[Floats, Floats]:
    """Return the constraints that can decide: none that stays below what any choice takes, no two alike."""
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    least = max(
        float((base + np.minimum.reduceat(needs, starts, axis=1).sum(axis=1)).max(initial=0.0)),
        float(np.minimum.reduceat(tail, starts).max(initial=0.0)),
    )
    most = base + np.maximum.reduceat(needs, starts, axis=1).sum(axis=1)
    kept = np.flatnonzero(most > least * (1.0 + 1e-9))
    kept = np.sort(kept[np.argsort(-most[kept], kind="stable")[:_MOST_ROWS]])
    kept = kept[_undominated(np.column_stack((base, needs))[kept])]
    return needs[kept], base[kept]


def _undominated(rows: Floats) -> Ints:
    """Return the rows that no other exceeds, or equals, everywhere."""
    kept: list[int] = []
    for i in np.argsort(-rows.sum(axis=1), kind="stable").tolist():
        if not (rows[kept] >= rows[i] - 1e-9 * np.abs(rows[i])).all(axis=1).any():
            kept.append(i)
    return np.array(sorted(kept), np.int64)


# -- reading a play


def _labels(played: Played, names: dict[str, int]) -> Ints:
    """Return the bucket of each task; -1 where it belongs to none, -2 where its sync is not offered."""
    kind, owner = played.tasks.kind, played.tasks.owner
    syncing = (kind == SYNCING) | (kind == REBUILD)
    found = np.full(len(kind), -1)
    if not syncing.any():
        return found
    rows = np.array([names.get(name, -2) for name in played.labels[0][1]])
    first = int(np.argmax(syncing))
    while first and kind[first - 1] == GATE and owner[first - 1] >= 0:  # gates of a bucket lie among its messages
        first -= 1
    inside = (np.arange(len(kind)) >= first) & (kind != LOADING) & (owner >= 0)
    found[inside] = rows[owner[inside]]
    return found


def _read(
    played: Played, base: Played, names: dict[str, int], offered: Sequence[bool], known: dict[tuple[bytes, ...], float]
) -> _Read:
    labels = _labels(played, names)
    of = np.where(labels >= 0, labels, 0)
    mine = (labels >= 0) & np.array(offered, np.bool_)[of]
    release = _releases(played, base, labels)
    final = np.full(len(names), -np.inf)
    np.maximum.at(final, labels[mine], release[mine])
    task = np.flatnonzero(mine)
    position, resource, seconds = _uses(played, task)
    own, alone = np.zeros(len(names)), np.zeros(len(names))
    for b, tasks in _groups(labels, task):
        own[b], alone[b] = _alone(played, tasks, known)
    return _Read(task, labels[task], release[task], (position, resource, seconds), final, own, alone)


def _releases(played: Played, base: Played, labels: Ints) -> Floats:
    """Return when the gradients that a task sends are final: of a bucket's tasks all at once, but of factors one by
    one.
    """
    tasks, kind = played.tasks.tasks(), played.tasks.kind
    before, after = tasks.before, tasks.after
    into = (labels[after] != -1) & (labels[before] == -1)
    release = np.full(len(kind), -np.inf)
    np.maximum.at(release, after[into], base.times.end[before[into]])
    inside = (labels[after] != -1) & (labels[before] != -1)
    for _ in range(4):  # along relays, to the products
        np.maximum.at(release, after[inside], release[before[inside]])
    rows = labels[labels >= 0]
    if len(rows):
        whole = np.full(int(rows.max()) + 1, -np.inf)
        np.maximum.at(whole, rows, release[labels >= 0])
        rebuilt = np.zeros(len(whole), np.bool_)
        rebuilt[labels[(kind == REBUILD) & (labels >= 0)]] = True
        at_once = (labels >= 0) & ~rebuilt[np.where(labels >= 0, labels, 0)]
        release[at_once] = whole[labels[at_once]]
    return release


def _uses(played: Played, task: Ints) -> tuple[Ints, Ints, Floats]:
    """Return the loads of tasks: position in `task`, resource (links, then lanes), seconds."""
    tasks, net = played.tasks.tasks(), played.fabric
    route, lane, size = tasks.route[task], tasks.lane[task], tasks.bytes[task]
    sent = route >= 0
    found = []
    for column in net.network.resources.T:
        resource = np.where(sent, column[np.where(sent, route, 0)], -1)
        at = np.flatnonzero(resource >= 0)
        found.append((at, resource[at].astype(np.int64), size[at] / net.network.capacity[resource[at]]))
    at = np.flatnonzero(lane >= 0)
    held = np.where(sent, size / net.wires.rate[np.where(sent, route, 0)], tasks.seconds[task])
    found.append((at, lane[at].astype(np.int64) + len(net.network.capacity), held[at]))
    position, resources, seconds = (np.concatenate(part) for part in zip(*found, strict=True))
    return position, resources, seconds


def _groups(labels: Ints, task: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each bucket with its tasks."""
    order = task[np.argsort(labels[task], kind="stable")]
    for tasks in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        if len(tasks):
            yield int(labels[tasks[0]]), tasks


def _alone(played: Played, task: Ints, known: dict[tuple[bytes, ...], float]) -> tuple[float, float]:
    """Return the seconds of a bucket's sync from its release on, and in all, with the network to itself.

    By factors only the last micro-batch's message and product are left at the release; in all it takes as long as what
    it uses most.
    """
    tasks, kind, net = played.tasks.tasks(), played.tasks.kind[task], played.fabric
    if (kind == REBUILD).any():
        sent = task[tasks.route[task] >= 0]
        way = tasks.route[sent]
        last = float((net.wires.latency[way] + tasks.bytes[sent] / net.wires.rate[way]).max(initial=0.0))
        last += float(tasks.seconds[task[kind == REBUILD]].max())
        _, resource, seconds = _uses(played, task)
        return last, max(last, float(np.bincount(resource, seconds).max()))
    first, count = int(task.min()), len(task)
    route, size = tasks.route[task], tasks.bytes[task]
    key = (route.tobytes(), size.tobytes(), tasks.lane[task].tobytes(), tasks.seconds[task].tobytes())
    if key not in known:
        number = np.full(int(task.max()) + 1 - first, -1, np.int32)
        number[task - first] = np.arange(count, dtype=np.int32)
        edges = (tasks.before >= first) & (tasks.before - first < len(number))
        edges &= (tasks.after >= first) & (tasks.after - first < len(number))
        before, after = number[tasks.before[edges] - first], number[tasks.after[edges] - first]
        inside = (before >= 0) & (after >= 0)
        part = Tasks(tasks.lane[task], tasks.seconds[task], size, route, before[inside], after[inside])
        known[key] = float(run(part, played.tasks.lanes, net.network).end.max())
    return known[key], known[key]


# -- what else there is to do


def _others(played: Played, names: dict[str, int], loaded: Ints) -> tuple[Ints, Floats, Floats, Floats]:
    """Return what else is sent and computed before the updates: resource, seconds, start and end."""
    labels, kind, times = _labels(played, names), played.tasks.kind, played.times
    late = np.isin(kind, (UPDATE, HOST_UPDATE, TOTALS))
    task = np.flatnonzero((labels < 0) & ~late & (times.sent > times.start))
    position, resource, seconds = _uses(played, task)
    used = np.isin(resource, loaded)
    at = task[position[used]]
    return np.searchsorted(loaded, resource[used]), seconds[used], times.start[at], times.sent[at]


def _after(others: tuple[Ints, Floats, Floats, Floats], moment: float, count: int) -> Floats:
    """Return the seconds of other tasks that are left at a moment, by resource."""
    resource, seconds, start, sent = others
    left = np.clip((sent - moment) / (sent - start), 0.0, 1.0)
    return np.asarray(np.bincount(resource, seconds * left, count), np.float64)
