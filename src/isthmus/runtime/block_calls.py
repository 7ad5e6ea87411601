"""Calls a worker's blocks: each as a function of its inputs alone, with the random numbers of its samples.

A *unit* is what is called at once: a block, or blocks that follow each other and are compiled together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isthmus.model.runnable_blocks import Pieces
from isthmus.runtime.block_functions import BlockFunction, Link, function_of
from isthmus.runtime.compiler import Compiler, divide
from isthmus.runtime.random.randomness import Randomness

__all__ = ["BlockCalls", "Call", "Unit"]

Call = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Unit:
    """Blocks `first` to `last`, called at once."""

    first: int
    last: int
    incoming: tuple[str, ...]
    outgoing: tuple[str, ...]
    function: BlockFunction | None  # None: one block, whose operations are watched


class BlockCalls:
    """The blocks of a worker as functions."""

    def __init__(
        self, randomness: Randomness, pieces: Pieces, device: torch.device, compiler: Compiler | None = None
    ) -> None:
        """Take random numbers from `randomness`; the blocks are on `device`, and compiled if there is a compiler."""
        self._randomness, self._pieces, self._device, self.compiler = randomness, pieces, device, compiler
        self._functions: dict[nn.Module, BlockFunction | None] = {}

    def of(self, step: int, block: int, module: nn.Module, places: Sequence[int]) -> Call:
        """Return block number `block`, which is `module`, as a function of its inputs, for the samples at `places`.

        Called again with the same inputs, it gives the same results, whatever the block draws at random.
        """
        if module not in self._functions:
            self._functions[module] = function_of([self._link(block, module)])
        function = self._functions[module]
        if function is None:
            return _watched(self._randomness, step, block, module, places)
        return self._with_keys(function, step, block, block, places)

    def of_unit(self, step: int, unit: Unit, module: nn.Module, places: Sequence[int]) -> Call:
        """Return the blocks of a unit as a function of its inputs, as `of` does; `module` is its first block."""
        if unit.function is None:
            return self.of(step, unit.first, module, places)
        return self._with_keys(unit.function, step, unit.first, unit.last, places)

    def single(self, block: int) -> Unit:
        """Return one block as a unit; it is called by `of`."""
        return Unit(block, block, self._pieces.incoming[block], self._pieces.outgoing[block], None)

    def units(self, first: int, modules: Sequence[nn.Module], wanted: Collection[str], apart: bool) -> list[Unit]:
        """Return blocks that follow each other, from number `first` on, as compiled units.

        `wanted` names what is used elsewhere of their results. With `apart`, each block is a unit of its own.
        """
        assert self.compiler is not None
        links = [self._link(first + place, module) for place, module in enumerate(modules)]
        texts = [self._text(link) for link in links]
        found = []
        for lo, hi in [(i, i + 1) for i in range(len(links))] if apart else divide(texts):
            later = {name for link in links[hi:] for name in link.incoming} | {*wanted}
            function = function_of(links[lo:hi], later)
            if function is None:
                found.append(self.single(first + lo))
            else:
                compiled = self.compiler.compiled(function)
                found.append(Unit(first + lo, first + hi - 1, compiled.incoming, compiled.outgoing, compiled))
        return found

    def _link(self, block: int, module: nn.Module) -> Link:
        return Link(module, self._randomness.draws(block), self._pieces.incoming[block], self._pieces.outgoing[block])

    def _text(self, link: Link) -> str | None:
        """Return a text that is equal for equal blocks; None for a block without a function."""
        function = function_of([link])
        return None if function is None else Compiler.key(function)

    def _with_keys(self, function: BlockFunction, step: int, first: int, last: int, places: Sequence[int]) -> Call:
        keys = self._randomness.keys(step, first, last, places, self._device)

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
