"""Ends of stages that all replicas compute alike: the plans keep every rule, and are taken where they pay."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Plan
from isthmus.plan.validate import check
from isthmus.planners.layout.build_plan import build_stages, make_plan, only_pipeline
from isthmus.planners.layout.layout_types import StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.search.duplicates import duplicated, with_duplicates
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.random_layouts import random_lanes, random_options
from tests.planners.test_bound import synced
from tests.planners.test_portfolio import problem
from tests.planners.test_schemes import keeps_rules

FAR = """
kind: cluster
version: 1
name: far
hosts:
  a: {region: east, devices: {V100-16GB: 1}}
  b: {region: west, devices: {V100-16GB: 1}}
links:
  - {between: [east, west], bandwidth: 2 Gbit/s, latency: 1 ms}
"""


@settings(max_examples=60)
@given(clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 2**16))
def test_plans_keep_every_rule_and_the_bound(cluster: Cluster, graph: BlockGraph, batch: int, seed: int) -> None:
    random = Random(seed)
    if random.random() < 0.6:
        graph = chain(random.randint(3, 8), width=1024, rows=random.choice((1, 8)), tied=random.random() < 0.3)
    task = problem(cluster, graph, batch, sparsity=random.choice((None, None, 0.5)))
    bound, lanes = lower_bound(task), LaneMaker(task, MemoryFit(task))
    options = random_options(task, random)
    layout = lanes.layout(random_lanes(task, random, options, pairs=True), options)
    plan = synced(task, lanes_plan(task, layout, random.choice(("ring", "tree"))), random)
    for changed in with_duplicates(task, plan):
        keeps_rules(changed, task)
        assert bound <= task.price(changed).price.step_seconds * (1 + 1e-9)
        for again in with_duplicates(task, changed):
            keeps_rules(again, task)


def wide_embedding() -> BlockGraph:
    """A table of 64 MB whose outputs are few, before blocks that compute much and pass much on."""
    graph = chain(6, width=256, rows=256)
    table = replace(graph.parameter["embed.weight"], elements=16_000_000, shape=(62_500, 256))
    parameters = tuple(table if parameter.name == table.name else parameter for parameter in graph.parameters)
    blocks = [
        replace(block, forward_flops=30 * block.forward_flops, backward_flops=30 * block.backward_flops)
        for block in graph.blocks[1:]
    ]
    times = {-1: 1.0, 0: 1 / 64}  # of the inputs, of what the table gives; of the others 8
    tensors = [replace(tensor, elements=tensor.elements * times.get(tensor.source, 8.0)) for tensor in graph.tensors]
    return replace(graph, parameters=parameters, blocks=(graph.blocks[0], *blocks), tensors=tuple(tensors))


def test_a_large_table_is_computed_by_everyone() -> None:
    """Half a second to sync the table, or milliseconds for the gradients of its outputs."""
    task = problem(parse_cluster(FAR), wide_embedding(), 64, precision="fp32")
    choice = choose_plan(task)
    part = only_pipeline(choice.plan)
    alike = [sync for sync in part.syncs if sync.how == "duplicate"]
    assert len(alike) == 1 and "embed.weight" in alike[0].parameters
    assert [replica.share for replica in part.stages[0].replicas] == [64 // part.micro_batches] * 2
    best = min(seconds for seconds in choice.schemes.values() if seconds is not None)
    assert choice.price.step_seconds < 0.8 * best


def test_the_rest_of_a_bucket_stays_as_it_is() -> None:
    task = problem(parse_cluster(FAR), wide_embedding(), 64, precision="fp32")
    plan = both(task)
    changed = duplicated(task, plan, 0, 0, 1)
    check(changed, task.cluster, {"job": task.graph})
    before = {name for sync in only_pipeline(plan).syncs for name in _names(task, sync.parameters)}
    after = {name for sync in only_pipeline(changed).syncs for name in _names(task, sync.parameters)}
    assert before == after
    assert [stage.first for stage in only_pipeline(changed).stages] == ["embed", "h.1"]
    again = duplicated(task, changed, 1, 5, 6)
    check(again, task.cluster, {"job": task.graph})
    assert [sync.how for sync in only_pipeline(again).syncs].count("duplicate") == 2


def both(task: Problem) -> Plan:
    """The whole model on both devices, one bucket."""
    members = [[((device,), 32) for device in task.usable]]
    return make_plan(task, build_stages(task, [0], members, StageOptions()), 1, bucket=1e12)


def _names(task: Problem, words: tuple[str, ...]) -> list[str]:
    blocks = {f"[{block.name}]": block.parameters for block in task.graph.blocks}
    return [name for word in words for name in blocks.get(word, (word,))]


@pytest.mark.parametrize("tied", [False, True])
def test_what_other_blocks_use_is_not_duplicated(tied: bool) -> None:
    graph = chain(6, width=256, rows=1, tied=tied)
    task = problem(parse_cluster(FAR), graph, 4, precision="fp32")
    found = [only_pipeline(plan).stages for plan in with_duplicates(task, both(task))]
    assert any(stages[0].last == "embed" for stages in found) is not tied
