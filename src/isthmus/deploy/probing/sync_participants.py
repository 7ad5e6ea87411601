"""The participants of all-reduces on one host: the messages to and from them, and their processes.

    leader ─▶ prober ─▶ participant    JoinSync, Reduce (so many bytes at some time), StoreEntry
    leader ◀─ prober ◀─ participant    Entered, Reduced with its times, Trouble, StoreEntry

A participant is a process, as a worker is. The prober starts it with the first order for it, relays its messages over
the connection with the leader, and ends it when that connection ends. Channels find each other through the leader,
which passes what one participant puts into the store on to the others.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from isthmus.deploy.probing.sealed_lines import SealedMessage
from isthmus.model.profile import Collective

__all__ = [
    "LARGEST",
    "Entered",
    "JoinSync",
    "Participants",
    "Reduce",
    "Reduced",
    "Said",
    "StoreEntry",
    "ToDo",
    "Trouble",
]

LARGEST = 64_000 * 4**5  # bytes of an all-reduce
_COMMAND = (sys.executable, "-P", "-m", "isthmus.deploy.probing.sync_participant")  # -P: no file here hides a module


class StoreEntry(SealedMessage, frozen=True, kw_only=True):
    """An entry that a participant put into the store."""

    key: str
    value: bytes


class JoinSync(SealedMessage, frozen=True, kw_only=True):
    """Connect for a sync of these members, as one of them."""

    number: int
    how: Collective
    me: str
    members: tuple[str, ...]
    regions: tuple[str, ...]
    root: str | None


class Reduce(SealedMessage, frozen=True, kw_only=True):
    """Make a tensor the sum over the members of a sync, beginning at `at` seconds of this host's clock."""

    number: int
    bytes: Annotated[int, msgspec.Meta(ge=4, le=LARGEST)]
    at: float


class Entered(SealedMessage, frozen=True, kw_only=True):
    """All channels of the sync are connected."""

    number: int


class Reduced(SealedMessage, frozen=True, kw_only=True):
    """When the sync began and when it had the sum, in seconds of this host's clock."""

    number: int
    begin: float
    end: float


class Trouble(SealedMessage, frozen=True, kw_only=True):
    """A sync cannot go on."""

    number: int
    why: str


ToDo = StoreEntry | JoinSync | Reduce
Said = StoreEntry | Entered | Reduced | Trouble


class Participants:
    """The participants of this host, by number. `tell` passes on what one of them says."""

    def __init__(self, address: str, tell: Callable[[int, Said], None]) -> None:
        self._address, self._tell = address, tell
        self._processes: dict[int, _Process] = {}

    def pass_on(self, slot: int, order: ToDo) -> None:
        """Send an order to a participant, and start it if it is new."""
        if slot not in self._processes:
            self._processes[slot] = _Process(self._address, lambda said: self._tell(slot, said))
        self._processes[slot].tell(order)

    def dismiss(self) -> None:
        """End all participants; a later order starts a new one."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()


class _Process:
    """One participant; a thread reads its messages, and reports its death if nobody asked for it."""

    def __init__(self, address: str, tell: Callable[[Said], None]) -> None:
        self._tell, self._number, self._dismissed = tell, 0, False
        self._status: int | None = None  # once it has died by itself
        pipe = subprocess.PIPE
        self._popen = subprocess.Popen(
            [*_COMMAND, address], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def tell(self, order: ToDo) -> None:
        """Send a line to the process."""
        if not isinstance(order, StoreEntry):
            self._number = order.number
            if self._status is not None:
                self._say_dead(self._status)  # the trouble told so far was of an earlier sync
        with contextlib.suppress(BrokenPipeError):  # it is gone: `_read` notices
            assert self._popen.stdin is not None
            self._popen.stdin.write(msgspec.json.encode(order) + b"\n")
            self._popen.stdin.flush()

    def kill(self) -> None:
        """Kill the process at once."""
        self._dismissed = True
        self._popen.kill()

    def wait(self) -> None:
        """Wait until the process is gone and all its messages have been passed on."""
        self._popen.wait()
        self._reading.join()
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(OSError), self._popen.stdout as lines:  # OSError: the leader is gone
            for line in lines:
                if line.endswith(b"\n"):  # otherwise it was killed while it wrote
                    self._tell(msgspec.json.decode(line, type=Said))
            status = self._popen.wait()
            if not self._dismissed:
                self._status = status
                self._say_dead(status)

    def _say_dead(self, status: int) -> None:
        self._tell(Trouble(number=self._number, why=f"its process ended with code {status}"))
