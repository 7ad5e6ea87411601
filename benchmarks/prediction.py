"""Predictions held against measurements: plans really trained in emulated worlds, beside what the simulator said.

Block times are measured on one core of this machine and slowed down as the emulated devices are. Four constants of the
runtime (below) are fitted on the calibration cases, and all is judged on the evaluation cases, of which none is in the
calibration. A step's time is the median over steps; memory is the largest of the workers, whole process.

    python benchmarks/prediction.py --quick        four cases
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import _worlds as worlds
import numpy as np
from _results import ROOT, at_least, at_most, finish, options
from _worlds import Constants

from isthmus.cost.calibrate import fit_constants

CASES = ROOT / "benchmarks" / "cases" / "prediction.yaml"
WARM, STEPS = 3, 7  # steps that do not count, and that do


START = Constants(1e-3, 3e-3, 5e-4, 1.05)
LEAST, MOST = Constants(0.0, 0.0, 0.0, 0.9), Constants(1e-2, 5e-2, 1e-2, 1.5)


class Row(NamedTuple):
    """A case that was run."""

    case: worlds.Case
    plan: Any
    seconds: float
    memory: dict[str, int]


def main() -> int:
    given = options("prediction", __doc__)
    cases = worlds.load_cases(CASES)
    calibration, evaluation = cases["calibration"], cases["evaluation"]
    assert not {str(case) for case in calibration} & {str(case) for case in evaluation}
    if given.quick:
        calibration, evaluation = calibration[1:4], evaluation[3:7]
    fitted_on = [measured(case) for case in calibration]
    constants = fit(fitted_on)
    judged_on = [measured(case) for case in evaluation]
    rows = [described(row, constants, "calibration") for row in fitted_on]
    rows += [described(row, constants, "evaluation") for row in judged_on]
    judged = [row for row in rows if row["set"] == "evaluation"]
    errors = np.abs([row["error"] for row in judged])
    memory = [row["memory_error"] for row in judged]
    claims = [
        at_most("median error of the step time", float(np.median(errors)), 0.05),
        at_most("90th percentile of the error", float(np.quantile(errors, 0.9)), 0.12),
        at_most("largest error of peak memory", float(np.max(np.abs(memory))), 0.10),
        at_least("peak memory predicted, least over measured", float(1 + np.min(memory)), 0.97),
        at_least("combinations", len(judged), 4 if given.quick else 40),
    ]
    return finish(given, rows, claims, others={"constants": constants._asdict()})


def measured(case: worlds.Case) -> Row:
    """Trains by the case's plan in its world."""
    plan, cluster = worlds.make_plan(case), worlds.world(case.world)
    result = worlds.train(plan, cluster, WARM + STEPS)
    seconds = statistics.median(result.seconds[WARM:])
    print(f"{case}: {seconds:.3f} s, steps {' '.join(f'{s:.3f}' for s in result.seconds)}", flush=True)
    return Row(case, plan, seconds, dict(result.memory))


def predicted(row: Row, constants: Constants) -> Any:
    profile = worlds.with_constants(worlds.measured_profile(row.case.model), constants)
    return worlds.predict(row.plan, worlds.world(row.case.world), row.case.model, profile).price


def fit(rows: Sequence[Row]) -> Constants:
    """The constants with the least mean error over the calibration cases."""
    for model in dict.fromkeys(row.case.model for row in rows):
        worlds.measured_profile(model)
    found = fit_constants(
        lambda values: [predicted(row, Constants(*values)).step_seconds for row in rows],
        [row.seconds for row in rows],
        START,
        LEAST,
        MOST,
    )
    return Constants(*found)


def described(row: Row, constants: Constants, which: str) -> dict[str, Any]:
    price = predicted(row, constants)
    memory = [price.memory[device] / row.memory[device] - 1 for device in row.memory]
    return {
        "set": which,
        "case": str(row.case),
        "measured": row.seconds,
        "predicted": price.step_seconds,
        "error": price.step_seconds / row.seconds - 1,
        "memory_error": max(memory, key=abs),
    }


if __name__ == "__main__":
    sys.exit(main())
