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
    assert all(f'title="{scheme}' in text for scheme in planned["baselines"])
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


def test_it_says_what_simulate_says(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    """What a plan rests on, and what it was not made from: in the terminal, on the page and for programs."""
    plan, page, slower = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "slower.yaml"
    fixed = ("--fix", "tp=1,pp=2,dp=1,micro=2")
    assert isthmus("plan", saved_model, "--cluster", box, "--batch", 16, *fixed, "-o", plan).code == 0
    slower.write_text(box.read_text().replace("name: one-host", "name: one-host\ndevices: {RTX-3090: {peer: 1 MB/s}}"))
    for words, remarks in (((), 1), (("--cluster", slower), 3)):
        simulated = isthmus("simulate", plan, *words)
        done = isthmus("report", plan, *words, "-o", page)
        told = [line for line in done.out.splitlines() if line.startswith(("times", "note", "warning"))]
        assert done.code == 0 and len(told) == remarks + 1
        assert "\n".join(told) in simulated.out
        values = isthmus("report", plan, *words, "-o", page, "--json").values
        assert values["notes"] == isthmus("simulate", plan, *words, "--json").values["notes"]
        assert len(values["notes"]) == remarks and all(note[1:] in page.read_text("utf-8") for note in values["notes"])
    assert "the plan was made from another cluster" in done.out and "is assumed, not given" in done.out


def test_the_events_of_another_run_are_refused(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan, page, run = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "run.jsonl"
    assert isthmus("plan", saved_model, "--cluster", box, "--batch", 16, "-o", plan).code == 0
    step = '{"event": "step", "step": 1, "loss": 1.0, "seconds": 0.5}\n'
    run.write_text('{"event": "begin", "job": "chain", "model": "zoo:gpt2", "batch": 16}\n' + step)
    done = isthmus("report", plan, "--run", run, "-o", page)
    assert done.code == 1 and not page.exists()
    assert f"this run is of another model than the plan. Found model zoo:gpt2. Expected model {saved_model}" in done.err
