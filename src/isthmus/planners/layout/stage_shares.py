"""Shares of a micro-batch among the replicas of a stage, and the time that the stage then takes.

Shares are exact (`shares.fair_shares`) for the whole model's times, and depend on how many replicas of which sort there
are, not on which: equal sorts are looked up, not computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from isthmus.planners.layout.shares import even_shares, fair_shares
from isthmus.planners.problem import Floats, Problem, ReplicaKind

__all__ = ["Sharing", "StageShare"]

Groups = Sequence[tuple[str, ...]]


class StageShare(NamedTuple):
    """The shares of replicas of some sorts, and their times."""

    shares: dict[ReplicaKind, list[int]]  # of the replicas of each sort
    seconds: Floats  # [2, blocks + 1] of the slowest replica: forward and backward of all blocks before each
    most: tuple[tuple[ReplicaKind, int], ...]  # the largest share of each sort that has any


class Sharing:
    """The shares of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, frozenset[tuple[ReplicaKind, int]]], StageShare] = {}
        self._found: dict[tuple[int, tuple[tuple[str, ...], ...]], StageShare] = {}

    def of(self, groups: Groups, samples: int) -> StageShare:
        """Return the shares by sort, and the time of the slowest."""
        same = samples, tuple(groups)
        if same not in self._found:
            counts = Counter(self.problem.replica_kind(group) for group in groups)
            key = samples, frozenset(counts.items())
            if key not in self._known:
                self._known[key] = self._shared(counts, samples)
            self._found[same] = self._known[key]
        return self._found[same]

    def stage(self, groups: Groups, samples: int) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Return the replicas with their shares; one with nothing to do is left out."""
        left = {kind: iter(shares) for kind, shares in self.of(groups, samples).shares.items()}
        pairs = ((group, next(left[self.problem.replica_kind(group)])) for group in groups)
        return tuple((group, share) for group, share in pairs if share)

    def _shared(self, counts: Counter[ReplicaKind], samples: int) -> StageShare:
        kinds = sorted(counts.elements(), key=repr)
        if len(counts) == 1:
            shares = even_shares(samples, len(kinds))
        else:
            times = {kind: partial(self.problem.whole_seconds, *kind) for kind in counts}
            shares = fair_shares(samples, [times[kind] for kind in kinds], least=0)
        by_kind: dict[ReplicaKind, list[int]] = {}
        for kind, share in zip(kinds, shares, strict=True):
            by_kind.setdefault(kind, []).append(share)
        most = tuple((kind, max(own)) for kind, own in by_kind.items() if max(own))
        rows = [self.problem.block_seconds(*kind, share) for kind, share in most]
        slowest = max(rows, key=lambda row: float(np.sum(row)))
        return StageShare(by_kind, np.cumsum(np.pad(slowest, ((0, 0), (1, 0))), axis=1), most)
