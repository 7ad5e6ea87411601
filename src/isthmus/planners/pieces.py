"""Pieces that all planners use: stages, syncs, and plans put together from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from isthmus.cost.tables import ModelTable
from isthmus.plan.types import How, Pipeline, Plan, Replica, Schedule, Stage, Sync
from isthmus.planners.problem import Problem
from isthmus.planners.room import BUCKET, Way

__all__ = ["ONE_BUCKET", "build_stages", "make_plan", "make_syncs", "ring_seconds", "sync_messages"]

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
) -> Plan:
    """A plan of one pipeline with its syncs; where there is a mask, rings send kept values only."""
    if problem.kept is not None and how == "ring":
        how = "sparse"
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
            ring: How = "sparse" if how == "sparse" else "ring"
            syncs.append(Sync(bucket=name, how=ring, parameters=(name,), participants=tuple(dict.fromkeys(holders))))
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


def build_stages(problem: Problem, firsts: Sequence[int], replicas: Members, way: Way) -> list[Stage]:
    """Stages that start at the given blocks, with (devices, share) replicas; masked where the job is pruned."""
    names = [block.name for block in problem.graph.blocks]
    return [
        Stage(
            first=names[a],
            last=names[b - 1],
            replicas=tuple(Replica(devices=devices, share=share) for devices, share in members),
            recompute=way.recompute,
            state=way.state if len(members) > 1 else "replicated",
            kept=problem.kept,
        )
        for (a, b), members in zip(pairwise((*firsts, len(names))), replicas, strict=True)
    ]


def sync_messages(plan: Plan) -> int:
    """Messages of all rings of a plan: a ring of n passes 2 (n - 1) parts from each of its n members to the next."""
    syncs = [sync for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs]
    return sum(2 * len(sync.participants) * (len(sync.participants) - 1) * sync.segments for sync in syncs)


def ring_seconds(problem: Problem, members: Sequence[str], elements: float) -> float:
    """What a ring of gradients needs at least: each member passes 2 (n - 1) n-th parts of all bytes to the next.

    Between two hosts they pass a link and both nics; a pair of hosts that cannot talk gives infinity.
    """
    count = len(members)
    if count < 2:
        return 0.0
    cluster, slowest = problem.cluster, float("inf")
    for a, b in pairwise((*members, members[0])):
        host, other = cluster.host_of(a), cluster.host_of(b)
        if host.name == other.name:
            slowest = min(slowest, host.bandwidth)
        elif (link := cluster.link(host.name, other.name)) is not None:
            slowest = min(slowest, link.bandwidth, host.nic, other.nic)
        else:
            return float("inf")
    return 2.0 * (count - 1) / count * elements * problem.table.width / slowest
