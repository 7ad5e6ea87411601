"""Planners beside each other: every usual scheme, `split` and `auto`. (`exact.py` has what is proven on small cases.)

The cases are those of `_planner_cases`: files that were committed before the planner, and clusters of up to 10,000
devices made from a seed. Schemes are searched to their end, without a budget; `split` and `auto` may price as many
plans as `CALLS` says, so that a busy machine changes no plan, and cases are planned side by side. Speed-ups are those
of `auto`; the best usual scheme is chosen for each case among all but `classes`, which is the space of the best
published planner.

`scale` runs the command in a fresh process, with the model captured and the simulator compiled before: `planning` is
what the command says it spent searching, `command` all of it, `memory` its largest resident set; as it is, and for some
sizes with a `--budget`. `sync` has one plan with the whole model on every device, its buckets synced in different ways.

    python benchmarks/planner.py --only tag,geo     those parts alone; written to build/benchmarks
    python benchmarks/planner.py --jobs 8           cases in eight processes; one for each core where nothing is said

A whole run takes the better part of an hour. One that was ended goes on with the cases that it lacks, as long as no
code and no case has changed; `scale` is always measured anew.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from _planner_cases import GROUPS, SCALES, Case, Scale, case_named, cases, problem_of, scale_cluster, scale_job
from _results import Claim, Options, at_least, at_most, finish, options
from _rows import rows_of

from isthmus.cluster.write import cluster_yaml
from isthmus.errors import NoPlanError
from isthmus.model.source import load_graph
from isthmus.plan.types import Outcome
from isthmus.planners.portfolio import Choice, choose_plan
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.warm_up import warm_up

JUDGED = tuple(group for group in GROUPS if group not in ("small", "held"))
PARTS = ("scale", *JUDGED, "sync")  # scale first: a new process counts what its parent holds as its own
PLANNED = ("split", "auto")  # beside the schemes
USUAL = tuple(name for name in SCHEMES if name != "classes")
CALLS, QUICK_CALLS, LARGE_CALLS = 1000, 500, 400  # plans that `split` and `auto` may price
SCALE_LIMITS = {16: 1.0, 128: 2.0, 1024: 10.0, 10_000: 60.0}  # seconds
_SPENT = 0.8  # of a limit: what is given as a budget, which the last plan being priced may overrun
SCALE_STOP, QUICK_STOP = 180.0, 20.0  # seconds after which a command is ended
QUICK = {
    "tag": ("vgg19", "bert-large"),
    "unequal": ("unequal-02", "unequal-10", "unequal-15", "unequal-26"),
    "geo": ("geo-02", "geo-05"),
    "large": (),
    "equal": ("gpt2-medium",),
}
# Whole models on every device: few rows for the size of the weights and slow links, or many rows, or fast links.
FACTORS_PAY = ("tag/vgg19", "unequal/unequal-02", "small/small-25")
FACTORS_DO_NOT = ("geo/geo-08", "unequal/unequal-06", "equal/gpt2-medium")

Row = dict[str, Any]


def main() -> int:
    given = options("planner", __doc__, parts=PARTS, jobs=True)
    warm_up()
    others: Row = {}
    claims: list[Claim] = []
    if "scale" in given.parts:
        stop, sizes = (QUICK_STOP, SCALES[:2]) if given.quick else (SCALE_STOP, SCALES)
        scales = [scaled(scale, stop) for scale in sizes]
        within = [scaled(scale, stop, SCALE_LIMITS[scale.devices]) for scale in sizes if usual(scale)]
        others |= {f"scale, {row.pop('size')}": row for row in (*scales, *within)}
        claims += scale_claims(scales, within)
    keys = [
        (group, case.name, given.seed, calls_for(group, given))
        for group in JUDGED
        if group in given.parts
        for case in chosen(group, given)
    ]
    rows = rows_of("planner", judged, keys, jobs=given.jobs)
    others |= distributions(rows)
    claims += speed_claims(rows)
    if "sync" in given.parts:
        synced = {name: sync_row(name, given.seed) for name in (*FACTORS_PAY, *FACTORS_DO_NOT)}
        others |= {f"sync, {name}": row for name, row in synced.items()}
        claims += sync_claims(synced)
    return finish(given, rows, claims, others=others)


def chosen(group: str, given: Options) -> Iterable[Case]:
    return (case for case in cases(group) if not given.quick or case.name in QUICK[group])


def calls_for(group: str, given: Options) -> int:
    return QUICK_CALLS if given.quick else LARGE_CALLS if group == "large" else CALLS


def judged(key: tuple[str, str, int, int]) -> Row:
    """What every planner makes of a case: seconds per step, None where nothing fits."""
    group, name, seed, calls = key
    case = case_named(group, name)
    made = {planner: attempt(case, seed, planner, calls) for planner in PLANNED}
    with mock.patch("isthmus.planners.search_planners.propose", lambda prior, candidates: None):
        made["auto_without_network"] = attempt(case, seed, "auto", calls)
    row: Row = {"case": f"{case.group}/{case.name}", "devices": len(case.cluster.devices)}
    row |= schemes(case, seed)
    row |= {name: choice.price.step_seconds if choice else None for name, choice in made.items()}
    if (auto := made.get("auto")) is not None:
        row |= {"bound": auto.lower_bound, "planning": auto.seconds, "calls": auto.calls}
    print(" ".join(f"{key} {text(value)}" for key, value in row.items()), flush=True)
    return row


def text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def attempt(case: Case, seed: int, planner: str, calls: int | None) -> Choice | None:
    """The planner's choice, by a problem that no other planner has looked at; None where nothing fits."""
    try:
        return choose_plan(problem_of(case, seed), planner=planner, calls=calls)
    except NoPlanError:
        return None


def schemes(case: Case, seed: int) -> dict[str, float | None]:
    """Return the seconds per step of all schemes, each searched to its end; None where it cannot run."""
    problem, found = problem_of(case, seed), dict[str, float | None]()
    for name in SCHEMES:
        try:
            outcome = choose_plan(problem, planner=name, beside=False).outcomes[name]
        except NoPlanError:
            outcome = Outcome(state="cannot run")
        if outcome.state == "unfinished":
            raise SystemExit(f"{case.group}/{case.name}: {name} was not searched to its end: {outcome.reason}")
        found[name] = outcome.seconds
    return found


def distributions(rows: Sequence[Row]) -> Row:
    """How much faster `auto` is, and how far from the bound: for every group, and for unequal and geo together."""
    groups = {group: [row for row in rows if in_groups(row, group)] for group in JUDGED}
    groups = {"unequal and geo": [*groups["unequal"], *groups["geo"]], **groups, "all": list(rows)}
    found: Row = {}
    for group, members in groups.items():
        for name, ratios in speedups(members).items():
            if ratios:
                found[f"{group}: {name}"] = spread(ratios)
    return found


def in_groups(row: Row, *groups: str) -> bool:
    return row["case"].partition("/")[0] in groups


def speedups(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Ratios of step seconds; cases that the other planner has no plan for are left out."""
    others = {
        "over the best usual scheme": lambda row: least(row, USUAL),
        "over classes": lambda row: row["classes"],
        "over data-even": lambda row: row["data-even"],
    }
    others["over auto without the network"] = lambda row: row["auto_without_network"]
    planned = [row for row in rows if row.get("auto") is not None]
    ratios = {f"auto {name}": ratio_of(planned, other) for name, other in others.items()}
    return ratios | {"auto as a multiple of the lower bound": [row["auto"] / row["bound"] for row in planned]}


def ratio_of(rows: Sequence[Row], other: Any) -> list[float]:
    return [seconds / row["auto"] for row in rows if (seconds := other(row)) is not None]


def least(row: Row, names: Iterable[str]) -> float | None:
    return min((row[name] for name in names if row.get(name) is not None), default=None)


def spread(ratios: Sequence[float]) -> dict[str, float]:
    quarters = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    names = ("least", "quarter", "median", "three quarters", "most", "geometric mean")
    figures = (min(ratios), *quarters, max(ratios), statistics.geometric_mean(ratios))
    return {"cases": len(ratios), **dict(zip(names, figures, strict=True))}


def speed_claims(rows: Sequence[Row]) -> list[Claim]:
    """What the project states of `auto`, for the parts that were run."""
    distant = speedups([row for row in rows if in_groups(row, "unequal", "geo")])
    tag = speedups([row for row in rows if in_groups(row, "tag")])["auto over data-even"]
    best = [(least(row, (*SCHEMES, "split")), row["auto"]) for row in rows if "auto" in row]
    every = [other / auto if auto else 0.0 for other, auto in best if other is not None]  # 0: only auto found nothing
    claims = []
    if usual := distant["auto over the best usual scheme"]:
        name = "Geometric mean speed-up of auto over the best scheme, unequal and multi-region cases"
        claims.append(at_least(name, statistics.geometric_mean(usual), 1.3))
    if classes := distant["auto over classes"]:
        name = "Geometric mean speed-up of auto over the scheme classes, unequal and multi-region cases"
        claims.append(at_least(name, statistics.geometric_mean(classes), 1.15))
    if network := speedups(rows)["auto over auto without the network"]:
        claims.append(at_least("Worst-case speed-up of auto by its neural network, all cases", min(network), 1.0))
        name = "Geometric mean speed-up of auto by its neural network, all cases"
        claims.append(at_least(name, statistics.geometric_mean(network), 1.0))
    if every:
        claims.append(at_least("Worst-case speed-up of auto over its best rival, all cases", min(every), 1.0))
    if tag:
        claims.append(
            at_least("Best-case speed-up of auto over data-even, TAG's models on TAG's testbed", max(tag), 4.56)
        )
    return claims


def usual(scale: Scale) -> bool:
    return scale.devices in SCALE_LIMITS and (scale.kinds, scale.regions) == (3, 5)


def scaled(scale: Scale, stop: float, budget: float | None = None) -> Row:
    """Planning for a made cluster by the command, in a process of its own that is ended after `stop` seconds."""
    job, row = scale_job(scale), {"size": f"{scale.devices} devices, {scale.kinds} kinds, {scale.regions} regions"}
    row["size"] += f", --budget {budget:g}" if budget is not None else ""
    load_graph(job.model, sequence=job.sequence)
    with tempfile.TemporaryDirectory() as folder:
        cluster, answer = Path(folder) / "cluster.yaml", Path(folder) / "answer.json"
        cluster.write_text(cluster_yaml(scale_cluster(scale)))
        words = ["plan", job.model, "--batch", job.batch, "--sequence", job.sequence, "--precision", job.precision]
        words += [] if budget is None else ["--budget", _SPENT * budget]
        seconds, peak = measured([*words, "--cluster", cluster, "--json"], answer, stop)
        told = json.loads(answer.read_text() or "{}")
    row |= {"devices": scale.devices, "kinds": scale.kinds, "regions": scale.regions}
    row |= {"planning": told.get("planning_seconds", stop), "command": seconds, "memory": peak}
    row |= {"planner": told.get("planner", "none: ended"), "calls": told.get("calls"), "step": told.get("step_seconds")}
    row |= {"bound": told.get("lower_bound_seconds")}
    print(" ".join(f"{key} {text(value)}" for key, value in row.items()), flush=True)
    return row


def measured(words: Sequence[object], answer: Path, stop: float) -> tuple[float, float]:
    """Seconds and peak bytes of one command, whose output goes to a file."""
    command = [sys.executable, "-m", "isthmus.cli.main", *map(str, words)]
    start = time.monotonic()
    with answer.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        timer = threading.Timer(stop, process.kill)
        timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.monotonic() - start, usage.ru_maxrss * 1024.0


def scale_claims(rows: Sequence[Row], within: Sequence[Row]) -> list[Claim]:
    """Limits for each number of devices, and how planning grows."""
    spent = {row["devices"]: row["planning"] for row in rows if (row["kinds"], row["regions"]) == (3, 5)}
    steps = {row["devices"]: row["step"] for row in rows if (row["kinds"], row["regions"]) == (3, 5)}
    claims = []
    for row in within:
        devices, limit = row["devices"], SCALE_LIMITS[row["devices"]]
        of, budget = f"{devices:,} devices of three kinds in five regions", f"{_SPENT * limit:g}"
        claims.append(at_most(f"Seconds to plan {of}, without a budget", spent[devices], limit))
        claims.append(at_most(f"Seconds to plan {of}, with --budget {budget}", row["planning"], limit))
        if row["step"] and steps[devices]:
            name = f"Step time with --budget {budget} relative to no budget, {of}"
            claims.append(at_most(name, row["step"] / steps[devices], 1.1))
    claims.append(
        at_most("Peak memory of the largest planning process, in bytes", max(row["memory"] for row in rows), 4e9)
    )
    if 10_000 in spent:
        power = math.log(spent[10_000] / spent[128]) / math.log(10_000 / 128)
        claims.append(at_most("Exponent by which planning time grows with devices, from 128 to 10,000", power, 1.1))
        most = max(row["planning"] for row in rows if row["devices"] == 128)
        claims.append(at_most("Longest time to plan 128 devices of 1-6 kinds in 1-8 regions, in seconds", most, 2.0))
    return claims


def sync_row(name: str, seed: int) -> Row:
    """One plan with the whole model on every device, its gradients synced in different ways."""
    from _sync_rows import sync_rows

    from isthmus.planners.layout.build_plan import build_stages, make_plan
    from isthmus.planners.layout.layout_types import StageOptions
    from isthmus.planners.layout.shares import even_shares
    from isthmus.planners.schemes.device_sets import fastest

    group, _, case_name = name.partition("/")
    problem = problem_of(case_named(group, case_name), seed)
    devices = fastest(problem, problem.usable, problem.job.batch)
    shares = even_shares(problem.job.batch, len(devices))
    members = [[((device,), share) for device, share in zip(devices, shares, strict=True)]]
    stages = build_stages(problem, [0], members, StageOptions(recompute=True))
    row = sync_rows(problem, make_plan(problem, stages, 1, how="ring"))
    print(name, row, flush=True)
    return row


def sync_claims(rows: Mapping[str, Row]) -> list[Claim]:
    """The programme against simpler choices; factors where and only where they pay."""
    ratios = [min(row["ring"], row.get("greedy", row["ring"])) / row["ilp"] for row in rows.values()]
    return [
        at_least(
            "Worst-case speed-up of syncs chosen together, compared with only rings and with a greedy choice",
            min(ratios),
            1.0,
        ),
        at_least(
            "Smallest fraction of gradients sent as factors where factors pay (few rows, slow links)",
            min(rows[n]["by_factors"] for n in FACTORS_PAY),
            0.01,
        ),
        at_most(
            "Largest fraction of gradients sent as factors where factors do not pay (many rows or fast links)",
            max(rows[n]["by_factors"] for n in FACTORS_DO_NOT),
            0.0,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
