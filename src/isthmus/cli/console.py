"""What a command prints while it works, and what it answers."""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from isthmus.errors import FileError, UsageError

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["HUNG_UP", "Answer", "ProgressLine", "Terminated", "check_checkpoints", "check_folder", "hung_up"]

_QUIET = 10.0  # seconds without a line, if there is no live one
HUNG_UP = 141  # 128 + SIGPIPE: the shell's exit code for a program whose output nobody reads


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found: for programs, for people and, if it failed, for standard error."""

    values: dict[str, Any]
    text: str
    failure: str | None = None
    exit_code: int = 1  # if it failed


def check_folder(path: str | None, *, pipe: bool = False) -> None:
    """Refuse a file whose folder does not exist, or that cannot be written there, before the work begins.

    With `pipe` the file may be a pipe.
    """
    from isthmus.files import plain_target

    if path is not None and not pipe:
        plain_target(path)
    if path is not None and not Path(path).parent.is_dir():
        raise FileError("the folder does not exist", where=path, next=f"Make it: mkdir -p {Path(path).parent}")


def check_checkpoints(path: str | None) -> None:
    """Refuse a checkpoint in place of a folder of checkpoints; a run would find none in it, and begin anew."""
    from isthmus.files.kinds import kind_of

    if path is not None and kind_of(path) == "checkpoint":
        raise UsageError(
            "this is one checkpoint",
            where=path,
            expected="the folder of checkpoints that it is in",
            next=f"Did you mean {str(Path(path).resolve().parent)!r}?",
        )


def hung_up() -> bool:
    """Return whether standard output or standard error has lost its reader; if so, discard what is still written to it.

    A pipe that broke elsewhere, such as one to a worker, does not count.
    """
    gone = [stream.fileno() for stream in (sys.stdout, sys.stderr) if _unread(stream)]
    for handle in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), handle)
    return bool(gone)


def _unread(stream: TextIO) -> bool:
    asked = select.poll()
    try:
        asked.register(stream.fileno(), 0)  # errors are reported even if not asked for
    except (OSError, ValueError):  # no file behind it
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0))


class Terminated(SystemExit):
    """Ends a command that a signal has asked to end, with the usual exit code."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        super().__init__(self.status)


class ProgressLine:
    """Shows the phases of long work on standard error.

    On a terminal that is one live line. Elsewhere it is one plain line for each phase, and further lines now and then
    if a phase takes long.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Status | None = None
        self._phase, self._told = "", 0.0

    def __enter__(self) -> ProgressLine:
        if self._stream.isatty():
            from rich.console import Console

            self._live = Console(file=self._stream).status("")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Begin a new phase of the work."""
        self._phase = text
        if self._live is not None:
            self._live.start()
            self._show(text)
        else:
            self._line(text)

    def compiling(self) -> None:
        """Show that the simulator is being compiled, which is slow only the first time."""
        self.phase("Compiling the simulator, only this once (up to a minute)")

    def rest(self) -> None:
        """Stop the live line, so that something else can be shown live."""
        if self._live is not None:
            self._live.stop()

    def detail(self, text: str) -> None:
        """Show how the present phase is progressing."""
        if self._live is not None:
            self._show(f"{self._phase}: {text}")
        elif time.monotonic() - self._told > _QUIET:
            self._line(f"{self._phase}: {text}")

    def _line(self, text: str) -> None:
        self._told = time.monotonic()
        print(f"{text} ...", file=self._stream, flush=True)

    def _show(self, text: str) -> None:
        """Show the text as it is, because names and quoted text may look like markup."""
        from rich.text import Text

        assert self._live is not None
        self._live.update(Text(text))
