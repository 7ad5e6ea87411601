"""A small process beside a run's workers: it outlives a parent that is killed, and cleans up.

    python -I -S cleanup_process.py FOLDER        reads `+PID` and `-PID`, a line each, as workers come and go

When its standard input ends, the run is over, or the parent is gone. Workers end with their parent by themselves, but
what they have started may not; so all process groups that are left are killed, and the run's folder is removed.
Imports nothing of the project: it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Waits for the end of the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line.startswith("+") else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(sys.argv[1], ignore_errors=True)


if __name__ == "__main__":
    main()
