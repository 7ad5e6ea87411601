"""What binds and what would help: against plans whose step is a sum that can be done by hand."""

from __future__ import annotations

import msgspec
import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.explain.binding import Explanation, explain, explain_schemes
from isthmus.explain.what_if import Culprit, PricedPlan, ladders, swapped
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.model.profile import BlockTime, Profile
from isthmus.plan.types import Pipeline, Plan
from isthmus.plan.validate import check
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import build_problem
from isthmus.units import Bytes, BytesPerSecond
from tests.cost.simple_plans import devices, flat_cluster, pipeline, plan_of, replica, ring_sync, stage, timed_model
from tests.cost.test_critical import link
from tests.plan.golden_files import NAMES, golden, models
from tests.plan.golden_files import cluster as atlantic
from tests.plan.small_models import chain
from tests.planners.test_portfolio import TWO_REGIONS


def setting(plan: Plan, cluster: Cluster, graph: BlockGraph, profile: Profile | None = None) -> PricedPlan:
    given = {part.job.name: graph for part in plan.parts if isinstance(part, Pipeline)}
    check(plan, cluster, given)
    return PricedPlan(plan, cluster, given, profile)


def adds_up(found: Explanation) -> bool:
    return sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds, rel=1e-9)


def changes(found: Explanation) -> dict[str, float]:
    assert [each.step_seconds for each in found.what_if] == sorted(each.step_seconds for each in found.what_if)
    return {each.change: each.step_seconds for each in found.what_if}


def two_stages(bandwidth: float, latency: float, *, memory: float = 1e12, **more: object) -> PricedPlan:
    """Four micro-batches of 100 bytes each way between two devices."""
    cluster = flat_cluster({"a": "r", "b": "s"}, [link("r", "s", bandwidth, latency)])
    kinds = {name: msgspec.structs.replace(kind, memory=Bytes(memory)) for name, kind in cluster.kinds.items()}
    cluster = msgspec.structs.replace(cluster, kinds=kinds)
    stages = [stage(i, i, replica(name), **more) for i, name in enumerate(devices(cluster))]
    plan = plan_of(pipeline(stages, 4, schedule="fill-drain"))
    return setting(plan, cluster, timed_model(2, 0.25, 0.5, sent=25.0, saved=2.5e8))


def test_a_link_binds_and_twice_its_bandwidth_halves_its_part() -> None:
    """All four messages each way, one after another: 800 bytes at 100 a second, one latency each way, and one block."""
    found = explain(two_stages(100.0, 0.25))
    sent, step = 2 * 4 * 100 / 100.0, 1.5 + 8.0 + 0.5
    assert found.step_seconds == pytest.approx(step) and adds_up(found)
    assert (found.binding.sort, found.binding.name) == ("link", "link r - s")
    assert found.binding.seconds == pytest.approx(sent + 0.5)
    assert "8 s sending" in found.binding.text and "500 ms latency" in found.binding.text
    assert "800 B a step" in found.binding.text
    told = changes(found)
    faster = "link r - s at 1.6 kbit/s instead of 800 bit/s"
    assert next(iter(told)) == faster
    assert told["link r - s at 125 ms instead of 250 ms one way"] == pytest.approx(step - 0.25)
    again = two_stages(200.0, 0.25)
    assert told[faster] == again.price().step_seconds < step


def test_a_device_binds_and_twice_its_speed_halves_its_part() -> None:
    cluster = flat_cluster({"a": "r"})
    given = setting(plan_of(pipeline([stage(0, 1, replica("a/k1.0/0"))], 3)), cluster, timed_model(2, 1.0, 2.0))
    found = explain(given)
    assert found.step_seconds == pytest.approx(18.0) and adds_up(found)
    assert (found.binding.sort, found.binding.name) == ("device", "a/k1.0/0")
    assert changes(found) == pytest.approx({"a/k1.0/0 twice as fast": 9.0})


def test_measured_times_are_halved_too() -> None:
    cluster = flat_cluster({"a": "r"})
    times = [
        BlockTime(block=f"b{i}", device="k1.0", precision="fp32", samples=n, forward_seconds=2.0, backward_seconds=3.0)
        for i in range(2)
        for n in (1, 2)
    ]
    plan = plan_of(pipeline([stage(0, 1, replica("a/k1.0/0"))], 3))
    found = explain(setting(plan, cluster, timed_model(2, 1.0, 2.0), Profile(blocks=tuple(times))))
    assert found.step_seconds == pytest.approx(30.0, rel=1e-6)
    assert changes(found)["a/k1.0/0 twice as fast"] == pytest.approx(15.0, rel=1e-6)


def test_where_equal_devices_wait_for_each_other_all_are_tried() -> None:
    """Of two equal ones a faster one brings nothing; with a slow third, the fastest kind helps there."""
    cluster = flat_cluster({"a": "r", "b": "r", "c": "r"}, [link("r", "r", 1e9, 0.0)], speeds={"c": 0.5})
    names = devices(cluster)
    for used, share in ((names[:2], 1), (names, 1)):
        plan = plan_of(
            pipeline(
                [stage(0, 0, *(replica(n, share) for n in used))], 2, size=len(used), syncs=(ring_sync([0], used),)
            )
        )
        told = changes(explain(setting(plan, cluster, timed_model(1, 1.0, 2.0, elements=10))))
        if len(used) == 2:
            assert list(told) == ["every k1.0 twice as fast"]
            assert told["every k1.0 twice as fast"] == pytest.approx(3.0, rel=1e-6)
        else:
            assert told["c/k0.5/0 twice as fast"] == pytest.approx(6.0, rel=1e-6)
            assert told["k1.0 instead of c/k0.5/0"] == pytest.approx(6.0, rel=1e-6)


@pytest.mark.parametrize(("memory", "binds"), [(3e9, True), (5e9, False)])
def test_memory_binds_where_more_of_it_would_bring_most(memory: float, binds: bool) -> None:
    """Five forwards and backwards, one after another; what four micro-batches keep is 4 GB on each device."""
    found = explain(two_stages(1e9, 1e-6, memory=memory, recompute=True))
    assert adds_up(found)
    assert found.step_seconds == pytest.approx(5 * (0.25 + 0.5 + 0.25), rel=1e-5)
    assert (found.binding.sort == "memory") is binds
    if binds:
        assert found.binding.name == "memory of a/k1.0/0" and "3 GB available" in found.binding.text
        assert found.binding.seconds == pytest.approx(5 * 0.25, rel=1e-5)
    kept = next(each for each in found.what_if if each.change.startswith("nothing computed again"))
    assert kept.step_seconds == pytest.approx(two_stages(1e9, 1e-6).price().step_seconds)
    assert kept.fits is not binds


def test_a_plan_that_does_not_fit_is_bound_by_memory() -> None:
    found = explain(two_stages(1e9, 1e-6, memory=2e9))
    assert found.binding.sort == "memory" and "the plan does not fit" in found.binding.text
    assert not found.what_if and adds_up(found)


@pytest.mark.parametrize("name", NAMES)
def test_other_names_cost_the_same(name: str) -> None:
    """All devices become ones of another kind with the same figures: another plan file, and the same price."""
    plan, cluster = golden(name), atlantic()
    given = PricedPlan(plan, cluster, models(plan), None)
    for kind in list(cluster.kinds):
        twin = msgspec.structs.replace(cluster.kinds[kind], name=f"{kind}-twin")
        members = [device for device in given.cluster.devices if given.cluster.devices[device].kind == kind]
        given, names = swapped(given, members, twin)
        assert all(names[member].split("/")[1] == twin.name for member in members)
    check(given.plan, given.cluster, given.models)
    assert given.plan != plan
    before = PricedPlan(plan, cluster, given.models, None).price()
    assert given.price().step_seconds == pytest.approx(before.step_seconds, rel=1e-9)


def test_indices_count_within_a_kind() -> None:
    cluster = flat_cluster({"a": "r"}, each=3)
    plan = plan_of(pipeline([stage(0, 0, replica("a/k1.0/1")), stage(1, 1, replica("a/k1.0/2"))], 2))
    given = setting(plan, cluster, timed_model(2, 1.0, 2.0))
    twin = msgspec.structs.replace(cluster.kinds["k1.0"], name="twin")
    other, names = swapped(given, ["a/k1.0/1"], twin)
    assert names == {"a/k1.0/0": "a/k1.0/0", "a/k1.0/1": "a/twin/0", "a/k1.0/2": "a/k1.0/1"}
    assert [r.devices for part in other.plan.parts for s in part.stages for r in s.replicas] == [  # type: ignore[union-attr]
        ("a/twin/0",), ("a/k1.0/1",),
    ]  # fmt: skip
    assert other.price().step_seconds == given.price().step_seconds


@pytest.mark.parametrize("name", NAMES)
def test_golden_plans_are_explained(name: str) -> None:
    plan = golden(name)
    found = explain(PricedPlan(plan, atlantic(), models(plan), None))
    assert adds_up(found) and found.binding.seconds > 0.0
    assert all(each.step_seconds < found.step_seconds for each in found.what_if)


def test_a_long_pipeline_is_told_as_one() -> None:
    """Six equal stages and one micro-batch: each device takes a sixth, and all of them together are what binds."""
    cluster = flat_cluster({f"h{i}": "r" for i in range(6)}, [link("r", "r", 1e9, 0.1)])
    stages = [stage(i, i, replica(name)) for i, name in enumerate(devices(cluster))]
    found = explain(setting(plan_of(pipeline(stages, 1)), cluster, timed_model(6, 1.0, 2.0)))
    assert found.step_seconds == pytest.approx(18.0 + 1.0) and adds_up(found)
    assert found.binding.sort == "device" and found.binding.name.endswith("/k1.0/0 and 5 more like it")
    assert found.binding.seconds == pytest.approx(18.0)
    assert changes(found)[f"{found.binding.name} twice as fast"] == pytest.approx(10.0)


def test_every_sort_of_place_has_its_change() -> None:
    given = two_stages(100.0, 0.25)
    limit = msgspec.structs.replace(given.cluster.links[0], trunk=BytesPerSecond(90.0))
    given = given._replace(cluster=msgspec.structs.replace(given.cluster, links=(limit,)))
    found = explain(given)
    assert found.binding.name == "trunk r - s"
    assert next(iter(changes(found))) == "trunk r - s at 1.44 kbit/s instead of 720 bit/s"
    for sort in ("nic", "bus", "inside", "processor"):
        (ladder,) = ladders(given, Culprit(sort, ("a",)), {"sending"}, ())
        assert len(ladder) == 2 and all(change.made().cluster != given.cluster for change in ladder)


def test_a_nic_that_nobody_gave_still_fills_its_link() -> None:
    text = TWO_REGIONS.replace("MEMORY", "16 GB").replace(", nic: 100 Gbit/s", "").replace(", nic: 10 Gbit/s", "")
    cluster = parse_cluster(text.replace("1 Gbit/s, latency", "400 Gbit/s, latency"))
    assert cluster.hosts["a"].nic == cluster.links[0].bandwidth
    given = PricedPlan(Plan(cluster="two", parts=()), cluster, {}, None)
    ladder, *_ = ladders(given, Culprit("link", cluster.links[0].between), {"sending"}, ())
    changed = ladder[0].made().cluster
    assert changed.hosts["a"].nic == changed.links[0].bandwidth == 2 * cluster.links[0].bandwidth


def test_schemes_say_why() -> None:
    """One device in each of two regions that a thin link joins: who must use it spends its time there."""
    text = TWO_REGIONS.replace("MEMORY", "16 GB").replace("quick: 2", "quick: 1").replace("slow: 3", "slow: 1")
    cluster = parse_cluster(text.replace("1 Gbit/s, latency", "1 Mbit/s, latency"))
    job = Job(name="job", model="small:chain", batch=2)
    problem = build_problem(cluster, (job,), {"job": chain()})
    tried: list[str] = []
    found = explain_schemes(problem, None, tried.append, ("data", "region", "fsdp"))
    assert tried == ["scheme data", "scheme region", "scheme fsdp"] and all(scheme.why for scheme in found.values())
    assert found["region"].outcome.seconds == choose_plan(problem, planner="region").price.step_seconds
    assert found["data"].why == found["region"].why == "a/quick/0 100 %"
    assert found["fsdp"].why.startswith("link east - west ")
    assert all(scheme.binding for scheme in found.values())


def test_a_scheme_that_cannot_be_says_so() -> None:
    job = Job(name="job", model="small:chain", batch=2)
    problem = build_problem(flat_cluster({"a": "r"}), (job,), {"job": chain()})
    (region,) = explain_schemes(problem, None, lambda text: None, ("region",)).values()
    assert region.outcome.state == "cannot run" and region.outcome.reason == "no plan of the scheme region can run"
    assert region.outcome.seconds is None and region.binding is None
