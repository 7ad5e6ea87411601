"""Golden plans: sound, canonical, and priced as before.

`python -m tests.plan.test_golden` records the prices anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cost.simulate import Simulator
from isthmus.plan.diff import diff
from isthmus.plan.file import load_plan, save_plan
from isthmus.plan.text import render
from isthmus.plan.validate import check
from tests.plan.golden_files import FOLDER, NAMES, cluster, golden, models, text_path, whole_file

PRICES = FOLDER / "prices.json"


def step_seconds(name: str) -> float:
    plan = golden(name)
    return Simulator(cluster(), models(plan)).price(plan).step_seconds


def test_there_are_ten_golden_plans() -> None:
    assert len(NAMES) == 10


@pytest.mark.parametrize("name", NAMES)
def test_golden_plans_are_sound_and_their_text_is_canonical(name: str) -> None:
    plan = golden(name)
    assert render(plan) == text_path(name).read_text()
    check(plan, cluster(), models(plan))


@pytest.mark.parametrize("name", NAMES)
def test_golden_json_says_the_same_byte_for_byte(name: str, tmp_path: Path) -> None:
    path = FOLDER / f"{name}.json"
    assert load_plan(path) == whole_file(name)
    save_plan(tmp_path / "again.json", load_plan(path))
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_files_from_before_a_field_was_added_say_the_same(name: str, tmp_path: Path) -> None:
    """Fields that came later are left out of a file, and of the hash of its inputs where they have their defaults."""
    value = json.loads((FOLDER / f"{name}.json").read_text())
    jobs = [item["job"] for part in value["plan"]["parts"] for item in part.get("jobs", [part])]
    for job in jobs:
        del job["frozen"], job["weights"], job["compile"]
        for field in ("eps", "amsgrad", "dampening", "nesterov", "maximize", "schedule", "groups", "average"):
            del job["optimizer"][field]
    (tmp_path / "older.json").write_text(json.dumps(value))
    assert load_plan(tmp_path / "older.json") == whole_file(name)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_moves_from_a_golden_plan_to_itself(name: str) -> None:
    plan = golden(name)
    same = diff(plan, plan, cluster(), models(plan))
    assert (same.moves, same.drops, same.changes) == ((), (), ())


@pytest.mark.parametrize("name", NAMES)
def test_golden_plans_cost_what_they_cost_before(name: str) -> None:
    assert step_seconds(name) == pytest.approx(json.loads(PRICES.read_text())[name], rel=1e-9)


if __name__ == "__main__":
    PRICES.write_text(json.dumps({name: step_seconds(name) for name in NAMES}, indent=2) + "\n")
