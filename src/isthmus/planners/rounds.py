"""A search in rounds, each of which is planned as a whole.

In a round the usual schemes are searched for a while (`scheme_search`); then the planner that goes beyond them
(`search_planners`) starts from the best of them. A round is given an effort, and its decisions depend on that and on
nothing else. The next one has four times as much: it takes the schemes up where they were left, and begins the rest
anew, but knows the prices of all layouts that were priced before. The round of the usual effort knows nothing of those
before: so it finds what is found without a budget. A budget in seconds or calls only says where this sequence ends
(`stop`), so that a larger one does the same work first, and never finds a worse plan.

Where nobody gives a budget there is one round of the usual effort; then the schemes are searched to their end, which is
not counted in that effort: what a plan is compared with should be as good as it can be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import count, islice
from typing import NamedTuple, NoReturn

from isthmus.plan.types import Outcome
from isthmus.planners.budget import Limits, ProgressCallback, Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.notes import missing_bytes, nothing_fits
from isthmus.planners.problem import LARGE, Candidate
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.scheme_search import SchemeSearch, advance_all
from isthmus.planners.search_constants import (
    ENDING_PASSES,
    FIRST_ROUND,
    HASTY_ROUNDS,
    HASTY_SCHEMES_PART,
    LARGE_SCHEMES_ENDING,
    MOST_NEAREST,
    ROUND_GROWTH,
    SCHEMES_ENDING_EFFORT,
    SCHEMES_PART,
)
from isthmus.planners.search_planners import BEYOND
from isthmus.planners.search_state import SearchState
from isthmus.planners.stop import Stop

__all__ = ["Asked", "Rounds", "SearchResult"]


class Asked(NamedTuple):
    """The request for a plan."""

    planner: str
    fix: Fix | None
    beside: bool  # schemes that are no answer are searched too
    limited: bool  # the user gave a budget
    progress: ProgressCallback | None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the schemes whose plans are an answer."""
        if self.fix is not None:
            return ("grid",)
        if self.planner in BEYOND and BEYOND[self.planner].with_schemes:
            return tuple(SCHEMES)
        return (self.planner,) if self.planner in SCHEMES else ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return all schemes that are searched, those that are an answer first."""
        return tuple(dict.fromkeys((*self.wanted, *(SCHEMES if self.beside else ()))))

    @property
    def usual(self) -> bool:
        """Return whether the usual effort ends the search."""
        return not self.limited and self.planner in BEYOND and BEYOND[self.planner].usual_effort


class SearchResult(NamedTuple):
    """The best plan of every scheme that has one, and the planner's own under its name."""

    plans: Mapping[str, Candidate]
    outcomes: Mapping[str, Outcome]
    spent: bool  # something ended the search before it was at its end
    crowded: int  # the largest ring that was too much to play
    interrupted: bool


class Rounds:
    """One search: all schemes, and the planner that goes beyond them. `effort`: the usual one, in seconds."""

    def __init__(self, state: SearchState, asked: Asked, stop: Stop, effort: float) -> None:
        self.state, self.problem, self.asked, self.stop, self.effort = state, state.problem, asked, stop, effort
        self.memory = MemoryFit(self.problem)
        self.schemes: dict[str, SchemeSearch] = {}
        self.best: Candidate | None = None  # of the planner that goes beyond the schemes
        self.crowded = 0
        self.stopped = self.interrupted = self.cut_short = False
        self._beyond = BEYOND[asked.planner].find if asked.planner in BEYOND and asked.fix is None else None
        self._known: dict[object, Candidate] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin all schemes anew, and forget all prices; plans that were found before stay answers.

        The search begins so, and so does the round of the usual effort. Where that is the first round, the second time
        changes nothing.
        """
        self._known, before = {}, self.schemes
        self.schemes = {
            name: SchemeSearch(self.state, self.memory, name, self.asked.fix, before.get(name))
            for name in self.asked.names
        }

    def find(self) -> SearchResult:
        """Search to the end; raises NoPlanError if none of the plans that were asked for fits."""
        with self.state.stopping(self.stop):
            for effort, thorough in self._efforts():
                if effort == self.effort and self._beyond is not None:
                    self._begin()
                if self._round(effort, thorough):
                    break
            if self.asked.usual and not self.interrupted:
                self._end_schemes()
        plans = {name: found for name, scheme in self.schemes.items() if (found := scheme.answer) is not None}
        if self.best is not None and all(self._faster(plans[name]) for name in self.asked.wanted if name in plans):
            plans[self.asked.planner] = self.best
        if not any(name in plans for name in (*self.asked.wanted, self.asked.planner)):
            self.fail()
        return SearchResult(
            plans=plans,
            outcomes={name: self.schemes[name].outcome() for name in SCHEMES if name in self.schemes},
            spent=self.stopped or self.cut_short,
            crowded=self.crowded,
            interrupted=self.interrupted,
        )

    def _end_schemes(self) -> None:
        """Search the schemes to their end; what some do not need of their part is for the others."""
        large = len(self.problem.usable) > LARGE or self.state.copied
        effort = LARGE_SCHEMES_ENDING * self.effort if large else SCHEMES_ENDING_EFFORT
        search = Search(self.state, Limits(effort=effort), self.asked.progress)
        search.thorough = True
        for _ in range(ENDING_PASSES):
            if not self.interrupted:
                self.advance(search)

    def advance(self, search: Search) -> None:
        """Take up every scheme that is not at its end, each with an equal part of what is left."""
        open_ = [scheme for scheme in self.schemes.values() if not scheme.ended]
        advance_all(open_, search)
        crowded = 0 if all(scheme.ended for scheme in open_) else search.crowded
        self._note(search, crowded)

    def fitting(self) -> list[Candidate]:
        """Return the plans of schemes that are an answer, the best first."""
        found = [self.schemes[name].best for name in self.asked.wanted]
        fitting = [candidate for candidate in found if candidate is not None]
        return sorted(fitting, key=lambda candidate: candidate.price.step_seconds)

    def fail(self) -> NoReturn:
        """Say why no plan was found."""
        if self.interrupted:
            raise KeyboardInterrupt
        wanted = self.asked.wanted
        spent = self.stopped or any(not self.schemes[name].ended for name in wanted)
        asked = [self.schemes[name] for name in wanted] if self._beyond is None else self.schemes.values()
        ideas = [idea for scheme in asked for idea in scheme.ideas]
        nearest = _nearest(Search(self.state, Limits(), self.asked.progress), ideas, first=self.stopped)
        raise nothing_fits(self.problem, wanted or (self.asked.planner,), self.asked.fix, nearest, spent=spent)

    def _efforts(self) -> Iterator[tuple[float | None, bool]]:
        """Give the effort of each round, and whether it tries what promises little too."""
        if self.asked.usual:
            yield self.effort, False
        elif not self.asked.limited:
            yield None, True
        else:
            yield from ((FIRST_ROUND * ROUND_GROWTH**k * self.effort, k >= HASTY_ROUNDS) for k in count())

    def _round(self, effort: float | None, thorough: bool) -> bool:
        """Search schemes, then beyond them; return whether nothing is left for another round."""
        before = self.state.calls
        search = Search(self.state, Limits(effort=effort), self.asked.progress, self._known)
        search.thorough = thorough
        if self._beyond is None:
            self.advance(search)
        else:
            part = HASTY_SCHEMES_PART if search.hasty and not self.state.copied else SCHEMES_PART
            self.advance(Search(self.state, search.limits(part), self.asked.progress))
        if self.stopped or self.interrupted:
            return True
        ended = all(scheme.ended for scheme in self.schemes.values())
        if self._beyond is None:
            return ended
        found = search.ended(partial(self._beyond, self.problem, self.memory, search, self.fitting()))
        self.best = found if found is not None and self._slower(found) else self.best
        self.cut_short = search.cut_short
        self._note(search, search.crowded)
        exhausted = thorough and (not search.cut_short or self.state.calls == before)
        return self.stopped or self.interrupted or (ended and exhausted)

    def _note(self, search: Search, crowded: int) -> None:
        """Remember what a part of the search has met."""
        self.stopped |= search.stopped
        self.interrupted |= search.interrupted
        self.crowded = max(self.crowded, crowded)

    def _faster(self, other: Candidate) -> bool:
        """Return whether the best plan beyond the schemes is faster than another plan."""
        return self.best is not None and self.best.price.step_seconds < other.price.step_seconds

    def _slower(self, other: Candidate) -> bool:
        """Return whether the best plan beyond the schemes is slower than another plan, or missing."""
        return self.best is None or other.price.step_seconds < self.best.price.step_seconds


def _nearest(search: Search, ideas: Iterable[Idea], *, first: bool) -> Candidate | None:
    """Return the plan that misses least of those that do not fit; most memory and smallest micro-batches go first.

    `first`: the first of them is enough.
    """
    nearest: Candidate | None = None
    ordered = sorted(ideas, key=lambda idea: (-idea.memory, idea.samples))
    for idea in islice(ordered, MOST_NEAREST):
        plan = idea.nearest()
        candidate = None if plan is None else search.price(plan)
        if candidate is None or candidate.price.impossible or not candidate.price.shortages:
            continue
        if nearest is None or missing_bytes(candidate) < missing_bytes(nearest):
            nearest = candidate
        if first:
            break
    return nearest
