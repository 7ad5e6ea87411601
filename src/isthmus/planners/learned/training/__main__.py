"""Trains the network of `learned`: long searches first, then rounds of searches that the network itself guides.

    python -m isthmus.planners.learned.training FOLDER --problems 600 --rounds 1 --played 1800

Everything is kept in FOLDER: `records-R.jsonl` (what searches found, a line for each problem), `network-R.safetensors`
and `network-R.jsonl` (its losses, a line for each epoch). A run that was ended goes on where it was; seeds make it the
same run. Round 0 has no network; a later round searches new problems with the network of the one before, and trains one
anew on all records so far.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from isthmus.planners.learned.training.fit import Recipe, fit
from isthmus.planners.learned.training.problems import SEEDS
from isthmus.planners.learned.training.record import Record
from isthmus.planners.learned.training.records import gather, read_records

__all__ = ["ROUND", "main"]

ROUND = 100_000  # seeds apart


def main() -> int:
    """Run the command."""
    given = _arguments()
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    recipe = Recipe(
        epochs=given.epochs,
        batch=given.batch,
        workers=given.workers,
        device=given.device,
        seed=given.seed,
        width=given.width,
        layers=given.layers,
        blind=given.blind,
    )
    blind = given.blind and f"-{given.blind}"
    records: list[Record] = []
    network: Path | None = None
    for turn in range(given.rounds + 1):
        file = folder / f"records-{turn}{blind if turn else ''}.jsonl"
        count = given.problems if turn == 0 else given.played
        first = SEEDS.start + turn * ROUND
        gather(file, range(first, first + count), given.workers, network, console, given.blind)
        records += read_records(file)
        if given.only_records:
            continue
        network = folder / f"network-{turn}{blind}.safetensors"
        console.print(f"round {turn}: {len(records)} records")
        fit(records, recipe, network, lambda row: console.print(_line(row)))
    return 0


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m isthmus.planners.learned.training", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("folder", help="where records and networks are kept")
    parser.add_argument("--problems", type=int, default=600, help="of round 0")
    parser.add_argument("--played", type=int, default=1800, help="problems of each later round")
    parser.add_argument("--rounds", type=int, default=1, help="of self-play")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64, help="drafts of one step")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that search and prepare")
    parser.add_argument("--device", default="cpu", help="of the training: cpu or cuda")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--blind", default="", choices=("", "feedback", "devices", "model"), help="for ablations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-records", action="store_true", help="search, and train nothing")
    given = parser.parse_args()
    if given.only_records and given.rounds:
        parser.error("--only-records goes with --rounds 0: later rounds need a network")
    return given


if __name__ == "__main__":
    sys.exit(main())
