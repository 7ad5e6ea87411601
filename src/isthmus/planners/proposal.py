"""Ideas that a scheme proposes, with bounds that are cheap to know, so that only promising ones become plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from isthmus.plan.types import Plan

__all__ = ["Idea", "Version"]


class Version(NamedTuple):
    """One way to carry out an idea that fits as far as can be told without the simulator."""

    seconds: float  # no plan of it is faster
    make: Callable[[], Plan]


class Idea(NamedTuple):
    """Devices with their roles and micro-batches; its versions say how memory is saved."""

    seconds: float  # no plan of it is faster
    memory: float  # bytes of all its devices together
    samples: int  # of a micro-batch on one replica
    versions: Callable[[], list[Version]]  # best bound first
    nearest: Callable[[], Plan | None]  # what misses least where none fits; None where places forbid all
    effort: float = 0.0  # seconds that making the idea takes on a usual machine
    versions_effort: float = 0.0  # seconds that making its versions takes
