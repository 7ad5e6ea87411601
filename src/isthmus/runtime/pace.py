"""A device made slower than it is, so that one machine can act out several unequal ones.

Computing takes `slower` times its processor time: what is missing is slept, wherever something is about to leave the
device, so that nobody sees a result earlier than the slow device would have had it. Time in which the system let others
compute counts as slept; so several workers on few cores keep their paces as long as all together fit. Waiting is not
computing, and is not padded; neither is what other threads do (adding up gradients, sending). Processor time is what a
GPU does not take: this is for CPUs.
"""

from __future__ import annotations

from time import perf_counter, sleep, thread_time

__all__ = ["Pace"]

_LATE = 0.05  # seconds that are made up for later, at most


class Pace:
    """Of one worker; all calls come from the thread that computes."""

    def __init__(self, slower: float = 1.0) -> None:
        """`slower` than this machine, 1 or more."""
        self._slower = slower
        self._computed, self._now = 0.0, 0.0
        self._owed = 0.0  # seconds; below 0 where this is late, or a sleep was too long

    def start(self) -> None:
        """Computing begins, after some waiting."""
        self._computed, self._now = thread_time(), perf_counter()

    def keep(self) -> None:
        """Sleeps for what the slow device would still have to compute since the start, or since the last time."""
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
