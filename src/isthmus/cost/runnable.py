"""Plans that can be priced and not run: the runtime refuses them by name, and planners never return them.

These are pools; relays without devices; tensor groups over several hosts; servers for tensor groups; state sharded over
groups of different sizes; and a batch that is split where samples may be mixed. Batch norm is synchronised over
replicas, if these go through their micro-batches in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.cost.simulate import Prepared, Simulator
from isthmus.errors import PlanError
from isthmus.model.graph import NORMS, Block
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedStage, ResolvedSync

__all__ = ["check_mixing", "check_runnable"]


def check_runnable(resolved: Resolved, simulator: Simulator) -> None:
    """Raise PlanError for what the runtime cannot do yet."""
    for via in resolved.plan.via:
        if bare := [host for host in via.hosts if not simulator.cluster.hosts[host].devices]:
            raise PlanError(
                "run",
                "a relay without devices can be priced but not run, because no worker is there to pass messages on",
                where=f"via {via.between[0]} - {via.between[1]}",
                found=bare[0],
                expected="a host with a device",
            )
    if any(resolved.pools):
        raise PlanError("run", "a pool cannot be run yet", where="plan", found="a pool", expected="pipelines")
    for part in resolved.pipelines:
        _check_groups(resolved, part)
        _check_group_syncs(resolved, part)
        check_mixing(part)
        _check_side_by_side(resolved, part, simulator)


def _check_groups(resolved: Resolved, part: ResolvedPipeline) -> None:
    for stage, told in zip(part.stages, part.pipeline.stages, strict=True):
        for replica in stage.replicas:
            hosts = dict.fromkeys(resolved.devices[device].host for device in replica.devices)
            if len(hosts) > 1:
                raise PlanError(
                    "run",
                    "a tensor group that spans hosts can be priced but not run",
                    where=f"pipeline {part.pipeline.job.name}, stage {told.first} .. {told.last}",
                    found=", ".join(hosts),
                    expected="the devices of a group on one host",
                    next="Ask for smaller groups: --fix tp=N with N devices of one host",
                )


def _check_group_syncs(resolved: Resolved, part: ResolvedPipeline) -> None:
    group_of = {replica.devices[0]: replica.devices for stage in part.stages for replica in stage.replicas}
    if all(len(group) == 1 for group in group_of.values()):
        return
    for sync, told in zip(part.syncs, part.pipeline.syncs, strict=True):
        groups = [group_of[lead] for lead in sync.participants]
        where = f"pipeline {part.pipeline.job.name}, sync {told.bucket}"
        if len({len(group) for group in groups}) > 1 and _sharded(part, sync):
            raise PlanError(
                "run",
                "state that is sharded over tensor groups of different sizes cannot be run",
                where=where,
                found=" and ".join(" + ".join(resolved.devices[d].name for d in group) for group in groups),
                expected="groups of one size, or replicated state",
            )
        if sync.root is not None and any(len(group) > 1 for group in groups):
            raise PlanError(
                "run",
                "a server for tensor groups can be priced but not run",
                where=where,
                found=f"root {resolved.devices[sync.root].name}",
                expected="ring or tree among tensor groups",
            )


def _sharded(part: ResolvedPipeline, sync: ResolvedSync) -> bool:
    stages = {stage for name in sync.parameters for stage, _ in part.holders[name]}
    return any(part.pipeline.stages[stage].state != "replicated" for stage in stages)


def check_mixing(part: ResolvedPipeline) -> None:
    """Refuse a plan that splits the batch where samples may be mixed.

    Batch norm is allowed, because it is synchronised over replicas. Any other operation that is not proven to keep
    samples apart needs the whole batch at once, unless the job says that its samples are independent.
    """
    trusted = part.pipeline.job.trust_independent_samples
    for stage in part.stages:
        sliced = any(replica.slices > 1 for replica in stage.replicas)
        how = "slices" if sliced else "replicas" if len(stage.replicas) > 1 and not stage.duplicate else None
        how = how or ("micro-batches" if part.pipeline.micro_batches > 1 else None)
        for block in part.graph.blocks[stage.first : stage.last + 1]:
            if sliced and block.statistics:
                raise _sliced_norm(part, stage, block)
            if how is not None and block.unproven and not trusted:
                raise _unproven(part, stage, block, how)


def _where(part: ResolvedPipeline, stage: ResolvedStage) -> str:
    first, last = (part.graph.blocks[number].name for number in (stage.first, stage.last))
    return f"pipeline {part.pipeline.job.name}, stage {first} .. {last}"


def _sliced_norm(part: ResolvedPipeline, stage: ResolvedStage, block: Block) -> PlanError:
    return PlanError(
        "mixes-samples",
        f"block {block.name} takes statistics over its samples, and the plan splits its micro-batch into slices",
        where=_where(part, stage),
        found=", ".join(operation for operation in block.mixes_samples if operation in NORMS),
        expected="one slice",
        next="Give the stage one slice for each replica",
    )


def _unproven(part: ResolvedPipeline, stage: ResolvedStage, block: Block, how: str) -> PlanError:
    return PlanError(
        "mixes-samples",
        f"block {block.name} may mix samples, and the plan splits the batch into {how}",
        where=_where(part, stage),
        found="; ".join(block.unproven[:3]),
        expected="operations that are proven to keep samples apart, or the whole batch on one replica at once",
        next="Let one replica take the whole batch; or, if you know that each sample's result does not depend on the "
        "others, say --trust-independent-samples",
    )


def _check_side_by_side(resolved: Resolved, part: ResolvedPipeline, simulator: Simulator) -> None:
    """Refuse replicas that add up batch statistics and go through their micro-batches in different orders."""
    if not any(block.statistics for block in part.graph.blocks):
        return
    walks = dict(_walks(resolved, part, simulator))
    for s, (stage, told) in enumerate(zip(part.stages, part.pipeline.stages, strict=True)):
        mixes = any(block.statistics for block in part.graph.blocks[stage.first : stage.last + 1])
        if mixes and not stage.duplicate and len({walks[s, r] for r in range(len(stage.replicas))}) > 1:
            raise PlanError(
                "run",
                "replicas that share batch statistics would wait for each other",
                where=f"pipeline {part.pipeline.job.name}, stage {told.first} .. {told.last}",
                found="pipelines of different depth side by side, which take their micro-batches in different orders",
                expected="one order for all replicas of the stage",
                next="Use schedule fill-drain, or one micro-batch",
            )


def _walks(
    resolved: Resolved, part: ResolvedPipeline, simulator: Simulator
) -> Iterator[tuple[tuple[int, int], tuple[tuple[int, bool], ...]]]:
    """Yield every (stage, replica) with the micro-batches in its order, forward and backward."""
    prepared = simulator.prepare(part.pipeline, simulator.fabric(resolved.plan))
    assert isinstance(prepared, Prepared)
    orders = prepared.orders
    by_run: dict[int, list[tuple[int, bool]]] = {}
    for run, m, back in zip(orders.run, orders.micro_batch, orders.backward, strict=True):
        by_run.setdefault(int(run), []).append((int(m), bool(back)))
    replicas = [(s, r) for s, stage in enumerate(part.stages) for r in range(len(stage.replicas))]
    for key, run in zip(replicas, prepared.runs.of, strict=False):
        yield key, tuple(by_run[int(run)])
