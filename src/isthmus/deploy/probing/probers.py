"""Bring probers together: start them as processes here, or wait for them at a meeting point.

Either way, each prober is at the other end of a connection on which both ends proved that they know the same token.
Leaving the context tells all of them that the probe is over, and leaves no process and no open port.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from queue import Empty, SimpleQueue

from isthmus.deploy.probing.prober import (
    MEETING,
    End,
    Order,
    ProberHello,
    ProberRefused,
    Told,
    Welcome,
    join,
    obey,
    server_at,
)
from isthmus.deploy.probing.sealed_lines import PATIENCE, Sealed, arrivals, greet
from isthmus.errors import RunError

__all__ = ["Company", "meeting", "started", "take_part"]

_AGAIN = 0.2  # seconds between two attempts to reach the meeting point
_LAST_WORDS = 5.0  # seconds for a prober to end by itself


class Company:
    """The probers that have joined."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._lines: dict[str, Sealed] = {}
        self._hearing: list[threading.Thread] = []
        self._told: SimpleQueue[tuple[str, Told | None]] = SimpleQueue()

    def welcome(self, line: Sealed, hosts: Collection[str]) -> str:
        """Admit the other end of the line if it is one of the hosts; raise PermissionError if not."""
        hello = line.receive(ProberHello)
        if hello is None:
            raise ConnectionError("it has gone again")
        why = None if hello.host in hosts else f"no host of the cluster is named {hello.host!r}"
        why = f"host {hello.host!r} has joined already" if hello.host in self.addresses else why
        if why is not None:
            line.send(ProberRefused(why=why))
            raise PermissionError(why)
        line.send(Welcome())
        self.addresses[hello.host], self._lines[hello.host] = hello.address, line
        self._hearing.append(threading.Thread(target=self._hear, args=(hello.host, line), daemon=True))
        self._hearing[-1].start()
        return str(hello.host)

    def tell(self, host: str, order: Order) -> None:
        """Send an order to a host."""
        with contextlib.suppress(OSError):  # `next` reports that it is gone
            self._lines[host].send(order)

    def next(self, timeout: float) -> tuple[str, Told | None] | None:
        """Return a host and its message; None if nothing came in `timeout` seconds."""
        try:
            return self._told.get(timeout=max(0.0, timeout))
        except Empty:
            return None

    def _hear(self, host: str, line: Sealed) -> None:
        with contextlib.suppress(OSError):
            while (told := line.receive(Told, timeout=None)) is not None:
                self._told.put((host, told))
        self._told.put((host, None))

    def finish(self) -> None:
        """Tell all probers that the probe ended well, so that they may leave."""
        for host in self._lines:
            self.tell(host, End())

    def close(self) -> None:
        """Hang up and read what is left: if data stays unread, the system may discard what the probers were sent."""
        for line in self._lines.values():
            line.hang_up()
        deadline = time.monotonic() + _LAST_WORDS
        for thread in self._hearing:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def started(
    hosts: Sequence[str], command: Callable[[str, Sequence[str]], Sequence[str]], address: Callable[[str], str]
) -> Iterator[Company]:
    """Start a prober process for each host.

    `command` wraps a command so that it runs on that host; `address` returns where the host listens.
    """
    token = secrets.token_hex(32)
    environment = {**os.environ, "ISTHMUS_TOKEN": token}
    with _processes() as processes, contextlib.ExitStack() as sockets, contextlib.closing(Company()) as company:
        ours = {}
        for host in hosts:
            ours[host], theirs = (sockets.enter_context(end) for end in socket.socketpair())
            # -P: no file of the working directory hides a module
            words = command(host, [sys.executable, "-P", "-m", "isthmus.deploy.probing.prober", host, address(host)])
            processes.append(
                subprocess.Popen(
                    words, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            )
            theirs.close()  # so that its end is noticed here
        for host in hosts:
            try:
                company.welcome(greet(ours[host], token.encode(), MEETING), [host])
            except OSError as problem:
                raise RunError(f"its prober did not start: {problem}", where=host) from None
        yield company
        company.finish()


@contextlib.contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Provide a list of processes; at the end wait for them, and kill those that outlive their connections for long."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        deadline = time.monotonic() + _LAST_WORDS
        for process in processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def meeting(
    place: tuple[str, int],
    token: bytes,
    me: tuple[str, str],
    hosts: Collection[str],
    wait: float,
    listen: Callable[[str], None],
) -> Iterator[Company]:
    """Wait at the meeting point until all hosts have come or the time is over.

    `me` (name, address) takes part as well. `listen` is told who came, and who was refused and why.
    """
    with contextlib.ExitStack() as sockets, contextlib.closing(Company()) as company:
        here, there = (sockets.enter_context(end) for end in socket.socketpair())
        threading.Thread(target=_take_part_here, args=(there, token, me), daemon=True).start()
        company.welcome(greet(here, token, MEETING), [me[0]])
        with _server(place) as server:
            for came in arrivals(server, token, MEETING, time.monotonic() + wait):
                listen(_let_in(company, came, hosts, sockets))
                if len(company.addresses) == len(hosts):
                    break
        yield company
        company.finish()


def _server(place: tuple[str, int]) -> socket.socket:
    try:
        return server_at(*place)
    except (OSError, UnicodeError) as problem:
        raise RunError(
            f"cannot listen at the meeting point: {problem}",
            where=f"{place[0]}:{place[1]}",
            expected="an address of this machine, which is the first host of the cluster, and a free port",
        ) from None


def _take_part_here(connection: socket.socket, token: bytes, me: tuple[str, str]) -> None:
    with contextlib.suppress(OSError), connection:
        obey(join(connection, token, *me), token, me[1])


def _let_in(company: Company, came: Sealed | OSError, hosts: Collection[str], sockets: contextlib.ExitStack) -> str:
    """Admit or refuse a host that connected, and return a line for people that says which."""
    try:
        if isinstance(came, OSError):
            raise came
        sockets.enter_context(came.socket)
        host = company.welcome(came, hosts)
    except OSError as problem:
        return f"Refused a connection: {problem or 'it did not prove that it knows the token'}"
    return f"{host} has joined: {len(company.addresses)} of {len(hosts)} hosts"


def take_part(place: tuple[str, int], token: bytes, host: str, address: str | None, wait: float) -> None:
    """Join at the meeting point and obey until the end; raise RunError if that fails.

    A meeting point that is not there yet, or is busy with strangers, is tried again for `wait` seconds.
    """
    where, end = f"{place[0]}:{place[1]}", time.monotonic() + wait
    with contextlib.ExitStack() as sockets:
        line, own = _joined(place, token, host, address, end, sockets)
        try:
            whole = obey(line, token, own)
        except OSError as problem:
            raise RunError(f"the meeting point does not answer as a probe does: {problem}", where=where) from None
    if not whole:
        raise RunError(
            "the meeting point closed the connection before the end", where=where, next="See what that host printed"
        )


def _joined(
    place: tuple[str, int], token: bytes, host: str, address: str | None, end: float, sockets: contextlib.ExitStack
) -> tuple[Sealed, str]:
    """Return the connection with the leader, and the address that this host has on it."""
    where = f"{place[0]}:{place[1]}"
    while True:
        connection = sockets.enter_context(_reached(place, address, end))
        own = address or str(connection.getsockname()[0])
        try:
            return join(connection, token, host, own), own
        except PermissionError as problem:
            raise RunError(f"the meeting point refuses: {problem}", where=where) from None
        except OSError as problem:
            connection.close()
            if time.monotonic() + _AGAIN >= end:
                raise RunError(f"the meeting point does not answer as a probe does: {problem}", where=where) from None
        time.sleep(_AGAIN)


def _reached(place: tuple[str, int], address: str | None, end: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(place, timeout=PATIENCE, source_address=(address, 0) if address else None)
        except (OSError, UnicodeError) as problem:
            if time.monotonic() + _AGAIN >= end:
                raise RunError(
                    f"the meeting point cannot be reached: {problem}",
                    where=f"{place[0]}:{place[1]}",
                    next="Start the first host of the cluster first, and open its port in the firewall",
                ) from None
        time.sleep(_AGAIN)
