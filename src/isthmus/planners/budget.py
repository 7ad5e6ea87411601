"""The budget of one search: its limits, what it has spent, and the best plan it has found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from isthmus.cost.runnable import check_runnable
from isthmus.errors import PlanError
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from isthmus.planners.layout.build_plan import sync_messages
from isthmus.planners.problem import LARGE, Candidate, Problem
from isthmus.planners.search_constants import (
    DEVICES_AN_EFFORT,
    HASTY_SECONDS,
    LEAST_LARGE_EFFORT,
    MESSAGES_A_SECOND,
    MOST_LARGE_EFFORT,
    PLAN_MESSAGES,
    SCHEME_MESSAGES,
    SMALL_EFFORT,
)
from isthmus.planners.search_state import SearchState
from isthmus.planners.stop import SearchEnded

__all__ = ["Limits", "ProgressCallback", "Search", "flaw", "sound", "usual_effort"]

ProgressCallback = Callable[[str, int], None]  # what is being tried, plans priced so far


class Limits(NamedTuple):
    """Limits of a search; None: as much as it takes."""

    seconds: float | None = None
    calls: int | None = None
    effort: float | None = None  # seconds on a usual machine (`SearchState.effort`)


def usual_effort(devices: int) -> float:
    """Return the default limit of a search for so many devices, in seconds on a usual machine."""
    if devices <= LARGE:
        return SMALL_EFFORT
    return min(MOST_LARGE_EFFORT, max(LEAST_LARGE_EFFORT, devices / DEVICES_AN_EFFORT))


class Search:
    """One search: seconds, simulator calls or effort that may be spent, and what was passed over.

    Where the state has a `stop`, its end is the end of this search too. `known`: plans that were priced before.
    """

    def __init__(
        self,
        state: SearchState,
        limits: Limits,
        progress: ProgressCallback | None,
        known: dict[object, Candidate] | None = None,
    ) -> None:
        self.state, self.problem, self.progress = state, state.problem, progress
        self.known: dict[object, Candidate] = {} if known is None else known
        self.seconds, self.calls, self.effort = limits
        seconds = limits.seconds if limits.seconds is not None else limits.effort
        self.hasty = seconds is not None and seconds <= HASTY_SECONDS  # what promises most at once comes first
        self.thorough = limits.effort is None  # what promised too little at first is tried as well
        self.start, self.first_call, self.first_effort = time.monotonic(), state.calls, state.effort
        self.crowded = 0  # the largest ring that was too much to play
        self.played = 0  # messages of the present scheme's plans
        self.best: Candidate | None = None  # of the present planner's plans
        self.interrupted = self.stopped = False  # by the user; by the state's stop
        self.cut_short = False  # some part of the search was ended by its part of the budget

    def ended(self, find: Callable[[], Candidate | None]) -> Candidate | None:
        """Return what `find` finds; where somebody interrupts it (Ctrl-C), or nothing is left, the best so far."""
        self.best = None
        try:
            return find()
        except SearchEnded:
            self.stopped = True
            return self.best
        except (KeyboardInterrupt, SystemError) as error:  # compiled code wraps what a signal raises in it
            if isinstance(error, SystemError) and not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            self.interrupted = True
            return self.best

    def spent(self) -> bool:
        """Return whether nothing is left of this search's limits; raise SearchEnded at the end of the whole search."""
        if self.state.stop is not None and not self.interrupted:
            self.state.stop.check()
        return self._over()

    def _over(self) -> bool:
        over_time = self.seconds is not None and self._seconds_left() <= 0
        over_effort = self.effort is not None and self.worked >= self.effort
        return self.interrupted or over_time or over_effort or (self.calls is not None and self.made >= self.calls)

    @property
    def made(self) -> int:
        """Return the number of plans priced so far."""
        return self.state.calls - self.first_call

    @property
    def worked(self) -> float:
        """Return the effort so far."""
        return self.state.effort - self.first_effort

    def left(self) -> float:
        """Return the seconds that are left of this search or of the whole."""
        whole = self.state.stop.left() if self.state.stop is not None else float("inf")
        return min(whole, self._seconds_left())

    def _seconds_left(self) -> float:
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.start)

    def calls_left(self) -> int | None:
        """Return how many plans may still be priced; None where only the clock counts, or nothing does."""
        left = [self.calls - self.made] if self.calls is not None else []
        left += [int((self.effort - self.worked) / self.state.price_effort)] if self.effort is not None else []
        return max(0, min(left)) if left else None

    def limits(self, part: float) -> Limits:
        """Return a part of what is left, in all that is counted: one call at least, if there is one."""
        seconds = None if self.seconds is None else max(0.0, self._seconds_left() * part)
        left = None if self.calls is None else max(0, self.calls - self.made)
        effort = None if self.effort is None else max(0.0, (self.effort - self.worked) * part)
        return Limits(seconds, None if left is None else max(min(1, left), round(left * part)), effort)

    @contextmanager
    def within(self, part: float) -> Iterator[None]:
        """Allow no more than a part of what is left while the context lasts; its plans' messages are counted anew."""
        before, (seconds, calls, effort) = Limits(self.seconds, self.calls, self.effort), self.limits(part)
        self.seconds = None if seconds is None else time.monotonic() - self.start + seconds
        self.calls = None if calls is None else self.made + calls
        self.effort = None if effort is None else self.worked + effort
        self.played = 0
        try:
            yield
        finally:
            self.cut_short |= self._over()
            self.seconds, self.calls, self.effort = before

    def tell(self, what: str) -> None:
        """Say what is being tried."""
        if self.progress is not None:
            self.progress(what, self.made)

    def price(self, plan: Plan) -> Candidate | None:
        """Return the plan with its price; None where playing it would take more than is left."""
        messages = sync_messages(plan)
        in_time = max(MESSAGES_A_SECOND / 4, MESSAGES_A_SECOND * self.left())
        if self.effort is not None and not self.thorough:  # where very many share one link, they take longer
            in_time = min(in_time, MESSAGES_A_SECOND * max(0.05, (self.effort - self.worked) / 20))
        if messages > min(PLAN_MESSAGES, SCHEME_MESSAGES - self.played, in_time):
            largest = max(len(sync.participants) for part in plan.parts for sync in getattr(part, "syncs", ()))
            self.crowded = max(self.crowded, largest)
            return None
        self.played += messages
        return self.state.price(plan)


def sound(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan keeps every rule and can be run."""
    return flaw(problem, plan) is None


def flaw(problem: Problem, plan: Plan) -> str | None:
    """Return the rule that a plan breaks, or why it cannot be run; None where it can."""
    try:
        check_runnable(check(plan, problem.cluster, {problem.job.name: problem.graph}), problem.simulator)
    except PlanError as error:
        return error.what
    return None
