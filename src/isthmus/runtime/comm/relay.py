"""Relay messages between workers that cannot reach each other, as a plan says with `via`.

    A ── R ── S ── B      a channel of A and B: three connections, which the relays R and S join

The end with the lower name notifies the relays, one after the other, and each creates its two legs. A worker that is to
receive a message asks its neighbour for it (tag, bytes), which asks the next. So nothing leaves before its receiver is
ready, as without relays, and a relay holds only what was asked for and has not left yet. A message is received whole
and then sent on, which is what `cost/network.py` counts. Equal tags stay in order; others may overtake.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from isthmus.runtime.comm.channel import NOTE_BYTES, Channel, Channels, Work

__all__ = ["pass_on"]

_AHEAD = 16  # messages on their way from one leg to the other: each has a thread, and more requests wait
_NOTES = 8  # receives of notes that are posted ahead


def pass_on(network: Channels, near: Iterable[str], neighbours: Iterable[str]) -> None:
    """Relay what goes over this worker, in threads that end with the network's channels.

    `near` lists the relays next to this worker on its own ways, `neighbours` the workers next to it on the ways of
    others.
    """
    for relay in dict.fromkeys(near):
        network.notes(relay)  # also if nothing goes over it: the relay waits for all its neighbours
    for neighbour in neighbours:
        _thread(_hear, network, network.notes(neighbour))


def _thread(work: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, name="relay", daemon=True).start()


def _hear(network: Channels, channel: Channel) -> None:
    """Create the channels of which a neighbour notifies this relay; on an error close the connection to it."""
    try:
        for note in _coming(partial(_note, channel), _NOTES):
            name, *path = json.loads(bytes(note.numpy()))
            _thread(_open, network, name, path)
    except Exception:
        channel.close()


def _open(network: Channels, name: str, path: Sequence[str]) -> None:
    """Create the two legs of a channel, join them, and notify the next relay."""
    at = path.index(network.me)
    before, after = path[at - 1], path[at + 1]
    back = network.leg(name, path[0], before if at > 1 else None)
    forth = network.leg(name, path[-1], after if at < len(path) - 2 else None)
    for asking, giving in ((back, forth), (forth, back)):
        _thread(_pass_all, asking, giving)
    if forth.over is not None:
        network.open_relay(forth.over, name, path)


def _coming(post: Callable[[], tuple[Tensor, Work]], ahead: int) -> Iterator[Tensor]:
    """Yield messages as they come, with `ahead` receives posted in advance; end with the error that a wait raises."""
    posted = deque(post() for _ in range(ahead))
    while True:
        note, work = posted.popleft()
        work.wait()
        posted.append(post())
        yield note


def _note(channel: Channel) -> tuple[Tensor, Work]:
    note = torch.zeros(NOTE_BYTES, dtype=torch.uint8)
    return note, channel.receive(note, 0)


def _ask(channel: Channel) -> tuple[Tensor, Work]:
    note = torch.zeros(2, dtype=torch.int64)
    return note, channel.asked(note)


def _pass_all(asking: Channel, giving: Channel) -> None:
    """Send one side what it asks for, from the other, until something fails; then close both connections."""
    order: dict[int, threading.Event] = {}  # of each tag: whether the last requested message has been posted
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="relay") as pool:
        try:
            for note in _coming(partial(_ask, asking), _AHEAD):
                tag, size = note.tolist()
                held = torch.empty(size, dtype=torch.uint8)
                before, order[tag] = order.get(tag), threading.Event()
                if len(order) > 2 * _AHEAD:
                    order = {known: event for known, event in order.items() if known == tag or not event.is_set()}
                pool.submit(_pass, held, tag, giving.receive(held, tag), asking, giving, before, order[tag])
        except Exception:
            asking.close()
            giving.close()


def _pass(
    held: Tensor,
    tag: int,
    coming: Work,
    asking: Channel,
    giving: Channel,
    before: threading.Event | None,
    posted: threading.Event,
) -> None:
    try:
        coming.wait()
        if before is not None:
            before.wait()
        work = asking.send(held, tag)
        posted.set()
        work.wait()
    except Exception:
        asking.close()
        giving.close()
    finally:
        posted.set()
