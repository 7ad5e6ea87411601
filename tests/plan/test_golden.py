from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.plan.diff import diff
from isthmus.plan.file import load_plan, save_plan
from isthmus.plan.text import render
from isthmus.plan.validate import check
from tests.plan.golden_files import FOLDER, NAMES, cluster, golden, models, text_path, whole_file


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
def test_nothing_moves_from_a_golden_plan_to_itself(name: str) -> None:
    plan = golden(name)
    same = diff(plan, plan, cluster(), models(plan))
    assert (same.moves, same.drops, same.changes) == ((), (), ())
