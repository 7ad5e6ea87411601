"""Pipelines side by side: bounds that hold, samples that sum up, and plans that are what they should be."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Layout as State
from isthmus.plan.types import Pipeline, Plan
from isthmus.planners.layout.build_plan import build_stages, make_plan
from isthmus.planners.layout.device_groups import all_bundles
from isthmus.planners.layout.layout_types import Lane, LaneOptions, Staged, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.schemes.staged_ideas import staged_plan
from isthmus.planners.search.candidates import ways
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.random_layouts import random_lanes, random_options, random_parts
from tests.planners.test_portfolio import problem, two_regions
from tests.planners.test_schemes import keeps_rules


@settings(max_examples=60)
@given(clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 2**16))
def test_no_plan_takes_less_than_one_of_its_lanes_needs(
    cluster: Cluster, graph: BlockGraph, batch: int, seed: int
) -> None:
    """What `least` says is never priced, so it must never say too much: whatever the lanes are, and their syncs."""
    random = Random(seed)
    if random.random() < 0.6:  # much to sync, little to compute
        graph = chain(random.randint(3, 8), width=1024, rows=random.choice((1, 8)), tied=random.random() < 0.3)
    task = problem(cluster, graph, batch, sparsity=random.choice((None, None, 0.5)))
    relayed = task.with_relays
    lanes = LaneMaker(relayed, MemoryFit(relayed))
    for _ in range(4):
        options = random_options(task, random)
        layout = lanes.layout(random_lanes(task, random, options, pairs=True), options)
        for how in dict.fromkeys(how for how, _ in ways(task, layout)):
            seconds = task.price(lanes_plan(task, layout, how)).price.step_seconds
            for lane in layout.lanes:
                assert lane.least <= seconds * (1 + 1e-9)
                assert lane.least <= lane.seconds


@pytest.mark.parametrize("spill", [False, True])
def test_stages_are_built_with_all_of_their_options(spill: bool) -> None:
    """A plan that was judged with the optimizer's state in the hosts' memory keeps it there."""
    task = problem(two_regions(), chain(4))
    way = StageOptions(recompute=True, state="sharded-optimizer", spill=spill)
    pairs = [(device,) for device in task.usable[:2]]
    (stage,) = build_stages(task, [0], [[(devices, 1) for devices in pairs]], way)
    assert (stage.recompute, stage.state) == (True, "sharded-optimizer")
    assert stage.spill == ("optimizer" if spill else "none")


SQUARE = """
kind: cluster
version: 1
name: square
devices:
  card: {compute: 100 TFLOP/s, memory: 16 GB, memory_bandwidth: 1000 GB/s}
hosts:
  a: {region: east, devices: {card: 2}, nic: 1 Gbit/s}
  b: {region: east, devices: {card: 2}, nic: 1 Gbit/s}
  c: {region: west, devices: {card: 2}, nic: 1 Gbit/s}
  d: {region: west, devices: {card: 2}, nic: 1 Gbit/s}
links:
  - {between: [east, west], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [east, east], bandwidth: 10 Gbit/s, latency: 1 ms}
  - {between: [west, west], bandwidth: 10 Gbit/s, latency: 1 ms}
  - {between: [a, c], bandwidth: 100 Mbit/s, latency: 1 ms}
"""


@pytest.mark.parametrize(
    ("state", "rows"),
    [
        ("replicated", [["a/card/0", "a/card/1", "c/card/0"]]),
        ("sharded-all", [["a/card/0 a/card/1", "b/card/0 b/card/1"]]),
        ("replicated", [["a/card/0", "b/card/0", "c/card/0"], ["d/card/0"]]),
    ],
    ids=["a tree takes less", "groups gather once", "others close the ring"],
)
def test_syncs_that_a_lane_knows_nothing_of(state: State, rows: list[list[str]]) -> None:
    """Each once had a bound above what the simulator says."""
    graph = chain(6, width=1024, rows=1, heads=2)
    task = problem(parse_cluster(SQUARE), graph, batch=12)
    lanes, shares = LaneMaker(task, MemoryFit(task)), 12 // sum(map(len, rows))
    made = [Lane((tuple((tuple(group.split()), shares) for group in row),), (0,), (False,)) for row in rows]
    layout = lanes.layout(made, LaneOptions(1, 0, state))
    for how in dict.fromkeys(how for how, _ in ways(task, layout)):
        seconds = task.price(lanes_plan(task, layout, how)).price.step_seconds
        assert 0.0 < max(lane.least for lane in layout.lanes) <= seconds < float("inf")


@settings(max_examples=25)
@given(clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 2**16))
def test_completed_lanes_are_plans(cluster: Cluster, graph: BlockGraph, batch: int, seed: int) -> None:
    """Every sample is in one lane, every stage of a lane has all of that lane's; the plan keeps every rule."""
    task, random = problem(cluster, graph, batch), Random(seed)
    lanes, bundles = LaneMaker(task, MemoryFit(task)), all_bundles(task)
    for _ in range(3):
        parts, options = random_parts(bundles, random), random_options(task, random)
        options = options._replace(state="sharded-optimizer" if options.state == "sharded-all" else options.state)
        layout = lanes.complete(parts, options)
        if len(parts) > batch // options.micro_batches:
            assert layout is None
        if layout is None:
            continue
        assert 1 <= len(layout.lanes) <= len(parts)
        assert sum(lane.samples for lane in layout.lanes) == batch // options.micro_batches
        for lane in layout.lanes:
            assert {sum(share for _, share in stage) for stage in lane.stages} == {lane.samples}
            assert len(lane.stages) == len(lane.firsts) == len(lane.recompute) and lane.firsts[0] == 0
        candidate = task.price(lanes_plan(task, layout))
        assert candidate.price.step_seconds * (1 + 1e-9) >= lower_bound(task)
        if not candidate.price.impossible:
            keeps_rules(candidate.plan, task)


def test_what_no_part_can_hold_is_none() -> None:
    task = problem(two_regions("0.7 GB"), chain(6, width=4096))
    assert LaneMaker(task, MemoryFit(task)).complete([all_bundles(task)], LaneOptions(24)) is None
    assert LaneMaker(task, MemoryFit(task)).complete([], LaneOptions(24)) is None


def alike(one: Plan, other: Plan) -> bool:
    """Whether plans differ in nothing but the sizes of their buckets."""
    bare, synced = zip(*((replace(pipeline(plan), syncs=()), _synced(plan)) for plan in (one, other)), strict=True)
    return bare[0] == bare[1] and synced[0] == synced[1]


def _synced(plan: Plan) -> set[tuple[str, tuple[str, ...]]]:
    return {(name, sync.participants) for sync in pipeline(plan).syncs for name in sync.parameters}


def pipeline(plan: Plan) -> Pipeline:
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    return part


def test_a_lane_for_each_device_is_data_parallelism() -> None:
    task = problem(two_regions(), chain(8, width=256))
    shares = [(("a/quick/0",), 4), (("a/quick/1",), 3), (("b/slow/2",), 1)]
    layout = LaneMaker(task, MemoryFit(task)).layout(
        [Lane(((pair,),), (0,), (False,)) for pair in shares], LaneOptions(3)
    )
    assert alike(lanes_plan(task, layout), make_plan(task, build_stages(task, [0], [shares], StageOptions()), 3))


def test_one_lane_is_a_pipeline() -> None:
    task = problem(two_regions(), chain(8, width=256))
    stages = (((("a/quick/0",), 2), (("a/quick/1",), 1)), ((("b/slow/1",), 3),))
    for again in (False, True):
        layout = LaneMaker(task, MemoryFit(task)).layout([Lane(stages, (0, 5), (again, again))], LaneOptions(8, 2))
        assert alike(lanes_plan(task, layout), staged_plan(task, Staged(stages, 8, 2), [0, 5], StageOptions(again)))


def test_lanes_cut_apart_end_stages_wherever_one_ends() -> None:
    """A device of one lane holds several of the plan's stages, which take no time to pass between: they are a run."""
    task = problem(two_regions(), chain(8, width=256))
    lane, deep = Lane((((("a/quick/0",), 3),),), (0,), (False,)), (((("b/slow/0",), 1),), ((("b/slow/1",), 1),))
    layout = LaneMaker(task, MemoryFit(task)).layout([lane, Lane(deep, (0, 3), (False, True))], LaneOptions(6))
    plan = lanes_plan(task, layout)
    stages = pipeline(plan).stages
    assert [(stage.first, stage.last, stage.recompute) for stage in stages] == [
        ("embed", "h.2", False),
        ("h.3", "head", True),
    ]
    assert [[replica.share for replica in stage.replicas] for stage in stages] == [[3, 1], [3, 1]]
    keeps_rules(plan, task)


def test_samples_are_given_so_that_lanes_are_done_together() -> None:
    """Against all ways to give them to two lanes, by what a lane takes."""
    task = problem(two_regions(), chain(8, width=1024, rows=256), batch=96)
    lanes, bundles, options = LaneMaker(task, MemoryFit(task)), all_bundles(task), LaneOptions(1)
    layout = lanes.complete([bundles[:2], bundles[2:]], options)
    assert layout is not None
    one, two = layout.lanes

    def seconds(samples: int) -> float:
        pair = lanes.resized(one, samples, options), lanes.resized(two, 96 - samples, options)
        return max(lane.seconds for lane in pair)

    assert seconds(one.samples) <= 1.05 * min(map(seconds, range(1, 96)))
