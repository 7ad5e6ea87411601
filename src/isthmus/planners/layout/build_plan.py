"""Pieces that all planners use: stages, syncs, and plans put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cost.memory import moment_bytes
from isthmus.cost.tables import ModelTable
from isthmus.plan.ring import goes_whole
from isthmus.plan.types import How, Pipeline, Plan, Replica, Schedule, Stage, Sync
from isthmus.planners.layout.layout_types import BUCKET, StageOptions
from isthmus.planners.problem import Problem

__all__ = [
    "ONE_BUCKET",
    "RingBound",
    "build_stages",
    "last_bucket",
    "least_ring",
    "least_update",
    "make_plan",
    "make_syncs",
    "more_slices",
    "only_pipeline",
    "sync_messages",
    "unit_bytes",
]

Members = Sequence[Sequence[tuple[tuple[str, ...], int]]]  # stage by stage: devices and share of each replica

_MESSAGES = 1_000_000  # of all syncs together, so that pricing a plan on many devices takes no longer than a second
ONE_BUCKET = 707  # replicas: a ring of more has more messages than that by itself


def make_plan(
    problem: Problem,
    stages: Sequence[Stage],
    micro_batches: int,
    *,
    schedule: Schedule = "1f1b",
    how: How = "ring",
    ahead: int = 0,
    bucket: float = BUCKET,
) -> Plan:
    """Return a plan of one pipeline with its syncs; where there is a mask, rings send kept values only.

    `bucket`: bytes of each sync at least. Where state is sharded whole, a bucket is also what is gathered at a time,
    and rings send all values.
    """
    gathered = any(stage.state == "sharded-all" for stage in stages)
    if problem.kept is not None and how == "ring" and not gathered:
        how = "sparse"
    pipeline = Pipeline(
        job=problem.job,
        model_digest=problem.graph.digest,
        precision=problem.precision,
        micro_batches=micro_batches,
        stages=tuple(stages),
        syncs=make_syncs(problem.table, stages, how, bucket, micro_batches if gathered else 0),
        schedule=schedule,
        ahead=ahead,
    )
    return Plan(cluster=problem.cluster.name, parts=(pipeline,), via=problem.vias)


def make_syncs(
    table: ModelTable, stages: Sequence[Stage], how: How, bucket: float = BUCKET, gathers: int = 0
) -> tuple[Sync, ...]:
    """Return buckets of so many bytes or more for every stage with several replicas, last blocks first; tied weights
    get their own.

    `gathers`: how often their weights are gathered and their gradients reduced; 0: they are reduced once.
    """
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
            ring: How = "sparse" if how == "sparse" else "ring"
            syncs.append(Sync(bucket=name, how=ring, parameters=(name,), participants=tuple(dict.fromkeys(holders))))
    for s, (stage, span) in enumerate(zip(stages, spans, strict=True)):
        if len(stage.replicas) > 1:
            syncs.extend(_stage_syncs(table, stage, s, span, how, tied, bucket, gathers))
    return tuple(syncs)


def _stage_syncs(
    table: ModelTable,
    stage: Stage,
    number: int,
    span: tuple[int, int],
    how: How,
    tied: set[str],
    bucket: float,
    gathers: int,
) -> Iterable[Sync]:
    graph, replicas = table.graph, len(stage.replicas)
    own = [
        (block.name, sum(graph.parameter[p].elements for p in block.parameters if p not in tied))
        for block in reversed(graph.blocks[span[0] : span[1] + 1])
    ]
    size = unit_bytes(sum(elements for _, elements in own) * table.width, bucket, gathers, replicas)
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


def unit_bytes(total: float, bucket: float, gathers: int, replicas: int) -> float:
    """Return the least bytes of each sync, of `total` in all: as asked,
    or more where there would be too many messages.
    """
    return max(bucket, total * _rounds(gathers) * replicas**2 / _MESSAGES)


def build_stages(problem: Problem, firsts: Sequence[int], replicas: Members, way: StageOptions) -> list[Stage]:
    """Build stages that start at the given blocks, with (devices, share) replicas; masked where the job is pruned."""
    names = [block.name for block in problem.graph.blocks]
    return [
        Stage(
            first=names[a],
            last=names[b - 1],
            replicas=tuple(Replica(devices=devices, share=share) for devices, share in members),
            recompute=way.recompute,
            state=way.state if len(members) > 1 else "replicated",
            spill="optimizer" if way.spill else "none",
            kept=problem.kept,
        )
        for (a, b), members in zip(pairwise((*firsts, len(names))), replicas, strict=True)
    ]


def _rounds(gathers: int) -> int:
    """Return how often a ring of n goes round, in n - 1 steps: 2, or 3 for each of `gathers` (reduce, gather twice)."""
    return 3 * gathers or 2


def only_pipeline(plan: Plan) -> Pipeline:
    """Return the one part of a plan, which must be a pipeline."""
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    return part


def sync_messages(plan: Plan) -> int:
    """Count the messages of all rings of a plan: a ring of n passes n - 1 parts from each of its n members to the next.

    Members of equal tensor groups have rings of their own.
    """
    messages = 0
    for part in plan.parts:
        if isinstance(part, Pipeline):
            gathered = any(stage.state == "sharded-all" for stage in part.stages)
            rounds = _rounds(part.micro_batches if gathered else 0)
            degree = {replica.devices[0]: len(replica.devices) for stage in part.stages for replica in stage.replicas}
            for sync in part.syncs:
                degrees, n = {degree[member] for member in sync.participants}, len(sync.participants)
                messages += rounds * n * (n - 1) * sync.segments * (degrees.pop() if len(degrees) == 1 else 1)
    return messages


def more_slices(problem: Problem, plan: Plan, number: int) -> Plan | None:
    """Return the plan with twice as many slices in a stage; None where they would be less than a sample, mix samples,
    or gather weights anew.
    """
    pipeline = only_pipeline(plan)
    stage, at = pipeline.stages[number], problem.graph.by_name
    blocks = problem.graph.blocks[at[stage.first] : at[stage.last] + 1]
    more = tuple(replace(r, slices=min(2 * r.slices, r.share)) for r in stage.replicas)
    if more == stage.replicas or stage.state == "sharded-all" or not problem.may_slice(blocks):
        return None
    stages = (*pipeline.stages[:number], replace(stage, replicas=more), *pipeline.stages[number + 1 :])
    return replace(plan, parts=(replace(pipeline, stages=stages),))


class RingBound(NamedTuple):
    """The least times of a ring of gradients."""

    sending: float  # seconds in which its slowest member passes on all that it has to
    travel: float  # seconds in which the last part goes around, to be summed up and to be spread


def least_ring(
    problem: Problem, members: Sequence[str], elements: float, rings: int = 1, last: float | None = None
) -> RingBound:
    """Return the least seconds of sending and of latency in a ring of n members.

    Each member passes 2 (n - 1) n-th parts of all bytes to the next; a part passes 2 (n - 1) members. Between two hosts
    they pass a link and both nics, which all `rings` of equal tensor groups share. Infinite where two hosts cannot
    talk. Nothing where collectives were measured: those may take any time. `last`: bytes of the bucket
    that comes last, at least; if it may go around whole, it passes n - 1 members only. None: state is sharded, and
    everything goes in pieces.
    """
    count = len(members)
    if count < 2 or (problem.profile is not None and problem.profile.collectives):
        return RingBound(0.0, 0.0)
    cluster, slowest, latencies = problem.network, float("inf"), list[float]()
    for a, b in pairwise((*members, members[0])):
        host, other = cluster.host_of(a), cluster.host_of(b)
        if host.name == other.name:
            slowest = min(slowest, host.bandwidth)
            latencies.append(host.latency)
        elif (link := cluster.link(host.name, other.name)) is not None:
            slowest = min(slowest, min(link.bandwidth, host.nic, other.nic_in) / rings)
            latencies.append(link.latency)
        else:
            return RingBound(float("inf"), float("inf"))
    sending = 2.0 * (count - 1) / count * elements * problem.table.width / slowest
    once = last is not None and goes_whole(count, last, sum(latencies))
    return RingBound(sending, (1.0 if once else 2.0) * (sum(latencies) - max(latencies)))


def last_bucket(problem: Problem, first: int, end: int, rings: int = 1) -> float:
    """Return the least bytes of the bucket that is final last in a stage of blocks first .. end - 1: those of its
    lowest block.
    """
    users = problem.table.users
    for block in problem.graph.blocks[first:end]:
        names = [name for name in block.parameters if len(users[name]) == 1]
        if names:
            own = sum(problem.graph.parameter[name].elements for name in names)
            return own * problem.table.width * (problem.kept or 1.0) / rings
    return 0.0


def least_update(problem: Problem, kind: str, elements: float) -> float:
    """Return the least seconds in which a device of this kind reads and writes what an update of so many elements
    takes.
    """
    moved = 12.0 + 2 * moment_bytes(problem.job.optimizer)
    rate = max(problem.table.update_bandwidth[kind], problem.cluster.kinds[kind].memory_bandwidth)
    return elements * (problem.kept or 1.0) * moved / rate
