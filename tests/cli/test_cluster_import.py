"""`cluster import`, and what `cluster show` makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cluster.load import load_cluster
from tests.cli.conftest import Isthmus


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("w1 slots=4\nw2 slots=2\n")
    return path


def test_import_writes_a_file_that_loads(isthmus: Isthmus, hostfile: Path, tmp_path: Path) -> None:
    file = tmp_path / "lab.yaml"
    words = (
        "cluster",
        "import",
        hostfile,
        "--kind",
        "T4",
        "--region",
        "us-east-1",
        "--bandwidth",
        "10 Gbit/s",
        "-o",
        file,
    )
    plain, machine = isthmus(*words), isthmus(*words, "--json")
    cluster = load_cluster(file)
    assert plain.code == machine.code == 0 and cluster.name == "lab"
    assert machine.values["file"] == str(file) and machine.values["devices"] == list(cluster.devices)
    assert [finding["kind"] for finding in machine.values["report"]] == ["assumed-kind"]
    assert "6 devices, 2 hosts and 1 link" in plain.out and "assumed-kind" in plain.out and str(file) in plain.out
    shown = isthmus("cluster", "show", file)
    assert "10 Gbit/s, ~1 ms" in shown.out
    values = isthmus("cluster", "show", file, "--json").values
    assert values["imputed"]["us-east-1 - us-east-1"] == values["links"][0]["imputed"] == ["latency"]


def test_slurm_is_read_from_the_environment(isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("cluster", "import", "--slurm", "--kind", "H100-SXM", "-o", tmp_path / "a b.yaml", "--json")
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.delenv("SLURM_NODELIST", raising=False)
    assert isthmus(*words).code == 1
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[01-02]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    done = isthmus(*words)
    assert done.code == 0 and done.values["hosts"] == ["gpu01", "gpu02"] and len(done.values["devices"]) == 16
    assert load_cluster(tmp_path / "a b.yaml").name == "imported"


def test_hulk(isthmus: Isthmus, tmp_path: Path, shared: Path) -> None:
    files = [shared / "data" / name for name in ("hulk_node_feature.csv", "hulk_edge.txt")]
    file = tmp_path / "hulk.yaml"
    done = isthmus("cluster", "import", "--hulk", *files, "--fill", "-o", file, "--json")
    assert done.code == 0 and done.values["links"] == 607 + 76  # 78 pairs of cities less two with one machine
    assert sum(len(finding["rows"]) for finding in done.values["report"]) > 50
    shown = isthmus("cluster", "show", file).out
    assert "berlin - tokyo" in shown and len(shown.splitlines()) < 400, "hosts' links are summed up by their regions"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("hosts", "--kind", "T4"), "--output is missing"),
        (("-o", "x.yaml"), "one source is needed. Found none"),
        (("hosts", "--slurm", "-o", "x.yaml"), "Found SOURCE and --slurm"),
        (("hosts", "-o", "x.yaml"), "--kind is missing"),
        (("hosts", "--kind", "A100-40Gb", "-o", "x.yaml"), "Did you mean 'A100-40GB'?"),
        (("hosts", "--kind", "T4", "--fill", "-o", "x.yaml"), "--fill cannot be combined with SOURCE"),
        (("--hulk", "a", "b", "--kind", "T4", "-o", "x.yaml"), "--kind cannot be combined with --hulk"),
        (("--hulk", "a", "-o", "x.yaml"), "expected 2 arguments"),
    ],
)
def test_wrong_usage(isthmus: Isthmus, words: tuple[str, ...], said: str) -> None:
    done = isthmus("cluster", "import", *words)
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1


def test_what_cannot_be(isthmus: Isthmus, hostfile: Path, tmp_path: Path) -> None:
    words = ("cluster", "import", hostfile, "--kind", "T4")
    assert "the folder does not exist" in isthmus(*words, "-o", tmp_path / "no" / "x.yaml").err
    assert "is not a quantity" in isthmus(*words, "--bandwidth", "10", "-o", tmp_path / "x.yaml").err
    assert "name both regions" in isthmus(*words, "--bandwidth", "1 Gbit/s", "-o", tmp_path / "x.yaml").err
    assert not (tmp_path / "x.yaml").exists()
