"""The network of `learned` against searches that know nothing, at equal numbers of simulator calls, on held-out cases.

The cases are the group held of `_planner_cases`: families of models and kinds of topologies that no training problem
has (`isthmus.planners.training.problems` says what it draws). All searches choose among the same drafts, completed by
the same exact pieces. The schemes' plans are there before: the network sees what the simulator says of the best one,
and annealing starts from it. The best known plan of a case is the best draft of all searches and of `auto`. All are
run from as many seeds as `SEEDS` says. Beside `search` (the same tree without a network) stand:

    ordered     the same, where actions that are alike are taken in their order, not by chance
    random      choices drawn evenly
    annealing   one choice changed at a time, worse drafts kept with a chance that falls
    cross       cross-entropy method: choices drawn by how often the best quarter of the last 40 drafts took them

A *hard* case is one whose best scheme takes at least 5 % longer than the best known plan: there is something to find.

    python benchmarks/learned.py --quick        four cases, 200 calls
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from _planner_cases import cases, graph_of
from _results import Claim, at_least, finish, options

from isthmus.api import prepare_simulator
from isthmus.planners.budget import Limits, Search
from isthmus.planners.drafts import Action, Draft, Drafts, Leaves, path_to
from isthmus.planners.improve import Pool, explore
from isthmus.planners.lanes import Lanes
from isthmus.planners.learned import shipped_prior
from isthmus.planners.portfolio import scheme_plans
from isthmus.planners.problem import Problem, build_problem
from isthmus.planners.room import Room
from isthmus.planners.tree import Tree, even

CALLS = (50, 200, 800)
NEAR = 1.02  # times the best known
QUICK = ("held-01", "held-06", "held-11", "held-12")
SCHEMES = Limits(effort=2.0)  # of the plans that all start from
SEEDS = 1
HARD = 1.05  # times the best known: what the best scheme takes at least
_AUTO_DRAFTS = 60
_MOST_FREE = 30  # drafts for each call: those that cannot hold the model take no call
Row = dict[str, Any]
Told = Callable[[Draft, float], None]
Method = Callable[[Pool, Told, random.Random], None]
Steps = list[tuple[int, float]]


def main() -> int:
    given = options("learned", __doc__)
    names = QUICK if given.quick else tuple(case.name for case in cases("held"))
    calls = CALLS[1] if given.quick else CALLS[-1]
    rows = in_two(partial(judged, seed=given.seed, calls=calls), names)
    return finish(given, rows, claims(rows, calls), others=summary(rows, calls, tuple(METHODS)))


def in_two(judge: Callable[[str], Row], names: Sequence[str]) -> list[Row]:
    """Rows of all cases, judged in two processes."""
    prepare_simulator()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return list(pool.map(judge, names))


def judged(name: str, seed: int, calls: int) -> Row:
    return compared(name, seed, calls, METHODS)


def compared(name: str, seed: int, calls: int, methods: Mapping[str, Method]) -> Row:
    """Calls that each search takes to come near the best known plan, and the best it has found after so many.

    A list for each, by seeds; None where it did not come so far.
    """
    case = next(case for case in cases("held") if case.name == name)
    graph = graph_of(case)
    prepare_simulator()

    def build(at: int) -> Problem:
        return build_problem(case.cluster, (case.job,), {case.job.name: graph}, at)

    seeds = range(seed, seed + SEEDS)
    scheme = scheme_plans(build(seed), SCHEMES)[0].price.step_seconds
    found = {
        method: [trace(build(at), run, calls, f"{method} {at}") for at in seeds] for method, run in methods.items()
    }
    reached = [best for traces in found.values() for steps in traces for _, best in steps]
    known = min((*reached, known_to_auto(build(seed))))
    row: Row = {"case": name, "devices": len(case.cluster.devices), "sorts": len(Drafts(build(seed)).sorts(1))}
    row["scheme_over_known"] = scheme / known
    for method, traces in found.items():
        row[f"{method}_calls"] = [calls_to(NEAR * known, steps) for steps in traces]
        for budget in CALLS:
            row[f"{method}_at_{budget}"] = [
                after(budget, steps, known) if budget <= calls else None for steps in traces
            ]
    print({key: value for key, value in row.items() if "_at_" not in key}, flush=True)
    return row


def calls_to(seconds: float, steps: Steps) -> int | None:
    return next((at for at, best in steps if best <= seconds), None)


def after(budget: int, steps: Steps, known: float) -> float | None:
    """The best after so many calls, over the best known."""
    return min((best / known for at, best in steps if at <= budget), default=None)


def trace(problem: Problem, method: Method, calls: int, seed: str) -> Steps:
    """(calls so far, seconds of the best draft so far), each time that it gets better."""
    given = scheme_plans(problem, SCHEMES)
    search = Search(problem, Limits(calls=calls), None)
    pool = Pool(problem, Lanes(problem, Room(problem)), search, given[0])
    steps: Steps = []

    def told(_: Draft, seconds: float) -> None:
        if seconds < (steps[-1][1] if steps else math.inf):
            steps.append((search.made, seconds))

    method(pool, told, random.Random(seed))
    return steps


def known_to_auto(problem: Problem) -> float:
    """The best draft among those that `auto` likes best after ten seconds' effort, as a draft and without polish."""
    given = scheme_plans(problem, SCHEMES)
    pool = Pool(problem, Lanes(problem, Room(problem)), Search(problem, Limits(effort=10.0), None), given[0])
    explore(pool, given)
    drafts = Drafts(problem)
    leaves = Leaves(pool, drafts)
    whole = {drafts.draft_of(found.setting) for found in pool.found[:_AUTO_DRAFTS]}
    return min((leaves.price(draft) for draft in whole if draft and path_to(drafts, draft)), default=math.inf)


def by_tree(pool: Pool, told: Told, draw: random.Random) -> None:
    Tree(pool, even, told).grow()


def by_ordered_tree(pool: Pool, told: Told, draw: random.Random) -> None:
    Tree(pool, even, told, noise=0.0).grow()


def by_network(pool: Pool, told: Told, draw: random.Random) -> None:
    Tree(pool, shipped_prior(), told).grow()


def drafts_until_spent(pool: Pool) -> range:
    return range(_MOST_FREE * (pool.search.calls or 0))


def by_chance(pool: Pool, told: Told, draw: random.Random) -> None:
    drafts = Drafts(pool.problem)
    leaves = Leaves(pool, drafts)
    for _ in drafts_until_spent(pool):
        if pool.search.spent():
            return
        draft = completed(drafts, Draft(), lambda _, actions: draw.choice(actions))
        if draft is not None:
            told(draft, leaves.price(draft))


def completed(drafts: Drafts, draft: Draft, pick: Callable[[Draft, Sequence[Action]], Action]) -> Draft | None:
    """A whole draft; None where the choices lead nowhere."""
    while actions := drafts.actions(draft):
        draft = draft.having(pick(draft, actions))
    return draft if draft.whole else None


def by_annealing(pool: Pool, told: Told, draw: random.Random) -> None:
    drafts = Drafts(pool.problem)
    leaves = Leaves(pool, drafts)
    current = start_of(pool, drafts)
    seconds = leaves.price(whole(current)) if current else math.inf
    for _ in drafts_until_spent(pool):
        if pool.search.spent():
            return
        changed = neighbour(drafts, current, draw)
        draft = whole(changed)
        if not draft.whole:
            continue
        found = leaves.price(draft)
        told(draft, found)
        heat = 0.3 * (0.02 / 0.3) ** (pool.search.made / (pool.search.calls or 1))
        if found <= seconds or (found < math.inf and draw.random() < math.exp(-math.log(found / seconds) / heat)):
            current, seconds = changed, found


def start_of(pool: Pool, drafts: Drafts) -> list[Action]:
    """The choices that lead to the schemes' best plan, where a draft can say it."""
    if pool.best is None:
        return []
    pool.take(pool.best)
    draft = drafts.draft_of(pool.found[0].setting) if pool.found else None
    return [action for _, action in path_to(drafts, draft)] if draft is not None else []


def neighbour(drafts: Drafts, choices: Sequence[Action], draw: random.Random) -> list[Action]:
    """One choice drawn anew; those after it stay as far as they still can."""
    at, made, draft = draw.randrange(len(choices)) if choices else -1, list[Action](), Draft()
    while actions := drafts.actions(draft):
        i = len(made)
        keep = i < len(choices) and i != at and choices[i] in actions
        made.append(choices[i] if keep else draw.choice(actions))
        draft = draft.having(made[-1])
    return made


def whole(choices: Sequence[Action]) -> Draft:
    draft = Draft()
    for action in choices:
        draft = draft.having(action)
    return draft


def by_cross_entropy(pool: Pool, told: Told, draw: random.Random) -> None:
    drafts = Drafts(pool.problem)
    leaves = Leaves(pool, drafts)
    weights: dict[tuple[int, int], Counter[Action]] = {}
    tried = 0
    while not pool.search.spent() and tried < len(drafts_until_spent(pool)):
        drawn: list[tuple[float, list[tuple[tuple[int, int], Action]]]] = []
        for _ in range(40):
            path: list[tuple[tuple[int, int], Action]] = []
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
            seconds = leaves.price(draft) if draft.whole and not pool.search.spent() else math.inf
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
            "calls of search over calls of learned to come within 2 % of the best known",
            mean["search"] / mean["learned"],
            3.0,
        ),
        at_least("the same, of search that takes actions in their order", mean["ordered"] / mean["learned"], 3.0),
        at_least(
            "part of the held-out runs in which learned comes within 2 %",
            sum(n is not None for n in near) / len(near),
            0.9,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
