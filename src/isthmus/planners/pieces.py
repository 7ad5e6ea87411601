"""Pieces that all planners use: shares, cuts, buckets, and plans put together from them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from isthmus.cost.flat import group_of
from isthmus.cost.tables import ALONE, ModelTable
from isthmus.plan.types import How, Layout, Pipeline, Plan, Replica, Schedule, Stage, Sync
from isthmus.planners.problem import Problem

__all__ = [
    "BUCKET",
    "balanced_cut",
    "block_times",
    "build_stages",
    "even_shares",
    "fair_shares",
    "make_plan",
    "make_syncs",
    "micro_batch_counts",
    "whole_times",
]

BUCKET = 25e6  # bytes: PyTorch's own default
_MESSAGES = 1_000_000  # of all syncs together, so that pricing a plan on many devices takes no longer than a second


def even_shares(samples: int, replicas: int) -> list[int]:
    """As equal as integers allow; the first get one more."""
    return [samples // replicas + (i < samples % replicas) for i in range(replicas)]


def fair_shares(samples: int, times: Sequence[Sequence[float]]) -> list[int]:
    """Integer shares n with sum n = samples that minimise max_i times[i][n[i]], each at least 1.

    Giving each further sample to whoever would be done first with it is optimal, as times only grow with samples.
    """
    shares = [1] * len(times)
    done = [(times[i][2], i) for i in range(len(times))] if samples > len(times) else []
    heapq.heapify(done)
    for _ in range(samples - len(times)):
        _, i = done[0]
        shares[i] += 1
        ahead = times[i][shares[i] + 1] if shares[i] + 1 < len(times[i]) else float("inf")
        heapq.heapreplace(done, (ahead, i))
    return shares


def balanced_cut(weights: Sequence[Sequence[float]]) -> list[int]:
    """Cut blocks into contiguous stages, one for each row of block times, so that the slowest is as fast as can be.

    `weights[s][b]` is the time of block b on stage s. Exact: dynamic programming over (stage, blocks so far),
    best[s][b] = min over a < b of max(best[s - 1][a], time of blocks a .. b - 1 on s); as best[s - 1][a] grows with a
    and the stage's time falls, the best a is found by bisection. Returns the first block of each stage.
    """
    blocks = len(weights[0])
    best = [0.0] + [float("inf")] * blocks
    choice: list[list[int]] = []
    for s, row in enumerate(weights):
        sums = [0.0]
        for value in row:
            sums.append(sums[-1] + value)
        level, picks = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for b in range(s + 1, blocks + 1):
            low, high = s, b - 1 if s else 0  # every stage before has a block
            while low < high:  # first a at which the stage is no slower than what comes before it
                middle = (low + high) // 2
                if best[middle] >= sums[b] - sums[middle]:
                    high = middle
                else:
                    low = middle + 1
            options = [a for a in (low, low - 1) if s <= a < b]
            picks[b] = min(options, key=lambda a: (max(best[a], sums[b] - sums[a]), a))
            level[b] = max(best[picks[b]], sums[b] - sums[picks[b]])
        best = level
        choice.append(picks)
    firsts, end = [], blocks
    for picks in reversed(choice):
        end = picks[end]
        firsts.append(end)
    return firsts[::-1]


def micro_batch_counts(batch: int, least: int, most: int = 8) -> list[int]:
    """Numbers of micro-batches that divide the batch and leave at least `least` samples in each: `most`, spread out."""
    counts = [m for m in range(1, batch // least + 1) if batch % m == 0]
    if len(counts) <= most:
        return counts
    step = (len(counts) - 1) / (most - 1)
    return sorted({counts[round(i * step)] for i in range(most)})


def make_plan(
    problem: Problem,
    stages: Sequence[Stage],
    micro_batches: int,
    *,
    schedule: Schedule = "1f1b",
    how: How = "ring",
    ahead: int = 0,
) -> Plan:
    """A plan of one pipeline with its syncs."""
    pipeline = Pipeline(
        job=problem.job,
        model_digest=problem.graph.digest,
        precision=problem.precision,
        micro_batches=micro_batches,
        stages=tuple(stages),
        syncs=make_syncs(problem.table, stages, how),
        schedule=schedule,
        ahead=ahead,
    )
    return Plan(cluster=problem.cluster.name, parts=(pipeline,))


def make_syncs(table: ModelTable, stages: Sequence[Stage], how: How) -> tuple[Sync, ...]:
    """Buckets of about BUCKET bytes in every stage with several replicas, last blocks first; ties get their own."""
    graph = table.graph
    spans = [(graph.by_name[stage.first], graph.by_name[stage.last]) for stage in stages]
    syncs = []
    tied = {name for name, users in table.users.items() if len(users) > 1}
    for name in sorted(tied):
        holders = [
            replica.devices[0]
            for stage, (a, b) in zip(stages, spans, strict=True)
            if any(a <= user <= b for user in table.users[name])
            for replica in stage.replicas
        ]
        if len(set(holders)) > 1:
            syncs.append(Sync(bucket=name, how="ring", parameters=(name,), participants=tuple(dict.fromkeys(holders))))
    for s, (stage, span) in enumerate(zip(stages, spans, strict=True)):
        if len(stage.replicas) > 1:
            syncs.extend(_stage_syncs(table, stage, s, span, how, tied))
    return tuple(syncs)


def _stage_syncs(
    table: ModelTable, stage: Stage, number: int, span: tuple[int, int], how: How, tied: set[str]
) -> Iterable[Sync]:
    graph, replicas = table.graph, len(stage.replicas)
    own = [
        (block.name, sum(graph.parameter[p].elements for p in block.parameters if p not in tied))
        for block in reversed(graph.blocks[span[0] : span[1] + 1])
    ]
    total = sum(elements for _, elements in own) * table.width
    size = max(BUCKET, total * 2 * replicas**2 / _MESSAGES)
    participants = tuple(replica.devices[0] for replica in stage.replicas)
    words: list[str] = []
    held, count = 0.0, 0
    for index, (name, elements) in enumerate(own):
        if elements:
            words.append(f"[{name}]")
            held += elements * table.width
        if words and (held >= size or index == len(own) - 1):
            yield Sync(bucket=f"{number}.{count}", how=how, parameters=tuple(words), participants=participants)
            words, held, count = [], 0.0, count + 1


def block_times(problem: Problem, devices: tuple[str, ...], samples: int) -> list[float]:
    """For a device or tensor group, seconds (forward and backward) of every block on so many samples."""
    kind = problem.cluster.devices[devices[0]].kind
    sums = problem.table.seconds(kind, group_of(problem.cluster, devices), samples).sum(axis=0)
    return [float(value) for value in np.diff(sums)]


def whole_times(problem: Problem, device: str, most: int) -> list[float]:
    """Seconds of the whole model on a device for 0, 1, ... `most` samples."""
    kind = problem.cluster.devices[device].kind
    return [0.0, *(float(problem.table.seconds(kind, ALONE, n)[:, -1].sum()) for n in range(1, most + 1))]


def build_stages(
    problem: Problem,
    firsts: Sequence[int],
    replicas: Sequence[Sequence[tuple[tuple[str, ...], int]]],
    *,
    recompute: bool = False,
    state: Layout = "replicated",
) -> list[Stage]:
    """Stages that start at the given blocks, with (devices, share) replicas."""
    names = [block.name for block in problem.graph.blocks]
    ends = [*firsts[1:], len(names)]
    return [
        Stage(
            first=names[a],
            last=names[b - 1],
            replicas=tuple(Replica(devices=devices, share=share) for devices, share in members),
            recompute=recompute,
            state=state if len(members) > 1 else "replicated",
        )
        for a, b, members in zip(firsts, ends, replicas, strict=True)
    ]
