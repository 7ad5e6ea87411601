"""All schemes, `auto` and stock DDP, really trained in emulated worlds, beside what the simulator said of them.

In each world every planner plans the same job with times measured for that world's devices, and every scheme is
searched to its end; each different plan is then
trained, round by round, in turns with the others and with DDP (equal shares, torch's own buckets and all-reduce): on
all devices and, as its users would, on those of the best plan with equal shares where these are fewer. The faster of
the two is what others are compared with.

    python benchmarks/training.py --quick        one world, one round
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import _worlds as worlds
from _results import ROOT, at_least, finish, options, skip
from scipy.stats import spearmanr

from isthmus.cluster.spec import Cluster
from isthmus.emulate.act import Emulation, as_emulated, paces
from isthmus.emulate.world import unable
from isthmus.errors import IsthmusError
from isthmus.model.job import Job, Optimizer
from isthmus.plan.text import render
from isthmus.planners.portfolio import Choice, choose_plan
from isthmus.planners.problem import build_problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.runtime.program import programs

MODEL = worlds.Model("gpt", "zoo:gpt-tiny", 64)
BATCH = 24  # shared evenly by 2, 3, 4, 6 and 8
ROUNDS, WARM, STEPS = 2, 2, 5
NEAR = 1.05  # times as long: plans that are predicted no further apart may come in either order
WORKER = ROOT / "benchmarks" / "_ddp_worker.py"
CONSTANTS = ROOT / "benchmarks" / "results" / "prediction.json"


class Contender(NamedTuple):
    """A plan, and the schemes that made it."""

    schemes: list[str]
    plan: Any
    predicted: float


def main() -> int:
    given = options("training", __doc__)
    lacks = unable()
    if lacks is not None:
        return skip(given, lacks)
    names = sorted(path.stem for path in (ROOT / "benchmarks" / "cases" / "worlds").glob("*.yaml"))
    if given.quick:
        names = ["two-cities"]
    rows = [row for name in names for row in compare(name, 1 if given.quick else ROUNDS)]
    ranks = {name: agreement([row for row in rows if row["world"] == name]) for name in names}
    known = [rank for rank in ranks.values() if rank is not None]
    plans = [row for row in rows if row["predicted"] is not None]
    whole = float(spearmanr([row["predicted"] for row in plans], [row["measured"] for row in plans]).statistic)
    gains = {name: over_schemes([row for row in rows if row["world"] == name]) for name in names}
    apart = [gains[name] for name in names if len(worlds.world(name).regions) > 1]
    claims = [
        at_least(
            "Rank correlation of predicted and measured step times, mean over worlds", statistics.mean(known), 0.95
        ),
        at_least("Rank correlation of predicted and measured step times, all worlds together", whole, 0.95),
        at_least(
            "Fraction of pairs predicted at least 5 % apart that were measured in that order", in_order(rows), 0.95
        ),
        at_least("Emulated worlds in which plans were trained", len(names), 1 if given.quick else 8),
        at_least(
            "Geometric mean speed-up of auto over the best scheme, worlds of several regions",
            statistics.geometric_mean(apart),
            1.2,
        ),
        at_least("Worst-case speed-up of auto over the best scheme, all worlds", min(gains.values()), 0.98),
        at_least(
            "Best-case speed-up of auto over torch DDP on all devices",
            max(over_all(rows, name) for name in names),
            4.56,
        ),
    ]
    others = {
        "rank_by_world": ranks,
        "auto_over_schemes": gains,
        "auto_over_ddp": {name: over_all(rows, name) for name in names},
        "auto_over_the_better_ddp": {row["world"]: row["over_ddp"] for row in rows if "auto" in row["schemes"]},
    }
    return finish(given, rows, claims, others=others)


def in_order(rows: list[dict[str, Any]]) -> float:
    """Of pairs of plans for one world that predictions tell apart: the part that was measured in that order."""
    plans = [row for row in rows if row["predicted"] is not None]
    pairs = [sorted(pair, key=lambda row: row["predicted"]) for pair in combinations(plans, 2)]
    told = [(a, b) for a, b in pairs if a["world"] == b["world"] and b["predicted"] > NEAR * a["predicted"]]
    return sum(a["measured"] < b["measured"] for a, b in told) / len(told)


def over_all(rows: list[dict[str, Any]], name: str) -> float:
    """How many times as fast as stock DDP on all devices of a world `auto` is."""
    own = [row for row in rows if row["world"] == name]
    auto = next(row for row in own if "auto" in row["schemes"].split(", "))
    ddp = next(row for row in own if row["predicted"] is None)  # that on all devices comes first
    return float(ddp["measured"] / auto["measured"])


def over_schemes(rows: list[dict[str, Any]]) -> float:
    """How many times as fast as the best scheme of a world `auto` is; 1 where it is that scheme's plan."""
    auto = next(row for row in rows if "auto" in row["schemes"].split(", "))
    usual = [row for row in rows if row["predicted"] is not None and row["schemes"] != "auto"]
    return float(min(row["measured"] for row in usual) / auto["measured"])


def agreement(rows: list[dict[str, Any]]) -> float | None:
    """Spearman's correlation of predicted and measured times in one world; None for fewer than three plans."""
    plans = [row for row in rows if row["predicted"] is not None]
    if len(plans) < 3:
        return None
    return float(spearmanr([row["predicted"] for row in plans], [row["measured"] for row in plans]).statistic)


def compare(name: str, rounds: int) -> list[dict[str, Any]]:
    """All different plans and DDP, in turns."""
    cluster = worlds.world(name)
    contenders = plans(cluster)
    times: list[list[float]] = [[] for _ in contenders]
    stock: dict[tuple[str, ...], list[float]] = {devices: [] for devices in usual_devices(cluster, contenders)}
    for _ in range(rounds):
        for found, contender in zip(times, contenders, strict=True):
            found += worlds.train(contender.plan, cluster, WARM + STEPS).seconds[WARM:]
        for devices, found in stock.items():
            found += ddp(cluster, devices, WARM + STEPS)[WARM:]
    ddps = {f"DDP, {len(devices)} devices": statistics.median(found) for devices, found in stock.items()}
    reference = min(ddps.values())
    rows = [
        {
            "world": name,
            "schemes": ", ".join(contender.schemes),
            "predicted": contender.predicted,
            "measured": statistics.median(found),
            "over_ddp": reference / statistics.median(found),
        }
        for contender, found in zip(contenders, times, strict=True)
    ]
    rows += [
        {"world": name, "schemes": how, "predicted": None, "measured": seconds, "over_ddp": reference / seconds}
        for how, seconds in ddps.items()
    ]
    for row in rows:
        print(row, flush=True)
    return rows


def plans(cluster: Cluster) -> list[Contender]:
    """The best plan of each planner that this runtime runs, equal ones once."""
    job = Job(
        name="job", model=MODEL.spec, batch=BATCH, sequence=MODEL.sequence, precision="fp32",
        optimizer=Optimizer(learning_rate=1e-4),
    )  # fmt: skip
    profile = as_emulated(worlds.calibrated(worlds.measured_profile(MODEL), CONSTANTS), paces(cluster))
    models = {"job": worlds.graph_of(MODEL)}
    problem = build_problem(cluster, (job,), models, 0, profile)
    found: dict[str, Contender] = {}
    for scheme in (*SCHEMES, "auto"):
        try:
            choice = choose_plan(problem, planner=scheme)
            check_ended(cluster, choice)
            programs(choice.plan, cluster, models)
        except IsthmusError as refused:
            print(f"{cluster.name}: {scheme} is left out: {refused}", flush=True)
            continue
        text = render(choice.plan)
        if text not in found:
            found[text] = Contender([], choice.plan, choice.price.step_seconds)
        found[text].schemes.append(scheme)
    return list(found.values())


def check_ended(cluster: Cluster, choice: Choice) -> None:
    """End the run where a scheme was not searched to its end: it could not be compared with."""
    left = [name for name, outcome in choice.outcomes.items() if outcome.state == "unfinished"]
    if left:
        raise SystemExit(f"{cluster.name}: not searched to the end: {', '.join(left)}")


def usual_devices(cluster: Cluster, contenders: list[Contender]) -> list[tuple[str, ...]]:
    """What DDP runs on: all devices, and those of the `data-even` plan where these are fewer."""
    found = [tuple(cluster.devices)]
    for contender in contenders:
        used = tuple(replica.devices[0] for replica in contender.plan.parts[0].stages[0].replicas)
        if "data-even" in contender.schemes and len(used) < len(found[0]):
            found.append(used)
    return [devices for devices in found if BATCH % len(devices) == 0]


def ddp(cluster: Cluster, devices: tuple[str, ...], steps: int) -> list[float]:
    """Seconds of each step of stock DDP on these devices of the cluster."""
    with tempfile.TemporaryDirectory() as folder, Emulation(cluster) as emulation:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": emulation.world.interface, "OMP_NUM_THREADS": "1"}
        started = []
        for rank, device in enumerate(devices):
            words = [rank, len(devices), Path(folder) / "store", emulation.slower(device), MODEL.spec]
            words += [MODEL.sequence or 0, BATCH, steps]
            command = emulation.command(device, [sys.executable, str(WORKER), *map(str, words)])
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        told = [process.communicate(timeout=900)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"DDP ended with {[process.returncode for process in started]}")
    times: list[float] = json.loads(told[0])
    return times


if __name__ == "__main__":
    sys.exit(main())
