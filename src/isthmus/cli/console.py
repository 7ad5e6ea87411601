"""What a command says while it works, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from isthmus.errors import FileError

if TYPE_CHECKING:
    from rich.status import Status

__all__ = ["Answer", "Progress", "check_folder"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a command found: for programs, for people, and (where it failed) for standard error."""

    values: dict[str, Any]
    text: str
    failure: str | None = None
    exit_code: int = 1  # where it failed


def check_folder(path: str | None) -> None:
    """A file that is asked for has a folder to go to: said before the work, not after it."""
    if path is not None and not Path(path).parent.is_dir():
        raise FileError("the folder does not exist", where=path, next=f"Make it: mkdir -p {Path(path).parent}")


class Progress:
    """Phases of long work, on standard error: a living line on a terminal, else one plain line for each phase."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Status | None = None
        self._phase = ""

    def __enter__(self) -> Progress:
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
        """A new phase of the work begins."""
        self._phase = text
        if self._live is not None:
            self._live.start()
            self._live.update(text)
        else:
            print(f"{text} ...", file=self._stream, flush=True)

    def rest(self) -> None:
        """The living line ends, so that something else may live there."""
        if self._live is not None:
            self._live.stop()

    def detail(self, text: str) -> None:
        """How the present phase goes on; shown only where the line lives."""
        if self._live is not None:
            self._live.update(f"{self._phase}: {text}")
