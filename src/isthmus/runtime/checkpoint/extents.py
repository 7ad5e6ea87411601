"""The elements of a tensor that a worker holds, and the elements that two workers have in common.

A worker holds elements [start, stop) of a flattened *part*. The part is the whole tensor, or what a member of a tensor
group has of it. In that case dimension `dim` consists of sections (query, key and value of a fused projection), and the
member has one of `members` equal slices of each section; its part is those slices, one after the other.

Seen as a matrix of prod(shape[:dim]) rows, any such set of elements is a few boxes. A flat range consists of the rest
of its first row, whole rows, and the beginning of its last row, each cut at the sections. So elements that are held in
one way are read in another by intersecting boxes, without a list of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import msgspec

from isthmus.model.tensor_parallel.member_slices import ParameterSlice

__all__ = ["Count", "Extent", "MemberCut", "Overlap", "Shape", "overlaps", "part_elements"]

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Shape = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]


class MemberCut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of one member of a tensor group; `sections` are sizes along `dim` and add up to it."""

    dim: Count
    sections: Annotated[tuple[Count, ...], msgspec.Meta(min_length=1, max_length=64)]
    member: Count
    members: Annotated[int, msgspec.Meta(ge=1, le=2**32)]

    @classmethod
    def of(cls, part: ParameterSlice) -> MemberCut:
        """Return the cut that a sharded block describes for its parameter."""
        return cls(dim=part.dim, sections=part.sections, member=part.member, members=part.members)

    @property
    def slice(self) -> ParameterSlice:
        """Return this cut in the form that can be applied to tensors."""
        return ParameterSlice(dim=self.dim, sections=self.sections, member=self.member, members=self.members)

    def fits(self, shape: Shape) -> bool:
        """Return whether a tensor of this shape can be cut this way."""
        even = all(section % self.members == 0 for section in self.sections)
        inside = self.dim < len(shape) and sum(self.sections) == shape[self.dim]
        return even and inside and self.member < self.members


class Extent(NamedTuple):
    """Elements [start, stop) of the flattened part that `cut` makes, or of the whole tensor without it."""

    start: int
    stop: int
    cut: MemberCut | None = None


class Overlap(NamedTuple):
    """A box of `rows` × `columns` elements that two extents share; `at` counts from the extent's first element."""

    rows: int
    columns: int
    at: int
    stride: int
    other_at: int
    other_stride: int


class _Box(NamedTuple):
    """Rows and columns of the whole tensor's matrix, and where they lie in the extent."""

    row: int
    rows: int
    column: int
    columns: int
    at: int
    stride: int

    def common(self, other: _Box) -> Overlap | None:
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        if rows <= 0 or columns <= 0:
            return None
        return Overlap(rows, columns, self._where(row, column), self.stride, other._where(row, column), other.stride)

    def _where(self, row: int, column: int) -> int:
        return self.at + (row - self.row) * self.stride + column - self.column


def part_elements(shape: Shape, cut: MemberCut | None) -> int:
    """Return the number of elements of a part of a tensor, which is all of it if there is no cut."""
    return math.prod(shape) // (cut.members if cut else 1)


def overlaps(shape: Shape, extent: Extent, other: Extent) -> Iterator[Overlap]:
    """Yield the boxes that two extents of a tensor share; if both are cut, it must be along the same dimension."""
    dims = {held.cut.dim for held in (extent, other) if held.cut}
    assert len(dims) <= 1
    dim = dims.pop() if dims else 0
    matrix = shape if shape else (1,)
    theirs = list(_boxes(matrix, dim, other))
    for mine in _boxes(matrix, dim, extent):
        yield from (common for box in theirs if (common := mine.common(box)))


def _boxes(shape: Shape, dim: int, extent: Extent) -> Iterator[_Box]:
    inner = math.prod(shape[dim + 1 :])
    width = shape[dim] * inner // (extent.cut.members if extent.cut else 1)
    for row, rows, left, right in _rectangles(extent.start, extent.stop, width):
        for begin, end, column in _spans(shape[dim], inner, extent.cut):
            low, high = max(left, begin), min(right, end)
            if low < high:
                at = row * width + low - extent.start
                yield _Box(row, rows, column + low - begin, high - low, at, width)


def _rectangles(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, rows, left, right) for the boxes of a flat range in a matrix that is `width` wide."""
    if start >= stop:
        return
    (first, left), (last, right) = divmod(start, width), divmod(stop, width)
    if first == last:
        yield first, 1, left, right
        return
    if left:
        yield first, 1, left, width
        first += 1
    if first < last:
        yield first, last - first, 0, width
    if right:
        yield last, 1, 0, right


def _spans(size: int, inner: int, cut: MemberCut | None) -> Iterator[tuple[int, int, int]]:
    """Yield for each section the columns [begin, end) of the part, and where they begin in the whole."""
    if cut is None:
        yield 0, size * inner, 0
        return
    begin = whole = 0
    for section in cut.sections:
        own = section // cut.members
        yield begin * inner, (begin + own) * inner, (whole + cut.member * own) * inner
        begin, whole = begin + own, whole + section
