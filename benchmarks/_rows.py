"""Rows of a benchmark that are made by several processes and kept as they come.

A run that was ended goes on with the rows that it lacks, as long as no code and no case has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _results import ROOT, cores

from isthmus.planners.warm_up import warm_up

__all__ = ["rows_of"]

_CODE = ("src/**/*.py", "src/**/*.safetensors", "benchmarks/*.py", "benchmarks/cases/**/*.yaml")


def rows_of(
    name: str,
    make: Callable[[Any], Any],
    keys: Sequence[tuple[str | float, ...]],
    inputs: Sequence[Path] = (),
    jobs: int | None = None,
) -> list[Any]:
    """Return what `make` makes of every key, in their order; in `jobs` processes, or one for each core.

    A key says all that changes a row, beside code, cases and `inputs`: where one of these changes, rows are made anew.
    """
    warm_up()
    file, code = ROOT / "build" / "benchmarks" / f"{name}-rows.jsonl", _code(inputs)
    made = {tuple(row["key"]): row["row"] for row in _kept(file) if row["code"] == code and tuple(row["key"]) in keys}
    file.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(jobs or cores(), mp_context=get_context("spawn")) as pool:
        coming = {pool.submit(make, key): key for key in keys if key not in made}
        try:
            for done in as_completed(coming):
                made[coming[done]] = done.result()
                _keep(file, {"code": code, "key": coming[done], "row": made[coming[done]]})
                print(f"{len(made)} of {len(keys)}", *coming[done], flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # one that fails, or Ctrl-C, ends the rest
    return [made[key] for key in keys]


def _keep(file: Path, row: dict[str, Any]) -> None:
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def _kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _code(inputs: Sequence[Path]) -> str:
    """Changes with the package, the benchmarks, the cases, and other files that are read."""
    files = sorted(path for pattern in _CODE for path in ROOT.glob(pattern)) + sorted(inputs)
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
