"""`isthmus report`: a plan in, a page out."""

from __future__ import annotations

from pathlib import Path

from isthmus.plan.file import load_plan
from tests.cli.conftest import Isthmus


def test_a_page_of_a_plan(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    planned = isthmus("plan", saved_model, "--cluster", box, "--batch", 16, "-o", plan, "--json").values
    predicted = load_plan(plan).predicted
    assert predicted is not None and predicted.baselines == planned["baselines"]
    done = isthmus("report", plan, "-o", page, "--json")
    assert done.code == 0 and done.values["file"] == str(page) and done.values["bytes"] == page.stat().st_size
    assert done.values["step_seconds"] == planned["step_seconds"] and done.values["feasible"] is True
    text = page.read_text("utf-8")
    assert "<title>chain on one-host · Isthmus</title>" in text
    assert all(f'title="{scheme}"' in text for scheme in planned["baselines"])
    assert "lower bound" in text and planned["planner"] in text
    said = isthmus("report", plan, "-o", page)
    assert said.code == 0 and str(page) in said.out and "a step" in said.out


def test_a_plan_that_does_not_fit_gets_its_page(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan, page, smaller = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "smaller.yaml"
    assert isthmus("plan", saved_model, "--cluster", box, "-o", plan).code == 0
    kinds = "devices: {RTX-3090: {memory: 0.5 GB}, GTX-1080Ti: {memory: 0.5 GB}}"
    smaller.write_text(box.read_text().replace("name: one-host", f"name: one-host\n{kinds}"))
    done = isthmus("report", plan, "--cluster", smaller, "-o", page, "--json")
    assert done.code == 1 and done.values["feasible"] is False and "does not fit" in done.err
    assert "The plan does not fit" in page.read_text("utf-8")
    assert "not the cluster the plan was made for" in page.read_text("utf-8")
