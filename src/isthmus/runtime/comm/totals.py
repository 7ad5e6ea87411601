"""What all workers of a job must know of a step: how many losses there were, and how long the gradient is.

Numbers go to the leader, which adds them in the order of the workers, and back to all. The counts travel while the
backward pass is still computing. With them goes what the leader was asked to do, so that all do it after the same step.
"""

from __future__ import annotations

from queue import SimpleQueue

import torch
from torch import Tensor

from isthmus.runtime.comm.channel import Channel, Channels, Work
from isthmus.runtime.comm.worker_threads import WorkerThreads
from isthmus.runtime.program import Program

__all__ = ["Totals"]

_COUNTS, _NORMS = 1, 2  # tags


class Totals:
    """Sums over all workers of a job."""

    def __init__(self, program: Program, network: Channels) -> None:
        self.program = program
        self.leads = program.device == program.leader
        others = [worker for worker in program.workers if worker != program.leader] if self.leads else [program.leader]
        name = f"{program.job.name} totals"
        self._channels: dict[str, Channel] = {other: network.channel(name, other) for other in others}
        self._own: SimpleQueue[tuple[float, float] | None] = SimpleQueue()
        self._result = _numbers(0.0, 0.0, 0.0)
        self._asked: SimpleQueue[int] = SimpleQueue()
        self._threads = WorkerThreads()
        self._coming: Work = self._threads

    def begin(self) -> None:
        """Begin a step."""
        if self.leads:
            self._threads.start("totals", self._collect)
        else:
            self._coming = self._channels[self.program.leader].receive(self._result, _COUNTS)

    def judged(self, total: float, count: float) -> None:
        """Send the sum and the number of this worker's losses to the leader."""
        if self.leads:
            self._own.put((total, count))
        else:
            self._channels[self.program.leader].send(_numbers(total, count, 0.0), _COUNTS).wait()

    def ask(self, command: int) -> None:
        """Have all workers find this in `command` after the present step, or after the next if its counts have left."""
        self._asked.put(command)

    @property
    def command(self) -> int:
        """Return what the leader was asked to do by the time the counts of the last step left; 0: nothing."""
        return int(self._result[2])

    def counts(self) -> tuple[float, float]:
        """Return the sum and the number of all losses of the step; wait for them."""
        self._coming.wait()
        total, count, _ = self._result.tolist()
        return total, count

    def sum(self, mine: float) -> float:
        """Return the sum of a number over all workers."""
        numbers = _numbers(mine)
        if self.leads:
            received = {other: torch.zeros_like(numbers) for other in self._channels}
            works = [self._channels[other].receive(into, _NORMS) for other, into in received.items()]
            for work, into in zip(works, received.values(), strict=True):
                work.wait()
                numbers += into
            for work in [channel.send(numbers, _NORMS) for channel in self._channels.values()]:
                work.wait()
        else:
            channel = self._channels[self.program.leader]
            result = torch.zeros_like(numbers)
            work = channel.receive(result, _NORMS)
            channel.send(numbers, _NORMS).wait()
            work.wait()
            numbers = result
        return float(numbers)

    def _collect(self) -> None:
        judges = [judge for judge in self.program.judges if judge != self.program.device]
        received = {judge: _numbers(0.0, 0.0, 0.0) for judge in judges}
        works = [self._channels[judge].receive(into, _COUNTS) for judge, into in received.items()]
        own = self._own.get()
        if own is None:
            return
        result = _numbers(*own, 0.0)
        for work, into in zip(works, received.values(), strict=True):
            work.wait()
            result += into
        while not self._asked.empty():
            result[2] = max(float(result[2]), self._asked.get())
        for work in [channel.send(result, _COUNTS) for channel in self._channels.values()]:
            work.wait()
        self._result = result

    def close(self) -> None:
        """End the thread, even if it waits for losses that will not come."""
        self._own.put(None)
        self._threads.close()


def _numbers(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
