"""How a plan is found: every planner proposes, the simulator judges, the fastest plan that fits wins.

A scheme's ideas are tried in the order of their bounds, so that the search of a scheme ends when no idea that is left
can be faster than the best plan found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import PlanError, UsageError
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from isthmus.planners.grid import Fix, parse_fix
from isthmus.planners.ideas import Idea
from isthmus.planners.notes import missing_bytes, notes_on, nothing_fits
from isthmus.planners.pieces import sync_messages
from isthmus.planners.problem import Candidate, Problem, lower_bound
from isthmus.planners.room import Room
from isthmus.planners.schemes import SCHEMES

__all__ = ["PLANNERS", "Choice", "Fix", "choose_plan", "parse_fix"]

PLANNERS = ("auto", *SCHEMES)
Progress = Callable[[str, int], None]  # the scheme being tried, plans priced so far

_MOST_IDEAS = 400  # of one scheme
_MOST_NEAREST = 24  # plans priced only to say what is missing
_NEAR = 1.05  # times the best plan so far: how far apart an idea's versions are taken to be
_MOST_MESSAGES = 10_000_000  # of one plan: about ten seconds
_SCHEME_MESSAGES = 25_000_000  # of all plans of one scheme
_MESSAGES_A_SECOND = 1e6  # that the simulator plays, at least


class Choice(NamedTuple):
    """The plan that was found, and what it was compared with."""

    planner: str  # the scheme that made it
    plan: Plan
    price: Price
    timeline: Timeline  # one step of it
    lower_bound: float  # seconds per step that no plan can go below
    schemes: Mapping[str, float | None]  # seconds per step of the best plan of each scheme, None: none fits
    seconds: float  # spent planning
    calls: int  # plans priced
    notes: tuple[str, ...]


class _Search:
    """The state of one search: what may be spent, and what was passed over."""

    def __init__(self, problem: Problem, seconds: float | None, calls: int | None, progress: Progress | None) -> None:
        self.problem, self.seconds, self.calls, self.progress = problem, seconds, calls, progress
        self.start, self.first_call = time.monotonic(), problem.calls
        self.crowded = 0  # the largest ring that was too much to play
        self.played = 0  # messages of the present scheme's plans

    def spent(self) -> bool:
        over_time = self.seconds is not None and self.left() <= 0
        return over_time or (self.calls is not None and self.problem.calls - self.first_call >= self.calls)

    def left(self) -> float:
        """Seconds."""
        return float("inf") if self.seconds is None else self.seconds - (time.monotonic() - self.start)

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


def choose_plan(
    problem: Problem,
    *,
    planner: str = "auto",
    fix: Fix | None = None,
    budget: float | None = None,
    calls: int | None = None,
    progress: Progress | None = None,
) -> Choice:
    """The fastest plan that the planner finds; `auto` tries all. The usual schemes are priced beside it.

    `fix` pins degrees of `grid`. A budget in seconds or calls ends the search with the best plan so far; with calls the
    same seed gives the same plan. Raises NoPlanError, saying what is missing where, if nothing fits.
    """
    if planner not in PLANNERS:
        raise UsageError(f"there is no planner {planner}", found=planner, expected=", ".join(PLANNERS))
    if fix is not None and planner not in ("auto", "grid"):
        raise UsageError(
            "--fix pins degrees of the planner grid", found=f"--planner {planner}", expected="--planner grid"
        )
    search = _Search(problem, budget, calls, progress)
    wanted = ("grid",) if fix is not None else tuple(SCHEMES) if planner == "auto" else (planner,)
    room, found = Room(problem), dict[str, Candidate | None]()
    ideas: list[Idea] = []
    for name in (*wanted, *(scheme for scheme in SCHEMES if scheme not in wanted)):
        made = [] if search.spent() else _ideas(problem, room, name, fix)
        found[name] = _best(search, made, name)
        ideas += made if name in wanted else []
    fitting = {name: candidate for name in wanted if (candidate := found[name]) is not None}
    if not fitting:
        raise nothing_fits(problem, wanted, fix, _nearest(search, ideas), spent=search.spent())
    winner = min(fitting, key=lambda name: fitting[name].price.step_seconds)
    best = fitting[winner]
    played = timeline(problem.simulator.play(best.plan))
    return Choice(
        planner=winner,
        plan=best.plan,
        price=best.price,
        timeline=played,
        lower_bound=lower_bound(problem),
        schemes={name: candidate.price.step_seconds if candidate else None for name, candidate in found.items()},
        seconds=time.monotonic() - search.start,
        calls=problem.calls - search.first_call,
        notes=notes_on(problem, best.plan, played, spent=search.spent(), crowded=search.crowded),
    )


def _ideas(problem: Problem, room: Room, name: str, fix: Fix | None) -> list[Idea]:
    """A scheme's most promising ideas, best bound first."""
    pinned = fix if fix is not None and name == "grid" else Fix()
    return sorted(SCHEMES[name](problem, room, pinned), key=lambda idea: idea.seconds)


def _best(search: _Search, ideas: Sequence[Idea], name: str) -> Candidate | None:
    """The fastest plan that fits and keeps every rule."""
    best: Candidate | None = None
    search.played = 0
    for idea in islice(ideas, _MOST_IDEAS):
        if search.spent() or (best is not None and idea.seconds >= best.price.step_seconds):
            break
        best = _tried(search, idea, best)
        if search.progress is not None:
            search.progress(name, search.problem.calls - search.first_call)
    return best


def _tried(search: _Search, idea: Idea, best: Candidate | None) -> Candidate | None:
    """The best so far, or the idea's best version that fits if that is faster.

    Versions differ little: where the first that fits is not near to the best so far, the others are left out.
    """
    for version in idea.versions():
        if search.spent() or (best is not None and version.seconds >= best.price.step_seconds):
            return best
        candidate = search.price(version.make())
        if candidate is None or not candidate.price.fits:
            continue
        if best is not None and candidate.price.step_seconds > _NEAR * best.price.step_seconds:
            return best
        faster = best is None or candidate.price.step_seconds < best.price.step_seconds
        best = candidate if faster and _sound(search.problem, candidate.plan) else best
    return best


def _sound(problem: Problem, plan: Plan) -> bool:
    """Whether a plan keeps every rule."""
    try:
        check(plan, problem.cluster, {problem.job.name: problem.graph})
    except PlanError:
        return False
    return True


def _nearest(search: _Search, ideas: Iterable[Idea]) -> Candidate | None:
    """Of plans that do not fit, the one that misses least: most memory and smallest micro-batches are tried first."""
    nearest: Candidate | None = None
    search.played = 0
    ordered = sorted(ideas, key=lambda idea: (-idea.memory, idea.samples))
    for idea in islice(ordered, _MOST_NEAREST):
        if search.spent() and nearest is not None:
            break
        plan = idea.nearest()
        candidate = None if plan is None else search.price(plan)
        if candidate is None or candidate.price.impossible or not candidate.price.shortages:
            continue
        if nearest is None or missing_bytes(candidate) < missing_bytes(nearest):
            nearest = candidate
    return nearest
