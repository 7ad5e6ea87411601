"""Shares and cuts against brute force."""

from __future__ import annotations

from itertools import accumulate, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.planners.pieces import balanced_cut, even_shares, fair_shares, micro_batch_counts

seconds = st.floats(0.1, 10.0)


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to write total as a sum of `parts` positive integers."""
    bars = combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in zip((0, *cut), (*cut, total), strict=True)) for cut in bars]


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_fair_shares_are_the_best_of_all_shares(data: st.DataObject, replicas: int, more: int) -> None:
    samples = replicas + more
    steps = st.lists(seconds, min_size=samples, max_size=samples)
    times = [[0.0, *accumulate(row)] for row in data.draw(st.lists(steps, min_size=replicas, max_size=replicas))]

    def makespan(shares: tuple[int, ...]) -> float:
        return max(row[n] for row, n in zip(times, shares, strict=True))

    shares = fair_shares(samples, times)
    assert sum(shares) == samples
    assert min(shares) >= 1
    best = min(makespan(option) for option in compositions(samples, replicas))
    assert makespan(tuple(shares)) == pytest.approx(best, rel=1e-12)


@given(st.data(), st.integers(1, 4), st.integers(0, 5))
def test_balanced_cut_is_the_best_of_all_cuts(data: st.DataObject, stages: int, more: int) -> None:
    blocks = stages + more
    row = st.lists(seconds, min_size=blocks, max_size=blocks)
    weights = data.draw(st.lists(row, min_size=stages, max_size=stages))

    def slowest(lengths: tuple[int, ...]) -> float:
        at, worst = 0, 0.0
        for times, length in zip(weights, lengths, strict=True):
            worst = max(worst, sum(times[at : at + length]))
            at += length
        return worst

    firsts = balanced_cut(weights)
    lengths = tuple(b - a for a, b in zip(firsts, (*firsts[1:], blocks), strict=True))
    assert firsts[0] == 0
    assert min(lengths) >= 1
    assert slowest(lengths) == pytest.approx(min(slowest(c) for c in compositions(blocks, stages)), rel=1e-9)


@given(st.integers(1, 200), st.integers(1, 20))
def test_even_shares_differ_by_one_at_most(samples: int, replicas: int) -> None:
    shares = even_shares(samples, replicas)
    assert sum(shares) == samples
    assert max(shares) - min(shares) <= 1


@given(st.integers(1, 5000), st.integers(1, 64))
def test_micro_batch_counts_divide_the_batch(batch: int, least: int) -> None:
    counts = micro_batch_counts(batch, least)
    assert len(counts) <= 8
    assert all(batch % count == 0 and batch // count >= least for count in counts)
    assert bool(counts) == (batch >= least)
