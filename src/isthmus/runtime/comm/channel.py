"""Messages between two workers, on a connection of their own.

A channel is a Gloo process group of two, built directly on a prefix of the store. There is no global group, and one
channel can be created, closed or lost while the others stay. Gloo's receive is a rendezvous (a send leaves when the
receiver has said that it is ready), so a receive posted early hides a round trip. Equal tags match in order.

Gloo carries host memory only. CUDA tensors are staged through pinned memory. Between two workers that both have NCCL
they go over NCCL, with one communicator for each direction, since operations on one communicator run in the order in
which they were posted.

A channel of two workers that cannot reach each other goes over relays (`relay.py`): it is a connection with the nearest
relay, which is asked for every message that is to come.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from isthmus.errors import IsthmusError

__all__ = ["NOTE_BYTES", "Channel", "ChannelError", "Channels", "Work"]

NOTE_BYTES = 4096  # size of the note that tells a relay of a channel
_NOTES = "relay"  # the channel that carries these notes
_Post = Callable[[Tensor, int], "Work"]

_FOR_EVER = timedelta(days=365)  # the engine notices when a worker died; silence is no error here
_AT_ONCE = timedelta(milliseconds=1)
_PATIENCE = 2.0  # seconds for a connecting thread to notice that the channel was closed
_LAST_TAG = 2**31 - 1  # reserved for closing
_PING_TAG = 2**31 - 2  # reserved for measuring the round trip
_ASK_TAG = 2**31 - 3  # reserved for requests to a relay
_PINGS = 3
_ABSENT = "absent"


class ChannelError(IsthmusError):
    """A message cannot be sent or received: the other worker is gone, or the channel was closed here."""


class Work(Protocol):
    """A message on its way."""

    def wait(self) -> None:
        """Block this thread until the message has left or arrived; raise ChannelError if it never will."""


class Channel:
    """Messages between this worker and one other. All methods may be called from any thread.

    `over` is the nearest relay, if the two cannot reach each other. With `passes`, this worker is itself a relay and
    this is one leg of the channel.
    """

    def __init__(
        self,
        name: str,
        me: str,
        other: str,
        connect: Callable[[Channel], tuple[Any, Any]],
        *,
        over: str | None = None,
        passes: bool = False,
    ) -> None:
        self.name, self.me, self.other, self.over, self.passes = name, me, other, over, passes
        self.near = over or other  # the worker at the other end of the connection
        self.closed = False
        self.bytes_sent = 0
        self.round_trip = 0.0  # seconds, once connected
        self.keeps: object = None  # keeps the Python store alive that the process groups use
        self._peer = 1 if me < self.near else 0
        self._gloo: Any = None
        self._nccl: Any = None
        self._ready = False
        self._failure: Exception | None = None
        self._stager: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._connect, args=(connect,), name=f"connect {name}", daemon=True)
        self._thread.start()

    def connected(self) -> None:
        """Block until both sides have created the channel."""
        if not self._ready:
            self._thread.join()
        if self.closed or self._failure is not None:
            raise self._error(self._failure) from self._failure

    def send(self, tensor: Tensor, tag: int) -> Work:
        """Start to send and return at once; the tensor must not change until the work has been waited for."""
        self.connected()
        with self._lock:
            self.bytes_sent += tensor.numel() * tensor.element_size()
        return self._send(tensor, tag)

    def receive(self, into: Tensor, tag: int) -> Work:
        """Post a receive. A CUDA tensor is filled on the stream that is current where the work is waited for."""
        self.connected()
        return self._receive(into, tag)

    def asked(self, note: Tensor) -> Work:
        """Post a receive of what the other side asks this relay for: tag and bytes of a message."""
        self.connected()
        return _Waiting(self, self._post(self._gloo.recv, note, _ASK_TAG))

    def _send(self, tensor: Tensor, tag: int) -> Work:
        if not tensor.is_cuda:
            return _Waiting(self, self._post(self._gloo.send, tensor, tag))
        if self._nccl is not None:
            return _Waiting(self, self._post(self._nccl[self._peer].send, tensor, tag))
        return self._staged_send(tensor.detach(), tag)

    def _receive(self, into: Tensor, tag: int) -> Work:
        ask = self._ask(tag, into.numel() * into.element_size())
        if not into.is_cuda:
            return _Waiting(self, self._post(self._gloo.recv, into, tag), holds=ask)
        if self._nccl is not None:
            return _Waiting(self, self._post(self._nccl[1 - self._peer].recv, into, tag))
        held = torch.empty(into.shape, dtype=into.dtype, pin_memory=True)
        work = self._post(self._gloo.recv, held, tag)
        return _Waiting(self, work, lambda: into.detach().copy_(held, non_blocking=True), holds=ask)

    def _ask(self, tag: int, size: int) -> Any:
        """Ask the relay, if there is one, for a message."""
        return None if self.over is None else self._post(self._gloo.send, torch.tensor([tag, size]), _ASK_TAG)

    def close(self) -> None:
        """Close the connection; every thread that waits for a message, here or there, gets a ChannelError."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        if self._gloo is not None:
            _cut(self._gloo, self._peer)
        self._thread.join(_PATIENCE)
        if self._stager is not None:
            self._stager.shutdown(wait=False, cancel_futures=True)
        for group in self._nccl or ():
            group.abort()

    def _connect(self, connect: Callable[[Channel], tuple[Any, Any]]) -> None:
        try:
            gloo, self._nccl = connect(self)
            with self._lock:
                self._gloo = gloo
            if self.closed:
                _cut(gloo, self._peer)
            if not self.passes:
                self.round_trip = _round_trip(self._send, self._receive, asks=self.me < self.other)
            self._ready = True
        except Exception as failure:
            self._failure = failure

    def _post(self, operation: Callable[..., Any], tensor: Tensor, tag: int) -> Any:
        try:
            return operation([tensor], self._peer, tag)
        except RuntimeError as failure:
            raise self._error(failure) from failure

    def _staged_send(self, tensor: Tensor, tag: int) -> Work:
        """Copy on the current stream, and send from a thread once the copy is there; the caller does not wait."""
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        held.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(tensor.device))

        def send() -> Any:
            copied.synchronize()
            return self._post(self._gloo.send, held, tag)

        with self._lock:
            if self._stager is None:
                self._stager = ThreadPoolExecutor(1, thread_name_prefix=f"send {self.name}")
        return _Staged(self, self._stager.submit(send))

    def _error(self, cause: Exception | None) -> ChannelError:
        other = self.other if self.over is None else f"{self.other} over {self.over}"
        what = f"the channel to {other} was closed here" if self.closed else f"lost the channel to {other}"
        return ChannelError(
            what,
            where=f"{self.me}, channel {self.name!r}",
            found=None if cause is None else _plain(str(cause)),
            next="If that worker died, its own last lines say why",
        )


class _Waiting:
    """A message of torch's that raises our errors.

    `then` runs when the message is there; `holds` is kept alive until then.
    """

    def __init__(
        self, channel: Channel, work: Any, then: Callable[[], object] | None = None, holds: object = None
    ) -> None:
        self._channel, self._work, self._then, self._holds = channel, work, then, holds

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as failure:
            raise self._channel._error(failure) from failure
        if self._then is not None:
            self._then()
            self._then = None


class _Staged:
    """A message that a thread sends later."""

    def __init__(self, channel: Channel, posted: Any) -> None:
        self._channel, self._posted = channel, posted

    def wait(self) -> None:
        try:
            work = self._posted.result()
        except CancelledError as failure:
            raise self._channel._error(None) from failure
        _Waiting(self._channel, work).wait()


class Channels:
    """All channels of one worker. They share one Gloo device, and so one thread that reads and writes.

    Channels may be created in any order on either side: each connects in a thread of its own. `hostname` or `interface`
    is where this worker listens. `nccl` says that it has NCCL and a device of its own. `ways` lists the relays on the
    way to each worker that it cannot reach.
    """

    def __init__(
        self,
        store: Store,
        me: str,
        *,
        hostname: str = "",
        interface: str = "",
        nccl: bool = False,
        ways: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.me, self._ways = me, ways or {}
        self._store, self._nccl = store, nccl
        where = {"interface": interface} if interface else {"hostname": hostname or "127.0.0.1"}
        self._device = ProcessGroupGloo.create_device(**where)
        self._channels: dict[tuple[str, str], Channel] = {}
        self._lock = threading.Lock()
        self._closed = self._told = False

    def channel(self, name: str, other: str) -> Channel:
        """Return the channel of this name to another worker, which must create it under the same name. Do not wait."""
        if other == self.me:
            raise ChannelError("a worker has no channel to itself", where=f"{self.me}, channel {name!r}")
        way = self._ways.get(other)
        return self._made((name, other)) if way is None else self._made((_relayed(name, self.me, other), other), way[0])

    def leg(self, name: str, other: str, over: str | None) -> Channel:
        """Return a relay's leg of a channel between two others: towards `other`, over the next relay if any."""
        return self._made((name, other), over, passes=True)

    def open_relay(self, near: str, name: str, path: Sequence[str]) -> None:
        """Notify a relay of a channel that goes over it, with all workers on its way."""
        note = json.dumps([name, *path]).encode().ljust(NOTE_BYTES)
        if len(note) > NOTE_BYTES:
            raise ChannelError("the path or the name is too long for a relay", where=f"{self.me}, channel {name!r}")
        self.notes(near).send(torch.frombuffer(bytearray(note), dtype=torch.uint8), 0).wait()

    def notes(self, near: str) -> Channel:
        """Return the channel that notifies a neighbouring relay; it is always direct."""
        return self._made((_NOTES, near))

    def _made(self, key: tuple[str, str], over: str | None = None, passes: bool = False) -> Channel:
        with self._lock:
            if self._closed:
                raise ChannelError("the network was closed here", where=f"{self.me}, channel {key[0]!r}")
            if key not in self._channels:
                self._channels[key] = Channel(key[0], self.me, key[1], self._connect, over=over, passes=passes)
            return self._channels[key]

    @property
    def channels(self) -> list[Channel]:
        """Return all channels that were created so far."""
        return list(self._channels.values())

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent over all channels."""
        return sum(channel.bytes_sent for channel in self.channels)

    def connect(self) -> None:
        """Wait until every channel created so far is connected."""
        for channel in self.channels:
            channel.connected()

    def close(self) -> None:
        """Close all channels."""
        with self._lock:
            self._closed = True
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Channel.close, self._channels.values()))

    def _connect(self, channel: Channel) -> tuple[Any, Any]:
        """Build the process groups; the lower name has rank 0. If the channel goes over relays, notify them first."""
        if channel.over is not None and not channel.passes and self.me < channel.other:
            self.open_relay(channel.over, channel.name, (self.me, *self._ways[channel.other], channel.other))
        low, high = sorted((self.me, channel.near))
        store = channel.keeps = _Patient(self._store, f"channel/{low}/{high}/{channel.name}/", channel)
        rank = int(self.me == high)
        return _gloo(store, rank, self._device), (_nccl_ways(store, rank) if self._both_nccl(channel) else None)

    def _both_nccl(self, channel: Channel) -> bool:
        """Return whether both ends have NCCL.

        Every worker publishes once whether it has NCCL; only those that have it ask. Relays carry host memory only.
        """
        if channel.over is not None or channel.passes or channel.name == _NOTES:
            return False
        told = _Patient(self._store, "nccl/", channel)
        with self._lock:
            if not self._told:
                told.set(self.me, str(self._nccl).encode())
                self._told = True
        return self._nccl and told.get(channel.other) == b"True"


class _Patient(Store):
    """A part of another store that polls, so that a waiting thread blocks no other and can be ended.

    A client of a TCPStore that waits for a key keeps all threads of its process from using it. The store may be far
    away, so known values are not asked for again.
    """

    def __init__(self, store: Store, prefix: str, channel: Channel) -> None:
        super().__init__()
        self._base, self._prefix, self._channel = store, prefix, channel
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._known[key] = value
        self._base.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta = _FOR_EVER) -> None:
        for key in keys:
            pause = 0.001
            while key not in self._known:
                # the only way to query a key that may be missing is a compare-and-set that never changes it
                found = self._base.compare_set(self._prefix + key, _ABSENT, _ABSENT)
                if found != _ABSENT.encode():
                    self._known[key] = found
                elif self._channel.closed:
                    raise ChannelError("closed before the other side was there")
                else:
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)


def _gloo(store: Store, rank: int, device: Any) -> Any:
    """Return a process group of two without threads of its own; point-to-point messages need none."""
    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices, options._threads, options._timeout = [device], 0, _FOR_EVER
    return kind(PrefixStore("gloo", store), rank, 2, options)


def _nccl_ways(store: Store, rank: int) -> tuple[Any, Any]:
    """Return two communicators: for the messages to rank 0, and for those to rank 1."""
    kind: Any = dist.ProcessGroupNCCL
    return kind(PrefixStore("nccl0", store), rank, 2), kind(PrefixStore("nccl1", store), rank, 2)


def _round_trip(send: _Post, receive: _Post, *, asks: bool) -> float:
    """Measure the round trip in seconds, with the same result on both sides.

    One side asks; the best of several trips counts, and that side tells the other.
    """
    notes = [torch.zeros(1, dtype=torch.float64) for _ in range(_PINGS if asks else _PINGS + 1)]
    posted = [receive(note, _PING_TAG) for note in notes]
    best = torch.full_like(notes[0], math.inf)
    for coming in posted[:_PINGS]:
        begin = time.perf_counter()
        if asks:
            send(best, _PING_TAG).wait()
        coming.wait()
        if not asks:
            send(best, _PING_TAG).wait()
        best = best.clamp(max=time.perf_counter() - begin)
    if asks:
        send(best, _PING_TAG).wait()
        return float(best)
    posted[-1].wait()
    return float(notes[-1])


def _relayed(name: str, a: str, b: str) -> str:
    """Return the name of all the connections that together form a channel of two workers."""
    low, high = sorted((a, b))
    return f"{name}, {low} - {high}"


def _plain(text: str) -> str:
    """Return a message of Gloo without the place in its source and its advice."""
    return text.split("] ", 1)[-1].split(". This is", 1)[0] if text.startswith("[") else text


def _cut(group: Any, peer: int) -> None:
    """Wake everything that waits on a process group by letting a receive time out.

    Gloo has no call that closes a group while others wait on it, but a wait that times out does just that.
    """
    try:
        group.recv([torch.zeros(1, dtype=torch.uint8)], peer, _LAST_TAG).wait(_AT_ONCE)
    except RuntimeError:
        return
