"""How a plan is found: every planner proposes, the simulator judges, the fastest plan that fits wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from isthmus.cost.simulate import Price
from isthmus.errors import NoPlanError, UsageError
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from isthmus.planners.problem import Candidate, Problem, lower_bound
from isthmus.planners.schemes import SCHEMES, Fix, Ladder, parse_fix
from isthmus.units import format_bytes

__all__ = ["PLANNERS", "Choice", "Fix", "choose_plan", "parse_fix"]

PLANNERS = ("auto", *SCHEMES)
Progress = Callable[[str, int], None]  # the scheme being tried, plans priced so far


class Choice(NamedTuple):
    """The plan that was found, and what it was compared with."""

    planner: str  # the scheme that made it
    plan: Plan
    price: Price
    lower_bound: float  # seconds per step that no plan can go below
    schemes: Mapping[str, float | None]  # seconds per step of the best plan of each scheme, None: none fits
    seconds: float  # spent planning
    calls: int  # plans priced
    notes: tuple[str, ...]


class _Budget:
    """Seconds and simulator calls that may be spent, counted from now."""

    def __init__(self, problem: Problem, seconds: float | None, calls: int | None) -> None:
        self.problem, self.seconds, self.calls = problem, seconds, calls
        self.start, self.first_call = time.monotonic(), problem.calls

    def spent(self) -> bool:
        over_time = self.seconds is not None and time.monotonic() - self.start >= self.seconds
        return over_time or (self.calls is not None and self.problem.calls - self.first_call >= self.calls)


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
    limit = _Budget(problem, budget, calls)
    wanted = ("grid",) if fix is not None else tuple(SCHEMES) if planner == "auto" else (planner,)
    found: dict[str, Candidate | None] = {}
    nearest: Candidate | None = None
    for name in (*wanted, *(scheme for scheme in SCHEMES if scheme not in wanted)):
        ladders = SCHEMES[name](problem, fix if fix is not None and name == "grid" else Fix())
        found[name], near = _best(problem, ladders, limit, name, progress)
        nearest = near if nearest is None or (near and _missing(near) < _missing(nearest)) else nearest
    fitting = {name: candidate for name in wanted if (candidate := found[name]) is not None}
    if not fitting:
        raise _nothing_fits(problem, nearest, fix, limit)
    winner = min(fitting, key=lambda name: fitting[name].price.step_seconds)
    check(fitting[winner].plan, problem.cluster, {problem.job.name: problem.graph})
    return Choice(
        planner=winner,
        plan=fitting[winner].plan,
        price=fitting[winner].price,
        lower_bound=lower_bound(problem),
        schemes={name: candidate.price.step_seconds if candidate else None for name, candidate in found.items()},
        seconds=time.monotonic() - limit.start,
        calls=problem.calls - limit.first_call,
        notes=_notes(problem, limit),
    )


def _best(
    problem: Problem, ladders: Iterator[Ladder], limit: _Budget, name: str, progress: Progress | None
) -> tuple[Candidate | None, Candidate | None]:
    """The fastest plan that fits, and the plan that misses least."""
    best: Candidate | None = None
    nearest: Candidate | None = None
    for ladder in ladders:
        for plan in ladder:
            if limit.spent():
                return best, nearest
            candidate = problem.price(plan)
            if candidate.price.fits:
                if best is None or candidate.price.step_seconds < best.price.step_seconds:
                    best = candidate
                break
            if not candidate.price.impossible and (nearest is None or _missing(candidate) < _missing(nearest)):
                nearest = candidate
        if progress is not None:
            progress(name, problem.calls - limit.first_call)
    return best, nearest


def _missing(candidate: Candidate) -> float:
    """Bytes that are missing over all devices and hosts."""
    return sum(shortage.needed - shortage.available for shortage in candidate.price.shortages)


def _notes(problem: Problem, limit: _Budget) -> tuple[str, ...]:
    notes = [f"{kind} is left out: it lacks {problem.precision} or is slow in it" for kind in problem.left_out]
    if problem.job.precision is None:
        notes.append(f"precision {problem.precision}: the fastest that every device has")
    if limit.spent():
        notes.append("the budget ended the search: this is the best plan so far")
    return tuple(notes)


def _nothing_fits(problem: Problem, nearest: Candidate | None, fix: Fix | None, limit: _Budget) -> NoPlanError:
    """What is missing where, in the plan that misses least."""
    where = f"{problem.job.name} on cluster {problem.cluster.name}"
    if nearest is None:
        given = ",".join(f"{k}={v}" for k, v in (fix or Fix())._asdict().items() if v)
        return NoPlanError(
            "no layout was priced" if limit.spent() else "no layout has these degrees",
            where=where,
            found=f"--fix {given}; {len(problem.usable)} devices, batch {problem.job.batch}" if given else None,
            expected=None if limit.spent() else "tp * pp * dp devices that can talk, dp * micro dividing the batch",
            next="Give a larger --budget or --calls" if limit.spent() else "Leave out --fix, or one of its degrees",
        )
    shortages = sorted(nearest.price.shortages, key=lambda s: s.available - s.needed)
    parts = [
        f"{s.where} needs {format_bytes(s.needed)}, has {format_bytes(s.available)}: "
        f"{format_bytes(s.needed - s.available)} missing"
        for s in shortages[:4]
    ]
    more = f"; and {len(shortages) - 4} more devices" if len(shortages) > 4 else ""
    return NoPlanError(
        f"no plan fits in memory; {format_bytes(_missing(nearest))} are missing in the plan that misses least",
        where=where,
        found="; ".join(parts) + more,
        expected=f"room for {problem.graph.elements:,} parameters and their activations",
        next="Add devices or memory, or lower the batch or the sequence",
    )
