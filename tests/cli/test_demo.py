"""What the demonstration calls data parallelism over all devices is just that."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from isthmus.plan.file import load_plan
from isthmus.plan.types import Pipeline
from tests.cli.conftest import Isthmus


@pytest.fixture
def demo(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "examples" / "demo.py"))


def test_every_device_has_an_equal_share(isthmus: Isthmus, root: Path, demo: dict[str, Any], tmp_path: Path) -> None:
    plan = tmp_path / "all.json"
    words = [demo["MODEL"], "--cluster", root / demo["CLUSTER"], *demo["JOB"], *demo["every_device"](), "-o", plan]
    assert isthmus("plan", *words).code == 0
    file = load_plan(str(plan))
    (part,) = file.plan.parts
    assert isinstance(part, Pipeline) and len(part.stages) == 1 and file.cluster is not None
    shares = {device: replica.share for replica in part.stages[0].replicas for device in replica.devices}
    assert set(shares) == set(file.cluster.devices) and len(set(shares.values())) == 1


def test_the_best_scheme_is_named_and_was_searched_to_its_end(demo: dict[str, Any]) -> None:
    ((label, words),) = demo["best_scheme"]({"data": 3.0, "region": 2.0, "grid": None}).values()
    assert "region" in label and words == ("--planner", "region")
