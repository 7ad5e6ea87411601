"""The part of a tensor that a member of a tensor group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ParameterSlice"]


@dataclass(frozen=True, kw_only=True)
class ParameterSlice:
    """The part of one member: of each of the `sections` along `dim`, the member-th of `members` equal slices.

    `sections` are sizes that add up to the dimension: one for a plain layer, three for query, key and value in one
    weight. The part is those slices, one after the other.
    """

    dim: int
    sections: tuple[int, ...]
    member: int
    members: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Return [start, stop) of each slice along `dim` of the whole tensor."""
        starts = accumulate(self.sections[:-1], initial=0)
        widths = [size // self.members for size in self.sections]
        firsts = [start + self.member * width for start, width in zip(starts, widths, strict=True)]
        return [(first, first + width) for first, width in zip(firsts, widths, strict=True)]

    def cut(self, whole: Tensor) -> Tensor:
        """Return the member's part, in memory of its own; gradients flow back to the whole."""
        import torch

        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole tensor, joined from the parts of all members in their order; any member may call this."""
        import torch

        widths = [size // self.members for size in self.sections]
        pieces = [torch.split(part, widths, self.dim) for part in parts]
        return torch.cat([member[section] for section in range(len(widths)) for member in pieces], self.dim)
