"""What an engine must do: start workers somewhere, pass on their events, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from isthmus.runtime.protocol import Event, StepOrder

__all__ = [
    "CheckpointKept",
    "CheckpointPassedOver",
    "Ended",
    "Engine",
    "Garbled",
    "Interrupt",
    "News",
    "Notice",
    "Resumed",
    "Running",
    "Said",
    "Silent",
]


@dataclass(frozen=True, kw_only=True)
class Said:
    """A line that a worker's code printed."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A worker has ended. `signal` names the signal that killed it; `last` holds its last lines of output."""

    exit_code: int
    signal: str | None = None
    last: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A worker gave no sign of life for this many seconds; `state` describes its process as seen from outside."""

    seconds: float
    state: str


@dataclass(frozen=True, kw_only=True)
class Garbled:
    """A worker sent a line that is not an event; no further lines are read from it."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """Somebody asked the run to stop. This notice comes from no worker."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver:
    """A damaged checkpoint was skipped; `aside` is its new path. This notice comes from no worker."""

    path: Path
    why: str
    aside: Path | None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Training resumes from a checkpoint. This notice comes from no worker.

    `notes` tell how the run may differ from the one that saved the checkpoint.
    """

    step: int
    path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointKept:
    """A checkpoint is complete. This notice comes from no worker."""

    step: int
    path: Path


News = Event | Said | Ended | Silent | Garbled | Interrupt | CheckpointPassedOver | Resumed | CheckpointKept


class Notice(NamedTuple):
    """An event that a worker (named by its device) sent, or that was observed of it."""

    worker: str
    news: News


class Running(Protocol):
    """Workers that were started. Leaving the context kills those that are still running and waits for their end."""

    def __enter__(self) -> Self:
        """Return this object."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the workers that are still running and delete their temporary files."""

    def next(self, timeout: float | None = None) -> Notice | None:
        """Return the next notice; None if none came in `timeout` seconds.

        Raise RunError if the place where the workers run is gone.
        """

    def command(self, worker: str, number: int) -> None:
        """Send a worker the command STOP; do nothing if the worker has ended."""

    def interrupt(self) -> None:
        """Put an Interrupt among the notices. It is safe to call this from a signal handler."""


class Engine(Protocol):
    """A way to run workers."""

    def check_memory(self, own: Mapping[str, float], building: float) -> None:
        """Raise RunError if memory is short.

        `own` gives the bytes that each worker trains with, `building` the bytes that each needs to build the model.
        """

    def start(self, orders: Mapping[str, StepOrder]) -> Running:
        """Start a worker for each device."""

    def describe(self, workers: int) -> str:
        """Return a line for people that says where the workers run."""
