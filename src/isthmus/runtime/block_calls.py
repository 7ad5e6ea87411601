"""Calls a worker's blocks: each as a function of its inputs alone, with the random numbers of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from isthmus.runtime.random.randomness import Randomness

__all__ = ["BlockCalls", "Call"]

Call = Callable[..., Sequence[Any]]


class BlockCalls:
    """The blocks of a worker as functions."""

    def __init__(self, randomness: Randomness) -> None:
        """Take the random numbers from `randomness`."""
        self._randomness = randomness

    def of(self, step: int, block: int, module: nn.Module, places: Sequence[int]) -> Call:
        """Return block number `block`, which is `module`, as a function of its inputs, for the samples at `places`.

        Called again with the same inputs, it gives the same results, whatever the block draws at random.
        """

        def call(*inputs: Any) -> Sequence[Any]:
            with self._randomness.at(step, block, places):
                given: Sequence[Any] = module(*inputs)
            return given

        return call
