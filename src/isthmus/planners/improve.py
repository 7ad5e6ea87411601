"""Search over layouts: settings first, then the finished layouts of the best.

A setting is completed exactly (`lanes`) and has an estimate; those that promise most are priced by the simulator. From
the best settings so far all small changes are tried, until none is left that gains, or the budget ends. Then the best
layouts are polished: one cut, one share, one stage that recomputes at a time, judged by the simulator alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from isthmus.plan.types import How, Pipeline, Plan, Sync
from isthmus.planners.budget import Search, sound
from isthmus.planners.bundles import Bundle, all_bundles, bundle_of, tensor_degrees
from isthmus.planners.lanes import BUCKETS, Lane, Lanes, Layout, Pace, lanes_plan, layout_key
from isthmus.planners.moves import (
    FIRST_AHEAD,
    Setting,
    Stages,
    first_settings,
    layout_moves,
    paces,
    setting_moves,
    stage_moves,
)
from isthmus.planners.pieces import more_slices, only_pipeline
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.shares import micro_batch_counts
from isthmus.planners.sync_ilp import best_syncs

__all__ = ["DEGREES", "Found", "Pool", "Proposals", "explore", "finish", "one_lane", "polish", "slice_stages", "ways"]

_FIRST = 6  # first settings of one way to form lanes that are priced
_STEP = 24  # changed settings that are priced, of one setting
_KEPT = 1000  # plans that are remembered
_SHAPED = 4  # layouts whose replicas change places, and that are polished
_WIDER = 48  # settings that promised too little at first, priced before all is refined again
_POOL = 10  # settings whose changes are tried before the search gives up
_WORTH = 0.999  # times the best: what counts as a gain
_SYNCED, _SYNC_GAIN = 3, 1.5  # settings whose syncs are chosen; how far from the best they may be before
_SYNC_CALLS = 12  # that choosing syncs takes at least, about
DEGREES = 3  # sizes of tensor groups that are tried
_FIRST_PART, _OWN_PART, _PROPOSE_PART = 0.3, 0.6, 0.4  # of what is left of the budget then
_CLIMB_PART, _SHAPE_PART, _POLISH_PART = 0.4, 0.5, 0.6
_LANE_PART = 0.8  # the same, of `split`
_MADE_PART = 0.5  # the same, to make layouts before any of them is priced


class Found(NamedTuple):
    """A setting, what it became, and what the simulator says."""

    setting: Setting
    bundles: tuple[Bundle, ...]
    layout: Layout
    how: How
    buckets: int
    candidate: Candidate

    @property
    def seconds(self) -> float:
        """Of one step."""
        return self.candidate.price.step_seconds


class Pool:
    """What was tried, and the best of it."""

    def __init__(self, problem: Problem, lanes: Lanes, search: Search, best: Candidate | None) -> None:
        self.problem, self.lanes, self.search, self.best = problem, lanes, search, best
        search.best = best
        self.found: list[Found] = []
        self.climbed: set[object] = set()  # settings whose changes were tried
        self.shaped: set[object] = set()  # stages that were looked at
        self.polished: set[Layout] = set()
        self.rest: list[tuple[Setting, tuple[Bundle, ...], Layout]] = []  # what promised too little to be priced
        self.width = 1  # times _POOL: settings whose changes are tried
        self._seen: set[object] = set()
        self._priced: dict[object, Candidate] = {}

    @property
    def limit(self) -> float:
        """Seconds of the best plan."""
        return self.best.price.step_seconds if self.best is not None else float("inf")

    def completed(self, settings: Iterable[Setting]) -> list[tuple[Setting, Layout]]:
        """New settings with what they become, the most promising first."""
        made = []
        for setting in settings:
            if self.search.spent():
                break
            if setting.signature in self._seen:
                continue
            self._seen.add(setting.signature)
            layout = self.lanes.complete(setting.parts, setting.pace)
            if layout is not None and max(lane.least for lane in layout.lanes) < self.limit:
                made.append((setting, layout))
        return sorted(made, key=lambda pair: pair[1].seconds)

    def price(self, setting: Setting, bundles: tuple[Bundle, ...], layout: Layout) -> frozenset[str]:
        """Keeps what fits and keeps every rule; devices that always fall short of memory, none where something fits."""
        short: frozenset[str] | None = None
        for how, buckets in ways(self.problem, layout):
            if self.search.spent():
                break
            candidate = self.price_one(setting, bundles, layout, how, buckets)
            if candidate is not None:
                missing = frozenset(shortage.where for shortage in candidate.price.shortages)
                short = missing if short is None else short & missing
        self.rank()
        return short or frozenset()

    def price_one(
        self, setting: Setting, bundles: tuple[Bundle, ...], layout: Layout, how: How, buckets: int
    ) -> Candidate | None:
        """The same, of one way to sync; None where playing it would take more than is left."""
        candidate = self.priced(layout, how, buckets)
        if candidate is not None and self.keep(candidate):
            self.found.append(Found(setting, bundles, layout, how, buckets, candidate))
        return candidate

    def priced(self, layout: Layout, how: How, buckets: int) -> Candidate | None:
        """A layout as a plan with its price; each is priced once."""
        key = layout_key(self.problem, layout, how, buckets)
        if key not in self._priced:
            candidate = self.search.price(lanes_plan(self.problem, layout, how, buckets))
            if candidate is None:
                return None
            self._priced[key] = candidate
        return self._priced[key]

    def rank(self) -> None:
        """The best first, and no more than can be of use."""
        self.found = sorted(self.found, key=lambda found: found.seconds)[:_KEPT]

    def take(self, candidate: Candidate) -> None:
        """Keeps a plan that somebody else made, where it has the form of a lane, to go on from it."""
        layout = self.lanes.from_plan(candidate.plan)
        if layout is None or len({len(group) for stage in layout.lanes[0].stages for group, _ in stage}) > 1:
            return
        used = tuple(bundle_of(self.problem, (group,)) for stage in layout.lanes[0].stages for group, _ in stage)
        taken = {device for bundle in used for device in bundle.devices}
        degree = len(used[0].groups[0])
        rest = tuple(bundle for bundle in all_bundles(self.problem, degree) if taken.isdisjoint(bundle.devices))
        how: How = "tree" if any(sync.how == "tree" for sync in _syncs(candidate.plan)) else "ring"
        self.found.append(Found(Setting((used,), layout.pace), (*used, *rest), layout, how, BUCKETS[-1], candidate))

    def keep(self, candidate: Candidate) -> bool:
        """Whether it fits; makes it the best so far if it is, and keeps every rule."""
        if not candidate.price.fits:
            return False
        if candidate.price.step_seconds < self.limit:
            if not sound(self.problem, candidate.plan):
                return False
            self.best = self.search.best = candidate
        return True


Proposals = Callable[[Pool], None]  # adds settings to the pool that others think of


def explore(pool: Pool, given: Sequence[Candidate], propose: Proposals | None = None) -> Candidate | None:
    """The best plan so far, or a faster one; all that was found is in the pool.

    Nothing is sliced: bounds of layouts know nothing of slices, so that a sliced plan would rule out too much.
    """
    problem, search = pool.problem, pool.search
    for candidate in given:
        pool.take(candidate)
    proposals = None if problem.copied else propose
    if proposals is not None and search.hasty:
        _proposed(pool, proposals)
    with search.within(_FIRST_PART):
        for degree in tensor_degrees(problem)[:DEGREES]:
            _first(pool, all_bundles(problem, degree))
    pool.rank()
    with search.within(_FIRST_PART):
        resync(pool, count=1)
    if proposals is not None and not search.hasty:  # a good one at once would end the search around lesser plans
        with search.within(_OWN_PART):
            _refine(pool)
        _proposed(pool, proposals)
    _refine(pool)
    resync(pool)
    while search.effort is None and not search.spent():  # somebody gave a budget, and some is left
        before = pool.limit
        if not _widen(pool):
            break
        _refine(pool)
        if pool.limit < before:
            resync(pool)
    return pool.best


def _proposed(pool: Pool, propose: Proposals) -> None:
    with pool.search.within(_PROPOSE_PART):
        propose(pool)
    pool.rank()


def _refine(pool: Pool) -> None:
    """Climbs, reshapes and polishes in turns, until none of them gains."""
    before = float("inf")
    while pool.limit < _WORTH * before and not pool.search.spent():
        before = pool.limit
        with pool.search.within(_CLIMB_PART):
            _climb(pool)
        with pool.search.within(_SHAPE_PART):
            _reshape(pool)
        with pool.search.within(_POLISH_PART):
            polish(pool)


def _widen(pool: Pool) -> bool:
    """Prices the most promising settings that were passed over; from then on changes of more settings are tried.

    Whether anything is left to be tried.
    """
    if not pool.rest and len(_distinct(pool.found, _KEPT)) <= _SHAPED * pool.width:
        return False
    pool.width += 1
    pool.rest.sort(key=lambda one: one[2].seconds)
    now, pool.rest = pool.rest[:_WIDER], pool.rest[_WIDER:]
    for setting, bundles, layout in now:
        if pool.search.spent():
            break
        if max(lane.least for lane in layout.lanes) < pool.limit:
            pool.price(setting, bundles, layout)
            pool.search.tell("lanes")
    return True


def _first(pool: Pool, bundles: tuple[Bundle, ...]) -> None:
    """Prices pipelines of everything, and the usual ways to form lanes."""
    _one_lane(pool, bundles)
    for settings in first_settings(pool.problem, bundles) if bundles else ():
        if pool.search.spent():
            return
        _price_first(pool, bundles, _made(pool, settings), _FIRST)


def one_lane(problem: Problem, lanes: Lanes, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """The best plan so far, or a faster one that is one pipeline of all devices (some may stay idle)."""
    pool = Pool(problem, lanes, search, given[0] if given else None)
    with search.within(_LANE_PART):
        for degree in tensor_degrees(problem)[:DEGREES]:
            _one_lane(pool, all_bundles(problem, degree))
    finish(pool)
    return pool.best


def _one_lane(pool: Pool, bundles: tuple[Bundle, ...]) -> None:
    """Prices pipelines of all bundles, those of the most promising paces first."""
    with pool.search.within(_MADE_PART):
        made, late = _pipelines(pool, bundles, spill=False), pool.search.spent()
    if not made and pool.best is None and not late:
        made = _pipelines(pool, bundles, spill=True)
    for lane, pace in sorted(made, key=lambda pair: pair[0].seconds)[:_STEP]:
        if pool.search.spent():
            return
        if lane.least < pool.limit:
            pool.price(Setting((bundles,), pace), bundles, pool.lanes.layout([lane], pace))
            pool.search.tell("split")


def _pipelines(pool: Pool, bundles: tuple[Bundle, ...], *, spill: bool) -> list[tuple[Lane, Pace]]:
    """Pipelines of all bundles in the usual paces. `spill`: the optimizer's state is in the hosts' memory."""
    batch = pool.problem.job.batch
    made: list[tuple[Lane, Pace]] = []
    for count in micro_batch_counts(batch, 1) if bundles else ():
        for ahead in FIRST_AHEAD if count > 1 else (0,):
            if pool.search.spent():
                return made
            pace = Pace(count, ahead, spill=spill)
            made += [(lane, pace) for lane in pool.lanes.pipelines(bundles, batch // count, pace)]
            pool.search.tell("split")
    return made


def resync(pool: Pool, count: int = _SYNCED) -> None:
    """How each bucket is synchronised, for the best few plans: an integer programme. Copies are synced all alike.

    Plans that gather sharded state leave little to choose, so that the best ones with whole state are looked at too.
    """
    if pool.problem.copied:
        return
    whole = [found for found in pool.found if found.layout.pace.state == "replicated" and _replicated(found.layout)]
    likely = [*_distinct(pool.found, count), *_distinct(whole, count)]
    near = [found.candidate for found in likely if found.seconds < _SYNC_GAIN * pool.limit]
    starts = list({id(candidate): candidate for candidate in (pool.best, *near) if candidate is not None}.values())
    for start in starts:
        if pool.search.spent():
            return
        pool.search.tell("syncs")
        calls = pool.search.calls_left()
        if calls is not None and calls < _SYNC_CALLS:
            return
        seconds = min(0.5, pool.search.left()) if calls is None else float("inf")
        choice = best_syncs(pool.problem, start.plan, seconds=seconds, calls=calls)
        pool.keep(Candidate(choice.plan, choice.price))


def finish(pool: Pool) -> None:
    """What a layout leaves open: how gradients are synced, and slices. Nothing is searched after that."""
    resync(pool)
    slice_stages(pool)


def slice_stages(pool: Pool) -> None:
    """Stages of the best plan run their shares in more slices, one stage at a time, as long as that gains.

    A slice's messages leave before the next one is computed; work on few samples is less efficient. Where there is one
    stage nothing is sent.
    """
    stage, since = 0, 0
    while pool.best is not None and not pool.search.spent():
        stages = len(only_pipeline(pool.best.plan).stages)
        if stages < 2 or since == stages:
            return
        plan, before = more_slices(pool.problem, pool.best.plan, stage % stages), pool.limit
        candidate = None if plan is None else pool.search.price(plan)
        pool.search.tell("slices")
        if candidate is not None and candidate.price.step_seconds < _WORTH * before and pool.keep(candidate):
            since = 0
        else:
            stage, since = stage + 1, since + 1


def _climb(pool: Pool) -> None:
    """Tries changes of the best settings, best first, until those of the whole pool have been tried."""
    while not pool.search.spent():
        best = _distinct(pool.found, _POOL * pool.width)
        start = next((found for found in best if found.setting.signature not in pool.climbed), None)
        if start is None:
            return
        pool.climbed.add(start.setting.signature)
        _price_first(pool, start.bundles, _made(pool, setting_moves(pool.problem, start.setting, start.bundles)), _STEP)


def _made(pool: Pool, settings: Iterable[Setting]) -> list[tuple[Setting, Layout]]:
    """What settings become, as far as there is time for it."""
    with pool.search.within(_MADE_PART):
        return pool.completed(settings)


def _price_first(pool: Pool, bundles: tuple[Bundle, ...], made: Sequence[tuple[Setting, Layout]], count: int) -> None:
    """Prices so many of these settings; the rest waits."""
    pool.rest += [(setting, bundles, layout) for setting, layout in made[count:]]
    for setting, layout in made[:count]:
        if pool.search.spent():
            return
        pool.price(setting, bundles, layout)
        pool.search.tell("lanes")


def _distinct(found: Sequence[Found], most: int = _POOL) -> list[Found]:
    """The best few, each setting once, as good as its best plan."""
    first: dict[object, Found] = {}
    for one in found:
        first.setdefault(one.setting.signature, one)
    return list(first.values())[:most]


def _reshape(pool: Pool) -> None:
    """Replicas change places in the best few layouts, each cut anew, as long as that gains."""
    for start in _distinct(pool.found, _SHAPED * pool.width):
        found: Found | None = start
        while found is not None and not pool.search.spent():
            found = _reshaped(pool, found)


def _reshaped(pool: Pool, found: Found) -> Found | None:
    """The first layout that gains of all that differ in where one or two replicas stand, or in their pace."""
    with pool.search.within(_MADE_PART):
        made = [layout for layout in _shapes(pool, found) if max(lane.least for lane in layout.lanes) < found.seconds]
    for layout in sorted(made, key=lambda layout: layout.seconds)[:_STEP]:
        if pool.search.spent():
            return None
        candidate = pool.priced(layout, found.how, found.buckets)
        pool.search.tell("stages")
        gains = candidate is not None and candidate.price.step_seconds < _WORTH * found.seconds
        if candidate is not None and gains and pool.keep(candidate):
            parts = tuple(
                tuple(bundle_of(pool.problem, (group,)) for stage in lane.stages for group, _ in stage)
                for lane in layout.lanes
            )
            changed = found._replace(setting=Setting(parts, layout.pace), layout=layout, candidate=candidate)
            pool.found = sorted([*pool.found, changed], key=lambda one: one.seconds)
            return changed
    return None


def _shapes(pool: Pool, found: Found) -> Iterator[Layout]:
    """Layouts one step away that nobody has looked at."""
    lanes, pace = found.layout.lanes, found.layout.pace
    staged = [tuple(tuple(group for group, _ in stage) for stage in lane.stages) for lane in lanes]
    used = {group for stages in staged for stage in stages for group in stage}
    idle = [group for bundle in found.bundles for group in bundle.groups if group not in used]
    for other in paces(pool.problem, pace):
        if len(lanes) == 1 and _fresh(pool.shaped, staged, other):
            yield from _settled(pool, found, 0, staged[0], other)
    for i, stages in enumerate(staged):
        for moved in stage_moves(stages, idle):
            if pool.search.spent():
                return
            if moved and _fresh(pool.shaped, [*staged[:i], moved, *staged[i + 1 :]], pace):
                yield from _settled(pool, found, i, moved, pace)


def _fresh(seen: set[object], staged: Sequence[Stages], pace: Pace) -> bool:
    """Whether stages of these sorts of devices were not looked at before; they are now."""
    key = (
        pace,
        frozenset(
            Counter(
                tuple(tuple(sorted((group[0].rpartition("/")[0], len(group)) for group in stage)) for stage in stages)
                for stages in staged
            ).items()
        ),
    )
    if key in seen:
        return False
    seen.add(key)
    return True


def _settled(pool: Pool, found: Found, i: int, stages: Stages, pace: Pace) -> Iterator[Layout]:
    """The layout with lane i made of these stages, if it can hold the model."""
    lanes = found.layout.lanes
    samples = lanes[i].samples if len(lanes) > 1 else pool.problem.job.batch // pace.micro_batches
    lane = pool.lanes.settled(stages, samples, pace, len(lanes) - 1)
    if lane is not None:
        yield pool.lanes.layout((*lanes[:i], lane, *lanes[i + 1 :]), pace)


def polish(pool: Pool) -> None:
    """One change of a finished layout at a time, as long as one gains."""
    for start in _distinct(pool.found, _SHAPED * pool.width):
        if start.layout in pool.polished or pool.search.spent():
            continue
        pool.polished.add(start.layout)
        current, seconds = start.layout, start.seconds
        moved = True
        while moved and not pool.search.spent():
            moved = False
            for changed in layout_moves(current, len(pool.problem.graph.blocks)):
                if pool.search.spent():
                    return
                timed = pool.lanes.layout(changed.lanes, changed.pace)
                if max(lane.least for lane in timed.lanes) >= seconds:
                    continue
                candidate = pool.priced(timed, start.how, start.buckets)
                pool.search.tell("polish")
                gains = candidate is not None and candidate.price.step_seconds < _WORTH * seconds
                if candidate is not None and gains and pool.keep(candidate):
                    current, seconds, moved = timed, candidate.price.step_seconds, True
                    break


def _syncs(plan: Plan) -> tuple[Sync, ...]:
    return tuple(sync for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs)


def ways(problem: Problem, layout: Layout) -> list[tuple[How, int]]:
    """How gradients are synced first, and in how many buckets: around rings; where regions share them, by trees too."""
    regions = {
        problem.cluster.host_of(group[0]).region for lane in layout.lanes for stage in lane.stages for group, _ in stage
    }
    several = _replicated(layout)
    trees = len(regions) > 1 and (several or problem.copied) and layout.pace.state != "sharded-all"
    hows: tuple[How, ...] = ("ring", "tree") if trees else ("ring",)
    return list(product(hows, BUCKETS if several and not problem.copied else BUCKETS[:1]))


def _replicated(layout: Layout) -> bool:
    return len(layout.lanes) > 1 or any(len(stage) > 1 for stage in layout.lanes[0].stages)
