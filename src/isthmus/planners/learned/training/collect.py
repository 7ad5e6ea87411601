"""The results of a long search for one problem: drafts and their times.

A problem is planned as `auto` plans it without a network; all settings that it priced and that a draft can say become
leaves. Then a tree search adds others: without a network at first, later guided by the network of the moment (self-
play), whose mistakes are thus priced too. Beside them is kept what the simulator said of the best plan before the
search, and of each that became the best while it went on: what the network sees as feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.planners.budget import Limits, Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.learned.decisions import Draft, Drafts, Prior, even
from isthmus.planners.learned.features import feedback_of
from isthmus.planners.learned.training.problems import random_problem
from isthmus.planners.learned.training.record import Leaf, Record
from isthmus.planners.learned.tree_search import SearchTree
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.schemes.scheme_search import scheme_plans
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.local_search import explore
from isthmus.planners.search_state import SearchState

__all__ = ["collect"]

_SCHEMES = 2.0  # effort of the schemes before
_TREE_CALLS = 300
_MOST_FEEDBACK = 6


def collect(seed: int, effort: float = 4.0, prior: Prior = even) -> Record | None:
    """Search the problem of a seed; the prior guides the tree. None where nothing fits."""
    problem = random_problem(seed)
    given = scheme_plans(problem, Limits(effort=_SCHEMES))
    if not given:
        return None
    leaves: dict[Draft, float] = {}
    better: list[Candidate] = []
    state = SearchState(problem)
    lanes = LaneMaker(problem, MemoryFit(problem), state)
    candidates = Candidates(problem, lanes, Search(state, Limits(effort=effort), None), given[0])
    drafts = Drafts(problem)
    explore(candidates, given)
    for found in candidates.found:
        draft = drafts.draft_of(found.setting)
        if draft is not None:
            leaves[draft] = min(found.seconds, leaves.get(draft, float("inf")))
    _grow(problem, lanes, given, prior, leaves, better)
    start = [feedback_of(problem, candidate) for candidate in (given[0], *better[-_MOST_FEEDBACK:])]
    kept = [Leaf(*draft, seconds) for draft, seconds in leaves.items() if seconds < float("inf")]
    return Record(seed, [feedback for feedback in start if feedback is not None], kept)


def _grow(
    problem: Problem,
    lanes: LaneMaker,
    given: Sequence[Candidate],
    prior: Prior,
    leaves: dict[Draft, float],
    better: list[Candidate],
) -> None:
    """Grow a tree; add its leaves, and plans that became its best."""
    candidates = Candidates(problem, lanes, Search(lanes.state, Limits(calls=_TREE_CALLS, effort=3.0), None), given[0])

    def told(draft: Draft, seconds: float) -> None:
        leaves[draft] = min(seconds, leaves.get(draft, float("inf")))
        if candidates.best is not None and candidates.best is not (better[-1] if better else given[0]):
            better.append(candidates.best)

    SearchTree(candidates, prior, told).grow()
