"""Shares inside a stage against brute force."""

from __future__ import annotations

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.planners.layout.stage_shares import Sharing
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.test_portfolio import problem, two_regions


@settings(max_examples=30)
@given(clusters(), graphs(), st.integers(1, 7), st.integers(0, 2**16))
def test_shares_are_the_best_of_all_shares(cluster: Cluster, graph: BlockGraph, samples: int, seed: int) -> None:
    """By the whole model's time; what a stage takes is what its slowest replica takes."""
    task, random = problem(cluster, graph), Random(seed)
    groups = [(device,) for device in random.sample(task.usable, min(len(task.usable), random.randint(1, 4)))]
    sharing = Sharing(task)

    def seconds(shares: tuple[int, ...]) -> float:
        pairs = zip(groups, shares, strict=True)
        return max(float(task.block_seconds(*task.replica_kind(group), n).sum()) for group, n in pairs if n)

    stage = dict(sharing.stage(groups, samples))
    shares = tuple(stage.get(group, 0) for group in groups)
    assert sum(shares) == samples and min(stage.values()) >= 1 and set(stage) <= set(groups)
    every = (option for option in product(range(samples + 1), repeat=len(groups)) if sum(option) == samples)
    assert seconds(shares) == pytest.approx(min(map(seconds, every)), rel=1e-12)
    shared = sharing.of(groups, samples)
    assert shared.seconds[:, -1].sum() == pytest.approx(seconds(shares))
    assert np.all(np.diff(shared.seconds) >= 0.0) and not shared.seconds[:, 0].any()
    for fact in {task.replica_kind(group) for group in groups}:
        own = [n for group, n in zip(groups, shares, strict=True) if task.replica_kind(group) == fact]
        assert max(own) - min(own) <= 1
        assert dict(shared.most).get(fact, 0) == max(own)


def test_equal_replicas_are_looked_up() -> None:
    """Which devices they are does not matter, only how many of which sort."""

    sharing = Sharing(problem(two_regions(), chain(6)))
    one = sharing.of([("b/slow/0",), ("a/quick/0",)], 8)
    assert sharing.of([("a/quick/1",), ("b/slow/2",)], 8) is one
    assert sharing.of([("a/quick/1",), ("b/slow/2",)], 9) is not one
