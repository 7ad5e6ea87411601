"""Send the factors of linear weights to all participants, and add the products of everybody's factors to the gradients.

The weights of a run take turns on one *line*, in the order in which the backward pass comes to them, micro-batch after
micro-batch. A turn is one weight's factors of one micro-batch, from all participants. Receives of the next turns are
posted ahead, because a message leaves only when its receiver is ready. There is memory for what may be in flight
(`plan.ring.room_for`) and for at least two turns, so little is held at once however many weights there are.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.plan.ring import FEWEST_TURNS, room_for
from isthmus.runtime.comm import scratch
from isthmus.runtime.comm.channel import Channel, Work

__all__ = ["FactorExchange", "TurnLine"]

_HEADER, _LEFT, _RIGHT = 0, 1, 2  # tags
_Own = list[tuple[Tensor, Tensor]]  # of each slice of a micro-batch


@dataclass
class _Batch:
    """Rows of all participants in one micro-batch, and the messages that bring them."""

    memory: Tensor
    left: Tensor
    right: Tensor
    coming: list[Work]


class FactorExchange:
    """One weight: sends this worker's factors to all others, and adds the product of all rows to the gradient.

    `channels` go to the participants in their order; None stands for this worker; no other weight uses them. `slices`
    is how often a micro-batch's backward passes this weight. In the first micro-batch a header says how many rows each
    slice has; the numbers stay the same, so that receives can be posted ahead.
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        channels: Sequence[Channel | None],
        slices: int,
        line: TurnLine | None = None,
    ) -> None:
        """Connect a weight; `line` is shared by all weights of its run (default: a line of its own)."""
        self.name, self.weight, self.slices = name, weight, slices
        self.line = TurnLine() if line is None else line
        self.own: deque[_Own] = deque()  # of whole micro-batches that are not added yet; used by the line
        self.under_way = 0  # tasks of the line that are not done: one to add and one to send for each micro-batch
        self._channels, self._me = channels, list(channels).index(None)
        self._rows: list[list[int]] = [[] for _ in channels]  # of each participant's slices
        self._taken: _Own = []
        self._sent: list[Work] = []
        self._batch: _Batch | None = None

    def take(self, left: Tensor, right: Tensor) -> None:
        """Send the factors of one slice, as its backward computes them; the line adds them in a thread."""
        like = self.weight
        pair = tuple(factor.detach().to(like.dtype).contiguous() for factor in (left, right))
        header = self._header(pair[0].shape[0])
        for channel in self._others():
            if header is not None:
                self._sent.append(channel.send(header, _HEADER))
            self._sent.append(channel.send(pair[0], _LEFT))
            self._sent.append(channel.send(pair[1], _RIGHT))
        self._taken.append((pair[0], pair[1]))
        if len(self._taken) == self.slices:
            taken, sent = self._taken, self._sent
            self._taken, self._sent = [], []
            self.line.take(self, taken, sent)

    def wait(self) -> None:
        """Wait until everybody's factors so far have been added; raise the error if something went wrong."""
        self.line.wait(self)

    def close(self) -> None:
        """End the line's threads once they have nothing to do."""
        self.line.close()

    @property
    def round_trip(self) -> float:
        """Return the round trip to the farthest participant in seconds."""
        return max((channel.round_trip for channel in self._others()), default=0.0)

    @property
    def bytes(self) -> int:
        """Return the bytes of the factors of all rows of a micro-batch; these are known once `expect` was called."""
        return sum(map(sum, self._rows)) * sum(self.weight.shape) * self.weight.element_size()

    def expect(self) -> None:
        """Post the receives of the next micro-batch."""
        self._learn()
        rows, shape = sum(map(sum, self._rows)), self.weight.shape
        memory = scratch.take(self.bytes, self.weight)
        flat, end = memory[: self.bytes].view(self.weight.dtype), rows * shape[0]
        left, right = flat[:end].view(rows, shape[0]), flat[end:].view(rows, shape[1])
        coming, at = [], 0
        for channel, sizes in zip(self._channels, self._rows, strict=True):
            for size in sizes:
                if channel is not None:
                    coming.append(channel.receive(left[at : at + size], _LEFT))
                    coming.append(channel.receive(right[at : at + size], _RIGHT))
                at += size
        self._batch = _Batch(memory, left, right, coming)

    def add(self) -> None:
        """Wait for the expected micro-batch, and add the product of its factors to the gradient."""
        batch, own, self._batch = self._batch, self.own.popleft(), None
        assert batch is not None
        begin = sum(map(sum, self._rows[: self._me]))
        end = begin + sum(self._rows[self._me])
        torch.cat([left for left, _ in own], out=batch.left[begin:end])
        torch.cat([right for _, right in own], out=batch.right[begin:end])
        own.clear()
        _finish(batch.coming)
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.addmm_(batch.left.t(), batch.right)
        scratch.give_back(batch.memory)

    def _others(self) -> list[Channel]:
        return [channel for channel in self._channels if channel is not None]

    def _header(self, rows: int) -> Tensor | None:
        """Return the header (rows, slices) of a slice in the first micro-batch; None later, when rows must match."""
        known, at = self._rows[self._me], len(self._taken)
        if len(known) < self.slices:
            known.append(rows)
            return torch.tensor([rows, self.slices])
        if known[at] != rows:
            raise ModelError(
                f"{self.name} cannot be synced by factors any longer",
                found=f"{rows} rows in slice {at}",
                expected=f"{known[at]} as in the first micro-batch",
                next="Use ring for it, or samples of one length",
            )
        return None

    def _learn(self) -> None:
        """Receive the headers of the first micro-batch."""
        for channel, known in zip(self._channels, self._rows, strict=True):
            header = torch.tensor([0, len(known) or 1])
            while channel is not None and len(known) < header[1]:
                channel.receive(header, _HEADER).wait()
                known.append(int(header[0]))


class TurnLine:
    """The turns of weights: which are expected next, as far as there is memory.

    No backward waits for a line, so everything that is expected comes in the end, whatever order the other workers use.
    """

    def __init__(self) -> None:
        self._turns: deque[FactorExchange] = deque()  # not expected yet, in order
        self._expected: list[FactorExchange] = []
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._own: SimpleQueue[tuple[FactorExchange, _Own] | None] = SimpleQueue()
        self._sent: SimpleQueue[tuple[FactorExchange, list[Work]] | None] = SimpleQueue()
        for name, work in (("factors", self._add_next), ("factors sent", self._finish_next)):
            threading.Thread(target=_repeat, args=(work,), name=name, daemon=True).start()

    def take(self, weight: FactorExchange, own: _Own, sent: list[Work]) -> None:
        """Queue a weight's own factors of a micro-batch, which are being sent."""
        with self._changed:
            weight.under_way += 2
        self._sent.put((weight, sent))
        self._own.put((weight, own))

    def wait(self, weight: FactorExchange) -> None:
        """Wait until nothing of a weight is under way; raise the error if something went wrong with any weight."""
        with self._changed:
            self._changed.wait_for(lambda: weight.under_way == 0 or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads once they have nothing to do."""
        self._own.put(None)
        self._sent.put(None)

    def _finish_next(self) -> bool:
        """Wait until the next factors have been sent to all, and release them; return False once closed."""
        if (job := self._sent.get()) is None:
            return False
        weight, sent = job
        self._do(weight, partial(_finish, sent))
        return True

    def _add_next(self) -> bool:
        if (job := self._own.get()) is None:
            return False
        weight, own = job
        if weight not in self._turns and weight not in self._expected:
            self._turns.append(weight)
        weight.own.append(own)
        del job, own
        while self._failure is None and (turn := self._next()) is not None:
            self._do(turn, turn.add)
            self._expected.remove(turn)
            self._turns.append(turn)
        return True

    def _next(self) -> FactorExchange | None:
        """Return the first weight whose own factors are here; post its receives, and more as far as memory allows."""
        ready = next((weight for weight in (*self._expected, *self._turns) if weight.own), None)
        if ready is not None and ready in self._turns:
            self._expect(ready)
        while self._turns and self._failure is None and self._has_room():
            self._expect(self._turns[0])
        return ready if self._failure is None else None

    def _has_room(self) -> bool:
        used = sum(weight.bytes for weight in (*self._expected, self._turns[0]))
        trip = min(weight.round_trip for weight in (*self._expected, *self._turns))  # the best measurement
        return len(self._expected) < FEWEST_TURNS or used <= room_for(math.inf, trip)

    def _expect(self, weight: FactorExchange) -> None:
        self._turns.remove(weight)
        self._expected.append(weight)
        try:
            weight.expect()
        except BaseException as failure:
            self._fail(failure)

    def _do(self, weight: FactorExchange, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failure:
            self._fail(failure)
        with self._changed:
            weight.under_way -= 1
            self._changed.notify_all()

    def _fail(self, failure: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()


def _finish(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _repeat(work: Callable[[], bool]) -> None:
    while work():
        continue
