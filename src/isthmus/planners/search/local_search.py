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
from isthmus.planners.layout.layout_types import Bundle, Lane, LaneOptions, Layout
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Candidate
from isthmus.planners.search.candidates import Candidates, Tried, distinct, resync
from isthmus.planners.search.moves import (
    FIRST_AHEAD,
    Grouping,
    Stages,
    changed_options,
    first_settings,
    layout_moves,
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


Proposals = Callable[[Candidates], None]  # adds settings that others think of to the candidates


def explore(candidates: Candidates, given: Sequence[Candidate], propose: Proposals | None = None) -> Candidate | None:
    """Return the best plan so far, or a faster one; all that was found is in the candidates.

    Nothing is sliced: bounds of layouts know nothing of slices, so that a sliced plan would rule out too much.
    """
    problem, search = candidates.problem, candidates.search
    for candidate in given:
        candidates.take(candidate)
    proposals = None if search.state.copied else propose
    if proposals is not None and search.hasty:
        _proposed(candidates, proposals)
    with search.within(FIRST_PART):
        for degree in tensor_degrees(problem)[:DEGREES]:
            _first(candidates, all_bundles(problem, degree))
    candidates.rank()
    with search.within(FIRST_PART):
        resync(candidates, count=1)
    if proposals is not None and not search.hasty:  # a good one at once would end the search around lesser plans
        with search.within(OWN_PART):
            _refine(candidates)
        _proposed(candidates, proposals)
    _refine(candidates)
    resync(candidates)
    while search.thorough and not search.spent():
        before = candidates.limit
        if not _widen(candidates):
            break
        _refine(candidates)
        if candidates.limit < before:
            resync(candidates)
    return candidates.best


def _proposed(candidates: Candidates, propose: Proposals) -> None:
    with candidates.search.within(PROPOSE_PART):
        propose(candidates)
    candidates.rank()


def _refine(candidates: Candidates) -> None:
    """Climb, reshape and polish in turns, until none of them gains."""
    before = float("inf")
    while candidates.limit < GAIN * before and not candidates.search.spent():
        before = candidates.limit
        with candidates.search.within(CLIMB_PART):
            _climb(candidates)
        with candidates.search.within(SHAPE_PART):
            _reshape(candidates)
        with candidates.search.within(POLISH_PART):
            polish(candidates)


def _widen(candidates: Candidates) -> bool:
    """Price the most promising settings that were passed over; from then on changes of more settings are tried.

    Return whether anything is left to be tried.
    """
    if not candidates.rest and len(distinct(candidates.found, KEPT)) <= SHAPED * candidates.width:
        return False
    candidates.width += 1
    candidates.rest.sort(key=lambda one: one[2].seconds)
    now, candidates.rest = candidates.rest[:WIDER_PRICED], candidates.rest[WIDER_PRICED:]
    for setting, bundles, layout in now:
        if candidates.search.spent():
            break
        if max(lane.least for lane in layout.lanes) < candidates.limit:
            candidates.price(setting, bundles, layout)
            candidates.search.tell("lanes")
    return True


def _first(candidates: Candidates, bundles: tuple[Bundle, ...]) -> None:
    """Price pipelines of everything, and the usual ways to form lanes."""
    _one_lane(candidates, bundles)
    for settings in first_settings(candidates.problem, bundles) if bundles else ():
        if candidates.search.spent():
            return
        _price_first(candidates, bundles, _made(candidates, settings), FIRST_PRICED)


def one_lane(candidates: Candidates) -> None:
    """Price pipelines of all devices, of which some may stay idle."""
    with candidates.search.within(ONE_LANE_PART):
        for degree in tensor_degrees(candidates.problem)[:DEGREES]:
            _one_lane(candidates, all_bundles(candidates.problem, degree))


def _one_lane(candidates: Candidates, bundles: tuple[Bundle, ...]) -> None:
    """Price pipelines of all bundles, those of the most promising options first."""
    with candidates.search.within(MAKE_PART):
        made, late = _pipelines(candidates, bundles, spill=False), candidates.search.spent()
    if not made and candidates.best is None and not late:
        made = _pipelines(candidates, bundles, spill=True)
    for lane, options in sorted(made, key=lambda pair: pair[0].seconds)[:CHANGED_PRICED]:
        if candidates.search.spent():
            return
        if lane.least < candidates.limit:
            candidates.price(Grouping((bundles,), options), bundles, candidates.lanes.layout([lane], options))
            candidates.search.tell("split")


def _pipelines(candidates: Candidates, bundles: tuple[Bundle, ...], *, spill: bool) -> list[tuple[Lane, LaneOptions]]:
    """Return pipelines of all bundles with the usual options. `spill`: optimizer state is in the hosts' memory."""
    batch = candidates.problem.job.batch
    made: list[tuple[Lane, LaneOptions]] = []
    for count in micro_batch_counts(batch, 1) if bundles else ():
        for ahead in FIRST_AHEAD if count > 1 else (0,):
            if candidates.search.spent():
                return made
            options = LaneOptions(count, ahead, spill=spill)
            made += [(lane, options) for lane in candidates.lanes.pipelines(bundles, batch // count, options)]
            candidates.search.tell("split")
    return made


def _climb(candidates: Candidates) -> None:
    """Try changes of the best settings, the best first, until those of all the best have been tried."""
    while not candidates.search.spent():
        best = distinct(candidates.found, POOL * candidates.width)
        start = next((found for found in best if found.setting.signature not in candidates.climbed), None)
        if start is None:
            return
        candidates.climbed.add(start.setting.signature)
        _price_first(
            candidates,
            start.bundles,
            _made(candidates, setting_moves(candidates.problem, start.setting, start.bundles)),
            CHANGED_PRICED,
        )


def _made(candidates: Candidates, settings: Iterable[Grouping]) -> list[tuple[Grouping, Layout]]:
    """Return settings with the layouts that they become, as far as there is time for it."""
    with candidates.search.within(MAKE_PART):
        return candidates.completed(settings)


def _price_first(
    candidates: Candidates, bundles: tuple[Bundle, ...], made: Sequence[tuple[Grouping, Layout]], count: int
) -> None:
    """Price so many of these settings; the rest waits."""
    candidates.rest += [(setting, bundles, layout) for setting, layout in made[count:]]
    for setting, layout in made[:count]:
        if candidates.search.spent():
            return
        candidates.price(setting, bundles, layout)
        candidates.search.tell("lanes")


def _reshape(candidates: Candidates) -> None:
    """Let replicas change places in the best few layouts, each cut anew, as long as that gains."""
    for start in distinct(candidates.found, SHAPED * candidates.width):
        found: Tried | None = start
        while found is not None and not candidates.search.spent():
            found = _reshaped(candidates, found)


def _reshaped(candidates: Candidates, found: Tried) -> Tried | None:
    """Return the first layout that gains of all that differ in where one or two replicas stand, or in their options."""
    with candidates.search.within(MAKE_PART):
        made = [
            layout for layout in _shapes(candidates, found) if max(lane.least for lane in layout.lanes) < found.seconds
        ]
    for layout in sorted(made, key=lambda layout: layout.seconds)[:CHANGED_PRICED]:
        if candidates.search.spent():
            return None
        candidate = candidates.priced(layout, found.how, found.buckets)
        candidates.search.tell("stages")
        gains = candidate is not None and candidate.price.step_seconds < GAIN * found.seconds
        if candidate is not None and gains and candidates.keep(candidate):
            parts = tuple(
                tuple(bundle_of(candidates.problem, (group,)) for stage in lane.stages for group, _ in stage)
                for lane in layout.lanes
            )
            changed = found._replace(setting=Grouping(parts, layout.options), layout=layout, candidate=candidate)
            candidates.found = sorted([*candidates.found, changed], key=lambda one: one.seconds)
            return changed
    return None


def _shapes(candidates: Candidates, found: Tried) -> Iterator[Layout]:
    """Yield layouts one step away that nobody has looked at."""
    lanes, options = found.layout.lanes, found.layout.options
    staged = [tuple(tuple(group for group, _ in stage) for stage in lane.stages) for lane in lanes]
    used = {group for stages in staged for stage in stages for group in stage}
    idle = [group for bundle in found.bundles for group in bundle.groups if group not in used]
    for other in changed_options(candidates.problem, options):
        if len(lanes) == 1 and _fresh(candidates.shaped, staged, other):
            yield from _settled(candidates, found, 0, staged[0], other)
    for i, stages in enumerate(staged):
        for moved in stage_moves(stages, idle):
            if candidates.search.spent():
                return
            if moved and _fresh(candidates.shaped, [*staged[:i], moved, *staged[i + 1 :]], options):
                yield from _settled(candidates, found, i, moved, options)


def _fresh(seen: set[object], staged: Sequence[Stages], options: LaneOptions) -> bool:
    """Return whether stages of these sorts of devices are new with these options, and remember them."""
    key = (
        options,
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


def _settled(candidates: Candidates, found: Tried, i: int, stages: Stages, options: LaneOptions) -> Iterator[Layout]:
    """Yield the layout with lane i made of these stages, if it can hold the model."""
    lanes = found.layout.lanes
    samples = lanes[i].samples if len(lanes) > 1 else candidates.problem.job.batch // options.micro_batches
    lane = candidates.lanes.settled(stages, samples, options, len(lanes) - 1)
    if lane is not None:
        yield candidates.lanes.layout((*lanes[:i], lane, *lanes[i + 1 :]), options)


def polish(candidates: Candidates) -> None:
    """Make one change of a finished layout at a time, as long as one gains."""
    for start in distinct(candidates.found, SHAPED * candidates.width):
        if start.layout in candidates.polished or candidates.search.spent():
            continue
        candidates.polished.add(start.layout)
        current, seconds = start.layout, start.seconds
        moved = True
        while moved and not candidates.search.spent():
            moved = False
            for changed in layout_moves(current, len(candidates.problem.graph.blocks)):
                if candidates.search.spent():
                    return
                timed = candidates.lanes.layout(changed.lanes, changed.options)
                if max(lane.least for lane in timed.lanes) >= seconds:
                    continue
                candidate = candidates.priced(timed, start.how, start.buckets)
                candidates.search.tell("polish")
                gains = candidate is not None and candidate.price.step_seconds < GAIN * seconds
                if candidate is not None and gains and candidates.keep(candidate):
                    current, seconds, moved = timed, candidate.price.step_seconds, True
                    break
