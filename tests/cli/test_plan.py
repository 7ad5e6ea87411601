"""`plan` and `simulate`: from a model to a plan file, its price again, and its timeline."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from isthmus.model.saved import save_graph
from isthmus.plan.file import load_plan
from isthmus.plan.text import render
from isthmus.planners.schemes.all_schemes import SCHEMES
from tests.cli.conftest import Isthmus
from tests.plan.small_models import chain

KEYS = {
    "planner", "step_seconds", "lower_bound_seconds", "planning_seconds", "feasible", "memory", "baselines", "plan",
    "baseline_outcomes", "precision", "seed", "calls",
}  # fmt: skip


def test_plan_and_simulate_agree(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    file, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    planned = isthmus("plan", saved_model, "--cluster", box, "--batch", 16, "--seed", 3, "-o", file, "--json")
    assert planned.code == 0 and set(planned.values) >= KEYS
    assert planned.values["plan"] == str(file) and planned.values["feasible"] is True
    assert set(planned.values["baselines"]) == set(SCHEMES)
    outcomes = planned.values["baseline_outcomes"]
    assert {name: outcome["seconds"] for name, outcome in outcomes.items()} == planned.values["baselines"]
    assert all(outcome["state"] == "found" or outcome["reason"] for outcome in outcomes.values())
    steps = [seconds for seconds in planned.values["baselines"].values() if seconds is not None]
    assert planned.values["lower_bound_seconds"] <= planned.values["step_seconds"] <= min(steps)
    simulated = isthmus("simulate", file, "--trace", trace, "--json")
    assert simulated.code == 0
    for key in ("step_seconds", "memory", "limits", "jobs", "feasible"):
        assert simulated.values[key] == planned.values[key], key
    ends = [event["ts"] + event["dur"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(ends) == pytest.approx(planned.values["step_seconds"] * 1e6)


def test_the_plan_file_says_what_it_was_made_from(
    isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    values = isthmus("plan", saved_model, "--cluster", box, "--seed", 7, "-o", file, "--json").values
    held = load_plan(file)
    assert held.planner == values["planner"] and held.seed == 7 and len(held.inputs) == 64
    assert held.predicted is not None and held.predicted.step_seconds == values["step_seconds"]
    assert held.predicted.memory == values["memory"] and held.cluster is not None


def test_the_same_words_give_the_same_bytes(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert isthmus("plan", saved_model, "--cluster", box, "--calls", 40, "-o", file).code == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_text_for_people(isthmus: Isthmus, root: Path) -> None:
    demo = root / "examples" / "clusters" / "demo.yaml"
    done = isthmus("plan", root / "examples" / "jobs" / "gpt-tiny.yaml", "--cluster", demo)
    assert done.code == 0
    heads = ("job ", "lower bound", "planning", "scheme", "devices", "links", "plan for demo", "pipeline gpt-tiny:")
    assert all(f"\n{head}" in done.out for head in heads)
    assert all(f"\n{name}" in done.out for name in SCHEMES)
    assert all(device in done.out for device in ("oslo1/quick/0", "oslo2/slow/0", "lima1/quick/0", "lima2/slow/0"))
    assert max(map(len, done.out.splitlines())) <= 118
    assert all(line.endswith("...") for line in done.err.splitlines()), "progress only, a line for each phase"
    assert 1 <= len(done.err.splitlines()) <= 3


def test_flags_win_over_the_job_file(
    isthmus: Isthmus, root: Path, saved_model: Path, box: Path, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f'kind: job\nversion: 1\nname: mine\nmodel: "{saved_model}"\nbatch: 8\nprecision: fp32\n')
    own = isthmus("plan", job, "--cluster", box, "--json").values
    assert own["jobs"]["mine"]["batch"] == 8 and own["precision"] == "fp32"
    given = isthmus("plan", job, "--cluster", box, "--batch", 4, "--precision", "fp16", "--json").values
    assert given["jobs"]["mine"]["batch"] == 4 and given["precision"] == "fp16"
    workload = root / "examples" / "jobs" / "two-models.yaml"
    assert "whole workload" in isthmus("plan", workload, "--cluster", box, "--batch", 4).err


def test_one_planner_and_fixed_degrees(isthmus: Isthmus, saved_model: Path, box: Path) -> None:
    assert (
        isthmus("plan", saved_model, "--cluster", box, "--planner", "data-even", "--json").values["planner"]
        == "data-even"
    )
    fixed = isthmus("plan", saved_model, "--cluster", box, "--fix", "tp=1,pp=2,dp=1", "--json")
    assert fixed.code == 0 and fixed.values["planner"] == "grid" and len(fixed.values["memory"]) == 2


def test_nothing_fits(isthmus: Isthmus, box: Path, tmp_path: Path) -> None:
    huge, output = tmp_path / "huge.json", tmp_path / "plan.json"
    save_graph(chain(vocabulary=2 * 10**9), huge)
    done = isthmus("plan", huge, "--cluster", box, "-o", output, "--json")
    assert done.code == 1 and done.values["feasible"] is False
    assert done.values["error"]["type"] == "NoPlanError"
    assert "missing" in done.err and not output.exists()


def test_a_plan_that_no_longer_fits(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    file, smaller = tmp_path / "plan.json", tmp_path / "smaller.yaml"
    assert isthmus("plan", saved_model, "--cluster", box, "-o", file).code == 0
    kinds = "devices: {RTX-3090: {memory: 0.5 GB}, GTX-1080Ti: {memory: 0.5 GB}}"
    smaller.write_text(box.read_text().replace("name: one-host", f"name: one-host\n{kinds}"))
    done = isthmus("simulate", file, "--cluster", smaller, "--json")
    assert done.code == 1 and done.values["feasible"] is False
    assert {shortage["where"] for shortage in done.values["shortages"]} == set(done.values["memory"])
    assert "does not fit" in done.err.splitlines()[-1]


def test_text_plans_need_a_cluster(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.plan"
    values = isthmus("plan", saved_model, "--cluster", box, "-o", file, "--json").values
    alone = isthmus("simulate", file)
    assert alone.code == 2 and "--cluster FILE" in alone.err
    assert isthmus("simulate", file, "--cluster", box, "--json").values["step_seconds"] == values["step_seconds"]


def test_other_inputs_than_the_plan_was_made_from_are_said(
    isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path
) -> None:
    file, faster = tmp_path / "plan.json", tmp_path / "faster.yaml"
    assert isthmus("plan", saved_model, "--cluster", box, "-o", file).code == 0
    assert isthmus("simulate", file, "--json").values["inputs_match"] is True
    assert isthmus("simulate", file, "--cluster", box, "--json").values["inputs_match"] is True
    assert "made from another" not in isthmus("simulate", file).out
    faster.write_text(box.read_text().replace("devices: {RTX", "bandwidth: 90 GB/s, devices: {RTX"))
    assert isthmus("simulate", file, "--cluster", faster, "--json").values["inputs_match"] is False
    assert "made from another cluster, job, model or profile" in isthmus("simulate", file, "--cluster", faster).out
    text = tmp_path / "mine.plan"
    isthmus("plan", saved_model, "--cluster", box, "-o", text)
    assert isthmus("simulate", text, "--cluster", box, "--json").values["inputs_match"] is None


def test_every_device_says_its_order(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    isthmus("plan", saved_model, "--cluster", box, "--fix", "tp=1,pp=2,dp=1,micro=8", "--batch", 16, "-o", file)
    lines = isthmus("simulate", file, "--orders").out.splitlines()
    assert [line.partition(" | ")[2] for line in lines if " | " in line] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    orders = isthmus("simulate", file, "--orders", "--json").values["orders"]
    assert orders["box/RTX-3090/1"] == [[1, "F", 0], [1, "B", 0], [1, "F", 1], [1, "B", 1]]
    assert "orders" not in isthmus("simulate", file, "--json").values


def test_degrees_that_the_heads_do_not_allow(isthmus: Isthmus, saved_model: Path, box: Path) -> None:
    done = isthmus("plan", saved_model, "--cluster", box, "--fix", "tp=3", "--json")
    assert done.code == 1 and done.values["feasible"] is False
    assert "tp one of 1, 2" in done.values["error"]["expected"]


def test_a_broken_plan_says_its_rule(isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.plan"
    isthmus("plan", saved_model, "--cluster", box, "-o", file)
    file.write_text(file.read_text().replace("box/RTX-3090/0: share", "box/RTX-3090/9: share", 1))
    done = isthmus("simulate", file, "--cluster", box, "--json")
    assert done.code == 1 and done.values["error"]["type"] == "PlanError"
    assert "box/RTX-3090/9" in done.err


def test_a_plan_alone_runs_no_code(isthmus: Isthmus, box: Path, tmp_path: Path) -> None:
    file, spec = tmp_path / "plan.json", "tests.cli.rude:noisy"
    planned = isthmus("plan", spec, "--cluster", box, "-o", file, "--json")
    assert planned.code == 0 and planned.values["feasible"], "what a model's code prints is no part of the answer"
    assert "built with noise" in planned.err
    sys.modules.pop("tests.cli.rude")
    refused = isthmus("simulate", file, "--json")
    assert refused.code == 1 and f"--model {spec}" in refused.values["error"]["next"]
    assert "tests.cli.rude" not in sys.modules
    assert isthmus("simulate", file, "--model", "other.code:f").code == 2
    named = isthmus("simulate", file, "--model", spec, "--json")
    assert named.code == 0 and named.values["step_seconds"] == planned.values["step_seconds"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("data: tests.deploy.models:dat", "tests.deploy.models has no function 'dat'"),
        ("loss: tests.deploy.models:mean_los", "Did you mean 'mean_loss'?"),
        ("loss: tests.deploy.models:__name__", "this is not a function"),
        ("loss: tests.deploy.nowhere:loss", "cannot be imported"),
    ],
)
def test_a_job_names_functions_that_exist(
    isthmus: Isthmus, saved_model: Path, box: Path, tmp_path: Path, fields: str, said: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f'kind: job\nversion: 1\nname: mine\nmodel: "{saved_model}"\nbatch: 8\n{fields}\n')
    done = isthmus("plan", job, "--cluster", box)
    assert done.code == 1 and said in done.err and len(done.err.splitlines()) == 1


def test_long_plans_are_cut(isthmus: Isthmus, root: Path, saved_model: Path, tmp_path: Path) -> None:
    many, file = root / "examples" / "clusters" / "many-regions.yaml", tmp_path / "plan.json"
    words = ("--batch", 512, "--fix", "tp=1,pp=1,dp=128", "--calls", 2)
    done = isthmus("plan", saved_model, "--cluster", many, *words, "-o", file)
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= 118
    whole = render(load_plan(file).plan).splitlines()
    shown = done.out[done.out.index("plan for many-regions") :].split("\n\n")[0].splitlines()
    counted = [int(match[1]) for line in shown if (match := re.fullmatch(r" *\.\.\. (\d+) more (replica|sync)s", line))]
    assert counted and len(shown) - len(counted) + sum(counted) == len(whole), "every line is shown or counted"
    assert len(shown) < 20 < len(whole)
