"""Random clusters, models and plans for hypothesis: `plans` keeps every rule, `any_plans` keeps none but its types."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random
from typing import Any, get_args

import msgspec
from hypothesis import strategies as st

from isthmus.cluster.spec import PRECISIONS, Cluster, DeviceKind, Host, Link
from isthmus.model.digest import digest_of
from isthmus.model.graph import Block, BlockGraph, Tensor
from isthmus.model.job import Job, Optimizer, ParameterGroup, RateSchedule
from isthmus.plan import types
from isthmus.plan.types import Pipeline, Plan, Pool, PoolJob, Replica, Shard, Stage, Sync, Via
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from tests.plan.small_models import chain

__all__ = ["any_plans", "clusters", "graphs", "models_of", "pipelines", "plans"]

Draw = Any  # hypothesis' draw: a function from a strategy to a value of it


def models_of(plan: Plan, graph: BlockGraph) -> dict[str, BlockGraph]:
    """Every job of the plan with the one model."""
    names = [
        job.name
        for part in plan.parts
        for job in ([part.job] if isinstance(part, Pipeline) else [item.job for item in part.jobs])
    ]
    return dict.fromkeys(names, graph)


@st.composite
def graphs(draw: Draw) -> BlockGraph:
    """Chains with sizes of their own in every block and tensor: nothing is equal by accident."""
    graph = chain(
        draw(st.integers(3, 7)),
        width=draw(st.sampled_from((64, 64, 64, 64, 512))),
        tied=draw(st.booleans()),
        linear=draw(st.booleans()),
        heads=draw(st.sampled_from((0, 2, 4))),
        skips=draw(st.booleans()),
    )
    random = _random(draw)
    graph = msgspec.structs.replace(
        graph,
        blocks=tuple(_uneven(block, random) for block in graph.blocks),
        tensors=tuple(_resized(tensor, random) for tensor in graph.tensors),
        buffers=random.choice((0, 12345)),
    )
    return msgspec.structs.replace(graph, digest=digest_of(graph))


def _random(draw: Draw) -> Random:
    """Sizes and speeds come from a seed: hypothesis would rather make them equal, and ties hide mistakes."""
    return Random(draw(st.integers(0, 2**16)))


def _about(random: Random, value: float, decades: float = 0.5) -> float:
    return float(f"{value * 10 ** random.uniform(-decades / 2, decades / 2):.6g}")


def _uneven(block: Block, random: Random) -> Block:
    """Up to thousands of times the arithmetic, so that computing and sending take alike."""
    factor = _about(random, 3e3, 2)
    split = block.tensor
    return msgspec.structs.replace(
        block,
        forward_flops=block.forward_flops * factor,
        backward_flops=block.backward_flops * factor * random.uniform(0.8, 1.2),
        saved=_about(random, block.saved),
        moved=_about(random, block.moved),
        workspace=random.choice((0.0, _about(random, 100.0))),
        tensor=split and msgspec.structs.replace(split, flops=split.flops * factor * random.uniform(0.5, 1.0)),
    )


def _resized(tensor: Tensor, random: Random) -> Tensor:
    if tensor.source < 0:
        return tensor
    return msgspec.structs.replace(
        tensor,
        elements=_about(random, tensor.elements),
        fixed=random.choice((0.0, 0.0, 33.0)),
        grad=len(tensor.targets) < 2 or random.random() < 0.8,
    )


def _kind(name: str, speed: float, precisions: tuple[Any, ...], random: Random) -> DeviceKind:
    return DeviceKind(
        name=name,
        compute={precision: FlopsPerSecond(_about(random, speed)) for precision in precisions},
        memory=Bytes(random.choice((speed / 1e3, 6.001e8))),
        memory_bandwidth=BytesPerSecond(_about(random, 9e11)),
        bus=BytesPerSecond(1.2e10),
        peer=BytesPerSecond(5e10),
    )


def _kinds(random: Random) -> dict[str, DeviceKind]:
    return {
        "fast": _kind("fast", 4e13, PRECISIONS, random),
        "old": _kind("old", 1.6e13, ("fp32", "fp16"), random),
        "slow": _kind("slow", 8e12, ("fp32",), random),
    }


@st.composite
def clusters(draw: Draw) -> Cluster:
    """One to three regions in a row: neighbours are linked, the two ends only sometimes."""
    regions = ["east", "mid", "west"][: draw(st.integers(1, 3))]
    random = _random(draw)
    hosts, known = {}, _kinds(random)
    for region in regions:
        for index in range(draw(st.integers(1, 2))):
            kinds = draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True))
            devices = {kind: draw(st.integers(1, 3)) for kind in kinds}
            hosts[f"{region}{index}"] = _host(f"{region}{index}", region, devices, random)
    pairs = [(region, region) for region in regions] + list(pairwise(regions))
    if len(regions) == 3 and draw(st.booleans()):
        pairs.append(("east", "west"))
    links = tuple(_link(pair, random) for pair in pairs)
    return Cluster(name="random", kinds=known, hosts=hosts, links=links)


def _host(name: str, region: str, devices: dict[str, int], random: Random) -> Host:
    return Host(
        name=name,
        region=region,
        devices=devices,
        bandwidth=BytesPerSecond(_about(random, 5e9)),
        latency=Seconds(_about(random, 5e-6)),
        nic=BytesPerSecond(_about(random, 2e8)),
        bus=BytesPerSecond(_about(random, 3e9)),
        memory=Bytes(random.choice((6.4e10, 1e6))),
        cores=8,
    )


def _link(pair: tuple[str, str], random: Random) -> Link:
    far = pair[0] != pair[1]
    bandwidth = _about(random, 1e8, 2)
    return Link(
        between=pair,
        bandwidth=BytesPerSecond(bandwidth),
        latency=Seconds(_about(random, 1e-3 if far else 1e-4)),
        trunk=BytesPerSecond(1.5 * bandwidth) if far else None,
    )


def _vias(cluster: Cluster) -> tuple[Via, ...]:
    """A relay for every pair of hosts without a link."""
    return tuple(
        Via(between=(a, b), hosts=(next(h for h in cluster.hosts if cluster.link(a, h) and cluster.link(h, b)),))
        for a, b in combinations(cluster.hosts, 2)
        if cluster.link(a, b) is None
    )


@st.composite
def plans(draw: Draw, cluster: Cluster, graph: BlockGraph, *, priced: bool = False) -> Plan:
    """A pipeline or two and, sometimes, a pool on the rest: keeps every rule of `plan.validate`.

    `priced`: for the simulator. A device that stands in a tensor group stands in no other replica but those of that
    group, and a pool may have several jobs.
    """
    devices = draw(st.permutations(list(cluster.devices)))
    count = draw(st.integers(1, len(devices)))
    middle = draw(st.integers(1, count)) if draw(st.integers(0, 3)) == 0 else count
    parts: list[Pipeline | Pool] = [draw(pipelines(cluster, graph, devices[:middle], "piped", priced))]
    if middle < count:
        parts.append(draw(pipelines(cluster, graph, devices[middle:count], "second", priced)))
    if devices[count:] and draw(st.booleans()):
        host = cluster.devices[devices[count]].host
        together = [device for device in devices[count:] if cluster.devices[device].host == host]
        parts.append(draw(_pools(cluster, graph, together, 3 if priced else 1)))
    return Plan(cluster=cluster.name, parts=tuple(parts), via=_vias(cluster))


def _job(draw: Draw, name: str, batch: int, cluster: Cluster, devices: list[str]) -> tuple[Job, Any]:
    """A job, and a precision that suits the devices."""
    precision = draw(st.sampled_from(PRECISIONS))
    mixed = any(cluster.kind_of(device).computes_in(precision, False) is None for device in devices)
    job = Job(
        name=name,
        model="small:chain",
        batch=batch,
        mixed=mixed,
        sparsity=draw(st.sampled_from((None, None, 0.5, 0.75))),
        optimizer=Optimizer(name=draw(st.sampled_from(("adamw", "sgd"))), clip=draw(st.sampled_from((None, 1.0)))),
    )
    return job, precision


@st.composite
def _pools(draw: Draw, cluster: Cluster, graph: BlockGraph, devices: list[str], most: int) -> Pool:
    return Pool(
        jobs=tuple(_pool_job(draw, cluster, graph, devices, n) for n in range(draw(st.integers(1, most)))),
        devices=tuple(devices),
        caps=tuple(cluster.kind_of(device).memory * draw(st.sampled_from((0.5, 1.0))) for device in devices),
        policy=draw(st.sampled_from(get_args(types.Policy))),
        buffered=draw(st.booleans()),
    )


def _pool_job(draw: Draw, cluster: Cluster, graph: BlockGraph, devices: list[str], number: int) -> PoolJob:
    """Jobs of a pool have different batches: which of two with equal work left goes first would be left to rounding."""
    job, precision = _job(draw, f"pooled{number}", 3 * draw(st.integers(0, 2)) + number + 1, cluster, devices)
    return PoolJob(
        job=job,
        model_digest=graph.digest,
        precision=precision,
        shards=tuple(
            Shard(first=graph.blocks[lo].name, last=graph.blocks[hi - 1].name)
            for lo, hi in _cuts(draw, len(graph.blocks))
        ),
        recompute=draw(st.booleans()),
        kept=None if job.sparsity is None else 1.0 - job.sparsity,
    )


def _cuts(draw: Draw, blocks: int, most: int = 4) -> list[tuple[int, int]]:
    inner = draw(st.permutations(range(1, blocks)))[: draw(st.integers(0, most - 1))]
    return list(pairwise([0, *sorted(inner), blocks]))


@st.composite
def pipelines(draw: Draw, cluster: Cluster, graph: BlockGraph, devices: list[str], name: str, priced: bool) -> Pipeline:
    micro_batches, size = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    job, precision = _job(draw, name, micro_batches * size, cluster, devices)
    cuts = _cuts(draw, len(graph.blocks))
    spills = ("none",) if draw(st.integers(0, 2)) else get_args(types.Spill)
    units = _groups(draw, cluster, devices)
    tied = bool(graph.parameters[0].ties) and len(cuts) > 1
    stages: list[Stage] = []
    for index, cut in enumerate(cuts):
        apart = tied and index in (0, len(cuts) - 1)
        replicas = _replicas_of(draw, graph, cut, units, size, stages, apart)
        stages.append(_stage(draw, graph, cut, replicas, size, job, spills, apart))
    return Pipeline(
        job=job,
        model_digest=draw(st.sampled_from(("", graph.digest))),
        precision=precision,
        micro_batches=micro_batches,
        stages=tuple(stages),
        syncs=tuple(_syncs(draw, graph, cuts, stages, size, devices)),
        schedule=draw(st.sampled_from(get_args(types.Schedule))),
        ahead=draw(st.integers(0, 2)),
    )


def _stage(
    draw: Draw,
    graph: BlockGraph,
    cut: tuple[int, int],
    replicas: tuple[Replica, ...],
    size: int,
    job: Job,
    spills: tuple[Any, ...],
    apart: bool,
) -> Stage:
    """`apart`: the stage holds a parameter that another stage holds too."""
    alike = len({len(replica.devices) for replica in replicas}) == 1
    duplicate = all(replica.share == size for replica in replicas)
    layouts = ["replicated"]
    if len(replicas) > 1 and alike and not duplicate and draw(st.booleans()):
        even = len({replica.slices for replica in replicas}) == 1
        layouts = ["sharded-all", "sharded-optimizer"] if even and not apart else ["sharded-optimizer"]
    return Stage(
        first=graph.blocks[cut[0]].name,
        last=graph.blocks[cut[1] - 1].name,
        replicas=replicas,
        state=draw(st.sampled_from(layouts)),
        recompute=draw(st.booleans()),
        spill=draw(st.sampled_from(spills)),
        kept=None if job.sparsity is None else 1.0 - job.sparsity,
    )


def _replicas_of(
    draw: Draw,
    graph: BlockGraph,
    cut: tuple[int, int],
    units: list[tuple[str, ...]],
    size: int,
    before: list[Stage],
    apart: bool,
) -> tuple[Replica, ...]:
    """Those of an earlier stage, so that runs merge and loops close, or new ones of `units`."""
    can = any(block.tensor is not None for block in graph.blocks[cut[0] : cut[1]])
    if before and draw(st.booleans()):
        same = draw(st.sampled_from(before[-2:])).replicas
        whole = len(same) > 1 and all(replica.share == size for replica in same)
        if (can or all(len(replica.devices) == 1 for replica in same)) and not (apart and whole):
            return same
    count = draw(st.integers(1, 4))
    groups = [unit if can else unit[:1] for unit in draw(st.permutations(units))[:count]]
    duplicate = len(groups) > 1 and not apart and draw(st.integers(0, 3)) == 0
    groups = groups if duplicate else groups[:size]
    shares = [size] * len(groups) if duplicate else _shares(draw, size, len(groups))
    even = draw(st.integers(1, min(shares))) if draw(st.booleans()) else None
    return tuple(
        Replica(devices=group, share=share, slices=even or draw(st.integers(1, share)))
        for group, share in zip(groups, shares, strict=True)
    )


def _groups(draw: Draw, cluster: Cluster, devices: list[str]) -> list[tuple[str, ...]]:
    """The devices one by one; sometimes pairs of one kind as a tensor group."""
    groups: list[tuple[str, ...]] = []
    for device in devices:
        mates = [g for g in groups if len(g) == 1 and _may_group(cluster, g[0], device)]
        if mates and draw(st.integers(0, 2)) == 0:
            groups[groups.index(mates[0])] = (mates[0][0], device)
        else:
            groups.append((device,))
    return groups


def _may_group(cluster: Cluster, a: str, b: str) -> bool:
    hosts = cluster.host_of(a).name, cluster.host_of(b).name
    return cluster.kind_of(a) == cluster.kind_of(b) and (hosts[0] == hosts[1] or cluster.link(*hosts) is not None)


def _shares(draw: Draw, size: int, parts: int) -> list[int]:
    inner = draw(st.permutations(range(1, size)))[: parts - 1]
    return [hi - lo for lo, hi in pairwise([0, *sorted(inner), size])]


def _syncs(
    draw: Draw, graph: BlockGraph, cuts: list[tuple[int, int]], stages: list[Stage], size: int, devices: list[str]
) -> list[Sync]:
    found: list[Sync] = []
    tied = [parameter.name for parameter in graph.parameters if parameter.ties]
    for name in tied:
        users = [
            s
            for s, cut in zip(stages, cuts, strict=True)
            if any(name in b.parameters for b in graph.blocks[slice(*cut)])
        ]
        found.extend(_sync(draw, [name], users, size, devices, whole=False))
    for stage, cut in zip(stages, cuts, strict=True):
        blocks = [block for block in graph.blocks[slice(*cut)] if not set(block.parameters) <= set(tied)]
        linear = [n for b in blocks for n in b.parameters if graph.parameter[n].linear and n not in tied]
        single = draw(st.sampled_from(linear)) if linear and draw(st.booleans()) else None
        alone = single is not None and any(b.parameters == (single,) for b in blocks)
        if single is not None:
            found.extend(_sync(draw, [single], [stage], size, devices, whole=True))
        names = [f"[{block.name}]" for block in blocks if not (alone and block.parameters == (single,))]
        middle = draw(st.integers(0, len(names)))
        for bucket in (names[:middle], names[middle:]):
            found.extend(_sync(draw, bucket, [stage], size, devices, whole=False) if bucket else [])
    return [_named(sync, index) for index, sync in enumerate(found)]


def _named(sync: Sync, index: int) -> Sync:
    return Sync(
        bucket=f"b{index}",
        how=sync.how,
        parameters=sync.parameters,
        participants=sync.participants,
        root=sync.root,
        segments=sync.segments,
    )


def _sync(
    draw: Draw, names: list[str], users: list[Stage], size: int, devices: list[str], *, whole: bool
) -> list[Sync]:
    """A sync of the names among the replicas of the stages, or none where there is one holder. `whole`: linear."""
    firsts = list(dict.fromkeys(replica.devices[0] for stage in users for replica in stage.replicas))
    if len(firsts) < 2:
        return []
    ways = ["ring", "tree", "server"]
    if all(stage.kept is not None for stage in users):
        ways += ["sparse"] * 3
    if whole and len({len(replica.devices) for replica in users[0].replicas}) == 1:
        ways += ["factors"] * 4
    if any(stage.state == "sharded-all" for stage in users):
        ways = ["ring"]
    if all(len(s.replicas) > 1 and all(r.share == size for r in s.replicas) for s in users):
        ways = ["duplicate"]
    how = draw(st.sampled_from(ways))
    root = draw(st.sampled_from(devices)) if how == "server" else None
    order = tuple(draw(st.permutations(firsts)))
    segments = draw(st.integers(1, 4))
    return [Sync(bucket="", how=how, parameters=tuple(names), participants=order, root=root, segments=segments)]


_names = st.one_of(
    st.text(max_size=8), st.sampled_from(("over", "-", "..", "a:b", "a:", "+", "h.0/x", "#", "[b]", "1e+5"))
)
_numbers = st.floats(allow_nan=False)
_counts = st.integers(-(10**12), 10**12)


def _tuples(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=3).map(tuple)


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def _one_of(kind: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(kind))


_optimizers = st.builds(
    Optimizer,
    name=st.sampled_from(("adamw", "adam", "sgd")),
    learning_rate=_numbers,
    betas=st.tuples(_numbers, _numbers),
    momentum=_numbers,
    weight_decay=_numbers,
    clip=_maybe(_numbers),
    eps=_numbers,
    amsgrad=st.booleans(),
    dampening=_numbers,
    nesterov=st.booleans(),
    maximize=st.booleans(),
    average=_maybe(_numbers),
    schedule=st.builds(
        RateSchedule, shape=_names, warmup=_counts, decay=_maybe(_counts), end=_numbers, steps=_maybe(_counts)
    ),
    groups=_tuples(
        st.builds(
            ParameterGroup, parameters=_tuples(_names), learning_rate=_maybe(_numbers), weight_decay=_maybe(_numbers)
        )
    ),
)
_jobs = st.builds(
    Job,
    name=_names,
    model=_names,
    batch=_counts,
    sequence=_maybe(_counts),
    steps=_counts,
    optimizer=st.just(Optimizer()) | _optimizers,
    precision=_maybe(st.sampled_from(PRECISIONS)),
    mixed=st.booleans(),
    seed=_counts,
    weights=_maybe(_names),
    frozen=_tuples(_names),
    data=_names,
    loss=_names,
    sparsity=_maybe(_numbers),
    place=st.dictionaries(_names, _names, max_size=2),
    priority=_numbers,
    deadline=_maybe(_names),
)
_any_jobs = st.builds(Job, name=_names, model=_names, batch=_counts) | _jobs
_replicas = st.builds(Replica, devices=_tuples(_names), share=_counts, slices=_counts)
_stages = st.builds(
    Stage,
    first=_names,
    last=_names,
    replicas=_tuples(_replicas),
    state=_one_of(types.Layout),
    recompute=st.booleans(),
    spill=_one_of(types.Spill),
    kept=_maybe(_numbers),
)
_any_syncs = st.builds(
    Sync,
    bucket=_names,
    how=_one_of(types.How),
    parameters=_tuples(_names),
    participants=_tuples(_names),
    root=_maybe(_names),
    segments=_counts,
)
_any_pipelines = st.builds(
    Pipeline,
    job=_any_jobs,
    model_digest=_names,
    precision=st.sampled_from(PRECISIONS),
    micro_batches=_counts,
    stages=_tuples(_stages),
    syncs=_tuples(_any_syncs),
    schedule=_one_of(types.Schedule),
    ahead=_counts,
)
_pool_jobs = st.builds(
    PoolJob,
    job=_any_jobs,
    model_digest=_names,
    precision=st.sampled_from(PRECISIONS),
    shards=_tuples(st.builds(Shard, first=_names, last=_names)),
    recompute=st.booleans(),
    kept=_maybe(_numbers),
)
_any_pools = st.builds(
    Pool,
    jobs=_tuples(_pool_jobs),
    devices=_tuples(_names),
    caps=_tuples(_numbers | st.sampled_from((2e10, 4e10, 1.5e9))),
    policy=_one_of(types.Policy),
    buffered=st.booleans(),
)


def any_plans() -> st.SearchStrategy[Plan]:
    """Plans of any content: odd names, wild numbers, rules broken."""
    vias = st.builds(Via, between=st.tuples(_names, _names), hosts=_tuples(_names))
    return st.builds(Plan, cluster=_names, parts=_tuples(_any_pipelines | _any_pools), via=_tuples(vias))
