"""A small process beside a run's workers: it outlives a parent that is killed, and cleans up.

    python -I -S cleanup_process.py FOLDER        reads `+PID` and `-PID`, one per line, as workers come and go

Its standard input ends when the run is over or the parent is gone. Workers end with their parent by themselves, but the
processes that they have started may not. So this process kills all process groups that are left and removes the run's
folder. It imports nothing of the project, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """Wait for the end of the run, then kill the process groups that are left and remove the run's folder."""
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
