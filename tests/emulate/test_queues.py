"""The queues without any network: what is delivered when, against closed forms and progressive filling."""

from __future__ import annotations

import struct
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.emulate.queues import Queues, RouteQueue, wire_bytes
from tests.emulate.filling import fair_rates

HOSTS = 16


def packet(sender: int, receiver: int, flow: int, size: int) -> bytes:
    """`size` bytes of IP, behind the 10 of the device."""
    head = bytes(12) + bytes([10, 0, 0, sender, 10, 0, 0, receiver]) + struct.pack(">HH", flow, flow)
    return bytes(10) + b"\x45" + head[1:] + bytes(size - len(head))


class Net:
    """Queues whose clock the test turns; hosts are numbers."""

    def __init__(self, rows: dict[tuple[int, int], dict[str, object]]) -> None:
        self.now = 0.0
        self.got: list[tuple[float, int, bytes]] = []
        self.queues = Queues(self._deliver)
        self.routes = {pair: RouteQueue(pair[1]) for pair in rows}
        for (a, b), row in rows.items():
            self.queues.ways.setdefault(a, {})[bytes([10, 0, 0, b])] = self.routes[a, b]
            self.queues.change(self.routes[a, b], row)

    def _deliver(self, target: int, data: bytes) -> None:
        self.got.append((self.now, target, data))
        self.on_delivery(data)

    def on_delivery(self, data: bytes) -> None:
        pass

    def send(self, a: int, b: int, flow: int, size: int) -> None:
        self.queues.take(a, packet(a, b, flow, size), self.now)

    def run(self, end: float = 1e9) -> None:
        due = self.queues.run_until(self.now)
        while due is not None and due <= end:
            self.now = due
            due = self.queues.run_until(due)


def row(latency: float = 0.0, loss: float = 0.0, cut: bool = False, **resources: float) -> dict[str, object]:
    return {"resources": resources, "latency": latency, "loss": loss, "cut": cut}


def test_one_packet_takes_its_slowest_resource_and_the_latency() -> None:
    net = Net({(1, 2): row(0.25, out=4000.0, pair=1000.0, into=2000.0)})
    net.send(1, 2, 1, 500)
    net.run()
    assert [when for when, _, _ in net.got] == [pytest.approx(0.5 + 0.25)]


def test_a_stream_flows_at_the_slowest_rate_and_pays_latency_once() -> None:
    net = Net({(1, 2): row(3.0, out=4000.0, pair=1000.0, into=2000.0)})
    for _ in range(100):
        net.send(1, 2, 1, 500)
    net.run()
    assert [when for when, _, _ in net.got] == pytest.approx([3.0 + 0.5 * (n + 1) for n in range(100)])


def test_a_small_message_does_not_wait_behind_another_flow() -> None:
    net = Net({(1, 2): row(pair=1000.0)})
    for _ in range(1000):
        net.send(1, 2, 1, 500)
    net.run(10.2)  # packet 20 is being sent, until 10.5
    net.now = 10.2
    net.send(1, 2, 2, 100)
    net.run()
    (when,) = [when for when, _, data in net.got if len(data) == 110]
    assert when == pytest.approx(10.5 + 0.1)
    assert len(net.got) == 1001 and net.now == pytest.approx(500.1)


def test_packets_of_a_flow_stay_in_order() -> None:
    net = Net({(1, 2): row(0.01, a=1000.0, b=700.0), (1, 3): row(0.01, a=1000.0)})
    for number in range(200):
        net.send(1, 2, 1, 100 + number % 7 * 100)
        net.send(1, 3, 1, 300)
    sent = [len(packet(1, 2, 1, 100 + number % 7 * 100)) for number in range(200)]
    net.run()
    assert [len(data) for _, target, data in net.got if target == 2] == sent


def test_cut_loses_what_waits_and_lets_arrive_what_has_left() -> None:
    net = Net({(1, 2): row(5.0, pair=1000.0)})
    for _ in range(10):
        net.send(1, 2, 1, 1000)
    net.run(3.5)  # four have begun to leave
    net.now = 3.5
    net.queues.change(net.routes[1, 2], row(5.0, cut=True, pair=1000.0))
    net.run()
    assert [when for when, _, _ in net.got] == pytest.approx([6.0, 7.0, 8.0, 9.0])
    net.queues.change(net.routes[1, 2], row(5.0, pair=1000.0))
    net.send(1, 2, 1, 1000)
    net.run()
    assert len(net.got) == 5


def test_a_slower_link_holds_for_what_has_not_begun_to_leave() -> None:
    net = Net({(1, 2): row(pair=1000.0)})
    for _ in range(4):
        net.send(1, 2, 1, 1000)
    net.run(1.5)
    net.now = 1.5
    net.queues.change(net.routes[1, 2], row(1.0, pair=100.0))
    net.run()
    assert [when for when, _, _ in net.got] == pytest.approx([1.0, 2.0, 13.0, 23.0])


def test_loss_is_a_part_of_packets_and_the_same_again() -> None:
    found = []
    for _ in range(2):
        net = Net({(1, 2): row(loss=0.1, pair=1e6)})
        for _ in range(5000):
            net.send(1, 2, 1, 100)
        net.run()
        found.append([round(when, 6) for when, _, _ in net.got])
    assert found[0] == found[1]
    assert 0.08 < 1 - len(found[0]) / 5000 < 0.12 and net.queues.dropped == 5000 - len(found[0])


def test_strangers_and_other_protocols_are_dropped() -> None:
    net = Net({(1, 2): row(pair=1.0)})
    net.send(1, 3, 1, 100)
    net.queues.take(1, bytes(10) + b"\x60" + bytes(60), 0.0)
    net.run()
    assert not net.got and net.queues.dropped == 2


@pytest.mark.parametrize(
    ("payload", "segment", "wire"), [(1460, 0, 1500), (1461, 1460, 1541), (14600, 1460, 15000), (64240, 1460, 66000)]
)
def test_a_run_of_packets_is_charged_for_each(payload: int, segment: int, wire: int) -> None:
    kind = 1 if segment else 0
    head = struct.pack("<BBHHHH", 1, kind, 40, segment, 20, 16)
    assert wire_bytes(head + bytes(40 + payload)) == wire


# -- shares of long streams: each flow keeps a window of packets on their way, as TCP does

rate = st.floats(100.0, 2000.0)


@st.composite
def nets(draw: st.DrawFn) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Flows with a link of their own each, some of them over one trunk: what a cluster file can say of two regions.

    Where flows meet at several places one after another, windows of this size are too short for max-min rates.
    """
    count = draw(st.integers(1, 6))
    resources = {"trunk": draw(rate), **{f"own{n}": draw(rate) for n in range(count)}}
    return resources, [(f"own{n}", "trunk") if draw(st.booleans()) else (f"own{n}",) for n in range(count)]


def shares(resources: dict[str, float], flows: list[tuple[str, ...]], sizes: list[int], end: float) -> list[float]:
    """Bytes a second of each flow in the second half of the time."""
    rows = {
        (2 * n + 1, 2 * n + 2): row(0.05, **{name: resources[name] for name in flow}) for n, flow in enumerate(flows)
    }
    net, got = Net(rows), defaultdict(float)

    def again(data: bytes) -> None:
        a, b = data[10 + 15], data[10 + 19]
        if net.now >= end / 2:
            got[a] += len(data) - 10
        if net.now < end:
            net.send(a, b, 1, len(data) - 10)

    net.on_delivery = again  # type: ignore[method-assign]
    for (a, b), size in zip(rows, sizes, strict=True):
        for _ in range(max(2, 2000 // size * 4)):
            net.send(a, b, 1, size)
    net.run(end)
    return [got[a] / (end / 2) for a, _ in rows]


def test_what_a_slow_link_leaves_is_not_lost() -> None:
    """The example of docs/events.md: a trunk of 12 with three flows, one of them limited to 2."""
    resources = {"trunk": 1200.0, "slow": 200.0}
    flows = [("slow", "trunk"), ("trunk",), ("trunk",)]
    assert shares(resources, flows, [50, 50, 50], 200.0) == pytest.approx([200, 500, 500], rel=0.02)


@settings(max_examples=12)
@given(nets(), st.data())
def test_long_streams_share_as_the_simulator_says(
    net: tuple[dict[str, float], list[tuple[str, ...]]], data: st.DataObject
) -> None:
    """Max-min fair, whatever the sizes of packets."""
    resources, flows = net
    sizes = [data.draw(st.sampled_from([30, 50, 100])) for _ in flows]
    found, expected = shares(resources, flows, sizes, 150.0), fair_rates(resources, flows)
    assert found == pytest.approx(expected, rel=0.06)
