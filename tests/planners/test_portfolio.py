"""The planners: every plan they return is valid, fits, and is no faster than the bound."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cost.memory import state_bytes
from isthmus.cost.simulate import Simulator
from isthmus.errors import NoPlanError, UsageError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.types import Pipeline
from isthmus.plan.validate import check
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.portfolio import PLANNERS, Choice, choose_plan
from isthmus.planners.problem import Problem, build_problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix, parse_fix
from tests.plan.small_models import chain

TWO_REGIONS = """
kind: cluster
version: 1
name: two
devices:
  quick: {compute: 100 TFLOP/s, memory: MEMORY, memory_bandwidth: 1000 GB/s}
  slow: {compute: 20 TFLOP/s, memory: MEMORY, memory_bandwidth: 400 GB/s}
hosts:
  a: {region: east, devices: {quick: 2}, nic: 100 Gbit/s}
  b: {region: west, devices: {slow: 3}, nic: 10 Gbit/s}
links:
  - {between: [east, west], bandwidth: 1 Gbit/s, latency: 20 ms}
"""


def two_regions(memory: str = "16 GB") -> Cluster:
    return parse_cluster(TWO_REGIONS.replace("MEMORY", memory))


def problem(cluster: Cluster, graph: BlockGraph, batch: int = 24, **fields: Any) -> Problem:
    job = Job(name="job", model="small:chain", batch=batch, **fields)
    return build_problem(cluster, (job,), {"job": graph})


def pipeline_of(choice: Choice) -> Pipeline:
    part = choice.plan.parts[0]
    assert isinstance(part, Pipeline)
    return part


def devices_of(choice: Choice) -> list[str]:
    return [d for stage in pipeline_of(choice).stages for replica in stage.replicas for d in replica.devices]


@pytest.mark.parametrize(("tied", "sparsity"), [(False, None), (True, None), (True, 0.5)])
def test_every_plan_of_every_scheme_is_valid_and_not_below_its_bounds(tied: bool, sparsity: float | None) -> None:
    """And the search, which leaves out what its bounds tell it to, finds the best of all of them."""
    task = problem(two_regions(), chain(6, tied=tied, width=256), batch=8, sparsity=sparsity)
    bound, memory = lower_bound(task), MemoryFit(task)
    for name, scheme in SCHEMES.items():
        fastest = float("inf")
        for idea in scheme(task, memory, Fix()):
            for version in idea.versions():
                plan = version.make()
                check(plan, task.cluster, {"job": task.graph})
                price = task.price(plan).price
                assert price.step_seconds * (1 + 1e-9) >= version.seconds >= idea.seconds * (1 - 1e-9) >= 0.0
                assert price.step_seconds * (1 + 1e-9) >= bound
                fastest = min(fastest, price.step_seconds) if price.fits else fastest
        assert choose_plan(task, planner=name).price.step_seconds == pytest.approx(fastest), name


@settings(max_examples=15)
@given(st.integers(3, 12), st.integers(1, 64), st.booleans(), st.sampled_from(PLANNERS))
def test_any_model_and_batch(blocks: int, batch: int, tied: bool, planner: str) -> None:
    batch = (
        max(batch, 2) if planner == "fsdp" else batch
    )  # state is sharded over two devices or more, each with samples
    task = problem(two_regions(), chain(blocks, tied=tied), batch)
    choice = choose_plan(task, planner=planner, calls=40)
    assert choice.price.fits
    assert choice.price.step_seconds >= choice.lower_bound * (1 - 1e-9)
    assert choice.calls <= 40
    again = Simulator(task.cluster, {"job": task.graph}).price(choice.plan)
    assert again.step_seconds == choice.price.step_seconds


def test_fixed_degrees_keep_auto_from_going_beyond_grid() -> None:
    choice = choose_plan(problem(two_regions(), chain(10, width=512)), fix=parse_fix("pp=2"))
    assert choice.planner == "grid" and choice.price.step_seconds == choice.schemes["grid"]


def test_shares_by_speed_beat_equal_shares_on_unequal_devices() -> None:
    """Two kinds on one host: equal shares wait for the slow card."""
    text = TWO_REGIONS.replace("{region: west,", "{region: east,").replace("[east, west]", "[east, east]")
    text = text.replace("1 Gbit/s, latency: 20 ms", "100 Gbit/s, latency: 5 us").replace("nic: 10 ", "nic: 100 ")
    task = problem(parse_cluster(text.replace("MEMORY", "16 GB")), chain(8, width=2048, rows=64), batch=240)
    memory = MemoryFit(task)
    everyone = [
        task.price(next(SCHEMES[name](task, memory, Fix())).versions()[0].make()).price.step_seconds
        for name in ("data-even", "data")
    ]
    assert everyone[1] < 0.6 * everyone[0]


def test_a_cluster_that_cannot_hold_the_model_says_how_many_bytes_are_missing_where() -> None:
    graph = chain(4, width=4096)
    needed = graph.elements * state_bytes("bf16", Job(name="j", model="m", batch=1).optimizer).total
    assert needed > 1e9
    with pytest.raises(NoPlanError) as caught:
        choose_plan(problem(two_regions("0.7 GB"), graph))
    text = str(caught.value)
    assert "none of the usual schemes fits in memory" in text
    assert "missing" in text
    assert "a/quick/0" in text or "b/slow/0" in text
    assert "GB" in text or "MB" in text


def test_regions_without_a_link_are_not_used_together() -> None:
    text = TWO_REGIONS.replace("links:\n  - {between: [east, west], bandwidth: 1 Gbit/s, latency: 20 ms}\n", "")
    choice = choose_plan(problem(parse_cluster(text.replace("MEMORY", "16 GB")), chain(8)))
    assert len({device.split("/")[0] for device in devices_of(choice)}) == 1


def test_fixed_degrees_are_kept() -> None:
    choice = choose_plan(problem(two_regions(), chain(8)), fix=parse_fix("tp=2,pp=1,dp=1,micro=4"))
    pipeline = pipeline_of(choice)
    assert [len(replica.devices) for replica in pipeline.stages[0].replicas] == [2]
    assert pipeline.micro_batches == 6


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=2,tp=2", "xp=2", "tp=-1", "tp=1.5", "", "tp=" + "9" * 5000])
def test_bad_fix(text: str) -> None:
    with pytest.raises(UsageError, match="tp=2,pp=4"):
        parse_fix(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp=8", "no 8 equal devices .* tp=8; .* tp at most 2"),
        ("tp=3", "cannot be split 3 ways.* tp=3; .* tp one of 1, 2"),
        ("pp=9", "too few blocks for pp=9.* pp at most 8"),
        ("dp=5", "dp=5 with micro=1 does not divide.* divisor of 24"),
        ("dp=2,micro=5", "micro=5 does not divide"),
        ("pp=3,dp=2", "needs 6 devices.* pp \\* dp at most 5"),
    ],
)
def test_degrees_that_no_layout_has(text: str, said: str) -> None:
    with pytest.raises(NoPlanError, match=said):
        choose_plan(problem(two_regions(), chain(8)), fix=parse_fix(text))


def test_same_calls_give_the_same_plan() -> None:
    plans = [choose_plan(problem(two_regions(), chain(9)), calls=50).plan for _ in range(2)]
    assert plans[0] == plans[1]


def test_several_jobs_are_refused_with_a_next_step() -> None:
    jobs = (Job(name="one", model="m", batch=1), Job(name="two", model="m", batch=1))
    with pytest.raises(UsageError, match="Plan each job"):
        build_problem(two_regions(), jobs, {"one": chain(4), "two": chain(4)})
