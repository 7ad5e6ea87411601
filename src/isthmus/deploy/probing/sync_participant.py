"""One participant of all-reduces: a process that takes orders on standard input and reports on standard output.

The syncs are those of the runtime, over its channels, in host memory over Gloo. The process ends when its input does,
so it never outlives the prober that started it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from queue import SimpleQueue
from typing import Any, BinaryIO

import msgspec
import torch
from torch._C._distributed_c10d import Store

from isthmus.deploy.probing.sync_participants import Entered, JoinSync, Reduce, Reduced, Said, StoreEntry, ToDo, Trouble
from isthmus.model.job import Job
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.comm.syncs import SyncMethod, make_sync
from isthmus.runtime.program import BucketSpec, Program

__all__ = ["Participant", "main"]

_FLOAT = 4  # bytes
_JOB = Job(name="collectives", model="", batch=1)


class _Board(Store):
    """A store of which every participant has a copy: what is put into one is sent to the others."""

    def __init__(self, participant: Participant) -> None:
        super().__init__()
        self._participant = participant
        self.entries: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Set an entry and send it to all other participants."""
        self.entries[key] = bytes(value)
        self._participant.say(StoreEntry(key=key, value=bytes(value)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Return the entry, or `expected`; channels never change an entry this way (see `runtime.comm.channel`)."""
        return self.entries.get(key, expected.encode())


class Participant:
    """Takes part in one sync after another."""

    def __init__(self, address: str, out: BinaryIO) -> None:
        self._address, self._out, self._saying = address, out, threading.Lock()
        self._board = _Board(self)
        self._network: Channels | None = None
        self._syncs: dict[int, tuple[SyncMethod, int]] = {}  # by number, with how many members each has
        self.orders: SimpleQueue[ToDo] = SimpleQueue()

    def say(self, said: Said) -> None:
        """Send a line to the process that started this one."""
        with self._saying:
            self._out.write(msgspec.json.encode(said) + b"\n")
            self._out.flush()

    def hear(self, lines: BinaryIO) -> None:
        """Apply store entries at once and queue other orders; end the process at the end of the lines."""
        for line in lines:
            order: ToDo = msgspec.json.decode(line, type=ToDo)
            if isinstance(order, StoreEntry):
                self._board.entries[order.key] = order.value
            else:
                self.orders.put(order)
        os._exit(0)  # whatever the main thread waits for

    def obey(self, order: JoinSync | Reduce) -> None:
        """Carry out an order, and report the result."""
        try:
            self.say(self._entered(order) if isinstance(order, JoinSync) else self._reduced(order))
        except Exception as problem:
            self.say(Trouble(number=order.number, why=str(problem).partition("\n")[0] or type(problem).__name__))

    def _entered(self, order: JoinSync) -> Entered:
        if self._network is None:
            self._network = Channels(self._board, order.me, hostname=self._address)
        spec = BucketSpec(
            name="", number=order.number, how=order.how, parameters=(), members=order.members, regions=order.regions,
            root=order.root,
        )  # fmt: skip
        program = Program(
            device=order.me, job=_JOB, precision="fp32", micro_batches=1, micro_batch=1, runs=(), actions=(),
            buckets=(spec,), workers=order.members, leader=order.members[0], judges=(),
        )  # fmt: skip
        sync = make_sync(spec, program, self._network)
        assert sync is not None
        self._network.connect()
        self._syncs[order.number] = sync, len(order.members)
        return Entered(number=order.number)

    def _reduced(self, order: Reduce) -> Reduced:
        sync, members = self._syncs[order.number]
        flat = torch.ones(order.bytes // _FLOAT)
        time.sleep(max(0.0, order.at - time.monotonic()))
        begin = time.monotonic()
        sync.all_reduce(flat)
        end = time.monotonic()
        if not bool((flat == members).all()):
            raise ArithmeticError("a sum is wrong")
        return Reduced(number=order.number, begin=begin, end=end)


def main() -> int:
    """Run a participant; the argument is the address at which it listens."""
    torch.set_num_threads(1)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Gloo prints must not mix with the messages
    participant = Participant(sys.argv[1], out)
    threading.Thread(target=participant.hear, args=(sys.stdin.buffer,), daemon=True).start()
    while True:
        order = participant.orders.get()
        assert not isinstance(order, StoreEntry)
        participant.obey(order)


if __name__ == "__main__":
    sys.exit(main())
