"""Planners that go beyond the usual schemes: each takes the schemes' plans and returns the best, or a faster one.

To add a planner, write a function like these in a file of its own, and give it a line in `BEYOND`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from isthmus.planners.budget import Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.learned.decisions import Prior, even
from isthmus.planners.learned.prior import shipped_prior
from isthmus.planners.learned.tree_search import SearchTree, propose
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.exact import open_forms
from isthmus.planners.search.finishing import finish
from isthmus.planners.search.local_search import Proposals, explore, one_lane, polish
from isthmus.planners.search_constants import (
    DIRECT_PART,
    EXACT_FIRST_PART,
    EXACT_LAST_PART,
    EXACT_POLISH_PART,
    EXPLORE_PART,
    TREE_PART,
    TREE_POLISH_PART,
)

__all__ = ["BEYOND", "Registered"]

Planner = Callable[[Problem, MemoryFit, Search, Sequence[Candidate]], Candidate | None]  # plans so far, the best first


def split(problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Return the best pipeline over all devices, in every usual order of them, by dynamic programming."""
    candidates = Candidates(problem, LaneMaker(problem, memory, search.state), search, given[0] if given else None)
    one_lane(candidates)
    finish(candidates)
    return candidates.best


def auto(problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Search for pipelines side by side, with direct links first; then settle all that a layout leaves open."""
    candidates = Candidates(problem, LaneMaker(problem, memory, search.state), search, given[0] if given else None)
    with search.within(EXPLORE_PART):
        with search.within(DIRECT_PART if problem.vias else 1.0):
            explore(candidates, given, _proposals())
        if problem.vias:
            relayed = problem.with_relays
            direct = candidates
            candidates = Candidates(relayed, LaneMaker(relayed, memory, search.state), search, direct.best)
            candidates.found += direct.found
            explore(candidates, ())
    finish(candidates, synced=True)
    return candidates.best


def _proposals() -> Proposals | None:
    """Return the function that proposes what the network likes; None where there is no network."""
    prior = shipped_prior()
    return partial(propose, prior) if prior is not even else None


def exact(problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Price every layout that could be faster than the best plan: proven, on a handful of devices and blocks."""
    relayed = problem.with_relays
    lanes = LaneMaker(relayed, memory, search.state)
    first = Candidates(relayed, lanes, search, given[0] if given else None)
    with search.within(EXACT_FIRST_PART):
        explore(first, given, _proposals())
    search.cut_short = False  # what `auto` left out is looked at here
    candidates = Candidates(relayed, lanes, search, first.best)
    with search.within(1.0 - EXACT_LAST_PART):
        open_forms(candidates)
    proven = not search.cut_short
    with search.within(EXACT_POLISH_PART):
        polish(candidates)
    finish(candidates)
    finish(first, synced=True)  # it may gain more by that
    search.cut_short = not proven
    return first.best if first.limit < candidates.limit else candidates.best


def search(problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Search for who works with whom and in what way, by a tree search that knows nothing beforehand."""
    return _tree_search(problem, memory, search, given, even)


def learned(problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate]) -> Candidate | None:
    """Search like `search`, with a network that has seen many other problems."""
    return _tree_search(problem, memory, search, given, shipped_prior())


def _tree_search(
    problem: Problem, memory: MemoryFit, search: Search, given: Sequence[Candidate], prior: Prior
) -> Candidate | None:
    """Return the best plan so far, or a faster one that a tree search with this prior leads to."""
    candidates = Candidates(problem, LaneMaker(problem, memory, search.state), search, given[0] if given else None)
    with search.within(TREE_PART):
        SearchTree(candidates, prior).grow()
    candidates.rank()
    with search.within(TREE_POLISH_PART):
        polish(candidates)
    finish(candidates)
    return candidates.best


class Registered(NamedTuple):
    """A planner, and how it is run."""

    find: Planner
    with_schemes: bool = True  # it is given the schemes' plans, and one of these may be the answer
    usual_effort: bool = True  # without a budget, the usual effort ends it; False: it runs until it is done


BEYOND: dict[str, Registered] = {
    "auto": Registered(auto),
    "split": Registered(split, with_schemes=False),
    "exact": Registered(exact, usual_effort=False),
    "search": Registered(search),
    "learned": Registered(learned),
}
