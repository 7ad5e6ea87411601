"""A slow device on a fast processor."""

from __future__ import annotations

import time

import pytest

from isthmus.runtime.pace import Pace
from tests.quiet import needs_quiet


def compute(seconds: float) -> None:
    """Takes so much processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("slower", [2.0, 5.0])
@needs_quiet()
def test_computing_takes_as_many_times_longer(slower: float) -> None:
    pace, began = Pace(slower), time.perf_counter()
    pace.start()
    for _ in range(10):
        compute(0.01)
        pace.keep()
    took = time.perf_counter() - began
    assert 0.98 * slower * 0.1 <= took  # what others take of the processor makes it longer, nothing makes it shorter
    assert took <= slower * 0.1 + 0.25


@needs_quiet()
def test_waiting_is_not_padded() -> None:
    pace, began = Pace(50.0), time.perf_counter()
    pace.start()
    time.sleep(0.05)
    pace.keep()
    assert time.perf_counter() - began < 0.05 + 0.2


@needs_quiet()
def test_what_was_done_before_a_step_does_not_count() -> None:
    pace = Pace(100.0)
    compute(0.05)
    pace.start()
    began = time.perf_counter()
    pace.keep()
    assert time.perf_counter() - began < 1.0  # 5 s if it did


def test_a_device_as_fast_as_this_machine_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.runtime.pace.sleep", lambda seconds: pytest.fail("slept"))
    pace = Pace()
    pace.start()
    compute(0.001)
    pace.keep()


@needs_quiet()
def test_a_sleep_that_was_too_long_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds + 0.02)

    monkeypatch.setattr("isthmus.runtime.pace.sleep", sleep)
    pace = Pace(3.0)
    pace.start()
    for _ in range(20):
        compute(0.002)
        pace.keep()
    assert len(slept) < 10  # 4 ms are owed each time, and 20 ms too many were paid
