"""Data parallelism over all devices with even shares, against the grid planner with all degrees pinned."""

from __future__ import annotations

import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.plan.types import Outcome
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.plain_ddp import everywhere
from tests.plan.small_models import chain
from tests.planners.test_budget import HOSTS
from tests.planners.test_portfolio import problem, two_regions


@pytest.mark.parametrize("batch", [20, 40])
def test_it_is_the_grid_with_one_replica_a_device(batch: int) -> None:
    for cluster in (two_regions(), parse_cluster(HOSTS)):
        task = problem(cluster, chain(6, width=256), batch=batch)
        pinned = choose_plan(task, planner="grid", fix=Fix(tp=1, pp=1, dp=len(task.usable)))
        found = everywhere(task)
        assert found is not None and found.state == "found" and found.devices == len(task.usable)
        assert found.seconds == pytest.approx(pinned.price.step_seconds, rel=0.01)  # other buckets


def test_it_is_never_faster_than_the_best_even_data_parallelism() -> None:
    choice = choose_plan(problem(two_regions(), chain(8, width=256)))
    assert choice.everywhere is not None and choice.everywhere.seconds is not None
    assert choice.schemes["data-even"] is not None
    assert choice.everywhere.seconds >= choice.schemes["data-even"]


def test_what_does_not_fit_says_where_memory_is_short() -> None:
    small = HOSTS.replace("16 GB", "1 MB")
    found = everywhere(problem(parse_cluster(small), chain(6, width=1024), batch=8))
    assert found is not None and found.state == "cannot run" and found.devices == 4
    assert found.reason is not None and "needs" in found.reason and "and has 1 MB" in found.reason


def test_fewer_samples_than_devices_are_not_priced() -> None:
    assert everywhere(problem(parse_cluster(HOSTS), chain(4), batch=2)) is None


def test_devices_that_hosts_without_a_link_keep_apart() -> None:
    text = HOSTS.replace("  - {between: [r, r], bandwidth: 10 Gbit/s, latency: 10 us}", "").replace("links:", "")
    found = everywhere(problem(parse_cluster(text), chain(4), batch=8))
    assert isinstance(found, Outcome) and found.state == "cannot run" and found.reason
