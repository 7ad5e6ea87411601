"""Predictions held against measurements: plans really trained in emulated worlds, beside what the simulator said.

Block times are measured on one core of this machine and slowed down as the emulated devices are. Four constants of the
runtime (below) are fitted on the calibration cases, and all is judged on the evaluation cases, of which none is in the
calibration. A step's time is the median over steps; memory is that of whole processes, each worker's its own.

    python benchmarks/prediction.py --quick        four cases
    python benchmarks/prediction.py --again        predicts anew what the last full run measured
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import _worlds as worlds
import msgspec
import numpy as np
from _results import ROOT, Claim, at_least, at_most, finish, options, skip
from _worlds import Constants

from isthmus.cost.calibrate import fit_constants
from isthmus.emulate.world import unable
from isthmus.model.profile import Profile
from isthmus.plan.text import render
from isthmus.plan.types import Plan

CASES = ROOT / "benchmarks" / "cases" / "prediction.yaml"
WARM, STEPS = 3, 7  # steps that do not count, and that do


START = Constants(1e-3, 3e-3, 5e-4, 1.05)
LEAST, MOST = Constants(0.0, 0.0, 0.0, 0.9), Constants(1e-2, 5e-2, 1e-2, 1.5)


class Run(NamedTuple):
    """A case that was run."""

    case: worlds.Case
    plan: Plan
    seconds: float
    memory: dict[str, int]


def main() -> int:
    """Measures, fits, judges."""
    given = options("prediction", __doc__, again=True)
    if not given.again and (lacks := unable()) is not None:
        return skip(given, lacks)
    cases = worlds.load_cases(CASES)
    assert not {str(case) for case in cases["calibration"]} & {str(case) for case in cases["evaluation"]}
    if given.quick:
        cases = {"calibration": cases["calibration"][1:4], "evaluation": cases["evaluation"][3:7]}
    plans = {case: worlds.make_plan(case) for rows in cases.values() for case in rows}
    keys = {case: f"{case} [{hashlib.sha256(render(plan).encode()).hexdigest()[:12]}]" for case, plan in plans.items()}
    if given.again:
        known, profiles = remembered(keys.values())
    else:
        profiles = {model: worlds.measured_profile(model) for model in models_of(cases)}
        known = {key: measured(case, plans[case]) for case, key in keys.items()}
    runs = {name: [Run(case, plans[case], *known[keys[case]]) for case in rows] for name, rows in cases.items()}
    constants = fit(runs["calibration"], profiles)
    rows = [described(run, constants, profiles, name) for name, found in runs.items() for run in found]
    kept = {
        "measured": known,
        "profiles": {model.name: msgspec.to_builtins(profile) for model, profile in profiles.items()},
    }
    judged = claims([row for row in rows if row["set"] == "evaluation"], given.quick)
    return finish(given, rows, judged, others={"constants": constants._asdict()}, kept=kept)


def claims(judged: Sequence[dict[str, Any]], quick: bool) -> list[Claim]:
    """Of the evaluation cases."""
    errors = np.abs([row["error"] for row in judged])
    most, least = (np.array([row[which] for row in judged]) for which in ("memory_most", "memory_least"))
    return [
        at_most("Median error of predicted step times in emulated worlds", float(np.median(errors)), 0.05),
        at_most(
            "90th percentile of the error of predicted step times in emulated worlds",
            float(np.quantile(errors, 0.9)),
            0.12,
        ),
        at_most(
            "Largest error of predicted peak memory in emulated worlds", float(np.max(np.maximum(most, -least))), 0.10
        ),
        at_least(
            "Lowest predicted peak memory relative to the measured one, emulated worlds", float(1 + np.min(least)), 0.97
        ),
        at_least("Plans trained and compared with their prediction", len(judged), 4 if quick else 40),
    ]


def models_of(cases: Mapping[str, Sequence[worlds.Case]]) -> list[worlds.Model]:
    """The different ones."""
    return list(dict.fromkeys(case.model for rows in cases.values() for case in rows))


def remembered(keys: Iterable[str]) -> tuple[dict[str, Any], dict[worlds.Model, Profile]]:
    """What the last full run measured, if it was of the same plans."""
    before = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    if other := set(keys) - before["measured"].keys():
        raise SystemExit(f"{len(other)} plans are not those that were measured, so a full run is needed: {min(other)}")
    named = {model.name: model for model in models_of(worlds.load_cases(CASES))}
    profiles = {named[name]: msgspec.convert(points, Profile) for name, points in before["profiles"].items()}
    return before["measured"], profiles


def measured(case: worlds.Case, plan: Plan) -> tuple[float, dict[str, int]]:
    """Trains by the case's plan in its world: seconds of a step, and bytes of each worker."""
    result = worlds.train(plan, worlds.world(case.world), WARM + STEPS)
    seconds = statistics.median(result.seconds[WARM:])
    print(f"{case}: {seconds:.3f} s, steps {' '.join(f'{s:.3f}' for s in result.seconds)}", flush=True)
    return seconds, dict(result.memory)


def predicted(run: Run, constants: Constants, profiles: Mapping[worlds.Model, Profile]) -> Any:
    """What the simulator says."""
    profile = worlds.with_constants(profiles[run.case.model], constants)
    return worlds.predict(run.plan, worlds.world(run.case.world), run.case.model, profile).price


def fit(runs: Sequence[Run], profiles: Mapping[worlds.Model, Profile]) -> Constants:
    """The constants with the least mean error over the calibration cases."""
    found = fit_constants(
        lambda values: [predicted(run, Constants(*values), profiles).step_seconds for run in runs],
        [run.seconds for run in runs],
        START,
        LEAST,
        MOST,
    )
    return Constants(*found)


def described(run: Run, constants: Constants, profiles: Mapping[worlds.Model, Profile], which: str) -> dict[str, Any]:
    """A row."""
    price = predicted(run, constants, profiles)
    memory = [price.memory[device] / run.memory[device] - 1 for device in run.memory]
    return {
        "set": which,
        "case": str(run.case),
        "measured": run.seconds,
        "predicted": price.step_seconds,
        "error": price.step_seconds / run.seconds - 1,
        "memory_most": max(memory),
        "memory_least": min(memory),
    }


if __name__ == "__main__":
    sys.exit(main())
