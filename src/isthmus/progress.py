"""How long work reports its progress to whoever asked for it: the command line, or nobody."""

from __future__ import annotations

from typing import Protocol

__all__ = ["SILENT", "Progress"]


class Progress(Protocol):
    """Listens to long work. The command line shows it as a living line; Python callers may pass one of their own."""

    def phase(self, text: str) -> None:
        """Begin a new phase of the work."""

    def detail(self, text: str) -> None:
        """Show how the present phase is progressing."""

    def compiling(self) -> None:
        """Tell that the simulator has to be compiled, which is slow but happens only once."""


class _Silent:
    """Shows nothing."""

    def phase(self, text: str) -> None:
        """Ignore the phase."""

    def detail(self, text: str) -> None:
        """Ignore the detail."""

    def compiling(self) -> None:
        """Ignore the compiling."""


SILENT: Progress = _Silent()
