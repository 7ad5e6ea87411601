"""State `sharded-all`: weights come from the other replicas before each forward and backward, and go afterwards.

Weights do not change within a step, so nobody waits for anybody's turn: every participant pushes its piece to each
other as often as that one will ask in a step, and a push leaves when its receiver is ready for it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from isthmus.runtime.buckets import Bucket
from isthmus.runtime.channel import Channel, Network
from isthmus.runtime.program import Program, Run
from isthmus.runtime.syncs import piece_bounds

__all__ = ["Gatherer"]


class Gatherer:
    """Fetches and drops the weights of sharded stages."""

    def __init__(
        self,
        program: Program,
        network: Network,
        buckets: Sequence[Bucket],
        stretches: Sequence[Sequence[Sequence[str]]],
    ) -> None:
        """`stretches[r][u]`: the parameters that stretch u of run r uses."""
        self.program = program
        self._sets = [_Set(program, network, bucket) for bucket in buckets if not bucket.resident]
        self._of_stretch = {
            (run.number, u): [one for one in self._sets if not set(names).isdisjoint(one.bucket.names)]
            for run, found in zip(program.runs, stretches, strict=True)
            for u, names in enumerate(found)
        }
        self._asked = Counter[int]()  # of each set in a step, by every participant alike
        for run in program.runs:
            for u in range(len(run.stretches)):
                for one in self._of_stretch[run.number, u]:
                    self._asked[id(one)] += 2 * program.micro_batches * run.slices

    def begin(self) -> None:
        """A step begins: pieces may be pushed."""
        for one in self._sets:
            one.begin(self._asked[id(one)])

    def before(self, run: Run, stretch: int) -> None:
        """Fetches the weights of a stretch."""
        for one in self._of_stretch[run.number, stretch]:
            one.fetch()

    def after(self, run: Run, stretch: int) -> None:
        """Drops them."""
        for one in self._of_stretch[run.number, stretch]:
            one.bucket.release()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in fetched weights."""
        return any(
            tensor.untyped_storage().data_ptr() == one.bucket.weights.untyped_storage().data_ptr()
            for one in self._sets
            if tensor.numel()
        )

    @property
    def failure(self) -> BaseException | None:
        """What went wrong while pieces were pushed."""
        return next((one.failures[0] for one in self._sets if one.failures), None)

    def wait(self) -> None:
        """Until everybody has what was asked for; pieces may then change."""
        for one in self._sets:
            one.wait()


class _Set:
    """One bucket's exchange."""

    def __init__(self, program: Program, network: Network, bucket: Bucket) -> None:
        self.bucket, members = bucket, bucket.spec.members
        self._bounds = {name: piece_bounds(bucket.weights.numel(), len(members), i) for i, name in enumerate(members)}
        self._channels: dict[str, Channel] = {
            other: network.channel(f"{program.job.name} weights {bucket.spec.number}", other)
            for other in members
            if other != program.device
        }
        self._fetched = 0
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []

    def begin(self, asked: int) -> None:
        self._fetched = 0
        for channel in self._channels.values():
            thread = threading.Thread(target=self._push, args=(channel, asked), name="weights", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _push(self, channel: Channel, asked: int) -> None:
        try:
            for number in range(asked):
                channel.send(self.bucket.piece, number).wait()
        except BaseException as failure:
            self.failures.append(failure)
            for other in self._channels.values():  # whoever waits for a piece, here or there, must not wait for ever
                other.close()

    def fetch(self) -> None:
        self.bucket.restore()
        works = [
            channel.receive(self.bucket.weights[slice(*self._bounds[other])], self._fetched)
            for other, channel in self._channels.items()
        ]
        self._fetched += 1
        for work in works:
            work.wait()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self.failures:
            raise self.failures[0]
