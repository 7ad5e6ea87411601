"""The end of a whole search.

Every decision of a search depends on the effort that its present round was given, never on what is left of the whole:
so a search with a larger limit does the same work first, and then more. What ends it is an exception, wherever it is.
"""

from __future__ import annotations

import time

__all__ = ["SearchEnded", "Stop"]


class SearchEnded(Exception):
    """The seconds or simulator calls of the whole search are spent."""


class Stop:
    """The seconds and simulator calls that a whole search may take, over all problems that it looks at."""

    def __init__(self, seconds: float | None = None, calls: int | None = None) -> None:
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.calls = calls  # that are left

    def part(self, of: float) -> Stop:
        """Return a stop with a part of the seconds that are left, and all calls."""
        return Stop(None if self.deadline is None else of * self.left(), self.calls)

    def left(self) -> float:
        """Return the seconds that are left."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    def check(self) -> None:
        """Raise SearchEnded where nothing is left."""
        if (self.calls is not None and self.calls <= 0) or self.left() <= 0.0:
            raise SearchEnded

    def take(self) -> None:
        """Count one call of the simulator; raise SearchEnded instead where nothing is left."""
        self.check()
        if self.calls is not None:
            self.calls -= 1
