"""The plans that a search has tried, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

from isthmus.plan.types import How
from isthmus.planners.budget import Search, sound
from isthmus.planners.layout.build_plan import only_pipeline
from isthmus.planners.layout.device_groups import all_bundles, bundle_of
from isthmus.planners.layout.layout_types import Bundle, Layout
from isthmus.planners.layout.side_by_side import BUCKETS, LaneMaker, lanes_plan, layout_key
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.search.moves import Grouping
from isthmus.planners.search_constants import KEPT, SYNC_CALLS, SYNC_GAIN, SYNCED
from isthmus.planners.syncs.sync_ilp import best_syncs

__all__ = [
    "Candidates",
    "Tried",
    "distinct",
    "replicated",
    "resync",
    "sync_anew",
    "ways",
]


class Tried(NamedTuple):
    """A setting, what it became, and what the simulator says."""

    setting: Grouping
    bundles: tuple[Bundle, ...]
    layout: Layout
    how: How
    buckets: int
    candidate: Candidate

    @property
    def seconds(self) -> float:
        """Return the seconds of one step."""
        return self.candidate.price.step_seconds


class Candidates:
    """The plans that were tried, and the best of them."""

    def __init__(self, problem: Problem, lanes: LaneMaker, search: Search, best: Candidate | None) -> None:
        self.problem, self.lanes, self.search, self.best = problem, lanes, search, best
        search.best = best
        self.found: list[Tried] = []
        self.climbed: set[object] = set()  # settings whose changes were tried
        self.shaped: set[object] = set()  # stages that were looked at
        self.polished: set[Layout] = set()
        self.rest: list[tuple[Grouping, tuple[Bundle, ...], Layout]] = []  # what promised too little to be priced
        self.width = 1  # times POOL: settings whose changes are tried
        self._seen: set[object] = set()
        # over relays the same layout is another plan
        self._direct = problem.network is problem.simulator.priced_cluster

    @property
    def limit(self) -> float:
        """Return the seconds of the best plan."""
        return self.best.price.step_seconds if self.best is not None else float("inf")

    def completed(self, settings: Iterable[Grouping]) -> list[tuple[Grouping, Layout]]:
        """Complete new settings, and return them with their layouts, the most promising first."""
        made = []
        for setting in settings:
            if self.search.spent():
                break
            if setting.signature in self._seen:
                continue
            self._seen.add(setting.signature)
            layout = self.lanes.complete(setting.parts, setting.options)
            if layout is not None and max(lane.least for lane in layout.lanes) < self.limit:
                made.append((setting, layout))
        return sorted(made, key=lambda pair: pair[1].seconds)

    def price(self, setting: Grouping, bundles: tuple[Bundle, ...], layout: Layout) -> frozenset[str]:
        """Keep what fits and keeps every rule; return the devices that always fall short of memory, none where
        something fits.
        """
        short: frozenset[str] | None = None
        for how, buckets in ways(self.problem, layout, copied=self.search.state.copied):
            if self.search.spent():
                break
            candidate = self.price_one(setting, bundles, layout, how, buckets)
            if candidate is not None:
                missing = frozenset(shortage.where for shortage in candidate.price.shortages)
                short = missing if short is None else short & missing
        self.rank()
        return short or frozenset()

    def price_one(
        self, setting: Grouping, bundles: tuple[Bundle, ...], layout: Layout, how: How, buckets: int
    ) -> Candidate | None:
        """Price a layout with one way to sync, and keep it if it fits; None where playing it would take more than is
        left.
        """
        candidate = self.priced(layout, how, buckets)
        if candidate is not None and self.keep(candidate):
            self.found.append(Tried(setting, bundles, layout, how, buckets, candidate))
        return candidate

    def priced(self, layout: Layout, how: How, buckets: int) -> Candidate | None:
        """Return a layout as a plan with its price; each is priced once."""
        key, known = (self._direct, layout_key(self.problem, layout, how, buckets)), self.search.known
        if key not in known:
            candidate = self.search.price(lanes_plan(self.problem, layout, how, buckets))
            if candidate is None:
                return None
            known[key] = candidate
        return known[key]

    def rank(self) -> None:
        """Sort what was found, the best first, and keep no more than can be of use."""
        self.found = sorted(self.found, key=lambda found: found.seconds)[:KEPT]

    def take(self, candidate: Candidate) -> None:
        """Add a plan that somebody else made, where it has the form of a lane, to go on from it."""
        layout = self.lanes.from_plan(candidate.plan)
        if layout is None or len({len(group) for stage in layout.lanes[0].stages for group, _ in stage}) > 1:
            return
        used = tuple(bundle_of(self.problem, (group,)) for stage in layout.lanes[0].stages for group, _ in stage)
        taken = {device for bundle in used for device in bundle.devices}
        degree = len(used[0].groups[0])
        rest = tuple(bundle for bundle in all_bundles(self.problem, degree) if taken.isdisjoint(bundle.devices))
        how: How = "tree" if any(sync.how == "tree" for sync in only_pipeline(candidate.plan).syncs) else "ring"
        self.found.append(Tried(Grouping((used,), layout.options), (*used, *rest), layout, how, BUCKETS[-1], candidate))

    def keep(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits; keep it if it is the best so far, or return False if it breaks a rule."""
        if not candidate.price.fits:
            return False
        if candidate.price.step_seconds < self.limit:
            if not sound(self.problem, candidate.plan):
                return False
            self.best = self.search.best = candidate
        return True


def distinct(found: Sequence[Tried], most: int) -> list[Tried]:
    """Return the best few, each setting once, as good as its best plan."""
    first: dict[object, Tried] = {}
    for one in found:
        first.setdefault(one.setting.signature, one)
    return list(first.values())[:most]


def ways(problem: Problem, layout: Layout, *, copied: bool = False) -> list[tuple[How, int]]:
    """Return the first ways to sync gradients and their buckets: rings; where regions share gradients, trees too."""
    regions = {
        problem.cluster.host_of(group[0]).region for lane in layout.lanes for stage in lane.stages for group, _ in stage
    }
    several = replicated(layout)
    trees = len(regions) > 1 and several and layout.options.state != "sharded-all"
    hows: tuple[How, ...] = ("ring", "tree") if trees else ("ring",)
    return list(product(hows, BUCKETS if several and not copied else BUCKETS[:1]))


def replicated(layout: Layout) -> bool:
    """Return whether any block is on several replicas."""
    return len(layout.lanes) > 1 or any(len(stage) > 1 for stage in layout.lanes[0].stages)


def resync(candidates: Candidates, count: int = SYNCED) -> None:
    """Choose by an integer programme how the best few plans sync each bucket. Copies are left, as they sync all alike.

    Plans that gather sharded state leave little to choose, so that the best ones with whole state are looked at too.
    """
    if candidates.search.state.copied:
        return
    whole = [
        found for found in candidates.found if found.layout.options.state == "replicated" and replicated(found.layout)
    ]
    likely = [*distinct(candidates.found, count), *distinct(whole, count)]
    near = [found.candidate for found in likely if found.seconds < SYNC_GAIN * candidates.limit]
    starts = list(
        {id(candidate): candidate for candidate in (candidates.best, *near) if candidate is not None}.values()
    )
    for start in starts:
        sync_anew(candidates, start)


def sync_anew(candidates: Candidates, start: Candidate) -> Candidate | None:
    """Choose the syncs of a plan, and keep the result; None where too little is left for that."""
    candidates.search.tell("syncs")
    calls = candidates.search.calls_left()
    if candidates.search.spent() or (calls is not None and calls < SYNC_CALLS):
        return None
    left = candidates.search.left()
    seconds = min(0.5, left) if calls is None else left
    choice = best_syncs(candidates.search.state, start.plan, seconds=seconds, calls=calls)
    found = Candidate(choice.plan, choice.price)
    return found if candidates.keep(found) else None
