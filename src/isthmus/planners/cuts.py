"""How blocks are cut into stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.planners.problem import Bools, Floats

__all__ = ["balanced_cut", "best_cut", "even_limits", "pipeline_seconds", "span_sums", "stage_sums"]


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
    stages, blocks = len(weights), len(weights[0])
    before = np.zeros((stages, blocks + 1))
    np.cumsum(np.stack(weights), axis=1, out=before[:, 1:])
    able = np.ones((1, blocks, blocks + 1), np.bool_) if fits is None else np.stack(fits)
    firsts: list[int] = _balanced(before, able).tolist()
    return firsts or None


@compiled
def _balanced(before: Floats, fits: Bools) -> npt.NDArray[np.int32]:
    """`best_cut` for the seconds before each block on each stage, [stages, blocks + 1]; empty where none is possible.

    `fits` [stages or 1, blocks, blocks + 1].
    """
    stages, blocks = before.shape[0], before.shape[1] - 1
    best = np.full((stages + 1, blocks + 1), np.inf)
    picks = np.zeros((stages, blocks + 1), np.int32)
    best[0, 0] = 0.0
    for s in range(stages):
        able = fits[min(s, len(fits) - 1)]
        for a in range(s, blocks):
            if not best[s, a] < np.inf:
                continue
            for b in range(a + 1, blocks + 1):
                value = max(best[s, a], before[s, b] - before[s, a])
                if able[a, b] and value < best[s + 1, b]:
                    best[s + 1, b] = value
                    picks[s, b] = a
    if not best[stages, blocks] < np.inf:
        return np.empty(0, np.int32)
    firsts, end = np.zeros(stages, np.int32), blocks
    for s in range(stages - 1, -1, -1):
        firsts[s] = picks[s, end]
        end = firsts[s]
    return firsts


def even_limits(row: Floats) -> Floats:
    """The weight of the heaviest stage in the most even cut into 1, 2, ... stages, up to one a block."""
    sums, blocks = span_sums(row), len(row)
    best, limits = np.append(0.0, np.full(blocks, np.inf)), []
    cost = np.where(np.arange(blocks)[:, None] < np.arange(blocks + 1), sums, np.inf)
    for _ in range(blocks):
        best = np.maximum(best[:-1, None], cost).min(axis=0)
        limits.append(best[-1])
    return np.array(limits)


def span_sums(row: Floats) -> Floats:
    """[a, b]: the sum over blocks a .. b - 1."""
    sums = np.concatenate(([0.0], np.cumsum(row)))
    return np.asarray(sums[None, :] - sums[:-1, None])


def stage_sums(row: Floats, firsts: Sequence[int]) -> Floats:
    """The sum over the blocks of each stage."""
    return np.asarray(np.add.reduceat(row, firsts))


def pipeline_seconds(
    most: Floats,
    micro_batches: int,
    flights: Sequence[int],
    least: Floats | None = None,
    hops: Floats | None = None,
) -> Floats:
    """What a pipeline by 1f1b needs at least (`staged` says why); a row that must wait for nothing has no `hops`.

    `most` and `least` are the seconds of each stage's slowest and quickest replica for a micro-batch, both ways;
    `hops` those of messages to the next stage and back. Stages are the last axis; there may be others before it.
    """
    least = most if least is None else least
    start = np.zeros((*most.shape[:-1], 1))
    after = np.concatenate((np.zeros_like(most[..., 1:]) if hops is None else hops, start), axis=-1)
    way = np.concatenate((start, np.cumsum(least + after, axis=-1)), axis=-1)  # to each stage and back; then to the end
    ends, way = way[..., -1:], way[..., :-1]
    with np.errstate(invalid="ignore"):  # stages that cannot talk
        around = most - least + ends - way
    busy = np.maximum(micro_batches * most, -(-micro_batches // np.asarray(flights)) * around)
    longest = np.maximum(ends[..., 0], (way + busy).max(axis=-1))
    return np.where(ends[..., 0] < np.inf, longest, np.inf)
