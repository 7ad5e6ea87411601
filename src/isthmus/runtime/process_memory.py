"""The memory of this process: what happens to freed memory, and the peak."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from pathlib import Path

import torch

__all__ = ["keep_freed_memory", "peak_bytes", "share_freed_memory", "start_peak"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt, from malloc.h
_KEPT, _LARGEST = 1 << 29, 1 << 25  # bytes
_RESET_PEAK = "5"  # Linux's code for resetting the peak


def share_freed_memory() -> None:
    """Make all threads share one heap, so that memory freed by one is used again by others; call this early.

    By default each thread has a heap of its own, and each sync's thread would keep what it once needed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Make the C library keep up to 512 MB of freed memory, because every step asks for the same again.

    By default it returns the top of the heap to the system after each step, and gets it back page by page. Only tensors
    above 32 MB (the largest threshold that is allowed) still come from the system. This does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


def start_peak(device: torch.device) -> None:
    """Restart the count of `peak_bytes` from now on, after giving back the memory that building the model took."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return  # the peak is then that of the whole life of this process


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on a GPU, else of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
