"""Runs a command that does not outlive whoever holds the other end of this process's standard input.

Its arguments are the command. Its standard input tells nothing; when it ends, everything in this process's group is
killed: so it is started as the leader of one. Else it ends as the command does, with the same exit code or signal.
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
    """The exit code of the command."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of the whole group: the command decides
        signal.signal(number, lambda number, frame: None)
    command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_other_end, daemon=True).start()
    status = command.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it is not this process that crashed
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
