"""Hostfiles and Slurm: lists expanded against what they were written from, every refusal, files that load back."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.importers.hostfile import import_hostfile, parse_hostfile
from isthmus.cluster.importers.hosts import Around
from isthmus.cluster.importers.slurm import expand_counts, expand_nodes, import_slurm
from isthmus.cluster.load import parse_cluster
from isthmus.cluster.write import cluster_yaml
from isthmus.errors import ClusterError

HERE = Around(name="lab", kind="A100-40GB", region="here")
LINKED = Around(name="lab", kind="T4", region="tokyo", bandwidth="10 Gbit/s", latency="0.1 ms")

HEADS = st.text("abz-", min_size=1, max_size=3)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """`08-11` as it is written, and 08 09 10 11 counted out digit by digit."""
    width, first, length = draw(st.integers(1, 4)), draw(st.integers(0, 1200)), draw(st.integers(0, 5))
    names = []
    for number in range(first, first + length + 1):
        digits = ""
        while number or not digits:
            digits, number = "0123456789"[number % 10] + digits, number // 10
        names.append("0" * (width - len(digits)) + digits)
    return (names[0] if length == 0 else f"{names[0]}-{names[-1]}"), names


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list of nodes as Slurm writes it, and the nodes it was written from."""
    texts, names = [], []
    for index in range(draw(st.integers(1, 4))):
        head, text, found = f"{draw(HEADS)}{'xyzw'[index]}", "", [""]
        for _ in range(draw(st.integers(0, 2))):
            pieces = draw(st.lists(ranges(), min_size=1, max_size=3, unique_by=lambda piece: piece[0]))
            tail = draw(st.sampled_from(["", "r"]))
            text += f"[{','.join(piece for piece, _ in pieces)}]{tail}"
            found = [before + number + tail for before in found for _, numbers in pieces for number in numbers]
        texts.append(head + text)
        names += [head + name for name in found]
    return ",".join(texts), names


@given(node_lists())
def test_node_lists_give_the_nodes_they_were_written_from(drawn: tuple[str, list[str]]) -> None:
    text, names = drawn
    if len(set(names)) == len(names):
        assert expand_nodes(text) == names
    else:
        with pytest.raises(ClusterError, match="is listed twice"):
            expand_nodes(text)


def test_the_example_of_the_manual() -> None:
    assert expand_nodes("gpu[01-04,07],login1") == ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07", "login1"]
    assert expand_nodes("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]


@pytest.mark.parametrize(
    "text",
    [
        "a[1-[2-3]]",
        "a[1-2",
        "a1-2]",
        "a[]",
        "a[2-1]",
        "a[x]",
        "a[1,]",
        "a,,b",
        ",a",
        "a,",
        "a[1-2-3]",
        "a[-1]",
        "",
        ",",
    ],
)
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ClusterError, match=r"SLURM_JOB_NODELIST: this list of nodes cannot be read.*like gpu\[01-04"):
        expand_nodes(text)


@pytest.mark.parametrize(
    "text", ["a[0-999999999]", "a[1-1000]b[1-1000]", "a[1-150000],b[1-150000]", "a[1-9999,0-199999]"]
)
def test_lists_that_are_too_long(text: str) -> None:
    with pytest.raises(ClusterError, match=r"cannot be read|too many nodes"):
        expand_nodes(text)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_counts_give_what_they_were_written_from(runs: list[tuple[int, int]]) -> None:
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "4(x2", "4x2", "4(x0)", "a", "4,,2", "-1", "4(x999999)"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ClusterError, match=r"SLURM_TASKS_PER_NODE.*like 4\(x2\),2"):
        expand_counts(text)


def kinds(environment: dict[str, str], around: Around = HERE) -> tuple[dict[str, int], set[str]]:
    """Devices by host, and the kinds of finding; what was imported loads back."""
    imported = import_slurm(environment, around)
    assert parse_cluster(cluster_yaml(imported.cluster, list(imported.comments()))) == imported.cluster
    devices = {host.name: sum(host.devices.values()) for host in imported.cluster.hosts.values()}
    return devices, {finding.kind for finding in imported.findings}


def test_slurm_counts() -> None:
    nodes = {"SLURM_JOB_NODELIST": "gpu[01-03]"}
    every = {"gpu01": 4, "gpu02": 4, "gpu03": 4}
    assert kinds(nodes | {"SLURM_GPUS_ON_NODE": "4"}) == (every, {"assumed-alike", "assumed-kind", "no-link"})
    assert kinds(nodes | {"SLURM_JOB_GPUS": "0,1,4-5"})[0] == every
    assert kinds(nodes | {"SLURM_JOB_GPUS": "0", "SLURM_GPUS_ON_NODE": "4"})[0] == every
    tasks = {"SLURM_TASKS_PER_NODE": "4(x2),2"}
    assert kinds(nodes | tasks, LINKED) == ({**every, "gpu03": 2}, {"tasks-for-devices", "assumed-kind"})
    both = import_slurm(nodes | tasks | {"SLURM_GPUS_ON_NODE": "4"}, HERE)
    assert "differs between nodes" in both.findings[0].done
    alone = kinds({"SLURM_NODELIST": "one", "SLURM_GPUS_ON_NODE": "8"})
    assert alone == ({"one": 8}, {"assumed-kind"})


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({}, "not inside a Slurm job"),
        ({"SLURM_JOB_NODELIST": "a[1-2]"}, "does not say how many devices"),
        ({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE: this number of devices"),
        ({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "0"}, "cannot be read"),
        ({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_GPUS": "0,x"}, "SLURM_JOB_GPUS"),
        ({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "4(x3)"}, "Expected 2 counts of 1 or more"),
        ({"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_TASKS_PER_NODE": "4,0"}, "Expected 2 counts of 1 or more"),
        ({"SLURM_JOB_NODELIST": "a b", "SLURM_GPUS_ON_NODE": "1"}, "this is not a valid name"),
    ],
)
def test_slurm_refusals(environment: dict[str, str], what: str) -> None:
    with pytest.raises(ClusterError) as caught:
        import_slurm(environment, HERE)
    assert what in str(caught.value)


def test_a_hostfile(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nworker-1 slots=4\n\n  worker-2   slots = 2   # small\r\n10.0.0.3 slots=1")
    imported = import_hostfile(path, LINKED)
    assert {host.name: dict(host.devices) for host in imported.cluster.hosts.values()} == {
        "worker-1": {"T4": 4},
        "worker-2": {"T4": 2},
        "10.0.0.3": {"T4": 1},
    }
    (link,) = imported.cluster.links
    assert (link.between, link.bandwidth, link.latency) == (("tokyo", "tokyo"), 1.25e9, 1e-4)
    assert parse_cluster(cluster_yaml(imported.cluster, list(imported.comments()))) == imported.cluster
    assert [finding.kind for finding in imported.findings] == ["assumed-kind"]
    assert [finding.kind for finding in import_hostfile(path, HERE).findings] == ["assumed-kind", "no-link"]


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a slots=1\n# b\na slots=2", " line 3", "host 'a' is given twice. Found it on line 1 as well"),
        ("a slots=1\nb", " line 2", "cannot be read. Found 'b'. Expected a line like worker-1 slots=4"),
        ("a slots=x", " line 1", "cannot be read"),
        ("a slots=1 max_slots=2", " line 1", "cannot be read"),
        ("a slots=0", " line 1", "host 'a' has no slots"),
        ("me@a slots=1", " line 1", "this is not a valid host name"),
        ("# nothing\n\n", "", "names no host"),
    ],
)
def test_hostfile_refusals(text: str, line: str, what: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_hostfile(text, where="hosts")
    assert caught.value.where == f"hosts{line}" and what in str(caught.value)
