"""Choose a plan: the usual schemes are searched first, then `auto` or another planner searches for a faster plan.

`auto` is one function (`search_planners`), which starts from the best plan of the schemes. Without a budget, the
schemes are searched to their end after it. The simulator judges all plans, and the fastest one that fits wins. The
search goes in rounds (`rounds`). Clusters of very many devices are planned as copies of a small one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cost.simulate import Price
from isthmus.cost.sources import TimesUsed, times_used
from isthmus.cost.timeline import Timeline, timeline
from isthmus.errors import NoPlanError, UsageError
from isthmus.plan.file import PlanFile, inputs_digest
from isthmus.plan.resolve import resolve
from isthmus.plan.rules.connections import apart
from isthmus.plan.types import Outcome, Plan, Prediction
from isthmus.planners.budget import Limits, ProgressCallback, Search, sound, usual_effort
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.notes import notes_on, unfinished_note
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.rounds import Asked, Rounds, SearchResult
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix, parse_fix
from isthmus.planners.schemes.plain_ddp import everywhere
from isthmus.planners.search.large_clusters import Copies, CopiesState, small_problem, whole_plan
from isthmus.planners.search_constants import COPY_PART
from isthmus.planners.search_planners import BEYOND
from isthmus.planners.search_state import SearchState, Watch
from isthmus.planners.stop import Stop
from isthmus.planners.syncs.sync_ilp import load_solver

__all__ = ["PLANNERS", "Choice", "Fix", "choose_plan", "parse_fix"]

PLANNERS = (*BEYOND, *SCHEMES)


class Choice(NamedTuple):
    """The plan that was found, and what it was compared with."""

    problem: Problem  # that was planned
    planner: str  # that made it: a scheme, or a planner that goes beyond them
    plan: Plan
    price: Price
    timeline: Timeline  # one step of it
    lower_bound: float  # seconds per step that no plan can go below
    outcomes: Mapping[str, Outcome]  # what came of each scheme
    seconds: float  # spent planning
    calls: int  # plans priced
    decisions: tuple[str, ...]  # sentences about what was decided for the user
    everywhere: Outcome | None = None  # data parallelism over all devices with even shares, where it was priced
    interrupted: bool = False  # the user ended the search (Ctrl-C): this is the best so far
    sources: tuple[tuple[str, str], ...] = ()  # where the times come from, in two columns

    @property
    def times(self) -> TimesUsed:
        """Return how many of the plan's times were measured, interpolated, or taken from the catalog."""
        return times_used(self.problem.simulator, self.plan)

    @property
    def file(self) -> PlanFile:
        """Return what a plan file says of it: the plan, its cluster, and what was predicted."""
        problem, price = self.problem, self.price
        predicted = Prediction(
            step_seconds=price.step_seconds,
            jobs=dict(price.jobs),
            memory=dict(price.memory),
            lower_bound_seconds=self.lower_bound,
            baselines=self.schemes,
            baseline_outcomes=dict(self.outcomes),
            everywhere=self.everywhere,
        )
        digests = {problem.job.name: problem.graph.digest}
        return PlanFile(
            planner=self.planner,
            seed=problem.seed,
            inputs=inputs_digest(problem.cluster, (problem.job,), digests, problem.profile),
            plan=self.plan,
            cluster=problem.cluster,
            predicted=predicted,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentences about what was decided, then those about where the times come from."""
        return (*self.decisions, *(f"{word}: {text}" for word, text in self.sources))

    @property
    def schemes(self) -> dict[str, float | None]:
        """Return the seconds per step of each scheme; None unless it was searched to its end and has a plan."""
        return {name: outcome.seconds for name, outcome in self.outcomes.items()}


def choose_plan(
    problem: Problem,
    *,
    planner: str = "auto",
    fix: Fix | None = None,
    budget: float | None = None,
    calls: int | None = None,
    progress: ProgressCallback | None = None,
    watch: Watch | None = None,
    beside: bool = True,
) -> Choice:
    """Find the fastest plan that the planner can; its name is `auto`, another one of `BEYOND`, or that of a scheme.

    `auto` searches all schemes, and then, from the best of their plans, for a faster one. With `beside` the usual
    schemes are searched for every planner, to compare with.
    `fix` pins degrees of `grid`. A budget in seconds or calls ends the search with the best plan so far, and so does
    Ctrl-C; with calls the same seed gives the same plan, and more calls never a worse one. Raises NoPlanError, saying
    what is missing where, if nothing fits, and KeyboardInterrupt if nothing did so far.
    `watch` is called with the price of every plan that the search looks at.
    """
    if planner not in PLANNERS:
        raise UsageError(f"there is no planner {planner}", found=planner, expected=", ".join(PLANNERS))
    if fix is not None and planner not in ("auto", "grid"):
        raise UsageError(
            "--fix pins degrees of the planner grid", found=f"--planner {planner}", expected="--planner grid"
        )
    if planner in BEYOND:
        load_solver()
    start, state = time.monotonic(), SearchState(problem, watch)
    asked = Asked(planner, fix, beside, budget is not None or calls is not None, progress)
    effort, stop = usual_effort(len(problem.usable)), Stop(budget, calls)
    copies = small_problem(problem) if fix is None else None
    copied = CopiesState(problem, copies) if copies is not None else None
    found = _of_copies(state, copied, asked, stop, effort) if copied is not None else None
    if found is None:
        found = Rounds(state, asked, stop, effort).find()
    fitting = {name: candidate for name in (*asked.wanted, planner) if (candidate := found.plans.get(name)) is not None}
    winner = min(fitting, key=lambda name: fitting[name].price.step_seconds)
    best = _slim(problem, fitting[winner])
    played = timeline(problem.simulator.play(best.plan))
    notes = notes_on(
        problem,
        best.plan,
        played,
        spent=found.spent,
        usual=asked.usual,
        crowded=found.crowded,
        interrupted=found.interrupted,
    )
    if planner in BEYOND and planner != "auto" and winner in SCHEMES:
        notes = (f"{planner} found nothing faster than the scheme {winner}", *notes)
    if left := [name for name, outcome in found.outcomes.items() if outcome.state == "unfinished"]:
        notes = (*notes, unfinished_note(left, usual=asked.usual, interrupted=found.interrupted))
    return Choice(
        problem=problem,
        planner=winner,
        plan=best.plan,
        price=best.price,
        timeline=played,
        lower_bound=lower_bound(problem),
        outcomes=found.outcomes,
        seconds=time.monotonic() - start,
        calls=state.calls + (copied.calls if copied is not None else 0),
        decisions=notes,
        everywhere=everywhere(problem) if beside and not found.interrupted else None,
        interrupted=found.interrupted,
    )


def _slim(problem: Problem, best: Candidate) -> Candidate:
    """Return the plan with those relays only that it needs; as relays may need others, add them from none until none is
    missing.
    """
    if not best.plan.via:
        return best
    plan, missing = replace(best.plan, via=()), True
    while missing:
        resolved = resolve(plan, problem.cluster, {problem.job.name: problem.graph})
        needed = {frozenset(pair) for pair, _ in apart(resolved, problem.cluster)}
        via = tuple(via for via in best.plan.via if frozenset(via.between) in needed)
        plan, missing = replace(plan, via=via), via != plan.via
    return Candidate(plan, problem.simulator.price(plan))


def _of_copies(state: SearchState, copied: CopiesState, asked: Asked, stop: Stop, effort: float) -> SearchResult | None:
    """Search for a large cluster through plans for a copy of it; None where none of them fits as a whole."""
    rounds = Rounds(copied, asked, stop.part(COPY_PART), COPY_PART * effort)
    try:
        found = rounds.find()
    except NoPlanError:
        return None
    finally:
        stop.calls = rounds.stop.calls
    search = Search(state, Limits(), asked.progress)  # so that Ctrl-C finds the best done
    ranked = sorted(found.plans.items(), key=lambda item: item[1].price.step_seconds)
    made = {name: search.ended(partial(_whole, search, copied.copies, small)) for name, small in ranked}
    plans = {name: candidate for name, candidate in made.items() if candidate is not None}
    if not any(name in plans for name in (*asked.wanted, asked.planner)):
        return None
    layouts = {name for name, scheme in rounds.schemes.items() if scheme.ideas and name not in plans}
    only = f"it was only searched as {copied.copies.number} equal copies, and none fits"
    outcomes = {
        name: Outcome(state="unfinished", reason=only) if name in layouts and outcome.state != "unfinished" else outcome
        for name, outcome in found.outcomes.items()
    }  # where no copy has a plan, the whole cluster may have one
    return found._replace(plans=plans, outcomes=outcomes, interrupted=found.interrupted or search.interrupted)


def _whole(search: Search, copies: Copies, small: Candidate) -> Candidate | None:
    """Return the plan of the whole cluster that has this plan in every copy, if it can be run."""
    if search.interrupted:
        return None
    search.tell("copies")
    candidate = whole_plan(search.state, copies, small.plan)
    return candidate if candidate.price.fits and sound(search.problem, candidate.plan) else None
