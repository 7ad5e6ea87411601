"""The pages about planners: the toy prints what its page shows, and a planner is added as the other page says."""

from __future__ import annotations

import runpy
from itertools import islice
from pathlib import Path

import pytest

from isthmus.plan.types import Pipeline
from isthmus.planners import portfolio
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.search_planners import BEYOND, Registered
from tests.plan.small_models import chain
from tests.planners.test_portfolio import problem, two_regions
from tests.test_docs import DOCS, FENCE, empty_folder, play

_TOY = 5  # blocks of output before the real planner's


def test_the_toy_prints_what_its_page_shows() -> None:
    """To the last digit; its climbs start on both sides of the best setting, and their best end is the best of all."""
    page = DOCS / "planner-from-scratch.md"
    with empty_folder():
        shown = list(islice(play(page), _TOY))
    assert [one.lines for one in shown] == [one.real for one in shown]
    flips = [line.split()[-1] for line in shown[2].real[1:]]
    assert list(dict.fromkeys(flips)) == ["idle", "cut", "replicate"]
    for _, climbed, best, bound, *_ in (line.split() for line in shown[4].real[2:]):
        assert float(climbed) >= float(best) >= float(bound)


def test_the_toy_is_small() -> None:
    blocks = FENCE.finditer((DOCS / "planner-from-scratch.md").read_text("utf-8"))
    assert sum(block["body"].count("\n") for block in blocks if block["language"] == "python") <= 200


def test_a_planner_is_added_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [b for b in FENCE.finditer((DOCS / "planners.md").read_text("utf-8")) if b["language"] == "python"]
    file = tmp_path / "alone.py"
    file.write_text(block["body"], "utf-8")
    alone = Registered(runpy.run_path(str(file))["alone"])
    monkeypatch.setitem(BEYOND, "alone", alone._replace(with_schemes=False))
    monkeypatch.setattr(portfolio, "PLANNERS", (*BEYOND, *SCHEMES))
    task = problem(two_regions(), chain(6), batch=8)
    choice = choose_plan(task, planner="alone", calls=60)
    (part,) = choice.plan.parts
    assert isinstance(part, Pipeline)
    assert choice.planner == "alone"
    assert [replica.devices for stage in part.stages for replica in stage.replicas] == [("a/quick/0",)]
    assert choice.price.fits and choice.price.step_seconds >= choice.lower_bound
    monkeypatch.setitem(BEYOND, "alone", alone)
    improved = choose_plan(task, planner="alone")
    assert improved.price.step_seconds == min(s for s in (*improved.schemes.values(), choice.price.step_seconds) if s)


def test_every_planner_that_is_registered_can_be_named() -> None:
    assert set(BEYOND) <= set(portfolio.PLANNERS)
