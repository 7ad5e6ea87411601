"""Calls a worker's blocks: each as a function of its inputs alone, with the random numbers of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from isthmus.runtime.block_functions import BlockFunction, block_function
from isthmus.runtime.random.randomness import Randomness

__all__ = ["BlockCalls", "Call"]

Call = Callable[..., Sequence[Any]]


class BlockCalls:
    """The blocks of a worker as functions."""

    def __init__(self, randomness: Randomness, device: torch.device) -> None:
        """Take the random numbers from `randomness`; the blocks are on `device`."""
        self._randomness, self._device = randomness, device
        self._functions: dict[nn.Module, BlockFunction | None] = {}

    def of(self, step: int, block: int, module: nn.Module, places: Sequence[int]) -> Call:
        """Return block number `block`, which is `module`, as a function of its inputs, for the samples at `places`.

        Called again with the same inputs, it gives the same results, whatever the block draws at random.
        """
        if module not in self._functions:
            self._functions[module] = block_function(module, self._randomness.draws(block))
        function, randomness = self._functions[module], self._randomness
        if function is None:
            return _watched(randomness, step, block, module, places)
        keys = randomness.keys(step, block, places, self._device) if randomness.needed(block) else None

        def call(*inputs: Any) -> Sequence[Any]:
            return function(keys, *inputs)

        return call


def _watched(randomness: Randomness, step: int, block: int, module: nn.Module, places: Sequence[int]) -> Call:
    """Return a block whose random operations are replaced while it runs."""

    def call(*inputs: Any) -> Sequence[Any]:
        with randomness.at(step, block, places):
            given: Sequence[Any] = module(*inputs)
        return given

    return call
