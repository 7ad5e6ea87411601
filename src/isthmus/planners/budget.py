"""What a search may spend, what it has spent, and the best it has found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from isthmus.errors import PlanError
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from isthmus.planners.pieces import sync_messages
from isthmus.planners.problem import Candidate, Problem

__all__ = ["Progress", "Search", "sound"]

Progress = Callable[[str, int], None]  # what is being tried, plans priced so far

_MOST_MESSAGES = 10_000_000  # of one plan: about ten seconds
_SCHEME_MESSAGES = 25_000_000  # of all plans of one scheme
_MESSAGES_A_SECOND = 1e6  # that the simulator plays, at least


class Search:
    """One search: seconds or simulator calls that may be spent, and what was passed over."""

    def __init__(self, problem: Problem, seconds: float | None, calls: int | None, progress: Progress | None) -> None:
        self.problem, self.seconds, self.calls, self.progress = problem, seconds, calls, progress
        self.start, self.first_call = time.monotonic(), problem.calls
        self.crowded = 0  # the largest ring that was too much to play
        self.played = 0  # messages of the present scheme's plans
        self.best: Candidate | None = None  # of the present planner's plans
        self.interrupted = False
        self.cut_short = False  # some part of the search was ended by its part of the budget

    def ended(self, find: Callable[[], Candidate | None]) -> Candidate | None:
        """What is found; where somebody interrupts it (Ctrl-C), the best so far."""
        self.best = None
        try:
            return find()
        except KeyboardInterrupt:
            self.interrupted = True
            return self.best

    def spent(self) -> bool:
        """Whether nothing is left."""
        over_time = self.seconds is not None and self.left() <= 0
        return self.interrupted or over_time or (self.calls is not None and self.made >= self.calls)

    @property
    def made(self) -> int:
        """Plans priced so far."""
        return self.problem.calls - self.first_call

    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.start)

    def limits(self, part: float) -> tuple[float | None, int | None]:
        """A part of what is left, in seconds and in calls: one call at least, if there is one."""
        seconds = None if self.seconds is None else max(0.0, self.left() * part)
        left = None if self.calls is None else max(0, self.calls - self.made)
        return seconds, None if left is None else max(min(1, left), round(left * part))

    @contextmanager
    def within(self, part: float) -> Iterator[None]:
        """Meanwhile no more than a part of what is left may be spent; its plans' messages are counted anew."""
        before, (seconds, calls) = (self.seconds, self.calls), self.limits(part)
        self.seconds = None if seconds is None else time.monotonic() - self.start + seconds
        self.calls = None if calls is None else self.made + calls
        self.played = 0
        try:
            yield
        finally:
            self.cut_short |= self.spent()
            self.seconds, self.calls = before

    def tell(self, what: str) -> None:
        """Says what is being tried."""
        if self.progress is not None:
            self.progress(what, self.made)

    def price(self, plan: Plan) -> Candidate | None:
        """The plan with its price; None where playing it would take more than is left."""
        messages = sync_messages(plan)
        in_time = max(_MESSAGES_A_SECOND / 4, _MESSAGES_A_SECOND * self.left())
        if messages > min(_MOST_MESSAGES, _SCHEME_MESSAGES - self.played, in_time):
            largest = max(len(sync.participants) for part in plan.parts for sync in getattr(part, "syncs", ()))
            self.crowded = max(self.crowded, largest)
            return None
        self.played += messages
        return self.problem.price(plan)


def sound(problem: Problem, plan: Plan) -> bool:
    """Whether a plan keeps every rule."""
    try:
        check(plan, problem.cluster, {problem.job.name: problem.graph})
    except PlanError:
        return False
    return True
