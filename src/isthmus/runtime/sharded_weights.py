"""State `sharded-all`: weights come from the other replicas before each use and go afterwards, gradients likewise.

Weights do not change within a step, so nobody waits for anybody's turn: every participant pushes its piece to each
other as often as that one asks for it in a step, and a push leaves when its receiver is ready for it. What this worker
uses in which order is known (nothing overtakes here), so while one stretch computes the weights of the next are already
coming: there are never more than those of two. What two turns in a row use stays in between.

Gradients have room from the beginning of a backward of their bucket, and leave it when they have been summed: each
participant adds the sum of its piece to what earlier backwards gave. Sums run in threads while the next stretches
compute, of which a second may begin, and no third, before they are done.
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
from isthmus.runtime.program import Program, Run
from isthmus.runtime.weight_turns import last_uses, turns

__all__ = ["Gatherer", "Scatterer"]

_ASKED = 2**30  # tag of the message that says how often a worker asks; others have their number in the step

_Uses = list[list[list[int]]]  # of each run (by its index) and stretch: numbers of its buckets


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
        """`stretches[r][u]`: the parameters that stretch u of run r uses."""
        buckets = [bucket for bucket in buckets if not bucket.resident]
        uses = _uses(buckets, stretches)
        self._order = [uses[turn.run][turn.stretch] for turn in turns(program) if uses[turn.run][turn.stretch]]
        self._streams = {
            (run.number, u) for r, run in enumerate(program.runs) for u in range(len(run.stretches)) if uses[r][u]
        }
        self._at = 0  # in that order
        self._lanes = WorkerThreads()
        asked = Counter(number for at in range(len(self._order)) for number in self._coming(at))
        self._sets = {
            bucket.spec.number: _Set(program, network, bucket, asked[bucket.spec.number], self._lanes)
            for bucket in buckets
        }

    def _coming(self, at: int) -> list[int]:
        """Return the numbers of the buckets to fetch for a turn: those that the turn before it does not use."""
        here = self._order[at] if at < len(self._order) else []
        return [number for number in here if at == 0 or number not in self._order[at - 1]]

    def begin(self) -> None:
        """A step begins: pieces may be pushed, and the first weights come."""
        self._at = 0
        for one in self._sets.values():
            one.begin()
        self._fetch(0)

    def _fetch(self, at: int) -> None:
        for number in self._coming(at):
            self._sets[number].fetch()

    def before(self, run: Run, stretch: int) -> None:
        """Waits for the weights of a stretch; those of the next begin to come."""
        if (run.number, stretch) in self._streams:
            self._fetch(self._at + 1)
            for number in self._order[self._at]:
                self._sets[number].arrive()

    def after(self, run: Run, stretch: int) -> None:
        """Drops them, but for what is used next."""
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
        """Until everybody has what was asked for; pieces may then change."""
        self._lanes.wait()

    def close(self) -> None:
        """Ends the threads."""
        self._lanes.close()


class _Set:
    """One bucket's weights: asked for by this worker, and by the others."""

    def __init__(self, program: Program, network: Channels, bucket: Bucket, asked: int, lanes: WorkerThreads) -> None:
        """`asked`: how often this worker fetches them in a step."""
        self.bucket, members = bucket, bucket.spec.members
        self._bounds = {name: piece_bounds(bucket.weights.numel(), len(members), i) for i, name in enumerate(members)}
        self._channels: dict[str, Channel] = {
            other: network.channel(f"{program.job.name} weights {bucket.spec.number}", other)
            for other in members
            if other != program.device
        }
        self._asked, self._lanes, self._fetched = asked, lanes, 0
        self._wanted: dict[str, int] = {}  # by each other, in a step
        self._coming: list[Work] = []
        self.failures: list[BaseException] = []

    def begin(self) -> None:
        self._fetched = 0
        for other in self._channels:
            self._lanes.start((self.bucket.spec.number, other), partial(self._push, other))

    def _push(self, other: str) -> None:
        channel = self._channels[other]
        try:
            if other not in self._wanted:
                self._wanted[other] = self._agree(channel)
            for number in range(self._wanted[other]):
                channel.send(self.bucket.piece, number).wait()
        except BaseException as failure:
            self.failures.append(failure)
            for each in self._channels.values():  # whoever waits for a piece, here or there, must not wait for ever
                each.close()
            raise

    def _agree(self, channel: Channel) -> int:
        """Each tells the other how often it will ask: that depends on its own order."""
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
    """Makes room for the gradients of sharded stages, and has them summed."""

    def __init__(
        self, program: Program, syncs: Buckets, buckets: Sequence[Bucket], stretches: Sequence[Sequence[Sequence[str]]]
    ) -> None:
        """`syncs` runs the sums; `stretches` as for the gatherer."""
        self._syncs, buckets = syncs, [bucket for bucket in buckets if bucket.scattered]
        self._buckets = {bucket.spec.number: bucket for bucket in buckets}
        self._uses, self._ends = {}, {}
        for run, uses in zip(program.runs, _uses(buckets, stretches), strict=True):
            ends = last_uses(uses)
            for u, used in enumerate(uses):
                self._uses[run.number, u], self._ends[run.number, u] = used, ends[u]
        self._open: set[int] = set()
        self._sums: dict[int, Future[None]] = {}  # the last one of each bucket
        self._begun: deque[list[Future[None]]] = deque()  # turn by turn

    def before(self, run: Run, stretch: int) -> None:
        """A backward of a stretch begins: room for its gradients, as soon as there may be."""
        opened = [number for number in self._uses[run.number, stretch] if number not in self._open]
        while opened and len(self._begun) > 1:
            for done in self._begun.popleft():
                done.result()
        for number in opened:
            if number in self._sums:
                self._sums.pop(number).result()
            self._buckets[number].open()
        self._open.update(opened)

    def after(self, run: Run, stretch: int) -> None:
        """It has ended: what no stretch below it uses is summed."""
        ended = self._ends[run.number, stretch]
        for number in ended:
            done = self._sums[number] = Future()
            self._syncs.start(number, partial(_sum, self._buckets[number], done))
        if ended:
            self._begun.append([self._sums[number] for number in ended])
        self._open.difference_update(ended)


def _sum(bucket: Bucket, done: Future[None]) -> None:
    """Whoever waits for the room learns that it will never be there, too."""
    try:
        bucket.scatter()
    except BaseException as failure:
        done.set_exception(failure)
        raise
    done.set_result(None)
