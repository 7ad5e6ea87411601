"""The choice of how each bucket is synced: an integer programme, judged by the simulator.

x[b, o] = 1 if bucket b is synced in way o (`sync_options`); load[b, o, r] are the seconds that this takes of resource r
(a nic, a pair of hosts, a trunk, each way; the way out of or into a device; a device's sending, its computing), and
release[b] is when b's gradients are final on its slowest participant (`sync_loads`). What is released at or after a
moment s has to be done after s, whatever else is, so the time T at which all is done has

    minimise    T + small * sum of alone[b, o] x[b, o]
    subject to  sum over o of x[b, o] = 1                                                 for every bucket b
                T >= s + left[r, s] + sum over b, o, released at or after s, of load[b, o, r] x[b, o]
                                                                                for every r and every release time s
                T >= release[b] + sum over o of alone[b, o] x[b, o]                       for every bucket b

with `left[r, s]` what r has to do from s on for other reasons: activations on links, the backward pass on devices; so
products of factors count where they cannot be hidden. By factors each micro-batch has its own release, and `alone` in
the third line is what is left then. For one resource with release times this T is exact: it is what serving whatever
has come, without ever idling, takes. For several it is a bound from below: nothing makes them free at the same time. So
what the programme says is judged by the simulator, against each bucket's own fastest way and one way for all.

Ways are lossless all of them (Zhang et al., Poseidon, 2017, for factors; the choice by a programme as in TAG, with the
rows of the plan's own micro-batches, each link for itself, and what the backward pass hides). `duplicate` is no choice
here: it changes what replicas compute, so a plan has it or not. HiGHS solves it, in limits of time and of nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from isthmus.cost.simulate import Price
from isthmus.plan.types import How, Plan
from isthmus.planners.budget import sound
from isthmus.planners.layout.build_plan import make_syncs, only_pipeline
from isthmus.planners.problem import Bools, Candidate, Problem
from isthmus.planners.search_constants import PROGRAMME_EFFORT
from isthmus.planners.search_state import SearchState
from isthmus.planners.stop import SearchEnded
from isthmus.planners.syncs.sync_loads import Programme, make_programme
from isthmus.planners.syncs.sync_options import Offers, make_offers

__all__ = ["Solution", "SyncChoice", "best_syncs", "greedy", "load_solver", "objective", "solve"]

_SMALL = 0.01  # how much all syncs' own seconds, on average, count beside the finish: enough to break ties
_GAP = 1e-4
_NODES = 500  # of the search tree: an end that does not depend on the machine
_POLISHED, _TRIED = 48, 4  # buckets that are changed one by one, and the ways that each is tried in
_LEAST_SECONDS = 0.05  # for a programme
_SIZES = (100e6, 5e6, 25e6, float("inf"))  # bytes of a bucket that are tried; infinite: one a stage
_PARTS = (8, 32)  # of all gradients, as large as a bucket: where a model is small, so are its buckets


class Solution(NamedTuple):
    """The solution of a programme: a choice for each bucket."""

    chosen: tuple[int, ...]
    finish: float  # T
    gap: float  # how far, at most, the objective is from the best one, as a part of it
    stopped: bool  # a limit ended the search


class SyncChoice(NamedTuple):
    """A plan with its syncs chosen anew, or as it was if nothing is faster."""

    plan: Plan
    price: Price
    finish: float | None  # seconds after which all gradients are final, by the programme; None: there was none
    gap: float
    stopped: bool  # a limit ended the search, or left some bucket sizes out


def best_syncs(state: SearchState, plan: Plan, *, seconds: float = 0.5, calls: int | None = None) -> SyncChoice:
    """Return the plan with the syncs that make it fastest, for a plan of one pipeline; never slower than it was.

    Looks at the buckets that it has and at other sizes; then changes what was chosen bucket by bucket, as long as the
    simulator likes that better. It ends after about so many seconds or calls of the simulator, but not before it has
    looked at the plan's own buckets. With `seconds` infinite the same plan is found on every machine.
    """
    search = _Search(state, plan, seconds, calls)
    try:
        for bucketed in _bucketings(state.problem, plan):
            if search.finish is not None and search.left() <= 0.0:
                search.stopped = True
                break
            search.look_at(bucketed)
        search.polish()
    except SearchEnded:  # of the whole search: what was found by now counts
        search.stopped = True
    return SyncChoice(search.best.plan, search.best.price, search.finish, search.gap, search.stopped)


class _Search:
    """The best plan so far, and how it was chosen."""

    def __init__(self, state: SearchState, plan: Plan, seconds: float, calls: int | None) -> None:
        self.state, self.problem = state, state.problem
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        self.last_call = None if calls is None else state.calls + calls
        self.best = state.price(plan)
        self.finish: float | None = None
        self.gap, self.stopped = 0.0, False
        self.offers: Offers | None = None
        self.programme: Programme | None = None
        self.ways: list[str] = []

    def left(self) -> float:
        """Return the seconds that are left; none once all calls are spent."""
        spent = self.last_call is not None and self.state.calls >= self.last_call
        return 0.0 if spent else self.deadline - time.monotonic()

    def look_at(self, plan: Plan) -> None:
        """Price what the programme chooses, each bucket's own fastest way, and the better ones of one way for all."""
        self.state.effort += PROGRAMME_EFFORT
        offers = make_offers(self.problem, plan)
        programme = make_programme(self.state, offers)
        if programme is None:
            return
        first = self.seconds / 2 if self.finish is None else _LEAST_SECONDS
        limit = max(first, self.left() / 2) if self.seconds < np.inf else np.inf  # half is for what comes after
        solution = solve(programme, limit)
        self.stopped |= solution.stopped
        count, step = len(offers.offers), self.best.price.step_seconds
        tried = [_ways_of(programme, solution.chosen), _ways_of(programme, greedy(programme))]
        tried += [[way] * count for way, end in programme.plays if end < step or not self.best.price.fits]
        better = [self.price(offers, programme, ways) for ways in tried]
        if self.finish is None or any(better):
            self.finish, self.gap = solution.finish, solution.gap

    def price(self, offers: Offers, programme: Programme, ways: list[str]) -> bool:
        """Return whether these ways are better than the best so far, and keep them as the best if they are."""
        candidate = self.state.price(offers.planned(ways))
        better = _rank(candidate) < _rank(self.best) and sound(self.problem, candidate.plan)
        if better:
            self.best, self.offers, self.programme, self.ways = candidate, offers, programme, ways
        return better

    def polish(self) -> None:
        """Try other ways for one bucket at a time, those that take long first.

        Each has the few that are fastest alone.
        """
        offers, programme = self.offers, self.programme
        if offers is None or programme is None:
            return
        alone = dict(zip(zip(programme.bucket.tolist(), programme.ways, strict=True), programme.alone, strict=True))
        buckets = sorted(range(len(self.ways)), key=lambda b: -alone.get((b, self.ways[b]), 0.0))
        for b in buckets[:_POLISHED]:
            others = sorted((seconds, way) for (bucket, way), seconds in alone.items() if bucket == b)
            for _, way in others[:_TRIED]:
                if self.left() <= 0.0:
                    self.stopped = True
                    return
                if way != self.ways[b]:
                    self.price(offers, programme, [*self.ways[:b], way, *self.ways[b + 1 :]])


def _bucketings(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield the plan, then the plan with buckets of other sizes."""
    yield plan
    part = only_pipeline(plan)
    gathered = any(stage.state == "sharded-all" for stage in part.stages)
    if gathered or any(sync.how == "duplicate" for sync in part.syncs):
        return
    how: How = "ring" if problem.kept is None else "sparse"
    seen = [tuple(sync.parameters for sync in part.syncs)]
    whole = problem.graph.elements * problem.table.width
    for size in (*_SIZES, *(whole / parts for parts in _PARTS)):
        syncs = make_syncs(problem.table, part.stages, how, size)
        words = tuple(sync.parameters for sync in syncs)
        if words not in seen:
            seen.append(words)
            yield replace(plan, parts=(replace(part, syncs=syncs),))


def _ways_of(programme: Programme, chosen: Sequence[int]) -> list[str]:
    return [programme.ways[c] for c in chosen]


def _rank(candidate: Candidate) -> tuple[bool, float]:
    return not candidate.price.fits, candidate.price.step_seconds


def objective(programme: Programme, chosen: Sequence[int]) -> float:
    """Return the value that the integer programme minimises."""
    return programme.finish(chosen) + _SMALL * float(programme.alone[list(chosen)].mean())


def greedy(programme: Programme) -> tuple[int, ...]:
    """Choose for each bucket the way that takes the least alone."""
    best: dict[int, int] = {}
    for c, b in enumerate(programme.bucket.tolist()):
        if b not in best or programme.alone[c] < programme.alone[best[b]]:
            best[b] = c
    return tuple(best[b] for b in sorted(best))


def load_solver() -> None:
    """Import HiGHS before the clock of a search starts."""
    import scipy.optimize  # noqa: F401


def solve(programme: Programme, seconds: float = 0.5) -> Solution:
    """Return the programme's best choice, or the best that was found in time:
    each bucket's own fastest way at least.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    start = greedy(programme)
    limit = objective(programme, start)
    scale = 10.0 * limit  # so that what the solver takes for feasible is, in any unit
    choices, buckets = len(programme.bucket), int(programme.bucket[-1]) + 1
    each = np.zeros((buckets, choices + 1))
    each[programme.bucket, np.arange(choices)] = 1.0
    open_ = _open(programme, limit)
    done = each * np.append(np.where(open_, programme.tail, 0.0), 0.0) / scale
    done[:, -1] = -1.0
    rows = np.column_stack((np.where(open_, programme.needs, 0.0) / scale, np.full(len(programme.base), -1.0)))
    found = milp(
        np.append(_SMALL / buckets * np.where(open_, programme.alone, 0.0) / scale, 1.0),
        integrality=np.append(np.ones(choices), 0),
        bounds=Bounds(0.0, np.append(open_.astype(np.float64), np.inf)),
        constraints=[
            LinearConstraint(each, 1.0, 1.0),
            LinearConstraint(done, -np.inf, 0.0),
            LinearConstraint(rows, -np.inf, -programme.base / scale),
        ],
        options={"time_limit": min(seconds, 1e6), "node_limit": _NODES, "mip_rel_gap": _GAP},
    )
    chosen, bound = start, found.mip_dual_bound
    if found.x is not None:
        values = np.where(open_, found.x[:-1], -1.0)
        picked = tuple(int(np.argmax(np.where(programme.bucket == b, values, -2.0))) for b in range(buckets))
        chosen = min(start, picked, key=lambda choices: objective(programme, choices))
    least = -np.inf if bound is None else bound * scale
    gap = min(1.0, max(0.0, 1.0 - least / objective(programme, chosen)))
    return Solution(chosen, programme.finish(chosen), gap, found.status != 0)


def _open(programme: Programme, limit: float) -> Bools:
    """Return the choices that do not by themselves, with the least of all other buckets, take longer than the limit."""
    starts = np.flatnonzero(np.diff(programme.bucket, prepend=-1))
    least = np.minimum.reduceat(programme.needs, starts, axis=1)
    others = programme.base + least.sum(axis=1)
    rows = others[:, None] - least[:, programme.bucket] + programme.needs
    return np.asarray((rows.max(axis=0, initial=0.0) <= limit) & (programme.tail <= limit))
