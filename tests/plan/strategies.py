"""Random clusters, models and plans for hypothesis: `plans` keeps every rule, `any_plans` keeps none but its types."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any, get_args

from hypothesis import strategies as st

from isthmus.cluster.spec import PRECISIONS, Cluster, DeviceKind, Host, Link
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.plan import types
from isthmus.plan.types import Pipeline, Plan, Pool, PoolJob, Replica, Shard, Stage, Sync, Via
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from tests.plan.small_models import chain

__all__ = ["any_plans", "clusters", "graphs", "models_of", "plans"]

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
    return chain(
        draw(st.integers(3, 7)),
        tied=draw(st.booleans()),
        linear=draw(st.booleans()),
        heads=draw(st.sampled_from((0, 2, 4))),
        skips=draw(st.booleans()),
    )


def _kind(name: str, speed: float, precisions: tuple[Any, ...]) -> DeviceKind:
    return DeviceKind(
        name=name,
        compute={precision: FlopsPerSecond(speed) for precision in precisions},
        memory=Bytes(speed / 1e3),
        memory_bandwidth=BytesPerSecond(9e11),
        bus=BytesPerSecond(1.2e10),
        peer=BytesPerSecond(5e10),
    )


_KINDS = {
    kind.name: kind
    for kind in (
        _kind("fast", 4e13, PRECISIONS),
        _kind("old", 1.6e13, ("fp32", "fp16")),
        _kind("slow", 8e12, ("fp32",)),
    )
}


@st.composite
def clusters(draw: Draw) -> Cluster:
    """One to three regions in a row: neighbours are linked, the two ends only sometimes."""
    regions = ["east", "mid", "west"][: draw(st.integers(1, 3))]
    hosts = {}
    for region in regions:
        for index in range(draw(st.integers(1, 2))):
            kinds = draw(st.lists(st.sampled_from(sorted(_KINDS)), min_size=1, max_size=2, unique=True))
            devices = {kind: draw(st.integers(1, 3)) for kind in kinds}
            hosts[f"{region}{index}"] = _host(f"{region}{index}", region, devices)
    pairs = [(region, region) for region in regions] + list(pairwise(regions))
    if len(regions) == 3 and draw(st.booleans()):
        pairs.append(("east", "west"))
    links = tuple(_link(pair, draw(st.sampled_from((1e7, 1e8, 1e9)))) for pair in pairs)
    return Cluster(name="random", kinds=_KINDS, hosts=hosts, links=links)


def _host(name: str, region: str, devices: dict[str, int]) -> Host:
    return Host(
        name=name,
        region=region,
        devices=devices,
        bandwidth=BytesPerSecond(5e10),
        latency=Seconds(5e-6),
        nic=BytesPerSecond(1.25e9),
        bus=BytesPerSecond(1.2e10),
        memory=Bytes(6.4e10),
        cores=8,
    )


def _link(pair: tuple[str, str], bandwidth: float) -> Link:
    far = pair[0] != pair[1]
    return Link(
        between=pair,
        bandwidth=BytesPerSecond(bandwidth),
        latency=Seconds(0.04 if far else 1e-4),
        trunk=BytesPerSecond(2 * bandwidth) if far else None,
    )


def _vias(cluster: Cluster) -> tuple[Via, ...]:
    """A relay for every pair of hosts without a link."""
    return tuple(
        Via(between=(a, b), hosts=(next(h for h in cluster.hosts if cluster.link(a, h) and cluster.link(h, b)),))
        for a, b in combinations(cluster.hosts, 2)
        if cluster.link(a, b) is None
    )


@st.composite
def plans(draw: Draw, cluster: Cluster, graph: BlockGraph) -> Plan:
    """A pipeline on some devices and, sometimes, a pool on the rest: keeps every rule of `plan.validate`."""
    devices = draw(st.permutations(list(cluster.devices)))
    count = draw(st.integers(1, len(devices)))
    parts: list[Pipeline | Pool] = [draw(_pipelines(cluster, graph, devices[:count]))]
    if devices[count:] and draw(st.booleans()):
        parts.append(draw(_pools(cluster, graph, devices[count:])))
    return Plan(cluster=cluster.name, parts=tuple(parts), via=_vias(cluster))


def _job(draw: Draw, name: str, batch: int, cluster: Cluster, devices: list[str]) -> tuple[Job, Any]:
    """A job, and a precision that suits the devices."""
    precision = draw(st.sampled_from(PRECISIONS))
    mixed = any(precision not in cluster.kind_of(device).compute for device in devices)
    job = Job(
        name=name,
        model="small:chain",
        batch=batch,
        mixed=mixed,
        sparsity=draw(st.sampled_from((None, None, 0.5, 0.75))),
        optimizer=Optimizer(name=draw(st.sampled_from(("adamw", "sgd")))),
    )
    return job, precision


@st.composite
def _pools(draw: Draw, cluster: Cluster, graph: BlockGraph, devices: list[str]) -> Pool:
    job, precision = _job(draw, "pooled", draw(st.integers(1, 8)), cluster, devices)
    shards = tuple(
        Shard(first=graph.blocks[lo].name, last=graph.blocks[hi - 1].name) for lo, hi in _cuts(draw, len(graph.blocks))
    )
    kept = None if job.sparsity is None else 1.0 - job.sparsity
    return Pool(
        jobs=(PoolJob(job=job, model_digest=graph.digest, precision=precision, shards=shards, kept=kept),),
        devices=tuple(devices),
        caps=tuple(cluster.kind_of(device).memory * draw(st.sampled_from((0.5, 1.0))) for device in devices),
        policy=draw(st.sampled_from(get_args(types.Policy))),
        buffered=draw(st.booleans()),
    )


def _cuts(draw: Draw, blocks: int, most: int = 4) -> list[tuple[int, int]]:
    inner = draw(st.lists(st.integers(1, blocks - 1), max_size=most - 1, unique=True))
    return list(pairwise([0, *sorted(inner), blocks]))


@st.composite
def _pipelines(draw: Draw, cluster: Cluster, graph: BlockGraph, devices: list[str]) -> Pipeline:
    micro_batches, size = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    job, precision = _job(draw, "piped", micro_batches * size, cluster, devices)
    cuts = _cuts(draw, len(graph.blocks))
    tied = bool(graph.parameters[0].ties) and len(cuts) > 1
    stages = [
        _stage(draw, cluster, graph, cut, devices, size, job, apart=tied and index in (0, len(cuts) - 1))
        for index, cut in enumerate(cuts)
    ]
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
    cluster: Cluster,
    graph: BlockGraph,
    cut: tuple[int, int],
    devices: list[str],
    size: int,
    job: Job,
    *,
    apart: bool,
) -> Stage:
    """`apart`: the stage holds a parameter that another stage holds too."""
    groups = _groups(draw, cluster, graph, cut, draw(st.permutations(devices))[: draw(st.integers(1, 4))])
    duplicate = len(groups) > 1 and not apart and draw(st.integers(0, 3)) == 0
    groups = groups if duplicate else groups[:size]
    shares = [size] * len(groups) if duplicate else _shares(draw, size, len(groups))
    replicas = tuple(
        Replica(devices=group, share=share, slices=draw(st.integers(1, share)))
        for group, share in zip(groups, shares, strict=True)
    )
    alike = len({len(group) for group in groups}) == 1
    layouts = ["replicated"]
    if len(groups) > 1 and alike and not duplicate and draw(st.booleans()):
        layouts = ["sharded-optimizer"] if apart else ["sharded-optimizer", "sharded-all"]
    return Stage(
        first=graph.blocks[cut[0]].name,
        last=graph.blocks[cut[1] - 1].name,
        replicas=replicas,
        state=draw(st.sampled_from(layouts)),
        recompute=draw(st.booleans()),
        spill=draw(st.sampled_from(get_args(types.Spill))),
        kept=None if job.sparsity is None or draw(st.booleans()) else 1.0 - job.sparsity,
    )


def _groups(
    draw: Draw, cluster: Cluster, graph: BlockGraph, cut: tuple[int, int], devices: list[str]
) -> list[tuple[str, ...]]:
    """The devices one by one; pairs of one kind sometimes as a tensor group, where the stage can be split in two."""
    can = any(block.tensor is not None for block in graph.blocks[cut[0] : cut[1]])
    groups: list[tuple[str, ...]] = []
    for device in devices:
        mates = [g for g in groups if len(g) == 1 and cluster.kind_of(g[0]) == cluster.kind_of(device)]
        if can and mates and draw(st.booleans()):
            groups[groups.index(mates[0])] = (mates[0][0], device)
        else:
            groups.append((device,))
    return groups


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
        ways.append("sparse")
    if whole and len({len(replica.devices) for replica in users[0].replicas}) == 1:
        ways.append("factors")
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
