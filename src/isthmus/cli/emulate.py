"""The command `isthmus emulate CLUSTER -- COMMAND`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn, TextIO

from isthmus.cli.console import Answer, ProgressLine, Terminated
from isthmus.cluster.load import load_cluster
from isthmus.emulate.links import check_values
from isthmus.emulate.world import World
from isthmus.errors import UsageError
from isthmus.report.columns import columns
from isthmus.units import Seconds, format_seconds, parse_bandwidth, parse_seconds

__all__ = ["TimedLinkChange", "parse_change", "run"]

_WHERE = "isthmus emulate"
_MASTER_PORT = 29500  # torch's own default; it is free on a host that was just made
_LOOK = 0.5  # seconds between two checks that the emulated hosts still exist
_KEPT = (sys.executable, "-P", "-m", "isthmus.emulate.placeholder")  # ends a command when this process is killed
_UNWATCHED = 1.0  # seconds after which a command counts as unwatched: a signal came just as it was started
_LAST_WORDS = 5.0  # seconds for a command to end when it is told to, and for its last lines to be read


class TimedLinkChange(NamedTuple):
    """A change of a link at a time; without values the link is again as in the file."""

    at: Seconds
    a: str
    b: str
    values: Mapping[str, Any]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Run one command on every host at the same time, and return how each ended."""
    if not args.argv:
        raise UsageError(
            "no command to run", where=_WHERE, next=f"Write it at the end: {_WHERE} {args.file} -- COMMAND"
        )
    if shutil.which(args.argv[0]) is None:
        raise UsageError(f"no command {args.argv[0]!r} on this machine", where=_WHERE)
    changes = sorted((parse_change(text) for text in args.change), key=lambda change: change.at)
    cluster = load_cluster(args.file)
    with _ended_by_sigterm(), World(cluster, hosts=args.on or None, shaped=False if args.unshaped else None) as world:
        if changes and not world.shaped:
            raise UsageError("--change needs emulated links", where=_WHERE, found=world.reason)
        for change in changes:
            world.pairs(change.a, change.b)  # refused before anything runs, not when its time comes
        count = f"{len(world.hosts)} host{'s' * (len(world.hosts) > 1)}"
        progress.phase(f"{count} of {cluster.name} on this machine; {'; '.join(world.notes)}")
        progress.rest()
        start = time.monotonic()
        codes = _play(args, world, changes)
        seconds = time.monotonic() - start
        return _answer(world, codes, seconds)


def parse_change(text: str) -> TimedLinkChange:
    """Parse `10 s virginia frankfurt bandwidth=100 Mbit/s latency=80 ms`, or `cut`, `mend`, `loss=0.01`."""
    match = re.fullmatch(r"\s*([0-9.]+ ?[a-z]+)\s+(\S+)\s+(\S+)\s+(\S.*?)\s*", text)
    values: dict[str, Any] = {}
    try:
        if match is None:
            raise ValueError("AT A B WHAT")
        for item in re.split(r"\s+(?=\w+=|cut\b|mend\b)", match[4]):
            values |= _value(*item.partition("="))
        check_values(**{name: value for name, value in values.items() if name != "cut"})
        return TimedLinkChange(parse_seconds(match[1]), match[2], match[3], values)
    except ValueError as error:
        example = "'10 s virginia frankfurt bandwidth=100 Mbit/s', latency=80 ms, loss=0.01, cut or mend"
        raise UsageError(
            "--change cannot be read", where=_WHERE, found=repr(text[:200]), expected=f"{error}, as in {example}"
        ) from None


def _value(name: str, sign: str, text: str) -> dict[str, Any]:
    match name, sign:
        case "cut", "":
            return {"cut": True}
        case "mend", "":
            return {}
        case "bandwidth", "=":
            return {"bandwidth": parse_bandwidth(text)}
        case "latency", "=":
            return {"latency": parse_seconds(text)}
        case "loss", "=":
            return {"loss": float(text)}
    raise ValueError("bandwidth=, latency=, loss=, cut or mend")


def _play(args: argparse.Namespace, world: World, changes: Sequence[TimedLinkChange]) -> dict[str, int]:
    """Wait for the commands of all hosts while changing links, and return the exit code of each."""
    start, waiting = time.monotonic(), list(changes)
    commands = _Commands(world, args.argv, sys.stderr if args.json else args.out)
    with commands:
        while len(commands.codes) < len(world.hosts):
            while waiting and time.monotonic() - start >= waiting[0].at:
                _apply(world, waiting.pop(0))
            until = start + waiting[0].at - time.monotonic() if waiting else _LOOK
            commands.listen(min(_LOOK, max(0.0, until)))
            world.check()
    return {host: commands.codes[host] for host in world.hosts}


def _apply(world: World, change: TimedLinkChange) -> None:
    if change.values:
        world.change(change.a, change.b, **change.values)
    else:
        world.mend(change.a, change.b)


class _Commands:
    """One process for each host, whose output threads print line by line behind the host's name.

    Each process leads a process group. One that has ended is reaped only at the very end: until then no other process
    can get its number, so what it left behind can be killed by that number.
    """

    def __init__(self, world: World, argv: Sequence[str], out: TextIO) -> None:
        self.codes: dict[str, int] = {}
        self._ended: SimpleQueue[tuple[str, int]] = SimpleQueue()
        self._printing = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._over: dict[str, threading.Event] = {}
        self._world, self._argv, self._out = world, argv, out
        self._width = max(map(len, world.hosts))
        self._hung_up: BrokenPipeError | None = None  # set when the reader of our output has gone

    def __enter__(self) -> None:
        try:
            port = _MASTER_PORT if self._world.shaped else _free_port()
            for rank, host in enumerate(self._world.hosts):
                self._start(host, _environment(self._world, rank, port))
        except BaseException:
            self._end()
            raise

    def __exit__(self, *_: object) -> None:
        self._end()

    def listen(self, timeout: float) -> None:
        """Wait for a process to end."""
        if self._hung_up is not None:
            raise self._hung_up
        with contextlib.suppress(Empty):
            host, status = self._ended.get(timeout=timeout)
            self.codes[host] = status
            if status != 0:
                self._say(host, f"ended: {_how(status)}", sys.stderr)

    def _start(self, host: str, environment: Mapping[str, str]) -> None:
        shaped = self._world.shaped  # if so it is in a namespace, and ends with it
        process = subprocess.Popen(
            self._world.command(host, self._argv if shaped else [*_KEPT, *self._argv]),
            stdin=subprocess.DEVNULL if shaped else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._processes[host], self._over[host] = process, threading.Event()
        assert process.stdout is not None and process.stderr is not None
        readers = [
            threading.Thread(target=self._pass_on, args=(host, pipe, stream), daemon=True)
            for pipe, stream in ((process.stdout, self._out), (process.stderr, sys.stderr))
        ]
        watcher = threading.Thread(target=self._watch, args=(host, process, readers), daemon=True)
        for thread in (watcher, *readers):  # a process that has printed something is watched, whenever a signal comes
            thread.start()

    def _pass_on(self, host: str, pipe: IO[bytes], stream: TextIO) -> None:
        with pipe:
            for line in pipe:
                try:
                    self._say(host, line.decode(errors="replace").rstrip("\r\n"), stream)
                except BrokenPipeError as error:
                    self._hung_up = error
                    return

    def _watch(self, host: str, process: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        how = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        self._over[host].set()
        status = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        for reader in readers:  # a process that it started may hold its pipes for longer
            if reader.ident is not None:  # a signal may have come before it was started
                reader.join(timeout=_LAST_WORDS)
        self._ended.put((host, status))

    def _say(self, host: str, text: str, stream: TextIO) -> None:
        with self._printing:
            print(f"{host:{self._width}} | {text}", file=stream, flush=True)

    def _end(self) -> None:
        """Tell the processes that still run to end, and then kill them with all that they started."""
        try:
            for host, process in self._processes.items():
                if not self._over[host].is_set():
                    os.killpg(process.pid, signal.SIGTERM)
            deadline = time.monotonic() + _LAST_WORDS
            for over in self._over.values():
                over.wait(timeout=max(0.0, deadline - time.monotonic()))
        finally:  # also if somebody does not want to wait so long
            for process in self._processes.values():
                with contextlib.suppress(PermissionError):  # some systems raise it for a group of zombies
                    os.killpg(process.pid, signal.SIGKILL)
            for host, process in self._processes.items():
                self._over[host].wait(timeout=_UNWATCHED)
                process.wait()
                if process.stdin is not None:
                    process.stdin.close()


def _environment(world: World, rank: int, port: int) -> dict[str, str]:
    """Return the environment variables of one rank: those that torch.distributed reads, and its host."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(world.hosts)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": world.address(world.hosts[0]),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": world.interface,
        "TP_SOCKET_IFNAME": world.interface,
        "ISTHMUS_HOST": world.hosts[rank],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that everything is cleaned up; the exit code is 143, as usual."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _how(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"killed ({signal.Signals(-status).name})"


def _answer(world: World, codes: Mapping[str, int], seconds: float) -> Answer:
    hosts = {host: {"exit_code": status, "address": world.address(host)} for host, status in codes.items()}
    failed = [f"{host} ({_how(status)})" for host, status in codes.items() if status != 0]
    rows = [(host, world.address(host), _how(status)) for host, status in codes.items()]
    text = "\n".join(["", *columns(rows), "", f"{format_seconds(seconds)} in all"])
    values = {"hosts": hosts, "shaped": world.shaped, "reason": world.reason, "seconds": seconds}
    return Answer(values=values, text=text, failure=f"failed: {', '.join(failed)}" if failed else None)
