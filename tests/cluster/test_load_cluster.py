"""Cluster files: the published example read by hand, every refusal with its line, and mutated files."""

import copy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.load import cluster_digest, load_cluster, parse_cluster
from isthmus.cluster.spec import Cluster, DeviceKind, Host, Link
from isthmus.errors import ClusterError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "clusters"
ATLANTIC = (EXAMPLES / "atlantic.yaml").read_text("utf-8")

SMALL = """kind: cluster
version: 1
name: small
devices:
  card: {compute: 10 TFLOP/s, memory: 8 GB, memory_bandwidth: 400 GB/s}
hosts:
  a: {region: here, devices: {card: 2}, nic: 1 Gbit/s}
  b: {region: there, devices: {T4: 1}, cores: 4}
links:
  - {between: [here, there], bandwidth: 1 Gbit/s, latency: 10 ms}
"""


def changed(old: str, new: str) -> Cluster:
    assert old in SMALL
    return parse_cluster(SMALL.replace(old, new, 1), where="c.yaml")


def test_the_example_read_by_hand() -> None:
    cluster = parse_cluster(ATLANTIC)
    everything = {"bandwidth", "latency", "nic", "bus", "memory", "cores"}
    assert cluster.name == "atlantic" and cluster.regions == ("virginia", "frankfurt")
    assert cluster.hosts["va1"] == Host(
        name="va1",
        region="virginia",
        devices={"A100-40GB": 8},
        bandwidth=3e11,
        latency=5e-6,
        nic=12.5e9,
        bus=24e9,
        memory=16e9 + 2 * 8 * 40e9,
        cores=64,
        imputed=frozenset({"bus", "memory", "cores"}),
    )
    va2 = cluster.hosts["va2"]
    assert (va2.address, va2.memory, va2.cores, va2.bus, va2.bandwidth) == ("10.0.0.2", 256e9, 32, 12e9, 12e9)
    assert va2.imputed == {"bandwidth", "latency", "nic"}
    assert va2.nic == 3.125e9, "what the link of its region can reach"
    assert cluster.hosts["fra"].imputed == everything and cluster.hosts["fra"].nic == 1.25e9
    assert cluster.kinds["lab-card"] == DeviceKind(
        name="lab-card",
        compute={"fp32": 35e12, "bf16": 35e12, "fp16": 35e12},
        memory=24e9,
        memory_bandwidth=9e11,
        bus=12e9,
        peer=12e9,
    )
    assert list(cluster.devices)[7:13] == [
        "va1/A100-40GB/7",
        *(f"va2/V100-16GB/{i}" for i in range(4)),
        "va2/lab-card/0",
    ]
    assert cluster.links[1] == Link(between=("virginia", "frankfurt"), bandwidth=2.5e8, latency=0.044, trunk=6.25e8)
    own, regional = cluster.link("fra", "va1"), cluster.link("va2", "fra")
    assert own is not None and own.bandwidth == 1.25e8 and regional is not None and regional.bandwidth == 2.5e8


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads_and_survives_json(path: Path) -> None:
    cluster = load_cluster(path)
    assert msgspec.json.decode(msgspec.json.encode(cluster), type=Cluster) == cluster
    assert cluster.name == path.stem


def test_patterns_stand_for_equal_hosts() -> None:
    cluster = changed("  a: ", "  node[08-11]x: ")
    assert list(cluster.hosts)[:4] == ["node08x", "node09x", "node10x", "node11x"]
    assert list(changed("  a: ", "  a[9-11]: ").hosts)[:3] == ["a9", "a10", "a11"]
    first, second = cluster.hosts["node08x"], cluster.hosts["node11x"]
    assert first == msgspec.structs.replace(second, name="node08x") and len(cluster.devices) == 9


def test_kinds_may_change_figures_of_the_catalog() -> None:
    cluster = changed("  card:", "  T4: {compute: {fp32: 6 TFLOP/s}, bus: 6 GB/s}\n  card:")
    t4 = cluster.kinds["T4"]
    assert (t4.compute, t4.bus, t4.peer, t4.memory) == ({"fp32": 6e12}, 6e9, CATALOG["T4"].peer, 16e9)
    assert list(cluster.kinds) == ["card", "T4"]


def test_a_host_without_devices_may_relay() -> None:
    assert changed("devices: {card: 2}", "devices: {}").hosts["a"].cores == 8


REFUSED = [
    ("{card: 2}", "{cards: 2}", 7, "unknown device kind 'cards'", "Did you mean 'card'?"),
    ("{T4: 1}", "{V100-16Gb: 1}", 8, "unknown device kind 'V100-16Gb'", "Did you mean 'V100-16GB'?"),
    ("{T4: 1}", "{A100: 1}", 8, "'A100'", "Did you mean 'A100-40GB' or 'A100-80GB' or 'A100-80GB-PCIe'?"),
    ("{T4: 1}", "{rtx: 1}", 8, "'rtx'", "Did you mean 'RTX-8000' or 'RTX-A4000' or"),
    ("{card: 2}", "{card: 0}", 7, "has 0 devices of kind card", "at least 1"),
    ("{card: 2}", "{card: -3}", 7, "has -3 devices", "at least 1"),
    ("{card: 2}", "{card: 200001}", 7, "too large", "at most 200000"),
    ("  a: ", "  a[1-999999]: ", 7, "too large", "at most 200000"),
    ("  a: ", "  a[3-1]: ", 7, "pattern", "like tokyo[1-64]"),
    ("  a: ", "  a[1-2][1-2]: ", 7, "pattern", "like tokyo[1-64]"),
    ("  b: ", "  a[1-2]: {region: here, devices: {T4: 1}}\n  a2: ", 9, "host 'a2' is given twice", "'a[1-2]'"),
    ("  b: ", "  a: ", 8, "key 'a' is given twice", "line 7"),
    ("  a: ", '  "-a": ', 7, "this is not a valid name", "not beginning with"),
    ("  a: ", "  a b: ", 7, "this is not a valid name", "letters, digits"),
    ("  a: ", f"  {'a' * 65}: ", 7, "this is not a valid name", "at most 64"),
    ("region: here", "region: a/b", 7, "hosts.a.region: this is not a valid name", "letters"),
    ("name: small", "name: sm all", 3, "name: this is not a valid name", "letters"),
    ("  card:", "  ca/rd:", 5, "devices.ca/rd: this is not a valid name", "letters"),
    ("region: here", "region: b", 8, "'b' names both a host and a region", "Rename"),
    ("compute: 10 TFLOP/s, ", "", 5, "not in the catalog and lacks compute", "compute, memory and"),
    ("10 TFLOP/s", "{bf16: 10 TFLOP/s}", 5, "lacks fp32", "fp32"),
    ("10 TFLOP/s", "{fp32: 10 TFLOP/s, fp64: 1 TFLOP/s}", 5, "unknown key 'fp64'", "fp32"),
    ("10 TFLOP/s", "10", 5, "devices.card.compute lacks its unit", "like 35 TFLOP/s"),
    ("10 TFLOP/s", "10 TFLOPS", 5, "not a quantity", "35 TFLOP/s"),
    ("8 GB", "8", 5, "lacks its unit", "40 GB"),
    ("8 GB", "8 EB", 5, "is out of range", "1 MB to 1 PB"),
    ("nic: 1 Gbit/s", "nic: 0 Gbit/s", 7, "hosts.a.nic is 0", "more than 0"),
    ("nic: 1 Gbit/s", "nic: -1 Gbit/s", 7, "hosts.a.nic is negative", " to "),
    ("nic: 1 Gbit/s", "nic: 1e3", 7, "hosts.a.nic lacks its unit", "25 Gbit/s"),
    ("nic: 1 Gbit/s", "nick: 1 Gbit/s", 7, "unknown field 'nick'", "Did you mean 'nic'?"),
    ("cores: 4", "cores: 0", 8, "0 cores", "1 to 100000"),
    ("cores: 4", "cores: 4.5", 8, "hosts.b.cores has a wrong value", "whole number"),
    ("cores: 4", 'address: "-oProxy=x"', 8, "address", "host name or IP"),
    ("  b: {", "  b[1-2]: {address: 10.0.0.1, ", 8, "several hosts", "one by one"),
    ("region: there, ", "", 8, "lacks the field 'region'", "text"),
    ("[here, there]", "[here, their]", 10, "no host or region is named 'their'", "Did you mean 'there'?"),
    ("[here, there]", "[a, there]", 10, "joins a host and a region", "two hosts or two regions"),
    ("[here, there]", "[a, a]", 10, "joins a host to itself", "bandwidth and latency"),
    ("[here, there]", "[a]", 10, "links[0].between", "a list of 2"),
    ("latency: 10 ms", "trunk: 1 Gbit/s", 10, "lacks latency", "half of what ping shows"),
    ("bandwidth: 1 Gbit/s, ", "", 10, "lacks bandwidth", "like 1 Gbit/s"),
    ("latency: 10 ms", "latency: 10 min", 10, "is out of range", "60 s"),
    ("latency: 10 ms", "latency: 0 ms", 10, "links[0].latency is 0", "more than 0"),
    ("here, there], ", "a, b], trunk: 1 Gbit/s, ", 10, "joins hosts and has a trunk", "only between regions"),
    ("kind: cluster", "kind: plan", 1, "Expected a cluster file", "isthmus simulate"),
]


@pytest.mark.parametrize(("old", "new", "line", "what", "remedy"), REFUSED, ids=[case[1][:24] for case in REFUSED])
def test_refusals(old: str, new: str, line: int, what: str, remedy: str) -> None:
    with pytest.raises(ClusterError) as caught:
        changed(old, new)
    assert caught.value.where == f"c.yaml line {line}"
    assert what in str(caught.value) and remedy in str(caught.value)


@pytest.mark.parametrize("pair", ["[here, there]", "[there, here]"])
def test_a_pair_is_linked_once(pair: str) -> None:
    with pytest.raises(ClusterError, match=r"line 11: link .* is given twice. Found it at cluster.yaml line 10"):
        parse_cluster(SMALL + f"  - {{between: {pair}, bandwidth: 1 Gbit/s, latency: 1 ms}}\n")


def test_nothing_to_plan_on() -> None:
    head = "kind: cluster\nversion: 1\nname: x\n"
    with pytest.raises(ClusterError, match="line 4: the cluster has no hosts"):
        parse_cluster(head + "hosts: {}")
    with pytest.raises(ClusterError, match="line 4: the cluster has no devices"):
        parse_cluster(head + "hosts: {a: {region: r, devices: {}}}")


def test_a_large_cluster_loads_fast() -> None:
    text = SMALL.replace("  a: ", "  a[1-10000]: ").replace("card: 2", "card: 8")
    began = time.process_time()
    cluster = parse_cluster(text)
    assert len(cluster.devices) == 80_001 and time.process_time() - began < 3


def test_the_digest_is_that_of_the_content() -> None:
    one = cluster_digest(parse_cluster(SMALL))
    assert one == cluster_digest(changed("{region: here, devices: {card: 2}", "{devices: {card: 2}, region: here"))
    assert one == cluster_digest(changed("1 Gbit/s, latency", "125 MB/s, latency"))
    assert one != cluster_digest(changed("10 ms", "11 ms"))
    assert one != cluster_digest(changed("cores: 4", "cores: 8"))
    code = f"from isthmus.cluster.load import *; print(cluster_digest(parse_cluster({SMALL!r})))"
    seen = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert seen.stdout.strip() == one


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


WRONG = [None, True, 0, -1, 2.5, 10**30, "", "x", "va1", "virginia", "1 GB", "0 s", [], {}, [1, 2], {"a": 1}, "\u2028"]


@given(st.data())
@settings(max_examples=150)
def test_mutated_trees_give_a_cluster_or_our_error(data: st.DataObject) -> None:
    tree = copy.deepcopy(yaml.safe_load(ATLANTIC))
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(tree)))
        change = data.draw(st.sampled_from(["delete", "replace", "rename", "swap"]))
        if change == "delete":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[data.draw(st.sampled_from([*"ab", "name", "nic", "[", "a[1-3]", " "]))] = container.pop(key)
        elif change == "swap":
            other, place = data.draw(st.sampled_from(places(tree)))
            container[key] = copy.deepcopy(other[place])
        else:
            container[key] = data.draw(st.sampled_from(WRONG))
        if not places(tree):
            break
    is_cluster_or_our_error(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


@given(st.data())
@settings(max_examples=150)
def test_mutated_text_gives_a_cluster_or_our_error(data: st.DataObject) -> None:
    lines = SMALL.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["delete", "double", "cut", "insert"]))
        line = lines[index]
        column = data.draw(st.integers(0, len(line)))
        if change == "delete" and len(lines) > 1:
            del lines[index]
        elif change == "double":
            lines.insert(index, line)
        elif change == "cut":
            lines[index] = line[:column]
        else:
            lines[index] = (
                line[:column]
                + data.draw(st.text(max_size=3) | st.sampled_from(list("{}[]:,&*!#|>'\"%@`")))
                + line[column:]
            )
    is_cluster_or_our_error("\n".join(lines))


def is_cluster_or_our_error(text: str) -> None:
    try:
        cluster = parse_cluster(text, where="c.yaml")
    except ClusterError as problem:
        assert problem.where is not None and problem.where.startswith("c.yaml")
        assert problem.expected or problem.next or problem.found
    else:
        assert cluster.devices and all(host.nic > 0 for host in cluster.hosts.values())


def test_a_link_that_a_nic_holds_back_is_noted() -> None:
    from isthmus.report.cluster_text import cluster_notes

    note = "link here - there (8 Gbit/s) is faster than a's nic (1 Gbit/s), which limits it"
    assert cluster_notes(changed("bandwidth: 1 Gbit/s", "bandwidth: 1 GB/s")) == [note]
    assert cluster_notes(changed("1 Gbit/s, latency", "1 Gbps, latency")) == []
    several = SMALL.replace("  a:", "  a[1-2]:").replace("bandwidth: 1 Gbit/s", "bandwidth: 1 GB/s")
    (note,) = cluster_notes(parse_cluster(several))
    assert "faster than every nic of here (at most 1 Gbit/s), which limit it" in note
    one = several.replace("hosts:\n", "hosts:\n  quick: {region: here, devices: {T4: 1}}\n")
    assert cluster_notes(parse_cluster(one)) == [], "its nic fills the link"


def test_a_nic_may_be_faster_down_than_up() -> None:
    from isthmus.cluster.write import cluster_yaml
    from isthmus.report.cluster_text import cluster_text

    text = """kind: cluster
version: 1
name: home
hosts:
  desk: {region: home, devices: {RTX-3090: 1}, nic: {up: 20 Mbit/s, down: 100 Mbit/s}}
  lab: {region: uni, devices: {RTX-3090: 1}, nic: {up: 1 Gbps, down: 1 Gbps}}
links:
  - {between: [home, uni], bandwidth: 1 Gbit/s, latency: 10 ms}
"""
    home = parse_cluster(text)
    desk, lab = home.hosts.values()
    assert (desk.nic, desk.nic_in) == (20e6 / 8, 100e6 / 8) and (lab.nic, lab.nic_in) == (125e6, 125e6)
    assert lab == parse_cluster(text.replace("{up: 1 Gbps, down: 1 Gbps}", "1 Gbit/s")).hosts["lab"]
    assert parse_cluster(cluster_yaml(home)) == home and "nic: {up: 20 Mbit/s, down: 100 Mbit/s}" in cluster_yaml(home)
    assert "20 Mbit/s up, 100 Mbit/s down" in cluster_text(home)
    with pytest.raises(ClusterError, match=r"line 5.*hosts\.desk\.nic lacks the field 'down'"):
        parse_cluster(text.replace(", down: 100 Mbit/s", ""))
    with pytest.raises(ClusterError, match=r"hosts\.desk\.nic\.up is 0"):
        parse_cluster(text.replace("up: 20 Mbit/s", "up: 0 Mbit/s"))
