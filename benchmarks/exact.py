"""`auto` and the lower bound against what is proven to be best, on cases that are small enough.

The cases are the group small of `_planner_cases`: 54 files that were committed before the planner, and eight that were
committed before any planner saw them. `exact` has five minutes for each; where these do not suffice, the best plan that
it found is printed and nothing is proven. `auto` may price 3,000 plans. A case for each core is solved at a time, and a
run that was ended goes on with those that it lacks.

    python benchmarks/exact.py --quick        three cases
    python benchmarks/exact.py --again        what `exact` found in the last whole run stands; `auto` is run anew, and
                                              `exact` on cases that were not there
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from _planner_cases import case_named, cases, problem_of
from _results import Claim, Options, at_least, at_most, finish, options
from _rows import rows_of

from isthmus.errors import NoPlanError
from isthmus.planners.portfolio import Choice, choose_plan
from isthmus.planners.warm_up import warm_up

AUTO_CALLS = 3000
EXACT_SECONDS, QUICK_SECONDS = 300.0, 60.0
QUICK = ("small-02", "small-06", "small-11")
Row = dict[str, Any]


def main() -> int:
    given = options("exact", __doc__, again=True)
    seconds = QUICK_SECONDS if given.quick else EXACT_SECONDS
    known = {row["case"]: row for row in last_rows(given) if row["auto"] is not None} if given.again else {}
    names = QUICK if given.quick else tuple(case.name for case in cases("small"))
    keys = [(name, given.seed, seconds, given.again) for name in names]
    rows = rows_of("exact", partial(judged, known=known), keys, [given.folder / "exact.json"] if given.again else [])
    solved = [row for row in rows if row["auto"] is not None]
    return finish(given, rows, claims(solved), others=distances(solved))


def last_rows(given: Options) -> list[Row]:
    rows: list[Row] = json.loads((given.folder / "exact.json").read_text())["rows"]
    return rows


def judged(key: tuple[str, int, float, bool], known: Mapping[str, Row]) -> Row:
    """What `auto` and `exact` make of a case: seconds per step, None where nothing fits."""
    name, seed, seconds, _ = key
    auto = attempt(name, seed, "auto", calls=AUTO_CALLS)
    if auto is not None and name in known:
        before, taken = known[name], auto.price.step_seconds
        best = min(taken, before["exact"])
        if not before["proven"] or best == before["exact"]:  # else `auto` gained by what `exact` does not enumerate
            row = {**before, "auto": taken, "exact": best, "auto_over_exact": taken / best}
            print(row, flush=True)
            return row
    exact = attempt(name, seed, "exact", budget=seconds)
    if auto is None or exact is None:
        return {"case": name, "auto": None}
    row = {
        "case": name,
        "best_scheme": min((s for s in exact.schemes.values() if s is not None), default=None),
        "auto": auto.price.step_seconds,
        "exact": exact.price.step_seconds,
        "bound": exact.lower_bound,
        "proven": not any(note.startswith("the budget ended") for note in exact.notes),
        "auto_over_exact": auto.price.step_seconds / exact.price.step_seconds,
        "calls": exact.calls,
        "seconds": exact.seconds,
    }
    print(row, flush=True)
    return row


def attempt(name: str, seed: int, planner: str, budget: float | None = None, calls: int | None = None) -> Choice | None:
    warm_up()
    problem = problem_of(case_named("small", name), seed)
    try:
        return choose_plan(problem, planner=planner, budget=budget, calls=calls)
    except NoPlanError:
        return None


def distances(rows: Sequence[Row]) -> Row:
    over = [row["exact"] / row["bound"] for row in rows]
    gains = [row["best_scheme"] / row["auto"] for row in rows if row["best_scheme"] is not None]
    return {
        "exact over the lower bound": {"least": min(over), "median": statistics.median(over), "most": max(over)},
        "best scheme over auto": {"geometric mean": statistics.geometric_mean(gains), "most": max(gains)},
        "auto is exact to 0.1 % in": sum(row["auto_over_exact"] <= 1.001 for row in rows),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    proven = [row for row in rows if row["proven"]]
    over = [row["auto_over_exact"] for row in proven]
    return [
        at_least("Small cases solved to a proven optimum", len(proven), min(50, len(rows))),
        at_least("Best-case step time of auto relative to the proven optimum", round(min(over), 9), 1.0),
        at_most("Worst-case step time of auto relative to the proven optimum", max(over), 1.03),
        at_most(
            "Worst-case step time of auto relative to the best known plan",
            max(row["auto_over_exact"] for row in rows),
            1.03,
        ),
        at_most(
            "Highest lower bound relative to the proven optimum", max(row["bound"] / row["exact"] for row in rows), 1.0
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
