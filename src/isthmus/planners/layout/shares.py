"""Shares of samples: among replicas, and in micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import isqrt

__all__ = ["divisors", "even_shares", "fair_shares", "micro_batch_counts"]

_MOST_COUNT = 4096  # micro-batches: more would cost the simulator seconds and win nothing


def even_shares(samples: int, replicas: int) -> list[int]:
    """Divide samples as equally as integers allow; the first replicas get one more."""
    return [samples // replicas + (i < samples % replicas) for i in range(replicas)]


def fair_shares(samples: int, times: Sequence[Callable[[int], float]], least: int = 1) -> list[int]:
    """Return integer shares n with sum n = samples that minimise max_i times[i](n[i]), each at least `least`.

    Times grow with samples. Let n_i(T) be the most that i can do in T, or `least`. Bisection finds a T with
    sum n_i(T) <= samples that leaves no more than one sample for each i, or a T so near to the optimum that no number
    lies between; then all are brought as near to what they can do at the optimum. Giving each sample that is left to
    whoever would be done first with it is optimal.
    """
    shares, most = [least] * len(times), [samples] * len(times)
    different = {id(time): time for time in times}
    low, high = 0.0, max(time(samples) for time in different.values())
    while samples - sum(shares) > len(times) and low < (middle := (low + high) / 2) < high:
        within = {which: _most_within(time, middle, samples) for which, time in different.items()}
        tried = [max(least, within[id(time)]) for time in times]
        if sum(tried) <= samples:
            low, shares = middle, tried
        else:
            high, most = middle, tried
    left, spare = samples - sum(shares), sum(most) - sum(shares)
    if left > len(times):
        shares = [share + (limit - share) * left // spare for share, limit in zip(shares, most, strict=True)]
    done = [(time(shares[i] + 1), i) for i, time in enumerate(times)]
    heapq.heapify(done)
    for _ in range(samples - sum(shares)):
        _, i = done[0]
        shares[i] += 1
        heapq.heapreplace(done, (times[i](shares[i] + 1), i))
    return shares


def _most_within(time: Callable[[int], float], seconds: float, samples: int) -> int:
    """Return the most samples, up to all, that are done in so many seconds."""
    low, high = 0, samples + 1  # done in time, not done in time
    while high - low > 1:
        middle = (low + high) // 2
        if time(middle) <= seconds:
            low = middle
        else:
            high = middle
    return low


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in order."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def micro_batch_counts(batch: int, least: int, most: int = 8) -> list[int]:
    """Return numbers of micro-batches that divide the batch and leave at least `least` samples in each: `most`, spread
    out.
    """
    counts = [count for count in divisors(batch) if count <= min(batch // least, _MOST_COUNT)]
    if len(counts) <= most:
        return counts
    step = (len(counts) - 1) / (most - 1)
    return sorted({counts[round(i * step)] for i in range(most)})
