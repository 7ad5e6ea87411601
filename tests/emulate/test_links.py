"""What the router is told of a cluster: resources that are left out change nobody's rate."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.emulate.links import Links
from isthmus.errors import UsageError
from tests.emulate.filling import fair_rates
from tests.emulate.worlds import cluster

REGIONS = ("north", "south")
TWO = {"a": "north", "b": "south", "c": "south"}
BOTH = ["north south, bandwidth: 80 Mbit/s, latency: 10 ms, trunk: 120 Mbit/s"]
rate = st.sampled_from([1e6, 2e6, 3e6, 5e6, 1e7, 1e8])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    hosts = {
        name: Host(
            name=name, region=draw(st.sampled_from(REGIONS)), devices={}, bandwidth=1e9, latency=0.0,
            nic=draw(rate), down=draw(rate), bus=1e9, memory=1e9, cores=1,
        )
        for name in "abcde"
    }  # fmt: skip
    links = [
        Link(between=between, bandwidth=draw(rate), latency=0.01, trunk=draw(st.none() | rate))
        for between in (("north", "north"), ("north", "south"), ("south", "south"))
        if draw(st.booleans())
    ]
    own = [Link(between=("a", "b"), bandwidth=draw(rate), latency=0.02)] if draw(st.booleans()) else []
    return Cluster(name="any", kinds={}, hosts=hosts, links=(*links, *own))


def whole(described: Cluster, a: str, b: str) -> dict[str, float]:
    """Everything that a packet passes, as the cost model has it."""
    link, ends = described.link(a, b), (described.hosts[a], described.hosts[b])
    assert link is not None
    trunk = described.trunk(ends[0].region, ends[1].region)
    found = {f"out {a}": ends[0].nic, f"{a} {b}": link.bandwidth, f"in {b}": ends[1].nic_in}
    return found | ({f"{ends[0].region} {ends[1].region}": trunk} if trunk is not None else {})


@settings(max_examples=80)
@given(clusters(), st.data())
def test_what_is_left_out_changes_nobodys_rate(described: Cluster, data: st.DataObject) -> None:
    hosts = list(described.hosts)
    table = Links(described, hosts).table()["routes"]
    linked = [pair for pair in itertools.permutations(hosts, 2) if described.link(*pair) is not None]
    assert set(table) == {f"{hosts.index(a)} {hosts.index(b)}" for a, b in linked}
    if not linked:
        return
    flows = data.draw(st.lists(st.sampled_from(linked), min_size=1, max_size=8))
    full = [whole(described, a, b) for a, b in flows]
    kept = [table[f"{hosts.index(a)} {hosts.index(b)}"]["resources"] for a, b in flows]
    everything = {name: most for one in full for name, most in one.items()}
    reduced = {name: most for one in kept for name, most in one.items()}
    assert all(kept) and len(reduced) <= len(everything)
    assert fair_rates(reduced, kept) == pytest.approx(fair_rates(everything, full))


def test_changes_hold_both_ways_and_are_mended() -> None:
    links = Links(cluster(TWO, BOTH), "abc")
    before = links.table()
    links.change("north", "c", bandwidth=1e6, latency=0.2, loss=0.5, cut=True)
    after = links.table()["routes"]
    for pair in ("0 2", "2 0"):
        assert 1e6 in after[pair]["resources"].values()
        assert (after[pair]["latency"], after[pair]["loss"], after[pair]["cut"]) == (0.2, 0.5, True)
    assert after["0 1"]["latency"] == after["1 0"]["latency"] == 0.01
    links.mend("north", "south")
    assert links.table() == before


def test_a_resource_that_can_bind_after_a_change_is_there() -> None:
    links = Links(cluster(TWO, BOTH, {"b": "90 Mbit/s"}), "abc")
    assert len(links.table()["routes"]["0 1"]["resources"]) == 2  # the pair, and the trunk that c shares
    links.change("a", "b", bandwidth=2e7)
    assert set(links.table()["routes"]["0 1"]["resources"].values()) == {15e6, 90e6 / 8}


def test_buffers_hold_three_round_trips_and_grow_with_the_link() -> None:
    links = Links(cluster(TWO, ["north south, bandwidth: 1 Gbit/s, latency: 200 ms"]), "abc")
    assert links.buffers()["a"] >= 3 * 0.4 * 125e6
    links.change("a", "b", latency=0.4)
    assert links.buffers()["a"] >= 3 * 0.8 * 125e6 and links.buffers()["c"] < 3 * 0.8 * 125e6


@pytest.mark.parametrize(
    ("words", "values", "said"),
    [
        (("a", "d"), {}, "no host or region 'd' in this world"),
        (("b", "c"), {}, "no link between b and c"),
        (("a", "b"), {"bandwidth": 0.0}, "the bandwidth must be above 0"),
        (("a", "b"), {"bandwidth": float("nan")}, "the bandwidth must be above 0"),
        (("a", "b"), {"latency": -1.0}, "the latency must be 0 or more"),
        (("a", "b"), {"loss": 1.5}, "Expected 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused(words: tuple[str, str], values: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Links(cluster(TWO, BOTH), "abc").change(*words, **values)  # type: ignore[arg-type]
