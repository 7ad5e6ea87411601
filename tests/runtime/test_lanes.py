"""Threads that stay: order on a lane, lanes beside each other, failures, and their end."""

from __future__ import annotations

import threading

import pytest

from isthmus.runtime.comm.worker_threads import WorkerThreads
from tests.quiet import PATIENCE


def test_a_lane_keeps_its_order_and_its_thread() -> None:
    lanes, seen = WorkerThreads(), []
    for step in range(3):
        for number in range(5):
            lanes.start("one", lambda n=(step, number): seen.append((n, threading.get_ident())))
        lanes.wait()
    assert [n for n, _ in seen] == [(step, number) for step in range(3) for number in range(5)]
    assert len({thread for _, thread in seen}) == 1
    lanes.close()


def test_lanes_run_beside_each_other() -> None:
    """Each of two waits for the other: one after the other they would never end."""
    lanes, met = WorkerThreads(), threading.Barrier(2)
    for lane in range(2):
        lanes.start(lane, lambda: met.wait(10.0) and None)
    lanes.wait()
    lanes.close()


def test_a_failure_is_raised_though_another_lane_hangs() -> None:
    lanes, release = WorkerThreads(), threading.Event()

    def fail() -> None:
        raise ValueError("lost")

    lanes.start("hangs", lambda: release.wait(10.0) and None)
    lanes.start("fails", fail)
    with pytest.raises(ValueError, match="lost"):
        lanes.wait()
    release.set()
    lanes.close()


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    lanes = WorkerThreads()
    lanes.start("one", lambda: None)
    lanes.wait()
    (thread,) = set(threading.enumerate()) - before
    lanes.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()
