"""Small changes: they keep what must be kept, and no two are the same."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.planners.layout.device_groups import all_bundles, orders
from isthmus.planners.layout.layout_types import LaneOptions, Layout
from isthmus.planners.layout.side_by_side import lanes_plan
from isthmus.planners.search.moves import Grouping, Stages, first_settings, layout_moves, setting_moves, stage_moves
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.random_layouts import random_lanes, random_options, random_parts
from tests.planners.test_portfolio import problem, two_regions
from tests.planners.test_schemes import keeps_rules


@settings(max_examples=30)
@given(clusters(), st.integers(0, 2**16), st.sampled_from((1, 2)))
def test_settings_one_step_away(cluster: Cluster, seed: int, degree: int) -> None:
    """A device is in one lane at most, no lane is empty, and the change is one that matters."""
    task, random = problem(cluster, chain(6), 24), Random(seed)
    bundles = all_bundles(task, degree) or all_bundles(task)
    start = Grouping(random_parts(bundles, random), random_options(task, random))
    for setting in (start, *setting_moves(task, start, bundles)):
        devices = [device for part in setting.parts for bundle in part for device in bundle.devices]
        assert len(devices) == len(set(devices)) and set(devices) <= set(task.usable)
        assert setting.parts and all(setting.parts)
        assert task.job.batch % setting.options.micro_batches == 0
    assert all(setting.signature != start.signature for setting in setting_moves(task, start, bundles))


def test_steps_lead_both_ways() -> None:
    """What two lanes joined, or one that was taken apart, came from is one step away again."""
    task = problem(two_regions(), chain(6))
    bundles = all_bundles(task)
    apart, joined = (Grouping(parts, LaneOptions(4)) for parts in ((bundles[:2], bundles[2:]), (bundles,)))
    for one, two in ((apart, joined), (joined, apart)):
        assert two.signature in {setting.signature for setting in setting_moves(task, one, bundles)}


def test_equal_units_are_interchangeable() -> None:
    bundles = all_bundles(problem(two_regions(), chain(6)))
    assert Grouping(((bundles[0],), (bundles[1], bundles[2])), LaneOptions(2)).signature == (
        Grouping(((bundles[3], bundles[0]), (bundles[1],)), LaneOptions(2)).signature
    )
    assert (
        Grouping(((bundles[0],), (bundles[2],)), LaneOptions(2)).signature
        != Grouping(((bundles[0],),), LaneOptions(2)).signature
    )


@settings(max_examples=20)
@given(clusters())
def test_first_settings(cluster: Cluster) -> None:
    """Everything in one lane and a lane for each bundle are among them; orders have every bundle once."""
    task = problem(cluster, chain(6), 24)
    bundles = all_bundles(task)
    ways = {settings[0].parts for settings in first_settings(task, bundles) if settings}
    assert {(bundles,), tuple((bundle,) for bundle in bundles)} <= ways
    for parts in ways:
        devices = [device for part in parts for bundle in part for device in bundle.devices]
        assert len(devices) == len(set(devices))
    assert all(sorted(order) == sorted(bundles) for order in orders(task, bundles))


@settings(max_examples=20)
@given(clusters(), graphs(), st.integers(0, 2**16))
def test_layouts_one_step_away(cluster: Cluster, graph: BlockGraph, seed: int) -> None:
    """Samples still sum up, cuts stay in order, and what comes out is a plan."""
    random = Random(seed)
    task = problem(cluster, random.choice((graph, chain(8))), 24)
    options = random_options(task, random)._replace(state="replicated")
    start = Layout(tuple(random_lanes(task, random, options)), options, 0.0)
    blocks, samples = len(task.graph.blocks), 24 // options.micro_batches
    moves = list(layout_moves(start, blocks))
    assert start not in moves
    for layout in moves:
        assert sum(lane.samples for lane in layout.lanes) == samples
        for lane in layout.lanes:
            assert {sum(share for _, share in stage) for stage in lane.stages} == {lane.samples}
            assert all(share > 0 for stage in lane.stages for _, share in stage)
            assert lane.firsts[0] == 0 and list(lane.firsts) == sorted(set(lane.firsts)) and lane.firsts[-1] < blocks
            assert len(lane.stages) == len(lane.firsts) == len(lane.recompute)
    for layout in random.sample(moves, min(3, len(moves))):
        keeps_rules(lanes_plan(task, layout), task)


def test_replicas_can_get_anywhere() -> None:
    """From one device alone, single steps lead to all rows of sets of some of three different devices: 25."""
    groups = tuple((f"{host}/card/0",) for host in "abc")
    found: set[Stages] = set()
    fresh: list[Stages] = [((groups[0],),)]
    while fresh:
        stages = fresh.pop()
        found.add(stages)
        used = {group for stage in stages for group in stage}
        for moved in stage_moves(stages, [group for group in groups if group not in used]):
            placed = [group for stage in moved for group in stage]
            assert len(placed) == len(set(placed)) and set(placed) <= set(groups) and all(moved)
            ordered = tuple(tuple(sorted(stage)) for stage in moved)
            if moved and ordered not in found:
                fresh.append(ordered)
    assert len(found) == 3 * 1 + 3 * 3 + 13  # sets of one, two and three devices, in rows


def test_like_replicas_are_moved_once() -> None:
    stages: Stages = ((("a/card/0",), ("a/card/1",)), (("b/card/0",),))
    moved = list(stage_moves(stages, [("a/card/2",), ("a/card/3",)]))
    joined = [one for one in moved if sum(map(len, one)) == 4]
    assert len(joined) == 2 + 3  # a third card of host a joins one of two stages, or has one of its own in three places
