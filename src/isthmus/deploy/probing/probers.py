"""How probers come together: as processes that are started here, or at a meeting point to which they come.

Either way each is at the other end of a connection on which both proved to know the same token. Leaving the context
tells all of them that it is over, and leaves no process and no open port.
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

_AGAIN = 0.2  # seconds between two tries to reach the meeting point
_LAST_WORDS = 5.0  # seconds for a prober to end by itself


class Company:
    """Probers that joined."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._lines: dict[str, Sealed] = {}
        self._hearing: list[threading.Thread] = []
        self._told: SimpleQueue[tuple[str, Told | None]] = SimpleQueue()

    def welcome(self, line: Sealed, hosts: Collection[str]) -> str:
        """Lets the other end of the line take part, if it is one of the hosts; PermissionError if not."""
        hello = line.receive(ProberHello)
        if hello is None:
            raise ConnectionError("it has gone again")
        why = None if hello.host in hosts else f"no host of the cluster is named {hello.host!r}"
        why = f"host {hello.host!r} is here already" if hello.host in self.addresses else why
        if why is not None:
            line.send(ProberRefused(why=why))
            raise PermissionError(why)
        line.send(Welcome())
        self.addresses[hello.host], self._lines[hello.host] = hello.address, line
        self._hearing.append(threading.Thread(target=self._hear, args=(hello.host, line), daemon=True))
        self._hearing[-1].start()
        return str(hello.host)

    def tell(self, host: str, order: Order) -> None:
        """Passes an order on."""
        with contextlib.suppress(OSError):  # that it is gone is heard from `next`
            self._lines[host].send(order)

    def next(self, timeout: float) -> tuple[str, Told | None] | None:
        """Return a host and what it told; None if nothing came in `timeout` seconds."""
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
        """All went well: they may go."""
        for host in self._lines:
            self.tell(host, End())

    def close(self) -> None:
        """Hangs up, and hears them out: what is left unread would make the system throw away what they were told."""
        for line in self._lines.values():
            line.hang_up()
        deadline = time.monotonic() + _LAST_WORDS
        for thread in self._hearing:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def started(
    hosts: Sequence[str], command: Callable[[str, Sequence[str]], Sequence[str]], address: Callable[[str], str]
) -> Iterator[Company]:
    """A process for each host. `command` makes a command run on that host, `address` says where it listens."""
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
            theirs.close()  # so that its end is seen here
        for host in hosts:
            try:
                company.welcome(greet(ours[host], token.encode(), MEETING), [host])
            except OSError as problem:
                raise RunError(f"its prober did not start: {problem}", where=host) from None
        yield company
        company.finish()


@contextlib.contextmanager
def _processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """A list of processes, which end soon after their connections, or are killed."""
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
    """Waits at the meeting point until all hosts came or the time is over; `me` (name, address) takes part as well.

    `listen` hears who came, and who was refused and why.
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
        return f"Somebody was refused: {problem or 'no proof came'}"
    return f"{host} is here: {len(company.addresses)} of {len(hosts)} hosts"


def take_part(place: tuple[str, int], token: bytes, host: str, address: str | None, wait: float) -> None:
    """Goes to the meeting point and obeys until the end; RunError where that cannot be.

    A meeting point that is not there yet, or has its hands full with strangers, is tried again within `wait` seconds.
    """
    where, end = f"{place[0]}:{place[1]}", time.monotonic() + wait
    with contextlib.ExitStack() as sockets:
        line, own = _joined(place, token, host, address, end, sockets)
        try:
            whole = obey(line, token, own)
        except OSError as problem:
            raise RunError(f"the meeting point does not answer as one: {problem}", where=where) from None
    if not whole:
        raise RunError("the meeting point went away before the end", where=where, next="See what it says there")


def _joined(
    place: tuple[str, int], token: bytes, host: str, address: str | None, end: float, sockets: contextlib.ExitStack
) -> tuple[Sealed, str]:
    """The connection with the leader, and the address that this host has there."""
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
                raise RunError(f"the meeting point does not answer as one: {problem}", where=where) from None
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
                    next="Start the first host of the cluster first, and let its port through",
                ) from None
        time.sleep(_AGAIN)
