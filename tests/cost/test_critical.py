"""The critical path: it fills the step, and blames what sums that can be done by hand blame."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster, Link
from isthmus.cost.critical import Leg, critical_path
from isthmus.cost.simulate import Simulator
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import CollectiveTime, DeviceCosts, Profile
from isthmus.plan.types import Pipeline, Plan
from isthmus.units import BytesPerSecond, Seconds
from tests.cost.simple_plans import (
    devices,
    flat_cluster,
    pipeline,
    plan_of,
    replica,
    ring_sync,
    stage,
    timed_model,
)
from tests.plan.strategies import clusters, graphs, models_of, plans


def link(a: str, b: str, bandwidth: float, latency: float, trunk: float | None = None) -> Link:
    limit = None if trunk is None else BytesPerSecond(trunk)
    return Link(between=(a, b), bandwidth=BytesPerSecond(bandwidth), latency=Seconds(latency), trunk=limit)


def path_of(plan: Plan, cluster: Cluster, graph: BlockGraph, profile: Profile | None = None) -> tuple[Leg, ...]:
    """The path of a plan, which must fill its step."""
    models = {part.job.name: graph for part in plan.parts if isinstance(part, Pipeline)}
    simulator = Simulator(cluster, models, profile=profile)
    legs = critical_path(simulator.play(plan))
    assert fills(legs, simulator.price(plan).step_seconds)
    return legs


def fills(legs: tuple[Leg, ...], step: float) -> bool:
    """From 0 to the end of the step without a gap."""
    joined = all(one.end == other.start for one, other in pairwise(legs))
    ends = (legs[0].start, legs[-1].end) if legs else (0.0, 0.0)
    return joined and ends == (0.0, step) and sum(leg.seconds for leg in legs) == pytest.approx(step, rel=1e-9)


def sums(legs: tuple[Leg, ...]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = defaultdict(float)
    for leg in legs:
        found[leg.what, leg.where] += leg.seconds
    return dict(found)


def test_random_plans_are_filled_without_a_gap() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(st.data(), clusters(), graphs())
    def fill(data: st.DataObject, cluster: Cluster, graph: BlockGraph) -> None:
        plan = data.draw(plans(cluster, graph, priced=True))
        try:
            played = Simulator(cluster, models_of(plan, graph)).play(plan)
        except PlanError:
            return
        legs = critical_path(played)
        assert fills(legs, played.times.end.max())
        known = {*played.fabric.devices, *played.fabric.hosts, *played.fabric.resources}
        assert {leg.where for leg in legs} <= known
        seen.update({leg.what for leg in legs} | {leg.kind for leg in legs})

    fill()
    wanted = {"computing", "updating", "sending", "latency", "activation", "gradient", "sync", "load", "store"}
    assert wanted <= set(seen)


def test_one_device_only_computes() -> None:
    cluster = flat_cluster({"a": "r"}, memory_bandwidth=1e5)
    (name,) = devices(cluster)
    legs = path_of(plan_of(pipeline([stage(0, 1, replica(name))], 3)), cluster, timed_model(2, 1.0, 2.0, elements=100))
    found = sums(legs)
    assert set(found) == {("computing", name), ("updating", name)}
    assert found["computing", name] == pytest.approx(3 * 2 * (1.0 + 2.0))


@pytest.mark.parametrize("slower", [0, 1])
def test_a_pipeline_of_two(slower: int) -> None:
    """The slower stage is always busy; the other, and the way there and back, count once."""
    m, f, b, size, rate, latency = 6, 1.0, 2.0, 10.0, 100.0, 0.25
    hosts = ("a", "b")
    cluster = flat_cluster(
        {"a": "r", "b": "r"}, [link("r", "r", rate, latency)], speeds={hosts[slower]: 0.25, hosts[1 - slower]: 1.0}
    )
    stages = [stage(i, i, replica(name)) for i, name in enumerate(devices(cluster))]
    found = sums(path_of(plan_of(pipeline(stages, m, schedule="fill-drain")), cluster, timed_model(2, f, b, sent=size)))
    slow, quick = devices(cluster)[slower], devices(cluster)[1 - slower]
    assert found["computing", slow] == pytest.approx(m * 4 * (f + b))
    assert found["computing", quick] == pytest.approx(f + b)
    for way in ("a to b", "b to a"):
        assert found["sending", way] == pytest.approx(4 * size / rate)
        assert found["latency", way] == pytest.approx(latency)
    assert len(found) == 6


def test_what_waits_in_a_lane_is_told_as_what_is_before_it() -> None:
    """Six messages each way that take longer than their computing: the last one left when all before it were sent."""
    m, f, b, size, rate = 6, 0.01, 0.02, 100.0, 40.0
    cluster = flat_cluster({"a": "r", "b": "r"}, [link("r", "r", rate, 0.5)])
    stages = [stage(i, i, replica(name)) for i, name in enumerate(devices(cluster))]
    legs = path_of(plan_of(pipeline(stages, m, schedule="fill-drain")), cluster, timed_model(2, f, b, sent=size))
    found = sums(legs)
    assert found["sending", "a to b"] == pytest.approx(m * 4 * size / rate)
    assert found["sending", "b to a"] == pytest.approx(m * 4 * size / rate)
    assert sum(leg.what == "latency" for leg in legs) == 2


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring(n: int) -> None:
    """2(n - 1) rounds of a chunk and a latency each, after the note that the receiver is ready."""
    rate, latency, elements = 1e5, 0.0009, 25000
    cluster = flat_cluster({f"h{i}": "r" for i in range(n)}, [link("r", "r", rate, latency)])
    names = devices(cluster)
    plan = plan_of(
        pipeline([stage(0, 0, *map(replica, names))], 2, size=n, syncs=(ring_sync([0], names),)),
    )
    legs = path_of(plan, cluster, timed_model(1, 0.5, 0.5, elements=elements))
    told = {what: sum(leg.seconds for leg in legs if leg.what == what) for what in ("computing", "sending", "latency")}
    rounds, chunk = 2 * (n - 1), elements * 4 / n
    assert told == pytest.approx(
        {"computing": 2.0, "sending": rounds * chunk / rate, "latency": (rounds + 1) * latency}, rel=1e-9
    )
    assert all(" to " in leg.where for leg in legs if leg.what in ("sending", "latency"))


def test_adding_is_told_apart_from_latency() -> None:
    """A ring of three, in rounds: two of them bring something to add, and the note comes before."""
    rate, latency, elements, adding = 1e5, 0.25, 15000, 2e6
    cluster = flat_cluster({f"h{i}": "r" for i in range(3)}, [link("r", "r", rate, latency)])
    names = devices(cluster)
    plan = plan_of(pipeline([stage(0, 0, *map(replica, names))], 1, size=3, syncs=(ring_sync([0], names),)))
    profile = Profile(devices=(DeviceCosts(device="k1.0", add_bandwidth=adding),))
    legs = path_of(plan, cluster, timed_model(1, 1.0, 1.0, elements=elements), profile)
    told = {what: sum(leg.seconds for leg in legs if leg.what == what) for what in ("sending", "latency", "adding")}
    chunk = elements * 4 / 3
    expected = {"sending": 4 * chunk / rate, "latency": 5 * latency, "adding": 2 * chunk / adding}
    assert told == pytest.approx(expected, rel=1e-9)


def test_a_measured_sync_is_told_as_what_it_sends() -> None:
    cluster = flat_cluster({"a": "r", "b": "r"}, [link("r", "r", 1e5, 0.1)])
    names = devices(cluster)
    plan = plan_of(pipeline([stage(0, 0, *map(replica, names))], 1, size=2, syncs=(ring_sync([0], names),)))
    profile = Profile(collectives=(CollectiveTime(how="ring", hosts=("a", "b"), bytes=4000.0, seconds=7.0),))
    legs = path_of(plan, cluster, timed_model(1, 1.0, 1.0, elements=1000), profile)
    told = {what: sum(leg.seconds for leg in legs if leg.what == what) for what in ("sending", "latency")}
    assert told == pytest.approx({"sending": 6.8, "latency": 0.2})


@pytest.mark.parametrize(
    ("trunk", "nic", "expected"),
    [(110.0, 1e9, "east to west trunk"), (1e9, 110.0, "a nic out"), (1e9, 1e9, "a to c"), (150.0, 220.0, "a to c")],
)
def test_what_is_shared_is_blamed_where_it_is_tight(trunk: float, nic: float, expected: str) -> None:
    """One host sends 100 and 300 bytes to two others at the same time; each pair reaches 100 a second.

    What both use is full nearly all the time at 110 a second; at 150 the longer message's own link is fuller.
    """
    cluster = flat_cluster({"a": "east", "b": "west", "c": "west"}, [link("east", "west", 100.0, 0.1, trunk)])
    hosts = {name: msgspec.structs.replace(host, nic=BytesPerSecond(nic)) for name, host in cluster.hosts.items()}
    cluster = msgspec.structs.replace(cluster, hosts=hosts)
    a, b, c = devices(cluster)
    stages = [stage(0, 0, replica(a, 4)), stage(1, 1, replica(b, 1), replica(c, 3))]
    plan = plan_of(pipeline(stages, 1, size=4, syncs=(ring_sync([1], (b, c)),)))
    models = {"job": timed_model(2, 1.0, 2.0, sent=25.0)}
    links = [link("east", "west", 100.0, 0.1, trunk), link("west", "west", 1e9, 0.0)]
    played = Simulator(msgspec.structs.replace(cluster, links=tuple(links)), models).play(plan)
    sending = [leg for leg in critical_path(played) if leg.what == "sending" and leg.kind == "activation"]
    assert sending[0].where == expected
