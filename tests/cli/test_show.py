"""`doctor`, `cluster show`, `model show`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from isthmus.cli.doctor import Check, verdict
from isthmus.cluster.load import load_cluster
from isthmus.model.saved import read_graph
from tests.cli.conftest import Isthmus
from tests.plan.small_models import chain


def test_doctor(isthmus: Isthmus) -> None:
    done = isthmus("doctor", "--json")
    checks = {check["name"]: check for check in done.values["checks"]}
    assert done.code == 0 and done.values["ok"] is True
    assert set(checks) == {"python", "cores", "memory", "torch", "simulator", "cache", "transformers", "emulation"}
    assert all(set(check) == {"name", "ok", "found", "next", "required"} for check in checks.values())
    assert "works" in checks["simulator"]["found"]


def test_doctor_names_the_remedy() -> None:
    absent = Check(name="transformers", ok=False, found="not installed", next="pip install it", required=False)
    broken = Check(name="torch", ok=False, found="ImportError", next="pip install torch")
    assert verdict([absent]).failure is None and verdict([absent]).values["ok"]
    answer = verdict([absent, broken])
    assert answer.failure == "not ready: torch" and not answer.values["ok"]
    assert "torch: pip install torch" in answer.text and "transformers: pip install it" in answer.text


def test_an_unwritable_cache_is_found(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch, box: Path) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(box))  # a file is no folder
    done = isthmus("doctor", "--json")
    cache = next(check for check in done.values["checks"] if check["name"] == "cache")
    assert done.code == 0 and not cache["ok"] and "ISTHMUS_CACHE" in cache["next"]


@pytest.mark.parametrize("name", ["atlantic", "many-regions", "demo", "one-host"])
def test_cluster_show(isthmus: Isthmus, root: Path, name: str) -> None:
    file = root / "examples" / "clusters" / f"{name}.yaml"
    cluster, plain, machine = (
        load_cluster(file),
        isthmus("cluster", "show", file),
        isthmus("cluster", "show", file, "--json"),
    )
    assert plain.code == machine.code == 0
    assert [device["name"] for device in machine.values["devices"]] == list(cluster.devices)
    assert [host["name"] for host in machine.values["hosts"]] == list(cluster.hosts)
    assert machine.values["regions"] == list(cluster.regions)
    assert sum(group["devices"] for group in machine.values["classes"]) == len(cluster.devices)
    for group in machine.values["classes"]:
        assert group["name"] in plain.out
    for link in cluster.links:
        assert all(end in plain.out for end in link.between)


def test_every_imputed_value_is_marked(isthmus: Isthmus, root: Path) -> None:
    file = root / "examples" / "clusters" / "atlantic.yaml"
    plain, values = isthmus("cluster", "show", file).out, isthmus("cluster", "show", file, "--json").values
    table, _, legend = plain.partition("\nmap")
    assert table.count("~") == sum(len(fields) for fields in values["imputed"].values()) == 3 + 3 + 6
    assert "~ marks values that are not in the file" in legend


def test_a_column_has_one_unit(isthmus: Isthmus, tmp_path: Path) -> None:
    """Inside a host bytes, between hosts bits, however much or little it is."""
    file = tmp_path / "odd.yaml"
    file.write_text(
        "{kind: cluster, version: 1, name: odd, hosts: {"
        "a: {region: r, devices: {T4: 1}, nic: 400 Gbit/s, bus: 1 GB/s}, "
        "b: {region: s, devices: {H200: 1}, nic: 20 Mbit/s, bandwidth: 5 GB/s}}, "
        "links: [{between: [r, s], bandwidth: 240 Gbit/s, latency: 1 ms}]}"
    )
    table, _, _ = isthmus("cluster", "show", file).out.partition("\nmap")
    rows = [re.split(r"  +", line) for line in table.splitlines()]
    column = {row[0]: dict(zip(head, row, strict=True)) for head in rows for row in rows if head[0] == "hosts"
              if row[0] in ("a", "b") and len(row) == len(head)}  # fmt: skip
    assert [column[host]["nic"] for host in "ab"] == ["400 Gbit/s", "20 Mbit/s"]
    assert [column[host]["bus"] for host in "ab"] == ["1 GB/s", "~50 GB/s"]
    assert [column[host]["between devices"] for host in "ab"] == ["~12 GB/s, ~5 us", "5 GB/s, ~5 us"]
    assert "240 Gbit/s" in table and "30 GB/s" not in table


def test_hosts_without_links_are_told(isthmus: Isthmus, tmp_path: Path) -> None:
    file = tmp_path / "apart.yaml"
    file.write_text("{kind: cluster, version: 1, name: apart, hosts: {'h[1-2]': {region: r, devices: {T4: 1}}}}")
    assert "note: no link joins h1 | h2" in isthmus("cluster", "show", file).out
    (note,) = isthmus("cluster", "show", file, "--json").values["notes"]
    assert note.startswith("no link joins h1 | h2")


def test_model_show(isthmus: Isthmus) -> None:
    done = isthmus("model", "show", "zoo:mlp-tiny", "--json")
    values = done.values
    assert done.code == 0
    assert values["parameters"] == sum(block["parameters"] for block in values["blocks"])
    halves = sum(block["forward_flops"] + block["backward_flops"] for block in values["blocks"])
    assert values["flops_per_sample"] == pytest.approx(halves)
    assert values["bytes"]["weights_fp32"] == 4 * values["parameters"]
    assert isthmus("model", "show", "zoo:mlp-tiny", "--json").values["origin"] == "cache"


def test_blocks_are_shown_once_with_their_number(isthmus: Isthmus, saved_model: Path) -> None:
    out = isthmus("model", "show", saved_model).out
    counts = [
        int(number or 1) for number in re.findall(r"^ *(?:(\d+) x)?  +(?:embed|h\.1 \.\.|head)", out, re.MULTILINE)
    ]
    assert counts == [1, 6, 1] and sum(counts) == len(chain().blocks)
    assert "read from its file" in out and "8, cut from" in out


def test_model_save(isthmus: Isthmus, saved_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    assert isthmus("model", "show", saved_model, "--save", copy, "--json").values["file"] == str(copy)
    assert read_graph(copy) == read_graph(saved_model)


def test_a_captured_model_is_captured_once(isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path))
    first, second = (isthmus("model", "show", "zoo:mlp-tiny", "--json").values for _ in range(2))
    assert (first.pop("origin"), second.pop("origin")) == ("captured", "cache")
    assert first == second
