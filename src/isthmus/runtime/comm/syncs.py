"""Make a flat tensor the sum over its participants: around a ring, along a tree of regions, or through a server.

Every sync cuts its messages into segments, keeps several of them in flight, and passes a segment on as soon as it has
been added. Receives are posted ahead. Those that are added go through scratch memory; the others go straight to their
place, which is safe because a result can only come after everything that it is the sum of has left. All syncs together
may use as much scratch memory for what one worker sends as may be in flight, plus one segment for each sync.

Each sum is computed by one participant and copied to all others, so the sums are bit for bit equal on all participants,
in 16 bits too. The result of a CUDA tensor is there in the order of the calling thread's current stream.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, assert_never

import numpy as np
import torch
from torch import Tensor

from isthmus.plan.ring import goes_whole, room_for, segments_of
from isthmus.runtime.comm import scratch
from isthmus.runtime.comm.channel import Channel, Channels, Work
from isthmus.runtime.program import BucketSpec, Program

__all__ = ["Ring", "Server", "SyncMethod", "Tree", "make_sync", "piece_bounds"]

_TAG = 0
_lent: Counter[tuple[str, str]] = Counter()  # (worker, sender to it) -> bytes of scratch memory in use
_trips: dict[tuple[str, str], float] = {}  # (worker, sender to it) -> seconds of a round trip
_lending = threading.Lock()
_finished: deque[Work] = deque(maxlen=32)  # Gloo's thread may still be busy with a message, and freeing it would wait


class SyncMethod(Protocol):
    """The sum of one bucket over its participants. All participants call the same methods in the same order."""

    @property
    def scatters(self) -> bool:
        """Return whether `reduce_scatter` is cheaper than `all_reduce`; if not, the two do the same."""

    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by the sum over all participants."""

    def reduce_scatter(self, flat: Tensor) -> None:
        """Replace this participant's piece of `flat` (see `piece_bounds`) by the sum; the rest becomes undefined."""

    def all_gather(self, flat: Tensor) -> None:
        """Send every participant's piece to all others."""


def piece_bounds(total: int, count: int, position: int) -> tuple[int, int]:
    """Return the range [lo, hi) of one participant's piece; the sizes of pieces differ by at most one element."""
    return total * position // count, total * (position + 1) // count


def _pieces(flat: Tensor, count: int) -> list[Tensor]:
    return [flat[slice(*piece_bounds(flat.numel(), count, i))] for i in range(count)]


def _segments(piece: Tensor, segments: int) -> list[Tensor]:
    """Return the segments of a piece; an empty piece has none."""
    count = segments_of(piece.numel() * piece.element_size(), segments)
    return _pieces(piece, count) if piece.numel() else []


def _add(target: Tensor, part: Tensor) -> None:
    """Add `part` to `target` in place; on the host in this thread alone, so that syncs start no thread pools."""
    if target.is_cuda or target.dtype not in (torch.float32, torch.float64):
        target.add_(part)
    else:
        into = target.numpy()
        with np.errstate(all="ignore"):  # a sum may overflow, which the loss scale handles
            np.add(into, part.numpy(), out=into)


def _finish(work: Work) -> None:
    work.wait()
    _finished.append(work)


class _Departures:
    """Messages that are leaving over one channel."""

    def __init__(self, channel: Channel, parts: Iterable[Tensor]) -> None:
        self._channel = channel
        self._works = deque(channel.send(part, _TAG) for part in parts)

    def send(self, part: Tensor) -> None:
        self._works.append(self._channel.send(part, _TAG))

    def wait_first(self) -> None:
        _finish(self._works.popleft())

    def wait(self) -> None:
        while self._works:
            self.wait_first()


class _Arrivals:
    """Messages that arrive in order over one channel. Each target says whether the message is added to it."""

    def __init__(self, channel: Channel, targets: Iterable[tuple[Tensor, bool]]) -> None:
        self._channel, self._todo = channel, deque(targets)
        self._posted: deque[tuple[Tensor, Tensor | None, Work]] = deque()
        self._adding = sum(adds for _, adds in self._todo)  # targets that are added to and not posted yet
        self._largest = max((target.nbytes for target, adds in self._todo if adds), default=0)
        self._slots = 0
        self._free: list[Tensor] = []
        channel.connected()  # so that its round trip is known
        self._post()

    def _post(self) -> None:
        """Post receives in the order in which the messages come, as far as there is scratch memory."""
        while self._todo:
            target, adds = self._todo[0]
            slot = self._slot(target) if adds else None
            if adds and slot is None:
                break
            self._todo.popleft()
            self._adding -= adds
            into = target if slot is None else slot[: target.nbytes].view(target.dtype)
            self._posted.append((target, slot, self._channel.receive(into, _TAG)))
        if not self._adding:
            self._give_back()

    def _slot(self, like: Tensor) -> Tensor | None:
        """Return scratch memory for a target, borrowing more if possible; the first slot is always granted."""
        if not self._free and (slot := _borrow(self._channel, self._largest, like, must=self._slots == 0)) is not None:
            self._slots += 1
            self._free.append(slot)
        return self._free.pop() if self._free else None

    def _give_back(self) -> None:
        for slot in self._free:
            _return(self._channel, slot)
        self._free.clear()

    def each(self, leaving: _Departures | None = None) -> Iterator[Tensor]:
        """Yield each target when it is complete; `leaving` holds the same parts, each of which must have left first."""
        while self._posted:
            target, slot, work = self._posted.popleft()
            _finish(work)
            if leaving is not None:
                leaving.wait_first()
            if slot is not None:
                _add(target, slot[: target.nbytes].view(target.dtype))
                self._free.append(slot)
                self._post()
            yield target


def _borrow(channel: Channel, size: int, like: Tensor, *, must: bool) -> Tensor | None:
    """Borrow scratch memory of at least `size` bytes; return None if all that may be used is in use, unless `must`."""
    key = (channel.me, channel.other)
    with _lending:
        trip = _trips[key] = min(channel.round_trip, _trips.get(key, math.inf))  # the best measurement counts
        if not must and _lent[key] + size > room_for(math.inf, trip):
            return None
        slot = scratch.take(size, like)
        _lent[key] += slot.nbytes
    return slot


def _return(channel: Channel, slot: Tensor) -> None:
    with _lending:
        _lent[channel.me, channel.other] -= slot.nbytes
    scratch.give_back(slot)


class Ring:
    """Ring all-reduce: n participants cut the tensor into n pieces, and in each round each sends one to the next.

    In round r participant i sends piece i - 1 - r (modulo n) and receives piece i - 2 - r. Up to round n - 2 it adds
    what it receives, so that piece i is then complete at participant i; from round n - 1 on it copies complete pieces.

    A short tensor goes around whole in n - 1 rounds, and all participants add the same parts in the same order. Two
    participants that are far apart swap all that they have (`plan.ring`).
    """

    scatters = True

    def __init__(
        self, previous: Channel | None, following: Channel | None, position: int, count: int, segments: int = 1
    ) -> None:
        """Set up one participant's place in the ring; only a single participant has no channels (None)."""
        self.previous, self.following = previous, following
        self.position, self.count, self.segments = position, count, segments

    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by the sum, in rounds 0 to 2n - 3, or in fewer if it is short."""
        size = flat.numel() * flat.element_size()
        if self.following is None or size == 0:
            return
        self.following.connected()  # so that its round trip is known
        if not goes_whole(self.count, size, self.following.round_trip):
            self._rounds(flat, range(2 * self.count - 2))
        elif self.count == 2:
            self._swap(flat)
        else:
            self._pass_whole(flat)

    def reduce_scatter(self, flat: Tensor) -> None:
        """Make this participant's piece the sum, in rounds 0 to n - 2."""
        self._rounds(flat, range(self.count - 1))

    def all_gather(self, flat: Tensor) -> None:
        """Send the pieces around, in rounds n - 1 to 2n - 3."""
        self._rounds(flat, range(self.count - 1, 2 * self.count - 2))

    def _rounds(self, flat: Tensor, rounds: range) -> None:
        n, i = self.count, self.position
        if self.previous is None or self.following is None:
            return
        parts = [_segments(piece, self.segments) for piece in _pieces(flat, n)]
        got = [(part, r) for r in rounds for part in parts[(i - 2 - r) % n]]
        arrivals = _Arrivals(self.previous, [(part, r < n - 1) for part, r in got])
        departures = _Departures(self.following, parts[(i - 1 - rounds.start) % n])
        for part, (_, r) in zip(arrivals.each(), got, strict=True):
            if r + 1 < rounds.stop:
                departures.send(part)
        departures.wait()

    def _swap(self, flat: Tensor) -> None:
        """Send all of `flat` to the only other participant and add what it sends; a + b equals b + a bit for bit."""
        assert self.previous is not None and self.following is not None
        parts = _segments(flat, 2 * self.segments)
        arrivals = _Arrivals(self.previous, [(part, True) for part in parts])
        departures = _Departures(self.following, parts)
        for _ in arrivals.each(departures):
            pass

    def _pass_whole(self, flat: Tensor) -> None:
        assert self.previous is not None and self.following is not None
        n, i = self.count, self.position
        rows = flat.new_empty(n, flat.numel()).unbind()
        rows[i].copy_(flat)
        arrivals = _Arrivals(self.previous, [(rows[(i - 1 - r) % n], False) for r in range(n - 1)])
        departures = _Departures(self.following, rows[i : i + 1])
        for r, row in enumerate(arrivals.each()):
            if r < n - 2:
                departures.send(row)
        flat.copy_(rows[0])
        for row in rows[1:]:
            flat.add_(row)
        departures.wait()


class _Whole(ABC):
    """Base of syncs that do not work on pieces; new weights go around a ring however the gradient was summed."""

    scatters = False

    def __init__(self, ring: Ring | None) -> None:
        self._ring = ring

    @abstractmethod
    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by the sum over all participants."""

    def reduce_scatter(self, flat: Tensor) -> None:
        """Do the same as `all_reduce`."""
        self.all_reduce(flat)

    def all_gather(self, flat: Tensor) -> None:
        """Send the pieces around the ring of the participants."""
        if self._ring is not None:
            self._ring.all_gather(flat)


class Tree(_Whole):
    """A chain in each region towards its first participant, the leader; a ring of the leaders; the chains back.

    `above` is the neighbour towards the leader (None for the leader), `below` the one away from it (None for the last).
    """

    def __init__(
        self,
        above: Channel | None,
        below: Channel | None,
        leaders: Ring | None,
        segments: int = 1,
        ring: Ring | None = None,
    ) -> None:
        """Set up one participant's place; a leader has the ring of `leaders`; `ring` links all participants."""
        super().__init__(ring)
        self.above, self.below, self.leaders, self.segments = above, below, leaders, segments

    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by the sum: up the chain, around the ring of the leaders, and down the chain."""
        parts = _segments(flat, self.segments)
        sums = None if self.above is None else _Arrivals(self.above, [(part, False) for part in parts])
        self._up(parts)
        if self.leaders is not None:
            self.leaders.all_reduce(flat)
        ready = parts if sums is None else sums.each()
        if self.below is None:
            deque(ready, maxlen=0)
        else:
            _Departures(self.below, ready).wait()

    def _up(self, parts: Sequence[Tensor]) -> None:
        """Add what comes from below, segment by segment, and pass it on."""
        ready = parts if self.below is None else _Arrivals(self.below, [(part, True) for part in parts]).each()
        if self.above is None:
            deque(ready, maxlen=0)
        else:
            _Departures(self.above, ready).wait()


class Server(_Whole):
    """All send to the root, which adds their tensors up in listed order (its own first) and sends the sum to all.

    A root that is no participant itself passes a tensor to work in, whose content does not matter.
    """

    def __init__(
        self, root: Channel | None, others: Sequence[Channel] = (), *, takes_part: bool = True, segments: int = 1,
        ring: Ring | None = None,
    ) -> None:  # fmt: skip
        """Set up one worker's place.

        A participant has a channel to the `root`; the root (None) has channels to all `others`.
        """
        super().__init__(ring)
        self.root, self.others, self.takes_part, self.segments = root, tuple(others), takes_part, segments

    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by the sum, through the root."""
        parts = _segments(flat, self.segments)
        if self.root is None:
            return self._serve(parts)
        sums = _Arrivals(self.root, [(part, False) for part in parts])
        departures = _Departures(self.root, parts)
        deque(sums.each(), maxlen=0)
        return departures.wait()

    def _serve(self, parts: Sequence[Tensor]) -> None:
        """Add up what comes and send the sums back.

        If the root has no part of its own, it copies the first part that comes and adds the others.
        """
        coming = [
            _Arrivals(channel, [(part, self.takes_part or k > 0) for part in parts]).each()
            for k, channel in enumerate(self.others)
        ]
        going = [_Departures(channel, ()) for channel in self.others]
        for arrived in zip(*coming, strict=True):
            for departures in going:
                departures.send(arrived[0])
        for departures in going:
            departures.wait()


def make_sync(spec: BucketSpec, program: Program, network: Channels) -> SyncMethod | None:
    """Return the sync of a bucket for this worker; None if it has nothing to send.

    `sparse` is a ring that is given only the kept values. For `factors` this is a ring that adds whole gradients.
    """
    me, members = program.device, spec.members
    if me not in members and me != spec.root:
        return None
    channels = _Neighbours(network, f"{program.job.name} sync {spec.number}", me)
    match spec.how:
        case None | "duplicate":
            return None
        case "ring" | "sparse" | "factors":
            return channels.ring(members, spec.segments)
        case "tree":
            return _tree(spec, channels)
        case "server":
            return _server(spec, channels)
        case _:
            assert_never(spec.how)


class _Neighbours:
    """The channels of one sync of one worker."""

    def __init__(self, network: Channels, name: str, me: str) -> None:
        self._network, self._name, self.me = network, name, me

    def to(self, other: str | None) -> Channel | None:
        return None if other in (None, self.me) else self._network.channel(self._name, str(other))

    def ring(self, members: Sequence[str], segments: int) -> Ring:
        """Return this worker's place in a ring of the members."""
        i, n = members.index(self.me), len(members)
        return Ring(self.to(members[i - 1]), self.to(members[(i + 1) % n]), i, n, segments)


def _gathering(spec: BucketSpec, channels: _Neighbours) -> Ring | None:
    """Return the ring on which new weights go around; None if not each participant updates a piece."""
    sharded = spec.layout != "replicated" and channels.me in spec.members
    return channels.ring(spec.members, spec.segments) if sharded else None


def _tree(spec: BucketSpec, channels: _Neighbours) -> Tree:
    chains: dict[str, list[str]] = {}
    for name, region in zip(spec.members, spec.regions, strict=True):
        chains.setdefault(region, []).append(name)
    chain = next(chain for chain in chains.values() if channels.me in chain)
    at = chain.index(channels.me)
    leaders = [chain[0] for chain in chains.values()]
    return Tree(
        channels.to(chain[at - 1]) if at else None,
        channels.to(chain[at + 1]) if at + 1 < len(chain) else None,
        None if at else channels.ring(leaders, spec.segments),
        spec.segments,
        _gathering(spec, channels),
    )


def _server(spec: BucketSpec, channels: _Neighbours) -> Server:
    served = spec.members if channels.me == spec.root else ()
    return Server(
        channels.to(spec.root),
        [channel for name in served if (channel := channels.to(name)) is not None],
        takes_part=channels.me in spec.members,
        segments=spec.segments,
        ring=_gathering(spec, channels),
    )
