"""Pools: what goes over the bus between the units of a job, and what is where meanwhile."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.cluster.spec import Cluster
from isthmus.cost.memory import CONTEXT
from isthmus.cost.plan_arrays import HOST_ADAM
from isthmus.cost.pool import PreparedPool
from isthmus.cost.simulate import Price, Simulator
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.types import Plan, Pool, PoolJob, Shard
from isthmus.plan.validate import check
from tests.cost.simple_plans import devices, flat_cluster, timed_model

BATCH, ELEMENTS, SENT, SAVED, WORKSPACE, BUFFERS = 4, 1000, 25.0, 200.0, 70.0, 11
BUS = 100.0  # bytes a second
WEIGHTS, BOUNDARY, KEPT = 4.0 * ELEMENTS, 4 * BATCH * SENT, 4 * BATCH * SAVED  # bytes


def model(blocks: int = 2) -> BlockGraph:
    graph = timed_model(blocks, 1.0, 2.0, elements=ELEMENTS, sent=SENT, saved=SAVED)
    made = tuple(msgspec.structs.replace(block, workspace=WORKSPACE) for block in graph.blocks)
    return msgspec.structs.replace(graph, blocks=made, buffers=BUFFERS)


def pool(cluster: Cluster, *, recompute: bool, buffered: bool = False, blocks: int = 2, jobs: int = 1) -> Plan:
    """Every block a shard."""
    made = tuple(
        PoolJob(
            job=Job(name=f"job{n}", model="small:timed", batch=BATCH),
            model_digest="",
            precision="fp32",
            shards=tuple(Shard(first=f"b{b}", last=f"b{b}") for b in range(blocks)),
            recompute=recompute,
        )
        for n in range(jobs)
    )
    names = tuple(devices(cluster))
    return Plan(cluster="flat", parts=(Pool(jobs=made, devices=names, caps=(1e12,) * len(names), buffered=buffered),))


def price(plan: Plan, cluster: Cluster, graph: BlockGraph) -> Price:
    models = {job.job.name: graph for part in plan.parts if isinstance(part, Pool) for job in part.jobs}
    check(plan, cluster, models)
    return Simulator(cluster, models).price(plan)


@pytest.mark.parametrize("recompute", [True, False])
def test_one_device_pays_every_load_in_turn(recompute: bool) -> None:
    """F0, then F1 and B1 in one, then B0: three loads of weights; what F0 keeps goes out (saved) and in again.

    The first shard's input is the model's: it takes no bytes here, and is in host memory anyway.
    """
    cluster = flat_cluster({"h": "r"}, bus=BUS)
    forward, backward = BATCH * 1.0, BATCH * 2.0
    computing = forward + (forward + backward) + backward + (forward if recompute else 0.0)
    moved = 3 * WEIGHTS + (0.0 if recompute else 2 * KEPT)
    end = WEIGHTS / BUS + ELEMENTS / HOST_ADAM  # of the first shard's gradients
    assert price(pool(cluster, recompute=recompute), cluster, model()).step_seconds == pytest.approx(
        computing + moved / BUS + end, rel=1e-9
    )


def test_a_shards_inputs_go_out_when_made_and_come_back_for_its_backward() -> None:
    """Three shards on one device: only the middle one's input is kept from its forward to its backward."""
    cluster = flat_cluster({"h": "r"}, bus=BUS)
    plan = pool(cluster, recompute=True, blocks=3)
    played = Simulator(cluster, {"job0": model(3)}).play(plan)
    tasks, names = played.tasks.tasks(), played.fabric.resources
    carried = {}
    for task in range(len(tasks.lane)):
        if tasks.route[task] >= 0:
            name = names[played.fabric.network.resources[tasks.route[task], 0]]
            carried[name] = carried.get(name, 0.0) + float(tasks.bytes[task])
    assert carried == {"h/k1.0/0 bus in": 5 * WEIGHTS + BOUNDARY, "h/k1.0/0 bus out": 3 * WEIGHTS + BOUNDARY}


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_bytes_on_the_device_and_in_host_memory(recompute: bool, buffered: bool) -> None:
    cluster = flat_cluster({"h": "r"}, bus=BUS)
    plan, graph = pool(cluster, recompute=recompute, buffered=buffered, jobs=2), model()
    last = 2 * WEIGHTS + KEPT + 4 * BATCH * WORKSPACE + BOUNDARY + 4 * BUFFERS  # weights and gradients, all saved
    found = price(plan, cluster, graph).memory["h/k1.0/0"]
    assert found == pytest.approx(CONTEXT + last + (WEIGHTS if buffered else 0.0), rel=1e-12)
    small = msgspec.structs.replace(cluster.hosts["h"], memory=1.0)
    kept = 0.0 if recompute else KEPT
    short = price(plan, msgspec.structs.replace(cluster, hosts={"h": small}), graph).shortages
    assert [tuple(each) for each in short] == [("host h", 2 * (16 * 2 * ELEMENTS + kept + 4 * BUFFERS), 1.0)]


def test_a_device_that_stores_what_it_saved_is_free_later() -> None:
    """The smaller job would be done first, but what it saves must go out: the other device takes the next unit."""
    cluster = flat_cluster({"h": "r"}, each=2, bus=BUS)
    plan = pool(cluster, recompute=True, jobs=2)
    part = plan.parts[0]
    assert isinstance(part, Pool)
    small = msgspec.structs.replace(part.jobs[1].job, batch=BATCH - 1)
    smaller = msgspec.structs.replace(part.jobs[1], job=small, recompute=False)
    uneven = msgspec.structs.replace(part, jobs=(part.jobs[0], smaller))
    simulator = Simulator(cluster, {"job0": model(), "job1": model()})
    prepared = simulator.prepare(uneven, simulator.fabric(plan))
    assert isinstance(prepared, PreparedPool)
    assert [(unit.job, unit.shard) for unit in prepared.units[:3]] == [(0, 0), (1, 0), (0, 1)]


def test_a_pool_is_on_one_host() -> None:
    cluster = flat_cluster({"x": "r", "y": "r"})
    with pytest.raises(PlanError, match="several hosts") as caught:
        price(pool(cluster, recompute=True), cluster, model())
    assert caught.value.rule == "pool-one-host"
