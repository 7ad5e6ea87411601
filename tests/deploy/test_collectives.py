"""Measured all-reduces: which, what a time is, hosts whose clocks differ, and participants that are real processes."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import TCP_PAYLOAD, Cluster
from isthmus.deploy.probing.prober import Dismiss, Order, Pass, ProbeRelayed, Read, ReadClock, Told
from isthmus.deploy.probing.probers import started
from isthmus.deploy.probing.sync_participants import Entered, JoinSync, Reduce, Reduced, Said, StoreEntry, Trouble
from isthmus.deploy.probing.sync_times import (
    HOW,
    LONGEST,
    REPEATS,
    SIZES,
    SyncMeasurement,
    collectives,
    elapsed,
    measurements,
    usual_sets,
)
from isthmus.emulate.world import World
from isthmus.model.load_profile import load_profile, save_profile
from isthmus.model.profile import CollectiveTime, Profile
from tests.deploy.test_probe import LOCAL, MBIT, cluster_of, near
from tests.quiet import needs_quiet

LINKS = (
    "a a, bandwidth: 1 Gbit/s, latency: 1 ms",
    "a b, bandwidth: 100 Mbit/s, latency: 10 ms",
    "b b, bandwidth: 1 Gbit/s, latency: 1 ms",
)
FOUR = {"a1": "a", "b1": "b", "a2": "a", "b2": "b"}
KB = 1000


def silent(one: SyncMeasurement, done: int, total: int) -> None:
    pass


def some(how: str, hosts: Iterable[str], *sizes: int) -> SyncMeasurement:
    return SyncMeasurement(how, tuple(hosts), sizes, 1.0)  # type: ignore[arg-type]


# -- which


def test_all_hosts_regions_and_pairs_of_regions() -> None:
    assert usual_sets(cluster_of(FOUR, LINKS), list(FOUR)) == [("a1", "a2", "b1", "b2"), ("a1", "a2"), ("b1", "b2")]
    five = cluster_of({**FOUR, "c1": "c"})
    found = usual_sets(five, [host for host in five.hosts if host != "b2"])
    assert found == [("a1", "a2", "b1", "c1"), ("a1", "a2"), ("a1", "a2", "b1"), ("a1", "a2", "c1"), ("b1", "c1")]


def test_sizes_are_those_that_links_allow() -> None:
    """A ring of two, latency aside, sends all there and gets all: at 1 Mbit/s 64 kB take half a second."""
    slow = cluster_of({"a1": "a", "b1": "b"}, ["a b, bandwidth: 1 Mbit/s, latency: 1 ms"])
    ring = measurements(slow, [("a1", "b1")])[0]
    assert ring.sizes == (64 * KB, 256 * KB) == tuple(size for size in SIZES if size / MBIT < LONGEST)
    assert near(ring.seconds, (1 + REPEATS) * 320 * KB / MBIT, 0.05)
    fast = measurements(cluster_of(FOUR, LINKS), [("a1", "a2")])
    assert [one.how for one in fast] == list(HOW) and all(one.sizes == SIZES for one in fast)
    slower = cluster_of({"a1": "a", "b1": "b"}, ["a b, bandwidth: 10 kbit/s, latency: 1 ms"])
    assert all("would take" in str(one.cannot) for one in measurements(slower, [("a1", "b1")]))


def test_only_those_who_send_to_each_other_need_a_link() -> None:
    """b2 and a2 cannot talk: a tree does without, a ring and a server that is at a2 do not."""
    links = [f"{pair}, bandwidth: 1 Gbit/s, latency: 1 ms" for pair in ("a a", "b b", "a1 b1", "a1 b2", "a2 b1")]
    hosts = ("a2", "a1", "b1", "b2")
    cannot = {one.how: one.cannot for one in measurements(cluster_of(FOUR, links), [hosts])}
    assert cannot == {"ring": "no link between b2 and a2", "tree": None, "server": "no link between a2 and b2"}


# -- what a time is


@given(
    times=st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 5)), min_size=2, max_size=6),
    wrong=st.lists(st.floats(-1, 1), min_size=6, max_size=6),
)
@settings(max_examples=30)
def test_a_time_is_from_the_last_begin_to_the_last_end(times: list[tuple[float, float]], wrong: list[float]) -> None:
    """With true clocks exactly that; with false ones never longer than the slowest, nor shorter than the fastest."""
    ready = max(begin for begin, _ in times)
    spans = [(begin, ready + more) for begin, more in times]
    assert elapsed(spans) == pytest.approx(max(end for _, end in spans) - ready)
    false = [(begin + off, end + off) for (begin, end), off in zip(spans, wrong[: len(spans)], strict=True)]
    own = [end - begin for begin, end in spans]
    assert min(own) - 1e-9 <= elapsed(false) <= max(own) + 1e-9


class Paper:
    """Participants that answer at once what they would; the clock of each host is ahead of ours by some seconds."""

    def __init__(self, ahead: Mapping[str, float], fails: int = -1, dies: int = -1) -> None:
        """The last host has trouble in, or is gone at, that sync (counted from 0)."""
        self.ahead, self.addresses = ahead, dict.fromkeys(ahead, "")
        self.fails, self.dies, self.syncs = fails, dies, list[int]()
        self.news: deque[tuple[str, Told | None]] = deque()
        self.begun: dict[str, tuple[int, Reduce]] = {}
        self.entries: list[str] = []
        self.dismissed = 0

    def tell(self, host: str, order: Order) -> None:
        match order:
            case ReadClock(number=number):
                self.news.append((host, Read(number=number, now=time.monotonic() + self.ahead[host])))
            case Pass(slot=slot, order=StoreEntry()):
                self.entries.append(f"{host}/{slot}")
            case Pass(slot=slot, order=JoinSync() as enter):
                self._enter(host, slot, enter)
            case Pass(slot=slot, order=Reduce() as reduce):
                self.begun[f"{host}/{slot}"] = slot, reduce
                if len(self.begun) == self.count:
                    self._reduce()
            case Dismiss():
                self.dismissed += 1

    def next(self, timeout: float) -> tuple[str, Told | None] | None:
        return self.news.popleft() if self.news else None

    def _say(self, host: str, slot: int, said: Said) -> None:
        self.news.append((host, ProbeRelayed(slot=slot, said=said)))

    def _enter(self, host: str, slot: int, enter: JoinSync) -> None:
        self.count = len(enter.members)
        self.syncs += [enter.number] if enter.number not in self.syncs else []
        assert enter.root == (enter.members[0] if enter.how == "server" else None)
        self._say(host, slot, StoreEntry(key="k", value=b"\x00v"))
        if host == list(self.ahead)[-1] and len(self.syncs) - 1 == self.fails:
            self._say(host, slot, Trouble(number=enter.number, why="no memory"))
        elif host == list(self.ahead)[-1] and len(self.syncs) - 1 == self.dies:
            self.news.append((host, None))
        else:
            self._say(host, slot, Trouble(number=-1, why="of something that is over"))
            self._say(host, slot, Entered(number=enter.number))

    def _reduce(self) -> None:
        """The k-th to be told begins k ms late; all end a second per megabyte after the last began, the first later."""
        last = max(order.at - self.ahead[me.split("/")[0]] for me, (_, order) in self.begun.items())
        last += 1e-3 * (len(self.begun) - 1)
        for k, (me, (slot, order)) in enumerate(self.begun.items()):
            host = me.split("/")[0]
            begin, end = order.at + 1e-3 * k, last + self.ahead[host] + order.bytes / 1e6 + (0.5 if k == 0 else 0.0)
            self._say(host, slot, Reduced(number=order.number, begin=begin, end=end))
        self.begun.clear()


def test_clocks_may_differ_and_who_begins_early_is_not_counted() -> None:
    paper = Paper({"a1": 5000.0, "a2": -300.0, "b1": 0.0})
    hosts = ("a1", "a2", "b1", "b1")
    found = collectives(
        cluster_of(FOUR, LINKS), paper, [some("server", hosts, 64 * KB, 10_000 * KB, 20_000 * KB)], silent
    )
    assert not found.failed and [time.bytes for time in found.times] == [64 * KB, 10_000 * KB], "the next is too long"
    assert {(time.how, time.hosts, time.root) for time in found.times} == {("server", hosts, "a1")}
    assert [time.seconds for time in found.times] == pytest.approx([0.564, 10.5], abs=2e-3)
    assert sorted(paper.entries) == sorted(["a1/0", "a2/0", "b1/0", "b1/1"] * 3), "each to all others"


def test_what_goes_wrong_costs_one_sync_and_a_host_that_is_gone_its_own() -> None:
    """The second sync has trouble, in the third b1 goes away."""
    cluster, hosts = cluster_of(FOUR, LINKS), ("a1", "b1")
    todo = [some(how, hosts, 64 * KB) for how in ("ring", "tree", "server")] + [some("ring", ("a1", "a2"), 64 * KB)]
    paper = Paper({"a1": 1.0, "a2": 2.0, "b1": 3.0}, fails=1, dies=2)
    apart = some("server", ("a2", "b1"))._replace(cannot="no link")
    found = collectives(cluster, paper, [*todo, some("tree", hosts, 64 * KB), apart], silent)
    assert found.skipped == {("server", ("a2", "b1")): "no link"}
    assert [(time.how, time.hosts) for time in found.times] == [("ring", hosts), ("ring", ("a1", "a2"))]
    assert found.failed == {("tree", hosts): "b1 is gone", ("server", hosts): "b1 is gone"}
    assert paper.dismissed == 3 + 2 + 2 + 2, "all, then those who are left"
    late = collectives(cluster, Paper({"a1": 0.0, "b1": 0.0}, fails=0), [some("ring", hosts, 64 * KB)], silent)
    assert late.failed == {("ring", hosts): "b1: no memory"} and not late.times


# -- real participants


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def participants() -> list[int]:
    below = [pid for child in children(os.getpid()) for pid in children(child)]
    return [
        pid for pid in below if b"isthmus.deploy.probing.sync_participant" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def test_processes_reduce_and_one_that_is_killed_is_noticed(tmp_path: Path) -> None:
    """Two that are far apart swap all they have: a latency until the other is known to listen, one to come there."""
    links = ["a b, bandwidth: 100 Mbit/s, latency: 10 ms"]
    cluster: Cluster = cluster_of({"a1": "a", "b1": "b"}, links)
    seen: list[list[int]] = []

    def listen(one: SyncMeasurement, done: int, total: int) -> None:
        seen.append(participants())
        if one.how == "server":
            os.kill(seen[-1][0], signal.SIGKILL)

    todo = [some("ring", cluster.hosts, 64 * KB, 1024 * KB), some("tree", cluster.hosts, 64 * KB)]
    with World(cluster) as world, started(list(cluster.hosts), world.command, world.address) as company:
        found = collectives(cluster, company, [*todo, some("server", cluster.hosts, 64 * KB)], listen)
        assert world.shaped or world.address("a1") == LOCAL
    assert [len(pids) for pids in seen] == [0, 2, 2] and not [p for p in seen[1] if Path(f"/proc/{p}").exists()]
    assert found.failed.keys() == {("server", ("a1", "b1"))}
    assert "code -9" in str(found.failed) or "lost the channel" in str(found.failed)
    assert [(time.how, time.bytes) for time in found.times] == [("ring", 64e3), ("ring", 1024e3), ("tree", 64e3)]
    save_profile(Profile(collectives=found.times), tmp_path / "p.json")
    assert isinstance(load_profile(tmp_path / "p.json").collectives[0], CollectiveTime)
    if world.shaped:
        with needs_quiet():
            for point in found.times:
                assert near(point.seconds, 0.02 + point.bytes / (100 * MBIT * TCP_PAYLOAD), 0.25), point
