"""Networks that see less, or are smaller, against the whole one: the comparison of `learned.py`, for each network.

Every network of build/learned is judged on the held-out cases, by 200 calls: those that the training command made
there, under any name. One whose name ends in -feedback, -devices or -model was trained without that part (`python -m
isthmus.planners.learned.training build/learned --blind devices`), and is judged without it too.

    python benchmarks/ablation.py --quick        four cases
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _results import ROOT, Claim, at_least, finish, options, skip
from learned import KNOWN, Key, Method, Row, Steps, Told, compared, known_of, mean_calls, summary, trace

from isthmus.planners.learned.prior import NetworkPrior, load_network
from isthmus.planners.learned.tree_search import SearchTree
from isthmus.planners.search.candidates import Candidates

CALLS = 200
FOLDER = ROOT / "build" / "learned"
BLIND = ("feedback", "devices", "model")


def main() -> int:
    given = options("ablation", __doc__)
    files = sorted(FOLDER.glob("*.safetensors"))
    if not files:
        return skip(given, f"no networks in {FOLDER.relative_to(ROOT)}: the training command makes them")
    names = [file.stem for file in files]
    rows = compared(given, traced, names, CALLS, files)
    curves = {file.stem: [json.loads(line) for line in lines(file)] for file in files}
    return finish(given, rows, claims(rows, curves), others=summary(rows, CALLS, names), kept={"curves": curves})


def claims(rows: Sequence[Row], curves: Mapping[str, Sequence[Row]]) -> list[Claim]:
    """Whether what is hidden was of use: for networks that have blind twins."""
    made = []
    for whole in (name for name in curves if not blind(name)):
        twins = [name for name in curves if blind(name) and name.rpartition("-")[0] == whole]
        for what, of in (
            ("Lowest held-out loss", lambda name: curves[name][-1]["held_loss"]),
            ("Fewest calls to come within 2 % of the best plan", lambda name: mean_calls(rows, CALLS, name)),
        ):
            if twins:
                name = f"{what} with part of the input hidden, relative to {whole}"
                made.append(at_least(name, min(map(of, twins)) / of(whole), 1.0))
    return made


def blind(name: str) -> str:
    """What a network does not see, by its name."""
    ending = name.rpartition("-")[2]
    return ending if ending in BLIND else ""


def lines(file: Path) -> list[str]:
    """Losses of a network's training, a line for each epoch."""
    return file.with_suffix(".jsonl").read_text().splitlines()


def traced(key: Key) -> Steps | Row:
    """What a search with the network of that name finds, or what is known of a case before."""
    name, stem, seed, calls = key
    if stem == KNOWN:
        return known_of(name, seed)
    return trace(name, by_network(FOLDER / f"{stem}.safetensors"), calls, f"{stem} {seed}", seed)


def by_network(file: Path) -> Method:
    """The tree search with the prior of a network."""
    weights = load_network(file)
    if weights is None:
        raise SystemExit(f"{file.name} was trained for other features or another cost model. Train it anew.")

    def run(candidates: Candidates, told: Told, _: random.Random) -> None:
        SearchTree(candidates, NetworkPrior(weights, blind(file.stem)), told).grow()

    return run


if __name__ == "__main__":
    sys.exit(main())
