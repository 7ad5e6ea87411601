"""How blocks are cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from isthmus.planners.problem import Bools, Floats

__all__ = ["balanced_cut", "best_cut", "pipeline_seconds", "stage_sums"]


def best_cut(costs: Iterable[Floats]) -> list[int] | None:
    """Cut blocks into contiguous stages so that the dearest stage is as cheap as can be; None where none is possible.

    `costs` gives for each stage a matrix: what blocks a .. b - 1 cost on it, infinite where it cannot have them. Exact,
    by dynamic programming over (stage, blocks so far):

        best[s][b] = min over a < b of max(best[s - 1][a], cost[s][a, b])

    Returns the first block of each stage.
    """
    best: Floats | None = None  # of the stages so far, by the number of blocks that they have
    picks = []
    for cost in costs:
        if best is None:
            best = np.full(cost.shape[1], np.inf)
            best[0] = 0.0
        value = np.maximum(best[:-1, None], cost)
        pick = value.argmin(axis=0)
        best = value[pick, np.arange(cost.shape[1])]
        picks.append(pick)
    if best is None or not best[-1] < np.inf:
        return None
    firsts, end = [], len(best) - 1
    for pick in reversed(picks):
        end = int(pick[end])
        firsts.append(end)
    return firsts[::-1]


def balanced_cut(weights: Sequence[Floats], fits: Sequence[Bools] | None = None) -> list[int] | None:
    """The cut whose slowest stage is as fast as can be: `weights[s][b]` is the time of block b on stage s.

    `fits[s][a, b]` says whether stage s can have blocks a .. b - 1; it can have any where nothing is said.
    """
    blocks = len(weights[0])
    ordered = np.arange(blocks)[:, None] < np.arange(blocks + 1)
    return best_cut(
        np.where(ordered if fits is None else fits[s], _span_sums(row), np.inf) for s, row in enumerate(weights)
    )


def _span_sums(row: Floats) -> Floats:
    """[a, b]: the sum over blocks a .. b - 1."""
    sums = np.concatenate(([0.0], np.cumsum(row)))
    return np.asarray(sums[None, :] - sums[:-1, None])


def stage_sums(row: Floats, firsts: Sequence[int]) -> Floats:
    """The sum over the blocks of each stage."""
    return np.asarray(np.add.reduceat(row, firsts))


def pipeline_seconds(stages: Floats, micro_batches: int) -> float:
    """What a pipeline needs at least, for stages that compute a micro-batch, both ways, in so many seconds.

    One micro-batch goes through all stages and back; and every stage waits for those before it, before its first
    forward and after its last backward.
    """
    before = np.cumsum(stages) - stages
    return float(max(stages.sum(), (micro_batches * stages + before).max()))
