"""Cuts against brute force, and the memory that they are cut by against the simulator's."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.model.job import Job
from isthmus.planners.layout.build_plan import build_stages, make_plan
from isthmus.planners.layout.cuts import Parts, balanced_cut, pipeline_seconds, pipeline_times
from isthmus.planners.layout.layout_types import Need, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.problem import build_problem
from tests.plan.small_models import chain

seconds = st.floats(0.1, 10.0)


def cuts(blocks: int, stages: int) -> list[list[int]]:
    """All ways to cut blocks into stages, by their first blocks."""
    return [[0, *inner] for inner in combinations(range(1, blocks), stages - 1)]


@given(st.data(), st.integers(1, 4), st.integers(0, 5), st.booleans())
def test_balanced_cut_is_the_best_of_all_cuts(data: st.DataObject, stages: int, more: int, tight: bool) -> None:
    blocks = stages + more
    row = st.lists(seconds, min_size=blocks, max_size=blocks)
    weights = [np.array(r) for r in data.draw(st.lists(row, min_size=stages, max_size=stages))]
    bits = st.lists(st.booleans(), min_size=blocks * (blocks + 1), max_size=blocks * (blocks + 1))
    ordered = np.arange(blocks)[:, None] < np.arange(blocks + 1)
    fits = [
        ordered & (np.array(data.draw(bits)).reshape(blocks, -1) if tight else True)  # any runs, not only short ones
        for _ in range(stages)
    ]

    def slowest(firsts: list[int]) -> float:
        spans = list(pairwise((*firsts, blocks)))
        if not all(fits[s][a, b] for s, (a, b) in enumerate(spans)):
            return float("inf")
        return max(float(weights[s][a:b].sum()) for s, (a, b) in enumerate(spans))

    best = min(map(slowest, cuts(blocks, stages)))
    found = balanced_cut(weights, fits if tight else None)
    if best == float("inf"):
        assert found is None
    else:
        assert found is not None and slowest(found) == pytest.approx(best, rel=1e-9)


def test_the_best_cut_may_give_the_first_devices_less() -> None:
    """The second device is slow on the second block only: one block for the first device would be a trap."""
    weights = [np.array([1.0, 1.0, 1.0]), np.array([9.0, 10.0, 0.1])]
    assert balanced_cut(weights) == [0, 2]


CLUSTER = """
kind: cluster
version: 1
name: row
devices:
  new: {compute: {fp32: 10 TFLOP/s, bf16: 100 TFLOP/s}, memory: 16 GB, memory_bandwidth: 900 GB/s}
  old: {compute: {fp32: 10 TFLOP/s}, memory: 16 GB, memory_bandwidth: 900 GB/s}
hosts:
  a: {region: r, devices: {new: 4, old: 4}}
"""


@settings(max_examples=60)
@given(st.data(), st.booleans(), st.sampled_from([None, 0.75]), st.integers(1, 6), st.integers(1, 3))
def test_estimated_memory_is_what_the_simulator_says(
    data: st.DataObject, tied: bool, sparsity: float | None, count: int, dp: int
) -> None:
    """A little less at most: the estimate leaves out nothing but large buckets, and what is gathered with them."""
    graph = chain(6, tied=tied, width=512)
    job = Job(name="job", model="m", batch=count * dp * 3, precision="bf16", mixed=True, sparsity=sparsity)
    problem = build_problem(parse_cluster(CLUSTER), (job,), {"job": graph})
    stages = data.draw(st.integers(1, 4 // dp if dp < 3 else 1))
    firsts = data.draw(st.sampled_from(cuts(6, stages)))
    kind, recompute = data.draw(st.sampled_from(["new", "old"])), data.draw(st.booleans())
    sharded = ["sharded-optimizer", "sharded-all"] if stages == 1 or not tied else ["sharded-optimizer"]
    way = StageOptions(recompute, data.draw(st.sampled_from(["replicated", *sharded])) if dp > 1 else "replicated")
    devices = [f"a/{kind}/{i}" for i in range(stages * dp)]
    members = [[((d,), 3) for d in devices[s * dp : (s + 1) * dp]] for s in range(stages)]
    price = problem.price(make_plan(problem, build_stages(problem, firsts, members, way), count)).price
    memory = MemoryFit(problem)
    for s, (a, b) in enumerate(pairwise((*firsts, 6))):
        need = Need(tuple(d for (d,), _ in members[s]), 1, dp, 3, min(stages - s, count))
        estimate = float(memory.filled(need, way)[a, b]) * 16e9
        real = max(price.memory[d] for (d,), _ in members[s])
        assert estimate <= real * (1 + 1e-9)
        gathered = 2 * (4 + 4 + 4) if way.state == "sharded-all" else 0  # weights, gradients and a copy, twice
        assert estimate >= real - (2 * 4 + gathered) * graph.elements, "buckets are no larger than all gradients"


@given(st.lists(seconds, min_size=1, max_size=5), st.integers(1, 9))
def test_pipeline_seconds_is_not_above_what_any_order_needs(stages: list[float], micro_batches: int) -> None:
    """Filling and draining, a third forward and the rest backward, without messages."""
    forward = np.zeros((micro_batches, len(stages)))
    for m in range(micro_batches):
        for s, cost in enumerate(stages):
            ready = max(forward[m, s - 1] if s else 0.0, forward[m - 1, s] if m else 0.0)
            forward[m, s] = ready + cost / 3
    backward = np.zeros_like(forward)
    for m in range(micro_batches):
        for s in reversed(range(len(stages))):
            after = backward[m, s + 1] if s + 1 < len(stages) else forward[m, s]
            ready = max(after, backward[m - 1, s] if m else forward[-1, s])
            backward[m, s] = ready + stages[s] * 2 / 3
    rows, hops, let_in = np.array(stages), np.zeros(len(stages) - 1), np.arange(len(stages), 0, -1)
    assert pipeline_seconds(rows, rows, hops, let_in, micro_batches) <= backward.max() * (1 + 1e-9)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32 - 1))
@np.errstate(invalid="ignore")  # infinity less infinity, where stages cannot talk
def test_pipeline_times_are_those_of_the_formulas(stages: int, m: int, seed: int) -> None:
    """The same maths over whole arrays, as the docstrings state it."""
    draw = np.random.default_rng(seed)
    least, extra, start = draw.random((3, stages))
    links, let_in = draw.random((5, stages - 1)), np.sort(draw.integers(1, 9, stages))[::-1].copy()
    there, home, latency, message, total = links
    there *= draw.random(stages - 1) < 0.9  # now and then nothing is sent
    latency[draw.random(stages - 1) < 0.1] = np.inf  # or nothing can be
    ends, gathers = draw.random((stages, 3)), draw.random(stages) < 0.5
    most, back = least + extra, least + extra / 2
    crossings = np.ascontiguousarray(np.array((latency, message, total)).T)
    parts = Parts(most, least, start, back, there.copy(), home.copy(), crossings, let_in, ends)

    hops = np.append(2 * latency + message * (there + home), 0.0)
    way = np.append(0.0, np.cumsum(least + hops))
    around = extra + way[-1] - way[:-1]
    waits = (way[:-1] + np.maximum(m * most, -(-m // let_in) * around)).max()
    sending, travel, update = ends.T
    last = np.maximum(m * least + np.maximum(travel, gathers * sending / 2), (m - 1) * least + start + sending)
    crossed = (m * total * np.maximum(there, home)).max(initial=0.0)
    bound = max((m * most).max(), (last + update).max(), crossed)
    if there.all() and home.all():
        bound = max(bound, way[-1], waits) if way[-1] < np.inf else np.inf

    passing = np.append(there * total + home * total + 2 * latency, 0.0)
    trips = np.cumsum((most + passing)[::-1])[::-1]
    busiest = max((there * total).max(initial=0.0), (home * total).max(initial=0.0))
    end = trips[0] + (m - 1) * max(most.max(), (trips / np.minimum(let_in, m)).max(), busiest)
    before = np.append(0.0, np.cumsum(back[:-1] + home * total + latency))
    about = max(end, (end - before + np.maximum(0.0, sending + travel - 0.8 * back) + update).max())
    about = about if trips[0] < np.inf else np.inf
    np.testing.assert_allclose(pipeline_times(parts, ends, gathers, m), (bound, about), rtol=1e-12)
