"""State `sharded-all`: weights are gathered from the other replicas before each use, and gradients are scattered.

Weights do not change within a step, so no worker waits for another's turn. Every participant pushes its piece to each
other as often as that one asks for it in a step, and a push leaves when its receiver is ready for it. The order in
which this worker uses weights is known (no action overtakes another here), so while one stretch computes, the weights
of the next are already coming; there are never more than those of two. Weights that two turns in a row use stay in
between.

Gradients get memory at the beginning of a backward of their bucket, and release it when they have been summed: each
participant adds the sum of its piece to what earlier backwards gave. Sums run in threads while the next stretches
compute; a second stretch may begin before they are done, but not a third.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from isthmus.runtime.buckets import Bucket, Buckets
from isthmus.runtime.comm.channel import Channel, Channels, Work
from isthmus.runtime.comm.syncs import piece_bounds
from isthmus.runtime.comm.worker_threads import WorkerThreads
from isthmus.runtime.program import Program, StageRun
from isthmus.runtime.weight_turns import last_uses, turns

__all__ = ["Gatherer", "Scatterer"]

_ASKED = 2**30  # tag of the message that says how often a worker asks; other messages have their number in the step

_Uses = list[list[list[int]]]  # of each run (by its index) and stretch: the numbers of its buckets


def _uses(buckets: Sequence[Bucket], stretches: Sequence[Sequence[Sequence[str]]]) -> _Uses:
    home = {name: bucket.spec.number for bucket in buckets for name in bucket.names}
    return [[list(dict.fromkeys(home[n] for n in names if n in home)) for names in run] for run in stretches]


class Gatherer:
    """Fetches and drops the weights of sharded stages."""

    def __init__(
        self,
        program: Program,
        network: Channels,
        buckets: Sequence[Bucket],
        stretches: Sequence[Sequence[Sequence[str]]],
    ) -> None:
        """Connect the buckets; `stretches[r][u]` lists the parameters that stretch u of run r uses."""
        buckets = [bucket for bucket in buckets if not bucket.resident]
        uses = _uses(buckets, stretches)
        self._order = [uses[turn.run][turn.stretch] for turn in turns(program) if uses[turn.run][turn.stretch]]
        self._streams = {
            (run.number, u) for r, run in enumerate(program.runs) for u in range(len(run.stretches)) if uses[r][u]
        }
        self._at = 0  # index of the present turn in that order
        self._threads = WorkerThreads()
        asked = Counter(number for at in range(len(self._order)) for number in self._coming(at))
        self._sets = {
            bucket.spec.number: _Set(program, network, bucket, asked[bucket.spec.number], self._threads)
            for bucket in buckets
        }

    def _coming(self, at: int) -> list[int]:
        """Return the numbers of the buckets to fetch for a turn: those that the turn before it does not use."""
        here = self._order[at] if at < len(self._order) else []
        return [number for number in here if at == 0 or number not in self._order[at - 1]]

    def begin(self) -> None:
        """Begin a step: pieces may be pushed from now on, and the first weights are fetched."""
        self._at = 0
        for one in self._sets.values():
            one.begin()
        self._fetch(0)

    def _fetch(self, at: int) -> None:
        for number in self._coming(at):
            self._sets[number].fetch()

    def before(self, run: StageRun, stretch: int) -> None:
        """Wait for the weights of a stretch, and begin to fetch those of the next."""
        if (run.number, stretch) in self._streams:
            self._fetch(self._at + 1)
            for number in self._order[self._at]:
                self._sets[number].arrive()

    def after(self, run: StageRun, stretch: int) -> None:
        """Drop the weights of a stretch, except those that are used next."""
        if (run.number, stretch) in self._streams:
            self._at += 1
            following = self._order[self._at] if self._at < len(self._order) else []
            for number in self._order[self._at - 1]:
                if number not in following:
                    self._sets[number].bucket.release()

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in fetched weights."""
        return any(
            tensor.untyped_storage().data_ptr() == one.bucket.weights.untyped_storage().data_ptr()
            for one in self._sets.values()
            if tensor.numel()
        )

    @property
    def failure(self) -> BaseException | None:
        """Return an error that occurred while pieces were pushed, or None if there was none."""
        return next((one.failures[0] for one in self._sets.values() if one.failures), None)

    def wait(self) -> None:
        """Wait until all workers have the weights that they asked for; pieces may change afterwards."""
        self._threads.wait()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


class _Set:
    """One bucket's weights: what this worker fetches, and what it sends to the others."""

    def __init__(self, program: Program, network: Channels, bucket: Bucket, asked: int, threads: WorkerThreads) -> None:
        """Connect to the other members; `asked` is how often this worker fetches the weights in a step."""
        self.bucket, members = bucket, bucket.spec.members
        self._bounds = {name: piece_bounds(bucket.weights.numel(), len(members), i) for i, name in enumerate(members)}
        self._channels: dict[str, Channel] = {
            other: network.channel(f"{program.job.name} weights {bucket.spec.number}", other)
            for other in members
            if other != program.device
        }
        self._asked, self._threads, self._fetched = asked, threads, 0
        self._wanted: dict[str, int] = {}  # how often each other worker asks in a step
        self._coming: list[Work] = []
        self.failures: list[BaseException] = []

    def begin(self) -> None:
        self._fetched = 0
        for other in self._channels:
            self._threads.start((self.bucket.spec.number, other), partial(self._push, other))

    def _push(self, other: str) -> None:
        channel = self._channels[other]
        try:
            if other not in self._wanted:
                self._wanted[other] = self._agree(channel)
            for number in range(self._wanted[other]):
                channel.send(self.bucket.piece, number).wait()
        except BaseException as failure:
            self.failures.append(failure)
            for each in self._channels.values():  # no thread that waits for a piece, here or there, must wait for ever
                each.close()
            raise

    def _agree(self, channel: Channel) -> int:
        """Tell another worker how often this one will ask in a step, and return how often the other will."""
        told = channel.send(torch.tensor([self._asked]), _ASKED)
        wanted = torch.zeros(1, dtype=torch.int64)
        channel.receive(wanted, _ASKED).wait()
        told.wait()
        return int(wanted)

    def fetch(self) -> None:
        self.bucket.restore()
        self._coming = [
            channel.receive(self.bucket.weights[slice(*self._bounds[other])], self._fetched)
            for other, channel in self._channels.items()
        ]
        self._fetched += 1

    def arrive(self) -> None:
        for work in self._coming:
            work.wait()
        self._coming = []


class Scatterer:
    """Allocates memory for the gradients of sharded stages, and sums them."""

    def __init__(
        self, program: Program, syncs: Buckets, buckets: Sequence[Bucket], stretches: Sequence[Sequence[Sequence[str]]]
    ) -> None:
        """Prepare the buckets; `syncs` runs the sums, and `stretches` is the same as for the gatherer."""
        self._syncs, buckets = syncs, [bucket for bucket in buckets if bucket.scattered]
        self._buckets = {bucket.spec.number: bucket for bucket in buckets}
        self._uses, self._ends = {}, {}
        for run, uses in zip(program.runs, _uses(buckets, stretches), strict=True):
            ends = last_uses(uses)
            for u, used in enumerate(uses):
                self._uses[run.number, u], self._ends[run.number, u] = used, ends[u]
        self._open: set[int] = set()
        self._sums: dict[int, Future[None]] = {}  # the last sum of each bucket
        self._begun: deque[list[Future[None]]] = deque()  # the sums of each turn

    def before(self, run: StageRun, stretch: int) -> None:
        """Allocate memory for the gradients of a stretch before its backward, as soon as the limits allow."""
        opened = [number for number in self._uses[run.number, stretch] if number not in self._open]
        while opened and len(self._begun) > 1:
            for done in self._begun.popleft():
                done.result()
        for number in opened:
            if number in self._sums:
                self._sums.pop(number).result()
            self._buckets[number].open()
        self._open.update(opened)

    def after(self, run: StageRun, stretch: int) -> None:
        """Sum the gradients that no stretch below this one uses, after its backward."""
        ended = self._ends[run.number, stretch]
        for number in ended:
            done = self._sums[number] = Future()
            self._syncs.start(number, partial(_sum, self._buckets[number], done))
        if ended:
            self._begun.append([self._sums[number] for number in ended])
        self._open.difference_update(ended)


def _sum(bucket: Bucket, done: Future[None]) -> None:
    """Sum a bucket's gradients, and pass an error on to the thread that waits for their memory."""
    try:
        bucket.scatter()
    except BaseException as failure:
        done.set_exception(failure)
        raise
    done.set_result(None)
