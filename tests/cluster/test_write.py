"""Clusters as text: what is written loads back equal, whatever its names and figures."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import build_cluster, cluster_digest, load_cluster, parse_cluster
from isthmus.cluster.write import cluster_yaml

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples" / "clusters").glob("*.yaml"))
ODD_NAMES = ["yes", "No", "n", "null", "True", "1", "010", "0x1f", "1e3", "1_000", "_", "1.5", "on", "A-1", "x.y-z_0"]
KINDS = ["A100-40GB", "T4", "mine", "yes", "P100"]


def amounts(least: float, most: float, unit: str) -> st.SearchStrategy[str]:
    """Any float of the range, and round ones as people write them."""
    return st.floats(least, most).map(lambda value: f"{value!r} {unit}")


RATES = amounts(125.0, 1e15, "B/s") | st.integers(1, 999).map(lambda n: f"{n} Mbit/s")
BYTES = amounts(1e6, 1e15, "B") | st.integers(1, 999).map(lambda n: f"{n} GiB")
TIMES = amounts(1e-9, 60.0, "s") | st.integers(1, 999).map(lambda n: f"{n} us")
FLOPS = amounts(1e6, 1e18, "FLOP/s") | st.integers(1, 999).map(lambda n: f"{n} TFLOP/s")
COMPUTE = FLOPS | st.fixed_dictionaries({"fp32": FLOPS}, optional={"fp16": FLOPS, "bf16": FLOPS})
KIND = st.fixed_dictionaries(
    {"compute": COMPUTE, "memory": BYTES, "memory_bandwidth": RATES}, optional={"bus": RATES, "peer": RATES}
)
ADDRESSES = st.sampled_from(["10.0.0.2", "::1", "[fe80::1%eth0]", "node.example.org", "no", "007"])


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """The values of a cluster file, most of them left out at times."""
    regions = draw(st.lists(st.sampled_from(["tokyo", "paris", "off", "2"]), min_size=1, max_size=3, unique=True))
    host = st.fixed_dictionaries(
        {
            "region": st.sampled_from(regions),
            "devices": st.dictionaries(st.sampled_from(KINDS), st.integers(1, 9), min_size=1, max_size=2),
        },
        optional={
            **dict.fromkeys(("bandwidth", "nic", "bus"), RATES),
            "latency": TIMES,
            "memory": BYTES,
            "cores": st.integers(1, 999),
        },
    )
    rows = st.sampled_from(["h[1-3]", "h[4-5]", "0[18-21]", "n[1-2]x", "h7", "h8", "a0", "a1"])
    hosts = draw(st.dictionaries(st.sampled_from(ODD_NAMES) | rows, host, min_size=1, max_size=5))
    named = next(iter(hosts))
    if "[" not in named and draw(st.booleans()):
        hosts[named]["address"] = draw(ADDRESSES)
    pairs = [(a, b) for i, a in enumerate(regions) for b in regions[i:]]
    used = {host["region"] for host in hosts.values()}
    links = [
        {"between": list(pair), "bandwidth": draw(RATES), **draw(_link(pair))}
        for pair in draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True))
        if set(pair) <= used
    ]
    kinds = draw(st.dictionaries(st.sampled_from(["T4", "A100-40GB"]), KIND, max_size=1))
    return {
        "name": draw(st.sampled_from(ODD_NAMES)),
        "devices": {**kinds, "mine": draw(KIND), "yes": draw(KIND)},
        "hosts": hosts,
        "links": links,
    }


def _link(pair: tuple[str, str]) -> st.SearchStrategy[dict[str, str]]:
    known = set(pair) <= {"tokyo", "paris"}
    latency = {"latency": TIMES}
    return st.fixed_dictionaries({} if known else latency, optional={"trunk": RATES, **(latency if known else {})})


@given(clusters(), st.lists(st.text(max_size=30), max_size=2))
@settings(max_examples=80)
def test_what_is_written_loads_back(values: dict[str, Any], comments: list[str]) -> None:
    cluster = build_cluster(values, "drawn")
    again = parse_cluster(cluster_yaml(cluster, comments))
    assert again == cluster and cluster_digest(again) == cluster_digest(cluster)
    assert list(again.devices) == list(cluster.devices)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_written_as_people_wrote_them(path: Path) -> None:
    cluster = load_cluster(path)
    text = cluster_yaml(cluster, ["made by hand"])
    assert parse_cluster(text) == cluster and text.startswith("# made by hand\nkind: cluster\n")
    ours = [line for line in text.splitlines() if line.startswith("  ")]
    theirs = [line for line in path.read_text("utf-8").splitlines() if line.startswith("  ")]
    assert [line.split("{")[0] for line in ours] == [line.split("{")[0] for line in theirs], "the same keys in a row"


def test_only_what_is_known_is_written() -> None:
    hosts = {"h[01-64]": {"region": "tokyo", "devices": {"V100-16GB": 8}, "nic": "25 Gbit/s"}}
    cluster = build_cluster(
        {"name": "x", "hosts": hosts, "links": [{"between": ["tokyo"] * 2, "bandwidth": "1 MB/s"}]}, ""
    )
    assert cluster_yaml(cluster, ["one " * 40]).splitlines()[2:] == [
        "kind: cluster",
        "version: 1",
        "name: x",
        "hosts:",
        "  h[01-64]: {region: tokyo, devices: {V100-16GB: 8}, nic: 25 Gbit/s}",
        "links:",
        "  - {between: [tokyo, tokyo], bandwidth: 8 Mbit/s}",
    ]


def test_hosts_that_only_look_equal_are_written_apart() -> None:
    hosts = {
        "a1": {"region": "here", "devices": {"T4": 1, "P100": 1}},
        "a2": {"region": "here", "devices": {"P100": 1, "T4": 1}},  # the order of its devices is another
        "b1": {"region": "here", "devices": {"T4": 1}, "address": "10.0.0.1"},
        "b2": {"region": "here", "devices": {"T4": 1}, "address": "10.0.0.1"},
        "c09": {"region": "here", "devices": {"T4": 1}},
        "c10": {"region": "here", "devices": {"T4": 1}},
        "c011": {"region": "here", "devices": {"T4": 1}},
    }
    cluster = build_cluster({"name": "x", "hosts": hosts}, "")
    text = cluster_yaml(cluster)
    keys = [line.split(":")[0].strip() for line in text.splitlines() if line.startswith("  ")]
    assert keys == ["a1", "a2", "b1", "b2", "c[09-10]", "c011"]
    again = parse_cluster(text)
    assert again == cluster and list(again.devices) == list(cluster.devices)
