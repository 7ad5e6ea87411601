"""How this process deals with the memory that it frees."""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT, _LARGEST = 1 << 29, 1 << 25  # bytes


def keep_freed_memory() -> None:
    """Has the C library keep what is freed, up to 512 MB: every step asks for the same again.

    Left alone it gives the top of the heap back to the system after each step, and gets it again page by page. Only
    tensors above 32 MB (the most that can be asked for) still come from the system. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
