"""Run a command that ends when the other end of this process's standard input closes.

The arguments are the command. Nothing is read from standard input; when it ends, every process in this process's group
is killed, so this process must be started as the leader of a group of its own. Otherwise it ends when the command does,
with the same exit code or signal.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading

__all__ = ["main"]


def main() -> int:
    """Run the command and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the whole group gets them; the command decides
        signal.signal(number, lambda number, frame: None)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_other_end, daemon=True).start()
    status = command.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command crashed, not this process, so write no core file
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _end_with_the_other_end() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
