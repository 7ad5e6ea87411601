"""The cases that planners are judged on: they are what their generator draws, they load, and they are as stated."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FOLDER = BENCHMARKS / "cases" / "planner"


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.fixture(scope="module")
def planner_cases() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield module(BENCHMARKS / "_planner_cases.py")
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("group", ["unequal", "geo", "small", "held"])
def test_files_are_what_their_generator_draws(group: str) -> None:
    made = dict(module(FOLDER / "make.py").files(group))
    found = {f"{group}/{path.name}": path.read_text() for path in (FOLDER / group).glob("*.yaml")}
    assert found == made


# group: cases, fewest and most devices, kinds, regions
STATED = {
    "tag": (6, (16, 16), (3, 3), (1, 1)),
    "unequal": (30, (3, 24), (2, 5), (1, 3)),
    "geo": (10, (4, 48), (2, 12), (2, 6)),
    "large": (5, (16, 96), (3, 4), (2, 3)),
    "equal": (1, (8, 8), (1, 1), (1, 1)),
    "small": (62, (6, 8), (3, 3), (2, 2)),
    "held": (24, (3, 48), (3, 12), (3, 6)),
}


@pytest.mark.parametrize("group", STATED)
def test_cases_load_and_are_as_stated(group: str, planner_cases: ModuleType) -> None:
    count, *ranges = STATED[group]
    found = list(planner_cases.cases(group))
    assert len(found) == count
    for case in found:
        regions = {host.region for host in case.cluster.hosts.values()}
        sizes = (len(case.cluster.devices), len(case.cluster.kinds), len(regions))
        assert all(low <= size <= high for size, (low, high) in zip(sizes, ranges, strict=True)), case.name
    assert tuple(STATED) == planner_cases.GROUPS


def test_batches_and_links_span_what_they_should(planner_cases: ModuleType) -> None:
    """Batches of three decades in both groups; between regions from 10 Mbit/s to 10 Gbit/s, some pairs without link."""
    groups = {group: list(planner_cases.cases(group)) for group in ("unequal", "geo")}
    for found in groups.values():
        assert {len(str(case.job.batch)) for case in found} >= {1, 2, 3, 4}
    links = [link for case in groups["geo"] for link in case.cluster.links if link.between[0] != link.between[1]]
    assert min(link.bandwidth for link in links) < 12e6 / 8 and max(link.bandwidth for link in links) > 9e9 / 8
    assert min(link.latency for link in links) <= 2e-3 and max(link.latency for link in links) > 0.2
    regions = [len({host.region for host in case.cluster.hosts.values()}) for case in groups["geo"]]
    assert len(links) < sum(n * (n - 1) // 2 for n in regions) and any(link.trunk for link in links)


def test_a_third_of_the_small_cases_is_tight(planner_cases: ModuleType) -> None:
    """Some device cannot hold 16 bytes a parameter, by the zoo's own count (docs/zoo.md) of large models."""
    millions = {"gpt2-large": 774, "gpt2-xl": 1557.6, "gpt3-1.3b": 1315.7}
    tight = [
        case.name
        for case in planner_cases.cases("small")
        if millions.get(case.job.model.removeprefix("zoo:"), 0) * 16e6
        > min(kind.memory for kind in case.cluster.kinds.values())
    ]
    assert len(tight) == 62 // 3


def test_made_clusters_have_just_the_devices_asked_for(planner_cases: ModuleType) -> None:
    for scale in planner_cases.SCALES:
        made = planner_cases.scale_cluster(scale)
        found = (len(made.devices), len(made.kinds), len({host.region for host in made.hosts.values()}))
        assert found == scale
        assert len({sum(host.devices.values()) for host in made.hosts.values()}) > 1
    assert planner_cases.scale_cluster(planner_cases.Scale(128)) == planner_cases.scale_cluster(
        planner_cases.Scale(128)
    )
