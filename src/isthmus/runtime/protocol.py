"""The messages between a worker and the process that started it: one JSON object per line.

parent ─▶ worker    Start, Clock, then commands (to the leader only)
worker ─▶ parent    events; the last is Done or Failed; Alive now and then, whatever the worker is doing
"""

from __future__ import annotations

import msgspec

from isthmus.runtime.checkpoint.manifest import PartInfo, SavedScale
from isthmus.runtime.program import Program

__all__ = [
    "STOP",
    "Alive",
    "Clock",
    "Command",
    "Done",
    "Event",
    "Failed",
    "Hello",
    "Measured",
    "Ready",
    "Saving",
    "Start",
    "StepOrder",
    "Stepped",
    "Told",
    "Traffic",
    "WorkerPlace",
    "Wrote",
]

STOP = 1  # a command that the leader passes on to all workers: save and stop after this step


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all messages and their parts."""


class _Told(_Frozen, frozen=True, kw_only=True, tag_field="is", tag=str.lower):
    """Base of all messages after the first; the field `is` names the type."""


class StepOrder(_Frozen, frozen=True, kw_only=True):
    """What a worker is to do: steps [first, stop) of its program."""

    program: Program
    model: str  # digest of the captured model for which the plan was made
    first: int
    stop: int
    folder: str | None = None  # where checkpoints go; None: nothing is saved
    run: str = ""  # the run's identity, which goes into everything that it saves
    every: int | None = None  # steps between saves; the last step is always saved
    resume: str | None = None  # a checkpoint to resume from
    record: bool = False  # report the spans of work in the last step


class WorkerPlace(_Frozen, frozen=True, kw_only=True):
    """Where a worker runs, as its engine chose."""

    store: str  # a file in which workers find each other
    device: str  # torch's name for it
    threads: int
    interface: str = ""  # where it listens for the others; empty: loopback
    nccl: bool = False  # its device is its own and may use NCCL
    slower: float = 1.0  # factor by which computing is slowed down
    parent: int = 0  # the process that started it, and with which it ends; 0: none in particular
    beat: float = 3.0  # seconds between two signs of life


class Start(_Frozen, frozen=True, kw_only=True):
    """The first line, which starts the worker."""

    order: StepOrder
    place: WorkerPlace


class Clock(_Told, frozen=True, kw_only=True):
    """The answer to Hello: the parent's clock, in seconds."""

    now: float


class Command(_Told, frozen=True, kw_only=True):
    """A command that all workers follow at the end of the present step: STOP."""

    number: int


class Hello(_Told, frozen=True, kw_only=True):
    """The process has started."""


class Alive(_Told, frozen=True, kw_only=True):
    """A sign of life from a thread of its own, because a worker that computes for long sends nothing else meanwhile."""


class Ready(_Told, frozen=True, kw_only=True):
    """The worker has its part of the model, and channels to all workers with which it exchanges messages."""


class Stepped(_Told, frozen=True, kw_only=True):
    """A step is done (sent by the leader). `step` counts from 0; a skipped step changed nothing."""

    step: int
    loss: float | None  # None: not a finite number
    norm: float | None
    seconds: float
    skipped: bool


class Traffic(_Told, frozen=True, kw_only=True):
    """How many bytes a worker has sent since it began; sent now and then."""

    sent: int


class Saving(_Told, frozen=True, kw_only=True):
    """All workers save their state after `step` steps (sent by the leader)."""

    step: int
    updates: int
    loss_scale: SavedScale | None


class Wrote(_Told, frozen=True, kw_only=True):
    """A worker's part of a checkpoint is on the disk; None if it has nothing to save."""

    step: int
    part: PartInfo | None


class Measured(_Frozen, frozen=True, kw_only=True):
    """What a worker did in an interval, by the parent's clock."""

    what: str  # forward, backward, sync
    label: str
    micro_batch: int
    begin: float
    end: float


class Done(_Told, frozen=True, kw_only=True):
    """Everything that was ordered is done, or a command ended it. `spans` are those of the last step."""

    sent: int  # bytes
    memory: int  # peak bytes, of the process or, on an accelerator, there
    spans: tuple[Measured, ...] = ()


class Failed(_Told, frozen=True, kw_only=True):
    """The worker gives up. `lost` says that it seems to fail only because another worker did."""

    what: str
    found: str | None
    expected: str | None
    next: str | None
    where: str | None
    step: int | None  # None: before the first
    lost: bool


Told = Clock | Command
Event = Hello | Alive | Ready | Stepped | Traffic | Saving | Wrote | Done | Failed
