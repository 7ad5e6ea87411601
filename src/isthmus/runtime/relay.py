"""Messages between workers that cannot talk, passed on by others: what a plan says with `via`.

    A ── R ── S ── B      a channel of A and B: three connections, which R and S tie together

The end with the lower name tells the relays, one after the other; each makes its two legs. Whoever is to get a message
asks its neighbour for it (tag, bytes), and that asks the next. So nothing leaves before its receiver is ready, as
without relays, and no relay holds more than was asked for. A message is received whole and then sent on, which is what
`cost/network.py` counts. Equal tags stay in order; others may overtake.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from isthmus.runtime.channel import NOTE_BYTES, RELAY, Channel, ChannelError, Network, Work
from isthmus.runtime.program import Program

__all__ = ["Relay"]

_AHEAD = 64  # messages that one side may have asked for and not got: each has a thread, and its ask a receive
_NOTES = 8  # receives of notes that are posted ahead


class Relay:
    """Passes on what goes over this worker; it ends with the network's channels."""

    def __init__(self, network: Network, program: Program) -> None:
        self._network = network
        for near in dict.fromkeys(way[0] for way in program.ways.values()):
            network.channel(RELAY, near)  # also where nothing goes over it: the relay waits for all its neighbours
        for neighbour in program.carries:
            channel = network.channel(RELAY, neighbour)
            threading.Thread(target=self._hear, args=(channel,), name=f"relay {neighbour}", daemon=True).start()

    def _hear(self, channel: Channel) -> None:
        try:
            posted = deque(_note(channel) for _ in range(_NOTES))
            while True:
                note, work = posted.popleft()
                work.wait()
                posted.append(_note(channel))
                name, *path = json.loads(bytes(note.numpy()))
                self._open(name, path)
        except ChannelError:
            return

    def _open(self, name: str, path: Sequence[str]) -> None:
        at = path.index(self._network.me)
        before, after = path[at - 1], path[at + 1]
        back = self._network.leg(name, path[0], before if at > 1 else None)
        forth = self._network.leg(name, path[-1], after if at < len(path) - 2 else None)
        for asking, giving in ((back, forth), (forth, back)):
            threading.Thread(target=_pass_all, args=(asking, giving), name=f"relay {name}", daemon=True).start()
        if forth.over is not None:
            self._network.open_relay(forth.over, name, path)


def _note(channel: Channel) -> tuple[Tensor, Work]:
    note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
    return note, channel.receive(note, 0)


def _ask(channel: Channel) -> tuple[Tensor, Work]:
    note = torch.zeros(2, dtype=torch.int64)
    return note, channel.asked(note)


def _pass_all(asking: Channel, giving: Channel) -> None:
    """Brings one side what it asks for, from the other, until a connection ends; then both do."""
    order: dict[int, threading.Event] = {}  # of each tag: whether what was asked for last has been posted
    with ThreadPoolExecutor(_AHEAD) as pool:
        try:
            posted = deque(_ask(asking) for _ in range(_AHEAD))
            while True:
                note, work = posted.popleft()
                work.wait()
                posted.append(_ask(asking))
                tag, size = note.tolist()
                held = torch.empty(size, dtype=torch.uint8)
                before, order[tag] = order.get(tag), threading.Event()
                if len(order) > 2 * _AHEAD:
                    order = {known: event for known, event in order.items() if known == tag or not event.is_set()}
                pool.submit(_pass, held, tag, giving.receive(held, tag), asking, before, order[tag])
        except ChannelError:
            asking.close()
            giving.close()


def _pass(
    held: Tensor, tag: int, coming: Work, asking: Channel, before: threading.Event | None, posted: threading.Event
) -> None:
    try:
        coming.wait()
        if before is not None:
            before.wait()
        work = asking.send(held, tag)
        posted.set()
        work.wait()
    except ChannelError:
        posted.set()
        asking.close()
