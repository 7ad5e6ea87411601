"""Planners that go beyond the usual schemes: each takes the schemes' plans and gives the best back, or a faster one.

To add a planner, write a function like these in a file of its own, and give it a line in `BEYOND`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from isthmus.planners.budget import Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.learned.prior import shipped_prior
from isthmus.planners.learned.tree_search import even, propose, tree_search
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.search import exact as branching
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.finishing import finish
from isthmus.planners.search.local_search import Proposals, explore, one_lane

__all__ = ["BEYOND"]

Planner = Callable[[Problem, MemoryFit, Search, Sequence[Candidate]], Candidate | None]  # plans so far, the best first

_EXPLORE_PART = 0.92  # of the budget; the rest is for duplicates and slices
_DIRECT_PART = 0.7  # of that, before layouts are made that talk over relays


def split(problem: Problem, room: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """The best pipeline over all devices, in every usual order of them, by dynamic programming."""
    return one_lane(problem, LaneMaker(problem, room, search.state), search, given)


def auto(problem: Problem, room: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Pipelines side by side, settled by search, with direct links first; then all that a layout leaves open."""
    pool = Candidates(problem, LaneMaker(problem, room, search.state), search, given[0] if given else None)
    with search.within(_EXPLORE_PART):
        with search.within(_DIRECT_PART if problem.vias else 1.0):
            explore(pool, given, _proposals())
        if problem.vias:
            relayed = problem.with_relays
            direct, pool = pool, Candidates(relayed, LaneMaker(relayed, room, search.state), search, pool.best)
            pool.found += direct.found
            explore(pool, ())
    finish(pool, synced=True)
    return pool.best


def _proposals() -> Proposals | None:
    """Return the function that proposes what the network likes; None where there is no network."""
    prior = shipped_prior()
    return partial(propose, prior) if prior is not even else None


def exact(problem: Problem, room: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Every layout that could be faster than the best plan: proven, on a handful of devices and blocks."""
    relayed = problem.with_relays
    return branching.exact(relayed, LaneMaker(relayed, room, search.state), search, given, _proposals())


def search(problem: Problem, room: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Search for who works with whom and at what pace, by a tree search that knows nothing beforehand."""
    return tree_search(problem, LaneMaker(problem, room, search.state), search, given)


def learned(problem: Problem, room: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """The same search, with a network that has seen many others."""
    return tree_search(problem, LaneMaker(problem, room, search.state), search, given, shipped_prior())


BEYOND: dict[str, Planner] = {"auto": auto, "split": split, "exact": exact, "search": search, "learned": learned}
