"""`isthmus train`: from a plan to trained weights, with all that it writes beside them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import psutil
import pytest
from safetensors.torch import load_model

from isthmus.deploy import local
from isthmus.deploy.free_memory import FreeMemory
from isthmus.emulate.world import unable
from tests.cli.conftest import Isthmus
from tests.deploy.jobs import BATCH, JOB, TRUSTED, A, B, plain_losses, two_stages, written
from tests.deploy.models import small_gpt

KEYS = {"steps", "loss", "step_seconds", "predicted_step_seconds", "checkpoint", "bytes_sent", "workers"}


def test_two_workers_train_as_one_process_does(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    plan, events, trace = written(tmp_path, two_stages()), tmp_path / "events.jsonl", tmp_path / "trace.json"
    saved, weights = tmp_path / "saved", tmp_path / "weights.safetensors"
    done = isthmus(
        "train", plan, *TRUSTED, "--events", events, "--trace", trace, "--checkpoint", saved, "--every", 2,
        "--export", weights, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    values = done.values
    assert set(values) >= KEYS
    assert values["steps"] == JOB.steps and values["workers"] == [A, B] and values["bytes_sent"] > 0
    assert values["checkpoint"] == str(saved / "step-00000006") and values["step_seconds"] > 0
    assert "2 devices of the plan run as processes on this machine" in done.err
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [one["event"] for one in told if one["event"] in ("begin", "end")] == ["begin", "end"]
    steps = [one for one in told if one["event"] == "step"]
    assert [one["seconds_left"] == (JOB.steps - one["step"]) * one["seconds"] for one in steps] == [True] * JOB.steps
    assert values["samples_per_second"] == BATCH / values["step_seconds"]
    assert values["tokens_per_second"] is None  # a model of one's own says nothing of a sequence
    assert values["seconds"] == pytest.approx(sum(one["seconds"] for one in steps))
    assert [one["step"] for one in steps] == list(range(1, JOB.steps + 1))
    assert [one["loss"] for one in steps] == pytest.approx(plain_losses(), rel=1e-6)
    assert [one["step"] for one in told if one["event"] == "checkpoint"] == [2, 4, 6]
    names = {event["args"]["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"}
    assert names >= {f"{kind} {device}" for kind in ("predicted", "measured") for device in (A, B)}
    kinds = {
        (event["cat"], event["name"]) for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"
    }
    assert {("forward", "forward stage 0 #1"), ("backward", "backward stage 1 #0"), ("sync", "sync tied")} <= kinds
    model, _ = small_gpt()
    page = tmp_path / "page.html"
    reported = isthmus("report", plan, "--run", events, "--model", TRUSTED[1], "-o", page, "--json")
    assert reported.code == 0 and reported.values["measured_step_seconds"] == values["step_seconds"]
    assert "The run" in page.read_text() and "<polyline" in page.read_text()
    missing, unexpected = load_model(model, weights)
    assert not missing and not unexpected


@pytest.mark.slow("two runs of two processes")
def test_what_was_damaged_and_what_is_used_is_said(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    plan, events, saved = written(tmp_path, two_stages()), tmp_path / "events.jsonl", tmp_path / "saved"
    words = ("train", plan, *TRUSTED, "--checkpoint", saved)
    assert isthmus(*words, "--steps", 2, "--every", 1).code == 0
    part = next((saved / "step-00000002").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    done = isthmus(*words, "--steps", 3, "--resume", "--events", events)
    assert done.code == 0 and f"skipping a damaged checkpoint: {part}: the file changed" in done.err
    assert f"It is now {saved / 'step-00000002.damaged'}" in done.err
    assert f"resuming from {saved / 'step-00000001'}, after step 1" in done.err
    told = {line["event"]: line for line in map(json.loads, events.read_text().splitlines())}
    assert told["damaged"]["path"] == str(saved / "step-00000002") and "hash" in told["damaged"]["what"]
    assert told["resume"]["step"] == 1 and told["resume"]["notes"] == []


@pytest.mark.slow("two runs of two processes; `test_free_memory` has the check in the fast set")
def test_a_machine_with_too_little_memory(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(local, "free_on_host", lambda: FreeMemory(1e8, "MemAvailable"))
    words = ("train", written(tmp_path, two_stages()), *TRUSTED, "--steps", 1)
    done = isthmus(*words)
    assert done.code == 1 and "more memory than is free" in done.err and "100 MB free" in done.err
    assert isthmus(*words, "--ignore-memory").code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("zoo:mlp-tiny",), "Add --cluster FILE"),
        (("plan.json", "--resume"), "--resume needs a folder of checkpoints"),
        (("plan.json", "--every", 3), "--every needs a folder of checkpoints"),
        (("plan.json", "--batch", BATCH), "--batch cannot be given for a plan"),
        (("plan.json", "--engine", "ray"), "no --engine 'ray' in this version; --engine local, or none"),
        (("plan.json", "--engine", "LOCAL"), "no --engine 'LOCAL' in this version"),
        (("zoo:mlp-tiny", "--precision", "f16"), "Did you mean 'fp16'?"),
        (("zoo:mlp-tiny", "--precision", "double"), "Expected one of fp32, bf16, fp16. "),
        (("plan.json", "--events", "nowhere/at/all"), "the folder does not exist"),
        (("zoo:mlp-tiny", "--model", "zoo:gpt2", "--cluster", "c.yaml"), "--model is for plans only"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(isthmus: Isthmus, words: tuple[object, ...], said: str) -> None:
    done = isthmus("train", *words)
    assert done.code in (1, 2) and said in done.err and len(done.err.splitlines()) == 1


def test_tensorboard_is_an_extra(isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    plan = written(tmp_path, two_stages())
    done = isthmus("train", plan, *TRUSTED, "--tensorboard", tmp_path / "board")
    assert done.code == 2 and "pip install 'isthmus[tensorboard]'" in done.err
    assert len(done.err.splitlines()) == 1  # nothing was planned or priced before


def test_wandb_is_an_extra(isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    plan = written(tmp_path, two_stages())
    done = isthmus("train", plan, *TRUSTED, "--wandb", tmp_path / "runs")
    assert done.code == 2 and "pip install 'isthmus[wandb]'" in done.err
    assert len(done.err.splitlines()) == 1 and not (tmp_path / "runs").exists()


def test_wandb_writes_its_files_offline_and_leaves_no_process(isthmus: Isthmus, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is an extra, and not installed")
    plan = written(tmp_path, two_stages())
    done = isthmus("train", plan, *TRUSTED, "--steps", 2, "--wandb", tmp_path / "runs")
    assert done.code == 0, done.err
    (written_file,) = (tmp_path / "runs").rglob("run-*.wandb")
    assert written_file.stat().st_size > 0
    assert not [child.name() for child in psutil.Process().children(recursive=True) if "wandb" in child.name()]


def test_a_plan_is_for_its_own_model(isthmus: Isthmus, tmp_path: Path) -> None:
    plan = written(tmp_path, two_stages())
    for words in (("train", plan), ("simulate", plan), ("report", plan, "-o", tmp_path / "page.html")):
        done = isthmus(*words, *TRUSTED, "--model", "zoo:gpt2")
        assert done.code == 2 and "the plan does not use this model. Found zoo:gpt2" in done.err
        assert JOB.model in done.err and JOB.data in done.err
        misspelt = isthmus(*words, "--model", f"{JOB.model[:-1]}")
        assert misspelt.code == 2 and f"Did you mean {JOB.model!r}?" in misspelt.err
        assert "Leave it out" not in done.err + misspelt.err


def test_trust_is_asked_for_once_with_every_name(isthmus: Isthmus, tmp_path: Path) -> None:
    plan = written(tmp_path, two_stages(msgspec.structs.replace(JOB, loss="tests.deploy.models:failing_loss")))
    done = isthmus("train", plan)
    remedy = f"--model {JOB.model} --model {JOB.data} --model tests.deploy.models:failing_loss"
    assert done.code == 1 and remedy in done.err and len(done.err.splitlines()) == 1


@pytest.mark.slow("four runs of two processes")
def test_a_resumed_run_reports_the_steps_that_it_made(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    words = ("train", written(tmp_path, two_stages()), *TRUSTED, "--checkpoint", tmp_path / "saved", "--resume")
    first = isthmus(*words, "--steps", 1)
    assert first.code == 0 and ": 1 step\n" in first.out and "learning rate 0.01," in first.err
    second = isthmus(*words, "--steps", 3, "--json")
    assert (second.values["steps"], second.values["last_step"]) == (2, 3)
    third = isthmus(*words, "--steps", 4)
    assert ": 1 step, 4 to 4" in third.out
    assert "nothing to do: all 4 steps were done already" in isthmus(*words, "--steps", 4).out


def test_a_checkpoint_folder_that_is_a_file_is_refused_before_anything_runs(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    plan = written(tmp_path, two_stages())
    done = isthmus("train", plan, *TRUSTED, "--steps", 1, "--checkpoint", plan)
    assert done.code == 1 and "checkpoints cannot be written there" in done.err


def test_what_names_no_plan_and_no_job_is_told_so(isthmus: Isthmus) -> None:
    done = isthmus("train", "plan.jsn", "--steps", 1)
    assert done.code == 1 and "This names no model" in done.err


@pytest.mark.slow("an emulated world; `test_random_plans` trains over relays in the fast set")
def test_hosts_without_a_link_train_over_a_relay(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages on hosts that only a third can reach, 20 ms from each: what passes goes 40 ms there and 40 back."""
    monkeypatch.chdir(root)
    plan, events, far = written(tmp_path, two_stages()), tmp_path / "events.jsonl", tmp_path / "row.yaml"
    text = plan.read_text().replace(B, "there/CPU/0")
    far.write_text(
        "{kind: cluster, version: 1, name: desk, hosts: {here: {region: a, devices: {CPU: 1}}, "
        "middle: {region: m, devices: {CPU: 1}}, there: {region: b, devices: {CPU: 1}}}, links: [{between: [a, m], "
        "bandwidth: 1 Gbit/s, latency: 20 ms}, {between: [m, b], bandwidth: 1 Gbit/s, latency: 20 ms}]}"
    )
    plan.write_text(text)
    refused = isthmus("train", plan, *TRUSTED, "--emulate", "--cluster", far, "--json")
    assert refused.code == 1 and "via here - there over HOST" in refused.err
    saved = json.loads(text)
    saved["plan"]["via"] = [{"between": ["here", "there"], "hosts": ["middle"]}]
    plan.write_text(json.dumps(saved))
    done = isthmus("train", plan, *TRUSTED, "--emulate", "--cluster", far, "--events", events, "--json")
    assert done.code == 0, done.err
    steps = [one for one in map(json.loads, events.read_text().splitlines()) if one["event"] == "step"]
    assert [one["loss"] for one in steps] == pytest.approx(plain_losses(), rel=1e-6)
    assert done.values["workers"] == [A, "there/CPU/0", "middle/CPU/0"]
    assert done.values["predicted_step_seconds"] > 0.08
    assert done.values["step_seconds"] > (0.08 if done.values["shaped"] else 0.0)


def test_an_emulated_world_gives_the_same_losses_over_its_own_links(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, 40 ms apart: a step goes there and back at least once."""
    monkeypatch.chdir(root)
    plan, events, far = written(tmp_path, two_stages()), tmp_path / "events.jsonl", tmp_path / "far.yaml"
    plan.write_text(plan.read_text().replace(B, "there/CPU/0"))
    far.write_text(
        "{kind: cluster, version: 1, name: desk, hosts: {here: {region: a, devices: {CPU: 1}}, "
        "there: {region: b, devices: {CPU: 1}}}, links: [{between: [a, b], bandwidth: 1 Gbit/s, latency: 40 ms}]}"
    )
    done = isthmus("train", plan, *TRUSTED, "--emulate", "--cluster", far, "--events", events, "--json")
    assert done.code == 0, done.err
    steps = [one for one in map(json.loads, events.read_text().splitlines()) if one["event"] == "step"]
    assert [one["loss"] for one in steps] == pytest.approx(plain_losses(), rel=1e-6)
    assert "emulated on this machine" in done.err and "Measuring" in done.err
    assert done.values["shaped"] == (unable() is None) and done.values["predicted_step_seconds"] > 0.08
    assert done.values["step_seconds"] > (0.08 if done.values["shaped"] else 0.0)


@pytest.mark.slow("a run of two processes for a line of text")
def test_times_of_this_machine_and_of_others_are_not_compared(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --emulate the prediction is for other devices: no ratio is shown."""
    monkeypatch.chdir(root)
    done = isthmus("train", written(tmp_path, two_stages()), *TRUSTED)
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("step ")]
    assert "the two times cannot be compared" in line and " x" not in line
    assert "predicted)" not in done.err and "learning rate 0.01," in done.err


def test_a_model_without_targets_is_refused_before_anything_starts(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    words = [word for word in TRUSTED if word not in ("--model", JOB.data)]
    plan = written(tmp_path, two_stages(msgspec.structs.replace(JOB, data="synthetic")))
    done = isthmus("train", plan, *(part for word in words for part in ("--model", word)))
    assert done.code == 1 and "no synthetic targets" in done.err and "Found an output of [2, " in done.err
    assert "data: package.module:function" in done.err and len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("loss: tests.deploy.models:mean_loss", "of a loss must add up over samples"),
        ("data: tests.deploy.models:no_pairs", "a sample is not a pair"),
    ],
)
def test_broken_contracts_are_noticed_before_anything_is_planned(
    isthmus: Isthmus, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, said: str
) -> None:
    monkeypatch.chdir(root)
    job = tmp_path / "job.yaml"
    given = {"data": f"data: {JOB.data}", field.partition(":")[0]: field}
    lines = ["kind: job", "version: 1", "name: j", f"model: {JOB.model}", f"batch: {BATCH}", *given.values()]
    job.write_text("\n".join(lines) + "\n")
    done = isthmus("train", job, "--cluster", "examples/clusters/demo.yaml", "--steps", 1)
    assert done.code == 1 and said in done.err and "docs/jobs.md" in done.err
    assert len(done.err.splitlines()) == 1, "nothing was planned, compiled or started"
    plan = two_stages(msgspec.structs.replace(JOB, **{field.partition(":")[0]: field.partition(": ")[2]}))
    trusted = [word for name in (JOB.model, *given.values()) for word in ("--model", name.partition(": ")[2] or name)]
    again = isthmus("train", written(tmp_path, plan), *trusted)
    assert again.code == 1 and said in again.err and len(again.err.splitlines()) == 1
