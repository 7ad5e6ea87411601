"""What a host does while its links are probed: it obeys the leader of the probe, with one thread for each pair.

leader ─▶ prober    Welcome or ProberRefused, then Listen and Measure, ReadClock, Pass and Dismiss, at last End
prober ─▶ leader    ProberHello, then for each pair Listening, PairMeasured or PairFailed; Read and ProbeRelayed

A pair is measured on one connection that the two hosts make for it, here between a, which was told to Measure, and b:

1. a sends small messages and b returns them: this gives the round trip.
2. a sends as fast as it can for a while and closes its direction; b records how many bytes have come by when.
3. b reports what it saw, sends in its turn and closes; a records.

The rate is the slope of the bytes over time in the second half, where slow start is over: each direction takes at least
20 round trips, and the first ten of them bring a connection from 10 segments in flight to 10,000, which is 15 MB.

All-reduces are measured by processes beside the prober, which only relays their messages (`sync_participants.py`).
"""

from __future__ import annotations

import bisect
import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec

from isthmus.deploy.probing.sealed_lines import PATIENCE, Sealed, SealedMessage, arrivals, enter
from isthmus.deploy.probing.sync_participants import Participants, Said, ToDo

__all__ = [
    "LONGEST",
    "MEETING",
    "ROUND_TRIPS",
    "Dismiss",
    "End",
    "Listen",
    "Listening",
    "Measure",
    "Order",
    "PairFailed",
    "PairMeasured",
    "Pass",
    "ProbeRelayed",
    "ProberHello",
    "ProberRefused",
    "Rate",
    "Read",
    "ReadClock",
    "Told",
    "Welcome",
    "join",
    "obey",
    "server_at",
    "steady_rate",
]

MEETING = "meeting"  # the purpose of the connection between leader and prober
MOST_PARTICIPANTS = 64  # on one host
LONGEST = 60.0  # seconds of sending in one direction
_FEWEST_PINGS = 5
_PING_SECONDS = 1.0  # seconds; after them only the fewest pings are completed
_PING, _LAST = b"p" * 64, b"e" * 64
ROUND_TRIPS = 20  # least duration of sending, in each direction
_DRAIN = 120.0  # seconds in which what is in flight when sending ends must have come
_BLOCK = 1 << 20  # bytes passed to or from the system at once
_UNSENT = 1 << 18  # unsent bytes that the sender's system may hold; more would only arrive after the end
_APART = 0.0005  # least seconds between two points
_UNSTEADY = 0.1  # a rate is unsteady if the halves of the steady part differ by more than this fraction


class ProberHello(SealedMessage, frozen=True, kw_only=True):
    """Ask to take part: the host's name, and the address at which it will listen."""

    host: Annotated[str, msgspec.Meta(max_length=255)]
    address: Annotated[str, msgspec.Meta(max_length=255)]


class Welcome(SealedMessage, frozen=True, kw_only=True):
    """The answer that lets a host take part."""


class ProberRefused(SealedMessage, frozen=True, kw_only=True):
    """The answer that refuses a host."""

    why: str


class Listen(SealedMessage, frozen=True, kw_only=True):
    """Be the b of this pair."""

    pair: int


class Measure(SealedMessage, frozen=True, kw_only=True):
    """Be the a of this pair; b listens at the address and port.

    `seconds` is the least time of sending in each direction, `pings` the most round trips to measure.
    """

    pair: int
    address: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST)]
    pings: Annotated[int, msgspec.Meta(ge=1, le=1000)]


class ReadClock(SealedMessage, frozen=True, kw_only=True):
    """Report what your clock reads."""

    number: int


class Pass(SealedMessage, frozen=True, kw_only=True):
    """Pass an order on to a participant of this host."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=MOST_PARTICIPANTS)]
    order: ToDo


class Dismiss(SealedMessage, frozen=True, kw_only=True):
    """End the participants of this host."""


class End(SealedMessage, frozen=True, kw_only=True):
    """Stop; nothing more is to be done."""


class Listening(SealedMessage, frozen=True, kw_only=True):
    """The b of a pair waits at this port for its a."""

    pair: int
    port: int


class Rate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bytes per second that came through, and whether the rate was steady."""

    bytes_per_second: float
    steady: bool


class PairMeasured(SealedMessage, frozen=True, kw_only=True):
    """What the a of a pair found: round trips in seconds, and the rates from a to b and back."""

    pair: int
    least: float
    median: float
    there: Rate
    back: Rate


class PairFailed(SealedMessage, frozen=True, kw_only=True):
    """A pair could not be measured."""

    pair: int
    why: str


class Read(SealedMessage, frozen=True, kw_only=True):
    """The clock in seconds: that of `time.monotonic`, which is the same for all processes of a host."""

    number: int
    now: float


class ProbeRelayed(SealedMessage, frozen=True, kw_only=True):
    """A message from a participant of this host."""

    slot: int
    said: Said


class _Push(SealedMessage, frozen=True, kw_only=True):
    """From a to b: bytes follow for this many seconds; send back for as long."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=LONGEST)]


Order = Welcome | ProberRefused | Listen | Measure | ReadClock | Pass | Dismiss | End
Told = ProberHello | Listening | PairMeasured | PairFailed | Read | ProbeRelayed


def join(connection: socket.socket, token: bytes, host: str, address: str) -> Sealed:
    """Take part under this name; raise PermissionError if the leader refuses."""
    line = enter(connection, token, MEETING)
    line.send(ProberHello(host=host, address=address))
    answer = line.receive(Order)
    if not isinstance(answer, Welcome):
        why = answer.why if isinstance(answer, ProberRefused) else "the leader has gone"
        raise PermissionError(why)
    return line


def obey(line: Sealed, token: bytes, address: str) -> bool:
    """Obey the leader's orders; return True at its End, False if it is gone before that."""
    participants = Participants(address, lambda slot, said: line.send(ProbeRelayed(slot=slot, said=said)))
    with contextlib.ExitStack() as ends:
        ends.callback(participants.dismiss)
        while (order := line.receive(Order, timeout=None)) is not None:
            match order:
                case Listen() | Measure():
                    threading.Thread(target=_take_part, args=(order, line, token, address), daemon=True).start()
                case ReadClock(number=number):
                    line.send(Read(number=number, now=time.monotonic()))
                case Pass(slot=slot, order=todo):
                    participants.pass_on(slot, todo)
                case Dismiss():
                    participants.dismiss()
                case End():
                    return True
        return False


def _take_part(order: Listen | Measure, line: Sealed, token: bytes, address: str) -> None:
    with contextlib.suppress(OSError):  # the leader is gone: `obey` sees that too
        try:
            if isinstance(order, Listen):
                _answer(order, line, token, address)
            else:
                line.send(_measured(order, token, address))
        except (OSError, UnicodeError) as problem:  # UnicodeError comes from a malformed address
            line.send(PairFailed(pair=order.pair, why=_reason(problem)))


def _reason(problem: Exception) -> str:
    if isinstance(problem, TimeoutError):
        return "nothing came for too long"
    return getattr(problem, "strerror", None) or str(problem)


def _purpose(pair: int) -> str:
    return f"pair {pair}"


def server_at(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at this address only."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(place[0]), port), family=family)


def _answer(order: Listen, line: Sealed, token: bytes, address: str) -> None:
    """Measure a pair as its b."""
    with server_at(address) as server:
        line.send(Listening(pair=order.pair, port=server.getsockname()[1]))
        peer = _accepted(server, token, _purpose(order.pair))
    with peer.socket:
        _return_pings(peer.socket)
        push = peer.receive(_Push)
        if push is None:
            raise ConnectionError("the other host went away")
        there = _pull(peer, push.seconds)
        peer.send(there)
        _push(peer.socket, push.seconds)


def _accepted(server: socket.socket, token: bytes, purpose: str) -> Sealed:
    """Return the first connection that proves the token and is for this pair."""
    for peer in arrivals(server, token, purpose, time.monotonic() + PATIENCE):
        if isinstance(peer, Sealed):
            _prepare(peer.socket)
            return peer
    raise TimeoutError


def _measured(order: Measure, token: bytes, address: str) -> PairMeasured:
    """Measure a pair as its a."""
    place = (order.address, order.port)
    with socket.create_connection(place, timeout=PATIENCE, source_address=(address, 0)) as connection:
        peer = enter(connection, token, _purpose(order.pair))
        _prepare(connection)
        trips = _pings(connection, order.pings)
        seconds = min(LONGEST, max(order.seconds, ROUND_TRIPS * statistics.median(trips)))
        peer.send(_Push(seconds=seconds))
        _push(connection, seconds)
        there = peer.receive(Rate, timeout=seconds + _DRAIN)
        if there is None:
            raise ConnectionError("the other host went away")
        back = _pull(peer, seconds)
    return PairMeasured(pair=order.pair, least=min(trips), median=statistics.median(trips), there=there, back=back)


def _prepare(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


def _pings(connection: socket.socket, most: int) -> list[float]:
    """Return the seconds of each round trip."""
    trips: list[float] = []
    end = time.perf_counter() + _PING_SECONDS
    while len(trips) < min(most, _FEWEST_PINGS) or (len(trips) < most and time.perf_counter() < end):
        start = time.perf_counter()
        connection.sendall(_PING)
        _read(connection, len(_PING))
        trips.append(time.perf_counter() - start)
    connection.sendall(_LAST)
    return trips


def _return_pings(connection: socket.socket) -> None:
    while (ping := _read(connection, len(_PING))) != _LAST:
        connection.sendall(ping)


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the other host went away")
        found += part
    return found


def _push(connection: socket.socket, seconds: float) -> None:
    """Send for this many seconds, then close this direction."""
    block = memoryview(os.urandom(_BLOCK))  # random, so that nothing on the way can compress it
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.send(block)
    connection.shutdown(socket.SHUT_WR)


def _pull(peer: Sealed, seconds: float) -> Rate:
    """Receive until the other end closes its direction, and return the rate."""
    buffer = bytearray(_BLOCK)
    points: list[tuple[float, int]] = []
    total, now = len(peer.rest()), time.perf_counter()
    end = now + seconds + _DRAIN
    while count := peer.socket.recv_into(buffer):
        total, now = total + count, time.perf_counter()
        if not points or now - points[-1][0] >= _APART:
            points.append((now, total))
        if now > end:
            raise ConnectionError("it is too slow to be measured")
    if not points or now - points[0][0] < seconds / 2:
        raise ConnectionError("the other host went away")
    return steady_rate(points, seconds)


def steady_rate(points: Sequence[tuple[float, int]], seconds: float) -> Rate:
    """Return the rate: the slope of bytes over time, by least squares over the second half of the sending.

    `points` say when how many bytes had come in all. Points later than `seconds` after the first are left out.
    """
    begin = points[0][0]
    first, middle, last = (bisect.bisect(points, (begin + seconds * part,)) for part in (0.5, 0.75, 1.0))
    if last - first < 3:  # on a link this slow every point counts
        if len(points) < 2:
            raise ConnectionError("it is too slow to be measured")
        first, middle, last = 0, 0, len(points)
    whole = _slope(points[first:last])
    halves = [_slope(part) for part in (points[first:middle], points[middle:last]) if len(part) > 2]
    steady = len(halves) == 2 and abs(halves[0] - halves[1]) <= _UNSTEADY * whole
    return Rate(bytes_per_second=whole, steady=steady)


def _slope(points: Sequence[tuple[float, int]]) -> float:
    return statistics.linear_regression([when for when, _ in points], [count for _, count in points]).slope


def main() -> int:
    """Run a prober whose standard input is a socket that the leader holds; its arguments are HOST ADDRESS."""
    host, address = sys.argv[1:]
    token = os.environ["ISTHMUS_TOKEN"].encode()
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(0)) as connection:
        return 0 if obey(join(connection, token, host, address), token, address) else 1
    return 1  # the other end sees what went wrong


if __name__ == "__main__":
    sys.exit(main())
