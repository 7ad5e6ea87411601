"""Memory that is taken, given back, and used again.

On the host it lies outside the heap: among tensors that come and go it would leave gaps that nothing fits into. And new
memory is slow, so what is given back stays.
"""

from __future__ import annotations

import threading
from mmap import mmap

import torch
from torch import Tensor

__all__ = ["give_back", "take"]

_spare: list[Tensor] = []
_lock = threading.Lock()


def take(size: int, like: Tensor) -> Tensor:
    """At least so many bytes, and not far more, where `like` is."""
    if like.is_cuda:
        return like.new_empty(size, dtype=torch.uint8)
    with _lock:
        fits = [index for index, spare in enumerate(_spare) if size <= spare.nbytes <= 2 * size]
        if fits:
            return _spare.pop(min(fits, key=lambda index: _spare[index].nbytes))
        del _spare[:1]  # what fits nobody makes way
    return torch.frombuffer(mmap(-1, max(size, 1)), dtype=torch.uint8)


def give_back(memory: Tensor) -> None:
    """Nobody uses it any longer."""
    if not memory.is_cuda:  # torch keeps a GPU's
        with _lock:
            _spare.append(memory)
