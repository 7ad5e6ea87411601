"""The router process of an emulated world: reads every packet that a host sends, and delivers it when it would arrive.

    python -P -m isthmus.emulate.router

`World` starts this process and writes JSON lines to its standard input: first the hosts with all routes between them,
then changes of routes. The router answers each with a line. When the input or the owner ends, the router removes the
hosts with everything that still runs in them, and ends. `queues.py` computes when each packet arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
from typing import Any

from isthmus.emulate import namespaces
from isthmus.emulate.queues import FLAGS, Queues, RouteQueue

__all__ = ["main"]

_LONGEST = FLAGS + 65536  # bytes of a packet, or a run of packets
_AT_ONCE = 64  # packets read from one host before the next host has its turn
_EARLY = 1e-4  # seconds: waking up takes about this long, so events that are due this soon are run now
_PR_SET_TIMERSLACK = 29
_PRIORITY = 20  # of the real-time scheduler


class _Hosts:
    """The hosts of a world as this process holds them: their namespaces and open devices."""

    def __init__(self, queues: Queues) -> None:
        self.queues = queues
        self.tuns: list[int] = []
        self._names: list[str] = []
        self._routes: dict[str, RouteQueue] = {}
        self._single: set[int] = set()  # devices whose TCP hands over single packets

    def make(self, order: dict[str, Any]) -> None:
        for host in order["hosts"]:
            self._names.append(host["name"])
            tun = namespaces.make(host["name"], host["address"], host["reaches"])
            self.tuns.append(tun)
            self.queues.ways[tun] = {}
        for pair in order["routes"]:
            i, j = map(int, pair.split())
            address = bytes(map(int, order["hosts"][j]["address"].split(".")))
            self._routes[pair] = self.queues.ways[self.tuns[i]][address] = RouteQueue(self.tuns[j])
        self.change(order)

    def change(self, order: dict[str, Any]) -> None:
        """Change routes and socket buffers as ordered.

        A host with a route that loses packets hands them over one by one, so that each is lost on its own.
        """
        for pair, row in order["routes"].items():
            self.queues.change(self._routes[pair], row)
        for number, size in order["buffers"].items():
            namespaces.set_buffers(self._names[int(number)], size)
        for sender, ways in self.queues.ways.items():
            single = any(route.loss for route in ways.values())
            if single != (sender in self._single):
                namespaces.set_segments(sender, whole=not single)
                self._single ^= {sender}

    def remove(self) -> None:
        for tun in self.tuns:
            os.close(tun)
        namespaces.remove(self._names)


class _Orders:
    """JSON lines from the owner."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self) -> list[dict[str, Any]] | None:
        """Read the lines that are complete by now; return None when the input has ended."""
        got = os.read(0, 1 << 16)
        if not got:
            return None
        *lines, self._rest = (self._rest + got).split(b"\n")
        return [json.loads(line) for line in lines]


def _answer(**values: object) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def _hurry() -> None:
    """Use real-time scheduling where it is allowed; threads and processes started from here do not inherit it."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))


def _watch(owner: int, start: int) -> list[int]:
    """Return files that become readable when the owner is gone; raise BrokenPipeError if it is gone already.

    The end of the input is not enough, because a process that the owner started may hold the input open.
    """
    try:
        watched = [os.pidfd_open(owner)]
    except OSError:  # the kernel is old, or the owner is gone
        watched = []
    if namespaces.started(owner) != start:
        raise BrokenPipeError
    return watched


def _serve(hosts: _Hosts, orders: _Orders, owner: list[int]) -> None:
    """Route packets and answer orders until the owner is gone or closes the input."""
    queues, clock, due = hosts.queues, time.monotonic, None
    files = [0, *owner, *hosts.tuns]
    while True:
        wait = None if due is None else max(0.0, due - _EARLY - clock())
        for file in select.select(files, [], [], wait)[0]:
            if file in owner:
                return
            if file == 0:
                if (got := orders.read()) is None:
                    return
                for order in got:
                    hosts.change(order)
                    _answer(done=True)
            else:
                _read(queues, file, clock())
        due = queues.run_until(clock() + _EARLY)


def _read(queues: Queues, file: int, now: float) -> None:
    queues.run_until(now)  # first the events that are due before this packet arrives
    for _ in range(_AT_ONCE):
        try:
            data = os.read(file, _LONGEST)
        except BlockingIOError:
            return
        queues.take(file, data, now)


def main() -> int:
    """Create the hosts, route their packets until the owner ends, and remove the hosts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders = _Orders()
    first = None
    while not first:
        first = orders.read()
        if first is None:
            return 0
    hosts = _Hosts(Queues(seed=first[0]["seed"]))
    try:
        owner = _watch(first[0]["owner"], first[0]["start"])
        hosts.make(first[0])
        _hurry()
        gc.disable()
        _answer(done=True)
        _serve(hosts, orders, owner)
    except BrokenPipeError:
        pass  # the owner is gone
    except OSError as error:
        _answer(error=str(error))
        return 1
    finally:
        hosts.remove()
    return 0


if __name__ == "__main__":
    sys.exit(main())
