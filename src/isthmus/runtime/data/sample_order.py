"""The order in which a job goes through its samples: a function of the seed, so any part can be computed anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

__all__ = ["SampleOrder", "epoch_order"]

_ROUNDS = 8  # each with a key of 8 bytes: one digest in all
Places = NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """The samples that a job uses at each step: position p of its walk is place p mod count of epoch p div count.

    Every sample comes once in each epoch. Step s with batch b has the positions s b .. (s + 1) b - 1 whatever the plan,
    so a batch may end one epoch and begin the next. Endless samples are taken in order, each once.
    """

    seed: int
    count: int | None

    def numbers(self, step: int, batch: int) -> list[int]:
        """Return the samples of a step, in the order in which replicas and micro-batches take them."""
        start, stop = step * batch, (step + 1) * batch
        if self.count is None:
            return list(range(start, stop))
        found: list[int] = []
        while start < stop:
            epoch, place = divmod(start, self.count)
            end = min(self.count, place + stop - start)
            places = np.arange(place, end, dtype=np.uint64)
            found += epoch_order(self.seed, epoch, self.count)(places).tolist()
            start += end - place
        return found


def epoch_order(seed: int, epoch: int, count: int) -> Callable[[Places], Places]:
    """Return a pseudo-random permutation of 0 .. count - 1 as a function place -> sample; nothing is stored.

    A Feistel network permutes 0 .. 4^h - 1, the smallest such range that holds count: (l, r) -> (r, l xor f(r + key)),
    eight times, with f the finaliser of splitmix64. A value outside of 0 .. count - 1 is permuted again until it falls
    inside (cycle walking); the result is a permutation too and takes fewer than four turns on average.
    """
    half = np.uint64(max(((count - 1).bit_length() + 1) // 2, 1))
    low = np.uint64((1 << int(half)) - 1)
    digest = blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")

    def permuted(places: Places) -> Places:
        left, right = places >> half, places & low
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & low)
        return left << half | right

    def order(places: Places) -> Places:
        found = permuted(places)
        while (outside := found >= count).any():
            found[outside] = permuted(found[outside])
        return found

    return order


def _mixed(x: Places) -> Places:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
