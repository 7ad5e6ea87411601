"""Memory that is taken, given back, and used again.

On the host it lies outside the heap, because among tensors that come and go it would leave gaps into which nothing
fits. Fresh memory is slow, so what is given back is kept.
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
    """Return memory of at least `size` bytes, and at most twice as many, on the device of `like`."""
    if like.is_cuda:
        return like.new_empty(size, dtype=torch.uint8)
    with _lock:
        fits = [index for index, spare in enumerate(_spare) if size <= spare.nbytes <= 2 * size]
        if fits:
            return _spare.pop(min(fits, key=lambda index: _spare[index].nbytes))
        del _spare[:1]  # memory that fits no request makes way
    return torch.frombuffer(mmap(-1, max(size, 1)), dtype=torch.uint8)


def give_back(memory: Tensor) -> None:
    """Give memory back for the next use."""
    if not memory.is_cuda:  # torch itself keeps a GPU's memory
        with _lock:
            _spare.append(memory)
