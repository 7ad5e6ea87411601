"""Forms of layouts: which sorts of devices work together, and what such a form can do at most.

Devices of one kind on one host are a *sort*; they are interchangeable, so a stage is how many it has of each sort, a
*shape* of a lane is the row of its stages, and a *form* is a set of lanes. No step of a form takes less than

    batch / sum over lanes of u,    1 / u = min over cuts of max over stages of  1 / sum over replicas of 1 / c

with c the seconds a sample on the blocks of the stage; nor, where a lane is on hosts of its own, less than all
gradients need to pass the borders of those (`lower_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from isthmus.planners.layout.cuts import span_sums
from isthmus.planners.layout.layout_types import Bundle
from isthmus.planners.lower_bound import passing_seconds, worth_of
from isthmus.planners.problem import Floats, Problem
from isthmus.planners.search_constants import SHAPES

__all__ = ["LayoutForm", "Shape", "Sorts", "forms"]

Counts = tuple[int, ...]  # how many bundles of each sort
Shape = tuple[Counts, ...]  # of a lane: those of each of its stages


class LayoutForm(NamedTuple):
    """Lanes by their shapes, and the seconds that no plan of it can go below."""

    shapes: tuple[Shape, ...]
    seconds: float


class Sorts:
    """Bundles by sort, and what shapes of lanes made of them can do at most."""

    def __init__(self, problem: Problem, bundles: Sequence[Bundle]) -> None:
        self.problem, self.bundles = problem, tuple(bundles)
        sorts: dict[tuple[str, str], list[Bundle]] = {}
        for bundle in bundles:
            sorts.setdefault((bundle.host, bundle.kind), []).append(bundle)
        self.sorts = list(sorts.values())
        self.counts: Counts = tuple(len(members) for members in self.sorts)
        self._speeds: dict[Shape, float] = {}
        self._passing: dict[tuple[frozenset[str], frozenset[str]], float] = {}

    @cached_property
    def rates(self) -> list[Floats]:
        """Return for each sort the most samples a second on blocks a .. b - 1, indexed [a, b]."""
        batch, found = self.problem.job.batch, []
        for members in self.sorts:
            kind = self.problem.replica_kind(members[0].groups[0])
            seconds = span_sums(self.problem.block_seconds(*kind, batch).sum(axis=0) / batch)
            found.append(np.where(seconds > 0.0, 1.0 / np.maximum(seconds, 1e-30), np.inf))
        return found

    def speed(self, shape: Shape) -> float:
        """Return the most samples a second of a lane: with its best cut, all replicas of a stage busy all the time."""
        if shape not in self._speeds:
            blocks = len(self.problem.graph.blocks)
            ordered = np.arange(blocks)[:, None] < np.arange(blocks + 1)
            best = np.append(np.inf, np.zeros(blocks))  # by the blocks that the stages so far have
            for stage in shape:
                total = np.sum([n * rate for n, rate in zip(stage, self.rates, strict=True) if n], axis=0)
                best = np.minimum(best[:-1, None], np.where(ordered, total, 0.0)).max(axis=0)
            self._speeds[shape] = float(best[-1])
        return self._speeds[shape]

    def shapes(self, counts: Counts) -> Iterator[Shape]:
        """Yield all rows of stages that use no more than these, not more stages than blocks."""
        yield from self._rows(counts, len(self.problem.graph.blocks))

    def _rows(self, counts: Counts, depth: int) -> Iterator[Shape]:
        for stage in product(*(range(n + 1) for n in counts)):
            if any(stage):
                yield (stage,)
                if depth > 1:
                    left = tuple(n - used for n, used in zip(counts, stage, strict=True))
                    yield from ((stage, *rest) for rest in self._rows(left, depth - 1))

    def parts(self, shapes: Sequence[Shape]) -> list[list[tuple[Bundle, ...]]]:
        """Return the bundles for the stages of every lane."""
        left = [iter(members) for members in self.sorts]
        return [
            [tuple(next(left[sort]) for sort, n in enumerate(stage) for _ in range(n)) for stage in shape]
            for shape in shapes
        ]

    @cached_property
    def most(self) -> list[float]:
        """Return the most samples a second that a bundle of each sort adds, whoever it works with."""
        worth = worth_of(self.problem)
        if worth is None:
            return [float("inf")] * len(self.sorts)
        return [len(members[0].devices) * worth.kinds[members[0].kind] / worth.sample for members in self.sorts]

    def gradients(self, shapes: Sequence[Shape]) -> float:
        """Return the least seconds in which gradients pass the borders of lanes that share no host with others."""
        hosts, seconds = [self.hosts(shape) for shape in shapes], 0.0
        for i, own in enumerate(hosts):
            others = frozenset().union(*hosts[:i], *hosts[i + 1 :])
            if others and not own & others:
                key = own, others
                if key not in self._passing:
                    self._passing[key] = passing_seconds(self.problem, own, others)
                seconds = max(seconds, self._passing[key])
        return seconds

    def hosts(self, shape: Shape) -> frozenset[str]:
        """Return the hosts that a lane uses."""
        return frozenset(self.sorts[sort][0].host for stage in shape for sort, n in enumerate(stage) if n)


def forms(sorts: Sorts, limit: float) -> Iterator[LayoutForm]:
    """Yield all sets of lanes whose bound is below the limit.

    Raises OverflowError where shapes are too many to list.
    """
    batch = sorts.problem.job.batch
    listed = list(islice(sorts.shapes(sorts.counts), SHAPES + 1))
    if len(listed) > SHAPES:
        raise OverflowError
    shapes = [(shape, sorts.speed(shape), _used(shape)) for shape in listed]

    def more(start: int, chosen: tuple[Shape, ...], speed: float, left: Counts) -> Iterator[LayoutForm]:
        if chosen and speed > 0.0 and (seconds := max(batch / speed, sorts.gradients(chosen))) < limit:
            yield LayoutForm(chosen, seconds)
        most = speed + sum(n * each for n, each in zip(left, sorts.most, strict=True))
        if most <= 0.0 or batch / most >= limit:
            return
        for i in range(start, len(shapes)):
            shape, own, used = shapes[i]
            if all(n <= free for n, free in zip(used, left, strict=True)):
                rest = tuple(free - n for n, free in zip(used, left, strict=True))
                yield from more(i, (*chosen, shape), speed + own, rest)

    yield from more(0, (), 0.0, sorts.counts)


def _used(shape: Shape) -> Counts:
    return tuple(map(sum, zip(*shape, strict=True)))
