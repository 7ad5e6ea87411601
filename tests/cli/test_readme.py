"""The README promises commands, files and targets: all of them exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from isthmus.cli.arguments import parse_arguments
from isthmus.planners.portfolio import PLANNERS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("command", re.findall(r"^\$ isthmus (.+)$", README, re.MULTILINE))
def test_commands_are_understood(command: str) -> None:
    assert parse_arguments(shlex.split(command)).command


def test_the_tour_is_short_and_leads_somewhere() -> None:
    tour = re.findall(r"^\d+\. \[(.+?)\]\((.+?)\)", README, re.MULTILINE)
    assert 1 <= len(tour) <= 7
    for name, target in tour:
        assert target == f"src/isthmus/{name}" and (ROOT / target).is_file()


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_planners_are_named_as_they_are() -> None:
    page = (ROOT / "docs" / "planners.md").read_text("utf-8")
    table = page.partition("| `--planner` |")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])]
    assert sorted(named) == sorted(PLANNERS)
