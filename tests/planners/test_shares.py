"""Shares and micro-batches against brute force."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.planners.layout.shares import divisors, even_shares, fair_shares, micro_batch_counts

# Steps of 0 make times that do not grow: what computing is like where starting kernels takes all the time.
seconds = st.one_of(st.just(0.0), st.floats(0.1, 10.0))


def reader(row: list[float]) -> Callable[[int], float]:
    return lambda samples: row[samples] if samples < len(row) else float("inf")


@given(st.data(), st.integers(1, 4), st.integers(0, 6), st.integers(0, 1))
def test_fair_shares_are_the_best_of_all_shares(data: st.DataObject, replicas: int, more: int, least: int) -> None:
    samples = replicas + more
    steps = st.lists(seconds, min_size=samples, max_size=samples)
    times = [[0.0, *accumulate(row)] for row in data.draw(st.lists(steps, min_size=replicas, max_size=replicas))]

    def makespan(shares: tuple[int, ...]) -> float:
        return max(row[n] for row, n in zip(times, shares, strict=True))

    shares = fair_shares(samples, [reader(row) for row in times], least)
    assert sum(shares) == samples
    assert min(shares) >= least
    options = [o for o in product(range(least, samples + 1), repeat=replicas) if sum(o) == samples]
    assert makespan(tuple(shares)) == pytest.approx(min(map(makespan, options)), rel=1e-12)


@given(st.lists(st.floats(0.5, 50.0), min_size=1, max_size=40), st.integers(1, 10**9))
def test_fair_shares_of_very_many_samples(speeds: list[float], samples: int) -> None:
    """Proportional times have a closed form: nobody is later than samples / total speed and one sample more."""
    began = time.process_time()
    shares = fair_shares(samples, [lambda n, s=speed: n / s for speed in speeds], 0)  # type: ignore[misc]
    assert sum(shares) == samples
    ideal = samples / sum(speeds)
    assert max(n / s for n, s in zip(shares, speeds, strict=True)) <= ideal + 1 / min(speeds) + 1e-9 * ideal
    assert time.process_time() - began < 1.0


def test_a_device_too_slow_to_help_gets_nothing() -> None:
    quick, slow = (lambda n: 1.0 * n), (lambda n: 100.0 * n)
    assert fair_shares(8, [quick, slow, quick], 0) == [4, 0, 4]
    assert fair_shares(8, [quick, slow, quick], 1) == [4, 1, 3]


def test_equal_times_are_shared_evenly() -> None:
    """Where all are done at the same time whatever they get, nobody gets nearly all."""
    shares = fair_shares(10**6, [lambda n: 1.0 if n else 0.0] * 10)
    assert max(shares) <= 2 * 10**5


@given(st.integers(1, 200), st.integers(1, 20))
def test_even_shares_differ_by_one_at_most(samples: int, replicas: int) -> None:
    shares = even_shares(samples, replicas)
    assert sum(shares) == samples
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 3000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.one_of(st.integers(1, 5000), st.integers(10**8, 10**9)), st.integers(1, 64))
def test_micro_batch_counts_divide_the_batch(batch: int, least: int) -> None:
    counts = micro_batch_counts(batch, least)
    assert len(counts) <= 8
    assert all(batch % count == 0 and batch // count >= least and count <= 4096 for count in counts)
    assert bool(counts) == (batch >= least)
