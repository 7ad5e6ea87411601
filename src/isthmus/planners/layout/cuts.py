"""Cuts of blocks into stages, and the seconds of pipelines that are cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.planners.problem import Bools, Floats, Problem

__all__ = [
    "Parts",
    "balanced_cut",
    "best_cut",
    "crossing_bytes",
    "even_limits",
    "least_time",
    "pipeline_seconds",
    "pipeline_times",
    "pipelines_seconds",
    "span_sums",
    "stage_sums",
]

Ints = npt.NDArray[np.int64]
_HIDDEN = 0.8  # part of a stage's last backward in which its gradients are being sent, about


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
    """Return the cut whose slowest stage is as fast as can be: `weights[s][b]` is the time of block b on stage s.

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
    """Find `best_cut` for the seconds before each block on each stage, [stages, blocks + 1]; empty where none is
    possible.

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
    """Return the weight of the heaviest stage in the most even cut into 1, 2, ... stages, up to one a block."""
    sums, blocks = span_sums(row), len(row)
    best, limits = np.append(0.0, np.full(blocks, np.inf)), []
    cost = np.where(np.arange(blocks)[:, None] < np.arange(blocks + 1), sums, np.inf)
    for _ in range(blocks):
        best = np.maximum(best[:-1, None], cost).min(axis=0)
        limits.append(best[-1])
    return np.array(limits)


def span_sums(row: Floats) -> Floats:
    """Return a matrix whose entry [a, b] is the sum over blocks a .. b - 1."""
    sums = np.concatenate(([0.0], np.cumsum(row)))
    return np.asarray(sums[None, :] - sums[:-1, None])


def stage_sums(row: Floats, firsts: Sequence[int]) -> Floats:
    """Return the sum over the blocks of each stage."""
    return np.asarray(np.add.reduceat(row, firsts))


class Parts(NamedTuple):
    """A cut pipeline: seconds and bytes of each stage, and of what passes between it and the next."""

    most: Floats  # of the slowest replica, both ways
    least: Floats  # of the quickest replica, both ways
    start: Floats  # of the quickest replica's forward
    back: Floats  # of the slowest replica's backward
    there: Floats  # bytes a sample to the next stage
    home: Floats  # and back
    crossings: Floats  # [stages - 1, 3]: latency, seconds of the shortest message, of all, for one byte a sample
    flights: Ints  # micro-batches that may be in flight
    ends: Floats  # [stages, 3]: seconds of the ring of gradients, its sending and its travel, and of the update


@compiled
def pipeline_times(parts: Parts, bare: Floats, gathers: Bools, micro_batches: int) -> tuple[float, float]:
    """Return a lower bound of a pipeline's seconds (see `pipeline_bounds`), and an estimate that is near but no bound.

    `bare`: `ends` as far as the bound knows them; `gathers`: stages whose weights are gathered after their update.

    One micro-batch goes around in A seconds; the others follow one by one, each P seconds behind the one before: P is
    what the busiest stage or link needs for one, or a round trip from some stage on over those it lets in:

        A + (m - 1) P, at the end of which stages wait for their gradients' sync, the last ones first
    """
    least = least_time(parts, bare, gathers, micro_batches)
    stages, m = len(parts.most), micro_batches
    around = np.zeros(stages + 1)  # from each stage on
    period = 0.0
    for s in range(stages - 1, -1, -1):
        passed = 0.0
        if s < stages - 1:
            latency, total = parts.crossings[s, 0], parts.crossings[s, 2]
            passed = parts.there[s] * total + parts.home[s] * total + 2 * latency
            period = max(period, parts.there[s] * total, parts.home[s] * total)
        around[s] = around[s + 1] + (parts.most[s] + passed)
        period = max(period, parts.most[s], around[s] / min(parts.flights[s], m))
    if not around[0] < np.inf:
        return least, np.inf
    end = around[0] + (m - 1) * period
    longest, before = end, 0.0  # the way home from each stage
    for s in range(stages):
        sending, travel, update = parts.ends[s, 0], parts.ends[s, 1], parts.ends[s, 2]
        sync = max(0.0, sending + travel - _HIDDEN * parts.back[s])
        longest = max(longest, end - before + sync + update)
        if s < stages - 1:
            before += parts.back[s] + (parts.home[s] * parts.crossings[s, 2] + parts.crossings[s, 0])
    return least, longest


@compiled
def least_time(parts: Parts, ends: Floats, gathers: Bools, micro_batches: int) -> float:
    """Return a lower bound of the seconds that a pipeline takes."""
    m, stages, seconds, serial = micro_batches, len(parts.most), 0.0, True
    for s in range(stages):
        least, sending, travel, update = parts.least[s], ends[s, 0], ends[s, 1], ends[s, 2]
        gather = sending / 2 if gathers[s] else 0.0
        last = max(m * least + max(travel, gather), (m - 1) * least + parts.start[s] + sending)
        seconds = max(seconds, m * parts.most[s], last + update)
    hops = np.zeros(stages - 1)
    for s in range(stages - 1):
        there, home = parts.there[s], parts.home[s]
        seconds = max(seconds, m * parts.crossings[s, 2] * max(there, home))
        hops[s] = 2 * parts.crossings[s, 0] + parts.crossings[s, 1] * (there + home)
        serial = serial and there != 0.0 and home != 0.0
    if serial:  # else some stages do not wait for each other
        seconds = max(seconds, pipeline_seconds(parts.most, parts.least, hops, parts.flights, m))
    return seconds


@compiled
def pipeline_seconds(most: Floats, least: Floats, hops: Floats, flights: Ints, micro_batches: int) -> float:
    """Return the least seconds of computing and of messages to the next stage and back, by 1f1b (`pipeline_bounds`).

    `most` and `least` are the seconds of each stage's slowest and quickest replica for a micro-batch, both ways; `hops`
    those of messages to the next stage and back.
    """
    stages = len(most)
    way = np.zeros(stages + 1)  # to each stage and back; then to the end
    for s in range(stages):
        way[s + 1] = way[s] + (least[s] + (hops[s] if s < stages - 1 else 0.0))
    longest = float(way[stages])
    if not longest < np.inf:  # stages that cannot talk
        return np.inf
    for s in range(stages):
        around = most[s] - least[s] + way[stages] - way[s]
        longest = max(longest, way[s] + max(micro_batches * most[s], -(-micro_batches // flights[s]) * around))
    return longest


@compiled
def pipelines_seconds(most: Floats, least: Floats, hops: Floats, flights: Ints, micro_batches: int) -> Floats:
    """Return `pipeline_seconds` of many cuts, whose stages are given as [cuts, stages]."""
    return np.array([pipeline_seconds(most[i], least[i], hops[i], flights, micro_batches) for i in range(len(most))])


def crossing_bytes(problem: Problem) -> Floats:
    """Return the bytes a sample that cross the border before each block forwards; no more come back."""
    table = problem.table.tensors
    there = np.zeros(len(problem.graph.blocks) + 1)
    for i, source in enumerate(table.source):
        last = int(table.target[table.first[i] : table.first[i + 1]].max(initial=source))
        there[source + 1 : last + 1] += table.per_sample[i]
    return there
