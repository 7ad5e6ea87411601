"""Two ends that share a secret, and everyone else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from isthmus.deploy.probing import sealed_lines as sealed
from isthmus.deploy.probing.sealed_lines import Sealed, enter, greet

TOKEN = b"a secret of many letters"


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


def both(
    ends: tuple[socket.socket, socket.socket], token: bytes = TOKEN, purpose: str = "test"
) -> tuple[Sealed | OSError, Sealed | OSError]:
    """What the server's and the client's side came to."""
    results: dict[str, Sealed | OSError] = {}

    def meet(name: str, function: Callable[..., Sealed], *words: object) -> None:
        try:
            results[name] = function(*words)
        except OSError as problem:
            results[name] = problem

    thread = threading.Thread(target=meet, args=("client", enter, ends[1], token, purpose))
    thread.start()
    meet("server", greet, ends[0], TOKEN, "test")
    thread.join()
    return results["server"], results["client"]


def joined(ends: tuple[socket.socket, socket.socket]) -> tuple[Sealed, Sealed]:
    server, client = both(ends)
    assert isinstance(server, Sealed) and isinstance(client, Sealed)
    return server, client


def test_lines_both_ways(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = joined(ends)
    for number in range(3):
        server.send(Note(f"to client {number}"))
        client.send(Note(f"to server {number}"))
        assert client.receive(Note) == Note(f"to client {number}")
        assert server.receive(Note) == Note(f"to server {number}")
    client.send(Note("last"))
    client.socket.sendall(b"and raw bytes")
    client.hang_up()
    assert server.receive(Note) == Note("last")
    assert server.rest() + server.socket.recv(100) == b"and raw bytes" and server.receive(Note) is None


@pytest.mark.parametrize(("token", "purpose"), [(b"another secret of letters", "test"), (TOKEN, "something else")])
def test_strangers_are_refused(ends: tuple[socket.socket, socket.socket], token: bytes, purpose: str) -> None:
    server, client = both(ends, token, purpose)
    assert isinstance(server, PermissionError) and isinstance(client, PermissionError)
    assert "the token differs" in str(client)


def test_a_server_that_does_not_know_the_token_is_left(ends: tuple[socket.socket, socket.socket]) -> None:
    """It may say what it likes: its proof is checked as well."""
    ends[0].sendall(b'{"server":"00"}\n{"proof":"00"}\n')
    with pytest.raises(PermissionError, match="does not know the token"):
        enter(ends[1], TOKEN, "test")


def test_the_token_is_never_sent(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b'{"server":"00"}\n{"proof":null}\n')
    with pytest.raises(PermissionError, match="the token differs"):
        enter(ends[1], TOKEN, "test")
    sent = ends[0].recv(10_000)
    assert TOKEN not in sent and TOKEN.hex().encode() not in sent


def test_lines_cannot_be_made_changed_or_said_again(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = joined(ends)
    client.send(Note("one"))
    line = ends[0].recv(10_000)
    for forged in (line.replace(b"one", b"two"), b'{"text":"one"}\n', b"\xff\n", line[:10] + b"\n"):
        fresh = Sealed(sealed._Lines(ends[0]), *server._keys)
        ends[1].sendall(forged)
        with pytest.raises(ConnectionError, match="not from the other end"):
            fresh.receive(Note)
    ends[1].sendall(line)
    assert server.receive(Note) == Note("one")
    ends[1].sendall(line)
    with pytest.raises(ConnectionError, match="not from the other end"):
        server.receive(Note)


def test_what_cannot_be_a_line(ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "PATIENCE", 0.05)
    cases = [
        (b'{"[/x]":1}\n', "cannot be understood$"),
        (b"x" * 20_000, "too long"),
        (b"half", "cut off"),
        (b"", "closed"),
    ]
    for sent, said in cases:
        a, b = socket.socketpair()
        with a, b:
            b.sendall(sent)
            b.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError, match=said):
                greet(a, TOKEN, "test")
    with pytest.raises(TimeoutError):
        greet(ends[0], TOKEN, "test")  # somebody who says nothing


def test_lines_of_another_kind_are_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    server, client = joined(ends)
    client.send(Note("one"))
    with pytest.raises(ConnectionError, match="cannot be understood"):
        server.receive(int)
