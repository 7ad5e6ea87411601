"""The policy that decides which unit a free device of a pool takes: one object for the simulator and the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["POLICIES", "FirstCome", "LongestRemaining", "ReadyJob", "UnitPolicy"]


class ReadyJob(NamedTuple):
    """A job whose next unit could run now."""

    job: int
    ready: float  # since when it waits, in seconds
    remaining: float  # seconds of work its job still has
    here: bool  # its last unit ran on the device that asks


class UnitPolicy(Protocol):
    """A rule that picks one of the candidates."""

    def pick(self, candidates: Sequence[ReadyJob]) -> int:
        """Return the position of the chosen candidate."""


class LongestRemaining:
    """Picks the job with most work left (LRTF of Hydra); among equals, the one whose data is on this device."""

    def pick(self, candidates: Sequence[ReadyJob]) -> int:
        """Return the position of the job with most work left."""
        return max(range(len(candidates)), key=lambda i: (candidates[i].remaining, candidates[i].here, -i))


class FirstCome:
    """Picks the job that has waited longest."""

    def pick(self, candidates: Sequence[ReadyJob]) -> int:
        """Return the position of the job that has waited longest."""
        return min(range(len(candidates)), key=lambda i: (candidates[i].ready, i))


POLICIES: dict[str, UnitPolicy] = {"longest-remaining": LongestRemaining(), "first-come": FirstCome()}
