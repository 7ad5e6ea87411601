"""One worker as a process: `python -m isthmus.runtime.worker_process`, started and watched by an engine.

The first line of standard input is the order; events go out as lines on what was standard output (`protocol.py`).
Whatever the user's code prints goes to standard error, and cannot be mistaken for an event. When standard input ends,
the parent is gone, and this process ends too, whatever it is doing. On Linux the kernel ends it even if it is stopped
or cannot run its own code. Ctrl-C is handled by the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, BinaryIO, NoReturn

import msgspec

from isthmus.errors import IsthmusError
from isthmus.runtime.protocol import Alive, Clock, Command, Event, Failed, Hello, Start, Told

if TYPE_CHECKING:
    from isthmus.runtime.worker_run import WorkerRun

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> NoReturn:
    """Serve one order, then wait to be ended: other workers may still need what this process has sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tell = _events()
    first = sys.stdin.buffer.readline()
    if not first:
        sys.exit("this is a worker of Isthmus, started by `isthmus train` only")
    start = msgspec.json.decode(first, type=Start)
    _end_with(start.place.parent)
    mailbox = Mailbox(sys.stdin.buffer, Path(start.place.store))
    tell(Hello())
    threading.Thread(target=_beat, args=(tell, start.place.beat), name="heartbeat", daemon=True).start()
    said = time.perf_counter()
    running: WorkerRun | None = None
    try:
        offset = mailbox.clock() - (said + time.perf_counter()) / 2
        from isthmus.runtime.worker_run import WorkerRun  # imports torch, only now that the process can be ended

        running = WorkerRun(start, tell, mailbox, offset)
        running.run()
    except BaseException as error:
        tell(failed(error, running.step if running is not None else None))
        sys.stderr.flush()
        os._exit(1)  # at once: others wait for messages that will not come
    sys.stdout.flush()
    mailbox.wait_for_end()


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends (Linux only).

    If the parent ended before this call, the kernel would not notice; this process then has another parent, and ends
    here.
    """
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _beat(tell: Callable[[Event], None], every: float) -> None:
    """Send signs of life for as long as the process can run Python."""
    with contextlib.suppress(OSError):  # nobody listens: the process is about to end
        while True:
            time.sleep(every)
            tell(Alive())


def _events() -> Callable[[Event], None]:
    """Return a function that writes events where standard output went; from now on prints go to standard error."""
    private = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that prints are seen at once, whatever ends the worker
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            private.write(msgspec.json.encode(event) + b"\n")

    return tell


class Mailbox:
    """Reads what the parent sends after the first line, and ends the process when that ends."""

    def __init__(self, lines: BinaryIO, store: Path) -> None:
        """Start to read; if the parent is gone, remove `store` and its folder, as nobody else does then."""
        self._lines, self._store = lines, store
        self._clock: SimpleQueue[float] = SimpleQueue()
        self._commands: SimpleQueue[int] = SimpleQueue()
        self._ask: Callable[[int], None] = self._commands.put
        self._thread = threading.Thread(target=self._read, name="mailbox", daemon=True)
        self._thread.start()

    def clock(self) -> float:
        """Return the parent's clock at the time it answered."""
        return self._clock.get()

    def deliver(self, ask: Callable[[int], None]) -> None:
        """Pass commands to `ask` from now on, with those that have come already."""
        self._ask = ask
        while not self._commands.empty():
            ask(self._commands.get())

    def wait_for_end(self) -> NoReturn:
        """Wait until the parent closes standard input or is gone, which ends the process."""
        self._thread.join()
        raise AssertionError("the process ends with its mailbox")

    def _read(self) -> None:
        for line in self._lines:
            told = msgspec.json.decode(line, type=Told)
            if isinstance(told, Clock):
                self._clock.put(told.now)
            elif isinstance(told, Command):
                self._ask(told.number)
        with contextlib.suppress(OSError):
            self._store.unlink(missing_ok=True)
            self._store.parent.rmdir()
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # with everything that the user's code may have started
        os._exit(1)


def failed(error: BaseException, step: int | None) -> Failed:
    """Return an error as an event.

    If ISTHMUS_TRACEBACK is set, the traceback goes to standard error.
    """
    from isthmus.runtime.comm.channel import ChannelError

    if os.environ.get("ISTHMUS_TRACEBACK"):
        traceback.print_exception(error)
    if isinstance(error, IsthmusError):
        parts = {part: getattr(error, part) for part in ("what", "found", "expected", "next", "where")}
        return Failed(step=step, lost=isinstance(error, ChannelError), **parts)
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())[:500]
    return Failed(
        what=f"{type(error).__name__}: {text}{place}",
        found=None,
        expected=None,
        next="ISTHMUS_TRACEBACK=1 shows where it happened",
        where=None,
        step=step,
        lost=False,
    )


if __name__ == "__main__":
    main()
