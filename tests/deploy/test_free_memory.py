"""Workers that would not fit are not started; the figures are those of the system's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import isthmus
from isthmus.deploy import local
from isthmus.deploy.free_memory import FreeMemory, check_fit, free_on_gpus, free_on_host, gpu_needs, host_needs
from isthmus.errors import RunError
from tests.deploy.jobs import DATA, MODEL, A, B, children, two_stages

GB = 10**9


def written(system: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return system


MEMINFO = {"proc/meminfo": "MemTotal:  32000000 kB\nMemFree:  1 kB\nMemAvailable:  16000000 kB\n"}


def test_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert free_on_host(tmp_path) is None
    assert free_on_host(written(tmp_path, MEMINFO)) == FreeMemory(16_000_000 * 1024, "MemAvailable")


def test_this_machine_has_some() -> None:
    text = Path("/proc/meminfo").read_text().split("MemTotal:")[1]
    found = free_on_host()
    assert found is not None and 0 < found.bytes < int(text.split()[0]) * 1024


@pytest.mark.parametrize("limited", ["", "pod", "pod/container"])
def test_the_least_that_control_groups_leave(tmp_path: Path, limited: str) -> None:
    """Version 2. A group above counts too; pages of files that the kernel gives back count as free."""
    folder = f"sys/fs/cgroup/{limited}"
    files = {"proc/self/cgroup": "0::/pod/container\n", f"{folder}/memory.max": "8000000000\n",
             f"{folder}/memory.current": "5000000000\n", f"{folder}/memory.stat": "anon 7\ninactive_file 1000000000\n",
             "sys/fs/cgroup/pod/container/cpu.max": "max\n"}  # fmt: skip
    found = free_on_host(written(tmp_path, MEMINFO | files))
    assert found is not None and found.bytes == 4 * GB and "the limit of 8 GB" in found.source


def test_groups_of_version_1_and_groups_without_a_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/box"
    files = {"proc/self/cgroup": "5:cpu:/other\n4:memory:/box\n0::/box\n",
             f"{folder}/memory.limit_in_bytes": "3000000000",
             f"{folder}/memory.usage_in_bytes": "1000000000", f"{folder}/memory.stat": "total_inactive_file 5\n",
             "sys/fs/cgroup/box/memory.max": "max\n", "sys/fs/cgroup/box/memory.current": "1\n"}  # fmt: skip
    found = free_on_host(written(tmp_path, MEMINFO | files))
    assert found is not None and found.bytes == 2 * GB + 5
    none = {f"{folder}/memory.limit_in_bytes": "9223372036854771712"}
    found = free_on_host(written(tmp_path, none))
    assert found is not None and found.source == "MemAvailable"


def test_the_error_has_the_figures() -> None:
    needs = {"a/T4/0": 3.0 * GB, "b/T4/0": 2.0 * GB} | {f"c/T4/{n}": 1.0 * GB for n in range(4)}
    check_fit("this machine", needs, FreeMemory(9 * GB, "MemAvailable"))
    check_fit("this machine", needs, None)
    with pytest.raises(RunError, match=r"9 GB predicted, 8\.5 GB free") as caught:
        check_fit("this machine", needs, FreeMemory(8.5 * GB, "MemAvailable"))
    error = caught.value
    assert error.found == "6 workers: a/T4/0 3 GB, b/T4/0 2 GB, c/T4/0 1 GB, c/T4/1 1 GB, 2 more"
    assert error.expected == "at most 8.5 GB together (MemAvailable)" and "--ignore-memory" in (error.next or "")


def test_what_each_worker_needs_where() -> None:
    """On the host all build the whole model; on a GPU those that share it add up."""
    own = {"a": 5.0 * GB, "b": 1.0 * GB, "c": 1.0 * GB}
    assert host_needs(own, 2.0 * GB, on_gpus=False) == {"a": 5.2 * GB, "b": 2.2 * GB, "c": 2.2 * GB}
    assert set(host_needs(own, 2.0 * GB, on_gpus=True).values()) == {2.2 * GB}
    assert gpu_needs(own, 2) == [{"a": 5.6 * GB, "c": 1.6 * GB}, {"b": 1.6 * GB}]
    assert gpu_needs(own, 0) == [] and free_on_gpus(0) == []


@pytest.mark.slow("a run of two processes; `test_train` has one with too little memory")
def test_a_run_that_does_not_fit_starts_nobody(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made either; told to, it runs."""
    monkeypatch.chdir(root)
    monkeypatch.setattr(local, "free_on_host", lambda: FreeMemory(0.25 * GB, "MemAvailable"))
    folder = tmp_path / "saved"
    with pytest.raises(RunError, match=r"400\..* MB predicted, 250 MB free") as caught:
        isthmus.train(two_stages(), steps=1, trusted=(MODEL, DATA), checkpoint=folder)
    assert caught.value.where == "this machine" and A in str(caught.value) and B in str(caught.value)
    assert not folder.exists() and not children(os.getpid())
    careless = local.LocalEngine(ignore_memory=True)
    assert isthmus.train(two_stages(), steps=1, trusted=(MODEL, DATA), engine=careless).steps == 1
