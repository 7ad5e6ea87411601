"""Branch and bound over layouts: the judge of all other planners, for a handful of devices and blocks.

All forms of layouts are listed (`exact_enumeration`), with every size of tensor groups, and opened best bound first
until none is left that could be faster than the best plan so far. An open form is tried with all lane options
(micro-batches, how many more are in flight, how state is held), every lane with every cut. Cuts whose bound
(`pipeline_bounds.cut_bounds`) is below the best plan are priced: stages recompute where they would not fit otherwise,
gradients go around rings and along trees, in few buckets and in many.

Some things are not enumerated. Samples are shared so that all are done together (`stage_shares`: exact as far as
computing goes). Which bucket is synced how is settled for the best few plans only (`sync_ilp`), after single samples,
cuts and stages that recompute have been moved as long as that gains. Slices and duplicates are for the best few plans
alone. Relays go along the paths of `plan/relays.py`. The search starts from what `auto` finds with a part of the
budget; where the budget ends first, nothing is proven, and the plan's notes say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from isthmus.planners.layout.build_plan import only_pipeline
from isthmus.planners.layout.device_groups import all_bundles, tensor_degrees
from isthmus.planners.layout.layout_types import Bundle, Lane, LaneOptions, Layout, Stage, Staged
from isthmus.planners.layout.pipeline_bounds import cut_bounds, flights
from isthmus.planners.layout.shares import divisors, fair_shares
from isthmus.planners.layout.side_by_side import lanes_plan
from isthmus.planners.lower_bound import Borders
from isthmus.planners.problem import Bools, Floats
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.exact_enumeration import LayoutForm, Shape, Sorts, forms
from isthmus.planners.search.moves import AHEAD, STATES, Grouping
from isthmus.planners.search_constants import FORMS

__all__ = ["open_forms"]

Part = Sequence[tuple[Bundle, ...]]  # a lane: the bundles of each of its stages


def open_forms(candidates: Candidates) -> None:
    """Price every layout that could be faster than the best plan; `cut_short` of the search says if any is left."""
    for degree in tensor_degrees(candidates.problem):
        bundles = all_bundles(candidates.problem, degree, most=len(candidates.problem.usable))
        if bundles:
            _Branches(Sorts(candidates.problem, bundles), candidates).open_all()


class _Cuts(NamedTuple):
    """All cuts of a lane, the most promising first."""

    stages: tuple[Stage, ...]
    firsts: npt.NDArray[np.intp]
    again: Bools
    seconds: Floats  # at least
    quickest: Floats  # seconds of a micro-batch on the quickest stage

    def lane(self, cut: int) -> Lane:
        """Return the lane with one of the cuts."""
        return Lane(self.stages, tuple(map(int, self.firsts[cut])), tuple(map(bool, self.again[cut])))


class _Branches:
    """The forms of bundles of one size."""

    def __init__(self, sorts: Sorts, candidates: Candidates) -> None:
        self.sorts, self.candidates = sorts, candidates
        self.problem, self.search = candidates.problem, candidates.search
        self.borders = Borders(candidates.problem)
        self._lines: dict[tuple[Shape, LaneOptions], tuple[float, float] | None] = {}
        self._bounds: dict[tuple[Shape, int, LaneOptions], _Cuts] = {}

    def open_all(self) -> None:
        """Price all forms that could be faster than the best plan, the most promising first."""
        for form in sorted(self._listed(), key=lambda form: form.seconds):
            if self.search.spent() or form.seconds >= self.candidates.limit:
                return
            self._open(form.shapes)
            self.search.tell("exact")

    def _listed(self) -> list[LayoutForm]:
        """Return all forms, or as many as there was memory and time for."""
        listed = []
        try:
            for form in forms(self.sorts, self.candidates.limit):
                listed.append(form)
                if len(listed) >= FORMS or self.search.spent():
                    raise OverflowError
        except OverflowError:
            self.search.cut_short = True
        return listed

    def _open(self, shapes: tuple[Shape, ...]) -> None:
        """Price a form with all lane options."""
        parts, batch = self.sorts.parts(shapes), self.problem.job.batch
        widest = max(len(stage) for part in parts for stage in part)
        states = STATES if len(parts) > 1 or widest > 1 else STATES[:1]
        for count in divisors(batch):
            if batch // count < max(len(parts), widest):
                continue
            for ahead, state in product(self._aheads(parts, count), states):
                if self.search.spent():
                    return
                self._price(shapes, parts, LaneOptions(count, ahead, state))

    def _aheads(self, parts: Sequence[Part], count: int) -> list[int]:
        """Return how many more micro-batches may be in flight: fewer than `count`, and only 0 where no link is far."""

        def most(ahead: int) -> list[list[int]]:
            stages = (tuple(tuple((b.groups[0], 1) for b in stage) for stage in part) for part in parts)
            return [flights(self.problem, Staged(each, count, ahead)) for each in stages]

        far = most(1) != most(0)
        return [ahead for ahead in AHEAD if ahead == 0 or (far and ahead < count)]

    def _price(self, shapes: Sequence[Shape], parts: Sequence[Part], options: LaneOptions) -> None:
        """Price lanes with these options, samples that let them finish together, and all cuts that could be faster."""
        candidates, given = self.candidates, self._samples(shapes, parts, options)
        found = [self._cuts(*one, options) for one in zip(shapes, parts, given, strict=False)]
        cuts = [one for one in found if one is not None and one.seconds[0] < candidates.limit]
        if len(cuts) < len(parts):
            return
        setting = Grouping(tuple(tuple(b for stage in part for b in stage) for part in parts), options)
        waits = 0 if options.state == "sharded-all" else options.micro_batches - 1  # before a gradient is final
        for chosen in product(*(range(int(np.searchsorted(one.seconds, candidates.limit))) for one in cuts)):
            picked = list(zip(cuts, chosen, strict=True))
            if self.search.spent():
                return
            if max(one.seconds[cut] for one, cut in picked) >= candidates.limit:
                continue
            made = [one.lane(cut) for one, cut in picked]
            start = waits * min(float(one.quickest[cut]) for one, cut in picked)
            if start + self.borders.seconds(made) < candidates.limit:
                self._fit(setting, candidates.lanes.layout(made, options))

    def _fit(self, setting: Grouping, layout: Layout) -> None:
        """Price a layout; let stages on devices that fall short of memory recompute, until it fits or none is left."""
        limit = self.candidates.limit
        while max(lane.least for lane in layout.lanes) < limit and self._bare(layout) < limit:
            short = self.candidates.price(setting, self.sorts.bundles, layout)
            changed = [_again(lane, short) for lane in layout.lanes]
            if not short or changed == list(layout.lanes):
                return
            layout = self.candidates.lanes.layout(changed, layout.options)

    def _bare(self, layout: Layout) -> float:
        """Return the seconds without any sync: however gradients are synced, it takes no less."""
        plan = lanes_plan(self.problem, layout)
        bare = self.search.price(replace(plan, parts=(replace(only_pipeline(plan), syncs=()),)))
        return 0.0 if bare is None else bare.price.step_seconds

    def _samples(self, shapes: Sequence[Shape], parts: Sequence[Part], options: LaneOptions) -> list[int]:
        """Return each lane's samples, so that all finish together; none where some lane cannot hold the model."""
        samples = self.problem.job.batch // options.micro_batches
        if len(parts) == 1:
            return [samples]
        for shape, part in zip(shapes, parts, strict=True):
            if (shape, options) not in self._lines:
                self._lines[shape, options] = self._line(shape, part, samples, options)
        known = [line for shape in shapes if (line := self._lines[shape, options]) is not None]
        return fair_shares(samples, [partial(_along, *line) for line in known]) if len(known) == len(parts) else []

    def _line(self, shape: Shape, part: Part, samples: int, options: LaneOptions) -> tuple[float, float] | None:
        """Return the seconds of a lane as `a + c n` for n samples, through all of them and half of them."""
        counts = dict.fromkeys((samples, max(samples // 2, *map(len, part))))
        known = [(n, cuts.seconds[0]) for n in counts if (cuts := self._cuts(shape, part, n, options)) is not None]
        least = [(n, seconds) for n, seconds in known if seconds < np.inf]
        if not least:
            return None
        (n, here), (other, there) = least[0], least[-1]
        slope = max((here - there) / (n - other), 1e-12) if n > other else here / n
        return max(here - slope * n, 0.0), slope

    def _cuts(self, shape: Shape, part: Part, samples: int, options: LaneOptions) -> _Cuts | None:
        """Return all cuts of a lane; None where some replica would have nothing to do: that is another form."""
        lanes = self.candidates.lanes
        stages = tuple(lanes.sharing.stage([b.groups[0] for b in stage], samples) for stage in part)
        if any(len(stage) < len(members) for stage, members in zip(stages, part, strict=True)):
            return None
        key = shape, samples, options  # which devices of a sort a lane has makes no difference
        if key not in self._bounds:
            inner = list(combinations(range(1, len(self.problem.graph.blocks)), len(part) - 1))
            firsts = np.column_stack((np.zeros(len(inner), np.intp), np.array(inner, np.intp).reshape(len(inner), -1)))
            staged = Staged(stages, options.micro_batches, options.ahead)
            seconds, again, quickest = cut_bounds(self.problem, lanes.memory, staged, options.held, firsts)
            order = np.argsort(seconds, kind="stable")
            self._bounds[key] = _Cuts((), firsts[order], again[order], seconds[order], quickest[order])
        return self._bounds[key]._replace(stages=stages)


def _again(lane: Lane, short: frozenset[str]) -> Lane:
    needy = [any(device in short for group, _ in stage for device in group) for stage in lane.stages]
    recompute = tuple(a or b for a, b in zip(lane.recompute, needy, strict=True))
    return lane if recompute == lane.recompute else lane._replace(recompute=recompute)


def _along(start: float, slope: float, samples: int) -> float:
    return start + slope * samples
