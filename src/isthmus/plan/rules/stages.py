"""Rules between the stages of a plan, its models and the devices of the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import combinations

from isthmus.cluster.spec import Cluster, Precision
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedPool, ResolvedReplica
from isthmus.plan.types import Stage
from isthmus.units import format_compute

__all__ = ["check_one_job", "check_pool", "check_stages", "placed_blocks"]


def check_one_job(resolved: Resolved) -> None:
    """Refuse a device that works for two parts of the plan.

    The root of a sync works for its part, whether or not it holds a stage.
    """
    owner: dict[int, str] = {}
    for part in resolved.parts:
        if isinstance(part, ResolvedPipeline):
            name = f"pipeline {part.pipeline.job.name}"
            used = {device for stage in part.stages for replica in stage.replicas for device in replica.devices}
            used.update(sync.root for sync in part.syncs if sync.root is not None)
        else:
            name, used = "a pool", set(part.devices)
        for device in sorted(used):
            if device in owner:
                raise PlanError(
                    "device-one-job",
                    "a device belongs to two parts of the plan",
                    where=f"plan, device {resolved.devices[device].name}",
                    found=f"{owner[device]} and {name}",
                    expected="one pipeline or one pool",
                )
            owner[device] = name


def check_stages(part: ResolvedPipeline, resolved: Resolved, cluster: Cluster) -> None:
    """Refuse stages that do not cover the model, and groups, precision or placement that do not suit the devices."""
    job, graph = part.pipeline.job, part.graph
    where = f"pipeline {job.name}"
    ranges = [(stage.first, stage.last) for stage in part.stages]
    _check_cover("stages-cover-blocks", "stages", ranges, graph, where)
    for stage, run in zip(part.pipeline.stages, part.stages, strict=True):
        at = f"{where}, stage {stage.first} .. {stage.last}"
        for replica in run.replicas:
            _check_group(replica, graph, (run.first, run.last), resolved, cluster, at)
        _check_sharded(stage, run.duplicate, at)
    _check_one_group(part, resolved, where)
    used = {device for stage in part.stages for replica in stage.replicas for device in replica.devices}
    _check_precision(job, part.pipeline.precision, used, resolved, cluster, where)
    _check_place(part, resolved, cluster, where)


def check_pool(part: ResolvedPool, resolved: Resolved, cluster: Cluster) -> None:
    """Refuse a pool whose shards do not cover each model, or whose caps, hosts or devices do not suit its jobs."""
    _check_one_host(part, resolved)
    _check_caps(part, resolved, cluster)
    for job, graph, shards in zip(part.pool.jobs, part.graphs, part.shards, strict=True):
        where = f"pool, job {job.job.name}"
        _check_cover("shards-cover-blocks", "shards", shards, graph, where)
        _check_precision(job.job, job.precision, part.devices, resolved, cluster, where)
        for pattern, target, _ in placed_blocks(job.job, graph, cluster, where):
            _check_there(pattern, target, part.devices, resolved, where)


def _check_cover(rule: str, things: str, ranges: Sequence[tuple[int, int]], graph: BlockGraph, where: str) -> None:
    """Refuse ranges that do not have every block exactly once, in the model's order."""
    after = 0
    for first, last in ranges:
        if first != after or last < first:
            raise _not_covered(rule, things, graph, where, f"{_name(graph, first)} .. {_name(graph, last)}", after)
        after = last + 1
    if after != len(graph.blocks):
        raise _not_covered(rule, things, graph, where, "the end", after)


def _not_covered(rule: str, things: str, graph: BlockGraph, where: str, found: str, after: int) -> PlanError:
    expected = f"one that begins with {_name(graph, after)}" if after < len(graph.blocks) else "nothing more"
    return PlanError(
        rule,
        f"the {things} do not cover the blocks in order, each block once",
        where=where,
        found=f"{found} after {_name(graph, after - 1)}" if after else found,
        expected=expected,
    )


def _name(graph: BlockGraph, block: int) -> str:
    return graph.blocks[block].name


def _check_one_group(part: ResolvedPipeline, resolved: Resolved, where: str) -> None:
    """Refuse a device that acts in two tensor groups; only the first of a group may also be a replica by itself."""
    groups = {replica.devices for stage in part.stages for replica in stage.replicas}
    member: dict[int, tuple[int, ...]] = {}
    for group in sorted(groups, key=len, reverse=True):
        for device in group:
            other = member.setdefault(device, group)
            if other != group and not (len(group) == 1 and other[0] == device):
                raise PlanError(
                    "tensor-group",
                    f"{resolved.devices[device].name} is used in two ways",
                    where=where,
                    found=" and ".join(" + ".join(resolved.devices[d].name for d in g) for g in (other, group)),
                    expected="one tensor group for a device in all its stages; its first device may also stand alone",
                )


def _check_group(
    replica: ResolvedReplica,
    graph: BlockGraph,
    run: tuple[int, int],
    resolved: Resolved,
    cluster: Cluster,
    where: str,
) -> None:
    """Refuse a tensor group that cannot work.

    A group needs devices of one kind, direct links, something to split, and a size that divides the heads.
    """
    size = len(replica.devices)
    if size == 1:
        return
    splits = [block.tensor for block in graph.blocks[run[0] : run[1] + 1] if block.tensor is not None]
    kinds = list(dict.fromkeys(resolved.devices[device].kind for device in replica.devices))
    bad = next((split.heads for split in splits if split.heads and split.heads % size), None)
    hosts = dict.fromkeys(resolved.devices[device].host for device in replica.devices)
    apart = next((pair for pair in combinations(hosts, 2) if cluster.link(*pair) is None), None)
    if len(kinds) > 1:
        found, expected = " and ".join(kinds), "devices of one kind"
    elif apart is not None:
        found, expected = f"no link between {apart[0]} and {apart[1]}", "direct links: a group is too busy for a relay"
    elif not splits:
        found, expected = "no block of the stage that can be split", "one or more, or a replica of one device"
    elif bad is not None:
        found, expected = f"{size} devices for {bad} heads", f"a number of devices that divides {bad}"
    else:
        return
    raise PlanError(
        "tensor-group",
        f"the tensor group at {resolved.devices[replica.devices[0]].name} cannot work",
        where=where,
        found=found,
        expected=expected,
    )


def _check_sharded(stage: Stage, duplicate: bool, where: str) -> None:
    """Refuse sharded state unless there are replicas of one size to shard over, each with its own samples."""
    if stage.state == "replicated":
        return
    sizes = {len(replica.devices) for replica in stage.replicas}
    if len(stage.replicas) < 2 or duplicate or len(sizes) > 1:
        raise PlanError(
            "sharded-replicas",
            f"the state cannot be {stage.state}",
            where=where,
            found="replicas that all compute the same samples" if duplicate else f"{len(stage.replicas)} replicas",
            expected="two replicas or more of equal numbers of devices, each with its own samples",
            next="Use replicated state",
        )
    slices = sorted({replica.slices for replica in stage.replicas})
    if stage.state == "sharded-all" and len(slices) > 1:
        raise PlanError(
            "sharded-replicas",
            "the replicas of a sharded-all stage gather weights slice by slice together",
            where=where,
            found=f"replicas in {' and '.join(map(str, slices))} slices",
            expected="equal slices",
        )


def _check_precision(
    job: Job, precision: Precision, used: Iterable[int], resolved: Resolved, cluster: Cluster, where: str
) -> None:
    if job.precision is not None and job.precision != precision:
        raise PlanError(
            "precision", "the plan changes the job's precision", where=where, found=precision, expected=job.precision
        )
    for kind in dict.fromkeys(resolved.devices[device].kind for device in sorted(used)):
        if cluster.kinds[kind].computes_in(precision, job.mixed) is None:
            rates = cluster.kinds[kind].compute
            raise PlanError(
                "precision",
                f"devices of kind {kind} lack {precision} or are slower in it than in fp32",
                where=where,
                found=", ".join(f"{name} {format_compute(value)}" for name, value in rates.items()),
                expected=f"{precision}, at a rate not below that of fp32",
                next="Leave these devices out, or let them compute in fp32: mixed: true in the job",
            )


def _check_place(part: ResolvedPipeline, resolved: Resolved, cluster: Cluster, where: str) -> None:
    """Refuse a replica that holds a placed block or parameter and has a device elsewhere."""
    for pattern, target, blocks in placed_blocks(part.pipeline.job, part.graph, cluster, where):
        stages = {part.stage_of[block] for block in blocks}
        devices = (
            device for stage in sorted(stages) for replica in part.stages[stage].replicas for device in replica.devices
        )
        _check_there(pattern, target, devices, resolved, where)


def placed_blocks(job: Job, graph: BlockGraph, cluster: Cluster, where: str) -> list[tuple[str, str, list[int]]]:
    """Return each place that the job gives: its pattern, the region or host, and the blocks that must stay there.

    These are the blocks that the pattern names, and every block that uses a parameter that the pattern names.
    """
    found = []
    for pattern, target in job.place.items():
        _check_target(pattern, target, cluster, where)
        named = {
            parameter.name
            for parameter in graph.parameters
            if any(fnmatchcase(name, pattern) for name in (parameter.name, *parameter.ties))
        }
        blocks = [
            index
            for index, block in enumerate(graph.blocks)
            if fnmatchcase(block.name, pattern) or not named.isdisjoint(block.parameters)
        ]
        if not blocks and not named:
            raise _no_match(pattern, graph, where)
        found.append((pattern, target, blocks))
    return found


def _check_target(pattern: str, target: str, cluster: Cluster, where: str) -> None:
    if target not in cluster.hosts and target not in cluster.regions:
        raise PlanError(
            "place",
            f"{pattern!r} is placed in a region or on a host that the cluster lacks",
            where=where,
            found=target,
            expected=f"a host or a region: {', '.join(cluster.regions)}",
        )


def _no_match(pattern: str, graph: BlockGraph, where: str) -> PlanError:
    return PlanError(
        "place",
        "a place matches nothing in the model",
        where=where,
        found=f"no block or parameter of {graph.name} like {pattern!r}",
        expected="a pattern that matches a block or a parameter",
        next="See the names: isthmus model show MODEL",
    )


def _check_there(pattern: str, target: str, devices: Iterable[int], resolved: Resolved, where: str) -> None:
    for device in devices:
        if target not in (resolved.devices[device].host, resolved.regions[device]):
            raise PlanError(
                "place",
                f"{pattern!r} must stay in {target}",
                where=where,
                found=f"it on {resolved.devices[device].name} in {resolved.regions[device]}",
                expected=f"only devices of {target}",
            )


def _check_one_host(part: ResolvedPool, resolved: Resolved) -> None:
    """Refuse a pool on several hosts, because shards move between its devices through the memory of their host."""
    hosts = list(dict.fromkeys(resolved.devices[device].host for device in part.devices))
    if len(hosts) > 1:
        raise PlanError(
            "pool-one-host",
            "the devices of a pool are on several hosts",
            where="pool",
            found=", ".join(hosts),
            expected="devices of one host: shards move through its memory",
            next="Make one pool for each host",
        )


def _check_caps(part: ResolvedPool, resolved: Resolved, cluster: Cluster) -> None:
    caps = part.pool.caps
    if len(caps) != len(part.devices):
        raise PlanError(
            "pool-caps",
            "the caps do not fit the devices",
            where="pool",
            found=f"{len(caps)} caps for {len(part.devices)} devices",
            expected="one for each device",
        )
    for device, cap in zip(part.devices, caps, strict=True):
        memory = cluster.kinds[resolved.devices[device].kind].memory
        if not 0 < cap <= memory:
            raise PlanError(
                "pool-caps",
                f"the cap of {resolved.devices[device].name} is out of range",
                where="pool",
                found=f"{cap:.6g} bytes",
                expected=f"more than 0, at most its memory of {memory:.6g} bytes",
            )
