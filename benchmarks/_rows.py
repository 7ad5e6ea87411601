"""Rows of a benchmark that are made by several processes and kept as they come.

A run that was ended goes on with the rows that it lacks, as long as no code and no case has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _results import ROOT

from isthmus.api import prepare_simulator

__all__ = ["rows_of"]

_CODE = ("src/**/*.py", "src/**/*.safetensors", "benchmarks/*.py", "benchmarks/cases/**/*.yaml")


def rows_of(name: str, make: Callable[[Any], Any], keys: Sequence[tuple[str | int, ...]]) -> list[Any]:
    """What `make` makes of every key, in their order. A process for each core: time must not change a row."""
    prepare_simulator()
    file, code = ROOT / "build" / "benchmarks" / f"{name}-rows.jsonl", _code()
    made = {tuple(row["key"]): row["row"] for row in _kept(file) if row["code"] == code}
    file.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as pool:
        coming = {pool.submit(partial(make, key)): key for key in keys if key not in made}
        with file.open("a") as out:
            for done in as_completed(coming):
                made[coming[done]] = done.result()
                out.write(json.dumps({"code": code, "key": coming[done], "row": made[coming[done]]}) + "\n")
                out.flush()
                print(f"{len(made)} of {len(keys)}", *coming[done], flush=True)
    return [made[key] for key in keys]


def _kept(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _code() -> str:
    """Changes with the package, the benchmarks and the cases."""
    files = sorted(path for pattern in _CODE for path in ROOT.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
