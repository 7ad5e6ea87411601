"""Plans priced with measured times: against the judge, against closed forms, and never below the bound."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster, Link
from isthmus.cost import plan_arrays
from isthmus.cost.bucket_tasks import sync_alone
from isthmus.cost.plan_arrays import group_of
from isthmus.cost.profiled import ALONE, INTERPOLATED
from isthmus.cost.simulate import Simulator
from isthmus.cost.sources import Sources, times_used
from isthmus.cost.tables import ModelTable
from isthmus.cost.task_list import new_list
from isthmus.cost.task_types import DUPLICATE, FACTORS
from isthmus.model.graph import BlockGraph, TensorSplit
from isthmus.model.profile import BlockTime, CollectiveTime, DeviceCosts, NetworkCosts, Profile
from isthmus.plan.types import How, Pipeline, Plan
from isthmus.plan.validate import check
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.problem import make_problem
from isthmus.report.times import times_facts
from isthmus.units import BytesPerSecond, Seconds
from tests.cost.random_profiles import random_profile
from tests.cost.reference_plan import judge
from tests.cost.reference_profile import block_times
from tests.cost.simple_plans import devices, flat_cluster, pipeline, plan_of, replica, ring_sync, stage, timed_model
from tests.cost.test_simulate import same_memory, same_times
from tests.plan.strategies import clusters, graphs, models_of, plans

PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
SAMPLE = settings(max_examples=140, phases=PHASES, suppress_health_check=list(HealthCheck))
FEATURES = {
    "measured blocks", "interpolated blocks", "estimated blocks", "measured syncs", "interpolated syncs",
    "estimated syncs", "ring", "tree", "server", "sparse", "tensor group", "pool", "one point", "sharded",
    "overheads of devices", "overheads of messages",
}  # fmt: skip


def features(plan: Plan, profile: Profile, simulator: Simulator) -> set[str]:
    used = times_used(simulator, plan)
    found = {f"{word} blocks" for word, count in used.blocks._asdict().items() if count}
    found |= {f"{word} syncs" for word, count in used.syncs._asdict().items() if count}
    found |= {"overheads of devices"} if set(used.overheads) - {"messages"} else set()
    found |= {"overheads of messages"} if "messages" in used.overheads else set()
    found |= (
        {"one point"}
        if 1 in Counter((t.block, t.device, t.precision, t.tensor) for t in profile.blocks).values()
        else set()
    )
    for part in plan.parts:
        if not isinstance(part, Pipeline):
            found.add("pool")
        elif profile.collectives:
            found |= {sync.how for sync in part.syncs}
            found |= {"sharded"} if any(s.state != "replicated" for s in part.stages) else set()
            found |= {"tensor group"} if any(len(r.devices) > 1 for s in part.stages for r in s.replicas) else set()
    return found


def test_random_plans_with_random_profiles_cost_what_the_judge_says() -> None:
    seen: Counter[str] = Counter()

    @SAMPLE
    @given(st.data(), clusters(), graphs(), st.integers(0, 2**20))
    def compare(data: st.DataObject, cluster: Cluster, graph: BlockGraph, seed: int) -> None:
        plan = data.draw(plans(cluster, graph, priced=True))
        models, profile = models_of(plan, graph), random_profile(plan, cluster, graph, seed)
        check(plan, cluster, models)
        simulator = Simulator(cluster, models, profile=profile)
        try:
            judged = judge(plan, cluster, models, profile)
        except ValueError:  # gathering in orders that wait for each other
            assert "wait for each other" in simulator.price(plan).impossible
            return
        price = simulator.price(plan)
        assert price.jobs == pytest.approx(judged.jobs, rel=1e-9)
        assert same_times(simulator.play(plan), judged)
        assert same_memory(price, judged, cluster)
        seen.update(features(plan, profile, simulator))

    compare()
    assert {name for name in FEATURES if seen[name] < 3} == set()


@settings(max_examples=120, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(st.data(), clusters(), graphs(), st.integers(0, 2**20))
def test_no_plan_is_faster_than_the_bound(data: st.DataObject, cluster: Cluster, graph: BlockGraph, seed: int) -> None:
    """However fast or slow what was measured is beside the roofline."""
    plan = data.draw(plans(cluster, graph, priced=True))
    profile = random_profile(plan, cluster, graph, seed)
    for part in plan.parts:
        if isinstance(part, Pipeline):
            problem = make_problem(cluster, part.job, graph, part.precision, 0, profile)
            alone = msgspec.structs.replace(plan, parts=(part,))
            assert problem.price(alone).price.step_seconds * (1 + 1e-9) >= lower_bound(problem)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(clusters(), graphs(), st.integers(0, 2**20), st.integers(1, 20))
def test_the_bound_of_a_block_is_its_least(cluster: Cluster, graph: BlockGraph, seed: int, most: int) -> None:
    """Of all numbers of samples and all groups, tried one by one; and it is reached where no group is possible."""
    profile = random_profile(Plan(cluster="", parts=()), cluster, graph, seed)
    table = ModelTable(cluster, graph, "fp32", False, profile=profile)
    for kind in {device.kind for device in cluster.devices.values()}:
        names = [device.name for device in cluster.devices.values() if device.kind == kind]
        groups = [(names[0],), *(tuple(names[i : i + 2]) for i in range(len(names) - 1))]
        split = any(block.tensor is not None for block in graph.blocks)
        joined = [group for group in groups[: None if split else 1] if _linked(cluster, group)]
        spent = [
            [
                sum(block_times(profile, graph, b, cluster, group, "fp32", False, s)) * len(group) / s
                for b in range(len(graph.blocks))
            ]
            for group in joined
            for s in range(1, most + 1)
        ]
        least = table.least(kind, most)
        assert (least <= np.min(spent, axis=0) * (1 + 1e-9)).all()
        known = any((t.device, t.precision, t.tensor) == (kind, "fp32", 1) for t in profile.blocks)
        if known and (len(names) == 1 or not split):
            assert least == pytest.approx(np.min(spent, axis=0), rel=1e-9)


def _linked(cluster: Cluster, group: tuple[str, ...]) -> bool:
    hosts = [cluster.host_of(device).name for device in group]
    return len(set(hosts)) == 1 or cluster.link(hosts[0], hosts[-1]) is not None


# Blocks.


def point(samples: int, forward: float, backward: float, **fields: object) -> BlockTime:
    given: dict[str, object] = {"block": "b0", "device": "k1.0", "precision": "fp32", **fields}
    return BlockTime(samples=samples, forward_seconds=forward, backward_seconds=backward, **given)  # type: ignore[arg-type]


def one_device(profile: Profile, samples: int, blocks: int = 2) -> tuple[float, Sources]:
    """Seconds of a step on one device, and the sources of its block times; each block takes 1 s and 2 s a sample."""
    cluster, graph = flat_cluster({"h": "r"}), timed_model(blocks, 1.0, 2.0)
    plan = plan_of(pipeline([stage(0, blocks - 1, replica(devices(cluster)[0], samples))], 1, size=samples))
    simulator = Simulator(cluster, {"job": graph}, profile=profile)
    return simulator.price(plan).step_seconds, times_used(simulator, plan).blocks


def test_points_lines_ratios_and_the_roofline() -> None:
    two = Profile(blocks=(point(4, 8.0, 10.0), point(2, 6.0, 6.0)))
    assert one_device(two, 2) == (pytest.approx(12.0 + 6.0), Sources(1, 0, 1))
    assert one_device(two, 3) == (pytest.approx(7.0 + 8.0 + 9.0), Sources(0, 1, 1))
    assert one_device(two, 6) == (pytest.approx(10.0 + 14.0 + 18.0), Sources(0, 1, 1))
    assert one_device(two, 1) == (pytest.approx(5.0 + 4.0 - 0.0 + 3.0), Sources(0, 1, 1))
    one = Profile(blocks=(point(4, 8.0, 10.0),))
    assert one_device(one, 4) == (pytest.approx(18.0 + 12.0), Sources(1, 0, 1))
    assert one_device(one, 2) == (pytest.approx(9.0 + 6.0), Sources(0, 1, 1))  # half of the roofline's work
    assert one_device(Profile(blocks=(point(4, 8.0, 10.0, precision="bf16"),)), 4) == (24.0, Sources(0, 0, 2))
    assert one_device(Profile(blocks=(point(4, 8.0, 10.0, tensor=2),)), 4) == (24.0, Sources(0, 0, 2))


def test_equal_blocks_share_and_the_loss_comes_on_top_of_the_last() -> None:
    """Three fp32 copies of the outputs forward and two backward, at 0.8 of 100 bytes a second."""
    cluster = flat_cluster({"h": "r"}, memory_bandwidth=100.0)
    graph = timed_model(3, 1.0, 2.0)
    alike = tuple(msgspec.structs.replace(block, digest="b0") for block in graph.blocks)
    graph = msgspec.structs.replace(graph, blocks=alike, outputs=20.0)
    plan = plan_of(pipeline([stage(0, 2, replica(devices(cluster)[0], 2))], 1, size=2))
    priced = Simulator(cluster, {"job": graph}, profile=Profile(blocks=(point(2, 0.5, 0.25),))).price(plan)
    assert priced.step_seconds == pytest.approx(3 * 0.75 + 5 * 4 * 20 * 2 / 80)


def test_a_kind_that_computes_in_fp32_uses_what_was_measured_in_fp32() -> None:
    cluster, graph = flat_cluster({"h": "r"}), timed_model(1, 1.0, 2.0)
    kind = msgspec.structs.replace(cluster.kinds["k1.0"], compute={"fp32": cluster.kinds["k1.0"].compute["fp32"]})
    cluster = msgspec.structs.replace(cluster, kinds={"k1.0": kind})
    profile = Profile(blocks=(point(1, 0.5, 0.5), point(1, 7.0, 7.0, precision="bf16")))
    table = ModelTable(cluster, graph, "bf16", True, profile=profile)
    assert table.seconds("k1.0", ALONE, 1)[:, -1].tolist() == [0.5, 0.5]


def halved(link: Link, reduces: int) -> tuple[Cluster, BlockGraph]:
    """Two hosts of two devices; one block of 1 s and 2 s a sample, half of which a group divides."""
    cluster = flat_cluster({"x": "r", "y": "r"}, [link], each=2, bandwidth=1e9, latency=1e-6)
    split = TensorSplit(parameters=(), flops=0.5, saved=0.0, reduces=reduces, elements=1000.0)
    graph = timed_model(1, 1.0, 2.0)
    return cluster, msgspec.structs.replace(graph, blocks=(msgspec.structs.replace(graph.blocks[0], tensor=split),))


def test_what_slows_one_device_slows_each_of_a_group() -> None:
    """Measured four times as slow as the catalog says: so is what a group computes, and not what it sends."""
    link = Link(between=("r", "r"), bandwidth=BytesPerSecond(1e6), latency=Seconds(1e-3))
    cluster, graph = halved(link, reduces=1)
    table = ModelTable(cluster, graph, "fp32", False, profile=Profile(blocks=(point(1, 4.0, 8.0),)))
    for pair, latency, rate in ((("x/k1.0/0", "x/k1.0/1"), 1e-6, 1e9), (("x/k1.0/0", "y/k1.0/0"), 1e-3, 1e6)):
        group = group_of(cluster, pair)
        sent = 2 * (latency + 3 * 4000 / (2 * rate))
        expected = [3 * 4 * 1.0 * 0.75 + sent, 3 * 4 * 2.0 * 0.75 + sent]
        assert table.seconds("k1.0", group, 3)[:, -1].tolist() == pytest.approx(expected)
        assert table.sources(table.row("k1.0", group, 1)).tolist() == [INTERPOLATED]
    assert table.least("k1.0", 1).tolist() == pytest.approx([12.0]), "a group spends more, one device that"


def test_groups_are_measured_inside_a_host() -> None:
    """The all-reduces are in the time; over the network the same group has the roofline's."""
    link = Link(between=("r", "r"), bandwidth=BytesPerSecond(1e6), latency=Seconds(1e-3))
    cluster, graph = halved(link, reduces=0)
    profile = Profile(blocks=(point(1, 0.25, 0.25, tensor=2),))
    table = ModelTable(cluster, graph, "fp32", False, profile=profile)
    inside, across = (group_of(cluster, group) for group in (("x/k1.0/0", "x/k1.0/1"), ("x/k1.0/0", "y/k1.0/0")))
    assert table.seconds("k1.0", inside, 1)[:, -1].tolist() == [0.25, 0.25]
    assert table.seconds("k1.0", across, 1)[:, -1].tolist() == pytest.approx([0.75, 1.5])
    assert table.seconds("k1.0", ALONE, 1)[:, -1].tolist() == pytest.approx([1.0, 2.0])


@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(st.data(), clusters(), graphs())
def test_a_profile_of_something_else_changes_nothing(data: st.DataObject, cluster: Cluster, graph: BlockGraph) -> None:
    plan = data.draw(plans(cluster, graph, priced=True))
    other = Profile(
        blocks=(point(1, 9.0, 9.0, block="other", device="fast"), point(1, 9.0, 9.0, block="middle", device="other")),
        collectives=(CollectiveTime(how="ring", hosts=("nowhere", "east0"), bytes=1.0, seconds=9.0),),
    )
    models = models_of(plan, graph)
    plain, measured = Simulator(cluster, models), Simulator(cluster, models, profile=other)
    assert measured.price(plan) == plain.price(plan)
    used = times_used(measured, plan)
    assert not used.known and used.blocks.total == used.blocks.estimated > 0
    bare = times_used(plain, plan)
    assert used == bare._replace(known=False, played=used.played) and bare.known and not bare.played


# Syncs.


def two_buckets(profile: Profile, **fields: object) -> tuple[Simulator, Plan]:
    """Two replicas on two hosts over a link of 1 byte a second; 1000 elements in each of two buckets; 3 s and 6 s."""
    link = Link(between=("r", "r"), bandwidth=BytesPerSecond(1.0), latency=Seconds(0.5))
    cluster = flat_cluster({"x": "r", "y": "r"}, [link], speeds={"x": 1.0, "y": 0.5})
    names = devices(cluster)
    syncs = tuple(ring_sync([block], names, **fields) for block in (1, 0))
    plan = plan_of(pipeline([stage(0, 1, *(replica(name) for name in names))], 1, size=2, syncs=syncs))
    graph = timed_model(2, 1.0, 2.0, elements=1000)
    check(plan, cluster, {"job": graph})
    return Simulator(cluster, {"job": graph}, profile=profile), plan


def collective(size: float, seconds: float, **fields: object) -> CollectiveTime:
    given: dict[str, object] = {"how": "ring", "hosts": ("y", "x"), **fields}
    return CollectiveTime(bytes=size, seconds=seconds, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("points", "seconds", "source"),
    [
        ([(4000.0, 7.0)], 7.0, "measured"),
        ([(8000.0, 7.0)], 7.0, "interpolated"),
        ([(1000.0, 7.0)], 28.0, "interpolated"),
        ([(2000.0, 3.0), (6000.0, 7.0)], 5.0, "interpolated"),
        ([(1000.0, 1.0), (2000.0, 3.0)], 7.0, "interpolated"),
        ([(1000.0, 5.0), (2000.0, 3.0)], 3.0, "interpolated"),
        ([(4000.0, 0.5)], 0.5, "measured"),  # less than the latency: nothing is sent
        ([(8000.0, 5.0), (9000.0, 6.0)], 2.5, "interpolated"),  # the line would say 1: less than in proportion
    ],
)
def test_a_measured_sync_alone_takes_what_was_measured(
    points: list[tuple[float, float]], seconds: float, source: str
) -> None:
    """The slower replica is done with block 1 after 4 s + 4 s and with block 0 after 4 s more.

    Of a sync's seconds 1 s is latency, and while one bucket is on its way the other is sent.
    """
    simulator, plan = two_buckets(Profile(collectives=tuple(collective(*at) for at in points)), segments=3)
    sending = max(0.0, seconds - 1.0)
    assert simulator.price(plan).step_seconds == pytest.approx(max(12.0, 8.0 + sending) + sending + 1.0)
    assert simulator.play(plan).tasks.tasks().bytes.max() == pytest.approx(sending)
    plain = two_buckets(Profile())[0]
    assert simulator.price(plan).memory == plain.price(plan).memory, "what is held is what it is"
    counts = times_used(simulator, plan).syncs._asdict()
    assert counts == {"measured": 0, "interpolated": 0, "estimated": 0, source: 2}


@pytest.mark.parametrize(
    "other", [{"how": "tree"}, {"hosts": ("x", "x")}, {"hosts": ("x", "y", "y")}, {"how": "server", "root": "x"}]
)
def test_other_collectives_are_played_on_the_links(other: dict[str, object]) -> None:
    plain, plan = two_buckets(Profile())
    simulator, _ = two_buckets(Profile(collectives=(collective(4000.0, 7.0, **other),)))
    assert simulator.price(plan) == plain.price(plan)
    used = times_used(simulator, plan)
    assert used.syncs == Sources(0, 0, 2) and used.played == (("no points for ring among x, y", 2),)
    assert (
        "2 simulated on the links: no points for ring among x, y (2)" in times_facts(used, simulator.profile, "p")[1][1]
    )


@pytest.mark.parametrize("how", [FACTORS, DUPLICATE, DUPLICATE + 1])
def test_a_sync_without_messages_of_its_own_is_refused(how: int) -> None:
    """It was once played, and priced, as a ring."""
    simulator, plan = two_buckets(Profile())
    devices = np.arange(2, dtype=np.int32)
    with pytest.raises(ValueError, match="has no messages"):
        sync_alone(new_list(64, 64), simulator.fabric(plan).wires, how, devices, 1e6, 1, -1)


def test_every_sync_of_a_plan_has_a_number() -> None:
    assert set(plan_arrays._HOW) == set(get_args(How))


def test_a_server_is_known_by_its_root() -> None:
    profile = Profile(collectives=(collective(4000.0, 7.0, how="server", root="y"),))
    simulator, plan = two_buckets(profile, how="server", root="y/k0.5/0")
    assert simulator.price(plan).step_seconds == pytest.approx(12.0 + 7.0)
    other, elsewhere = two_buckets(profile, how="server", root="x/k1.0/0")
    assert times_used(other, elsewhere).syncs == Sources(0, 0, 2)


def test_constants_that_were_used_are_told() -> None:
    """Of the kinds of a plan, and of messages; constants alone are no reason to warn, points of other models are."""
    cluster = flat_cluster({"x": "r"}, speeds={"x": 2.0})
    graph, plan = timed_model(1, 1.0, 2.0), plan_of(pipeline([stage(0, 0, replica("x/k2.0/0"))], 1))
    own, other = (DeviceCosts(device=kind, step_seconds=1.0) for kind in ("k2.0", "k9.0"))
    for profile, overheads, known in (
        (Profile(), (), False),
        (Profile(devices=(other,)), (), False),
        (Profile(devices=(own, other), network=NetworkCosts()), ("k2.0", "messages"), True),
        (Profile(blocks=(point(1, 1.0, 1.0, block="another"),), devices=(own,)), ("k2.0",), False),
    ):
        used = times_used(Simulator(cluster, {"job": graph}, profile=profile), plan)
        assert (used.overheads, used.known) == (overheads, known)
        said = dict(times_facts(used, profile, "p.json"))
        assert said.get("overheads") == (f"measured for {', '.join(overheads)} (p.json)" if overheads else None)
        assert ("warning" in said) == (not known)
