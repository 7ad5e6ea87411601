"""Compile blocks with `torch.compile`: several that follow each other at once, and equal ones once.

A large unit has few calls, each of which costs the host some tenths of a millisecond, and lets more operations become
one kernel. A small one is compiled sooner and is equal to more others. The compiler itself keeps its results in files,
so a second run of the same blocks begins sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from isthmus.runtime.block_functions import BlockFunction

__all__ = ["Compiler", "divide"]

_MOST = 24  # blocks of a unit
_PERIOD = 8  # most blocks that repeat: a layer is cut into few
_CALL = 4  # the cost of calling a unit in every step, in blocks that are compiled once
_SHAPES = 64  # that a unit may be compiled for: shares and slices of a worker differ by a sample at most


class Compiler:
    """Compiles units of blocks; equal units share their code."""

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._made: dict[str, Callable[..., Sequence[Any]]] = {}
        limits: Any = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _SHAPES)

    @staticmethod
    def key(function: BlockFunction) -> str:
        """Return a text that is equal for functions which compute the same with tensors of equal form."""
        forms = [f"{tuple(t.shape)} {t.dtype} {t.requires_grad}" for t in function.tensors]
        return "\n".join((function.text, *forms))

    def compiled(self, function: BlockFunction) -> BlockFunction:
        """Return the function with compiled code; compiling takes place at its first call with inputs of a shape."""
        key = self.key(function)
        if key not in self._made:
            self._made[key] = self.code(function.compute)
        return replace(function, compute=self._made[key])

    def code(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function."""
        made: Callable[..., Any] = torch.compile(function, dynamic=False, backend=self._backend)
        return made


def divide(texts: Sequence[str | None]) -> list[tuple[int, int]]:
    """Return the ranges [lo, hi) of blocks that become units; blocks with equal texts are equal.

    The longest part of the blocks in which some repeat is divided into equal units, then what is left on both sides. A
    block whose text is None is a unit of its own.
    """
    return _divided(texts, 0, len(texts))


def _divided(texts: Sequence[str | None], lo: int, hi: int) -> list[tuple[int, int]]:
    if lo == hi:
        return []
    start, period, times = _repeated(texts, lo, hi)
    if times < 2:
        return _unequal(texts, lo, hi)
    most = max(1, _MOST // period)
    together = min(range(1, min(most, times) + 1), key=lambda n: _cost(period, times, n))
    end = start + period * times
    steps = [*range(start, end, period * together), end]
    middle = list(pairwise(steps))
    return [*_divided(texts, lo, start), *middle, *_divided(texts, end, hi)]


def _cost(period: int, times: int, together: int) -> int:
    """Return the cost of units of so many periods each: blocks to compile, and calls."""
    whole, left = divmod(times, together)
    return period * (together + left) + _CALL * (whole + (left > 0))


def _repeated(texts: Sequence[str | None], lo: int, hi: int) -> tuple[int, int, int]:
    """Return where the longest repetition begins, how many blocks repeat, and how often."""
    best = (lo, 1, 1)
    for period in range(1, min(_PERIOD, (hi - lo) // 2) + 1):
        start = lo
        while start + 2 * period <= hi:
            same = start
            while same + period < hi and texts[same] is not None and texts[same] == texts[same + period]:
                same += 1
            times = (same - start) // period + 1
            if period * (times - 1) > best[1] * (best[2] - 1):
                best = (start, period, times)
            start = max(same, start) + 1
    return best


def _unequal(texts: Sequence[str | None], lo: int, hi: int) -> list[tuple[int, int]]:
    """Return units of blocks that do not repeat: as many as may be together, those without a function alone."""
    found: list[tuple[int, int]] = []
    for block in range(lo, hi):
        grows = found and texts[block] is not None and texts[found[-1][0]] is not None
        if grows and block - found[-1][0] < _MOST:
            found[-1] = found[-1][0], block + 1
        else:
            found.append((block, block + 1))
    return found
