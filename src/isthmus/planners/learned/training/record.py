"""The record of a search, which is kept for training."""

from __future__ import annotations

import msgspec

from isthmus.planners.learned.decisions import Draft
from isthmus.planners.learned.features import Feedback

__all__ = ["Leaf", "Record"]


class Leaf(msgspec.Struct, frozen=True, array_like=True):
    """A whole draft and its seconds."""

    degree: int
    roles: tuple[int, ...]
    micro_batches: int
    ahead: int
    state: int
    seconds: float

    @property
    def draft(self) -> Draft:
        """Return the draft as a search has it."""
        return Draft(self.degree, self.roles, self.micro_batches, self.ahead, self.state)


class Record(msgspec.Struct, frozen=True):
    """The feedback and the leaves that a search of one problem found."""

    seed: int
    feedback: list[Feedback]  # of the best plan before the search, and of better ones
    leaves: list[Leaf]
