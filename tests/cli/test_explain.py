"""`isthmus explain`: what binds, for people and for programs."""

from __future__ import annotations

import html
from pathlib import Path

import pytest

from isthmus.model.saved import save_graph
from tests.cli.conftest import Isthmus
from tests.plan.small_models import chain


def test_it_says_what_binds(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned = isthmus("plan", saved_model, "--cluster", box, "--batch", 16, "--planner", "data", "-o", plan, "--json")
    values = isthmus("explain", plan, "--json").values
    assert set(values) == {"step_seconds", "feasible", "binding", "parts", "what_if", "unused", "schemes"}
    step = planned.values["step_seconds"]
    assert values["step_seconds"] == step and values["feasible"] is True
    assert sum(part["seconds"] for part in values["parts"]) == pytest.approx(step, rel=1e-9)
    assert values["binding"]["seconds"] <= step and values["binding"]["name"] in values["binding"]["text"]
    assert all(each["step_seconds"] == pytest.approx(step * (1 - each["saves"])) for each in values["what_if"])
    told = {name: scheme["step_seconds"] for name, scheme in values["schemes"].items()}
    assert told == planned.values["baselines"] and all(s["binding"] is None for s in values["schemes"].values())
    text = isthmus("explain", plan).out
    assert text.startswith("chain on one-host, by planner data: ") and f"binding  {values['binding']['text']}" in text
    assert all(each["change"] in text for each in values["what_if"][:5])


def test_schemes_are_planned_again_where_asked(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert isthmus("plan", saved_model, "--cluster", box, "--batch", 4, "--planner", "data", "-o", plan).code == 0
    values = isthmus("explain", plan, "--schemes", "--budget", "0.2", "--json").values
    assert all(scheme["why"] for scheme in values["schemes"].values()) and values["schemes"]["data"]["binding"]


def test_a_plan_that_does_not_fit(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    plan, smaller = tmp_path / "plan.json", tmp_path / "smaller.yaml"
    assert isthmus("plan", saved_model, "--cluster", box, "--planner", "data", "-o", plan).code == 0
    kinds = "devices: {RTX-3090: {memory: 0.5 GB}, GTX-1080Ti: {memory: 0.5 GB}}"
    smaller.write_text(box.read_text().replace("name: one-host", f"name: one-host\n{kinds}"))
    done = isthmus("explain", plan, "--cluster", smaller, "--json")
    assert done.code == 1 and "does not fit" in done.err
    assert done.values["binding"]["sort"] == "memory" and done.values["what_if"] == []


FAR = """
kind: cluster
version: 1
name: far
devices:
  card: {compute: 1 TFLOP/s, memory: 8 GB, memory_bandwidth: 500 GB/s}
hosts:
  oslo: {region: north, devices: {card: 1}}
  lima: {region: south, devices: {card: 1}}
links:
  - {between: [north, south], bandwidth: 1 Mbit/s, latency: 1 ms}
"""


@pytest.mark.slow("several searches for two lines of text")
def test_devices_that_are_not_used(isthmus: Isthmus, tmp_path: Path) -> None:
    """In a note of the plan, and with their remedy in the terminal, for programs and on the page."""
    model, far, plan, page = (tmp_path / name for name in ("chain.json", "far.yaml", "plan.json", "page.html"))
    save_graph(chain(6, width=512, rows=1024), model)
    far.write_text(FAR)
    planned = isthmus("plan", model, "--cluster", far, "--batch", 32, "-o", plan, "--json").values
    (note,) = [note for note in planned["notes"] if "not used" in note]
    assert note.startswith("1 of 2 devices is not used (on lima); ")
    done = isthmus("explain", plan, "--json").values
    (unused,) = done["unused"]
    assert unused["devices"] == ["lima/card/0"] and unused["reason"] == "slower"
    useful = unused["useful_with"]
    assert (
        useful["step_seconds"] == pytest.approx(done["step_seconds"] * (1 - useful["saves"])) and useful["saves"] > 0.02
    )
    assert useful["change"].startswith("link north - south at ") and useful["factor"] > 1
    text = isthmus("explain", plan).out
    assert "1 card of lima\n  why          " in text and f"  useful with  {useful['change']}: " in text
    assert isthmus("report", plan, "-o", page).code == 0
    shown = page.read_text("utf-8")
    assert "Devices that are not used" in shown and html.escape(useful["change"]) in shown
    far.write_text(FAR.replace("1 Mbit/s", "10 Gbit/s"))
    isthmus("plan", model, "--cluster", far, "--batch", 32, "-o", plan)
    assert isthmus("explain", plan, "--json").values["unused"] == []
    assert isthmus("report", plan, "-o", page).code == 0
    assert "Devices that are not used" not in page.read_text("utf-8")
