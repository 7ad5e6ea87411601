"""What a worker is told, and what it tells: one JSON object a line, whoever started it.

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

STOP = 1  # what the leader passes on to all workers: save and stop after this step


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is told."""


class _Told(_Frozen, frozen=True, kw_only=True, tag_field="is", tag=str.lower):
    """Base of all that comes in a line of its own after the first; `is` names it."""


class StepOrder(_Frozen, frozen=True, kw_only=True):
    """What a worker is to do: steps [first, stop) of its program."""

    program: Program
    model: str  # digest of the captured model that the plan was made for
    first: int
    stop: int
    folder: str | None = None  # of checkpoints; None: nothing is saved
    run: str = ""  # the run's identity, which goes into all that it saves
    every: int | None = None  # save after so many steps, and after the last
    resume: str | None = None  # a checkpoint to begin with
    record: bool = False  # tell what was done when in the last step


class WorkerPlace(_Frozen, frozen=True, kw_only=True):
    """Where a worker runs, which its engine knows."""

    store: str  # a file in which workers find each other
    device: str  # torch's name for it
    threads: int
    interface: str = ""  # where it listens for the others; none named: loopback
    nccl: bool = False  # its device is its own, and may talk over NCCL
    slower: float = 1.0  # ... than this machine is: computing is padded
    parent: int = 0  # the process that started it, and that it ends with; 0: nobody in particular
    beat: float = 3.0  # seconds between two signs of life


class Start(_Frozen, frozen=True, kw_only=True):
    """The first line."""

    order: StepOrder
    place: WorkerPlace


class Clock(_Told, frozen=True, kw_only=True):
    """The answer to Hello: the parent's clock, in seconds."""

    now: float


class Command(_Told, frozen=True, kw_only=True):
    """What all are to do at the end of the present step: STOP."""

    number: int


class Hello(_Told, frozen=True, kw_only=True):
    """The process is there."""


class Alive(_Told, frozen=True, kw_only=True):
    """A sign of life, from a thread of its own: a worker that computes for long tells nothing else meanwhile."""


class Ready(_Told, frozen=True, kw_only=True):
    """The worker has its part of the model, and channels to all whom it talks to."""


class Stepped(_Told, frozen=True, kw_only=True):
    """A step is done (told by the leader). `step` counts from 0; a skipped one changed nothing."""

    step: int
    loss: float | None  # None: not a finite number
    norm: float | None
    seconds: float
    skipped: bool


class Traffic(_Told, frozen=True, kw_only=True):
    """How many bytes a worker has sent since it began; told now and then."""

    sent: int


class Saving(_Told, frozen=True, kw_only=True):
    """All workers save what they have after `step` steps (told by the leader)."""

    step: int
    updates: int
    loss_scale: SavedScale | None


class Wrote(_Told, frozen=True, kw_only=True):
    """A worker's part of a checkpoint is on the disk; None where it has nothing to save."""

    step: int
    part: PartInfo | None


class Measured(_Frozen, frozen=True, kw_only=True):
    """What a worker did from when to when, by the parent's clock."""

    what: str  # forward, backward, sync
    label: str
    micro_batch: int
    begin: float
    end: float


class Done(_Told, frozen=True, kw_only=True):
    """All that was ordered is done, or a command ended it. `spans` are of the last step."""

    sent: int  # bytes
    memory: int  # bytes at most, of the process or, on an accelerator, there
    spans: tuple[Measured, ...] = ()


class Failed(_Told, frozen=True, kw_only=True):
    """The worker gives up. `lost`: only because another did, as it seems from here."""

    what: str
    found: str | None
    expected: str | None
    next: str | None
    where: str | None
    step: int | None  # None: before the first
    lost: bool


Told = Clock | Command
Event = Hello | Alive | Ready | Stepped | Traffic | Saving | Wrote | Done | Failed
