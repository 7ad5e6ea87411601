"""Ways to choose the syncs of one plan, beside each other: seconds per step, by the simulator."""

from __future__ import annotations

from collections import Counter
from typing import Any

from isthmus.plan.types import Plan
from isthmus.planners.layout.build_plan import only_pipeline
from isthmus.planners.problem import Problem
from isthmus.planners.search_state import SearchState
from isthmus.planners.syncs.sync_ilp import best_syncs, greedy, solve
from isthmus.planners.syncs.sync_loads import make_programme
from isthmus.planners.syncs.sync_options import GIVEN, make_offers

__all__ = ["sync_rows"]


def sync_rows(problem: Problem, plan: Plan, *, seconds: float = 0.5) -> dict[str, Any]:
    """Seconds per step of the plan with its buckets all synced in one way, each in its own fastest, or chosen together.

    `ring`: as the plan has it, which must be rings; `ordered`: in the order that crosses slow links least; `programme`:
    what the integer programme chooses for the plan's own buckets; `ilp`: that judged against the others, in buckets of
    several sizes. Absent: no bucket has that way. `by_factors`: the part of all synced elements that go by factors in
    the last.
    """
    offers = make_offers(problem, plan)
    programme = make_programme(SearchState(problem), offers)
    count = len(offers.offers)
    rows: dict[str, Any] = {"ring": problem.price(plan).price.step_seconds}
    for way in offers.ways:
        name = offers.offers[0].ways[GIVEN].how if way == GIVEN else way  # a tree where rings are too much to play
        if name not in ("ring", "sparse"):
            rows[name] = problem.price(offers.planned([way] * count)).price.step_seconds
    if programme is not None:
        for name, chosen in (("greedy", greedy(programme)), ("programme", solve(programme, seconds).chosen)):
            ways = [programme.ways[c] for c in chosen]
            rows[name] = problem.price(offers.planned(ways)).price.step_seconds
    best = best_syncs(SearchState(problem), plan, seconds=seconds)
    rows |= {"ilp": best.price.step_seconds, "gap": best.gap, "stopped": best.stopped}
    return rows | {"by_factors": _by_factors(problem, best.plan), "ways": _ways(best.plan)}


def _ways(plan: Plan) -> dict[str, int]:
    """Buckets by how they are synced."""
    return dict(Counter(sync.how for sync in only_pipeline(plan).syncs))


def _by_factors(problem: Problem, plan: Plan) -> float:
    syncs = only_pipeline(plan).syncs
    named = frozenset(name for sync in syncs for name in sync.parameters if name[0] != "[")
    sizes = [problem.table.bucket(sync.parameters, named).elements for sync in syncs]
    chosen = sum(size for sync, size in zip(syncs, sizes, strict=True) if sync.how == "factors")
    return chosen / sum(sizes) if sizes else 0.0
