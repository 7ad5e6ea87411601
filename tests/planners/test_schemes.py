"""The schemes against brute force over their own spaces, their bounds on random clusters, and known answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, pairwise, permutations, product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.errors import NoPlanError, PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Layout, Plan
from isthmus.plan.validate import check
from isthmus.planners.layout.build_plan import build_stages, make_plan, sync_messages
from isthmus.planners.layout.cuts import even_limits
from isthmus.planners.layout.layout_types import StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix, parse_fix
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.test_portfolio import devices_of, pipeline_of, problem, two_regions

HOSTS = """
kind: cluster
version: 1
name: hosts
devices:
  quick: {compute: 100 TFLOP/s, memory: MEMORY, memory_bandwidth: 1000 GB/s}
  slow: {compute: 40 TFLOP/s, memory: MEMORY, memory_bandwidth: 500 GB/s}
hosts:
  a: {region: east, devices: {quick: 2}, bandwidth: 50 GB/s, latency: 5 us, nic: 100 Gbit/s}
  b: {region: OTHER, devices: {KIND: 2}, bandwidth: 50 GB/s, latency: 5 us, nic: 100 Gbit/s}
links:
  - {between: [east, OTHER], bandwidth: LINK}
"""
WAYS = [StageOptions(recompute, state) for recompute in (False, True) for state in ("replicated", "sharded-optimizer")]
Row = Sequence[tuple[str, ...]]  # the replicas of one stage


def two_hosts(
    link: str = "10 Gbit/s, latency: 1 ms", kind: str = "quick", other: str = "east", memory: str = "16 GB"
) -> Cluster:
    text = HOSTS.replace("LINK", link).replace("KIND", kind).replace("OTHER", other)
    return parse_cluster(text.replace("MEMORY", memory))


def best_of(task: Problem, plans: Iterator[Plan]) -> float:
    """Step seconds of the best of all plans that fit."""
    prices = [task.price(plan).price for plan in plans]
    return min(price.step_seconds for price in prices if price.fits)


def equal_plans(task: Problem, rows: Sequence[Row], firsts: Sequence[int]) -> Iterator[Plan]:
    """Equal shares for all replicas, in every micro-batch size that divides, held in every way."""
    share, batch = 1, task.job.batch
    while share * len(rows[0]) <= batch:
        if batch % (share * len(rows[0])) == 0:
            members = [[(group, share) for group in row] for row in rows]
            for way in WAYS if len(rows[0]) > 1 else WAYS[::2]:
                yield make_plan(task, build_stages(task, firsts, members, way), batch // (share * len(rows[0])))
        share += 1


def test_tensor_is_the_best_of_all_tensor_layouts() -> None:
    """Two hosts of two: groups of two on one host or both, or one group of all four over the link."""
    task = problem(two_hosts(), chain(6, width=1024, rows=64, heads=4), batch=8)
    a, b = (f"{host}/quick/" for host in "ab")
    one, other, four = (a + "0", a + "1"), (b + "0", b + "1"), (a + "0", a + "1", b + "0", b + "1")
    brute = best_of(task, (plan for row in ([one], [one, other], [four]) for plan in equal_plans(task, [row], [0])))
    choice = choose_plan(task, planner="tensor")
    assert choice.price.step_seconds == pytest.approx(brute)
    assert all(len(replica.devices) > 1 for replica in pipeline_of(choice).stages[0].replicas)


def test_tensor_groups_do_not_span_hosts() -> None:
    """Four hosts with one device each, and a model that fits on no one of them: groups over hosts cannot be run."""
    text = HOSTS.replace("MEMORY", "1.3 GB").split("hosts:")[0] + (
        "hosts:\n  h[1-4]: {region: r, devices: {quick: 1}, nic: 100 Gbit/s}\n"
        "links:\n  - {between: [r, r], bandwidth: 100 Gbit/s, latency: 10 us}\n"
    )
    task = problem(parse_cluster(text), chain(6, width=2900, heads=4), batch=4)
    with pytest.raises(NoPlanError, match="no plan of the scheme tensor can run"):
        choose_plan(task, planner="tensor")
    choice = choose_plan(task)
    assert choice.schemes["tensor"] is None and choice.schemes["data-even"] is None
    assert all(len(replica.devices) == 1 for stage in pipeline_of(choice).stages for replica in stage.replicas)


def test_fsdp_is_the_best_of_all_states_and_units() -> None:
    """Units of any number of blocks: the few sizes that are tried lose next to nothing."""
    task = problem(two_hosts(), chain(12, width=1600, rows=32), batch=16)
    sets = [list(task.usable), *([f"{host}/quick/{i}" for i in range(2)] for host in "ab")]
    layouts: tuple[Layout, ...] = ("sharded-all", "sharded-optimizer")

    def plans() -> Iterator[Plan]:
        for devices, count, state, recompute in product(sets, (1, 2, 4, 8), layouts, (False, True)):
            if 16 // count % len(devices):
                continue
            members = [[((device,), 16 // count // len(devices)) for device in devices]]
            for blocks in (1, 2, 3, 4, 6, 12) if state == "sharded-all" else (3,):
                stages = build_stages(task, [0], members, StageOptions(recompute, state))
                yield make_plan(task, stages, count, bucket=(blocks - 0.5) * 2 * 1600**2 * task.table.width)

    choice = choose_plan(task, planner="fsdp")
    assert choice.price.step_seconds <= 1.01 * best_of(task, plans())


def uneven(graph: BlockGraph) -> BlockGraph:
    """Every block with a work of its own: no two cuts are equally balanced."""
    random = Random(1)
    blocks = [(block, random.uniform(0.7, 1.3)) for block in graph.blocks]
    return replace(
        graph,
        blocks=tuple(
            replace(block, forward_flops=block.forward_flops * part, backward_flops=block.backward_flops * part)
            for block, part in blocks
        ),
    )


def test_region_is_the_best_of_all_chains_and_rows() -> None:
    """Each region alone, or both in either order, each as one stage or two; the cut is the most balanced one."""
    graph = uneven(chain(8, width=512, rows=16, heads=0))
    task = problem(two_hosts("1 Gbit/s, latency: 5 ms", other="west"), graph, batch=16)
    rows = {
        host: [[[(f"{host}/quick/{i}",) for i in range(2)]], [[(f"{host}/quick/{i}",)] for i in range(2)]]
        for host in "ab"
    }
    chains: list[list[Row]] = [stages for host in "ab" for stages in rows[host]]
    chains += [[*one, *other] for x, y in ("ab", "ba") for one, other in product(rows[x], rows[y])]

    def plans() -> Iterator[Plan]:
        for stages, count, way in product(chains, (1, 2, 4, 8, 16), WAYS):
            size = 16 // count
            members = [[(group, size // len(row)) for group in (row if size > 1 else row[:1])] for row in stages]
            members = [[(group, max(1, share)) for group, share in row] for row in members]
            firsts = most_balanced(task, members, way)
            for ahead in (0, 2) if len({row[0][0][0] for row in stages}) > 1 else (0,):
                yield make_plan(task, build_stages(task, firsts, members, way), count, ahead=ahead)

    choice = choose_plan(task, planner="region")
    assert choice.price.step_seconds == pytest.approx(best_of(task, plans()))


def most_balanced(
    task: Problem, members: Sequence[Sequence[tuple[tuple[str, ...], int]]], way: StageOptions
) -> list[int]:
    """Of all cuts the one whose slowest stage is fastest."""
    times = [task.block_seconds(*task.replica_kind(row[0][0]), row[0][1]) for row in members]
    rows = [forward * (2 if way.recompute else 1) + backward for forward, backward in times]
    blocks = len(task.graph.blocks)
    cuts = ([0, *inner] for inner in combinations(range(1, blocks), len(members) - 1))
    return min(
        cuts, key=lambda cut: max(row[a:b].sum() for row, (a, b) in zip(rows, pairwise((*cut, blocks)), strict=True))
    )


def test_classes_are_the_best_of_all_even_pipelines() -> None:
    """Two classes of two devices: any number of stages of each, any tensor degrees and replicas, either order."""
    task = problem(two_hosts(kind="slow"), chain(14, width=512, rows=64, heads=2), batch=8)
    single = {"a": [("a/quick/0",), ("a/quick/1",)], "b": [("b/slow/0",), ("b/slow/1",)]}
    pair = {host: [tuple(device for (device,) in groups)] for host, groups in single.items()}

    def stages_of(host: str, replicas: int) -> Iterator[list[Row]]:
        """All ways to have stages of so many replicas on a host."""
        for groups in (single[host], pair[host]):
            for count in range(1, len(groups) // replicas + 1):
                yield [groups[s * replicas : (s + 1) * replicas] for s in range(count)]

    def plans() -> Iterator[Plan]:
        for replicas in (1, 2):
            own = {host: list(stages_of(host, replicas)) for host in "ab"}
            chains = [rows for host in "ab" for rows in own[host]]
            chains += [[*one, *other] for x, y in permutations("ab") for one, other in product(own[x], own[y])]
            for rows in chains:
                layers = 12 // len(rows)  # the embedding goes with the first of them, the head with the last
                yield from equal_plans(task, rows, [0, *(1 + s * layers for s in range(1, len(rows)))])

    choice = choose_plan(task, planner="classes")
    assert choice.price.step_seconds == pytest.approx(best_of(task, plans()))


@pytest.mark.parametrize("degrees", ["tp=2,pp=2,dp=1", "tp=1,pp=2,dp=2", "tp=1,pp=4,dp=1", "tp=2,pp=1,dp=2"])
def test_on_equal_devices_classes_are_not_worse_than_any_even_grid(degrees: str) -> None:
    task = problem(two_hosts(), chain(10, width=512, rows=64), batch=16)
    grid = choose_plan(task, fix=parse_fix(degrees))
    assert choose_plan(task, planner="classes").price.step_seconds <= grid.price.step_seconds * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=7))
def test_even_limits_are_those_of_the_most_even_cuts(weights: list[float]) -> None:
    for stages, limit in enumerate(even_limits(np.array(weights)), 1):
        cuts = [[0, *inner, len(weights)] for inner in combinations(range(1, len(weights)), stages - 1)]
        assert limit == pytest.approx(min(max(sum(weights[a:b]) for a, b in pairwise(cut)) for cut in cuts))


@settings(max_examples=12)
@given(st.data(), clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 7))
def test_bounds_hold_on_random_clusters(
    data: st.DataObject, cluster: Cluster, graph: BlockGraph, batch: int, first: int
) -> None:
    """Of every idea and version, also over relays; and what can run at all keeps every rule."""
    task = problem(cluster, graph, batch, sparsity=data.draw(st.sampled_from((None, None, 0.5))))
    bound, memory = lower_bound(task), MemoryFit(task)
    relayed = task.with_relays
    for scheme in SCHEMES.values():
        ideas = list(scheme(relayed, memory, Fix()))
        for idea in ideas[first :: max(1, len(ideas) // 8)]:
            for version in idea.versions():
                plan = version.make()
                price = task.price(plan).price
                seconds = price.step_seconds * (1 + 1e-9)
                assert seconds >= version.seconds and seconds >= idea.seconds and seconds >= bound
                if not price.impossible:
                    keeps_rules(plan, task)


def keeps_rules(plan: Plan, task: Problem) -> None:
    """All rules but one: whether hosts can talk is not for every member of a group the same as for its first."""
    try:
        check(plan, task.cluster, {"job": task.graph})
    except PlanError as broken:
        assert broken.rule == "reachable"


def test_fsdp_fits_where_data_does_not() -> None:
    """Eight equal cards of one host, and a model that none of them can hold alone."""
    text = "kind: cluster\nversion: 1\nname: box\nhosts:\n  box: {region: r, devices: {A100-40GB: 8}}\n"
    task = problem(parse_cluster(text), chain(34, width=7000, rows=128), batch=16)
    choice = choose_plan(task, planner="fsdp")
    assert choice.schemes["data"] is None and choice.schemes["data-even"] is None
    assert {stage.state for stage in pipeline_of(choice).stages} == {"sharded-all"}
    assert len(devices_of(choice)) == 8 and sync_messages(choice.plan) > 0


def test_region_beats_data_over_a_slow_link() -> None:
    """Much work and many weights, small activations: a pipeline of both regions is faster than one region alone."""
    text = HOSTS.replace("LINK", "5 Gbit/s, latency: 20 ms").replace("OTHER", "west").replace("KIND", "quick")
    cluster = parse_cluster(text.replace("MEMORY", "16 GB").replace("100 TFLOP/s", "10 TFLOP/s"))
    choice = choose_plan(problem(cluster, chain(10, width=4096, rows=1), batch=8192), planner="region")
    rivals = [choice.schemes["data"], choice.schemes["data-even"]]
    assert all(seconds is not None and choice.price.step_seconds < 0.7 * seconds for seconds in rivals)
    assert {device[0] for device in devices_of(choice)} == {"a", "b"}


def test_classes_use_unequal_kinds_in_unequal_numbers() -> None:
    """Neither kind alone has room for the model: stages of both, the slow kind with a tensor group or none."""
    task = problem(two_hosts(kind="slow", memory="1.6 GB"), chain(14, width=2700, rows=64, heads=2), batch=16)
    choice = choose_plan(task, planner="classes")
    assert {device[0] for device in devices_of(choice)} == {"a", "b"}
    assert choice.schemes["data"] is None


def test_schemes_that_do_not_apply_say_what_they_need() -> None:
    whole = problem(two_hosts(), chain(6, heads=0))
    assert not list(SCHEMES["tensor"](whole, MemoryFit(whole), Fix())) and not list(
        SCHEMES["region"](whole, MemoryFit(whole), Fix())
    )
    choice = choose_plan(whole)
    assert choice.schemes["tensor"] is None and choice.schemes["region"] is None
    with pytest.raises(NoPlanError, match=r"scheme region can run.*two or more regions.*another --planner"):
        choose_plan(whole, planner="region")
    with pytest.raises(NoPlanError, match=r"scheme tensor can run.*blocks that can be split"):
        choose_plan(whole, planner="tensor")


def test_sharded_state_of_pruned_jobs_sends_all_values() -> None:
    task = problem(two_regions(), chain(6, width=256), sparsity=0.5)
    for idea in islice(SCHEMES["fsdp"](task, MemoryFit(task), Fix()), 8):
        plan = idea.versions()[0].make()
        check(plan, task.cluster, {"job": task.graph})
