"""Ideas of pipelines whose stages are given, and the cuts, states and sizes that schemes choose among."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from isthmus.plan.types import Plan
from isthmus.planners.layout.build_plan import build_stages, make_plan
from isthmus.planners.layout.cuts import balanced_cut, best_cut, least_time
from isthmus.planners.layout.layout_types import Stage, Staged, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.pipeline_bounds import (
    floor,
    gathers_of,
    measured,
    round_trips,
    stage_fits,
    stage_needs,
    timed_replicas,
    way_seconds,
)
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Bools, Floats, Problem
from isthmus.planners.proposal import Idea, Version
from isthmus.planners.search_constants import STAGED_IDEA_EFFORT, VERSIONS_EFFORT

__all__ = [
    "Cut",
    "even_layers",
    "micro_sizes",
    "nearest",
    "own_times",
    "staged_ideas",
    "staged_plan",
    "versions",
    "ways_of",
]

Cut = Callable[[StageOptions], Sequence[Floats]]  # what is to be even: for each stage what every block weighs on it


def staged_ideas(
    problem: Problem,
    memory: MemoryFit,
    staged: Staged,
    cuts: Sequence[Cut],
    ways: Sequence[StageOptions],
    borders: Sequence[int] = (),
    aheads: Sequence[int] = (0,),
) -> Iterator[Idea]:
    """Yield ideas whose stages are cut in one of several ways; the last way to hold state needs least memory.

    `borders`: stages after which messages are slow, so that the ideas' bounds should count them. `aheads`: there is an
    idea for each of them in place of `staged.ahead`.
    """
    devices = [device for stage in staged.stages for group, _ in stage for device in group]
    total = sum(problem.cluster.kind_of(device).memory for device in devices)
    samples = max(share for stage in staged.stages for _, share in stage)
    seconds, around = floor(problem, staged, borders)
    for ahead in aheads:
        one = staged._replace(ahead=ahead)
        yield Idea(
            seconds=max(seconds, round_trips(problem, one, around)),
            memory=total,
            samples=samples,
            versions=partial(versions, problem, memory, one, cuts, ways),
            nearest=partial(nearest, problem, memory, one, ways[-1]),
            effort=STAGED_IDEA_EFFORT,
            versions_effort=VERSIONS_EFFORT,
        )


def versions(
    problem: Problem,
    memory: MemoryFit,
    staged: Staged,
    cuts: Sequence[Cut],
    ways: Sequence[StageOptions],
    allowed: Bools | None = None,
) -> list[Version]:
    """Return each way to hold the state, with each cut that fits so.

    `allowed`: runs of blocks that a stage may have.
    """
    needs, found = list(stage_needs(problem, staged)), dict[tuple[StageOptions, tuple[int, ...]], Version]()
    for way in ways:
        fits = [stage_fits(memory, stage, way, allowed) for stage in needs]
        if not all(matrix.any() for matrix in fits):
            continue
        for cut in cuts:
            firsts = balanced_cut(cut(way), fits)
            if firsts is not None and (way, tuple(firsts)) not in found:
                each = [way] * len(firsts)
                parts = measured(problem, staged, firsts, each)
                seconds = least_time(parts, parts.ends, gathers_of(each), staged.micro_batches)
                found[way, tuple(firsts)] = Version(seconds, partial(staged_plan, problem, staged, firsts, way))
    return sorted(found.values(), key=lambda version: version.seconds)


def nearest(problem: Problem, memory: MemoryFit, staged: Staged, way: StageOptions) -> Plan | None:
    """Return the plan that comes closest to fitting where none fits."""
    firsts = best_cut(
        np.max([memory.filled(need, way) for need in stage], axis=0) for stage in stage_needs(problem, staged)
    )
    return None if firsts is None else staged_plan(problem, staged, firsts, way)


def own_times(problem: Problem, stages: Sequence[Stage]) -> Cut:
    """Return a function that weighs each block of a stage by its time on the stage's slowest replica."""

    def weights(way: StageOptions) -> list[Floats]:
        replicas = [timed_replicas(problem, stage) for stage in stages]
        rows = {replica: way_seconds(problem.block_seconds(*replica), way) for stage in replicas for replica in stage}
        return [rows[max(stage, key=lambda replica: float(rows[replica].sum()))] for stage in replicas]

    return weights


def staged_plan(problem: Problem, staged: Staged, firsts: Sequence[int], way: StageOptions) -> Plan:
    """Return the plan in which stages start at these blocks."""
    return make_plan(
        problem, build_stages(problem, firsts, staged.stages, way), staged.micro_batches, ahead=staged.ahead
    )


def ways_of(dp: int) -> list[StageOptions]:
    """Return the ways in which so many equal replicas may hold their state."""
    ways = [StageOptions(recompute=recompute) for recompute in (False, True)]
    sharded = [StageOptions(way.recompute, "sharded-optimizer") for way in ways] if dp > 1 else []
    return [*ways, *sharded]


def micro_sizes(problem: Problem, dp: int, pinned: int | None = None) -> list[int]:
    """Return the numbers of samples that a micro-batch may have on one of so many equal replicas."""
    share = problem.job.batch // dp
    if pinned is not None:
        return [pinned] if share % pinned == 0 else []
    return [share // count for count in micro_batch_counts(share, 1, most=5)]


def even_layers(problem: Problem) -> Floats:
    """Return the forward FLOPs of blocks whose work recurs, as Megatron counts layers; 0 for all other blocks.

    By FLOPs, not by digest: the last layer has the model's last norm in it and is a layer all the same.
    """
    work = [block.forward_flops for block in problem.graph.blocks]
    often = Counter(work)
    return np.array([flops if often[flops] > 1 else 0.0 for flops in work])
