"""Peak memory: bytes per parameter, what sharded state and masks leave, activations in flight."""

from __future__ import annotations

import math

import msgspec
import pytest

from isthmus.cluster.spec import Link
from isthmus.cost.memory import CONTEXT, state_bytes
from isthmus.model.graph import BlockGraph, Linear
from isthmus.model.job import Optimizer
from isthmus.plan.types import Stage
from isthmus.units import BytesPerSecond, Seconds
from tests.cost.simple_plans import (
    NEAR,
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

ELEMENTS = 3_000_000
ADAM = Optimizer(name="adamw")


def pruned_model(blocks: int = 2) -> BlockGraph:
    """Every second block's parameter is linear, so masks apply to half of all elements."""
    graph = timed_model(blocks, 1.0, 2.0, elements=ELEMENTS)
    linear = Linear(rows=1, inputs=1000, outputs=ELEMENTS // 1000)
    return msgspec.structs.replace(
        graph,
        parameters=tuple(
            msgspec.structs.replace(parameter, linear=linear if index % 2 else None)
            for index, parameter in enumerate(graph.parameters)
        ),
    )


def state_of(each: Stage, graph: BlockGraph, precision: str = "bf16", *, size: int = 1) -> list[float]:
    """Bytes on each device beyond the context, less scratch of the one bucket that several replicas sync."""
    cluster = flat_cluster({"h": "r"}, each=8)
    names = [one.devices[0] for one in each.replicas]
    buckets = [int(block.name[1:]) for block in graph.blocks]
    sparsity = None if each.kept is None else 1.0 - each.kept
    part = pipeline([each], 1, size=size, precision=precision, syncs=(ring_sync(buckets, names),) if names[1:] else ())
    part = msgspec.structs.replace(part, job=msgspec.structs.replace(part.job, sparsity=sparsity))
    piece = len(buckets) * ELEMENTS * (4 if precision == "fp32" else 2) / len(names)
    scratch = min((len(names) - 1) * piece, 2**22 + segment(piece))
    memory = price(plan_of(part), cluster, graph).memory
    return [size - CONTEXT - scratch for size in memory.values()]


def segment(size: float) -> float:
    """Of a MiB or more: at least four, none above 1 MiB."""
    return size / max(4, math.ceil(size / 2**20))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adam_takes_sixteen_bytes_a_parameter(precision: str) -> None:
    graph = timed_model(2, 1.0, 2.0, elements=ELEMENTS)
    assert state_of(stage(0, 1, replica("h/k1.0/0")), graph, precision) == pytest.approx([16 * 2 * ELEMENTS])


def test_sgd_keeps_a_moment_only_with_momentum() -> None:
    assert state_bytes("fp32", Optimizer(name="sgd")).total == 8
    assert state_bytes("fp32", Optimizer(name="sgd", momentum=0.9)).total == 12
    assert state_bytes("bf16", Optimizer(name="sgd")).total == 2 + 2 + 4


def test_a_pruned_stage_holds_dense_state_and_a_mask() -> None:
    assert state_bytes("bf16", ADAM, masked=True).total == 16 + 1
    assert state_bytes("fp32", ADAM, masked=True).total == 16 + 1


def test_masks_save_no_memory_whatever_they_keep() -> None:
    found = state_of(stage(0, 1, replica("h/k1.0/0"), kept=0.1), pruned_model())
    assert found == pytest.approx([(16 + 1) * 2 * ELEMENTS])


@pytest.mark.parametrize("n", [2, 4])
def test_a_sharded_optimizer_is_divided(n: int) -> None:
    copies = [replica(f"h/k1.0/{i}") for i in range(n)]
    found = state_of(
        stage(0, 1, *copies, state="sharded-optimizer"), timed_model(2, 1.0, 2.0, elements=ELEMENTS), size=n
    )
    assert found == pytest.approx([(4 + 12 / n) * 2 * ELEMENTS] * n)


@pytest.mark.parametrize("n", [2, 4])
def test_all_state_sharded_is_divided_but_for_two_parts(n: int) -> None:
    """One block: the part that is gathered is the stage itself, and two sets of it may be there."""
    copies = [replica(f"h/k1.0/{i}") for i in range(n)]
    found = state_of(stage(0, 0, *copies, state="sharded-all"), timed_model(1, 1.0, 2.0, elements=ELEMENTS), size=n)
    assert found == pytest.approx([(16 / n + 2 * 4) * ELEMENTS] * n)


@pytest.mark.parametrize(("spill", "left"), [("none", 16 * 3), ("optimizer", 4 * 3), ("all", 4 * 3)])
def test_spilling_leaves_weights_and_gradients(spill: str, left: float) -> None:
    graph = timed_model(3, 1.0, 2.0, elements=ELEMENTS)
    assert state_of(stage(0, 2, replica("h/k1.0/0"), spill=spill), graph) == pytest.approx([left * ELEMENTS])


def activations(
    p: int, micro: int, schedule: str, *, recompute: bool = False, share: int = 1, slices: int = 1, ahead: int = 0
) -> list[float]:
    """Elements of activations on each of p devices; one sample of a stage saves 1000 elements, receives 10.

    Less room for messages: 16 that leave for each neighbour, 5 that come from it, if there are so many in a step.
    """
    cluster = flat_cluster({f"h{s}": "r" for s in range(p)}, [NEAR]) if ahead else flat_cluster({"h": "r"}, each=p)
    graph = timed_model(p, 1.0, 2.0, saved=1000.0, sent=10.0)
    stages = [stage(b, b, replica(name, share, slices), recompute=recompute) for b, name in enumerate(devices(cluster))]
    part = pipeline(stages, micro, size=share, schedule=schedule, ahead=ahead)
    memory = price(plan_of(part), cluster, graph).memory
    messages = (min(16, micro * slices) + min(5, micro * slices)) * 10 * share / slices
    neighbours = [(s > 0) + (s < p - 1) for s in range(p)]
    held = [(memory.get(name, CONTEXT) - CONTEXT) / 4 for name in devices(cluster)]
    return [size - messages * count for size, count in zip(held, neighbours, strict=True)]


@pytest.mark.parametrize(("p", "micro"), [(1, 4), (3, 2), (4, 4), (4, 9)])
def test_fill_drain_keeps_every_micro_batch(p: int, micro: int) -> None:
    assert activations(p, micro, "fill-drain") == [1000.0 * micro] * p


@pytest.mark.parametrize(("p", "micro", "ahead"), [(1, 4, 0), (3, 2, 0), (4, 4, 0), (4, 9, 0), (4, 9, 2), (3, 4, 5)])
def test_1f1b_keeps_as_many_as_the_stages_depth(p: int, micro: int, ahead: int) -> None:
    expected = [1000.0 * min(micro, p - s + ahead * (p - 1 - s)) for s in range(p)]  # all on hosts of their own
    assert activations(p, micro, "1f1b", ahead=ahead) == expected


def test_recompute_keeps_what_enters_and_one_block() -> None:
    """Model inputs are no tensor of this model: the first stage keeps nothing between forward and backward."""
    assert activations(3, 5, "1f1b", recompute=True) == [1000.0, 10.0 * 2 + 1000.0, 10.0 + 1000.0]


def test_slices_shorten_only_what_is_needed_while_computing() -> None:
    assert activations(2, 3, "fill-drain", share=5, slices=2) == [1000.0 * 5 * 3] * 2
    assert activations(2, 3, "fill-drain", share=5, slices=2, recompute=True)[1] == 10.0 * 5 * 3 + 1000.0 * 3


def test_where_a_16_bit_job_computes_in_fp32() -> None:
    """State in 16 bits and an fp32 copy of the weights; activations, and what block times move, in 4 bytes."""
    graph = msgspec.structs.replace(
        timed_model(2, 1.0, 2.0, elements=ELEMENTS, sent=10.0, saved=1000.0),
        blocks=tuple(
            msgspec.structs.replace(block, workspace=70.0, moved=500.0)
            for block in timed_model(2, 1.0, 2.0, elements=ELEMENTS, saved=1000.0).blocks
        ),
    )
    cluster = flat_cluster({"h": "r"}, memory_bandwidth=1e4)
    old = msgspec.structs.replace(cluster.kinds["k1.0"], compute={"fp32": cluster.kinds["k1.0"].compute["fp32"]})
    fp32_only = msgspec.structs.replace(cluster, kinds={"k1.0": old})
    part = pipeline([stage(0, 1, replica("h/k1.0/0", 4))], 1, size=4, precision="bf16")
    mixed = plan_of(msgspec.structs.replace(part, job=msgspec.structs.replace(part.job, mixed=True)))
    full = plan_of(msgspec.structs.replace(part, precision="fp32"))
    own, wide, fp32 = price(plan_of(part), cluster, graph), price(mixed, fp32_only, graph), price(full, cluster, graph)
    activations = 4 * (2 * 1000.0 + 70.0)
    assert own.memory["h/k1.0/0"] == CONTEXT + 16 * 2 * ELEMENTS + 2 * activations
    assert wide.memory["h/k1.0/0"] == CONTEXT + (16 + 4) * 2 * ELEMENTS + 4 * activations
    assert wide.step_seconds == pytest.approx(fp32.step_seconds, rel=1e-12)
    assert wide.step_seconds > own.step_seconds
    assert price(mixed, cluster, graph) == own  # a kind that has the precision uses it


def test_buffers_count_on_every_device_that_has_a_stage() -> None:
    cluster = flat_cluster({"h": "r"}, each=3)
    graph = msgspec.structs.replace(timed_model(2, 1.0, 2.0), buffers=1000)
    names = devices(cluster)
    stages = [stage(0, 0, replica(names[0])), stage(1, 1, replica(names[1]))]
    cost = price(plan_of(pipeline(stages, 1)), cluster, graph)
    assert cost.memory == dict.fromkeys(names[:2], CONTEXT + 4000 + 2 * 4)  # a number leaves, a number comes


@pytest.mark.parametrize("latency", [0.0, 0.003, 1.0])
def test_a_root_has_scratch_for_each_that_sends(latency: float) -> None:
    """What may be on its way there and back, 2.5 GB/s of it, and a segment of each bucket; alone, also the sums."""
    cluster = flat_cluster({"h": "r"}, each=4, latency=latency)
    names, graph = devices(cluster), timed_model(2, 1.0, 2.0, elements=ELEMENTS)
    room = min(2 * 4 * ELEMENTS, max(2**22, min(2.5e9 * 2 * latency, 2**26)) + 2 * segment(4 * ELEMENTS))

    def held(members: list[str], root: str) -> dict[str, float]:
        syncs = tuple(ring_sync([b], members, how="server", root=root) for b in range(2))
        plan = plan_of(pipeline([stage(0, 1, *map(replica, members))], 1, size=len(members), syncs=syncs))
        return {name: size - CONTEXT for name, size in price(plan, cluster, graph).memory.items()}

    state = 16 * 2 * ELEMENTS
    assert held(names, names[1]) == pytest.approx(dict.fromkeys(names, state) | {names[1]: state + 3 * room})
    assert held(names[:3], names[3])[names[3]] == pytest.approx(2 * 4 * ELEMENTS + 2 * room)


def test_chains_of_a_tree_add_up_towards_their_leaders() -> None:
    hosts = {"a": "r", "b": "r", "c": "r", "d": "s"}
    links = [Link(between=b, bandwidth=BytesPerSecond(1e18), latency=Seconds(0.0)) for b in (("r", "r"), ("s", "r"))]
    cluster = flat_cluster(hosts, links)
    names, size = devices(cluster), 4 * ELEMENTS
    plan = plan_of(pipeline([stage(0, 0, *map(replica, names))], 1, size=4, syncs=(ring_sync([0], names, how="tree"),)))
    memory = price(plan, cluster, timed_model(1, 1.0, 2.0, elements=ELEMENTS)).memory
    chain, ring = 2**22 + segment(size), min(size / 2, 2**22 + segment(size / 2))
    expected = [chain + ring, chain, 0.0, ring]
    assert [memory[name] - CONTEXT - 16 * ELEMENTS for name in names] == pytest.approx(expected)


def test_many_linear_weights_have_room_for_two() -> None:
    """Rows of all samples for two of ten weights, or for as many as may be on their way; own gradients of all."""
    linear = Linear(rows=100, inputs=3000, outputs=1000)
    graph = timed_model(10, 1.0, 2.0, elements=ELEMENTS)
    parameters = tuple(msgspec.structs.replace(parameter, linear=linear) for parameter in graph.parameters)
    graph = msgspec.structs.replace(graph, parameters=parameters)
    for latency, room in ((0.0, 2 * 5 * 1.6e6), (0.001, 2 * 5 * 1.6e6), (0.005, 25e6), (1.0, 2**26)):
        cluster = flat_cluster({"h": "r"}, each=2, latency=latency)
        names = devices(cluster)
        syncs = tuple(ring_sync([b], names, how="factors") for b in range(10))
        parts = [stage(0, 9, replica(names[0], 2), replica(names[1], 3))]
        memory = price(plan_of(pipeline(parts, 1, size=5, syncs=syncs)), cluster, graph).memory
        own = [samples * 10 * 4e5 for samples in (2, 3)]
        assert [memory[name] - CONTEXT - 16 * 10 * ELEMENTS for name in names] == pytest.approx([room + o for o in own])


def test_shortages_say_how_much_is_missing_where() -> None:
    graph = timed_model(1, 1.0, 2.0, elements=10**11)
    cluster = flat_cluster({"h": "r"})
    cost = price(plan_of(pipeline([stage(0, 0, replica("h/k1.0/0"))], 1)), cluster, graph)
    assert [tuple(short) for short in cost.shortages] == [("h/k1.0/0", 16e11 + CONTEXT, 1e12)]
    spilled = price(plan_of(pipeline([stage(0, 0, replica("h/k1.0/0"), spill="all")], 1)), cluster, graph)
    assert spilled.memory["h/k1.0/0"] == 8e11 + CONTEXT  # weights and gradients stay


def test_a_tensor_group_divides_state_and_activations() -> None:
    from tests.plan.small_models import chain

    graph = chain(4, heads=4)
    cluster = flat_cluster({"h": "r"}, each=2)
    whole = Stage(first="embed", last="head", replicas=(replica(tuple(devices(cluster)), 3),))
    memory = price(plan_of(pipeline([whole], 1, size=3)), cluster, graph).memory
    split = 4 * 64 * 64  # up and down of two blocks
    state = 16 * (graph.elements - split / 2)
    saved = 4 * 3 * (sum(block.saved for block in graph.blocks) - 2 * 1024 / 2)
    loss = 4 * 3 * graph.outputs  # in fp32, not divided
    assert memory == pytest.approx(dict.fromkeys(devices(cluster), CONTEXT + state + saved + loss), rel=1e-12)
