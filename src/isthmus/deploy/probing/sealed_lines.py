"""Lines of JSON over a socket, between two ends that share a secret token.

Each end proves that it knows the token without sending it; `purpose` says what the connection is for, and s and c are
fresh random numbers:

    server ─▶ client    s
    client ─▶ server    c, HMAC(token, "client" purpose s c)
    server ─▶ client    HMAC(token, "server" purpose s c), or null if it refuses

After that every line carries HMAC(key of its direction, its number, its text). The keys are made from the token, s and
c, so an eavesdropper can read a line, but cannot forge, replay, reorder or move one. The lines are not encrypted. Their
length is bounded, and no wait lasts longer than stated. Every failure is an OSError; before the other end has proved
itself, no error quotes what it sent. TCP keepalive detects a silent end that is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

__all__ = ["PATIENCE", "Sealed", "SealedMessage", "arrivals", "enter", "greet"]

PATIENCE = 10.0  # seconds to wait for the other end's next bytes
_LONGEST = 16_384  # bytes of a line
_NONCE = 32  # bytes
_PROVING = 32  # connections that may be proving themselves at the same time
_ACCEPTING = 0.1  # seconds between two checks of whether anybody is still waited for
_SILENCE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # seconds, seconds, unanswered probes


class SealedMessage(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is", tag=str.lower
):
    """Base of all messages; the field `is` names the type."""


class _Challenge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    server: str


class _Proof(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client: str
    proof: str


class _Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    proof: str | None


class _Lines:
    """Plain lines. Bytes received beyond the last line are kept for the next reader."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        _keep_asking(connection)
        self.socket = connection
        self.rest = bytearray()

    def write(self, message: Any) -> None:
        self.socket.sendall(msgspec.json.encode(message) + b"\n")

    def read(self, timeout: float | None) -> bytes | None:
        """Return the next line; None if the other end closed between two lines.

        A line may not take longer than `timeout` to come.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while (found := self.rest.find(b"\n", 0, _LONGEST)) < 0:
            if len(self.rest) >= _LONGEST:
                raise ConnectionError("a line is too long")
            if time.monotonic() >= end:
                raise TimeoutError
            try:
                part = self.socket.recv(_LONGEST)
            except TimeoutError:  # the socket's own timeout, which all threads share
                continue
            if not part and not self.rest:
                return None
            if not part:
                raise ConnectionError("a line was cut off")
            self.rest += part
        line = bytes(self.rest[:found])
        del self.rest[: found + 1]
        return line

    def expect(self, kind: Any) -> Any:
        line = self.read(PATIENCE)
        if line is None:
            raise ConnectionError("the other end closed the connection")
        return _decoded(line, kind)


def _keep_asking(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        if connection.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _decoded(line: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):  # these errors would quote the line
        raise ConnectionError("a line cannot be understood") from None


class Sealed:
    """A connection whose ends have proved themselves; several threads may send, one receives."""

    def __init__(self, lines: _Lines, sending: bytes, receiving: bytes) -> None:
        self.socket = lines.socket
        self._lines = lines
        self._keys = (sending, receiving)
        self._counts = [0, 0]
        self._lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Send one line."""
        text = msgspec.json.encode(message)
        with self._lock:
            self.socket.sendall(self._mac(0, text) + b" " + text + b"\n")

    def receive(self, kind: Any, timeout: float | None = PATIENCE) -> Any:
        """Return the next line as a `kind` (a type, or a union of types); None if the other end closed."""
        line = self._lines.read(timeout)
        if line is None:
            return None
        mac, _, text = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(1, text)):
            raise ConnectionError("a line is not from the other end")
        return _decoded(text, kind)

    def rest(self) -> bytes:
        """Return the bytes that came after the last line that was received, and forget them here."""
        rest = bytes(self._lines.rest)
        self._lines.rest.clear()
        return rest

    def hang_up(self) -> None:
        """Stop sending, which the other end notices."""
        with contextlib.suppress(OSError):  # the other end closed first
            self.socket.shutdown(socket.SHUT_WR)

    def _mac(self, way: int, text: bytes) -> bytes:
        number = self._counts[way].to_bytes(8, "big")
        self._counts[way] += 1
        return hmac.digest(self._keys[way], number + text, "sha256").hex().encode()


def greet(connection: socket.socket, token: bytes, purpose: str) -> Sealed:
    """Do the server's side of the handshake.

    Raise PermissionError if the other end does not know the token, or has another purpose.
    """
    lines = _Lines(connection)
    server = secrets.token_hex(_NONCE)
    lines.write(_Challenge(server=server))
    answer = lines.expect(_Proof)
    if not _same(answer.proof, _proof(token, "client", purpose, server, answer.client)):
        lines.write(_Verdict(proof=None))
        raise PermissionError("it does not know the token")
    lines.write(_Verdict(proof=_proof(token, "server", purpose, server, answer.client)))
    return _sealed(lines, token, purpose, server, answer.client, ("to client", "to server"))


def arrivals(server: socket.socket, token: bytes, purpose: str, end: float) -> Iterator[Sealed | OSError]:
    """Yield the connections that prove the token before `end`, and the errors of those that do not get in.

    A client that proves itself slowly does not delay the others; if too many do so at once, new ones are closed.
    """
    proved: SimpleQueue[Sealed | OSError] = SimpleQueue()
    proving, over = threading.BoundedSemaphore(_PROVING), threading.Event()

    def prove(connection: socket.socket) -> None:
        try:
            proved.put(greet(connection, token, purpose))
        except OSError as problem:
            connection.close()
            proved.put(problem)
        finally:
            proving.release()

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:  # the client has gone again, too many files are open, or the server is closed
                over.wait(_ACCEPTING)
                continue
            if proving.acquire(blocking=False):
                threading.Thread(target=prove, args=(connection,), daemon=True).start()
            else:
                connection.close()

    server.settimeout(_ACCEPTING)
    threading.Thread(target=accept, daemon=True).start()
    try:
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(Empty):
                yield proved.get(timeout=left)
    finally:
        over.set()
        with contextlib.suppress(OSError):  # not every system can shut down a listening socket
            server.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread at once


def enter(connection: socket.socket, token: bytes, purpose: str) -> Sealed:
    """Do the client's side of the handshake.

    Raise PermissionError if the other end refuses, or does not know the token itself.
    """
    lines = _Lines(connection)
    server, client = lines.expect(_Challenge).server, secrets.token_hex(_NONCE)
    lines.write(_Proof(client=client, proof=_proof(token, "client", purpose, server, client)))
    verdict = lines.expect(_Verdict)
    if verdict.proof is None:
        raise PermissionError("the token differs from the one there")
    if not _same(verdict.proof, _proof(token, "server", purpose, server, client)):
        raise PermissionError("the other end does not know the token")
    return _sealed(lines, token, purpose, server, client, ("to server", "to client"))


def _sealed(lines: _Lines, token: bytes, purpose: str, server: str, client: str, ways: tuple[str, str]) -> Sealed:
    sending, receiving = (bytes.fromhex(_proof(token, way, purpose, server, client)) for way in ways)
    return Sealed(lines, sending, receiving)


def _proof(token: bytes, role: str, purpose: str, server: str, client: str) -> str:
    """Return a proof of the token for a role; JSON keeps the parts apart, whatever they contain."""
    return hmac.digest(token, msgspec.json.encode([role, purpose, server, client]), "sha256").hex()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
