"""Slow a device down, so that one machine can emulate several unequal ones.

Computing takes `slower` times its processor time: the difference is slept wherever something is about to leave the
device, so that no other worker sees a result earlier than the slow device would have produced it. Time in which the
system let other processes compute counts as slept, so several workers on few cores keep their paces as long as all fit
together. Waiting is not computing, and is not padded; neither is what other threads do (adding up gradients, sending).
A GPU's work takes no processor time, so this is for CPUs.
"""

from __future__ import annotations

from time import perf_counter, sleep, thread_time

__all__ = ["Pace"]

_LATE = 0.05  # seconds of delay that are made up for later, at most


class Pace:
    """The pace of one worker; all calls come from the thread that computes."""

    def __init__(self, slower: float = 1.0) -> None:
        """Set the pace to `slower` times slower than this machine, which is 1 or more."""
        self._slower = slower
        self._computed, self._now = 0.0, 0.0
        self._owed = 0.0  # seconds; below 0 if this is late, or a sleep was too long

    def start(self) -> None:
        """Begin to count computing, after some waiting."""
        self._computed, self._now = thread_time(), perf_counter()

    def keep(self) -> None:
        """Sleep for what the slow device would still have to compute since the last `start` or `keep`."""
        if self._slower <= 1.0:
            return
        computed, now = thread_time(), perf_counter()
        self._owed += self._slower * (computed - self._computed) - (now - self._now)
        self._computed, self._now = computed, now
        if self._owed > 0.0:
            sleep(self._owed)
            after = perf_counter()
            self._owed -= after - now
            self._computed, self._now = thread_time(), after
        self._owed = max(self._owed, -_LATE)
