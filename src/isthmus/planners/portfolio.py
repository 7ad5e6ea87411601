"""How a plan is found: every planner proposes, the simulator judges, the fastest plan that fits wins.

A scheme's ideas are tried in the order of their bounds, so that the search of a scheme ends when no idea that is left
can be faster than the best plan found. Planners that go beyond the schemes (`beyond`) start from the best of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cost.simulate import Price
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import NoPlanError, UsageError
from isthmus.plan.resolve import resolve
from isthmus.plan.rules.reach import apart
from isthmus.plan.types import Plan
from isthmus.planners.beyond import BEYOND
from isthmus.planners.bound import lower_bound
from isthmus.planners.budget import Limits, Progress, Search, sound, usual_effort
from isthmus.planners.copies import COPIED, Copies, copied_plan, small_problem
from isthmus.planners.grid import Fix, parse_fix
from isthmus.planners.ideas import Idea
from isthmus.planners.notes import missing_bytes, notes_on, nothing_fits
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.room import Room
from isthmus.planners.schemes import SCHEMES
from isthmus.planners.sync_ilp import load_solver

__all__ = ["PLANNERS", "Choice", "Fix", "choose_plan", "parse_fix", "scheme_plans"]

PLANNERS = (*BEYOND, *SCHEMES)

_SCHEMES = "schemes"  # all of them, and no planner beyond
_ALL = ("auto", "exact", "search", "learned", _SCHEMES)  # planners whose answer may be a scheme's plan
_MOST_IDEAS = 400  # of one scheme
_MOST_NEAREST = 24  # plans priced only to say what is missing
_NEAR = 1.05  # times the best plan so far: how far apart an idea's versions are taken to be
_SCHEMES_PART, _HASTY_PART = 0.4, 0.25  # of the budget, where planners come after the schemes
_IDEAS_PART = 0.5  # of a scheme's seconds, to make its ideas
_COPY_PART = 0.9  # of the budget of a large cluster, to plan one copy of it


class Choice(NamedTuple):
    """The plan that was found, and what it was compared with."""

    planner: str  # that made it: a scheme, or a planner that goes beyond them
    plan: Plan
    price: Price
    timeline: Timeline  # one step of it
    lower_bound: float  # seconds per step that no plan can go below
    schemes: Mapping[str, float | None]  # seconds per step of the best plan of each scheme tried, None: none can run
    seconds: float  # spent planning
    calls: int  # plans priced
    notes: tuple[str, ...]
    interrupted: bool = False  # somebody ended the search (Ctrl-C): this is the best so far


def choose_plan(
    problem: Problem,
    *,
    planner: str = "auto",
    fix: Fix | None = None,
    budget: float | None = None,
    calls: int | None = None,
    progress: Progress | None = None,
    beside: bool = True,
) -> Choice:
    """The fastest plan that the planner finds; `auto` tries all. With `beside` the usual schemes are priced too.

    `fix` pins degrees of `grid`. A budget in seconds or calls ends the search with the best plan so far, and so does
    Ctrl-C; with calls the same seed gives the same plan. Raises NoPlanError, saying what is missing where, if nothing
    fits, and KeyboardInterrupt if nothing did so far.
    """
    if planner not in PLANNERS:
        raise UsageError(f"there is no planner {planner}", found=planner, expected=", ".join(PLANNERS))
    if fix is not None and planner not in ("auto", "grid"):
        raise UsageError(
            "--fix pins degrees of the planner grid", found=f"--planner {planner}", expected="--planner grid"
        )
    if planner in BEYOND:
        load_solver()
    usual = budget is None and calls is None and planner in ("auto", "split", "search", "learned")
    effort = usual_effort(len(problem.usable)) if usual else None
    search = Search(problem, Limits(budget, calls, effort), progress)
    copies = small_problem(problem) if fix is None else None
    asked = (*_wanted(planner, fix), planner)
    found = _of_copies(search, copies, planner, beside) if copies is not None else {}
    if not any(found.get(name) for name in asked):
        found = _found(search, planner, fix, beside)
    fitting = {name: candidate for name in asked if (candidate := found.get(name)) is not None}
    winner = min(fitting, key=lambda name: fitting[name].price.step_seconds)
    best = _slim(problem, fitting[winner])
    played = timeline(problem.simulator.play(best.plan))
    tried = [name for name in SCHEMES if name in found]
    notes = notes_on(
        problem,
        best.plan,
        played,
        spent=search.spent() or search.cut_short,
        usual=usual,
        crowded=search.crowded,
        interrupted=search.interrupted,
    )
    if planner in BEYOND and planner != "auto" and winner in SCHEMES:
        notes = (f"{planner} found nothing faster than the scheme {winner}", *notes)
    if beside and (left := [name for name in SCHEMES if name not in found]):
        notes = (*notes, f"schemes that were not tried any more: {', '.join(left)}")
    return Choice(
        planner=winner,
        plan=best.plan,
        price=best.price,
        timeline=played,
        lower_bound=lower_bound(problem),
        schemes={name: it.price.step_seconds if (it := found[name]) is not None else None for name in tried},
        seconds=time.monotonic() - search.start,
        calls=search.made + (copies.problem.calls if copies is not None else 0),
        notes=notes,
        interrupted=search.interrupted,
    )


def _slim(problem: Problem, best: Candidate) -> Candidate:
    """The plan with those relays only that it needs; as relays may need others, from none on until none is missing."""
    if not best.plan.via:
        return best
    plan, missing = replace(best.plan, via=()), True
    while missing:
        resolved = resolve(plan, problem.cluster, {problem.job.name: problem.graph})
        needed = {frozenset(pair) for pair, _ in apart(resolved, problem.cluster)}
        via = tuple(via for via in best.plan.via if frozenset(via.between) in needed)
        plan, missing = replace(plan, via=via), via != plan.via
    return Candidate(plan, problem.simulator.price(plan))


def scheme_plans(problem: Problem, limits: Limits) -> list[Candidate]:
    """The best plan of each scheme that has one, the best first; raises NoPlanError where none has."""
    found = _found(Search(problem, limits, None), _SCHEMES, None, True)
    fitting = [candidate for candidate in found.values() if candidate is not None]
    return sorted(fitting, key=lambda candidate: candidate.price.step_seconds)


def _wanted(planner: str, fix: Fix | None) -> tuple[str, ...]:
    """The schemes whose plans are an answer; others are priced beside them."""
    if fix is not None:
        return ("grid",)
    return tuple(SCHEMES) if planner in _ALL else (planner,) if planner in SCHEMES else ()


def _found(search: Search, planner: str, fix: Fix | None, beside: bool) -> dict[str, Candidate | None]:
    """The best plan of every scheme (without `beside`: of those asked for), and the planner's own under its name.

    Raises NoPlanError if none of those that were asked for fits.
    """
    problem, room, found, ideas = search.problem, Room(search.problem), dict[str, Candidate | None](), list[Idea]()
    beyond, wanted = BEYOND.get(planner) if fix is None else None, _wanted(planner, fix)
    first = search
    if beyond is not None:
        part = _HASTY_PART if search.hasty and not problem.copied else _SCHEMES_PART
        first = Search(problem, search.limits(part), search.progress)
    names = tuple(dict.fromkeys((*wanted, *(SCHEMES if beside else ()))))
    for i, name in enumerate(names):
        if first.spent():
            break
        kept = ideas if name in wanted or beyond is not None else []
        with first.within(1 / (len(names) - i)):
            found[name] = first.ended(partial(_scheme, first, room, name, fix, kept))
    search.crowded, search.interrupted, search.cut_short = first.crowded, first.interrupted, first.cut_short
    fitting = [candidate for name in wanted if (candidate := found.get(name)) is not None]
    fitting.sort(key=lambda candidate: candidate.price.step_seconds)
    if beyond is not None and not search.interrupted:
        better = search.ended(partial(beyond, problem, room, search, fitting))
        found |= {planner: better} if better is not None and better not in fitting else {}
    if not fitting and found.get(planner) is None:
        if search.interrupted:
            raise KeyboardInterrupt
        raise nothing_fits(
            problem, wanted or (planner,), fix, _nearest(search, ideas), spent=search.spent() or search.cut_short
        )
    return found


def _of_copies(search: Search, copies: Copies, planner: str, beside: bool) -> dict[str, Candidate | None]:
    """The same for a large cluster, by plans for a copy of it: empty where none of them fits as a whole."""
    inner = Search(copies.problem, search.limits(_COPY_PART), search.progress)
    try:
        found = _found(inner, planner, None, beside)
    except NoPlanError:
        return {}
    search.crowded, search.interrupted = inner.crowded, inner.interrupted
    search.cut_short = inner.cut_short or inner.spent()
    small = {name: candidate for name, candidate in found.items() if candidate is not None}
    ranked = sorted(small, key=lambda name: small[name].price.step_seconds)  # so that Ctrl-C finds the best done
    return found | {name: search.ended(partial(_whole, search, copies, small[name])) for name in ranked}


def _whole(search: Search, copies: Copies, small: Candidate) -> Candidate | None:
    """The best plan of the whole cluster that has this plan in every copy."""
    best: Candidate | None = None
    for how in COPIED if not search.interrupted else ():
        candidate = search.problem.price(copied_plan(search.problem, copies, small.plan, how))
        fits = candidate.price.fits and (best is None or candidate.price.step_seconds < best.price.step_seconds)
        best = candidate if fits and sound(search.problem, candidate.plan) else best
        search.tell("copies")
    return best


def _scheme(search: Search, room: Room, name: str, fix: Fix | None, kept: list[Idea]) -> Candidate | None:
    """The best plan of a scheme, whose ideas are added to `kept`: they are tried best bound first."""
    pinned = fix if fix is not None and name == "grid" else Fix()
    ideas, until = list[Idea](), search.left() * (1 - _IDEAS_PART)
    for idea in SCHEMES[name](search.problem, room, pinned):
        ideas.append(idea)
        if search.left() < until:
            search.cut_short = True
            break
    kept += ideas
    return _best(search, sorted(ideas, key=lambda idea: idea.seconds), name)


def _best(search: Search, ideas: Sequence[Idea], name: str) -> Candidate | None:
    """The fastest plan that fits and keeps every rule."""
    best: Candidate | None = None
    search.played = 0
    for idea in islice(ideas, _MOST_IDEAS):
        if search.spent() or (best is not None and idea.seconds >= best.price.step_seconds):
            break
        search.best = best = _tried(search, idea, best)
        search.tell(name)
    return best


def _tried(search: Search, idea: Idea, best: Candidate | None) -> Candidate | None:
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
        best = candidate if faster and sound(search.problem, candidate.plan) else best
    return best


def _nearest(search: Search, ideas: Iterable[Idea]) -> Candidate | None:
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
