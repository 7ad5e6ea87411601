"""Whole plans whose cost is known: formulas of the literature, and sums that can be done by hand."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from isthmus.cluster.spec import Cluster, Link
from isthmus.cost.compute import USUAL, block_arrays, block_seconds
from isthmus.cost.event_engine import run
from isthmus.cost.plan_arrays import HOST_ADAM, group_of
from isthmus.cost.simulate import Simulator
from isthmus.cost.task_list import KINDS
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph, Linear, TensorSplit
from isthmus.model.job import Optimizer
from isthmus.model.profile import DeviceCosts, NetworkCosts, Profile
from isthmus.plan.types import Via
from isthmus.units import BytesPerSecond, Seconds
from tests.cost.reference_tasks import Net, Writer, arrays
from tests.cost.simple_plans import (
    HUGE,
    devices,
    flat_cluster,
    pipeline,
    plan_of,
    price,
    replica,
    ring_sync,
    stage,
    timed_model,
)

EXACT = 1e-12


def link(a: str, b: str, bandwidth: float, latency: float, trunk: float | None = None) -> Link:
    cap = None if trunk is None else BytesPerSecond(trunk)
    return Link(between=(a, b), bandwidth=BytesPerSecond(bandwidth), latency=Seconds(latency), trunk=cap)


def row(p: int, chunks: int = 1) -> tuple[Cluster, list]:
    """p devices that talk for free; block b on device b mod p."""
    cluster = flat_cluster({"h": "r"}, each=p)
    names = devices(cluster)
    return cluster, [stage(b, b, replica(names[b % p])) for b in range(p * chunks)]


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (3, 7), (4, 4), (5, 2), (8, 16)])
def test_equal_stages_have_the_textbook_bubble(schedule: str, p: int, m: int) -> None:
    cluster, stages = row(p)
    cost = price(plan_of(pipeline(stages, m, schedule=schedule)), cluster, timed_model(p, 0.25, 0.625))
    assert cost.step_seconds == pytest.approx((m + p - 1) * (0.25 + 0.625), rel=EXACT)


@pytest.mark.parametrize(("p", "v", "groups"), [(2, 2, 1), (2, 3, 4), (3, 2, 2), (4, 2, 2), (4, 4, 1), (8, 3, 1)])
@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, v: int, groups: int, ratio: float) -> None:
    """M(f + b) + (p - 1)(f + b) / v, f and b of a whole device, M a multiple of p (Narayanan et al. 2021)."""
    cluster, stages = row(p, v)
    m, f = groups * p, 0.5
    cost = price(
        plan_of(pipeline(stages, m, schedule="interleaved")), cluster, timed_model(p * v, f / v, ratio * f / v)
    )
    assert cost.step_seconds == pytest.approx((m + (p - 1) / v) * f * (1 + ratio), rel=EXACT)


def test_every_hop_of_fill_drain_is_paid_twice() -> None:
    """(m + p - 1)(f + b) + 2(p - 1)(latency + bytes / bandwidth), where sending is shorter than computing."""
    p, m, f, b = 4, 6, 0.5, 0.75
    hosts = {f"h{i}": "r" for i in range(p)}
    cluster = flat_cluster(hosts, [link("r", "r", 100.0, 2.0)])
    stages = [stage(i, i, replica(name)) for i, name in enumerate(devices(cluster))]
    cost = price(plan_of(pipeline(stages, m, schedule="fill-drain")), cluster, timed_model(p, f, b, sent=10.0))
    assert cost.step_seconds == pytest.approx((m + p - 1) * (f + b) + 2 * (p - 1) * (2.0 + 40.0 / 100.0), rel=EXACT)


def ring_seconds(n: int, latency: float, size: float, bandwidth: float, segments: int = 1) -> float:
    """An all-reduce on n equal links: in 2(n - 1) rounds, or whole in n - 1 (short tensors; two that are far apart).

    First a note that the receiver is ready. A round takes as long as its bytes, or as the first segment and its way.
    """
    whole = size <= 32 * 1024 or (n == 2 and 2 * latency > 0.002)
    rounds, chunk = (n - 1, size) if whole else (2 * (n - 1), size / n)
    sending = chunk / bandwidth
    return latency + (rounds - 1) * max(sending, sending / segments + latency) + sending + latency


@pytest.mark.parametrize("latency", [0.1, 0.0011, 0.0009])
@pytest.mark.parametrize("elements", [250, 4095, 4097, 25000])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_data_parallel_is_compute_and_an_exposed_ring(n: int, elements: int, latency: float) -> None:
    """m(f + b) s + the ring + update; two micro-batches of s samples for each of n equal hosts."""
    bandwidth, samples = 2e4, 3
    cluster = flat_cluster({f"h{i}": "r" for i in range(n)}, [link("r", "r", bandwidth, latency)], memory_bandwidth=1e5)
    names = devices(cluster)
    plan = plan_of(
        pipeline(
            [stage(0, 1, *(replica(name, samples) for name in names))],
            2,
            size=n * samples,
            syncs=(ring_sync([0, 1], names),),
        )
    )
    cost = price(plan, cluster, timed_model(2, 0.25, 0.5, elements=elements))
    update = 2 * elements * 28 / (1e5 * USUAL.memory)  # 12 + 2 * 8 bytes an element
    compute = 2 * 2 * (0.25 + 0.5) * samples
    exposed = ring_seconds(n, latency, 2 * elements * 4, bandwidth)
    assert cost.step_seconds == pytest.approx(compute + exposed + update, rel=EXACT)


@pytest.mark.parametrize("adding", [None, 4e6, 1.25e6])
@pytest.mark.parametrize("planned", [1, 9])
@pytest.mark.parametrize("latency", [0.25, 4.0, 30.0])
@pytest.mark.parametrize(("n", "size"), [(2, 4e6), (3, 0.75e6), (3, 3e6), (4, 36e6)])
def test_rings_are_passed_on_in_segments(
    n: int, size: float, latency: float, planned: int, adding: float | None
) -> None:
    """Every segment of every message by itself: each leaves when it has been added, and the one before it has left.

    Adding is quicker than the links; where it is slower, messages would not leave in one go, and are priced too high.
    """
    bandwidth = 1e6
    cluster = flat_cluster({f"h{i}": "r" for i in range(n)}, [link("r", "r", bandwidth, latency)])
    names, graph = devices(cluster), timed_model(1, 1.0, 2.0, elements=int(size) // 4)
    one = stage(0, 0, *map(replica, names))
    plan = plan_of(pipeline([one], 1, size=n, syncs=(ring_sync([0], names, segments=planned),)))
    costs = Profile(devices=(DeviceCosts(device="k1.0", add_bandwidth=adding),))
    rounds, chunk = (1, size) if n == 2 else (2 * (n - 1), size / n)
    planned *= 2 if n == 2 else 1
    pieces = max(1, min(planned, int(chunk / 2**16)), min(4, int(chunk / 2**18)), math.ceil(chunk / 2**20))
    left, added = [latency] * pieces, [0.0] * pieces  # of the last round; first, all are there when the note is
    for k in range(rounds):
        free, done = (left[-1] if k else latency), 0.0
        for j in range(pieces):
            free = left[j] = max(free, added[j]) + chunk / bandwidth / pieces
            seconds = chunk / pieces / adding if adding and k < n - 1 else 0.0
            done = added[j] = max(done, left[j] + latency) + seconds
    assert measured(plan, cluster, graph, costs) == pytest.approx(3.0 + added[-1], rel=1e-9)


def test_a_bucket_that_is_final_early_hides_behind_the_rest() -> None:
    """Block 1's ring (shorter than block 0's backward) runs while block 0 goes back; only block 0's is exposed."""
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", 100.0, 0.0)])
    names = devices(cluster)
    syncs = (ring_sync([1], names), ring_sync([0], names))
    plan = plan_of(pipeline([stage(0, 1, *map(replica, names))], 1, size=2, syncs=syncs))
    cost = price(plan, cluster, timed_model(2, 0.5, 2.0, elements=25))
    assert cost.step_seconds == pytest.approx(2 * 0.5 + 2 * 2.0 + 100 / 100.0, rel=EXACT)


def test_a_slow_replica_dominates() -> None:
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", 100.0, 0.25)], speeds={"x": 4.0, "y": 0.5})
    names = devices(cluster)
    plan = plan_of(pipeline([stage(0, 0, *map(replica, names))], 3, size=2, syncs=(ring_sync([0], names),)))
    cost = price(plan, cluster, timed_model(1, 1.0, 2.0, elements=25))
    assert cost.step_seconds == pytest.approx(3 * (1.0 + 2.0) / 0.5 + 2 * 0.25 + 100 / 100.0, rel=EXACT)


def test_two_jobs_share_a_trunk() -> None:
    """Both send at the same instants over host pairs of their own: each gets half the trunk, each way."""
    hosts = {"x1": "x", "x2": "x", "y1": "y", "y2": "y"}
    cluster = flat_cluster(hosts, [link("x", "y", 100.0, 0.5, trunk=120.0)])
    graph = timed_model(2, 1.0, 2.0, sent=75.0)
    parts = [
        pipeline([stage(0, 0, replica(f"x{i}/k1.0/0")), stage(1, 1, replica(f"y{i}/k1.0/0"))], 1, name=f"job{i}")
        for i in (1, 2)
    ]
    both, alone = price(plan_of(*parts), cluster, graph), price(plan_of(parts[0]), cluster, graph)
    assert alone.step_seconds == pytest.approx(2 * 3.0 + 2 * (0.5 + 300.0 / 100.0), rel=EXACT)
    wide = msgspec.structs.replace(cluster, links=(link("x", "y", 100.0, 0.5),))
    assert price(plan_of(*parts), wide, graph).jobs == dict.fromkeys(("job1", "job2"), alone.step_seconds)
    assert both.jobs == pytest.approx(dict.fromkeys(("job1", "job2"), 2 * 3.0 + 2 * (0.5 + 300.0 / 60.0)), rel=EXACT)


def test_a_host_that_is_faster_down_than_up() -> None:
    """Forward leaves x at 20 bytes a second; backward comes back at what y sends, 60, though x could take 80."""
    cluster = flat_cluster({"x": "rx", "y": "ry"}, [link("rx", "ry", 100.0, 0.5)])
    hosts = dict(cluster.hosts)
    hosts["x"] = msgspec.structs.replace(hosts["x"], nic=20.0, down=80.0)
    hosts["y"] = msgspec.structs.replace(hosts["y"], nic=60.0, down=90.0)
    cluster = msgspec.structs.replace(cluster, hosts=hosts)
    graph = timed_model(2, 1.0, 2.0, sent=75.0)
    there = pipeline([stage(0, 0, replica("x/k1.0/0")), stage(1, 1, replica("y/k1.0/0"))], 1)
    alone = price(plan_of(there), cluster, graph)
    assert alone.step_seconds == pytest.approx(2 * 3.0 + 2 * 0.5 + 300.0 / 20.0 + 300.0 / 60.0, rel=EXACT)
    hosts["y"] = msgspec.structs.replace(hosts["y"], nic=1000.0, down=15.0)
    narrow = price(plan_of(there), msgspec.structs.replace(cluster, hosts=hosts), graph)
    assert narrow.step_seconds == pytest.approx(2 * 3.0 + 2 * 0.5 + 300.0 / 15.0 + 300.0 / 80.0, rel=EXACT)


def test_a_relay_costs_both_hops() -> None:
    cluster = flat_cluster(
        {"x": "rx", "y": "ry", "z": "rz"}, [link("rx", "ry", 100.0, 0.5), link("ry", "rz", 50.0, 1.5)]
    )
    part = pipeline([stage(0, 0, replica("x/k1.0/0")), stage(1, 1, replica("z/k1.0/0"))], 1)
    plan = plan_of(part, via=[Via(between=("x", "z"), hosts=("y",))])
    cost = price(plan, cluster, timed_model(2, 1.0, 2.0, sent=25.0))
    assert cost.step_seconds == pytest.approx(2 * 3.0 + 2 * (0.5 + 100 / 100.0 + 1.5 + 100 / 50.0), rel=EXACT)


def six_rounds(writer: Writer, names: tuple[str, ...], chunk: float) -> None:
    """Of a ring of four, each message sent on when it has come."""
    held = [writer.gate() for _ in names]
    for _ in range(6):
        sent = [writer.message("sync", "sync", names[i], names[(i + 1) % 4], chunk, held[i]) for i in range(4)]
        held = sent[-1:] + sent[:-1]


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_tensor_groups_all_reduce_is_the_engines_ring(hosts: int) -> None:
    """The formula in `cost.compute` against the same ring sent message by message; hosts in order around it."""
    cluster = flat_cluster(
        {f"h{i}": "r" for i in range(hosts)}, [link("r", "r", 300.0, 0.125)], each=4 // hosts,
        bandwidth=300.0, latency=0.125,
    )  # fmt: skip
    names = tuple(devices(cluster))
    block = timed_model(1, 1.0, 2.0).blocks[0]
    split = TensorSplit(parameters=(), flops=1.0, saved=0.0, reduces=1, elements=60.0)
    graph = msgspec.structs.replace(timed_model(1, 1.0, 2.0), blocks=(msgspec.structs.replace(block, tensor=split),))
    kind = cluster.kind_of(names[0])
    blocks, rate = block_arrays(graph, 4), kind.compute["fp32"]
    for samples in (1, 5):
        slow = block_seconds(blocks, kind, 4, rate, group_of(cluster, names), samples)[0, 1]
        free = block_seconds(blocks, kind, 4, rate, (4, HUGE, 0.0), samples)[0, 1]
        net, tasks = Net(cluster, plan_of(), Profile()), []
        writer = Writer(net, "job", tasks)
        six_rounds(writer, names, samples * 60.0)
        engine = run(*arrays(tasks, net)).end.max()
        assert slow - free == pytest.approx(engine, rel=1e-9)
        assert engine == pytest.approx(2 * 3 * (0.125 + samples * 240.0 / (4 * 300.0)), rel=EXACT)


def shared_ring(order: str, **caps: float) -> tuple[Cluster, tuple[str, ...]]:
    """Two devices on each of two hosts in two regions, in an order like "xxyy" around the ring."""
    cluster = flat_cluster({"x": "rx", "y": "ry"}, [link("rx", "ry", 300.0, 0.125, caps.get("trunk"))], each=2,
                           bandwidth=600.0, latency=0.125)  # fmt: skip
    nics = {n: msgspec.structs.replace(h, nic=BytesPerSecond(caps.get("nic", HUGE))) for n, h in cluster.hosts.items()}
    names = (f"{host}/k1.0/{order[:i].count(host)}" for i, host in enumerate(order))
    return msgspec.structs.replace(cluster, hosts=nics), tuple(names)


@pytest.mark.parametrize("order", ["xxyy", "xyxy", "xyyx"])
@pytest.mark.parametrize("caps", [{}, {"nic": 250.0}, {"trunk": 120.0}, {"nic": 100.0, "trunk": 150.0}])
def test_a_tensor_group_shares_nics_and_trunks_as_the_engines_ring(order: str, caps: dict[str, float]) -> None:
    """Out of order around the ring, two messages of a round pass the same link: each gets half."""
    cluster, names = shared_ring(order, **caps)
    n, bandwidth, latency = group_of(cluster, names)
    net, tasks = Net(cluster, plan_of(), Profile()), []
    writer = Writer(net, "job", tasks)
    six_rounds(writer, names, 240.0)
    engine = run(*arrays(tasks, net)).end.max()
    assert bandwidth == min([300.0, *caps.values()]) / (2 if order == "xyxy" else 1)
    if order == "xyxy":  # every hop is alike; else the slow hops wait for the fast ones, and rounds overlap
        assert 2 * (n - 1) * (latency + 960.0 / (n * bandwidth)) == pytest.approx(engine, rel=1e-9)
    assert 2 * (n - 1) * (latency + 960.0 / (n * bandwidth)) >= engine * (1 - 1e-9)


def test_a_tensor_group_without_a_link_has_no_price() -> None:
    """It was free: a pair without a link was passed over."""
    cluster = flat_cluster({"x": "rx", "m": "rm", "y": "ry"}, [link("rx", "rm", 1.0, 1.0), link("rm", "ry", 1.0, 1.0)])
    with pytest.raises(PlanError, match="no link between x and y"):
        group_of(cluster, ("x/k1.0/0", "y/k1.0/0"))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_sharded_optimizer_scatters_updates_and_gathers(n: int) -> None:
    """n - 1 rounds of gradients, the update of a piece, n - 1 rounds of new weights: no byte less than a ring.

    Both begin with a note that the receiver is ready.
    """
    elements, bandwidth, latency, memory = 30000, 1e4, 0.25, 2.4e5
    hosts = {f"h{i}": "r" for i in range(n)}
    cluster = flat_cluster(hosts, [link("r", "r", bandwidth, latency)], memory_bandwidth=memory)
    names, graph = devices(cluster), timed_model(1, 1.0, 2.0, elements=elements)
    half = (n - 1) * (latency + 4 * elements / (n * bandwidth))
    update = elements * (12 + 2 * 8) / (memory * USUAL.memory)
    seconds = {}
    for state in ("replicated", "sharded-optimizer"):
        one = stage(0, 0, *map(replica, names), state=state)
        plan = plan_of(pipeline([one], 2, size=n, syncs=(ring_sync([0], names),)))
        seconds[state] = price(plan, cluster, graph).step_seconds
    whole = ring_seconds(n, latency, 4 * elements, bandwidth)
    assert seconds["replicated"] == pytest.approx(2 * 3.0 + whole + update, rel=EXACT)
    assert seconds["sharded-optimizer"] == pytest.approx(2 * (3.0 + latency + half) + update / n, rel=EXACT)


@pytest.mark.parametrize("how", ["ring", "tree", "server", "factors"])
@pytest.mark.parametrize("spill", ["none", "optimizer"])
def test_a_sharded_optimizer_sends_no_less_than_a_replicated_one(how: str, spill: str) -> None:
    """However the gradient came, each participant's piece of the new weights goes to all others, after its update."""
    cluster = flat_cluster({f"h{i}": "r" for i in range(3)}, [link("r", "r", 100.0, 0.25)], bus=1e4)
    names, sent = devices(cluster), {}
    sync = ring_sync([0], names, how=how, root=names[1] if how == "server" else None)
    for state in ("replicated", "sharded-optimizer"):
        one = stage(0, 0, *map(replica, names), state=state, spill=spill)
        played = Simulator(cluster, {"job": factored(10)}).play(plan_of(pipeline([one], 1, size=3, syncs=(sync,))))
        tasks, kind, owner = played.tasks.tasks(), played.tasks.kind, played.fabric.lane_name
        on_net = np.array([lane >= 0 and owner(int(lane))[1] == "sync" for lane in tasks.lane])
        sent[state] = float(tasks.bytes[on_net].sum())
    late = on_net & (kind == KINDS.index("load"))
    updated = played.times.end[kind == KINDS.index("update" if spill == "none" else "host update")]
    gathered = 3 * (3 - 1) * 4 * 60000 / 3
    assert (int(late.sum()), float(tasks.bytes[late].sum())) == (6, gathered)
    assert played.times.start[late].min() >= updated.min()
    assert sent["sharded-optimizer"] == pytest.approx(sent["replicated"] + (0.0 if how == "ring" else gathered))


def factored(scale: int = 1) -> BlockGraph:
    graph = timed_model(1, 1.0, 2.0, elements=600 * scale**2)
    linear = Linear(rows=2.0, inputs=20 * scale, outputs=30 * scale)
    weight = msgspec.structs.replace(graph.parameters[0], linear=linear)
    return msgspec.structs.replace(graph, parameters=(weight,))


@pytest.mark.parametrize("m", [1, 3])
def test_factors_are_rebuilt_after_each_micro_batch(m: int) -> None:
    """Only the last micro-batch's factors and product are exposed: the others' come between the computing."""
    latency, share = 0.25, 2
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", HUGE, latency)])
    names = devices(cluster)
    sync = ring_sync([0], names, how="factors")
    plan = plan_of(pipeline([stage(0, 0, *(replica(n, share) for n in names))], m, size=2 * share, syncs=(sync,)))
    cost = price(plan, cluster, factored())
    product = share * 2.0 * 2.0 * 20 * 30  # seconds: a device of speed 1 does one FLOP a second
    assert cost.step_seconds == pytest.approx(m * (share * 3.0 + product) + latency, rel=EXACT)
    rows, own = 2 * share * 4 * 2.0 * (20 + 30), share * 4 * 2.0 * 30  # of all; output gradients that leave
    assert cost.memory[names[0]] == 6e8 + 16 * 600 + rows + own


def test_a_spilled_optimizer_goes_out_over_the_bus_and_back() -> None:
    elements, bus = 1000, 4000.0
    cluster = flat_cluster({"h": "r"}, bus=bus)
    plan = plan_of(pipeline([stage(0, 0, replica(devices(cluster)[0]), spill="optimizer")], 2))
    cost = price(plan, cluster, timed_model(1, 1.0, 2.0, elements=elements))
    assert cost.step_seconds == pytest.approx(2 * 3.0 + 2 * 4 * elements / bus + elements / HOST_ADAM, rel=EXACT)


def test_streamed_weights_cannot_be_faster_than_the_bus() -> None:
    """Every forward and backward of every micro-batch loads all weights, every backward stores the gradients."""
    elements, bus, m = 1000, 4000.0, 3
    cluster = flat_cluster({"h": "r"}, bus=bus)
    plan = plan_of(pipeline([stage(0, 2, replica(devices(cluster)[0]), spill="all")], m))
    cost = price(plan, cluster, timed_model(3, 1e-3, 2e-3, elements=elements))
    floor = 2 * m * 3 * 4 * elements / bus
    assert floor + 2e-3 < cost.step_seconds < floor * 1.1


def test_duplicates_send_nothing_to_be_equal() -> None:
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", 1.0, 1.0)])
    names, graph = devices(cluster), timed_model(2, 1.0, 2.0, elements=1000)
    twice = [stage(0, 1, *(replica(name, 4) for name in names))]
    part = pipeline(twice, 2, size=4, syncs=(ring_sync([0, 1], names, how="duplicate"),))
    once = price(plan_of(pipeline([stage(0, 1, replica(names[0], 4))], 2, size=4)), cluster, graph)
    assert price(plan_of(part), cluster, graph).step_seconds == once.step_seconds
    tasks = Simulator(cluster, {"job": graph}).play(plan_of(part)).tasks.tasks()
    assert tasks.bytes[tasks.route >= 0].tolist() == [0.0], "but the number of losses"


@pytest.mark.parametrize("latency", [0.5, 100.0])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_updates_wait_for_the_totals(latency: float, clip: float | None) -> None:
    """Two duplicates: the first counts its losses after its last forward and tells the other, one latency away.

    To clip, the other tells the length of its gradient when it has computed and knows the counts, once it has heard
    that the first listens, and gets the answer.
    """
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", 1.0, latency)])
    names, graph = devices(cluster), timed_model(1, 1.0, 2.0)
    twice = pipeline([stage(0, 0, *map(replica, names))], 2, syncs=(ring_sync([0], names, how="duplicate"),))
    job = msgspec.structs.replace(twice.job, optimizer=Optimizer(name="adamw", clip=clip))
    cost = price(plan_of(msgspec.structs.replace(twice, job=job)), cluster, graph)
    known = max(2 * 3.0, 4.0 + latency)
    assert cost.step_seconds == pytest.approx(known if clip is None else known + 3 * latency, rel=EXACT)


def test_one_worker_waits_for_nobody() -> None:
    cluster = flat_cluster({"x": "r"})
    part = pipeline([stage(0, 1, replica(devices(cluster)[0]))], 2, precision="bf16")
    played = Simulator(cluster, {"job": timed_model(2, 1.0, 2.0)}).play(plan_of(part))
    assert not (played.tasks.kind == KINDS.index("totals")).any()


def test_totals_go_over_a_relay() -> None:
    """Neighbours in a row of three hosts are linked, the ends are not: what the last tells the first goes over both."""
    cluster = flat_cluster(
        {"x": "rx", "y": "ry", "z": "rz"}, [link("rx", "ry", HUGE, 1.0), link("ry", "rz", HUGE, 1.0)]
    )
    stages = [stage(i, i, replica(name)) for i, name in enumerate(devices(cluster))]
    plan, model = plan_of(pipeline(stages, 1)), timed_model(3, 1.0, 2.0)
    with pytest.raises(PlanError, match="totals of a step"):
        price(plan, cluster, model)
    relayed = msgspec.structs.replace(plan, via=(Via(between=("x", "z"), hosts=("y",)),))
    assert price(relayed, cluster, model).step_seconds == pytest.approx(3 * 3.0 + 4 * 1.0, rel=EXACT)


@pytest.mark.parametrize("forward", [0.25, 40.0])
@pytest.mark.parametrize("m", [1, 3])
def test_sharded_all_fetches_directly_and_sums_every_micro_batch(m: int, forward: float) -> None:
    """One unit stays all step long: asked for, and sent by all at once over links of their own (S / n each).

    Its gradients go around after each backward, while the next forward computes; the next backward needs their room.
    """
    n, elements, bandwidth, latency, back = 4, 1000, 100.0, 0.25, 2.0
    cluster = flat_cluster({f"h{i}": "r" for i in range(n)}, [link("r", "r", bandwidth, latency)])
    names = devices(cluster)
    one = stage(0, 0, *map(replica, names), state="sharded-all")
    plan = plan_of(pipeline([one], m, size=n, syncs=(ring_sync([0], names),)))
    cost = price(plan, cluster, timed_model(1, forward, back, elements=elements))
    piece = 4 * elements / n / bandwidth
    fetch, sums = 2 * latency + piece, latency + (n - 1) * (latency + piece)
    assert cost.step_seconds == pytest.approx(
        fetch + forward + back + (m - 1) * (max(forward, sums) + back) + sums, rel=EXACT
    )


def test_two_units_are_fetched_one_ahead() -> None:
    """Forward 0, 1, backward 1, 0: unit 1 comes beside unit 0 at first, and stays for its backward.

    Then unit 0 comes again, alone while that computes and beside its sums afterwards; backward 0 waits for the weights.
    """
    n, bandwidth, back = 2, 100.0, 2.0
    cluster = flat_cluster({f"h{i}": "r" for i in range(n)}, [link("r", "r", bandwidth, 0.0)])
    names = devices(cluster)
    syncs = (ring_sync([0], names), ring_sync([1], names))
    one = stage(0, 1, *map(replica, names), state="sharded-all")
    cost = price(plan_of(pipeline([one], 1, size=n, syncs=syncs)), cluster, timed_model(2, 1.0, back, elements=1000))
    piece = 4 * 1000 / n / bandwidth  # 20 s
    asked = 2 * piece + 2 * 1.0  # both come at once over one link, and share it; then both forwards
    again = asked + back + 2 * (piece - back)
    assert cost.step_seconds == pytest.approx(again + back + piece, rel=EXACT)


# What was measured beside blocks.


def measured(plan: object, cluster: Cluster, graph: BlockGraph, profile: Profile) -> float:
    return Simulator(cluster, {"job": graph}, profile=profile).price(plan).step_seconds  # type: ignore[arg-type]


def test_overheads_of_devices() -> None:
    """Around each forward and backward, however it is cut; once a step; the update's rate; what a worker has anyway."""
    cluster = flat_cluster({"x": "r"}, memory_bandwidth=1e9)
    plan = plan_of(pipeline([stage(0, 2, replica(devices(cluster)[0], 4, 2), spill="all")], 3, size=4))
    graph = timed_model(3, 1.0, 2.0, elements=100)
    plain = measured(plan, cluster, graph, Profile())
    costs = DeviceCosts(device="k1.0", action_seconds=0.125, step_seconds=5.0, update_bandwidth=1e3)
    assert measured(plan, cluster, graph, Profile(devices=(costs,))) == pytest.approx(plain + 3 * 2 * 2 * 0.125 + 5.0)
    whole = plan_of(pipeline([stage(0, 2, replica(devices(cluster)[0]))], 1))
    assert measured(whole, cluster, graph, Profile(devices=(costs,))) == pytest.approx(
        3 * 3.0 + 2 * 0.125 + 5.0 + 300 * 28 / 1e3
    )
    other = Profile(devices=(msgspec.structs.replace(costs, device="other"),))
    assert measured(plan, cluster, graph, other) == plain
    memory = [
        Simulator(cluster, {"job": graph}, profile=Profile(devices=(DeviceCosts(device="k1.0", context_bytes=size),)))
        .price(whole)
        .memory["x/k1.0/0"]
        for size in (None, 0.0, 7.0)
    ]
    assert memory == [memory[1] + 6e8, memory[1], memory[1] + 7.0]


@pytest.mark.parametrize(("how", "adds"), [("ring", 2 / 3), ("tree", 2.0), ("server", 1.0)])
def test_gradients_that_come_are_added(how: str, adds: float) -> None:
    """Three devices of one region: a ring adds n - 1 thirds, a chain twice all, a server what comes, side by side."""
    cluster = flat_cluster({f"h{i}": "r" for i in range(3)}, [link("r", "r", 100.0, 0.25)])
    names, graph = devices(cluster), timed_model(1, 1.0, 2.0, elements=30000)
    sync = ring_sync([0], names, how=how, root=names[1] if how == "server" else None)
    plan = plan_of(pipeline([stage(0, 0, *map(replica, names))], 1, size=3, syncs=(sync,)))
    costs = DeviceCosts(device="k1.0", add_bandwidth=500.0)
    more = measured(plan, cluster, graph, Profile(devices=(costs,))) - measured(plan, cluster, graph, Profile())
    assert more == pytest.approx(adds * 4 * 30000 / 500.0)


@pytest.mark.parametrize("trunk", [None, 60.0])
def test_headers_and_messages_take_their_part(trunk: float | None) -> None:
    """Rates between hosts carry less, every message takes longer; inside a host only the latter."""
    cluster = flat_cluster({"x": "rx", "y": "ry"}, [link("rx", "ry", 100.0, 0.5, trunk)], each=2, bandwidth=50.0)
    graph, known = (
        timed_model(2, 1.0, 2.0, sent=25.0),
        Profile(network=NetworkCosts(payload=0.5, message_seconds=0.125)),
    )
    for far, seconds in ((True, 0.5 + 0.125 + 100 / (0.5 * (trunk or 100.0))), (False, 0.125 + 100 / 50.0)):
        other = "y/k1.0/0" if far else "x/k1.0/1"
        plan = plan_of(pipeline([stage(0, 0, replica("x/k1.0/0")), stage(1, 1, replica(other))], 1))
        assert measured(plan, cluster, graph, known) == pytest.approx(6.0 + 2 * seconds)


def test_tensor_groups_meet_the_same_links() -> None:
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", 100.0, 0.5)])
    split = TensorSplit(parameters=(), flops=1.0, saved=0.0, reduces=1, elements=60.0)
    graph = timed_model(1, 1.0, 2.0)
    graph = msgspec.structs.replace(graph, blocks=(msgspec.structs.replace(graph.blocks[0], tensor=split),))
    plan = plan_of(pipeline([stage(0, 0, replica(tuple(devices(cluster))))], 1))
    known = Profile(network=NetworkCosts(payload=0.5, message_seconds=0.25))
    both = 2 * 2 * (0.75 + 240.0 / (2 * 50.0))
    assert measured(plan, cluster, graph, known) == pytest.approx(1.5 + both)


def test_slices_hide_sending_behind_computing() -> None:
    """Two stages, one micro-batch of s samples in k slices: the second starts after one slice and its message."""
    samples, k, f, b, hop = 6, 3, 0.5, 1.0, 0.25
    cluster = flat_cluster({"x": "r", "y": "r"}, [link("r", "r", HUGE, hop)])
    stages = [stage(i, i, replica(name, samples, k)) for i, name in enumerate(devices(cluster))]
    cost = price(plan_of(pipeline(stages, 1, size=samples)), cluster, timed_model(2, f, b))
    piece = samples // k
    assert cost.step_seconds == pytest.approx((samples + piece) * (f + b) + 2 * hop, rel=EXACT)


def test_recompute_pays_the_forward_again() -> None:
    cluster, stages = row(3)
    again = [msgspec.structs.replace(each, recompute=True) for each in stages]
    cost = price(plan_of(pipeline(again, 5)), cluster, timed_model(3, 0.25, 0.5))
    assert cost.step_seconds == pytest.approx((5 + 2) * (0.25 + 0.5 + 0.25), rel=EXACT)
