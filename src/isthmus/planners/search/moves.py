"""Small changes: of who works with whom (settings), and of finished layouts (cuts, samples, shares, recomputing).

A *setting* says which bundles form which lane, and the lane options; everything else follows (`LaneMaker.complete`).
Bundles of one host and kind are interchangeable, so settings that differ by such a swap count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from isthmus.plan.types import Layout as State
from isthmus.planners.layout.layout_types import Bundle, Groups, Lane, LaneOptions, Layout
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Problem

__all__ = [
    "AHEAD",
    "COUNTS",
    "FIRST_AHEAD",
    "STATES",
    "Grouping",
    "changed_options",
    "first_settings",
    "layout_moves",
    "setting_moves",
    "stage_moves",
]

Part = tuple[Bundle, ...]
Stages = tuple[Groups, ...]  # the replicas of each stage
STATES: tuple[State, ...] = ("replicated", "sharded-optimizer", "sharded-all")
AHEAD = (0, 1, 2, 4, 8, 16)
COUNTS = 12  # numbers of micro-batches, at most
FIRST_AHEAD = (0, 4, 12)  # for pipelines over several hosts: links take their time
_MOST_MERGES = 40  # pairs of lanes


class Grouping(NamedTuple):
    """A setting: the bundles of each lane, and the lane options. A bundle in no lane stays idle."""

    parts: tuple[Part, ...]
    options: LaneOptions

    @property
    def signature(self) -> tuple[object, ...]:
        """Return a key that is the same for settings that differ in nothing that matters."""
        lanes = Counter(tuple(sorted(Counter(_sort(bundle) for bundle in part).items())) for part in self.parts)
        return frozenset(lanes.items()), self.options


def _sort(bundle: Bundle) -> tuple[str, str, int, int]:
    return bundle.host, bundle.kind, len(bundle.groups), len(bundle.groups[0])


def first_settings(problem: Problem, bundles: Sequence[Bundle]) -> Iterator[list[Grouping]]:
    """Yield ways to form lanes, each with several options: the strongest host or region alone, single bundles, hosts,
    kinds, regions, everything in one.
    """
    regions, hosts = (_grouped(bundles, key) for key in (lambda bundle: bundle.region, lambda bundle: bundle.host))
    ways: list[list[Part]] = [[(bundle,) for bundle in bundles], hosts, regions]
    for groups in (hosts, regions):
        strongest = max(groups, key=lambda part: sum(bundle.speed for bundle in part))
        ways += [[strongest], [(bundle,) for bundle in strongest]]
    ways.append([tuple(bundles)])
    ways.append(_grouped(bundles, lambda bundle: (bundle.region, bundle.kind)))
    ways.append(_grouped(bundles, lambda bundle: bundle.kind))
    ways.append([(max(bundles, key=lambda bundle: bundle.speed),)])
    for parts in dict.fromkeys(tuple(parts) for parts in ways):
        far = any(len({bundle.host for bundle in part}) > 1 for part in parts)
        counts = micro_batch_counts(problem.job.batch, min(len(parts), problem.job.batch))
        usual = [
            LaneOptions(count, ahead) for count in counts for ahead in (FIRST_AHEAD if far and count > 1 else (0,))
        ]
        usual += [LaneOptions(count, 0, state) for count in counts[:3] for state in STATES[1:] if len(parts) == 1]
        yield [Grouping(parts, options) for options in usual]


def _grouped(bundles: Sequence[Bundle], key: Callable[[Bundle], object]) -> list[Part]:
    found: dict[object, list[Bundle]] = {}
    for bundle in bundles:
        found.setdefault(key(bundle), []).append(bundle)
    return [tuple(members) for members in found.values()]


def setting_moves(problem: Problem, setting: Grouping, bundles: Sequence[Bundle]) -> Iterator[Grouping]:
    """Yield all settings one step away; a step between lanes that are alike may lead nowhere, and is left out."""
    yield from (Grouping(setting.parts, options) for options in changed_options(problem, setting.options))
    moved = (Grouping(parts, setting.options) for parts in _regrouped(setting.parts, bundles))
    yield from (other for other in moved if other.signature != setting.signature)


def changed_options(problem: Problem, options: LaneOptions) -> Iterator[LaneOptions]:
    """Yield one more or fewer micro-batches of the usual numbers, more of them in flight, state held otherwise."""
    counts = micro_batch_counts(problem.job.batch, 1, most=COUNTS)
    near = sorted(counts, key=lambda count: abs(count - options.micro_batches))
    for count in near[:5]:
        if count != options.micro_batches:
            yield options._replace(micro_batches=count, ahead=options.ahead if count > 1 else 0)
    for ahead in AHEAD if options.micro_batches > 1 else ():
        if ahead != options.ahead:
            yield options._replace(ahead=ahead)
    for state in STATES:
        if state != options.state:
            yield options._replace(state=state)
    if options.spill:  # for want of memory; not done for speed, which depends on what else a host's cores do
        yield options._replace(spill=False)


def _regrouped(parts: tuple[Part, ...], bundles: Sequence[Bundle]) -> Iterator[tuple[Part, ...]]:
    used = {bundle for part in parts for bundle in part}
    idle = [bundle for bundle in bundles if bundle not in used]
    for a, b in list(combinations(range(len(parts)), 2))[:_MOST_MERGES]:
        rest = tuple(part for i, part in enumerate(parts) if i not in (a, b))
        yield (*rest, parts[a] + parts[b])
    for i, part in enumerate(parts):
        rest = parts[:i] + parts[i + 1 :]
        yield from ((*rest, *split) for split in _splits(part))
        if len(parts) > 1:
            yield rest
        for bundle in _one_of_each(part):
            left = tuple(other for other in part if other is not bundle)
            if not left:
                continue
            yield (*rest, left)
            yield (*rest, left, (bundle,))
            for j, other in enumerate(rest):
                yield (*rest[:j], (*other, bundle), *rest[j + 1 :], left)
    for members in (
        *_grouped(idle, lambda bundle: (bundle.host, bundle.kind)),
        *((bundle,) for bundle in _one_of_each(idle)),
    ):
        yield (*parts, members)
        for i, part in enumerate(parts):
            yield (*parts[:i], part + members, *parts[i + 1 :])


def _splits(part: Part) -> Iterator[tuple[Part, ...]]:
    """Yield a lane taken apart: by regions, hosts or kinds, into equal halves, into single bundles."""
    for key in (lambda bundle: bundle.region, lambda bundle: bundle.host, lambda bundle: bundle.kind):
        found = _grouped(part, key)
        if len(found) > 1:
            yield tuple(found)
            for members in found:
                yield members, tuple(bundle for bundle in part if bundle not in members)
    if len(part) > 2:
        yield part[::2], part[1::2]
    if len(part) > 1:
        yield tuple((bundle,) for bundle in part)


def _one_of_each(part: Sequence[Bundle]) -> list[Bundle]:
    return list({_sort(bundle): bundle for bundle in part}.values())


def stage_moves(stages: Stages, idle: Sequence[tuple[str, ...]]) -> Iterator[Stages]:
    """Yield pipelines that differ in where one or two replicas stand; of replicas of one host and kind only one is
    moved.

    Two change places, or two stages do; one goes to another stage, to a stage of its own, or stays idle; an idle one
    takes its place, or joins.
    """
    at = [(s, group) for s, stage in enumerate(stages) for group in _different(stage)]
    for (s, group), (t, other) in combinations(at, 2):
        if s != t and _device_sort(group) != _device_sort(other):
            yield _put(_put(stages, s, group, other), t, other, group)
    for s, t in combinations(range(len(stages)), 2):
        order = list(stages)
        order[s], order[t] = order[t], order[s]
        yield tuple(order)
    for s, group in at:
        left = _put(stages, s, group)
        yield left
        yield from _joins(left, group)
        for other in _different(idle):
            yield _put(stages, s, group, other)
    for group in _different(idle):
        yield from _joins(stages, group)


def _joins(stages: Stages, group: tuple[str, ...]) -> Iterator[Stages]:
    """Yield the stages with one replica more, in any stage or in one of its own."""
    for s in range(len(stages)):
        yield (*stages[:s], (*stages[s], group), *stages[s + 1 :])
    for s in range(len(stages) + 1):
        yield (*stages[:s], (group,), *stages[s:])


def _put(stages: Stages, s: int, group: tuple[str, ...], *others: tuple[str, ...]) -> Stages:
    """Return the stages with others, or nobody, where a replica stood; a stage that nobody is left in is none."""
    changed = (*(member for member in stages[s] if member != group), *others)
    return tuple(stage for stage in (*stages[:s], changed, *stages[s + 1 :]) if stage)


def _device_sort(group: tuple[str, ...]) -> tuple[str, int]:
    return group[0].rpartition("/")[0], len(group)


def _different(groups: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return list({_device_sort(group): group for group in groups}.values())


def layout_moves(layout: Layout, blocks: int) -> Iterator[Layout]:
    """Yield layouts that differ in one cut, in a few samples of two lanes or replicas, or in what is recomputed."""
    lanes = layout.lanes
    for i, lane in enumerate(lanes):
        for changed in _lane_moves(lane, blocks):
            yield layout._replace(lanes=(*lanes[:i], changed, *lanes[i + 1 :]))
    for i, j in combinations(range(len(lanes)), 2):
        for a, b in ((i, j), (j, i)):
            if lanes[a].samples > 1:
                moved = {a: _grown(lanes[a], -1), b: _grown(lanes[b], 1)}
                yield layout._replace(lanes=tuple(moved.get(k, lane) for k, lane in enumerate(lanes)))


def _lane_moves(lane: Lane, blocks: int) -> Iterator[Lane]:
    for s in range(1, len(lane.firsts)):
        for by in (-1, 1, -3, 3):
            firsts = list(lane.firsts)
            firsts[s] += by
            if firsts[s - 1] < firsts[s] < (*firsts, blocks)[s + 1]:
                yield lane._replace(firsts=tuple(firsts))
    for s, stage in enumerate(lane.stages):
        again = (*lane.recompute[:s], not lane.recompute[s], *lane.recompute[s + 1 :])
        yield lane._replace(recompute=again)
        for i, j in _unequal(stage):
            shares = [share for _, share in stage]
            shares[i] -= 1
            shares[j] += 1
            changed = tuple((group, share) for (group, _), share in zip(stage, shares, strict=True))
            if shares[i]:
                yield lane._replace(stages=(*lane.stages[:s], changed, *lane.stages[s + 1 :]))


def _unequal(stage: Sequence[tuple[tuple[str, ...], int]]) -> list[tuple[int, int]]:
    """Return pairs of replicas of different sorts, one of each pair of sorts."""
    found = {}
    for i, (group, share) in enumerate(stage):
        for j, (other, more) in enumerate(stage):
            a, b = (group[0].split("/")[1], share), (other[0].split("/")[1], more)
            if a[0] != b[0]:
                found[a, b] = (i, j)
    return list(found.values())


def _grown(lane: Lane, by: int) -> Lane:
    """Return the lane with one sample of a micro-batch more or less: in each stage on whoever has most."""
    stages = []
    for stage in lane.stages:
        most = max(range(len(stage)), key=lambda i: stage[i][1])
        changed = [(group, share + by if i == most else share) for i, (group, share) in enumerate(stage)]
        stages.append(tuple(pair for pair in changed if pair[1]))
    return lane._replace(stages=tuple(stages))
