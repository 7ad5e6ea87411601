"""Create, enter, find and remove the network namespaces of emulated hosts.

Each namespace has its own loopback device and one TUN device, `wan0`. The process that opened the TUN device reads
what is sent to it from a file. The name of a namespace tells its owner: `isthmus-PID-START-WORLD-HOST`. START is the
time at which the owning process started, in clock ticks since boot, so that a reused process number is not taken for
the owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

__all__ = [
    "INTERFACE",
    "command_in",
    "entered",
    "make",
    "missing",
    "names_for",
    "open_tun",
    "processes_in",
    "remove",
    "remove_orphans",
    "set_buffers",
    "set_segments",
    "started",
]

INTERFACE = "wan0"
_FOLDER = Path("/run/netns")  # where iproute2 keeps namespaces
_NAME = re.compile(r"isthmus-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9]+-[0-9]+")
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
_CLONE_NEWNET = 0x40000000
_SETTINGS = {
    "tcp_congestion_control": "reno",  # always permitted; fills a queue that loses nothing
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",  # no connection learns from another
    "tcp_pacing_ss_ratio": "50",  # TCP hands over about 1 ms of data at once, so a small message may wait that long
    "tcp_timestamps": "0",  # timestamps would make the headers of a 1500-byte packet longer than 40 bytes
}
_ROUTER = b"\0isthmus.emulate.router\0"
_PATIENCE = 5.0  # seconds to wait until killed processes are gone
_worlds = itertools.count()


def missing() -> str | None:
    """Return what this machine lacks for emulating links, as far as can be told without creating a namespace."""
    if not sys.platform.startswith("linux"):
        return "emulated links need Linux"
    if os.geteuid() != 0:
        return "emulated links need root (network namespaces)"
    if shutil.which("ip", path=_PATH) is None:
        return "emulated links need the command ip (package iproute2)"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"emulated links need {_TUN}"
    return None


def names_for(count: int) -> list[str]:
    """Return names for the namespaces of a new world of this process."""
    world, pid = next(_worlds), os.getpid()
    return [f"isthmus-{pid}-{started(pid)}-{world}-{host}" for host in range(count)]


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process or it is a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def command_in(name: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs `argv` inside a namespace, as the same process with the same pipes."""
    return [_ip(), "netns", "exec", name, *argv]


def make(name: str, address: str, reaches: Iterable[tuple[str, int]]) -> int:
    """Create a host's namespace and return its open TUN file.

    `reaches` lists the addresses that the host has a route to, each with an initial congestion window in packets. With
    that window a new connection fills its path at once instead of starting slowly.
    """
    _run_ip(["netns", "add", name])
    with entered(name):
        tun = open_tun(INTERFACE)
        for setting, value in _SETTINGS.items():
            _set(setting, value)
        with contextlib.suppress(OSError):  # the kernel has no IPv6
            Path(f"/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6").write_text("1")
        lines = ["link set lo up", f"link set {INTERFACE} mtu 1500 txqueuelen 10000 up"]
        lines += [f"address add {address}/32 dev {INTERFACE}"]
        lines += [
            f"route add {other}/32 dev {INTERFACE} src {address} initcwnd {window} initrwnd {window}"
            for other, window in reaches
        ]
        _run_ip(["-batch", "-"], "\n".join(lines) + "\n")
    return tun


def open_tun(name: str) -> int:
    """Open a new TUN device in the current namespace and return its file.

    With IFF_VNET_HDR each packet begins with 10 bytes that say how it is to be segmented and checksummed. So TCP hands
    over up to 64 KB at once, although the packets on the wire have 1500 bytes.
    """
    tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        set_segments(tun, whole=True)
    except OSError as error:
        os.close(tun)
        raise OSError(f"no TUN device can be made: {error.strerror}") from None
    return tun


def set_segments(tun: int, *, whole: bool) -> None:
    """Set whether TCP hands over many packets as one."""
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | (_TUN_F_TSO4 if whole else 0))


def set_buffers(name: str, size: int) -> None:
    """Set how many bytes a connection may have in flight, from its first byte on."""
    with entered(name):
        for setting in ("tcp_rmem", "tcp_wmem"):
            _set(setting, f"4096 {size} {size}")


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Enter a namespace for the duration of the context; this affects only the calling thread."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def processes_in(names: Iterable[str]) -> list[int]:
    """Return the processes that live in the given namespaces.

    A router process does not count: it may be about to clean up after its owner.
    """
    wanted = set()
    for name in names:
        with contextlib.suppress(OSError):
            wanted.add(_identity(_FOLDER / name))
    found = []
    for entry in Path("/proc").iterdir() if wanted else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if _identity(entry / "ns" / "net") in wanted and _ROUTER not in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def remove(names: Sequence[str]) -> None:
    """Kill the processes that still live in these namespaces and remove the namespaces; missing ones are ignored."""
    deadline = time.monotonic() + _PATIENCE
    while (pids := processes_in(names)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    there = [f"netns delete {name}\n" for name in names if (_FOLDER / name).exists()]
    if there:
        subprocess.run(
            [_ip(), "-force", "-batch", "-"], input="".join(there), text=True, capture_output=True, check=False
        )


def remove_orphans() -> list[str]:
    """Remove the namespaces of worlds whose owner is gone, and return their names."""
    orphans = []
    for path in _FOLDER.iterdir() if _FOLDER.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and started(int(match["pid"])) != int(match["start"]):
            orphans.append(path.name)
    remove(orphans)
    return orphans


def _identity(file: Path) -> tuple[int, int]:
    its = file.stat()
    return its.st_dev, its.st_ino


def _set(setting: str, value: str) -> None:
    Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _ip() -> str:
    return shutil.which("ip", path=_PATH) or "ip"


def _run_ip(words: Sequence[str], text: str | None = None) -> None:
    done = subprocess.run([_ip(), *words], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[:300]
        raise OSError(f"ip {' '.join(words)}: {said or f'exit code {done.returncode}'}")
