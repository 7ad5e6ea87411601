"""The network of `learned` against searches that know nothing, at equal numbers of simulator calls, on held-out cases.

The cases are the group held of `_planner_cases`: families of models and kinds of topologies that no training problem
has (`isthmus.planners.learned.training.problems` says what it draws). All searches choose among the same drafts,
completed by the same exact pieces. The schemes' plans are there before: the network sees what the simulator says of the
best one, and annealing starts from it. The best known plan of a case is the best draft of all searches and of `auto`.
All are
run from as many seeds as `SEEDS` says. Beside `search` (the same tree without a network) stand:

    ordered     the same, where actions that are alike are taken in their order, not by chance
    random      choices drawn evenly
    annealing   one choice changed at a time, worse drafts kept with a chance that falls
    cross       cross-entropy method: choices drawn by how often the best quarter of the last 40 drafts took them

A *hard* case is one whose best scheme takes at least 5 % longer than the best known plan: there is something to find.

    python benchmarks/learned.py --quick        four cases, 200 calls

A run that was ended goes on with the searches that it lacks, as long as no code and no case has changed.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _planner_cases import case_named, cases, problem_of
from _results import Claim, Options, at_least, finish, options
from _rows import rows_of

from isthmus.planners.budget import Limits, Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.learned.decisions import Decision, Draft, Drafts, even, path_to
from isthmus.planners.learned.prior import shipped_prior
from isthmus.planners.learned.tree_search import Leaves, SearchTree
from isthmus.planners.schemes.scheme_search import scheme_plans
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.local_search import explore
from isthmus.planners.search_state import SearchState

CALLS = (50, 200, 800)
NEAR = 1.02  # times the best known
QUICK = ("held-01", "held-06", "held-11", "held-12")
SCHEMES = Limits(effort=2.0)  # of the plans that all start from
SEEDS = 1
KNOWN = "known"  # in place of a search: what is known of a case before
HARD = 1.05  # times the best known: what the best scheme takes at least
_AUTO_DRAFTS = 60
_MOST_FREE = 30  # drafts for each call: those that cannot hold the model take no call
Row = dict[str, Any]
Told = Callable[[Draft, float], None]
Method = Callable[[Candidates, Told, random.Random], None]
Steps = list[tuple[int, float]]
Key = tuple[str, str, int, int]  # case, search, seed, calls


def main() -> int:
    given = options("learned", __doc__)
    calls = CALLS[1] if given.quick else CALLS[-1]
    rows = compared(given, traced, tuple(METHODS), calls)
    return finish(given, rows, claims(rows, calls), others=summary(rows, calls, tuple(METHODS)))


def compared(
    given: Options, make: Callable[[Key], Any], methods: Sequence[str], calls: int, inputs: Sequence[Path] = ()
) -> list[Row]:
    """For every case, the calls that each search takes to come near the best known plan, and the best it has found.

    A list for each, by seeds; None where it did not come so far.
    """
    names = QUICK if given.quick else tuple(case.name for case in cases("held"))
    seeds = range(given.seed, given.seed + SEEDS)
    keys: list[Key] = [(name, method, at, calls) for at in seeds for method in methods for name in names]
    known: list[Key] = [(name, KNOWN, given.seed, calls) for name in names]
    made = dict(zip([*known, *keys], rows_of(given.name, make, [*known, *keys], inputs), strict=True))
    rows = []
    for name, first in zip(names, known, strict=True):
        found = {method: [made[name, method, at, calls] for at in seeds] for method in methods}
        rows.append(row_of(name, made[first], found, calls))
    return rows


def row_of(name: str, known: Row, found: Mapping[str, Sequence[Steps]], calls: int) -> Row:
    best = min((known["auto"], *(best for traces in found.values() for steps in traces for _, best in steps)))
    row: Row = {"case": name, "devices": known["devices"], "sorts": known["sorts"]}
    row["scheme_over_known"] = known["scheme"] / best
    for method, traces in found.items():
        row[f"{method}_calls"] = [calls_to(NEAR * best, steps) for steps in traces]
        for budget in CALLS:
            row[f"{method}_at_{budget}"] = [after(budget, steps, best) if budget <= calls else None for steps in traces]
    return row


def traced(key: Key) -> Steps | Row:
    """What a search finds, or what is known of a case before."""
    name, method, seed, calls = key
    return known_of(name, seed) if method == KNOWN else trace(name, METHODS[method], calls, f"{method} {seed}", seed)


def calls_to(seconds: float, steps: Steps) -> int | None:
    return next((at for at, best in steps if best <= seconds), None)


def after(budget: int, steps: Steps, known: float) -> float | None:
    """The best after so many calls, over the best known."""
    return min((best / known for at, best in steps if at <= budget), default=None)


def trace(name: str, method: Method, calls: int, chance: str, seed: int) -> Steps:
    """(calls so far, seconds of the best draft so far), each time that it gets better."""
    problem = problem_of(case_named("held", name), seed)
    given = scheme_plans(problem, SCHEMES)
    search = Search(SearchState(problem), Limits(calls=calls), None)
    candidates = Candidates(problem, LaneMaker(problem, MemoryFit(problem), search.state), search, given[0])
    steps: Steps = []

    def told(_: Draft, seconds: float) -> None:
        if seconds < (steps[-1][1] if steps else math.inf):
            steps.append((search.made, seconds))

    method(candidates, told, random.Random(chance))
    return steps


def known_of(name: str, seed: int) -> Row:
    """The best scheme's seconds, and those of the best draft among what `auto` likes best after ten seconds' effort.

    As a draft, without polish; infinite where no draft says any of it.
    """
    problem = problem_of(case_named("held", name), seed)
    given = scheme_plans(problem, SCHEMES)
    search = Search(SearchState(problem), Limits(effort=10.0), None)
    candidates = Candidates(problem, LaneMaker(problem, MemoryFit(problem), search.state), search, given[0])
    explore(candidates, given)
    drafts = Drafts(problem)
    leaves = Leaves(candidates, drafts)
    whole = {drafts.draft_of(found.setting) for found in candidates.found[:_AUTO_DRAFTS]}
    auto = min((leaves.price(draft) for draft in whole if draft and path_to(drafts, draft)), default=math.inf)
    row: Row = {"devices": len(problem.cluster.devices), "sorts": len(drafts.sorts(1))}
    return row | {"scheme": given[0].price.step_seconds, "auto": auto}


def by_tree(candidates: Candidates, told: Told, draw: random.Random) -> None:
    SearchTree(candidates, even, told).grow()


def by_ordered_tree(candidates: Candidates, told: Told, draw: random.Random) -> None:
    SearchTree(candidates, even, told, noise=0.0).grow()


def by_network(candidates: Candidates, told: Told, draw: random.Random) -> None:
    SearchTree(candidates, shipped_prior(), told).grow()


def drafts_until_spent(candidates: Candidates) -> range:
    return range(_MOST_FREE * (candidates.search.calls or 0))


def by_chance(candidates: Candidates, told: Told, draw: random.Random) -> None:
    drafts = Drafts(candidates.problem)
    leaves = Leaves(candidates, drafts)
    for _ in drafts_until_spent(candidates):
        if candidates.search.spent():
            return
        draft = completed(drafts, Draft(), lambda _, actions: draw.choice(actions))
        if draft is not None:
            told(draft, leaves.price(draft))


def completed(drafts: Drafts, draft: Draft, pick: Callable[[Draft, Sequence[Decision]], Decision]) -> Draft | None:
    """A whole draft; None where the choices lead nowhere."""
    while actions := drafts.actions(draft):
        draft = draft.having(pick(draft, actions))
    return draft if draft.whole else None


def by_annealing(candidates: Candidates, told: Told, draw: random.Random) -> None:
    drafts = Drafts(candidates.problem)
    leaves = Leaves(candidates, drafts)
    current = start_of(candidates, drafts)
    seconds = leaves.price(whole(current)) if current else math.inf
    for _ in drafts_until_spent(candidates):
        if candidates.search.spent():
            return
        changed = neighbour(drafts, current, draw)
        draft = whole(changed)
        if not draft.whole:
            continue
        found = leaves.price(draft)
        told(draft, found)
        heat = 0.3 * (0.02 / 0.3) ** (candidates.search.made / (candidates.search.calls or 1))
        if found <= seconds or (found < math.inf and draw.random() < math.exp(-math.log(found / seconds) / heat)):
            current, seconds = changed, found


def start_of(candidates: Candidates, drafts: Drafts) -> list[Decision]:
    """The choices that lead to the schemes' best plan, where a draft can say it."""
    if candidates.best is None:
        return []
    candidates.take(candidates.best)
    draft = drafts.draft_of(candidates.found[0].setting) if candidates.found else None
    return [action for _, action in path_to(drafts, draft)] if draft is not None else []


def neighbour(drafts: Drafts, choices: Sequence[Decision], draw: random.Random) -> list[Decision]:
    """One choice drawn anew; those after it stay as far as they still can."""
    at, made, draft = draw.randrange(len(choices)) if choices else -1, list[Decision](), Draft()
    while actions := drafts.actions(draft):
        i = len(made)
        keep = i < len(choices) and i != at and choices[i] in actions
        made.append(choices[i] if keep else draw.choice(actions))
        draft = draft.having(made[-1])
    return made


def whole(choices: Sequence[Decision]) -> Draft:
    draft = Draft()
    for action in choices:
        draft = draft.having(action)
    return draft


def by_cross_entropy(candidates: Candidates, told: Told, draw: random.Random) -> None:
    drafts = Drafts(candidates.problem)
    leaves = Leaves(candidates, drafts)
    weights: dict[tuple[int, int], Counter[Decision]] = {}
    tried = 0
    while not candidates.search.spent() and tried < len(drafts_until_spent(candidates)):
        drawn: list[tuple[float, list[tuple[tuple[int, int], Decision]]]] = []
        for _ in range(40):
            path: list[tuple[tuple[int, int], Decision]] = []
            draft = Draft()
            while actions := drafts.actions(draft):
                at = (draft.degree, len(path))
                likely = weights.get(at, Counter())
                total = sum(likely.values())
                action = draw.choices(
                    actions, [likely[a] / total + 0.3 / len(actions) if total else 1.0 for a in actions]
                )[0]
                path.append((at, action))
                draft = draft.having(action)
            tried += 1
            seconds = leaves.price(draft) if draft.whole and not candidates.search.spent() else math.inf
            if draft.whole:
                told(draft, seconds)
            drawn.append((seconds, path))
        best = sorted((one for one in drawn if one[0] < math.inf), key=lambda one: one[0])[:10]
        weights = {at: Counter({a: 0.3 * n for a, n in known.items()}) for at, known in weights.items()}
        for _, path in best:
            for at, action in path:
                weights.setdefault(at, Counter())[action] += 1.0


METHODS: dict[str, Method] = {
    "learned": by_network,
    "search": by_tree,
    "ordered": by_ordered_tree,
    "random": by_chance,
    "annealing": by_annealing,
    "cross": by_cross_entropy,
}


def summary(rows: Sequence[Row], calls: int, methods: Sequence[str]) -> Row:
    """Over all cases, and over those whose best scheme is not near already."""
    hard = [row for row in rows if row["scheme_over_known"] >= HARD]
    return {"all": _table(rows, calls, methods), "hard": _table(hard, calls, methods)}


def _table(rows: Sequence[Row], calls: int, methods: Sequence[str]) -> Row:
    """How often each method comes near, after how many calls, and how far from the best known it is."""
    found: Row = {"cases": len(rows)}
    for method in methods if rows else ():
        near = [n for row in rows for n in row[f"{method}_calls"]]
        line: Row = {"near the best known in": sum(n is not None for n in near), "of": len(near)}
        line["calls to come near, geometric mean (those that do not count as all)"] = mean_calls(rows, calls, method)
        for budget in (budget for budget in CALLS if budget <= calls):
            best = [over for row in rows for over in row[f"{method}_at_{budget}"]]
            some = [over for over in best if over is not None]
            line[f"over the best known after {budget}"] = statistics.geometric_mean(some) if some else None
            line[f"nothing after {budget} in"] = len(best) - len(some)
        found[method] = line
    return found


def mean_calls(rows: Sequence[Row], calls: int, method: str) -> float:
    near = [n for row in rows for n in row[f"{method}_calls"]]
    return statistics.geometric_mean([max(1, n if n is not None else calls) for n in near])


def claims(rows: Sequence[Row], calls: int) -> list[Claim]:
    mean = {method: mean_calls(rows, calls, method) for method in METHODS}
    near = [n for row in rows for n in row["learned_calls"]]
    return [
        at_least(
            "Calls that search needs relative to learned, to come within 2 % of the best known plan",
            mean["search"] / mean["learned"],
            3.0,
        ),
        at_least(
            "Calls that search with actions in a fixed order needs relative to learned, to come within 2 %",
            mean["ordered"] / mean["learned"],
            3.0,
        ),
        at_least(
            "Fraction of held-out runs in which learned comes within 2 % of the best known plan",
            sum(n is not None for n in near) / len(near),
            0.9,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
