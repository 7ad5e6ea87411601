"""The plan as plain frozen types, which save as JSON and as text.

A plan has parts. A *pipeline* trains one job: it has stages (runs of blocks), each with replicas that take contiguous
intervals of every micro-batch, in listed order. A *pool* trains several jobs whose shards move between devices. Nothing
here is checked against a model or a cluster: `plan.validate` does that, once.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from isthmus.cluster.spec import Precision
from isthmus.model.job import Job

__all__ = [
    "How",
    "Layout",
    "Outcome",
    "Pipeline",
    "Plan",
    "Pool",
    "PoolJob",
    "Prediction",
    "Replica",
    "Schedule",
    "Shard",
    "Spill",
    "Stage",
    "Sync",
    "Via",
]

Schedule = Literal["fill-drain", "1f1b", "interleaved"]
How = Literal["ring", "tree", "server", "factors", "sparse", "duplicate"]
Layout = Literal["replicated", "sharded-optimizer", "sharded-all"]
Spill = Literal["none", "optimizer", "all"]
Policy = Literal["longest-remaining", "first-come"]


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the plan types: immutable, with named fields; unknown fields are refused when read from a file.

    Files have every field. Defaults would be left out by identity, so equal plans would save differently.
    """


class Replica(_Frozen, frozen=True, kw_only=True):
    """One copy of a stage; several devices that act as one replica are a tensor group.

    `share` counts samples of each micro-batch; intervals follow in listed order. The share is run in `slices` parts.
    """

    devices: tuple[str, ...]
    share: int
    slices: int = 1


class Stage(_Frozen, frozen=True, kw_only=True):
    """A run of blocks, `first` to `last` inclusive, and the replicas that compute it."""

    first: str
    last: str
    replicas: tuple[Replica, ...]
    state: Layout = "replicated"
    recompute: bool = False
    spill: Spill = "none"
    kept: float | None = None  # mask: the fraction kept of each pruned tensor (linear weights; others are exempt)


class Sync(_Frozen, frozen=True, kw_only=True):
    """How a bucket of parameters is synchronised among its participants.

    `parameters` lists names; `[block]` stands for all parameters of that block that no other sync names. `participants`
    lists replicas by their first device, in ring order. `root` (server only) is a device. `segments` is the number of
    pieces of each message that are in flight.
    """

    bucket: str
    how: How
    parameters: tuple[str, ...]
    participants: tuple[str, ...]
    root: str | None = None
    segments: int = 1


class Pipeline(_Frozen, frozen=True, kw_only=True, tag="pipeline", tag_field="part"):
    """One job as stages.

    `ahead` is the number of micro-batches that 1f1b allows in flight for each far link on the way, beyond the depth of
    the pipeline: as many as are computed while one goes to the next stage and back (`plan.schedule`).
    """

    job: Job
    model_digest: str
    precision: Precision
    micro_batches: int
    stages: tuple[Stage, ...]
    syncs: tuple[Sync, ...] = ()
    schedule: Schedule = "1f1b"
    ahead: int = 0


class Shard(_Frozen, frozen=True, kw_only=True):
    """A run of blocks that moves between the devices of a pool as one."""

    first: str
    last: str


class PoolJob(_Frozen, frozen=True, kw_only=True):
    """One job of a pool, cut into shards; with `recompute` only shard inputs are kept from forward to backward."""

    job: Job
    model_digest: str
    precision: Precision
    shards: tuple[Shard, ...]
    recompute: bool = True
    kept: float | None = None


class Pool(_Frozen, frozen=True, kw_only=True, tag="pool", tag_field="part"):
    """Jobs whose units (forward or backward of one shard) run on whichever device is free, by a policy.

    `caps` limits the bytes a pool may use of each device's memory, in the order of `devices`.
    """

    jobs: tuple[PoolJob, ...]
    devices: tuple[str, ...]
    caps: tuple[float, ...]
    policy: Policy = "longest-remaining"
    buffered: bool = True  # the next unit's state is copied in while the present one computes


class Via(_Frozen, frozen=True, kw_only=True):
    """A relay: messages between two hosts, both ways, go over the listed hosts (in the order from a to b)."""

    between: tuple[str, str]
    hosts: tuple[str, ...]


class Plan(_Frozen, frozen=True, kw_only=True):
    """Which blocks of which job each device computes, for what share of each micro-batch, when, and how they sync."""

    cluster: str  # name of the cluster it was made for
    parts: tuple[Pipeline | Pool, ...]
    via: tuple[Via, ...] = ()

    @property
    def job_parts(self) -> tuple[Pipeline | PoolJob, ...]:
        """Return for every job, in order, its pipeline or its place in a pool."""
        parts = [(part,) if isinstance(part, Pipeline) else part.jobs for part in self.parts]
        return tuple(item for part in parts for item in part)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Return every job, in order."""
        return tuple(item.job for item in self.job_parts)


class Outcome(_Frozen, frozen=True, kw_only=True):
    """The result of the search for a scheme's best plan.

    Only a scheme that was found, which means searched to its end, has `seconds` and is compared with.
    """

    state: Literal["found", "unfinished", "cannot run"]
    seconds: float | None = None  # per step, of a scheme that was found
    best_so_far: float | None = None  # seconds per step of an unfinished scheme's best plan, if it has one
    reason: str | None = None  # why it is unfinished, or cannot run
    devices: int | None = None  # devices that its best plan uses


class Prediction(_Frozen, frozen=True, kw_only=True):
    """What the simulator predicts for a plan."""

    step_seconds: float
    jobs: dict[str, float]  # job -> seconds per step
    memory: dict[str, float]  # device -> peak bytes
    lower_bound_seconds: float | None = None
    baselines: dict[str, float | None] = {}  # scheme -> seconds per step, None unless it was searched to its end
    baseline_outcomes: dict[str, Outcome] = {}  # scheme -> its outcome; older files have none
    everywhere: Outcome | None = None  # data parallelism over all devices, even shares; None where it was not priced

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of every scheme; files that only have seconds do not say why some have none."""
        unknown = Outcome(state="unfinished", reason="the plan file does not say why")
        old = {
            name: unknown if seconds is None else Outcome(state="found", seconds=seconds)
            for name, seconds in self.baselines.items()
        }
        return self.baseline_outcomes or old
