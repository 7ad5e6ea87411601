"""The types that layouts are described with: bundles of devices, stages, and lanes side by side."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.plan.types import Layout as State

__all__ = ["BUCKET", "Bundle", "Groups", "Lane", "LaneOptions", "Layout", "Need", "Stage", "StageOptions", "Staged"]

BUCKET = 25e6  # bytes of one sync bucket: PyTorch's own default
Groups = tuple[tuple[str, ...], ...]
Stage = tuple[tuple[tuple[str, ...], int], ...]  # devices and share of each replica


class StageOptions(NamedTuple):
    """Options of a stage that change its memory and not its blocks."""

    recompute: bool = False
    state: State = "replicated"
    spill: bool = False  # the optimizer's state is in the host's memory


class Need(NamedTuple):
    """One stage, as far as memory goes. `devices` are all of its devices, `degree` of them act as one replica."""

    devices: tuple[str, ...]
    degree: int
    replicas: int
    share: int
    in_flight: int  # micro-batches


class Bundle(NamedTuple):
    """Replicas that stand in the same stage: of one kind, on one host or on equal hosts of one region."""

    groups: Groups
    kind: str
    host: str  # of the first
    region: str
    hosts: int
    speed: float  # samples a second

    @property
    def devices(self) -> tuple[str, ...]:
        """Return all devices of the bundle."""
        return tuple(device for group in self.groups for device in group)


class Staged(NamedTuple):
    """The replicas of each stage with their samples, and the number of micro-batches."""

    stages: tuple[Stage, ...]
    micro_batches: int
    ahead: int = 0


class LaneOptions(NamedTuple):
    """Settings that all lanes of a plan have in common."""

    micro_batches: int
    ahead: int = 0
    state: State = "replicated"
    spill: bool = False  # the optimizer's state is in the host's memory

    @property
    def held(self) -> StageOptions:
        """Return how a stage that does not recompute holds its state."""
        return StageOptions(False, self.state, self.spill)


class Lane(NamedTuple):
    """A pipeline: replicas and shares of its stages, and where they begin."""

    stages: tuple[Stage, ...]
    firsts: tuple[int, ...]
    recompute: tuple[bool, ...]
    least: float = 0.0  # seconds that it needs at least
    seconds: float = 0.0  # that it takes, about

    @property
    def samples(self) -> int:
        """Return the number of samples in a micro-batch of this lane."""
        return sum(share for _, share in self.stages[0])


class Layout(NamedTuple):
    """Lanes side by side."""

    lanes: tuple[Lane, ...]
    options: LaneOptions
    seconds: float  # about: what the slowest lane needs, and what of the syncs between lanes nothing hides
