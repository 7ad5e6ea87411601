"""A cluster emulated on this machine: a network namespace for each host, and a router between them.

    with World(load_cluster("cluster.yaml")) as world:
        subprocess.run(world.command("va1", ["python", "train.py"]))
        world.change("virginia", "frankfurt", bandwidth=parse_bandwidth("100 Mbit/s"))

This needs Linux, root, iproute2 and /dev/net/tun. If one of them is missing, all hosts are this machine on loopback,
and `reason` says why. Only links are emulated here: processors, memory and disks are those of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from isthmus.cluster.spec import Cluster, Host
from isthmus.emulate import namespaces
from isthmus.emulate.links import MOST_HOSTS, Links
from isthmus.errors import RunError, UsageError
from isthmus.units import BytesPerSecond, Seconds

__all__ = ["World", "unable"]

_ROUTER = (sys.executable, "-P", "-m", "isthmus.emulate.router")  # -P: no file of the working directory hides a module
_LOOPBACK = "127.0.0.1"
_SEGMENT = 1460  # bytes of payload in a packet
_FIRST_PACKETS = 10  # packets that a new connection may always send
_PATIENCE = 60.0  # seconds to wait for the router's answer; creating the largest world takes less
_PARTING = 20.0  # seconds to wait for the router to remove the hosts


class World:
    """Hosts of a cluster and the links between them. Leaving the context removes them and all that runs in them."""

    def __init__(
        self, cluster: Cluster, *, hosts: Sequence[str] | None = None, shaped: bool | None = None, seed: int = 0
    ) -> None:
        """Emulate the given hosts of the cluster (default: all).

        `shaped`: None shapes links if this machine can; True raises RunError if it cannot; False uses plain loopback.
        `seed` seeds the random loss of packets.
        """
        self.hosts = _chosen(cluster, hosts)
        self.reason: str | None = "links are not emulated, as asked" if shaped is False else namespaces.missing()
        self._links = Links(cluster, self.hosts)
        self._names: list[str] = []
        self._router: _Router | None = None
        self._changing = threading.Lock()
        if self.reason is None:
            self._start(seed)
        if self.reason is not None:
            if shaped:
                raise RunError("links cannot be emulated on this machine", found=self.reason, next="See isthmus doctor")
            self.reason += ": all hosts are this machine, on loopback; nothing of the cluster's network is emulated"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def shaped(self) -> bool:
        """Return whether the links are shaped as in the cluster."""
        return self.reason is None

    @property
    def interface(self) -> str:
        """Return the network device through which a host reaches the others."""
        return namespaces.INTERFACE if self.shaped else "lo"

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what people should know of this emulated world."""
        if self.reason is not None:
            return (self.reason,)
        apart = [f"{a} and {b}" for a in self.hosts for b in self.hosts if a < b and (a, b) not in self._links]
        more = f" and {len(apart) - 3} more pairs" if len(apart) > 3 else ""
        return (
            "what a host sends to itself is not slowed down: it has a loopback of its own",
            *([f"no link, so no connection: {', '.join(apart[:3])}{more}"] if apart else []),
        )

    @property
    def router(self) -> int | None:
        """Return the process number of the router, or None if there is no router."""
        return self._router.pid if self._router is not None else None

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host, as seen by the other hosts of this world."""
        number = self._number(host)
        return _address(number) if self.shaped else _LOOPBACK

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on a host, as the same process with the same pipes and signals."""
        number = self._number(host)
        if not self.shaped:
            return list(argv)
        self._living()
        return namespaces.command_in(self._names[number], argv)

    def pairs(self, a: str, b: str) -> list[tuple[str, str]]:
        """Return the ordered pairs of hosts whose link `change` would change; raise UsageError if there is none."""
        return self._links.pairs(a, b)

    def change(
        self,
        a: str,
        b: str,
        *,
        bandwidth: BytesPerSecond | None = None,
        latency: Seconds | None = None,
        loss: float | None = None,
        cut: bool | None = None,
    ) -> None:
        """Change links in both directions, between two hosts or between all hosts of two regions.

        None leaves a value as it is. The change applies at once to everything that has not left its sender. `loss` is
        the fraction of packets that is lost.
        """
        with self._changing:
            router = self._living()
            self._links.change(a, b, bandwidth=bandwidth, latency=latency, loss=loss, cut=cut)
            self._tell(router)

    def mend(self, a: str, b: str) -> None:
        """Reset links to the values of the cluster file."""
        with self._changing:
            router = self._living()
            self._links.mend(a, b)
            self._tell(router)

    def check(self) -> None:
        """Raise RunError if the world was broken from outside; in that case the world is removed."""
        if self.shaped:
            self._living()

    def close(self) -> None:
        """End everything that runs in this world and remove it. It is safe to call this twice."""
        router, self._router = self._router, None
        names, self._names = self._names, []
        try:
            if router is not None:
                router.end()
        finally:
            namespaces.remove(names)

    def _start(self, seed: int) -> None:
        namespaces.remove_orphans()
        self._names = namespaces.names_for(len(self.hosts))
        table = self._links.table()
        order = {"owner": os.getpid(), "start": namespaces.started(os.getpid()), "seed": seed, **table}
        self._router = _Router(self._names[0])
        try:
            self.reason = self._router.ask({**order, "hosts": [self._described(host) for host in self.hosts]})
        except BaseException:
            self.close()
            raise
        self._sent = table
        if self.reason is not None:
            self.close()

    def _described(self, host: str) -> dict[str, Any]:
        number = self._number(host)
        reaches = [
            (_address(index), _FIRST_PACKETS + round(self._links.window(host, other) / _SEGMENT))
            for index, other in enumerate(self.hosts)
            if (host, other) in self._links
        ]
        return {"name": self._names[number], "address": _address(number), "reaches": reaches}

    def _tell(self, router: _Router) -> None:
        """Send the router the rows of the table that have changed."""
        table = self._links.table()
        news = {
            kind: {key: value for key, value in rows.items() if self._sent[kind].get(key) != value}
            for kind, rows in table.items()
        }
        fault = router.ask(news)
        if fault is not None:
            self.close()
            raise RunError("the links of an emulated world could not be changed", found=fault)
        self._sent = table

    def _number(self, host: str) -> int:
        if host not in self.hosts:
            raise UsageError(f"no host {host!r} in this world", expected=f"one of {', '.join(self.hosts)}")
        return self.hosts.index(host)

    def _living(self) -> _Router:
        """Return the running router; raise an error if there is none or it has ended."""
        if not self.shaped:
            raise UsageError("links of a world on loopback cannot be changed", found=self.reason)
        if self._router is None:
            raise RunError("this emulated world is closed")
        end = self._router.ended()
        if end is not None:
            self.close()
            raise RunError(
                "the router of the emulated world is gone; its hosts were removed with all that ran in them",
                found=end,
                next="Start again",
            )
        return self._router


class _Router:
    """The router process, seen from its owner."""

    def __init__(self, name: str) -> None:
        self._popen = subprocess.Popen(
            (*_ROUTER, name),  # the name is for people who look at the list of processes
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C reaches only the owner
        )

    @property
    def pid(self) -> int:
        """Return the process number."""
        return self._popen.pid

    def ask(self, order: dict[str, Any]) -> str | None:
        """Send an order and wait for the answer; return None, or a text that says what went wrong."""
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
        waiting = select.poll()  # select() takes no file beyond the 1024th
        waiting.register(stdout, select.POLLIN)
        if not waiting.poll(1000 * _PATIENCE):
            return f"no answer from the router within {_PATIENCE:.0f} s"
        line = stdout.readline()
        if not line:
            return self._last_words()
        fault: str | None = json.loads(line).get("error")
        return fault

    def ended(self) -> str | None:
        """Return how the router process ended; None while it runs."""
        return None if self._popen.poll() is None else self._last_words()

    def end(self) -> None:
        """Let the router remove the hosts and wait for its end; kill it if that takes too long."""
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(timeout=_PARTING)
        finally:
            self._popen.kill()
            self._popen.wait()
            assert self._popen.stderr is not None
            self._popen.stderr.close()

    def _last_words(self) -> str:
        status = self._popen.wait()
        assert self._popen.stderr is not None
        said = self._popen.stderr.read().decode(errors="replace").strip().splitlines() if status > 0 else []
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        return f"{how}{': ' + said[-1] if said else ''}"


def unable() -> str | None:
    """Create a small world to find out what keeps this machine from emulating links; return None if nothing does."""
    figures = dict.fromkeys(("bandwidth", "latency", "nic", "bus", "memory"), 1.0)
    host = msgspec.convert({"name": "trial", "region": "here", "devices": {}, "cores": 1, **figures}, Host)
    try:
        with World(Cluster(name="trial", kinds={}, hosts={"trial": host}, links=()), shaped=True):
            return None
    except RunError as error:
        return error.found


def _chosen(cluster: Cluster, hosts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the chosen hosts in the cluster's order; raise UsageError for an unknown host or a wrong count."""
    for host in hosts or ():
        if host not in cluster.hosts:
            raise UsageError(f"no host {host!r} in {cluster.name}", expected=f"one of {', '.join(cluster.hosts)}")
    chosen = tuple(host for host in cluster.hosts if hosts is None or host in hosts)
    if not 1 <= len(chosen) <= MOST_HOSTS:
        raise UsageError("a world cannot have so many hosts", found=str(len(chosen)), expected=f"1 to {MOST_HOSTS}")
    return chosen


def _address(number: int) -> str:
    """Return the address of the host with this number.

    All worlds may use the same addresses, because they see neither each other nor the machine's own network.
    """
    return f"10.77.{(number + 1) // 256}.{(number + 1) % 256}"
