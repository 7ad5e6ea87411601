"""Blocks that all replicas of a stage compute on all samples, so that their gradients are not sent: `duplicate`.

Of a stage of n replicas, blocks at one of its ends may become a stage of their own, with the same replicas, each of
which takes every sample. A step then

    saves   the sync of these blocks' gradients
    adds    what crosses the new border, of all samples to all replicas, instead of each one's own to itself
            n - 1 times the computing of these blocks

So it pays where weights are many, activations few and computing little: an embedding whose table has more bytes than
its outputs, or the last layers of a convolutional network. Only such ends are proposed, and not of tensor groups: what
is cut off may have nothing that a group can split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from msgspec.structs import replace

from isthmus.plan.resolve import is_duplicate, resolve
from isthmus.plan.types import Plan, Stage, Sync
from isthmus.planners.layout.build_plan import only_pipeline
from isthmus.planners.problem import Problem

__all__ = ["could_duplicate", "duplicated", "with_duplicates"]

_MOST_BLOCKS = 3  # at one end of a stage


def with_duplicates(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """Yield the plan with one end of a stage duplicated, in every way that could pay, the most bytes saved first."""
    part, number, found = only_pipeline(plan), problem.graph.by_name, []
    samples = problem.job.batch // part.micro_batches
    for s, stage in enumerate(part.stages):
        grouped = any(len(replica.devices) > 1 for replica in stage.replicas)
        if len(stage.replicas) < 2 or grouped or stage.state == "sharded-all" or is_duplicate(stage, samples):
            continue
        ends = _ends(problem, number[stage.first], number[stage.last] + 1)
        found += [(saved, s, first, end) for saved, first, end in ends]
    for _, s, first, end in sorted(found, reverse=True):
        yield duplicated(problem, plan, s, first, end)


def could_duplicate(problem: Problem) -> bool:
    """Return whether duplicating an end of the whole model could be worth it."""
    return any(True for _ in _ends(problem, 0, len(problem.graph.blocks)))


def _ends(problem: Problem, low: int, high: int) -> Iterator[tuple[float, int, int]]:
    """Yield the bytes saved, the first block and the one after the last, of ends of blocks low .. high - 1 that could
    pay.
    """
    for blocks in range(1, min(_MOST_BLOCKS, high - low) + 1):
        for first, end in {(low, low + blocks), (high - blocks, high)}:
            if (saved := _saved(problem, first, end)) > 0.0:
                yield saved, first, end


def duplicated(problem: Problem, plan: Plan, number: int, first: int, end: int) -> Plan:
    """Return the plan with blocks first .. end - 1 of a stage on all samples in all its replicas."""
    part = only_pipeline(plan)
    stages = list(part.stages)
    stages[number : number + 1] = _cut(problem, part.stages[number], first, end)
    syncs = _split(problem, plan, frozenset(_parameters(problem, first, end)))
    return replace(plan, parts=(replace(part, stages=tuple(stages), syncs=tuple(syncs)),))


def _parameters(problem: Problem, first: int, end: int) -> list[str]:
    return list(dict.fromkeys(name for block in problem.graph.blocks[first:end] for name in block.parameters))


def _saved(problem: Problem, first: int, end: int) -> float:
    """Return the bytes of weights less those that cross the border of these blocks; 0 where other blocks use some of
    them.
    """
    names, table = _parameters(problem, first, end), problem.table.tensors
    if any(not first <= user < end for name in names for user in problem.table.users[name]):
        return 0.0
    weights = sum(problem.graph.parameter[name].elements for name in names) * problem.table.width
    crossing = 0.0
    for i, source in enumerate(table.source):
        inside = {first <= block < end for block in (source, *table.target[table.first[i] : table.first[i + 1]])}
        crossing += float(table.per_sample[i]) if len(inside) == 2 else 0.0
    return weights * (problem.kept or 1.0) - crossing * problem.job.batch


def _cut(problem: Problem, stage: Stage, first: int, end: int) -> Iterator[Stage]:
    """Yield a stage as two or three: what is before these blocks, they themselves, what is after them."""
    number, names = problem.graph.by_name, [block.name for block in problem.graph.blocks]
    low, high = number[stage.first], number[stage.last] + 1
    whole = sum(replica.share for replica in stage.replicas)
    all_samples = tuple(replace(replica, share=whole, slices=1) for replica in stage.replicas)
    for a, b in ((low, first), (first, end), (end, high)):
        if a < b:
            cut = replace(stage, first=names[a], last=names[b - 1])
            yield replace(cut, replicas=all_samples, state="replicated") if (a, b) == (first, end) else cut


def _split(problem: Problem, plan: Plan, names: frozenset[str]) -> Iterator[Sync]:
    """Yield the syncs without these parameters; those of each bucket become one that sends nothing."""
    (resolved,) = resolve(plan, problem.cluster, {problem.job.name: problem.graph}).pipelines
    taken = {sync.bucket for sync in only_pipeline(plan).syncs}
    for sync, run in zip(only_pipeline(plan).syncs, resolved.syncs, strict=True):
        alike, others = _apart(run.parameters, names)
        if others:
            yield replace(sync, parameters=others) if alike else sync
        if alike:
            free = (name for k in count() if (name := f"{sync.bucket}.all{k or ''}") not in taken)
            yield Sync(
                bucket=next(free) if others else sync.bucket,
                how="duplicate",
                parameters=alike,
                participants=sync.participants,
            )


def _apart(parameters: Sequence[str], names: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(p for p in parameters if p in names), tuple(p for p in parameters if p not in names)
