"""`make soak`: many damaged files of every kind, and the large nasty ones, each read in under a second and 256 MB.

python -m tests.fuzz.run [--count 10000] [--seed N]     as many cases, from that seed or a new one
python -m tests.fuzz.run --case SEED/KIND/NUMBER        one case again

A file that ends as none should is kept under build/fuzz and named.
"""

from __future__ import annotations

import argparse
import faulthandler
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.cases import Case, Verdict, case_data, cases, judge
from tests.fuzz.generated import GENERATED
from tests.fuzz.kinds import KINDS, ROOT

__all__ = ["main"]

FOLDER = ROOT / "build" / "fuzz"
MOST_MEMORY = 256e6  # bytes that reading one file may add
HANGS = 60.0  # seconds after which the run ends with a traceback; the file that hung is then the newest one
SELF = Path("/proc/self")


def main() -> int:
    """Reads the files and prints how they ended; 1 if any ended as none should."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description="Reads many damaged files.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, help="of an earlier run; without it a new one is drawn")
    parser.add_argument("--case", help="SEED/KIND/NUMBER of one case")
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.case:
        seed, kind, number = arguments.case.split("/")
        return _run([_written(Case(int(seed), kind, int(number)))], keep=True)
    seed = secrets.randbelow(10**9) if arguments.seed is None else arguments.seed
    print(f"{arguments.count} damaged files, seed {seed}, and {len(GENERATED)} large ones")
    return _run(_files(seed, arguments.count))


def _files(seed: int, count: int) -> Iterator[tuple[str, str, Path]]:
    """Name, kind and path of each file, written when its turn comes."""
    for case in cases(seed, count):
        yield _written(case)
    for name, nasty in GENERATED.items():
        path = FOLDER / f"{name}{KINDS[nasty.kind].suffix}"
        path.write_bytes(nasty.data())
        yield name, nasty.kind, path


def _written(case: Case) -> tuple[str, str, Path]:
    path = FOLDER / f"{case.seed}-{case.kind}-{case.number}{KINDS[case.kind].suffix}"
    path.write_bytes(case_data(case))
    return f"--case {case}", case.kind, path


def _run(files: Iterator[tuple[str, str, Path]] | list[tuple[str, str, Path]], *, keep: bool = False) -> int:
    ends: Counter[tuple[str, str]] = Counter()
    slowest, largest, wrong, start = (0.0, ""), (0.0, ""), 0, time.monotonic()
    for name, kind, path in files:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        verdict, memory = _measured(kind, path)
        ends[kind, verdict.outcome] += 1
        slowest, largest = max(slowest, (verdict.seconds, name)), max(largest, (memory, name))
        problem = verdict.wrong or (f"took {memory / 1e6:.0f} MB" if memory > MOST_MEMORY else None)
        if problem:
            wrong += 1
            print(f"{name}: {problem}\n  kept: {path}")
        elif not keep:
            path.unlink()
    for kind in KINDS:
        print(f"  {kind:10}", ", ".join(f"{end[:60]} {count}" for (of, end), count in ends.most_common() if of == kind))
    print(f"{ends.total()} files in {time.monotonic() - start:.0f} s, {wrong} wrong")
    print(f"slowest {slowest[0]:.3f} s ({slowest[1]})")
    print(f"largest {largest[0] / 1e6:.0f} MB ({largest[1]})" if SELF.exists() else "memory is measured on Linux only")
    return 1 if wrong else 0


def _measured(kind: str, path: Path) -> tuple[Verdict, float]:
    """How reading ended, and the bytes that it added to this process at most (0 where that cannot be known)."""
    if not SELF.exists():
        return judge(kind, path), 0.0
    (SELF / "clear_refs").write_text("5")  # the highest mark of memory falls to what is held now
    before = _highest()
    verdict = judge(kind, path)
    return verdict, _highest() - before


def _highest() -> float:
    held = re.search(r"VmHWM:\s+(\d+) kB", (SELF / "status").read_text())
    return float(held[1]) * 1024 if held else 0.0


if __name__ == "__main__":
    sys.exit(main())
