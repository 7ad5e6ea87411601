"""Training problems: the same for the same seed, and none of what is held out to judge by."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType

import msgspec
import pytest

from isthmus.cluster.spec import Cluster
from isthmus.planners.learned.training.__main__ import ROUND
from isthmus.planners.learned.training.collect import collect
from isthmus.planners.learned.training.fit import Recipe, fit
from isthmus.planners.learned.training.lessons import Lessons
from isthmus.planners.learned.training.problems import FAMILIES, SEEDS, random_case, random_cluster
from isthmus.planners.learned.training.records import read_records

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HELD_BUILDERS = ("vision.vgg", "inception", "transformer", "xlnet", "t5", "llama", "mixtral", "opt", "roberta")


@pytest.fixture(scope="module")
def planner_cases() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    yield module(BENCHMARKS / "_planner_cases.py")
    sys.path.remove(str(BENCHMARKS))


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.slow("draws thousands of training cases")
def test_no_benchmark_case_is_trained_on(planner_cases: ModuleType) -> None:
    """Clusters by their content without names, of all problems of both rounds; the generators' seeds; families."""
    judged = [case.cluster for group in planner_cases.GROUPS for case in planner_cases.cases(group)]
    shapes = {shape(cluster) for cluster in judged}
    rounds = (range(SEEDS.start, SEEDS.start + 600), range(SEEDS.start + ROUND, SEEDS.start + ROUND + 2180))
    drawn = [random_cluster(Random(seed), seed) for seeds in rounds for seed in seeds]
    same = [cluster for cluster in drawn if shape(cluster) in shapes]
    assert [(len(c.hosts), len(c.kinds), c.name) for c in same] == [(1, 1, "lab-7101362")]  # eight cards in one host,
    assert random_case(7101362)[1].model == "vit-20-1152-None.json"  # with another model than the case `equal` has
    assert shape(judged[0]) in shapes and len(shapes) > 80  # what is compared tells clusters apart
    make = module(BENCHMARKS / "cases" / "planner" / "make.py")
    used = {make.SEEDS[group] + number for group in make.SEEDS for number in range(make.COUNTS[group] + 1)}
    assert not used & set(SEEDS) and planner_cases.SCALE_SEED not in SEEDS
    assert not [v for family in FAMILIES.values() for v in family if v.builder.startswith(HELD_BUILDERS)]
    for cluster in drawn[:100]:
        hosts = list(cluster.hosts)
        assert all(cluster.link(a, b) is not None for a in hosts for b in hosts if a != b), "held-out topology"
    assert random_cluster(Random(SEEDS.start), SEEDS.start) == drawn[0]


def shape(cluster: Cluster) -> object:
    """The same for clusters that differ only in names and in the order of their hosts."""
    hosts = sorted(cluster.hosts.values(), key=lambda host: (sorted(host.devices.items()), host.nic))
    rates = [cluster.link(a.name, b.name) for i, a in enumerate(hosts) for b in hosts[:i]]
    links = sorted((link.bandwidth, link.latency) for link in rates if link is not None)
    return tuple((tuple(sorted(host.devices.items())), host.nic) for host in hosts), tuple(links)


def test_the_comparison_would_find_a_copy() -> None:
    cluster = random_cluster(Random(1), 1)
    renamed = msgspec.structs.replace(cluster, name="other", hosts=dict(reversed(cluster.hosts.items())))
    assert shape(renamed) == shape(cluster)


@pytest.mark.slow("trains a network")
def test_from_a_search_to_a_network(tmp_path: Path) -> None:
    """A record survives its file; its lessons add up; a few steps teach something, and go on where they were left."""
    record = collect(SEEDS.start + 9, effort=0.5)
    assert record is not None and record.leaves and record.feedback
    (tmp_path / "records.jsonl").write_bytes(msgspec.json.encode(record) + b"\n" + b'{"seed": 1, "feed')  # killed
    assert read_records(tmp_path / "records.jsonl") == [record]
    lessons = Lessons(record).lessons
    assert lessons and all(abs(lesson.target.sum() - 1.0) < 1e-9 for lesson in lessons)
    best = min(leaf.seconds for leaf in record.leaves)
    assert best <= record.feedback[0].seconds * 1.5
    rows: list[dict[str, float]] = []
    recipe = Recipe(samples=64, batch=16, rate=3e-3, width=32, layers=1)
    for epochs in (4, 6):
        fit([record], recipe._replace(epochs=epochs), tmp_path / "n.safetensors", rows.append)
    assert [row["epoch"] for row in rows] == [*range(6)] and rows[-1]["loss"] < rows[0]["loss"]
