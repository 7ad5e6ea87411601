"""A plan in numbers: block ranges, device numbers, sample intervals, and the replicas that hold each parameter.

Samples of a micro-batch are numbered from 0. Replica r of a stage takes [lo, hi), where lo is the sum of the shares
before it. In a *duplicate* stage (at least two replicas, each with the whole micro-batch as its share) every replica
takes all samples. The only check here is that names are known; `plan.validate` does the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate

import msgspec

from isthmus.cluster.spec import Cluster, Device
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import How, Pipeline, Plan, Pool, PoolJob, Shard, Stage, Sync

__all__ = [
    "Flow",
    "Resolved",
    "ResolvedPipeline",
    "ResolvedPool",
    "ResolvedReplica",
    "ResolvedStage",
    "ResolvedSync",
    "is_duplicate",
    "resolve",
    "suppliers",
]

Flow = tuple[int, int, int]  # replica of the sending stage, first sample, one past the last sample


class _Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the resolved types: immutable, named fields."""


class ResolvedReplica(_Frozen, frozen=True, kw_only=True):
    """One copy of a stage: its devices by number and its samples [lo, hi) of every micro-batch."""

    number: int  # position in its stage
    devices: tuple[int, ...]
    lo: int
    hi: int
    slices: int


class ResolvedStage(_Frozen, frozen=True, kw_only=True):
    """The blocks `first` to `last` inclusive; in a `duplicate` stage every replica computes all samples."""

    first: int
    last: int
    replicas: tuple[ResolvedReplica, ...]
    duplicate: bool


class ResolvedSync(_Frozen, frozen=True, kw_only=True):
    """A bucket with `[block]` expanded; participants (the first device of each replica) and root are numbers.

    Syncs of one pipeline that list the same participants share one tuple.
    """

    how: How
    parameters: tuple[str, ...]
    participants: tuple[int, ...]
    root: int | None
    segments: int


class ResolvedPipeline(_Frozen, frozen=True, kw_only=True):
    """One job as stages.

    `holders` gives, for each parameter, every (stage, replica) that uses it, ties included; `sync_of` gives its sync.
    """

    pipeline: Pipeline
    graph: BlockGraph
    micro_batch: int  # samples
    stages: tuple[ResolvedStage, ...]
    stage_of: tuple[int, ...]  # of each block; -1 if no stage has it
    syncs: tuple[ResolvedSync, ...]
    sync_of: Mapping[str, int]
    holders: Mapping[str, tuple[tuple[int, int], ...]]

    def replica(self, holder: tuple[int, int]) -> ResolvedReplica:
        """Return the replica that a (stage, replica) pair means."""
        return self.stages[holder[0]].replicas[holder[1]]

    def participants(self, parameter: str) -> tuple[int, ...]:
        """Return the devices that must sync a parameter.

        These are the first devices of the replicas that hold it, each once, in plan order.
        """
        return tuple(dict.fromkeys(self.replica(holder).devices[0] for holder in self.holders[parameter]))


class ResolvedPool(_Frozen, frozen=True, kw_only=True):
    """Jobs of a pool: block ranges (first, last) of the shards of each job, and the devices by number."""

    pool: Pool
    graphs: tuple[BlockGraph, ...]
    shards: tuple[tuple[tuple[int, int], ...], ...]
    devices: tuple[int, ...]


class Resolved(_Frozen, frozen=True, kw_only=True):
    """A whole plan in numbers; `devices` are all of the cluster's, in order, and `regions` has the region of each."""

    plan: Plan
    devices: tuple[Device, ...]
    regions: tuple[str, ...]
    parts: tuple[ResolvedPipeline | ResolvedPool, ...]

    @property
    def pipelines(self) -> Iterator[ResolvedPipeline]:
        """Return the parts that are pipelines."""
        return (part for part in self.parts if isinstance(part, ResolvedPipeline))

    @property
    def pools(self) -> Iterator[ResolvedPool]:
        """Return the parts that are pools."""
        return (part for part in self.parts if isinstance(part, ResolvedPool))


def resolve(plan: Plan, cluster: Cluster, models: Mapping[str, BlockGraph]) -> Resolved:
    """Return the plan in numbers; `models` has the block graph of each job by the job's name."""
    devices = tuple(cluster.devices.values())
    number = {name: index for index, name in enumerate(cluster.devices)}
    return Resolved(
        plan=plan,
        devices=devices,
        regions=tuple(cluster.hosts[device.host].region for device in devices),
        parts=tuple(
            _pipeline(part, number, _model(models, part))
            if isinstance(part, Pipeline)
            else _pool(part, number, tuple(_model(models, job) for job in part.jobs))
            for part in plan.parts
        ),
    )


def is_duplicate(stage: Stage, micro_batch: int) -> bool:
    """Return whether every replica computes all samples: two replicas or more, each with the whole micro-batch."""
    return len(stage.replicas) > 1 and all(replica.share == micro_batch for replica in stage.replicas)


def suppliers(resolved: Resolved, sender: ResolvedStage, receiver: ResolvedReplica) -> tuple[Flow, ...]:
    """Return the replicas of `sender` from which the receiver gets its samples, each sample from exactly one replica.

    Activations flow in this way from a stage to a later one, and gradients from the later one back. In a duplicate
    sender every replica has all samples, so the receiver takes all from the nearest one (same device, then host, then
    region), and receivers that have several equally near replicas take turns.
    """
    if sender.duplicate:
        distances = [_distance(resolved, replica, receiver) for replica in sender.replicas]
        nearest = [index for index, distance in enumerate(distances) if distance == min(distances)]
        return ((nearest[receiver.number % len(nearest)], receiver.lo, receiver.hi),)
    flows = []
    start = bisect_right(sender.replicas, receiver.lo, key=lambda replica: replica.hi)
    for index in range(start, len(sender.replicas)):
        lo, hi = max(sender.replicas[index].lo, receiver.lo), min(sender.replicas[index].hi, receiver.hi)
        if lo >= hi:
            break
        flows.append((index, lo, hi))
    return tuple(flows)


def _distance(resolved: Resolved, a: ResolvedReplica, b: ResolvedReplica) -> int:
    """Return the distance of two replicas by their first devices.

    It is 0 on one device, 1 on one host, 2 in one region, and 3 otherwise.
    """
    one, other = a.devices[0], b.devices[0]
    if one == other:
        return 0
    if resolved.devices[one].host == resolved.devices[other].host:
        return 1
    return 2 if resolved.regions[one] == resolved.regions[other] else 3


def _model(models: Mapping[str, BlockGraph], part: Pipeline | PoolJob) -> BlockGraph:
    graph = models.get(part.job.name)
    if graph is None:
        raise PlanError(
            "known-model",
            f"the model {part.job.model} of job {part.job.name} was not given",
            where="plan",
            found=", ".join(models) or "no models",
            expected=f"a model for {part.job.name}",
        )
    return graph


def _pipeline(pipeline: Pipeline, number: Mapping[str, int], graph: BlockGraph) -> ResolvedPipeline:
    where = f"pipeline {pipeline.job.name}"
    micro_batch = pipeline.job.batch // pipeline.micro_batches
    stages = tuple(_stage(stage, micro_batch, number, graph, where) for stage in pipeline.stages)
    holders = _holders(stages, graph)
    syncs = _syncs(pipeline.syncs, number, graph, where)
    return ResolvedPipeline(
        pipeline=pipeline,
        graph=graph,
        micro_batch=micro_batch,
        stages=stages,
        stage_of=_stage_of(stages, len(graph.blocks)),
        syncs=syncs,
        sync_of={name: index for index, sync in enumerate(syncs) for name in sync.parameters},
        holders=holders,
    )


def _pool(pool: Pool, number: Mapping[str, int], graphs: tuple[BlockGraph, ...]) -> ResolvedPool:
    return ResolvedPool(
        pool=pool,
        graphs=graphs,
        shards=tuple(
            tuple(_range(shard, graph, f"pool, job {job.job.name}") for shard in job.shards)
            for job, graph in zip(pool.jobs, graphs, strict=True)
        ),
        devices=tuple(_device(name, number, "pool") for name in pool.devices),
    )


def _stage(stage: Stage, micro_batch: int, number: Mapping[str, int], graph: BlockGraph, where: str) -> ResolvedStage:
    where = f"{where}, stage {stage.first} .. {stage.last}"
    first, last = _range(stage, graph, where)
    duplicate = is_duplicate(stage, micro_batch)
    ends = [micro_batch] * len(stage.replicas) if duplicate else list(accumulate(r.share for r in stage.replicas))
    replicas = tuple(
        ResolvedReplica(
            number=index,
            devices=tuple(_device(name, number, where) for name in replica.devices),
            lo=end - replica.share,
            hi=end,
            slices=replica.slices,
        )
        for index, (replica, end) in enumerate(zip(stage.replicas, ends, strict=True))
    )
    return ResolvedStage(first=first, last=last, replicas=replicas, duplicate=duplicate)


def _stage_of(stages: tuple[ResolvedStage, ...], blocks: int) -> tuple[int, ...]:
    owner = [-1] * blocks
    for index, stage in enumerate(stages):
        for block in range(stage.first, stage.last + 1):
            owner[block] = index
    return tuple(owner)


def _holders(stages: tuple[ResolvedStage, ...], graph: BlockGraph) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return, for each parameter that a stage uses, every (stage, replica) that uses it."""
    used: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(stages):
        for block in graph.blocks[stage.first : stage.last + 1]:
            for name in block.parameters:
                seen = used.get(name, ())
                if index not in seen:
                    used[name] = (*seen, index)
    pairs = {
        group: tuple((stage, replica) for stage in group for replica in range(len(stages[stage].replicas)))
        for group in set(used.values())
    }
    return {name: pairs[group] for name, group in used.items()}


def _syncs(
    syncs: tuple[Sync, ...], number: Mapping[str, int], graph: BlockGraph, where: str
) -> tuple[ResolvedSync, ...]:
    named = {name for sync in syncs for name in sync.parameters}
    known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def numbers(sync: Sync) -> tuple[int, ...]:
        """Return a sync's participants by number; equal lists become one object, because they are long and few."""
        if sync.participants not in known:
            at = f"{where}, sync {sync.bucket}"
            known[sync.participants] = tuple(_device(name, number, at) for name in sync.participants)
        return known[sync.participants]

    return tuple(
        ResolvedSync(
            how=sync.how,
            parameters=_expand(sync, named, graph, f"{where}, sync {sync.bucket}"),
            participants=numbers(sync),
            root=None if sync.root is None else _device(sync.root, number, f"{where}, sync {sync.bucket}, root"),
            segments=sync.segments,
        )
        for sync in syncs
    )


def _expand(sync: Sync, named: set[str], graph: BlockGraph, where: str) -> tuple[str, ...]:
    """Return the parameters of a sync; `[block]` is every parameter of the block that no sync names."""
    names: list[str] = []
    for word in sync.parameters:
        if word.startswith("[") and word.endswith("]"):
            block = graph.blocks[_block(word[1:-1], graph, where)]
            names.extend(name for name in block.parameters if name not in named and name not in names)
        elif word in graph.parameter:
            names.append(word)
        else:
            raise _unknown_parameter(word, graph, where)
    return tuple(names)


def _unknown_parameter(word: str, graph: BlockGraph, where: str) -> PlanError:
    first = next((parameter.name for parameter in graph.parameters if word in parameter.ties), None)
    return PlanError(
        "known-parameter",
        "a sync names a parameter that the model does not have under that name",
        where=where,
        found=word,
        expected=f"its first name, {first}" if first else f"a parameter of {graph.name}, or [block]",
        next="See the names: isthmus model show MODEL",
    )


def _range(run: Stage | Shard, graph: BlockGraph, where: str) -> tuple[int, int]:
    return _block(run.first, graph, where), _block(run.last, graph, where)


def _block(name: str, graph: BlockGraph, where: str) -> int:
    index = graph.by_name.get(name)
    if index is None:
        raise PlanError(
            "known-block",
            "the model has no such block",
            where=where,
            found=name,
            expected=f"a block of {graph.name}",
            next="See the names: isthmus model show MODEL",
        )
    return index


def _device(name: str, number: Mapping[str, int], where: str) -> int:
    index = number.get(name)
    if index is None:
        raise PlanError(
            "known-device",
            "the cluster has no such device",
            where=where,
            found=name,
            expected="host/kind/index of the cluster",
            next="See the names: isthmus cluster show FILE",
        )
    return index
