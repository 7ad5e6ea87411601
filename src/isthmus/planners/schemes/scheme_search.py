"""The search for a scheme's best plan, which can be left and taken up again.

A scheme's ideas are tried in the order of their bounds. The search is at its end when no idea that is left can be
faster than the best plan found, or when as many ideas were tried as a scheme may have (`SCHEME_IDEAS`, those with the
best bounds: that is part of what a scheme is). Until then the scheme is unfinished: the clock, the effort or the number
of messages ended it, and a faster plan of it may exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from isthmus.plan.types import Outcome
from isthmus.planners.budget import Limits, Search, flaw
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.notes import why_not
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.proposal import Idea, Version
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.search.large_clusters import treed
from isthmus.planners.search_constants import IDEA_EFFORT, IDEAS_PART, SCHEME_IDEAS, VERSIONS_NEAR
from isthmus.planners.search_state import SearchState

__all__ = ["SchemeSearch", "advance_all", "scheme_plans"]


class SchemeSearch:
    """The best plan of a scheme so far, and the ideas that are left.

    `before`: an earlier search that this one does not know of, but whose plan is an answer too.
    """

    def __init__(
        self, state: SearchState, memory: MemoryFit, name: str, fix: Fix | None, before: SchemeSearch | None = None
    ) -> None:
        self.state, self.problem, self.name, self.before = state, state.problem, name, before
        self.ideas: list[Idea] = []  # all that were made
        self.best: Candidate | None = None
        fixed = fix if fix and name == "grid" else Fix()
        self._coming: Iterator[Idea] | None = SCHEMES[name](self.problem, memory, fixed)
        self._left: list[Idea] = []  # the best bound first
        self._passed: list[Version] = []  # too many messages for what was left then
        self._tried = 0
        self._treed: Candidate | None = None  # whose gradients were synced by trees too
        self._flaw: str | None = None  # of a plan that fits
        self._impossible = ""  # why a plan cannot run at all

    @property
    def ended(self) -> bool:
        """Return whether no plan of the scheme that it may still try can be faster than its best."""
        waiting = self._tried < SCHEME_IDEAS and any(self._promises(idea) for idea in self._left)
        twin = self.state.copied and self.best is not self._treed
        return self._coming is None and not waiting and not twin and not any(map(self._promises, self._passed))

    @property
    def answer(self) -> Candidate | None:
        """Return the best plan of this search and of the one before."""
        found = [self.best, self.before.answer if self.before is not None else None]
        return min((one for one in found if one is not None), key=lambda one: one.price.step_seconds, default=None)

    def outcome(self) -> Outcome:
        """Say what came of it."""
        if not self.ended and self.before is not None and self.before.ended:
            return self.before.outcome()
        found = self.answer
        seconds, devices = (found.price.step_seconds, len(found.price.memory)) if found is not None else (None, None)
        if not self.ended:
            many = self._coming is None and not self._left
            reason = "its plans have too many messages to simulate" if many else "the budget ran out"
            return Outcome(state="unfinished", best_so_far=seconds, reason=reason, devices=devices)
        if seconds is not None:
            return Outcome(state="found", seconds=seconds, devices=devices)
        wrong = self._flaw or self._impossible
        return Outcome(state="cannot run", reason=why_not(self.problem, self.name, wrong, ideas=bool(self.ideas)))

    def advance(self, search: Search) -> Candidate | None:
        """Go on until the scheme is at its end, or the search is spent; return its best plan."""
        search.best, search.played = self.best, 0
        self._make(search)
        self._try_passed(search)
        while self._left and self._tried < SCHEME_IDEAS and self._promises(self._left[0]) and not search.spent():
            if self._try(search, self._left[0]):
                self._tried += 1
                del self._left[0]
            search.tell(self.name)
        if self.state.copied and self.best is not None and self.best is not self._treed and not search.spent():
            before = self.best
            if (plan := treed(self.problem, before.plan)) is not None:
                self._keep(search, search.price(plan))
            self._treed = self.best
        return self.best

    def _promises(self, one: Idea | Version) -> bool:
        return self.best is None or one.seconds < self.best.price.step_seconds

    def _make(self, search: Search) -> None:
        """Make ideas, with a part of what may be spent."""
        if self._coming is None:
            return
        with search.within(IDEAS_PART):
            for idea in self._coming:
                self.state.effort += idea.effort
                self.state.effort += IDEA_EFFORT
                self.ideas.append(idea)
                self._left.append(idea)
                if search.spent():
                    break
            else:
                self._coming = None
        self._left.sort(key=lambda idea: idea.seconds)

    def _try_passed(self, search: Search) -> None:
        """Price what had too many messages before."""
        waiting = sorted(self._passed, key=lambda version: version.seconds)
        self._passed = waiting
        for version in [version for version in waiting if self._promises(version)]:
            if search.spent():
                return
            if self._promises(version) and self._price(search, version) is not None:
                self._passed = [other for other in self._passed if other is not version]

    def _try(self, search: Search, idea: Idea) -> bool:
        """Price an idea's versions, the best bound first; return whether none is left that should be.

        Versions differ little: where the first that fits is not near to the best so far, the others are left out.
        """
        self.state.effort += idea.versions_effort
        for version in idea.versions():
            if not self._promises(version):
                return True
            if search.spent():
                return False
            before, candidate = self.best, self._price(search, version)
            if candidate is None or not candidate.price.fits or before is None:
                continue
            if candidate.price.step_seconds > VERSIONS_NEAR * before.price.step_seconds:
                return True
        return True

    def _price(self, search: Search, version: Version) -> Candidate | None:
        """Price a version, and keep it if it is the best; it waits where it has too many messages for now."""
        candidate = search.price(version.make())
        if candidate is None and version not in self._passed:
            self._passed.append(version)
        self._keep(search, candidate)
        return candidate

    def _keep(self, search: Search, candidate: Candidate | None) -> None:
        if candidate is None:
            return
        price = candidate.price
        self._impossible = price.impossible or self._impossible
        if price.fits and (self.best is None or price.step_seconds < self.best.price.step_seconds):
            wrong = flaw(self.problem, candidate.plan)
            if wrong is None:
                self.best = search.best = candidate
            else:
                self._flaw = wrong


def advance_all(schemes: Sequence[SchemeSearch], search: Search) -> None:
    """Go on with every scheme, each with an equal part of what is left."""
    for i, scheme in enumerate(schemes):
        with search.within(1 / (len(schemes) - i)):
            search.ended(partial(scheme.advance, search))
        if search.stopped or search.interrupted:
            break


def scheme_plans(problem: Problem, limits: Limits) -> list[Candidate]:
    """Return the best plan of each scheme that has one, the best first."""
    state, memory = SearchState(problem), MemoryFit(problem)
    schemes = [SchemeSearch(state, memory, name, None) for name in SCHEMES]
    advance_all(schemes, Search(state, limits, None))
    found = [scheme.best for scheme in schemes if scheme.best is not None]
    return sorted(found, key=lambda candidate: candidate.price.step_seconds)
