"""Search over layouts: settings first, then the finished layouts of the best.

A setting is completed exactly (`side_by_side`) and has an estimate; those that promise most are priced by the
simulator. From the best settings so far all small changes are tried, until none is left that gains, or the budget ends.
Then the best layouts are polished: one cut, one share, one stage that recomputes at a time, judged by the simulator
alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.planners.layout.device_groups import all_bundles, bundle_of, tensor_degrees
from isthmus.planners.layout.layout_types import Bundle, Lane, LaneSettings, Layout
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Candidate
from isthmus.planners.search.candidates import Candidates, Tried, distinct, resync
from isthmus.planners.search.moves import (
    FIRST_AHEAD,
    Grouping,
    Stages,
    first_settings,
    layout_moves,
    paces,
    setting_moves,
    stage_moves,
)
from isthmus.planners.search_constants import (
    CHANGED_PRICED,
    CLIMB_PART,
    DEGREES,
    FIRST_PART,
    FIRST_PRICED,
    GAIN,
    KEPT,
    MAKE_PART,
    ONE_LANE_PART,
    OWN_PART,
    POLISH_PART,
    POOL,
    PROPOSE_PART,
    SHAPE_PART,
    SHAPED,
    WIDER_PRICED,
)

__all__ = ["Proposals", "explore", "one_lane", "polish"]


Proposals = Callable[[Candidates], None]  # adds settings to the pool that others think of


def explore(pool: Candidates, given: Sequence[Candidate], propose: Proposals | None = None) -> Candidate | None:
    """Return the best plan so far, or a faster one; all that was found is in the pool.

    Nothing is sliced: bounds of layouts know nothing of slices, so that a sliced plan would rule out too much.
    """
    problem, search = pool.problem, pool.search
    for candidate in given:
        pool.take(candidate)
    proposals = None if search.state.copied else propose
    if proposals is not None and search.hasty:
        _proposed(pool, proposals)
    with search.within(FIRST_PART):
        for degree in tensor_degrees(problem)[:DEGREES]:
            _first(pool, all_bundles(problem, degree))
    pool.rank()
    with search.within(FIRST_PART):
        resync(pool, count=1)
    if proposals is not None and not search.hasty:  # a good one at once would end the search around lesser plans
        with search.within(OWN_PART):
            _refine(pool)
        _proposed(pool, proposals)
    _refine(pool)
    resync(pool)
    while search.thorough and not search.spent():
        before = pool.limit
        if not _widen(pool):
            break
        _refine(pool)
        if pool.limit < before:
            resync(pool)
    return pool.best


def _proposed(pool: Candidates, propose: Proposals) -> None:
    with pool.search.within(PROPOSE_PART):
        propose(pool)
    pool.rank()


def _refine(pool: Candidates) -> None:
    """Climb, reshape and polish in turns, until none of them gains."""
    before = float("inf")
    while pool.limit < GAIN * before and not pool.search.spent():
        before = pool.limit
        with pool.search.within(CLIMB_PART):
            _climb(pool)
        with pool.search.within(SHAPE_PART):
            _reshape(pool)
        with pool.search.within(POLISH_PART):
            polish(pool)


def _widen(pool: Candidates) -> bool:
    """Price the most promising settings that were passed over; from then on changes of more settings are tried.

    Return whether anything is left to be tried.
    """
    if not pool.rest and len(distinct(pool.found, KEPT)) <= SHAPED * pool.width:
        return False
    pool.width += 1
    pool.rest.sort(key=lambda one: one[2].seconds)
    now, pool.rest = pool.rest[:WIDER_PRICED], pool.rest[WIDER_PRICED:]
    for setting, bundles, layout in now:
        if pool.search.spent():
            break
        if max(lane.least for lane in layout.lanes) < pool.limit:
            pool.price(setting, bundles, layout)
            pool.search.tell("lanes")
    return True


def _first(pool: Candidates, bundles: tuple[Bundle, ...]) -> None:
    """Price pipelines of everything, and the usual ways to form lanes."""
    _one_lane(pool, bundles)
    for settings in first_settings(pool.problem, bundles) if bundles else ():
        if pool.search.spent():
            return
        _price_first(pool, bundles, _made(pool, settings), FIRST_PRICED)


def one_lane(pool: Candidates) -> None:
    """Price pipelines of all devices, of which some may stay idle."""
    with pool.search.within(ONE_LANE_PART):
        for degree in tensor_degrees(pool.problem)[:DEGREES]:
            _one_lane(pool, all_bundles(pool.problem, degree))


def _one_lane(pool: Candidates, bundles: tuple[Bundle, ...]) -> None:
    """Price pipelines of all bundles, those of the most promising paces first."""
    with pool.search.within(MAKE_PART):
        made, late = _pipelines(pool, bundles, spill=False), pool.search.spent()
    if not made and pool.best is None and not late:
        made = _pipelines(pool, bundles, spill=True)
    for lane, pace in sorted(made, key=lambda pair: pair[0].seconds)[:CHANGED_PRICED]:
        if pool.search.spent():
            return
        if lane.least < pool.limit:
            pool.price(Grouping((bundles,), pace), bundles, pool.lanes.layout([lane], pace))
            pool.search.tell("split")


def _pipelines(pool: Candidates, bundles: tuple[Bundle, ...], *, spill: bool) -> list[tuple[Lane, LaneSettings]]:
    """Return pipelines of all bundles in the usual paces. `spill`: the optimizer's state is in the hosts' memory."""
    batch = pool.problem.job.batch
    made: list[tuple[Lane, LaneSettings]] = []
    for count in micro_batch_counts(batch, 1) if bundles else ():
        for ahead in FIRST_AHEAD if count > 1 else (0,):
            if pool.search.spent():
                return made
            pace = LaneSettings(count, ahead, spill=spill)
            made += [(lane, pace) for lane in pool.lanes.pipelines(bundles, batch // count, pace)]
            pool.search.tell("split")
    return made


def _climb(pool: Candidates) -> None:
    """Try changes of the best settings, best first, until those of the whole pool have been tried."""
    while not pool.search.spent():
        best = distinct(pool.found, POOL * pool.width)
        start = next((found for found in best if found.setting.signature not in pool.climbed), None)
        if start is None:
            return
        pool.climbed.add(start.setting.signature)
        _price_first(
            pool, start.bundles, _made(pool, setting_moves(pool.problem, start.setting, start.bundles)), CHANGED_PRICED
        )


def _made(pool: Candidates, settings: Iterable[Grouping]) -> list[tuple[Grouping, Layout]]:
    """Return settings with the layouts that they become, as far as there is time for it."""
    with pool.search.within(MAKE_PART):
        return pool.completed(settings)


def _price_first(
    pool: Candidates, bundles: tuple[Bundle, ...], made: Sequence[tuple[Grouping, Layout]], count: int
) -> None:
    """Price so many of these settings; the rest waits."""
    pool.rest += [(setting, bundles, layout) for setting, layout in made[count:]]
    for setting, layout in made[:count]:
        if pool.search.spent():
            return
        pool.price(setting, bundles, layout)
        pool.search.tell("lanes")


def _reshape(pool: Candidates) -> None:
    """Let replicas change places in the best few layouts, each cut anew, as long as that gains."""
    for start in distinct(pool.found, SHAPED * pool.width):
        found: Tried | None = start
        while found is not None and not pool.search.spent():
            found = _reshaped(pool, found)


def _reshaped(pool: Candidates, found: Tried) -> Tried | None:
    """Return the first layout that gains of all that differ in where one or two replicas stand, or in their pace."""
    with pool.search.within(MAKE_PART):
        made = [layout for layout in _shapes(pool, found) if max(lane.least for lane in layout.lanes) < found.seconds]
    for layout in sorted(made, key=lambda layout: layout.seconds)[:CHANGED_PRICED]:
        if pool.search.spent():
            return None
        candidate = pool.priced(layout, found.how, found.buckets)
        pool.search.tell("stages")
        gains = candidate is not None and candidate.price.step_seconds < GAIN * found.seconds
        if candidate is not None and gains and pool.keep(candidate):
            parts = tuple(
                tuple(bundle_of(pool.problem, (group,)) for stage in lane.stages for group, _ in stage)
                for lane in layout.lanes
            )
            changed = found._replace(setting=Grouping(parts, layout.pace), layout=layout, candidate=candidate)
            pool.found = sorted([*pool.found, changed], key=lambda one: one.seconds)
            return changed
    return None


def _shapes(pool: Candidates, found: Tried) -> Iterator[Layout]:
    """Yield layouts one step away that nobody has looked at."""
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


def _fresh(seen: set[object], staged: Sequence[Stages], pace: LaneSettings) -> bool:
    """Return whether stages of these sorts of devices are new at this pace, and remember them."""
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


def _settled(pool: Candidates, found: Tried, i: int, stages: Stages, pace: LaneSettings) -> Iterator[Layout]:
    """Yield the layout with lane i made of these stages, if it can hold the model."""
    lanes = found.layout.lanes
    samples = lanes[i].samples if len(lanes) > 1 else pool.problem.job.batch // pace.micro_batches
    lane = pool.lanes.settled(stages, samples, pace, len(lanes) - 1)
    if lane is not None:
        yield pool.lanes.layout((*lanes[:i], lane, *lanes[i + 1 :]), pace)


def polish(pool: Candidates) -> None:
    """Make one change of a finished layout at a time, as long as one gains."""
    for start in distinct(pool.found, SHAPED * pool.width):
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
                gains = candidate is not None and candidate.price.step_seconds < GAIN * seconds
                if candidate is not None and gains and pool.keep(candidate):
                    current, seconds, moved = timed, candidate.price.step_seconds, True
                    break
