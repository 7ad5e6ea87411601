"""The Hulk data: invented tables with one defect each, then the published files with all that is known of them."""

from pathlib import Path

import msgspec
import pytest

from isthmus.cluster.importers.hulk import KINDS, import_hulk
from isthmus.cluster.importers.result import Finding, Imported
from isthmus.cluster.load import parse_cluster
from isthmus.cluster.write import cluster_yaml
from isthmus.errors import ClusterError

CITIES = ["Tokyo"] * 3 + ["Berlin"] * 3 + ["New Delhi"] * 3
BETWEEN = {
    frozenset({"Tokyo"}): 4.0,
    frozenset({"Berlin"}): 15.0,
    frozenset({"New Delhi"}): 6.0,
    frozenset({"Tokyo", "Berlin"}): 260.0,
    frozenset({"Tokyo", "New Delhi"}): 130.0,
    frozenset({"Berlin", "New Delhi"}): 180.0,
}
ASSUMED = {"round-trip", "assumed-bandwidth", "kind-for-capability", "devices-from-memory"}
ALWAYS = ASSUMED | {"cities-without-row", "machines-without-row"}
ROWS = [
    f"{a} {b} {BETWEEN[frozenset({CITIES[a], CITIES[b]})]:g}"
    for a in range(9)
    for b in range(a + 1, 9)
    if (a, b) != (1, 7)
]


def write(folder: Path, rows: list[str], cities: list[str] = CITIES) -> tuple[Path, Path]:
    nodes, edges = folder / "nodes.csv", folder / "edges.txt"
    machines = "".join(f"{index},{city},8.6,96\r\n" for index, city in enumerate(cities))
    nodes.write_text(f"node,City,Capability,Memory\r\n{machines}", newline="")
    edges.write_text("\r\n".join(rows), newline="")
    return nodes, edges


def changed(**rows: str) -> list[str]:
    """The clean table with rows replaced: `at_0_5="0 5 4"`; an empty text removes one."""
    new = {key.removeprefix("at_").replace("_", " ") + " ": row for key, row in rows.items()}
    table = [next((row for key, row in new.items() if old.startswith(key)), old) for old in ROWS]
    return [row for row in table if row]


def found(imported: Imported) -> dict[str, Finding]:
    return {finding.kind: finding for finding in imported.findings if finding.kind not in ASSUMED}


def latency(imported: Imported, a: str, b: str) -> float | None:
    link = imported.cluster.link(a, b)
    return None if link is None else link.latency


def test_a_clean_table_is_taken_as_it_is(tmp_path: Path) -> None:
    imported = import_hulk(*write(tmp_path, ROWS), bandwidth="2 Gbit/s")
    assert {finding.kind for finding in imported.findings} == ALWAYS - {"assumed-bandwidth"}
    assert found(imported)["cities-without-row"].rows == ()
    assert len(imported.cluster.links) == len(ROWS) == 35
    assert {link.bandwidth for link in imported.cluster.links} == {2.5e8}
    for row in ROWS:
        a, b, ms = row.split()
        names = [f"{CITIES[int(node)].lower().replace(' ', '-')}-{node}" for node in (a, b)]
        assert latency(imported, *names) == pytest.approx(float(ms) / 2e3, rel=1e-15)
    assert latency(imported, "tokyo-1", "new-delhi-7") is None
    assert imported.cluster.hosts["new-delhi-8"].region == "new-delhi"
    assert dict(imported.cluster.hosts["berlin-3"].devices) == {"RTX-3090": 4}


DEFECTS = [
    # rows changed, kind, rows quoted, then ms there and back of 0-5 (tokyo-berlin), 1-7 (tokyo-new-delhi) and 0-1
    ({"at_0_1": "0 1 4\n1 1 9"}, "self-loop", 1, (260, None, 4)),
    ({"at_0_1": "0 1 4\n1 0 8"}, "given-twice", 2, (260, None, 6)),
    ({"at_1_8": "1 3 130\n1 8 130"}, "typing-slip", 1, (260, 130, 4)),
    ({"at_0_5": "0 5 130"}, "repeats-another-city", 1, (None, None, 4)),
]


@pytest.mark.parametrize(("rows", "kind", "quoted", "times"), DEFECTS, ids=[case[1] for case in DEFECTS])
def test_one_defect(
    tmp_path: Path, rows: dict[str, str], kind: str, quoted: int, times: tuple[float | None, ...]
) -> None:
    imported = import_hulk(*write(tmp_path, "\n".join(changed(**rows)).split("\n")))
    assert kind in found(imported) and len(found(imported)[kind].rows) == quoted
    assert set(found(imported)) <= {kind, "given-twice", "cities-without-row", "machines-without-row"}
    pairs = [("tokyo-0", "berlin-5"), ("tokyo-1", "new-delhi-7"), ("tokyo-0", "tokyo-1")]
    for pair, ms in zip(pairs, times, strict=True):
        assert latency(imported, *pair) == (None if ms is None else pytest.approx(ms / 2e3))


def test_faster_than_light(tmp_path: Path) -> None:
    lone = [row for row in ROWS if not (int(row.split()[0]) < 3 <= int(row.split()[1]) < 6)]  # no tokyo-berlin at all
    lone.insert(next(i for i, row in enumerate(lone) if row.startswith("0 6")), "0 4 20")
    imported = import_hulk(*write(tmp_path, lone))
    assert found(imported)["outlier"].rows == ("line 3: 0 4 20",) and latency(imported, "tokyo-0", "berlin-4") is None
    assert "1 more (berlin - tokyo)" in found(imported)["cities-without-row"].what
    fast = [row.replace(" 260", " 20") for row in ROWS]
    imported = import_hulk(*write(tmp_path, fast))
    assert len(found(imported)["faster-than-light"].rows) == 9 and "outlier" not in found(imported)
    assert latency(imported, "tokyo-0", "berlin-4") == pytest.approx(0.01)


def test_blanks_and_filling(tmp_path: Path) -> None:
    cities = ["Tokyo ", *CITIES[1:]]
    rows = [row for row in ROWS if not (3 <= int(row.split()[0]) < 6 <= int(row.split()[1]))]  # no berlin-new-delhi
    imported = import_hulk(*write(tmp_path, rows, cities), fill=True)
    assert found(imported)["blank-in-name"].rows == ("'0,Tokyo ,8.6,96'",)
    assert found(imported)["cities-without-row"].rows == ("berlin - new-delhi",)
    assert imported.cluster.regions == ("tokyo", "berlin", "new-delhi")
    assert latency(imported, "tokyo-1", "new-delhi-7") == pytest.approx(0.065), "its cities' median, halved"
    far = imported.cluster.link("berlin-3", "new-delhi-8")
    assert far is not None and far.imputed == {"latency"} and 0.03 < far.latency < 0.06
    assert parse_cluster(cluster_yaml(imported.cluster, list(imported.comments()))) == imported.cluster


@pytest.mark.parametrize(
    ("nodes", "edges", "where", "what"),
    [
        ("a,b\n", "", "nodes.csv", "not a file of machines"),
        ("", "", "nodes.csv", "Found an empty file"),
        ("node,City,Capability,Memory\n", "", "nodes.csv", "no machines"),
        ("node,City,Capability,Memory\n0,Rome,x,96\n", "", "nodes.csv line 2", "cannot be read"),
        ("node,City,Capability,Memory\n0,Rome,8,nan\n", "", "nodes.csv line 2", "cannot be read"),
        ("node,City,Capability,Memory\n0,Rome,8\n", "", "nodes.csv line 2", "cannot be read"),
        ("node,City,Capability,Memory\n0,R/o,8,40\n", "", "nodes.csv line 2", "this is not a valid city name"),
        ("node,City,Capability,Memory\n0,Rome,8,40\n0,Rome,8,40\n", "", "nodes.csv line 3", "given twice"),
        ("node,City,Capability,Memory\n0,Rome,5.2,40\n", "", "nodes.csv", "no kind stands for. Found 5.2"),
        ("node,City,Capability,Memory\n0,Rome,8,40\n", "0 1 4", "edges.txt line 1", "machine 1 is not in the file"),
        ("node,City,Capability,Memory\n0,Rome,8,40\n", "\n0 0", "edges.txt line 2", "cannot be read"),
        ("node,City,Capability,Memory\n0,Rome,8,40\n", "0 0 -4", "edges.txt line 1", "cannot be read"),
        ("node,City,Capability,Memory\n0,Rome,8,40\n", "0 0 0", "edges.txt line 1", "cannot be read"),
    ],
)
def test_refusals(tmp_path: Path, nodes: str, edges: str, where: str, what: str) -> None:
    (tmp_path / "nodes.csv").write_text(nodes)
    (tmp_path / "edges.txt").write_text(edges)
    with pytest.raises(ClusterError) as caught:
        import_hulk(tmp_path / "nodes.csv", tmp_path / "edges.txt")
    assert caught.value.where == str(tmp_path / where) and what in str(caught.value)


@pytest.fixture(scope="module")
def published(shared: Path) -> Imported:
    return import_hulk(shared / "data" / "hulk_node_feature.csv", shared / "data" / "hulk_edge.txt")


def test_every_known_defect_of_the_published_files(published: Imported) -> None:
    seen = found(published)
    quoted = {kind: [row.split(": ")[-1] for row in finding.rows] for kind, finding in seen.items()}
    assert quoted["self-loop"] == ["4 4 10", "14 14 10"]
    assert quoted["given-twice"] == ["11 30 214", "11 30 265", "13 14 10", "14 13 4"]
    assert seen["given-twice"].done.endswith("11-30 214 ms, 13-14 7 ms")
    assert quoted["typing-slip"] == ["11 30 265", "12 30 265", "14 30 265"]
    assert seen["typing-slip"].done == "read as 11-39, 12-39, 14-39"
    assert quoted["outlier"] == ["25 30 4"] and "25-28 or 25-29 may be meant" in seen["outlier"].done
    assert quoted["repeats-another-city"] == [*(f"{node} 34 317" for node in range(5, 10)), "18 34 320"]
    assert seen["repeats-another-city"].what == "new-delhi has the times of london"
    assert len(seen["blank-in-name"].rows) == 4 and all("Neimeng " in row for row in seen["blank-in-name"].rows)
    assert seen["differs-from-paper"].what == "london - nanjing: the file says 317 ms, the paper's table 176.7 ms"
    none = set(seen["cities-without-row"].rows)
    assert len(none) == 24 and {"new-delhi - new-delhi", "paris - paris", "rome - rome", "beijing - paris"} <= none
    europe = ["berlin", "london", "paris", "rome"]
    assert all(f"{a} - {b}" in none for i, a in enumerate(europe) for b in europe[i + 1 :])
    assert quoted["faster-than-light"] and {row.split()[2] for row in quoted["faster-than-light"]} == {"42"}
    assert any(finding.kind == "round-trip" and "half" in finding.done for finding in published.findings)
    assert len(seen) == 10, "and nothing else"


def test_the_published_machines(published: Imported) -> None:
    cluster = published.cluster
    assert len(cluster.hosts) == 47 and len(cluster.regions) == 12 and len(cluster.links) == 613 + 1 - 6 - 1
    memory = sum(cluster.kinds[device.kind].memory for device in cluster.devices.values())
    assert memory == pytest.approx(10_124e9, rel=0.01)
    assert set(cluster.kinds) == set(KINDS.values())
    text = cluster_yaml(cluster, list(published.comments()))
    assert parse_cluster(text) == cluster and "round trips" in text.partition("kind: cluster")[0]
    link = cluster.link("nanjing-11", "paris-39")
    assert link is not None and link.latency == 0.1325 and cluster.link("tokyo-25", "berlin-30") is None
    assert msgspec.to_builtins(published.findings)[0].keys() == {"kind", "what", "done", "rows"}
