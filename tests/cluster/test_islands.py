"""Groups of hosts that no link joins, against a search over all pairs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.islands import islands, islands_note
from isthmus.cluster.load import build_cluster
from isthmus.cluster.spec import Cluster

_NAMES = ["a", "b", "c", "d", "e"]
_REGIONS = ["r", "s", "t"]


def reached(cluster: Cluster, start: str) -> frozenset[str]:
    """Every host that a message from one can reach, by asking for the link of each pair."""
    found, new = {start}, [start]
    while new:
        here = new.pop()
        more = [host for host in cluster.hosts if host not in found and cluster.link(here, host) is not None]
        found.update(more)
        new.extend(more)
    return frozenset(found)


@given(
    st.lists(st.tuples(st.sampled_from(_REGIONS), st.booleans()), min_size=1, max_size=5),
    st.lists(st.frozensets(st.sampled_from(_NAMES), min_size=2, max_size=2), max_size=3, unique=True),
    st.lists(st.frozensets(st.sampled_from(_REGIONS), min_size=1, max_size=2), max_size=3, unique=True),
)
def test_islands_are_what_pairs_reach(
    places: list[tuple[str, bool]], pairs: list[frozenset[str]], regions: list[frozenset[str]]
) -> None:
    hosts = {
        name: {"region": region, "devices": {"T4": 1} if used or name == "a" else {}}
        for name, (region, used) in zip(_NAMES, places, strict=False)
    }
    known = {host["region"] for host in hosts.values()}
    ends = [sorted(pair) for pair in pairs if pair <= hosts.keys()]
    ends += [[min(pair), max(pair)] for pair in regions if pair <= known]
    links = [{"between": end, "bandwidth": "1 Gbit/s", "latency": "1 ms"} for end in ends]
    cluster = build_cluster({"name": "drawn", "hosts": hosts, "links": links}, "drawn")
    wanted = {group & {n for n in hosts if hosts[n]["devices"]} for group in (reached(cluster, n) for n in hosts)}
    assert {frozenset(group) for group in islands(cluster)} == wanted - {frozenset()}
    assert (islands_note(cluster) is None) == (len(islands(cluster)) == 1)
