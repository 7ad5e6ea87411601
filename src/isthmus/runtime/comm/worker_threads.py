"""Threads that stay: each does one piece of work after another.

Starting a thread for every sync of every step would make the backward pass wait until that thread has run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from queue import SimpleQueue

__all__ = ["WorkerThreads"]

_Work = Callable[[], None]


class WorkerThreads:
    """Runs work on several threads at once; the work of one thread runs in order."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, SimpleQueue[_Work | None]] = {}
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._under_way = 0

    def start(self, name: Hashable, work: _Work) -> None:
        """Queue work for the thread of this name and return at once."""
        if name not in self._queues:
            self._queues[name] = SimpleQueue()
            thread = threading.Thread(target=self._run, args=(self._queues[name],), name=f"work {name}", daemon=True)
            thread.start()
        self._under_way += 1
        self._queues[name].put(work)

    def wait(self) -> None:
        """Wait until all that was started is done; raise the first error."""
        while self._under_way:
            failure = self._done.get()
            self._under_way -= 1
            if failure is not None:
                raise failure

    def close(self) -> None:
        """End the threads once they have done their work."""
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()

    def _run(self, queue: SimpleQueue[_Work | None]) -> None:
        while (work := queue.get()) is not None:
            try:
                work()
            except BaseException as failure:
                self._done.put(failure)
            else:
                self._done.put(None)
            del work  # frees everything that it holds
