"""Orders of devices: against the slow player, and what every order must keep."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Prepared, Simulator
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.resolve import resolve
from isthmus.plan.schedule import parse_orders, render_orders
from isthmus.plan.types import Pipeline, Plan
from tests.cost.reference_order import Order, depths, flows_of, orders_of, runs_of
from tests.cost.simple_plans import NEAR, devices, flat_cluster, pipeline, plan_of, replica, stage, timed_model
from tests.plan.strategies import clusters, graphs, models_of, plans

QUICK = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def prepared(plan: Plan, cluster: Cluster, models: dict[str, BlockGraph]) -> Prepared:
    simulator = Simulator(cluster, models)
    found = simulator.prepare(plan.parts[0], simulator.fabric(plan))
    assert isinstance(found, Prepared)
    return found


def orders(part: Prepared, names: list[str]) -> dict[str, Order]:
    rows = {
        name: list(zip(part.orders.run, part.orders.backward, part.orders.micro_batch, strict=True))[
            part.orders.first[d] : part.orders.first[d + 1]
        ]
        for d, name in enumerate(names)
    }
    return {name: [(int(u), "B" if b else "F", int(m)) for u, b, m in row] for name, row in rows.items() if row}


@QUICK
@given(st.data(), clusters(), graphs())
def test_runs_flows_and_orders_are_those_of_the_slow_player(
    data: st.DataObject, cluster: Cluster, graph: BlockGraph
) -> None:
    plan = data.draw(plans(cluster, graph, priced=True))
    models, names = models_of(plan, graph), list(cluster.devices)
    resolved = resolve(plan, cluster, models)
    slow, pipe = next(resolved.pipelines), plan.parts[0]
    assert isinstance(pipe, Pipeline)
    runs = runs_of(slow, names)
    forward, backward = (flows_of(resolved, slow, runs, back=back) for back in (False, True))
    fast = prepared(plan, cluster, models)
    assert [names[d] for d in fast.runs.device] == [run.device for run in runs]
    assert fast.runs.first.tolist() == [run.copies[0][0] for run in runs]
    assert fast.runs.last.tolist() == [run.copies[-1][0] for run in runs]
    for edges, flows in ((fast.forward, forward), (fast.backward, backward)):
        pairs = list(zip(edges.source.tolist(), edges.target.tolist(), strict=True))
        assert pairs == list(flows)
        assert edges.per_sample.tolist() == pytest.approx([each for each, _ in flows.values()])
        assert edges.fixed.tolist() == pytest.approx([always for _, always in flows.values()])
    places = {name: (cluster.host_of(name).region, cluster.host_of(name).name) for name in names}
    expected = orders_of(runs, forward, backward, pipe.micro_batches, pipe.schedule, pipe.ahead, places)
    assert orders(fast, names) == expected


@QUICK
@given(st.data(), clusters(), graphs())
def test_every_order_is_whole_and_keeps_its_schedules_promise(
    data: st.DataObject, cluster: Cluster, graph: BlockGraph
) -> None:
    """Each forward and backward once, micro-batches in order, and as many in flight as the schedule lets."""
    plan = data.draw(plans(cluster, graph, priced=True))
    part, pipe = prepared(plan, cluster, models_of(plan, graph)), plan.parts[0]
    assert isinstance(pipe, Pipeline)
    pairs = list(zip(part.forward.source.tolist(), part.forward.target.tolist(), strict=True))
    depth = depths(len(part.runs.device), pairs)
    for order in orders(part, list(cluster.devices)).values():
        for u in {u for u, _, _ in order}:
            ways = [(way, m) for run, way, m in order if run == u]
            assert [m for way, m in ways if way == "F"] == list(range(pipe.micro_batches))
            assert [m for way, m in ways if way == "B"] == list(range(pipe.micro_batches))
            most = _most_in_flight(ways)
            if pipe.schedule == "1f1b":
                assert most <= min(pipe.micro_batches, depth[u] + pipe.ahead)
            if pipe.schedule == "fill-drain":
                assert most == pipe.micro_batches
        if pipe.schedule == "fill-drain":
            assert [way for _, way, _ in order] == sorted((way for _, way, _ in order), reverse=True)


def _most_in_flight(ways: list[tuple[str, int]]) -> int:
    flying = [0]
    for way, _ in ways:
        flying.append(flying[-1] + (1 if way == "F" else -1))
    return max(flying)


def _lines(p: int, chunks: int, micro: int, schedule: str, ahead: int = 0) -> list[str]:
    cluster = flat_cluster({f"h{d}": "r" for d in range(p)}, [NEAR]) if ahead else flat_cluster({"h": "r"}, each=p)
    names = devices(cluster)
    stages = [stage(b, b, replica(names[b % p])) for b in range(p * chunks)]
    plan = plan_of(pipeline(stages, micro, schedule=schedule, ahead=ahead))
    part = prepared(plan, cluster, {"job": timed_model(p * chunks, 1.0, 1.0)})
    text = render_orders(part.orders, part.runs, names)
    assert {n: [f"{s}{w}{m}" for s, w, m in row] for n, row in parse_orders(text).items()} == {
        line.split(" | ")[0]: line.split(" | ")[1].split() for line in text.splitlines()
    }
    return [line.split(" | ")[1] for line in text.splitlines()]


def test_1f1b_is_the_published_order() -> None:
    assert _lines(3, 1, 4, "1f1b") == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_ahead_lets_more_in_flight() -> None:
    """As many as go over a far link and back while one is computed; what comes after that link stays as it is."""
    assert _lines(2, 1, 4, "1f1b", ahead=1) == ["0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    assert _lines(2, 1, 6, "1f1b", ahead=3)[0] == "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5"


def test_fill_drain_goes_forward_first() -> None:
    assert _lines(2, 1, 3, "fill-drain") == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


def test_interleaved_is_megatrons_order() -> None:
    """Two devices, two chunks, four micro-batches: warm-up of 2(p - rank - 1) + (v - 1)p, then one of each."""
    assert _lines(2, 2, 4, "interleaved") == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize("text", ["va1 0F0", "va1 | 0F0 0G1", "va1 | F0"])
def test_a_schedule_that_cannot_be_read_says_where(text: str) -> None:
    with pytest.raises(PlanError, match="schedule line 1"):
        parse_orders(text)
