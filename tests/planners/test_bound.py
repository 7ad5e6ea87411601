"""The lower bound: below every plan, and above plain computing where links are too slow for far devices to help."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Plan
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.problem import Problem
from isthmus.planners.syncs.sync_options import make_offers
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.random_layouts import random_lanes, random_options
from tests.planners.test_portfolio import problem

TWO = """
kind: cluster
version: 1
name: two
devices:
  card: {{compute: 100 TFLOP/s, memory: 16 GB, memory_bandwidth: 1000 GB/s}}
hosts:
  a: {{region: east, devices: {{card: 3}}, nic: 400 Gbit/s}}
  b: {{region: west, devices: {{card: 1}}, nic: 400 Gbit/s}}
links:
  - {{between: [east, west], bandwidth: {link}}}
"""


def two(link: str) -> Problem:
    return problem(parse_cluster(TWO.format(link=link)), chain(6, width=1024, rows=64), batch=24)


def computing(task: Problem, devices: int) -> float:
    """Seconds of the batch on so many cards, perfectly divided."""
    return 24 * float(task.table.least("card", 24).sum()) / devices


def test_a_quick_link_leaves_computing_alone() -> None:
    task = two("400 Gbit/s, latency: 1 us")
    assert lower_bound(task) == pytest.approx(computing(task, 4), rel=1e-5)


def test_behind_a_hopeless_link_a_device_is_none() -> None:
    task = two("1 kbit/s, latency: 1 ms")
    assert lower_bound(task) == pytest.approx(computing(task, 3), rel=1e-3)


def test_a_latency_beyond_the_step_is_hopeless_too() -> None:
    task = two("10 Gbit/s, latency: 10 s")
    assert lower_bound(task) == pytest.approx(computing(task, 3), rel=1e-5)


def test_between_them_samples_pass_one_by_one() -> None:
    """Of T seconds the far device gets as many samples as pass in that time; the others earn the rest at home.

    The home's border is counted too, so twice as many: 24 c = 3 T + 2 c r T / thin, with c seconds a sample.
    """
    task = two("1 Mbit/s, latency: 1 us")
    each = computing(task, 1) / 24
    alone = 24 * each / (3 + 2 * each * 1e6 / 8 / task.thinnest)
    assert computing(task, 4) < alone < computing(task, 3)
    assert lower_bound(task) == pytest.approx(alone, rel=1e-4)


@settings(max_examples=60)
@given(clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 2**16))
def test_no_plan_is_below_it(cluster: Cluster, graph: BlockGraph, batch: int, seed: int) -> None:
    """Whatever the lanes are, and however their gradients are synced."""
    random = Random(seed)
    if random.random() < 0.6:
        graph = chain(random.randint(3, 8), width=1024, rows=random.choice((1, 8)), tied=random.random() < 0.3)
    task = problem(cluster, graph, batch, sparsity=random.choice((None, None, 0.5)))
    bound, lanes = lower_bound(task), LaneMaker(task, MemoryFit(task))
    assert bound >= 0.0
    for _ in range(4):
        options = random_options(task, random)
        layout = lanes.layout(random_lanes(task, random, options, pairs=True), options)
        plan = synced(task, lanes_plan(task, layout, random.choice(("ring", "tree"))), random)
        assert bound <= task.price(plan).price.step_seconds * (1 + 1e-9)


def synced(task: Problem, plan: Plan, random: Random) -> Plan:
    """The plan with any of the ways that each of its buckets could be synced in."""
    offers = make_offers(task, plan)
    return offers.planned([random.choice(tuple(offer.ways)) for offer in offers.offers])
