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

from isthmus.cluster.write import cluster_yaml
from isthmus.planners.training.collect import collect
from isthmus.planners.training.fit import Recipe, fit
from isthmus.planners.training.gather import read_records
from isthmus.planners.training.problems import FAMILIES, SEEDS, random_cluster
from isthmus.planners.training.samples import Lessons

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HELD_BUILDERS = ("vision.vgg", "inception", "transformer", "xlnet", "t5", "llama", "mixtral", "opt", "roberta")


@pytest.fixture(scope="module")
def planner_cases() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("_planner_cases", BENCHMARKS / "_planner_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["_planner_cases"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


def test_no_benchmark_case_is_trained_on(planner_cases: ModuleType) -> None:
    """Clusters by their content without the name; seeds of the generators; families of models; pairs without link."""
    judged = {content(case.cluster) for group in planner_cases.GROUPS for case in planner_cases.cases(group)}
    make = (BENCHMARKS / "cases" / "planner" / "make.py").read_text()
    assert "SEEDS = " in make and not any(str(seed) in make for seed in (SEEDS.start, SEEDS.stop))
    assert planner_cases.SCALE_SEED not in SEEDS
    assert not [v for family in FAMILIES.values() for v in family if v.builder.startswith(HELD_BUILDERS)]
    for seed in range(SEEDS.start, SEEDS.start + 60):
        cluster = random_cluster(Random(seed), seed)
        assert content(cluster) not in judged
        hosts = list(cluster.hosts)
        assert all(cluster.link(a, b) is not None for a in hosts for b in hosts if a != b), "held-out topology"
        assert random_cluster(Random(seed), seed) == cluster


def content(cluster: object) -> str:
    text = cluster_yaml(cluster)  # type: ignore[arg-type]
    return "\n".join(line for line in text.splitlines() if not line.startswith("name:"))


def test_from_a_search_to_a_network(tmp_path: Path) -> None:
    """A record survives its file; its lessons add up; a few steps teach something, and go on where they were left."""
    record = collect(SEEDS.start + 8, effort=0.5)
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
