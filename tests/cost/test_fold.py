"""Folded plans against the same plans played whole: step seconds, memory, and what must not be folded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, DeviceKind, Host, Link
from isthmus.cost import simulate
from isthmus.cost.replicas.folding import Folder
from isthmus.cost.simulate import Price, Simulator
from isthmus.model.graph import BlockGraph, Linear, TensorSplit
from isthmus.model.job import Job, Optimizer
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync, Via
from isthmus.plan.validate import check
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond
from tests.cost.copied_plans import copied_cluster, expand, host, link
from tests.cost.simple_plans import timed_model

BLOCKS = 8
KINDS = {
    name: DeviceKind(
        name=name,
        compute={"fp32": FlopsPerSecond(speed), "bf16": FlopsPerSecond(speed)},
        memory=Bytes(1e12),
        memory_bandwidth=BytesPerSecond(1e12),
        bus=BytesPerSecond(12e9),
        peer=BytesPerSecond(50e9),
    )
    for name, speed in (("A", 150e12), ("B", 60e12))
}
Shares = Sequence[tuple[str | tuple[str, ...], int]]


@cache
def model(elements: int = 4_000_000) -> BlockGraph:
    """Eight equal blocks."""
    return timed_model(BLOCKS, 5e11, 1e12, elements=elements, sent=1e6, saved=1e6)


def links(*, near: float = 3e9, far: float = 1e9, late: float = 0.01, trunk: float | None = None) -> list[Link]:
    return [link("x", "x", near, 1e-4), link("y", "y", near, 1e-4), link("x", "y", far, late, trunk)]


def near(name: str = "a", kind: str = "A", count: int = 1, region: str = "x") -> Host:
    return host(name, region, {kind: count}, nic=12.5e9)


def far(kind: str = "B", count: int = 1) -> Host:
    return near("b", kind, count, "y")


def world(hosts: Sequence[Host], joined: Sequence[Link] | None = None) -> Cluster:
    own = {one.name: one for one in hosts}
    return Cluster(name="small", kinds=KINDS, hosts=own, links=tuple(links() if joined is None else joined))


def small_plan(
    stages: Sequence[Shares], *, micro: int = 3, how: str = "ring", buckets: int = 2, clip: float | None = None,
    segments: int = 1, **state: object,
) -> Plan:  # fmt: skip
    """Stages of equal numbers of blocks; every bucket is synced among the stage's replicas."""
    ends = [BLOCKS * s // len(stages) for s in range(len(stages) + 1)]
    made, syncs = [], []
    for s, shares in enumerate(stages):
        replicas = tuple(Replica(devices=(d,) if isinstance(d, str) else d, share=n) for d, n in shares)
        made.append(Stage(first=f"b{ends[s]}", last=f"b{ends[s + 1] - 1}", replicas=replicas, **state))  # type: ignore[arg-type]
        blocks = range(ends[s], ends[s + 1])
        for k in range(min(buckets, len(blocks))):
            own = blocks[len(blocks) * k // buckets : len(blocks) * (k + 1) // buckets] or blocks[k : k + 1]
            words = tuple(f"[b{block}]" for block in own)
            names = tuple(replica.devices[0] for replica in replicas)
            syncs.append(
                Sync(bucket=f"{s}.{k}", how=how, parameters=words, participants=names, segments=segments)  # type: ignore[arg-type]
            )
    job = Job(
        name="job", model="small:timed", batch=micro * sum(n for _, n in stages[0]), optimizer=Optimizer(clip=clip)
    )
    part = Pipeline(
        job=job, model_digest="", precision="bf16", micro_batches=micro, stages=tuple(made), syncs=tuple(syncs)
    )
    return Plan(cluster="small", parts=(part,))


def both(plan: Plan, cluster: Cluster, graph: BlockGraph, monkeypatch: pytest.MonkeyPatch) -> tuple[Price, Price]:
    """The price of the folded plan, and of the whole one."""
    simulator = Simulator(cluster, {"job": graph})
    with monkeypatch.context() as patch:
        patch.setattr(simulate, "_PRICED_WHOLE", 8)
        assert simulator.small(plan, 8)[2] is not None, "the plan was not folded"
        folded = simulator.price(plan)
        patch.setattr(simulate, "_PRICED_WHOLE", 10**9)
        return folded, simulator.price(plan)


def eight(name: str, kind: str) -> Shares:
    return [(f"{name}/{kind}/{i}", 2) for i in range(8)]


SIDE = [[("a/A/0", 4), ("b/B/0", 2)], [("a/A/1", 4), ("b/B/0", 2)]]  # two deep beside one deep
TWO = [[("a/A/0", 4), ("b/B/0", 2)]]
CASES: dict[str, tuple[Sequence[Host], Sequence[Link], Plan, int, bool, float]] = {
    # hosts, links, plan of one copy, copies, rings host by host, error at most
    "one class": ([near()], links(), small_plan([[("a/A/0", 4)]]), 72, False, 1e-4),
    "one class, slow": ([near()], links(near=2e8), small_plan([[("a/A/0", 1)]]), 72, False, 1e-4),
    "two regions": ([near(), far()], links(), small_plan(TWO), 40, False, 0.01),
    "two regions, slow": ([near(), far()], links(far=2e7), small_plan(TWO), 40, False, 0.01),
    "two regions, late": ([near(), far()], links(late=0.2), small_plan(TWO), 40, False, 0.01),
    "hosts of eight": ([near(count=8)], links(), small_plan([eight("a", "A")]), 9, True, 0.01),
    "hosts of eight, class by class": ([near(count=8)], links(), small_plan([eight("a", "A")]), 9, False, 0.01),
    "tree": ([near(), far()], links(), small_plan(TWO, how="tree"), 40, False, 0.01),
    "tree, segments": ([near(), far()], links(trunk=3e8), small_plan(TWO, how="tree", segments=4), 40, False, 0.01),
    "factors": ([near(), far()], links(), small_plan(TWO, how="factors", buckets=8), 40, False, 0.01),
    "sharded optimizer": ([near(), far()], links(), small_plan(TWO, state="sharded-optimizer"), 40, False, 0.01),
    "sharded all": ([near()], links(), small_plan([[("a/A/0", 4)]], state="sharded-all"), 72, False, 0.01),
    "sharded all, hosts of four": (
        [near(count=4)], links(near=1e9), small_plan([eight("a", "A")[:4]], state="sharded-all", micro=2, buckets=1),
        16, True, 0.03,
    ),
    "pipelines": ([near(count=2)], links(), small_plan([[("a/A/0", 4)], [("a/A/1", 4)]], clip=1.0), 40, False, 0.01),
    "pipelines over a trunk": (
        [near(), far()], links(trunk=2e9), small_plan([[("a/A/0", 4)], [("b/B/0", 4)]]), 40, False, 0.01,
    ),
    "uneven pipelines": (
        [near(count=1), near("c", "B", 3)], links(),
        small_plan([[("a/A/0", 4)], [("c/B/0", 2), ("c/B/1", 1), ("c/B/2", 1)]]), 20, False, 0.01,
    ),
    "pipelines side by side": ([near(count=2), far()], links(), small_plan(SIDE), 24, False, 0.01),
    "trunk of a region": (
        [near(), near("c", "B")], [link("x", "x", 3e9, 1e-4, trunk=2e10)],
        small_plan([[("a/A/0", 4), ("c/B/0", 2)]]), 40, False, 0.01,
    ),
    "tensor groups": (
        [near(count=2)], links(), small_plan([[(("a/A/0", "a/A/1"), 4)]]), 40, False, 0.01,
    ),
}  # fmt: skip


def graph_for(plan: Plan) -> BlockGraph:
    """With something to split, or linear weights, where the plan asks for it."""
    graph = model()
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    if any(sync.how == "factors" for sync in part.syncs):
        shape = Linear(rows=16, inputs=2000, outputs=2000)
        return replace(graph, parameters=tuple(replace(p, linear=shape) for p in graph.parameters))
    if any(len(replica.devices) > 1 for stage in part.stages for replica in stage.replicas):
        split = TensorSplit(flops=4e11, parameters=(), saved=0.0, reduces=1, elements=1e5)
        return replace(graph, blocks=tuple(replace(b, tensor=split) for b in graph.blocks))
    return graph


@pytest.mark.parametrize("name", CASES)
def test_folded_is_as_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, joined, one, copies, by_host, most = CASES[name]
    cluster, plan = copied_cluster(world(hosts, joined), copies), expand(one, copies, by_host=by_host)
    graph = graph_for(plan)
    check(plan, cluster, {"job": graph})
    folded, whole = both(plan, cluster, graph, monkeypatch)
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=most)
    assert folded.memory == pytest.approx(whole.memory, rel=1e-12)
    assert folded.fits


@st.composite
def small_plans(draw: st.DrawFn) -> tuple[Cluster, Plan]:
    """Up to three stages on up to three hosts, each with replicas of its own; any ring, state, links and shares."""
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from("AB"), min_size=len(counts), max_size=len(counts)))
    regions = draw(st.lists(st.sampled_from("xy"), min_size=len(counts), max_size=len(counts)))
    hosts = [near(f"h{i}", kinds[i], counts[i], regions[i]) for i in range(len(counts))]
    stages: list[list[tuple[str | tuple[str, ...], int]]] = []
    if draw(st.booleans()):  # one stage over all hosts
        stages.append(
            [(f"h{i}/{kinds[i]}/{d}", draw(st.integers(1, 3))) for i, n in enumerate(counts) for d in range(n)]
        )
    else:
        stages.extend([(f"h{i}/{kinds[i]}/{d}", 6 // n) for d in range(n)] for i, n in enumerate(counts))
    state, how = draw(st.sampled_from((("replicated", "ring"), ("replicated", "tree"), ("sharded-optimizer", "ring"))))
    joined = links(
        near=draw(st.sampled_from((3e8, 3e9))),
        far=draw(st.sampled_from((1e8, 1e9))),
        late=draw(st.sampled_from((0.001, 0.05))),
        trunk=draw(st.sampled_from((None, 1e9))),
    )
    plan = small_plan(
        stages, micro=draw(st.integers(1, 3)), how=how, clip=draw(st.sampled_from((None, 1.0))), state=state
    )
    return world(hosts, joined), plan


@given(case=small_plans(), by_host=st.booleans(), size=st.integers(64, 96))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
def test_random_copies(case: tuple[Cluster, Plan], by_host: bool, size: int) -> None:
    cluster, plan = case
    copies = max(4, size // len(cluster.devices))
    cluster, plan = copied_cluster(cluster, copies), expand(plan, copies, by_host=by_host)
    check(plan, cluster, {"job": model()})
    with pytest.MonkeyPatch.context() as patch:
        folded, whole = both(plan, cluster, model(), patch)
    tree = any(sync.how == "tree" for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs)
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=0.12 if tree else 0.05)
    assert folded.memory == pytest.approx(whole.memory, rel=1e-12)


# What is found, and what is left alone.


@pytest.mark.parametrize("copies", [17, 48])
def test_the_largest_number_of_copies_is_found(copies: int) -> None:
    one, plan = world([near(count=2), far()]), expand(small_plan(SIDE), copies)
    cluster = copied_cluster(one, copies)
    found = Folder(cluster).fold(plan)
    assert found is not None
    assert found.copies == copies
    assert sorted(found.devices.ravel().tolist()) == list(range(3 * copies))


def changed(plan: Plan, **fields: object) -> Plan:
    return replace(plan, parts=(replace(plan.parts[0], **fields),))


def test_what_is_not_the_same_in_all_copies_is_not_folded() -> None:
    copies = 48
    cluster, plan = copied_cluster(world([near(), far()]), copies), expand(small_plan(TWO), copies)
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    sync, last = part.syncs[0], cluster.hosts[f"a.{copies - 1}"]
    swapped = (*sync.participants[1::-1], *sync.participants[2:])  # two of one class: the order of copies differs
    rooted = replace(sync, how="server", root="a.0/A/0")
    alone = link("a.0", "b.0", 1e8, 0.1)
    each = [link(f"a.{i}", f"b.{i}", 1e8, 0.1) for i in range(copies)]
    assert Folder(cluster).fold(plan) is not None
    assert Folder(replace(cluster, links=(*cluster.links, *each))).fold(plan) is not None
    assert Folder(replace(cluster, links=(*cluster.links, alone))).fold(plan) is None
    assert Folder(replace(cluster, links=(*cluster.links, link("a.0", "a.1", 1e8, 0.1)))).fold(plan) is None
    assert Folder(replace(cluster, hosts={**cluster.hosts, last.name: replace(last, cores=1)})).fold(plan) is None
    assert Folder(cluster).fold(changed(plan, syncs=(replace(sync, participants=swapped), *part.syncs[1:]))) is None
    assert Folder(cluster).fold(changed(plan, syncs=(rooted, *part.syncs[1:]))) is None
    assert Folder(cluster).fold(replace(plan, via=(Via(between=("a.0", "b.0"), hosts=("a.1",)),))) is None


# Ten thousand devices.


def test_ten_thousand_devices() -> None:
    hosts = [near(f"h{i}", "AB"[i % 2], 4, "xy"[i % 2]) for i in range(4)]
    shares = [(f"{h.name}/{kind}/{d}", 2) for h in hosts for kind in h.devices for d in range(4)]
    cluster, plan = copied_cluster(world(hosts), 625), expand(small_plan([shares]), 625, by_host=True)
    check(plan, cluster, {"job": model()})
    simulator = Simulator(cluster, {"job": model()})
    price, played = simulator.price(plan), simulator.play(plan)
    assert len(price.memory) == 10_000
    assert price.fits
    assert len(played.fabric.devices) == 32
    assert price.step_seconds == pytest.approx(float(played.times.end.max()), rel=1e-9)
    fewer = copied_cluster(world(hosts), 10)
    near_by = Simulator(fewer, {"job": model()}).price(expand(small_plan([shares]), 10, by_host=True)).step_seconds
    assert near_by < price.step_seconds < near_by + 2.5 * 625 * 4 * 2e-4  # more hops, and hardly more bytes


def test_what_can_not_be_folded_is_not_played_beyond_measure() -> None:
    cluster, plan = copied_cluster(world([near()]), 5000), expand(small_plan([[("a/A/0", 1)]]), 5000)
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    mixed = tuple(
        replace(sync, participants=(*sync.participants[::2], *sync.participants[1::2])) for sync in part.syncs
    )
    assert Simulator(cluster, {"job": model()}).price(changed(plan, syncs=mixed)).fits  # another order of copies
    some = replace(part.stages[0].replicas[0], share=3), *part.stages[0].replicas[1:]
    uneven = changed(
        plan, stages=(replace(part.stages[0], replicas=some),), job=replace(part.job, batch=part.job.batch + 6)
    )
    price = Simulator(cluster, {"job": model()}).price(uneven)
    assert not price.fits
    assert "too large" in price.impossible
    few = changed(plan, stages=(replace(part.stages[0], replicas=some[:3]),), syncs=())
    assert Simulator(cluster, {"job": model()}).price(few).fits  # few of many hosts
