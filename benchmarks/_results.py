"""What every benchmark shares: its arguments, its claims, its table and its file of results.

A full run writes `benchmarks/results/NAME.json`, which is committed and quoted; a quick one writes
`build/benchmarks/NAME.json`, so that it never replaces the figures of a full run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

__all__ = ["ROOT", "Claim", "Options", "at_least", "at_most", "cores", "equal", "finish", "options", "skip"]

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "numba", "numpy", "scipy")


class Claim(NamedTuple):
    """A figure that the project states: what it must be, what it is here."""

    name: str
    target: str  # `>= 1000`, `<= 0.05`, `== 44549160`
    measured: float
    holds: bool


class Options(NamedTuple):
    """How a benchmark was called."""

    name: str
    quick: bool
    seed: int
    folder: Path  # of the results
    again: bool = False  # nothing is measured: what the last full run measured is predicted anew
    parts: tuple[str, ...] = ()  # of the benchmark that are run
    jobs: int | None = None  # processes that make rows; None: one for each core


def at_least(name: str, measured: float, target: float) -> Claim:
    return Claim(name, f">= {target:.12g}", measured, measured >= target)


def at_most(name: str, measured: float, target: float) -> Claim:
    return Claim(name, f"<= {target:.12g}", measured, measured <= target)


def equal(name: str, measured: float, target: float) -> Claim:
    return Claim(name, f"== {target:.12g}", measured, measured == target)


def options(
    name: str, description: str | None, *, again: bool = False, parts: Sequence[str] = (), jobs: bool = False
) -> Options:
    """Read the command line of a benchmark; `again`: it can predict anew what its last full run measured.

    `parts`: those that can be asked for alone; such a run is written where quick ones are. `jobs`: its rows are made by
    several processes.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py", description=description)
    parser.add_argument("--quick", action="store_true", help="a smaller run of the same comparison")
    parser.add_argument("--seed", type=int, default=0)
    if again:
        parser.add_argument("--again", action="store_true", help="predict anew what the last full run measured")
    if parts:
        parser.add_argument("--only", default=",".join(parts), metavar="PARTS", help="of " + ",".join(parts))
    if jobs:
        parser.add_argument("--jobs", type=_positive, metavar="N", help="processes that plan cases; else one a core")
    given = parser.parse_args()
    asked = tuple(given.only.split(",")) if parts else ()
    if unknown := set(asked) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    whole = not given.quick and set(asked) == set(parts)
    folder = ROOT / "benchmarks" / "results" if whole else ROOT / "build" / "benchmarks"
    return Options(
        name, given.quick, given.seed, folder, getattr(given, "again", False), asked, getattr(given, "jobs", None)
    )


def _positive(text: str) -> int:
    """Read a number of processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
    }


def finish(
    called: Options,
    rows: Sequence[Mapping[str, Any]],
    claims: Sequence[Claim],
    *,
    others: Mapping[str, Any] | None = None,
    kept: Mapping[str, Any] | None = None,
) -> int:
    """Print the rows and claims, write them, and return the exit code: 1 if a claim does not hold.

    `others` are printed and written too, what is `kept` is only written.
    """
    result = {
        "name": called.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "command": " ".join(["python", f"benchmarks/{called.name}.py", *sys.argv[1:]]),
        "quick": called.quick,
        "seed": called.seed,
        **(others or {}),
        **(kept or {}),
        "rows": list(rows),
        "claims": [claim._asdict() for claim in claims],
    }
    called.folder.mkdir(parents=True, exist_ok=True)
    file = called.folder / f"{called.name}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    _show(called, rows, claims, others or {})
    print(f"wrote {os.path.relpath(file)}")
    return 0 if all(claim.holds for claim in claims) else 1


def skip(called: Options, reason: str) -> int:
    """Say why there is nothing to measure; nothing is written."""
    print(f"{called.name}: skipped: {reason}")
    return 0


def _show(
    called: Options, rows: Sequence[Mapping[str, Any]], claims: Sequence[Claim], others: Mapping[str, Any]
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=f"{called.name}{' (quick)' if called.quick else ''}, seed {called.seed}")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    console.print(table)
    for name, value in others.items():
        console.print(f"{name.replace('_', ' ')}: {_text(value)}")
    for claim in claims:
        console.print(f"{'holds' if claim.holds else 'FAILS'}  {claim.name}: {_text(claim.measured)} ({claim.target})")


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(part)}" for key, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
