"""The compiled event engine against an exact slow twin, against closed forms, and against what fairness demands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cost import event_engine as engine
from tests.cost import reference
from tests.cost.task_graphs import Case, Graph, random_case, tied_case, twice


class Times(Protocol):
    start: np.ndarray
    sent: np.ndarray
    end: np.ndarray


Run = Callable[..., Times]

many = settings(max_examples=200)
some = settings(max_examples=50)
seeds = st.integers(0, 2**32 - 1)
contended = st.builds(
    random_case,
    seed=seeds,
    tasks=st.integers(1, 40),
    lanes=st.integers(1, 6),
    resources=st.integers(1, 8),
    decades=st.sampled_from([0.5, 2.0, 6.0]),
)


def tied(shortest: int) -> st.SearchStrategy[Case]:
    return st.builds(
        tied_case, seed=seeds, tasks=st.integers(1, 40), lanes=st.integers(1, 6), shortest=st.just(shortest)
    )


@pytest.fixture(params=[engine.run, reference.run], ids=["engine", "reference"])
def run(request: pytest.FixtureRequest) -> Run:
    """Closed forms judge the judge too."""
    return request.param


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


# The twin


@given(contended)
@many
def test_equals_the_reference(case: Case) -> None:
    found, expected = engine.run(*case), reference.run(*case)
    for name in ("start", "sent", "end"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=0, err_msg=name)


@given(tied(shortest=1))
@many
def test_ties_are_broken_by_task_number(case: Case) -> None:
    found, expected = engine.run(*case), reference.run(*case)
    for name in ("start", "sent", "end"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@given(tied(shortest=0))
@many
def test_zero_length_tasks_finish_in_a_further_round(case: Case) -> None:
    found, expected = engine.run(*case), reference.run(*case)
    for name in ("start", "sent", "end"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@given(contended)
@some
def test_same_input_gives_identical_bits(case: Case) -> None:
    first, second = engine.run(*case), engine.run(*case)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


@given(contended, st.sampled_from([2.0**-30, 2.0**30]))
@some
def test_no_time_or_size_is_special(case: Case, factor: float) -> None:
    """Everything slowed by one factor takes that factor longer: the engine has no absolute tolerance."""
    tasks, lanes, network = case
    slower = (
        tasks._replace(seconds=tasks.seconds * factor),
        lanes,
        network._replace(latency=network.latency * factor, capacity=network.capacity / factor),
    )
    bigger = (
        tasks._replace(bytes=tasks.bytes * factor),
        lanes,
        network._replace(capacity=network.capacity * factor),
    )
    plain = engine.run(*case)
    np.testing.assert_allclose(engine.run(*slower).end, plain.end * factor, rtol=1e-9, atol=0)
    np.testing.assert_allclose(engine.run(*bigger).end, plain.end, rtol=1e-9, atol=0)


@given(contended)
@some
def test_equal_parts_get_identical_times(case: Case) -> None:
    """Symmetry survives rounding: what is equal happens at the same instant, to the bit."""
    single, double = engine.run(*case), engine.run(*twice(case))
    for alone, both in zip(single, double, strict=True):
        np.testing.assert_array_equal(both[0::2], both[1::2])
        np.testing.assert_allclose(both[0::2], alone, rtol=1e-9, atol=0)


# What fairness demands


def resources_of(case: Case, message: int) -> frozenset[int]:
    return frozenset(int(r) for r in case.network.resources[case.tasks.route[message]] if r >= 0)


@given(contended)
@some
def test_reference_rates_are_max_min_fair(case: Case) -> None:
    """Exactly: no resource above capacity, and every message has a full resource on which no other is faster.

    The second is the known characterisation of the one max-min fair allocation (Bertsekas and Gallager, 6.5.2).
    """
    for _, _, rates in reference.run(*case).intervals:
        uses = {message: resources_of(case, message) for message in rates}
        load = {c: sum(rates[m] for m in rates if c in uses[m]) for c in range(len(case.network.capacity))}
        fastest = {c: max((rates[m] for m in rates if c in uses[m]), default=0) for c in load}
        full = {c for c in load if load[c] == Fraction(float(case.network.capacity[c]))}
        assert all(load[c] <= Fraction(float(case.network.capacity[c])) for c in load)
        assert all(any(c in full and fastest[c] == rates[m] for c in uses[m]) for m in rates)


@given(contended)
@some
def test_reference_rates_carry_every_byte(case: Case) -> None:
    carried: dict[int, Fraction] = {}
    for begin, end, rates in reference.run(*case).intervals:
        for message, rate in rates.items():
            carried[message] = carried.get(message, Fraction(0)) + rate * (end - begin)
    tasks = case.tasks
    limited = [m for m in range(len(tasks.route)) if tasks.route[m] >= 0 and tasks.bytes[m] and resources_of(case, m)]
    assert carried == {m: Fraction(float(tasks.bytes[m])) for m in limited}


@given(contended)
@some
def test_engine_times_carry_every_byte_at_fair_rates(case: Case) -> None:
    """Who sends when is read off the engine's own times; at fair rates exactly every message's bytes must get through.

    With max-min fair rates no resource is above capacity and none idles while a message could use it.
    """
    times = engine.run(*case)
    senders = [m for m in range(len(times.end)) if times.sent[m] > times.start[m] and case.tasks.route[m] >= 0]
    uses = {m: resources_of(case, m) for m in senders}
    capacity = dict(enumerate(case.network.capacity))
    carried = dict.fromkeys(senders, 0.0)
    instants = np.unique([times.start[senders], times.sent[senders]])
    for begin, end in itertools.pairwise(instants):
        active = {m: uses[m] for m in senders if times.start[m] <= begin and end <= times.sent[m]}
        for message, rate in reference.fair_rates(active, capacity).items():
            carried[message] += rate * (end - begin)
    slack = 1e-12 * instants.max(initial=0.0) * max(capacity.values())  # rounding of the instants
    np.testing.assert_allclose(list(carried.values()), case.tasks.bytes[senders], rtol=1e-9, atol=slack)


@given(contended)
@some
def test_tasks_wait_and_lanes_are_serial_and_busy(case: Case) -> None:
    times, tasks = engine.run(*case), case.tasks
    ready = np.zeros(len(times.start))
    np.maximum.at(ready, tasks.after, times.end[tasks.before])
    assert (times.start >= ready).all()
    assert (times.start[tasks.lane < 0] == ready[tasks.lane < 0]).all()
    for lane in range(case.lanes):
        mine = sorted(np.flatnonzero(tasks.lane == lane), key=lambda task: (times.start[task], times.sent[task]))
        free = 0.0
        for task in mine:
            assert times.start[task] == max(free, ready[task])
            free = times.sent[task]


# Closed forms


def test_lane_serialises_in_task_order(run: Run) -> None:
    graph = Graph()
    for seconds in (3.0, 1.0, 2.0):
        graph.fixed(seconds, lane=0)
    times = run(*graph.case())
    close(times.start, [0, 3, 4])
    close(times.end, [3, 4, 6])


def test_many_ready_at_once_queue_by_number(run: Run) -> None:
    graph = Graph()
    gate = graph.fixed(1.0)
    waiting = [graph.fixed(1.0, lane=0) for _ in range(150)]
    for task in np.random.default_rng(0).permutation(waiting).tolist():
        graph.edge(gate, task)
    close(run(*graph.case()).start[waiting], np.arange(1, 151))


def test_lane_serves_who_was_ready_first(run: Run) -> None:
    graph = Graph()
    late = graph.fixed(2.0)
    last = graph.fixed(1.0, lane=0, after=[late])
    early = graph.fixed(1.0)
    middle = graph.fixed(1.0, lane=0, after=[early])
    first = graph.fixed(5.0, lane=0)
    close(run(*graph.case()).start[[first, middle, last]], [0, 5, 6])


def test_tasks_without_a_lane_do_not_queue(run: Run) -> None:
    graph = Graph()
    for seconds in (3.0, 1.0, 2.0):
        graph.fixed(seconds)
    close(run(*graph.case()).end, [3, 1, 2])


def test_latency_overlaps_the_next_message_of_the_lane(run: Run) -> None:
    graph = Graph()
    route = graph.route(graph.resource(10.0), latency=7.0)
    graph.message(20.0, route, lane=0)
    graph.message(30.0, route, lane=0)
    times = run(*graph.case())
    close(times.start, [0, 2])
    close(times.sent, [2, 5])
    close(times.end, [9, 12])


def test_empty_and_unlimited_messages_are_sent_at_once(run: Run) -> None:
    graph = Graph()
    graph.message(0.0, graph.route(graph.resource(10.0), latency=3.0), lane=0)
    graph.message(1e9, graph.route(latency=4.0), lane=0)
    graph.fixed(1.0, lane=0)
    times = run(*graph.case())
    close(times.sent, [0, 0, 1])
    close(times.end, [3, 4, 1])


def test_two_messages_share_a_trunk(run: Run) -> None:
    """Sizes x < y on capacity C: the first is through at 2x/C, the second at (x + y)/C."""
    graph = Graph()
    trunk = graph.resource(6.0)
    graph.message(12.0, graph.route(graph.resource(100.0), trunk, latency=0.5))
    graph.message(30.0, graph.route(trunk, graph.resource(100.0), latency=0.25))
    times = run(*graph.case())
    close(times.sent, [4, 7])
    close(times.end, [4.5, 7.25])


def test_many_messages_share_a_trunk() -> None:
    """Sizes x_1 < ... < x_n on capacity C: x_k is through at (x_1 + ... + x_(k-1) + (n - k + 1) x_k) / C."""
    n, capacity = 500, 7.0
    sizes = np.sort(np.random.default_rng(0).uniform(1.0, 1e6, n))
    graph = Graph()
    trunk = graph.route(graph.resource(capacity))
    for size in sizes:
        graph.message(size, trunk)
    before = np.concatenate([[0.0], np.cumsum(sizes)[:-1]])
    found = engine.run(*graph.case()).sent
    np.testing.assert_allclose(found, (before + np.arange(n, 0, -1) * sizes) / capacity, rtol=1e-11, atol=0)


def test_equal_messages_that_contend_finish_together(run: Run) -> None:
    """Three thirds of a trunk round, yet all three are through at once, and their followers queue by number."""
    graph = Graph()
    trunk = graph.route(graph.resource(10.0))
    followers = [graph.fixed(1.0, lane=0) for _ in range(3)]
    for follower in reversed(followers):
        graph.edge(graph.message(1.1, trunk), follower)
    times = run(*graph.case())
    close(times.start[followers], np.arange(3) + 3 * 1.1 / 10.0)


def test_a_message_that_joins_halfway_slows_the_first(run: Run) -> None:
    """Alone 1 s at 6, then together at 3 until the second's 6 bytes are through at 3 s, then alone again."""
    graph = Graph()
    trunk = graph.route(graph.resource(6.0))
    graph.message(18.0, trunk)
    graph.message(6.0, trunk, after=[graph.fixed(1.0)])
    close(run(*graph.case()).sent, [4, 1, 3])


def test_what_a_limited_message_leaves_goes_to_the_others(run: Run) -> None:
    """Trunk 12 for three: one can only do 2 elsewhere, so the others get 5 each and not 4."""
    graph = Graph()
    trunk = graph.resource(12.0)
    graph.message(10.0, graph.route(trunk, graph.resource(2.0)))
    graph.message(10.0, graph.route(trunk))
    graph.message(20.0, graph.route(trunk))
    # At 2 s the second is through; the third goes on alone with 10 bytes left at 12 - 2 = 10.
    close(run(*graph.case()).sent, [5, 2, 3])


def ring(graph: Graph, n: int, size: float, bandwidth: float, latency: float, ready: list[list[int]]) -> list[int]:
    """A ring all-reduce as its 2(n-1) rounds of messages; in each, i sends one of n parts to i+1. Returns the last."""
    routes = [graph.route(graph.resource(bandwidth), latency=latency) for _ in range(n)]
    sent = [graph.message(size / n, routes[i], lane=i, after=ready[i]) for i in range(n)]
    for _ in range(2 * (n - 1) - 1):
        sent = [graph.message(size / n, routes[i], lane=i, after=[sent[i - 1], *ready[i]]) for i in range(n)]
    return sent


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ring_all_reduce(run: Run, n: int) -> None:
    """2(n-1)(a + S/(nB)) on n equal links."""
    graph = Graph()
    ring(graph, n, 1e9, 3e8, 0.02, [[]] * n)
    close(run(*graph.case()).end.max(), 2 * (n - 1) * (0.02 + 1e9 / (n * 3e8)))


def test_slow_replica_dominates(run: Run) -> None:
    """Replicas compute, then all-reduce: the slowest one's seconds plus the ring's."""
    graph = Graph()
    compute = [graph.fixed(seconds, lane=4 + i) for i, seconds in enumerate([1.0, 4.0, 2.5, 0.5])]
    ring(graph, 4, 8.0, 2.0, 0.125, [[task] for task in compute])
    close(run(*graph.case()).end.max(), 4.0 + 2 * 3 * (0.125 + 8.0 / (4 * 2.0)))


def one_forward_one_backward(stages: int, micro_batches: int, stage: int) -> list[tuple[str, int]]:
    ahead = min(stages - stage, micro_batches)
    order = [("F", m) for m in range(ahead)]
    for m in range(micro_batches):
        order.append(("B", m))
        if ahead + m < micro_batches:
            order.append(("F", ahead + m))
    return order


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 3), (4, 8), (5, 11)])
def test_one_forward_one_backward(run: Run, p: int, m: int) -> None:
    """p stages, m micro-batches: (m + p - 1)(f + b)."""
    forward, backward = 1.0, 2.25
    graph = Graph()
    task = {}
    for stage in range(p):
        work = one_forward_one_backward(p, m, stage)
        for kind, micro in work:
            task[stage, kind, micro] = graph.fixed(forward if kind == "F" else backward, lane=stage)
        for a, b in itertools.pairwise(work):
            graph.edge(task[stage, *a], task[stage, *b])
    for stage, micro in itertools.product(range(p - 1), range(m)):
        graph.edge(task[stage, "F", micro], task[stage + 1, "F", micro])
        graph.edge(task[stage + 1, "B", micro], task[stage, "B", micro])
    close(run(*graph.case()).end.max(), (m + p - 1) * (forward + backward))


# Ties and borders by hand


def test_a_later_round_of_an_instant_queues_behind(run: Run) -> None:
    """Both are ready at 1 s, but the second waited for a task of no length: one round later."""
    graph = Graph()
    graph.fixed(2.0, lane=0)
    gate = graph.fixed(1.0)
    low = graph.fixed(1.0, lane=0)
    high = graph.fixed(1.0, lane=0, after=[gate])
    graph.edge(graph.fixed(0.0, after=[gate]), low)
    close(run(*graph.case()).start[[low, high]], [3, 2])


def test_repeated_edges_count_once(run: Run) -> None:
    graph = Graph()
    first = graph.fixed(1.0)
    graph.fixed(1.0, after=[first, first])
    close(run(*graph.case()).end, [1, 2])


def test_nothing_to_do(run: Run) -> None:
    times = run(*Graph().case())
    assert len(times.start) == len(times.sent) == len(times.end) == 0


def test_cycle_is_refused_with_the_number_of_tasks_left(run: Run) -> None:
    graph = Graph()
    a = graph.fixed(1.0)
    b = graph.fixed(1.0, after=[a])
    c = graph.fixed(1.0, after=[b])
    graph.edge(c, b)
    graph.fixed(1.0, after=[c])
    with pytest.raises(ValueError, match=r"\b3\b"):
        run(*graph.case())


@pytest.mark.parametrize("weight", [1, 2, 5])
def test_a_message_of_some_weight_is_as_many_messages(weight: int) -> None:
    """Three messages meet on one resource; one of them stands for several, with all their bytes."""
    paths = np.array([[0, 1, -1, -1], [0, 2, -1, -1], [0, 2, -1, -1]], np.int32)
    latency, capacity = np.zeros(3), np.array([10.0, 100.0, 4.0])

    def tasks(routes: list[int], sizes: list[float]) -> engine.Tasks:
        count, none = len(routes), np.empty(0, np.int32)
        lanes = np.full(count, -1, np.int32)
        return engine.Tasks(lanes, np.zeros(count), np.array(sizes), np.array(routes, np.int32), none, none)

    heavy = engine.Network(paths, latency, capacity, np.array([weight, 1, 1], np.int32))
    one = engine.run(tasks([0, 1, 2], [3.0 * weight, 5.0, 9.0]), 1, heavy)
    many = engine.run(
        tasks([0] * weight + [1, 2], [3.0] * weight + [5.0, 9.0]), 1, engine.Network(paths, latency, capacity)
    )
    np.testing.assert_allclose(one.end, many.end[weight - 1 :], rtol=1e-12)
