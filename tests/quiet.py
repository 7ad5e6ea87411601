"""Tests that hold times against a clock: on a busy machine such a test says nothing, and is skipped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE = 60.0  # seconds for what takes far less on an idle machine, and would never come if it were broken
_TAKEN = 0.1  # part of a processor


@contextmanager
def needs_quiet() -> Iterator[None]:
    """Skip instead of failing where other processes use the processors.

    A test that fails on an idle machine fails; one that passes on a busy machine passes.
    """
    try:
        yield
    except AssertionError:
        taken = taken_by_others()
        if taken > _TAKEN:
            pytest.skip(f"this test needs a quiet machine: others took {taken:.0%} of a processor from it")
        raise


def taken_by_others(seconds: float = 0.3) -> float:
    """Return the part of a processor that a thread asks for and does not get, while it computes for some seconds."""
    begun, computed = time.perf_counter(), time.thread_time()
    while time.perf_counter() - begun < seconds:
        pass
    return 1 - (time.thread_time() - computed) / (time.perf_counter() - begun)
