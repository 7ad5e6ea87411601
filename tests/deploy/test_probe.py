"""Probing: which pairs when, what becomes of the figures, and probers that are real processes or emulated hosts."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import TCP_PAYLOAD, Cluster
from isthmus.deploy.probing import prober as prober_module
from isthmus.deploy.probing import sealed_lines as sealed
from isthmus.deploy.probing.probe import Pair, PairFound, ProbeResult, ProbeSettings, Round, host_pairs, probe, rounds
from isthmus.deploy.probing.probed_cluster import probed_cluster
from isthmus.deploy.probing.prober import (
    Listen,
    Listening,
    Measure,
    Order,
    PairMeasured,
    Rate,
    Read,
    ReadClock,
    Told,
    steady_rate,
)
from isthmus.deploy.probing.probers import meeting, started, take_part
from isthmus.emulate import namespaces
from isthmus.emulate.world import World
from isthmus.errors import RunError
from tests.quiet import PATIENCE, needs_quiet

LACKS = namespaces.missing()
QUICK = ProbeSettings(seconds=0.1, pings=5)
LOCAL = "127.0.0.1"
TOKEN = b"a secret of many letters"
MBIT = 1e6 / 8


def cluster_of(hosts: Mapping[str, str], links: Iterable[str] = (), nics: Mapping[str, str] | None = None) -> Cluster:
    """Hosts with their regions; links like `a b, bandwidth: 1 Gbit/s, latency: 5 ms`."""
    nic = {host: f", nic: {rate}" for host, rate in (nics or {}).items()}
    rows = [f"  {name}: {{region: {region}, devices: {{T4: 1}}{nic.get(name, '')}}}" for name, region in hosts.items()]
    ends = [(link.partition(",")[0].split(), link.partition(",")[2]) for link in links]
    lines = [f"  - {{between: [{a}, {b}], {rest}}}" for (a, b), rest in ends]
    head = ["kind: cluster", "version: 1", "name: x", "hosts:"]
    return parse_cluster("\n".join([*head, *rows, *(["links:", *lines] if lines else [])]))


def silent(what: str, done: int, total: int, pairs: Round) -> None:
    pass


def near(value: float, right: float, part: float = 0.05) -> bool:
    return abs(value - right) <= part * right


# -- which pairs at the same time


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Cluster, list[Pair], int | None]:
    regions = "abc"[: draw(st.integers(1, 3))]
    hosts = {f"h{number}": draw(st.sampled_from(regions)) for number in range(draw(st.integers(2, 9)))}
    used = sorted(set(hosts.values()))
    links = [
        f"{a} {b}, bandwidth: 1 Gbit/s, latency: 1 ms{draw(st.sampled_from(['', ', trunk: 2 Gbit/s']))}"
        for a, b in itertools.combinations_with_replacement(used, 2)
    ]
    pairs = [pair for pair in host_pairs(hosts) if draw(st.integers(0, 5))]
    return cluster_of(hosts, links), pairs, draw(st.none() | st.integers(1, 3))


@given(schedules())
@settings(max_examples=40)
def test_pairs_of_a_round_share_nothing(drawn: tuple[Cluster, list[Pair], int | None]) -> None:
    cluster, pairs, most = drawn
    found = rounds(cluster, pairs, most)
    assert sorted(pair for members in found for pair in members) == sorted(pairs)
    for members in found:
        assert most is None or len(members) <= most
        for one, other in itertools.combinations(members, 2):
            assert not set(one) & set(other), "a nic"
            ways = [tuple(sorted(cluster.hosts[host].region for host in pair)) for pair in (one, other)]
            if ways[0] == ways[1]:
                a, b = ways[0]
                assert a == b and cluster.trunk(a, b) is None, "a trunk, or what two regions share"


@pytest.mark.parametrize("count", range(2, 14))
def test_all_against_all_takes_as_few_rounds_as_can_be(count: int) -> None:
    """A host plays n - 1 others, one a round; with n odd, one host rests in each round, so it takes n."""
    cluster = cluster_of({f"h{number}": "a" for number in range(count)})
    assert len(rounds(cluster, host_pairs(cluster.hosts))) == (count - 1 if count % 2 == 0 else count)


# -- the rate of a transfer


@given(
    rate=st.floats(1e3, 1e10),
    seconds=st.floats(0.5, 20),
    noise=st.lists(st.floats(-0.2, 0.2), min_size=200, max_size=200),
)
@settings(max_examples=25)
def test_the_rate_is_that_after_slow_start(rate: float, seconds: float, noise: list[float]) -> None:
    """A tenth of the rate in the first third, then all of it; reads come a little early or late."""
    step = seconds / 200
    points, total = [], 0.0
    for number, late in enumerate(noise):
        total += step * rate * (0.1 if number < 66 else 1.0)
        points.append((1e5 + step * (number + late), int(total)))
    found = steady_rate(points, seconds)
    assert near(found.bytes_per_second, rate, 0.02) and found.steady


def test_what_comes_after_the_sending_does_not_count_and_a_rising_rate_is_noticed() -> None:
    steady = [(0.01 * n, 1000 * n) for n in range(1, 101)]
    tail = [(1.0 + 0.1 * n, 100_000 + n) for n in range(1, 50)]
    assert near(steady_rate([*steady, *tail], 1.0).bytes_per_second, 1e5, 1e-6)
    rising = steady_rate([(0.01 * n, 10 * n * n) for n in range(1, 101)], 1.0)
    assert not rising.steady and 1e5 < rising.bytes_per_second < 2e5  # its slope at the middle and at the end


def test_a_very_slow_link_has_few_points() -> None:
    found = steady_rate([(0.0, 100), (0.9, 200)], 1.0)
    assert near(found.bytes_per_second, 100 / 0.9, 1e-9) and not found.steady
    with pytest.raises(ConnectionError, match="too slow"):
        steady_rate([(0.0, 100)], 1.0)


# -- a network on paper: flows share fairly (progressive filling), whoever measures


class Paper:
    """Probers that answer what the cluster would give them."""

    def __init__(self, cluster: Cluster, lopsided: Mapping[Pair, float] | None = None) -> None:
        """`lopsided`: flows that reach only a part of what their link can."""
        self.cluster, self.lopsided = cluster, lopsided or {}
        self.addresses = {host: f"at {host}" for host in cluster.hosts}
        self.news: deque[tuple[str, Told | None]] = deque()
        self.busy: dict[int, Pair] = {}
        self.waiting: dict[int, str] = {}
        self.frozen = ""

    def tell(self, host: str, order: Order) -> None:
        if host == self.frozen:
            return
        if isinstance(order, ReadClock):
            self.news.append((host, Read(number=order.number, now=0.0)))
        elif isinstance(order, Listen):
            self.waiting[order.pair] = host
            self.news.append((host, Listening(pair=order.pair, port=order.pair)))
        elif isinstance(order, Measure):
            other = self.waiting.pop(order.pair)
            assert order.address == f"at {other}" and order.port == order.pair
            self.busy[order.pair] = (host, other)

    def next(self, timeout: float) -> tuple[str, Told | None] | None:
        if not self.news:
            self._measure()
        return self.news.popleft() if self.news else None

    def _measure(self) -> None:
        pairs = list(self.busy.values())
        there, back = self._rates(pairs), self._rates([(b, a) for a, b in pairs])
        for number, (a, b) in self.busy.items():
            link = self.cluster.link(a, b)
            assert link is not None
            rates = [Rate(bytes_per_second=TCP_PAYLOAD * r, steady=True) for r in (there[a, b], back[b, a])]
            told = PairMeasured(
                pair=number, least=2 * link.latency, median=2.1 * link.latency, there=rates[0], back=rates[1]
            )
            self.news.append((a, told))
        self.busy.clear()

    def _rates(self, flows: Sequence[Pair]) -> dict[Pair, float]:
        """All flows grow together; whatever is full stops those on it."""
        room, rates, growing = {}, dict.fromkeys(flows, 0.0), set(flows)
        for flow in flows:
            for name, capacity in self._way(*flow).items():
                room[name] = capacity
        while growing:
            load = {name: sum(name in self._way(*flow) for flow in growing) for name in room}
            step = min(room[name] / load[name] for name in room if load[name])
            for flow in growing:
                rates[flow] += step
            room = {name: left - step * load[name] for name, left in room.items()}
            full = {name for name, left in room.items() if left < 1e-6 and load[name]}
            growing = {flow for flow in growing if not full & set(self._way(*flow))}
        return rates

    def _way(self, a: str, b: str) -> dict[object, float]:
        link = self.cluster.link(a, b)
        assert link is not None
        regions = self.cluster.hosts[a].region, self.cluster.hosts[b].region
        trunk = self.cluster.trunk(*regions)
        way: dict[object, float] = {(a, b): link.bandwidth * self.lopsided.get((a, b), 1.0)}
        way |= {("out", a): self.cluster.hosts[a].nic, ("in", b): self.cluster.hosts[b].nic}
        return way | ({regions: trunk} if trunk is not None else {})


def on_paper(truth: Cluster, given: Cluster | None = None, **options: bool) -> tuple[Cluster, list[str]]:
    """The cluster that a probe of `truth` makes of what was given, with its notes."""
    given = given or truth
    pairs = [pair for pair in host_pairs(given.hosts) if truth.link(*pair) is not None]
    settings = ProbeSettings(**options)
    return probed_cluster(given, probe(given, Paper(truth), rounds(given, pairs), settings, silent))


SIX = {"a1": "a", "a2": "a", "b1": "b", "b2": "b", "b3": "b", "c1": "c"}
LINKS = (
    "a a, bandwidth: 1 Gbit/s, latency: 0.2 ms",
    "b b, bandwidth: 800 Mbit/s, latency: 1 ms",
    "a b, bandwidth: 100 Mbit/s, latency: 20 ms, trunk: 130 Mbit/s",
    "a c, bandwidth: 50 Mbit/s, latency: 70 ms",
    "b c, bandwidth: 300 Mbit/s, latency: 9 ms",
)


def figures(cluster: Cluster) -> dict[frozenset[str], tuple[float, float, float | None]]:
    return {frozenset(link.between): (link.bandwidth, link.latency, link.trunk) for link in cluster.links}


def test_the_cluster_comes_back() -> None:
    """Also from a file that knows no links at all; only the trunk stays unknown there."""
    truth = cluster_of(SIX, LINKS)
    found, notes = on_paper(truth)
    assert found == truth and notes == ["trunks that were not observed, kept as given: a - b"]
    blank, notes = on_paper(truth, cluster_of(SIX))
    assert notes == [] and figures(blank) == {
        ends: (rate, latency, None) for ends, (rate, latency, _) in figures(truth).items()
    }


def test_trunks_and_nics_come_back() -> None:
    """From flows side by side: two pairs share the trunk; a2 reaches a1, b and c at once."""
    truth = cluster_of(SIX, LINKS, {"a2": "300 Mbit/s"})
    found, notes = on_paper(truth, cluster_of(SIX), trunks=True, nics=True)
    assert figures(found) == figures(truth) | {frozenset("a"): (300 * MBIT, 0.2e-3, None)}, "no pair passes the nic"
    assert found.hosts["a2"].nic == 300 * MBIT and not found.hosts["a2"].imputed & {"nic"}
    assert "nic" in found.hosts["c1"].imputed, "what held nobody back is not known"
    assert "trunk a - b: flows reach 130 Mbit/s together" in notes
    assert "nics set to what flows reached together: a2" in notes


def test_a_trunk_comes_back_whatever_the_order_of_hosts() -> None:
    truth = cluster_of({"a1": "a", "b1": "b", "b2": "b", "a2": "a"}, LINKS[:3])
    found, _ = on_paper(truth, cluster_of({"a1": "a", "b1": "b", "b2": "b", "a2": "a"}), trunks=True)
    assert figures(found) == figures(truth)


def test_a_frozen_prober_is_lost_and_the_rest_measured() -> None:
    truth = cluster_of(SIX, LINKS)
    paper = Paper(truth)
    paper.frozen = "b1"
    rest = [pair for pair in host_pairs(SIX) if "b1" not in pair]
    found = probe(truth, paper, rounds(truth, host_pairs(SIX)), ProbeSettings(), silent)
    assert found.lost == ("b1",) and sorted(found.pairs) == sorted(rest)
    assert sorted(found.failed.values()) == ["b1 is gone"] * 4 + ["no answer came"]


def test_what_the_file_has_too_low_is_mended() -> None:
    low = cluster_of(SIX, (*LINKS[:2], LINKS[2].replace("130", "30"), *LINKS[3:]), {"a1": "70 Mbit/s"})
    found, notes = on_paper(cluster_of(SIX, LINKS), low)
    assert figures(found)[frozenset("ab")] == (100 * MBIT, 20e-3, None) and found.hosts["a1"].nic == 1000 * MBIT
    assert "trunks left out, because more than the given bandwidth came through: a - b" in notes
    assert "nics raised, because more than the given bandwidth came through: a1" in notes


def test_pairs_that_differ_are_written_apart() -> None:
    truth = cluster_of(SIX, (*LINKS, "a1 b1, bandwidth: 80 Mbit/s, latency: 20 ms"))
    found, _ = on_paper(truth, cluster_of(SIX, LINKS))
    for pair in itertools.product(("a1", "a2"), ("b1", "b2", "b3")):
        mine, right = found.link(*pair), truth.link(*pair)
        assert mine and right and (mine.bandwidth, mine.latency) == (right.bandwidth, right.latency)
    assert found.trunk("a", "b") == 130 * MBIT, "a link of regions stays, as it has the trunk"
    plain, _ = on_paper(cluster_of(SIX, (*LINKS[:2], "a1 b1, bandwidth: 80 Mbit/s, latency: 20 ms")), cluster_of(SIX))
    assert set(figures(plain)) == {frozenset("a"), frozenset("b"), frozenset(("a1", "b1"))}, "others cannot talk"


def test_the_lower_way_is_written_and_said() -> None:
    truth = cluster_of({"a1": "a", "b1": "b"}, ("a b, bandwidth: 100 Mbit/s, latency: 5 ms",))
    paper = Paper(truth, {("b1", "a1"): 0.5})
    found = probe(truth, paper, rounds(truth, host_pairs(truth.hosts)), ProbeSettings(), silent)
    cluster, notes = probed_cluster(truth, found)
    assert figures(cluster) == {frozenset("ab"): (50 * MBIT, 5e-3, None)}
    assert notes == ["a1 to b1 reaches 100 Mbit/s, b1 to a1 50 Mbit/s: the lower one is written"]


def test_what_was_not_measured_stays_and_is_marked() -> None:
    given = cluster_of(SIX, LINKS[:4])  # b and c have no link
    pair = PairFound(latency=0.03, latency_median=0.03, bandwidth=(90 * MBIT, 95 * MBIT), steady=False)
    failed = {("a1", "b2"): "Connection refused", ("b1", "c1"): "Connection refused"}
    found = ProbeResult(pairs={("a1", "b1"): pair}, failed=failed, lost=(), trunks={}, nics={}, seconds=1.0)
    cluster, notes = probed_cluster(given, found)
    assert figures(cluster) == figures(given) | {frozenset(("a1", "b1")): (90 * MBIT, 0.03, None)}
    assert cluster.link("b1", "c1") is None
    text = "\n".join(notes)
    assert "the rate was not steady, measure longer (--seconds): a1 - b1" in text
    assert "not measured, kept as given: a1 - a2, a1 - b2, a1 - b3, a1 - c1, a2 - b1" in text
    assert "no link was given, and none was found between: b1 - c1" in text
    assert "could not be measured (Connection refused): a1 - b2, b1 - c1" in text


# -- real probers, on loopback


def here(host: str, argv: Sequence[str]) -> list[str]:
    return list(argv)


def children() -> set[int]:
    """Processes of this one."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    return {int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()}


@needs_quiet()
def test_processes_measure_each_other() -> None:
    cluster = cluster_of({"h1": "a", "h2": "a", "h3": "b"})
    before = children()
    with started(list(cluster.hosts), here, lambda host: LOCAL) as company:
        schedule = rounds(cluster, host_pairs(cluster.hosts))
        found = probe(cluster, company, schedule, ProbeSettings(seconds=0.2, pings=5, nics=True), silent)
        assert len(children()) == len(before) + 3
    assert children() == before, "nothing is left"
    assert set(found.pairs) == set(host_pairs(cluster.hosts)) and not found.failed and not found.lost
    for pair in found.pairs.values():
        assert 1e-6 < pair.latency <= pair.latency_median < 0.1 and pair.lower > 1e6
    nics = set(found.nics)  # a busy machine may let flows miss each other: then a nic is not told
    assert nics and nics <= {"h1", "h2"}, "both ways of h3 lead to one other region"
    assert all(link.bandwidth > 1e6 for link in probed_cluster(cluster, found)[0].links)


DYING = """
import os, socket, sys
from isthmus.deploy.probing.prober import Listen, Measure, Order, join
host, address = sys.argv[1:]
line = join(socket.socket(fileno=os.dup(0)), os.environ["ISTHMUS_TOKEN"].encode(), host, address)
line.receive(Order, None)
os.kill(os.getpid(), 9)
"""


@needs_quiet()
def test_a_prober_that_dies_costs_its_own_pairs_only() -> None:
    cluster = cluster_of({"h1": "a", "h2": "a", "h3": "a", "h4": "a"}, ["a a, bandwidth: 1 Gbit/s, latency: 1 ms"])

    def command(host: str, argv: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", DYING, *argv[-2:]] if host == "h4" else list(argv)

    with started(list(cluster.hosts), command, lambda host: LOCAL) as company:
        found = probe(cluster, company, rounds(cluster, host_pairs(cluster.hosts)), QUICK, silent)
    assert found.lost == ("h4",) and set(found.pairs) == set(host_pairs(["h1", "h2", "h3"]))
    assert set(found.failed.values()) == {"h4 is gone"} and len(found.failed) == 3
    measured, notes = probed_cluster(cluster, found)
    assert figures(measured)[frozenset("a")] == figures(cluster)[frozenset("a")], "for the pairs of h4"
    assert "not measured, kept as given: h1 - h4, h2 - h4, h3 - h4" in notes


def test_a_process_that_is_no_prober() -> None:
    before = children()
    with (
        pytest.raises(RunError, match="h1: its prober did not start"),
        started(["h1"], lambda host, argv: [sys.executable, "-c", "pass"], lambda host: LOCAL),
    ):
        pytest.fail("nobody is here")
    assert children() == before


def test_a_pair_that_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """h2 says that it listens where it does not, h3 listens where it cannot."""
    cluster = cluster_of({"h1": "a", "h2": "a", "h3": "a"})
    addresses = {"h1": LOCAL, "h2": LOCAL, "h3": "192.0.2.1"}
    with started(list(cluster.hosts), here, addresses.__getitem__) as company:
        company.addresses["h2"] = "127.0.0.9"
        found = probe(cluster, company, rounds(cluster, host_pairs(cluster.hosts)), QUICK, silent)
    assert not found.pairs and found.failed["h1", "h2"] == "Connection refused"
    assert "Cannot assign requested address" in found.failed["h1", "h3"]


# -- hosts that come to a meeting point


def free_port() -> int:
    with socket.create_server((LOCAL, 0)) as server:
        return int(server.getsockname()[1])


class Comer(threading.Thread):
    """A host that takes part; keeps what it came to."""

    def __init__(self, port: int, host: str, token: bytes = TOKEN) -> None:
        super().__init__(daemon=True)
        self.place, self.host, self.token = (LOCAL, port), host, token
        self.error: RunError | None = None
        self.start()

    def run(self) -> None:
        try:
            take_part(self.place, self.token, self.host, None, wait=PATIENCE)
        except RunError as error:
            self.error = error


def test_hosts_meet_and_strangers_stay_out() -> None:
    """A wrong token, a wrong name, a name twice, one who says nothing, one who talks nonsense: none gets in."""
    cluster = cluster_of({"h1": "a", "h2": "a", "h3": "b"})
    port, news, comers = free_port(), list[str](), dict[str, Comer]()

    def listen(text: str) -> None:
        """They come one after the other, so that it is known who is first."""
        news.append(text)
        order = [("second", "h2", TOKEN), ("unknown", "h9", TOKEN), ("false", "h3", b"x" * 20), ("h3", "h3", TOKEN)]
        if len(news) <= len(order):
            name, host, token = order[len(news) - 1]
            comers[name] = Comer(port, host, token)

    comers["h2"] = Comer(port, "h2")
    with meeting((LOCAL, port), TOKEN, ("h1", LOCAL), list(cluster.hosts), PATIENCE, listen) as company:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOCAL, port), timeout=PATIENCE)
        assert dict(company.addresses) == {"h1": LOCAL, "h2": LOCAL, "h3": LOCAL}
        found = probe(cluster, company, rounds(cluster, host_pairs(cluster.hosts)), QUICK, silent)
    for comer in comers.values():
        comer.join(PATIENCE)
    assert len(found.pairs) == 3 and comers["h2"].error is None and comers["h3"].error is None
    assert "host 'h2' has joined already" in str(comers["second"].error)
    assert "no host of the cluster is named 'h9'" in str(comers["unknown"].error)
    assert "the token differs" in str(comers["false"].error)
    assert [text.partition(":")[0] for text in news] == [
        "h2 has joined",
        *["Refused a connection"] * 3,
        "h3 has joined",
    ]


@pytest.mark.parametrize("most", [2, 32])
def test_those_who_say_nothing_keep_nobody_waiting(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only two may prove themselves at a time, until these are left: who was sent away comes again."""
    monkeypatch.setattr(sealed, "_PROVING", most)
    monkeypatch.setattr(sealed, "PATIENCE", 0.6)
    port = free_port()
    begin = time.monotonic()
    quiet: list[socket.socket] = []
    comers: list[Comer] = []

    def dawdle() -> None:
        for _ in range(3):
            while time.monotonic() < begin + PATIENCE:
                try:
                    quiet.append(socket.create_connection((LOCAL, port), timeout=PATIENCE))
                    break
                except OSError:
                    time.sleep(0.01)
        comers.append(Comer(port, "h2"))

    thread = threading.Thread(target=dawdle)
    thread.start()
    with meeting((LOCAL, port), TOKEN, ("h1", LOCAL), ["h1", "h2"], PATIENCE, lambda text: None) as company:
        assert set(company.addresses) == {"h1", "h2"}
    thread.join()
    comers[0].join(PATIENCE)
    for one in quiet:
        one.close()
    assert comers[0].error is None


def test_a_leader_that_fails_is_noticed() -> None:
    port = free_port()
    comer = Comer(port, "h2")
    with (
        pytest.raises(KeyboardInterrupt),
        meeting((LOCAL, port), TOKEN, ("h1", LOCAL), ["h1", "h2"], PATIENCE, lambda text: None),
    ):
        raise KeyboardInterrupt
    comer.join(PATIENCE)
    assert "closed the connection before the end" in str(comer.error)


def test_a_meeting_point_that_is_no_address_of_this_machine() -> None:
    with (
        pytest.raises(RunError, match="cannot listen at the meeting point"),
        meeting(("192.0.2.1", 29400), TOKEN, ("h1", LOCAL), ["h1", "h2"], 1.0, lambda text: None),
    ):
        pytest.fail("nobody can come")


def test_a_data_connection_wants_the_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who finds the port of a pair is left, and the pair waits on."""
    here_end, there_end = socket.socketpair()
    with here_end, there_end:
        lines = sealed.Sealed(sealed._Lines(here_end), b"a", b"b"), sealed.Sealed(sealed._Lines(there_end), b"b", b"a")
        monkeypatch.setattr(prober_module, "PATIENCE", 0.5)
        thread = threading.Thread(target=prober_module._take_part, args=(Listen(pair=1), lines[0], TOKEN, LOCAL))
        thread.start()
        listening = lines[1].receive(Told)
        stranger = socket.create_connection((LOCAL, listening.port), timeout=2.0)
        with stranger, pytest.raises(PermissionError):
            sealed.enter(stranger, b"x" * 20, "pair 1")
        failed = lines[1].receive(Told)
        assert failed.pair == 1 and failed.why == "nothing came for too long"
        thread.join()


def test_one_who_says_nothing_to_a_pair_keeps_it_from_nothing() -> None:
    with prober_module.server_at(LOCAL) as server, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(prober_module._accepted, server, TOKEN, "pair 1")
        place = server.getsockname()
        with socket.create_connection(place), socket.create_connection(place) as friend:
            peer = sealed.enter(friend, TOKEN, "pair 1")
            with accepted.result(timeout=PATIENCE).socket as other:
                for end in (peer.socket, other):
                    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_prober_is_light() -> None:
    heavy = "('torch', 'numpy', 'numba')"
    code = f"import sys, isthmus.deploy.probing.prober; sys.exit(any(n in sys.modules for n in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- an emulated world


@pytest.mark.slow("probes an emulated world")
@pytest.mark.skipif(LACKS is not None, reason=str(LACKS))
@needs_quiet()
def test_an_emulated_world_gives_back_its_cluster_file() -> None:
    """Four hosts in three regions, links that differ; one pair of hosts has none."""
    hosts = {"a1": "a", "a2": "a", "b1": "b", "c1": "c"}
    links = (
        "a a, bandwidth: 500 Mbit/s, latency: 3 ms",
        "a b, bandwidth: 200 Mbit/s, latency: 7 ms",
        "a1 c1, bandwidth: 150 Mbit/s, latency: 6 ms",
        "b c, bandwidth: 250 Mbit/s, latency: 5 ms",
    )
    cluster = cluster_of(hosts, links)
    with World(cluster, shaped=True) as world, started(list(hosts), world.command, world.address) as company:
        schedule = rounds(cluster, host_pairs(hosts), most=2)
        found = probe(cluster, company, schedule, ProbeSettings(seconds=0.3, pings=10), silent)
    assert set(found.failed) == {("a2", "c1")} and "unreachable" in found.failed["a2", "c1"]
    measured, _ = probed_cluster(cluster, found)
    assert measured.link("a2", "c1") is None
    for pair in found.pairs:
        mine, right = measured.link(*pair), cluster.link(*pair)
        assert mine and right and near(mine.bandwidth, right.bandwidth) and near(mine.latency, right.latency), pair
    assert set(figures(measured)) == set(figures(cluster)), "said in the same form"
