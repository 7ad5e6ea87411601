"""Networks that see less, or are smaller, against the whole one: the comparison of `learned.py`, for each network.

Every network of build/learned is judged on the held-out cases: those that the training command made there, under any
name. One whose name ends in -feedback, -devices or -model was trained without that part (`python -m
isthmus.planners.training build/learned --blind devices`), and is judged without it too.

    python benchmarks/ablation.py --quick        four cases, 200 calls
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial
from pathlib import Path

from _planner_cases import cases
from _results import ROOT, finish, options, skip
from learned import CALLS, QUICK, Method, Row, Told, compared, in_two, summary

from isthmus.planners.improve import Pool
from isthmus.planners.learned import NetworkPrior, load_network
from isthmus.planners.tree import Tree

FOLDER = ROOT / "build" / "learned"
BLIND = ("feedback", "devices", "model")


def main() -> int:
    given = options("ablation", __doc__)
    files = sorted(FOLDER.glob("*.safetensors"))
    if not files:
        return skip(given, f"no networks in {FOLDER.relative_to(ROOT)}: the training command makes them")
    names = QUICK if given.quick else tuple(case.name for case in cases("held"))
    calls = CALLS[1] if given.quick else CALLS[-1]
    rows = in_two(partial(judged, seed=given.seed, calls=calls, files=files), names)
    curves = {file.stem: [json.loads(line) for line in lines(file)] for file in files}
    return finish(given, rows, [], others=summary(rows, calls, [file.stem for file in files]), kept={"curves": curves})


def lines(file: Path) -> list[str]:
    """Losses of a network's training, a line for each epoch."""
    return file.with_suffix(".jsonl").read_text().splitlines()


def judged(name: str, seed: int, calls: int, files: list[Path]) -> Row:
    return compared(name, seed, calls, {file.stem: by_network(file) for file in files})


def by_network(file: Path) -> Method:
    """The tree search with the prior of a network."""
    weights = load_network(file)
    ending = file.stem.rpartition("-")[2]
    if weights is None:
        raise SystemExit(f"{file.name} was trained for other features or another cost model. Train it anew.")

    def run(pool: Pool, told: Told, _: random.Random) -> None:
        Tree(pool, NetworkPrior(weights, ending if ending in BLIND else ""), told).grow()

    return run


if __name__ == "__main__":
    sys.exit(main())
