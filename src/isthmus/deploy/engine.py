"""What an engine does: it starts workers somewhere, passes on what they tell, and leaves nothing behind."""

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
    """A worker is gone. `signal` names what killed it; `last` are its last lines."""

    exit_code: int
    signal: str | None = None
    last: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A worker gave no sign of life for so many seconds; `state` says what is seen of its process."""

    seconds: float
    state: str


@dataclass(frozen=True, kw_only=True)
class Garbled:
    """A worker told something that is no event; it is not listened to any more."""

    line: str


@dataclass(frozen=True, kw_only=True)
class Interrupt:
    """Somebody wants the run to stop; comes from no worker."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPassedOver:
    """A damaged checkpoint was passed over; `aside` is where it lies now. Comes from no worker."""

    path: Path
    why: str
    aside: Path | None


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Training goes on from a checkpoint; `notes` are what differs from the run that saved it. Comes from no worker."""

    step: int
    path: Path
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CheckpointKept:
    """A checkpoint is whole; comes from no worker."""

    step: int
    path: Path


News = Event | Said | Ended | Silent | Garbled | Interrupt | CheckpointPassedOver | Resumed | CheckpointKept


class Notice(NamedTuple):
    """Something that a worker (its device) tells, or that is seen of it."""

    worker: str
    news: News


class Running(Protocol):
    """Workers that were started. Leaving the context kills those that are still there and waits for their end."""

    def __enter__(self) -> Self:
        """Itself."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is left running, and no file."""

    def next(self, timeout: float | None = None) -> Notice | None:
        """The next that there is to know; None if nothing came in `timeout` seconds; RunError if all is gone."""

    def command(self, worker: str, number: int) -> None:
        """Tells a worker to STOP; one that is gone does not hear it."""

    def interrupt(self) -> None:
        """Puts an Interrupt among the notices; may be called from a signal handler."""


class Engine(Protocol):
    """A way to run workers."""

    def check_memory(self, own: Mapping[str, float], building: float) -> None:
        """RunError if memory is short: bytes that each worker trains with, and that each needs to build the model."""

    def start(self, orders: Mapping[str, StepOrder]) -> Running:
        """Starts a worker for each device."""

    def describe(self, workers: int) -> str:
        """Return a line for people that says where the workers run."""
