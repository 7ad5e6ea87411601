"""Workers as threads: bodies that run at once, and a network for each over loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.distributed import HashStore

from isthmus.runtime.comm.channel import Channels
from tests.quiet import PATIENCE

T = TypeVar("T")


def networks(names: Sequence[str]) -> dict[str, Channels]:
    store = HashStore()
    return {name: Channels(store, name) for name in names}


def at_once(bodies: Sequence[Callable[[], T]], seconds: float = PATIENCE) -> list[T]:
    """Runs all of them in threads; the first failure is raised here."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if failures:
        raise failures[0]
    assert len(results) == len(bodies), "a worker hangs"
    return [results[i] for i in range(len(bodies))]
