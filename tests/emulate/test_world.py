"""Emulated worlds: what their links carry, how they change, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.cluster.spec import TCP_PAYLOAD
from isthmus.emulate import namespaces
from isthmus.emulate.world import World
from isthmus.errors import RunError, UsageError
from isthmus.units import parse_bandwidth
from tests.emulate.marks import shaped
from tests.emulate.worlds import all_round_trips, cluster, rates, round_trips, said, start
from tests.quiet import PATIENCE, needs_quiet

PAIR = {"a": "north", "b": "south"}
TRIES = 3  # the machine may be busy: a link that reaches its rate once can reach it


def pair(bandwidth: str, latency: str) -> World:
    return World(cluster(PAIR, [f"north south, bandwidth: {bandwidth}, latency: {latency}"]), shaped=True)


def assert_rates(
    world: World, flows: list[tuple[str, str, float]], seconds: float, expected: list[float], *, within: float = 0.03
) -> None:
    """TCP carries what is expected on every flow, all at once."""
    for _ in range(TRIES):
        found = rates(world, flows, seconds)
        if found == pytest.approx(expected, rel=within):
            return
    assert found == pytest.approx(expected, rel=within)


# -- links as in the cluster


@pytest.mark.slow("ten hosts that all send at once")
@shaped
@needs_quiet()
def test_unequal_links_at_once() -> None:
    """Five pairs of hosts, 10 to 100 Mbit/s and 5 to 200 ms one way."""
    points = [(10, 5), (20, 200), (30, 50), (100, 5), (100, 100)]
    hosts = {f"{side}{n}": f"at-{side}{n}" for n in range(len(points)) for side in ("from", "to")}
    links = [f"from{n} to{n}, bandwidth: {rate} Mbit/s, latency: {ms} ms" for n, (rate, ms) in enumerate(points)]
    with World(cluster(hosts, links), shaped=True) as world:
        pings = [(f"from{n}", f"to{n}", 2 if ms > 50 else 11) for n, (_, ms) in enumerate(points)]
        for (_, ms), trips in zip(points, all_round_trips(world, pings), strict=True):
            assert abs(trips[0] - 2e-3 * ms) <= 0.5e-3 + 0.02 * 2e-3 * ms, trips  # the least disturbed one
        flows = [(f"from{n}", f"to{n}", float(rate)) for n, (rate, _) in enumerate(points)]
        assert_rates(world, flows, 0.9, [TCP_PAYLOAD * rate for rate, _ in points])


@shaped
@pytest.mark.parametrize(
    ("latency", "seconds"),
    [("5 ms", 0.7), pytest.param("200 ms", 1.4, marks=pytest.mark.slow("sends for seconds"))],
)
@needs_quiet()
def test_a_gigabit(latency: str, seconds: float) -> None:
    with pair("1 Gbit/s", latency) as world:
        assert_rates(world, [("a", "b", 1000.0)], seconds, [TCP_PAYLOAD * 1000])


@pytest.mark.slow("eight hosts that all send at once")
@shaped
@needs_quiet()
def test_eight_hosts_in_a_ring() -> None:
    names = [f"h{n}" for n in range(8)]
    world = World(cluster(dict.fromkeys(names, "here"), ["here here, bandwidth: 100 Mbit/s, latency: 20 ms"]))
    with world:
        ring = [(names[n - 1], names[n], 100.0) for n in range(8)]
        assert_rates(world, ring, 0.8, [TCP_PAYLOAD * 100] * 8)


@shaped
@needs_quiet()
def test_flows_share_a_trunk_and_a_nic() -> None:
    hosts = {"a": "north", "b": "north", "c": "south", "d": "south"}
    links = [
        "north south, bandwidth: 60 Mbit/s, latency: 10 ms, trunk: 80 Mbit/s",
        "south south, bandwidth: 60 Mbit/s, latency: 10 ms",
    ]
    with World(cluster(hosts, links, {"d": "50 Mbit/s"}), shaped=True) as world:
        half = TCP_PAYLOAD * 40
        assert_rates(world, [("a", "c", 40.0), ("b", "d", 40.0)], 0.6, [half, half], within=0.05)  # the trunk
        quarter = TCP_PAYLOAD * 25
        assert_rates(world, [("a", "d", 25.0), ("c", "d", 25.0)], 0.6, [quarter, quarter], within=0.05)  # d's nic
        both_ways = [("a", "c", 60.0), ("c", "a", 60.0)]
        assert_rates(world, both_ways, 0.6, [TCP_PAYLOAD * 60] * 2)


@shaped
@needs_quiet()
def test_a_small_message_does_not_wait_behind_bulk() -> None:
    with pair("20 Mbit/s", "5 ms") as world:
        sink = start(world, "b", "sink", world.address("b"), 7100)
        bulk = start(world, "a", "send", world.address("b"), 7100, 5_000_000)  # two seconds of it
        time.sleep(0.5)
        trips = round_trips(world, "a", "b", 20)
        assert sink.poll() is None, "the bulk was to be under way"
        assert trips[len(trips) // 4] < 0.018  # a few packets of 1500 bytes, each 0.6 ms
        for process in (bulk, sink):
            process.kill()
            process.communicate()


@shaped
def test_hosts_without_a_link_cannot_reach_each_other() -> None:
    hosts = {"a": "north", "b": "south", "c": "east"}
    links = ["north south, bandwidth: 1 Gbit/s, latency: 1 ms", "south east, bandwidth: 1 Gbit/s, latency: 1 ms"]
    with World(cluster(hosts, links), shaped=True) as world:
        assert any("a and c" in note for note in world.notes) and any("loopback" in note for note in world.notes)
        code = f"import socket; socket.create_connection(('{world.address('c')}', 1))"
        argv = world.command("a", [sys.executable, "-c", code])
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=PATIENCE)
        assert "Network is unreachable" in done.stderr
        assert round_trips(world, "a", "b", 3) and round_trips(world, "c", "b", 3)


# -- changes


def quickest(world: World, *, below: float) -> float:
    """The shortest round trip; asked for again where the machine was too busy for any to be so short."""
    found = [round_trips(world, "a", "b", 5)[0]]
    while found[-1] >= below and len(found) < TRIES + 2:
        found.append(round_trips(world, "a", "b", 5)[0])
    return min(found)


def slowed_down(world: World) -> float:
    """The last two thirds of 4 MB, when the link becomes slow within the first."""
    world.change("a", "b", bandwidth=parse_bandwidth("100 Mbit/s"))
    sink = start(world, "b", "sink", world.address("b"), 7100)
    with start(world, "a", "send", world.address("b"), 7100, 4_000_000):
        time.sleep(0.1)
        world.change("a", "b", bandwidth=parse_bandwidth("20 Mbit/s"))
        return float(said(sink)["megabits"])


@pytest.mark.slow("sends for seconds over slow links")
@shaped
@needs_quiet()
def test_links_change_while_they_carry() -> None:
    with pair("100 Mbit/s", "5 ms") as world:
        assert quickest(world, below=0.012) < 0.012
        world.change("north", "south", latency=0.03)
        assert 0.0595 <= quickest(world, below=0.062) < 0.062
        wanted = pytest.approx(TCP_PAYLOAD * 20, rel=0.05)
        assert any(slowed_down(world) == wanted for _ in range(TRIES + 2))
        world.change("a", "b", cut=True)
        assert round_trips(world, "a", "b", 1) == []
        world.mend("a", "b")
        assert quickest(world, below=0.012) < 0.012


@pytest.mark.slow("sends for seconds over a lossy link")
@shaped
@needs_quiet()
def test_a_lossy_link_loses_single_packets_and_slows_tcp() -> None:
    with pair("100 Mbit/s", "5 ms") as world:
        world.change("a", "b", loss=0.05)
        (lossy,) = rates(world, [("a", "b", 6.0)], 1.0)
        # Mathis et al.: 1460 bytes / round trip * sqrt(3 / 2 / loss) is 6 Mbit/s; whole runs of packets lost: far less
        assert 1.5 < lossy < 60  # of 97
        world.change("a", "b", loss=0.0)
        assert_rates(world, [("a", "b", 100.0)], 1.0, [TCP_PAYLOAD * 100])


@shaped
def test_changes_of_what_is_not_there() -> None:
    with pair("100 Mbit/s", "5 ms") as world:
        with pytest.raises(UsageError, match="no host or region 'c' in this world"):
            world.change("a", "c", cut=True)
        with pytest.raises(UsageError, match="no host 'c' in this world"):
            world.command("c", ["true"])
        with pytest.raises(UsageError, match="no host 'c' in small"):
            World(cluster(PAIR, ["north south, bandwidth: 1 Gbit/s, latency: 5 ms"]), hosts=["c"])


# -- nothing is left


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return (
        [path.name for path in folder.iterdir() if path.name.startswith(f"isthmus-{pid}-")] if folder.exists() else []
    )


def routers_of(pid: int) -> list[int]:
    """Routers of worlds of a process, which may be gone."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"\0isthmus-{pid}-".encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def alive(pid: int) -> bool:
    return namespaces.started(pid) is not None


def wait_until(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@shaped
def test_leaving_removes_hosts_and_what_runs_in_them() -> None:
    with pytest.raises(ZeroDivisionError), pair("1 Gbit/s", "5 ms") as world:
        sleeper = subprocess.Popen(world.command("a", ["sleep", "100"]))
        assert wait_until(lambda: bool(namespaces_of(os.getpid())))
        raise ZeroDivisionError
    assert sleeper.wait(timeout=PATIENCE) == -signal.SIGKILL
    assert not namespaces_of(os.getpid())
    world.close()
    with pytest.raises(RunError, match="closed"):
        world.command("a", ["true"])


PARENT = """
import os, subprocess, time
from tests.emulate.worlds import cluster
from isthmus.emulate.world import World
links = ["north south, bandwidth: 1 Gbit/s, latency: 5 ms"]
print("begin", flush=True)
world = World(cluster({"a": "north", "b": "south"}, links), shaped=True)
sleeper = subprocess.Popen(world.command("a", ["sleep", "100"]), stdout=subprocess.DEVNULL)
print(world.router, sleeper.pid, flush=True)
if os.fork() == 0:  # holds all files of its parent, and outlives it
    os.close(1)
    for _ in range(400):
        time.sleep(0.05)
        if not os.path.exists(f"/proc/{world.router}"):
            break
    os._exit(0)
sleeper.wait()
"""


def parent(root: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begin\n"
    return process


@shaped
@pytest.mark.parametrize("moment", [0.0, 0.02, 0.04, 0.1])
def test_a_killed_parent_leaves_nothing(root: Path, moment: float) -> None:
    with parent(root) as process:
        time.sleep(moment)
        process.kill()
        process.wait()
        pids = [int(pid) for pid in process.stdout.read().split()] if process.stdout else []
    assert wait_until(lambda: not routers_of(process.pid) and not any(map(alive, pids)))
    assert not namespaces_of(process.pid)


@shaped
def test_a_killed_router_is_told_and_its_hosts_removed() -> None:
    with pair("1 Gbit/s", "5 ms") as world:
        sleeper = subprocess.Popen(world.command("a", ["sleep", "100"]))
        assert world.router is not None
        os.kill(world.router, signal.SIGKILL)
        os.waitid(os.P_PID, world.router, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RunError, match=r"router of the emulated world is gone.*Found SIGKILL"):
            world.change("a", "b", cut=True)
        assert sleeper.wait(timeout=PATIENCE) == -signal.SIGKILL and not namespaces_of(os.getpid())


@shaped
def test_what_parent_and_router_left_is_removed_by_the_next_world(root: Path) -> None:
    with parent(root) as process:
        assert process.stdout is not None
        router, sleeper = map(int, process.stdout.readline().split())
        os.kill(router, signal.SIGSTOP)  # so that it sees nothing
        process.kill()
        process.wait()
        os.kill(router, signal.SIGKILL)
    assert wait_until(lambda: not alive(router)) and namespaces_of(process.pid) and alive(sleeper)
    with pair("1 Gbit/s", "5 ms") as world:
        assert not namespaces_of(process.pid) and wait_until(lambda: not alive(sleeper))
        with pair("1 Gbit/s", "5 ms") as beside:
            assert round_trips(beside, "a", "b", 1) and round_trips(world, "a", "b", 1)
        assert round_trips(world, "a", "b", 1)


# -- without root


def test_on_loopback_when_asked() -> None:
    with World(cluster(PAIR, ["north south, bandwidth: 1 Gbit/s, latency: 5 ms"]), shaped=False) as world:
        assert not world.shaped and world.interface == "lo" and world.address("b") == "127.0.0.1"
        assert world.command("a", ["true"]) == ["true"] and world.notes == (world.reason,)
        assert world.reason is not None and "nothing of the cluster's network is emulated" in world.reason
        with pytest.raises(UsageError, match="cannot be changed"):
            world.change("a", "b", cut=True)


UNPRIVILEGED = """
import os, sys
from tests.emulate.worlds import cluster, round_trips
from isthmus.emulate.world import World
from isthmus.errors import RunError
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
small = cluster({"a": "north", "b": "south"}, ["north south, bandwidth: 1 Gbit/s, latency: 50 ms"])
with World(small) as world:
    print(world.shaped, world.reason)
try:
    World(small, shaped=True)
except RunError as error:
    print(error)
"""


def test_without_root_it_says_what_it_cannot_shape(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", UNPRIVILEGED], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("False emulated links need root") and "all hosts are this machine, on loopback" in first
    assert "links cannot be emulated on this machine. Found emulated links need root" in second
