"""Rules of the syncs: a parameter that several replicas hold is synchronised on all of them, in a way that is exact."""

from __future__ import annotations

from collections import Counter

from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedSync

__all__ = ["check_syncs"]


def check_syncs(part: ResolvedPipeline, resolved: Resolved) -> None:
    """Refuse syncs unless each shared parameter is in one, among exactly its holders, by a method that suits it."""
    where = f"pipeline {part.pipeline.job.name}"
    _check_once(part, where)
    uses = Counter(name for block in part.graph.blocks for name in block.parameters)
    seen: set[tuple[str, int, int]] = set()
    for given, sync in zip(part.pipeline.syncs, part.syncs, strict=True):
        at = f"{where}, sync {given.bucket}"
        if not sync.parameters:
            raise PlanError(
                "sync-needless",
                "the sync has no parameters",
                where=at,
                found=" ".join(given.parameters) or "an empty bucket",
                expected="parameters that no other sync names",
                next="Leave the sync out",
            )
        for name in _one_of_each(sync, part):
            alike = (sync.how, id(sync.participants), id(part.holders.get(name)))
            if alike in seen:
                continue
            seen.add(alike)
            _check_participants(name, sync, part, resolved, at)
            _check_duplicate(name, sync, part, at)
            _check_sharded_ring(name, sync, part, at)
            if sync.how == "sparse":
                _check_sparse(name, part, at)
        if sync.how == "factors":
            for name in sync.parameters:
                _check_factors(name, uses[name], part, at)
    _check_missing(part, where)


def _one_of_each(sync: ResolvedSync, part: ResolvedPipeline) -> list[str]:
    """Return one parameter for each set of holders, since the others would be checked alike.

    Parameters with equal holders share one object.
    """
    return list({id(part.holders.get(name)): name for name in reversed(sync.parameters)}.values())


def _check_once(part: ResolvedPipeline, where: str) -> None:
    count = Counter(name for sync in part.syncs for name in sync.parameters)
    twice = next((name for name, times in count.items() if times > 1), None)
    if twice is not None:
        buckets = [
            given.bucket
            for given, sync in zip(part.pipeline.syncs, part.syncs, strict=True)
            for name in sync.parameters
            if name == twice
        ]
        raise PlanError(
            "sync-twice",
            "a parameter is synced twice",
            where=where,
            found=f"{twice} in {' and '.join(buckets)}",
            expected="each parameter in one sync",
            next="Name it in one sync; [block] then leaves it out",
        )


def _check_missing(part: ResolvedPipeline, where: str) -> None:
    for name in part.holders:
        if name not in part.sync_of and len(part.participants(name)) > 1:
            raise PlanError(
                "sync-missing",
                "a parameter that several replicas hold is in no sync",
                where=where,
                found=name,
                expected="it in exactly one sync",
                next=f"Add it to a sync, or [{_block_of(name, part.graph)}] for the whole block",
            )


def _block_of(name: str, graph: BlockGraph) -> str:
    return next(block.name for block in graph.blocks if name in block.parameters)


def _check_participants(name: str, sync: ResolvedSync, part: ResolvedPipeline, resolved: Resolved, where: str) -> None:
    holders = part.participants(name) if name in part.holders else ()
    if len(holders) < 2:
        raise PlanError(
            "sync-needless",
            f"{name} needs no sync",
            where=where,
            found=f"{len(holders)} holder{'' if len(holders) == 1 else 's'}",
            expected="two or more",
            next="Leave it out of the sync",
        )
    if Counter(sync.participants) != Counter(holders):
        raise PlanError(
            "sync-participants",
            f"the participants are not the replicas that hold {name}",
            where=where,
            found=_names(sync.participants, resolved),
            expected=_names(holders, resolved),
        )


def _names(devices: tuple[int, ...], resolved: Resolved) -> str:
    return " ".join(resolved.devices[device].name for device in devices) or "nobody"


def _stages(name: str, part: ResolvedPipeline) -> list[int]:
    return list(dict.fromkeys(stage for stage, _ in part.holders[name]))


def _check_duplicate(name: str, sync: ResolvedSync, part: ResolvedPipeline, where: str) -> None:
    """Refuse `duplicate` unless every participant computes every use of the parameter on all samples; then demand it.

    If only some uses are duplicated no sum is exact, because their gradient would count once for each duplicate.
    """
    stages = [part.stages[index] for index in _stages(name, part)]
    everyone = set(sync.participants)
    whole = all(
        {replica.devices[0] for replica in stage.replicas if replica.hi - replica.lo == part.micro_batch} == everyone
        for stage in stages
    )
    partly = not whole and any(stage.duplicate for stage in stages)
    if partly or whole != (sync.how == "duplicate"):
        raise PlanError(
            "duplicate-iff",
            f"{name} cannot be synced in this way",
            where=where,
            found=f"{sync.how}, and {'all' if whole else 'not all'} participants compute all samples of every use",
            expected="the stages that use it duplicated on the same devices, or none" if partly else _duplicate(whole),
        )


def _duplicate(whole: bool) -> str:
    return "duplicate: there is nothing to send" if whole else "a sync that sends: ring, tree, server, factors, sparse"


def _check_sharded_ring(name: str, sync: ResolvedSync, part: ResolvedPipeline, where: str) -> None:
    """Refuse `sharded-all` state that is not reduced and gathered around a ring of exactly its stage's replicas."""
    stages = _stages(name, part)
    if all(part.pipeline.stages[index].state != "sharded-all" for index in stages):
        return
    if sync.how != "ring" or len(stages) > 1:
        raise PlanError(
            "sharded-replicas",
            f"{name} cannot be sharded-all",
            where=where,
            found=f"sync {sync.how}" if sync.how != "ring" else f"it tied across {len(stages)} stages",
            expected="sync ring" if sync.how != "ring" else "a parameter of one stage",
            next="Use sharded-optimizer or replicated state",
        )


def _check_factors(name: str, uses: int, part: ResolvedPipeline, where: str) -> None:
    """Refuse `factors` unless the gradient is one product of inputs and output gradients, of one shape on all replicas.

    Recomputed inputs are as good as saved ones: the backward has them when the output gradient arrives.
    """
    parameter = part.graph.parameter[name]
    sizes = {len(part.replica(holder).devices) for holder in part.holders[name]}
    if parameter.linear is None:
        found = "a parameter that is not the weight of a linear layer"
    elif parameter.ties or uses > 1:
        found = "a weight used in several places, whose gradient is a sum of products"
    elif len(sizes) > 1:
        found = "tensor groups of different sizes, which hold different parts of it"
    else:
        return
    raise PlanError(
        "factors-linear",
        f"{name} cannot be synced by factors",
        where=where,
        found=found,
        expected="an untied linear weight, held alike by all replicas",
        next="Use ring for it",
    )


def _check_sparse(name: str, part: ResolvedPipeline, where: str) -> None:
    for index in _stages(name, part):
        stage = part.pipeline.stages[index]
        if stage.kept is None:
            raise PlanError(
                "sparse-mask",
                f"{name} cannot be synced sparse",
                where=where,
                found=f"no mask in stage {stage.first} .. {stage.last}",
                expected="kept in every stage that holds it",
                next="Use ring for it",
            )
