"""`exact` against plain enumeration: all forms are listed, bounds hold, and nothing that anybody lists is faster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import comb
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.planners.layout.device_groups import all_bundles
from isthmus.planners.layout.layout_types import Lane, LaneOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.shares import divisors
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.lower_bound import Borders, lower_bound
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.search.candidates import ways
from isthmus.planners.search.exact_enumeration import Sorts, forms
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.random_layouts import random_lanes, random_options
from tests.planners.test_portfolio import problem

ORDERINGS = (1, 1, 4, 23, 173)  # sets of rows of sets of so many things: OEIS A075729

THREE = """
kind: cluster
version: 1
name: three
devices:
  quick: {compute: 4 TFLOP/s, memory: 16 GB, memory_bandwidth: 1000 GB/s}
  slow: {compute: 1 TFLOP/s, memory: 16 GB, memory_bandwidth: 500 GB/s}
hosts:
  a: {region: east, devices: {quick: 1, slow: 1}, nic: 10 Gbit/s}
  b: {region: west, devices: {slow: 1}, nic: 1 Gbit/s}
links:
  - {between: [east, west], bandwidth: LINK}
"""


def three(link: str) -> Problem:
    cluster = parse_cluster(THREE.replace("LINK", link))
    return problem(cluster, chain(3, width=256, rows=64), batch=4)


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_every_form_is_listed_once(devices: int) -> None:
    """Of devices that are all different: some of them, as sets of rows of sets."""
    names = "".join(f"  h{i}: {{region: r, devices: {{A10: 1}}}}\n" for i in range(devices))
    links = "links:\n  - {between: [r, r], bandwidth: 10 Gbit/s, latency: 1 ms}\n"
    text = f"kind: cluster\nversion: 1\nname: apart\nhosts:\n{names}{links}"
    task = problem(parse_cluster(text), chain(8), batch=4)
    listed = [form.shapes for form in forms(Sorts(task, all_bundles(task)), float("inf"))]
    assert len(listed) == len({frozenset(shapes) for shapes in listed})
    assert len(listed) == sum(comb(devices, k) * ORDERINGS[k] for k in range(1, devices + 1))


def listed(task: Problem, devices: Sequence[str], options: LaneOptions) -> Iterator[list[Lane]]:
    """All lanes on all these devices, with all cuts and all shares, recomputing or not: written to be plain."""
    samples = task.job.batch // options.micro_batches
    for groups in partitions(list(devices)):
        for counts in shared(samples, len(groups)):
            yield from product_of([list(rows(task, group, n)) for group, n in zip(groups, counts, strict=True)])


def partitions(items: list[str]) -> Iterator[list[list[str]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for others in partitions(rest):
        yield [[first], *others]
        for i in range(len(others)):
            yield [*others[:i], [first, *others[i]], *others[i + 1 :]]


def ordered(items: list[str]) -> Iterator[list[list[str]]]:
    """Rows of sets."""
    if not items:
        yield []
    for size in range(1, len(items) + 1):
        for first in combinations(items, size):
            yield from ([list(first), *rest] for rest in ordered([item for item in items if item not in first]))


def rows(task: Problem, devices: list[str], samples: int) -> Iterator[Lane]:
    blocks = len(task.graph.blocks)
    for stages in ordered(devices):
        for inner in combinations(range(1, blocks), len(stages) - 1):
            for members in product_of([list(staged(stage, samples)) for stage in stages]):
                yield Lane(tuple(members), (0, *inner), (False,) * len(stages))


def staged(stage: list[str], samples: int) -> Iterator[tuple[tuple[tuple[str], int], ...]]:
    for shares in shared(samples, len(stage)):
        yield tuple(((device,), share) for device, share in zip(stage, shares, strict=True))


def shared(samples: int, parts: int) -> Iterator[list[int]]:
    if parts == 1:
        yield [samples]
        return
    for first in range(1, samples - parts + 2):
        yield from ([first, *rest] for rest in shared(samples - first, parts - 1))


def product_of(options: list[list]) -> Iterator[list]:  # type: ignore[type-arg]
    if not options:
        yield []
        return
    for first in options[0]:
        yield from ([first, *rest] for rest in product_of(options[1:]))


@pytest.mark.parametrize("link", ["10 Gbit/s, latency: 0.1 ms", "100 Mbit/s, latency: 5 ms", "1 Mbit/s, latency: 1 s"])
def test_nothing_that_can_be_listed_is_faster(link: str) -> None:
    task = three(link)
    choice, lanes, best = choose_plan(task, planner="exact"), LaneMaker(task, MemoryFit(task)), float("inf")
    for count in range(1, 4):
        for devices in combinations(task.usable, count):
            for micro_batches in divisors(task.job.batch):
                options = LaneOptions(micro_batches)
                for made in listed(task, devices, options):
                    layout = lanes.layout(made, options)
                    plans = [lanes_plan(task, layout, how, n) for how, n in ways(task, layout)]
                    best = min(best, *(task.price(plan).price.step_seconds for plan in plans))
    assert choice.price.step_seconds <= best * (1 + 1e-9)
    assert lower_bound(task) <= choice.price.step_seconds
    assert not any("budget" in note for note in choice.notes)


@settings(max_examples=40)
@given(clusters(), graphs(), st.sampled_from((4, 6, 24)), st.integers(0, 2**16))
def test_no_plan_is_below_its_form(cluster: Cluster, graph: BlockGraph, batch: int, seed: int) -> None:
    random = Random(seed)
    task = problem(cluster, graph, batch).with_relays  # as `exact` sees it
    lanes, sorts, borders = LaneMaker(task, MemoryFit(task)), Sorts(task, all_bundles(task, most=1000)), Borders(task)
    for _ in range(4):
        options = random_options(task, random)
        layout = lanes.layout(random_lanes(task, random, options), options)
        shapes = [shape_of(sorts, lane) for lane in layout.lanes]
        least = max(batch / sum(map(sorts.speed, shapes)), sorts.gradients(shapes), borders.seconds(layout.lanes))
        for how in dict.fromkeys(how for how, _ in ways(task, layout)):
            assert least <= task.price(lanes_plan(task, layout, how)).price.step_seconds * (1 + 1e-9)


def shape_of(sorts: Sorts, lane: Lane) -> tuple[tuple[int, ...], ...]:
    names = [members[0].groups[0][0].rpartition("/")[0] for members in sorts.sorts]
    return tuple(
        tuple(sum(group[0].rpartition("/")[0] == name for group, _ in stage) for name in names) for stage in lane.stages
    )


def test_without_the_time_nothing_is_proven() -> None:
    """Then the plan is no worse than those that were priced, and its notes say that the search was cut short."""
    task = three("10 Gbit/s, latency: 0.1 ms")
    choice = choose_plan(task, planner="exact", calls=8)
    rivals = [seconds for seconds in choice.schemes.values() if seconds is not None]
    assert choice.price.step_seconds <= min(rivals) and choice.calls <= 8
    assert any("budget" in note for note in choice.notes)
