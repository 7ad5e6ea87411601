"""Real processes: whatever happens to them, the run ends with the right answer or one error, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open

import isthmus
from isthmus.deploy.engine import CheckpointKept, CheckpointPassedOver, Interrupt, Notice, Resumed
from isthmus.deploy.local import LocalEngine
from isthmus.errors import CheckpointError, PlanError, RunError
from isthmus.model.job import Optimizer
from isthmus.plan.file import PlanFile
from isthmus.runtime.checkpoint.manifest import digest_of
from isthmus.runtime.checkpoint.reading import latest, open_checkpoint
from isthmus.runtime.protocol import Ready, Stepped
from tests.deploy.jobs import (
    DATA,
    JOB,
    MODEL,
    A,
    B,
    alive,
    children,
    graph,
    plain_losses,
    two_replicas,
    two_stages,
    written,
)
from tests.quiet import PATIENCE

CODE = (MODEL, DATA)


@pytest.fixture(autouse=True)
def at_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the tests' code from there."""
    monkeypatch.chdir(root)


def rewrite(manifest: Path, values: dict[str, Any]) -> None:
    """A manifest that another run would have written."""
    manifest.write_text(json.dumps(values | {"digest": digest_of(values)}))


def test_killed_then_resumed_under_another_plan_then_interrupted(tmp_path: Path) -> None:
    """kill -9 of a worker of two replicas; two stages go on from what was saved, until Ctrl-C saves and stops them."""
    workers: dict[int, str] = {}
    losses: dict[int, float | None] = {}
    killed = 0.0

    def kill(notice: Notice) -> None:
        nonlocal killed
        if isinstance(news := notice.news, Stepped):
            losses[news.step] = news.loss
        if isinstance(news, CheckpointKept) and not killed:
            workers.update(children(os.getpid()))
            killed = time.monotonic()
            os.kill(next(process for process, device in workers.items() if device == A), signal.SIGKILL)

    with pytest.raises(RunError, match=r"killed \(SIGKILL\)") as caught:
        isthmus.train(two_replicas(), steps=100_000, checkpoint=tmp_path, every=2, trusted=CODE, listen=kill)
    assert time.monotonic() - killed < PATIENCE
    assert caught.value.where is not None and caught.value.where.startswith(f"worker {A}, stage 0, step ")
    assert set(workers.values()) == {A, B} and not any(map(alive, workers))

    def interrupt(notice: Notice) -> None:
        if isinstance(news := notice.news, Stepped):
            losses[news.step] = news.loss
            if len(workers) == 2:
                workers.update(children(os.getpid()))
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(CheckpointError, match="--resume"):
        isthmus.train(two_stages(), checkpoint=tmp_path, trusted=CODE)
    begun = latest(tmp_path)
    second = isthmus.train(
        two_stages(), steps=100_000, checkpoint=tmp_path, resume=True, trusted=CODE, listen=interrupt
    )
    assert second.interrupted and begun is not None
    assert second.steps == len(second.losses) == second.last_step - int(begun.name.removeprefix("step-"))
    assert second.checkpoint is not None and second.checkpoint.name == f"step-{second.last_step:08}" > begun.name
    assert len(workers) == 4 and not any(map(alive, workers))
    close = 1e-5 * max(1.0, second.last_step / 20)  # how far it came before the signals is a matter of timing
    assert [losses[step] for step in range(second.last_step)] == pytest.approx(
        plain_losses(second.last_step), rel=close
    )
    third = isthmus.train(two_stages(), steps=second.last_step, checkpoint=tmp_path, resume=True, trusted=CODE)
    assert third.last_step == second.last_step and third.steps == 0 and third.losses == ()
    assert third.checkpoint == second.checkpoint


@pytest.mark.slow("a run of two processes; `test_join` has a step that fails in the fast set")
def test_a_worker_that_raises() -> None:
    job = msgspec.structs.replace(JOB, loss="tests.deploy.models:failing_loss")
    seen: dict[int, str] = {}
    said: list[Notice] = []

    def listen(notice: Notice) -> None:
        said.append(notice)
        if isinstance(notice.news, Ready):
            seen.update(children(os.getpid()))

    with pytest.raises(RunError, match="ValueError: the loss has had enough") as caught:
        isthmus.train(two_stages(job), trusted=(*CODE, job.loss), listen=listen)
    assert caught.value.where == f"worker {B}, stage 1, step 3"
    assert {notice.worker for notice in said if "one more loss" in str(notice.news)} == {B}
    assert set(seen.values()) == {A, B} and not any(map(alive, seen))


def test_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    """Everything that differs is named."""
    with isthmus.join(two_stages(), trusted=CODE) as run:
        tokens = torch.zeros(4, 8, dtype=torch.long)
        run.step((tokens, tokens))
        manifest = run.save(tmp_path) / "manifest.json"
    saved = json.loads(manifest.read_text())
    for changes, found in (
        ({"loss": "own.losses:focal"}, "loss own.losses:focal"),
        ({"sequence": 16, "sparsity": 0.5}, "sequence 16, sparsity 0.5"),
    ):
        rewrite(manifest, saved | {"job": saved["job"] | changes})
        with pytest.raises(CheckpointError, match=f"another {', '.join(changes)}. Found") as caught:
            isthmus.train(two_stages(), checkpoint=tmp_path, resume=True, trusted=CODE)
        assert caught.value.found == found


def test_a_folder_with_a_damaged_checkpoint_is_not_begun_anew(tmp_path: Path) -> None:
    part = tmp_path / "step-00000004" / "here+CPU+0.safetensors"
    part.parent.mkdir()
    part.write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="there is a checkpoint already"):
        isthmus.train(two_stages(), steps=1, checkpoint=tmp_path, trusted=CODE)
    assert part.read_bytes() == b"weights"


@pytest.mark.slow("two runs; `test_join` passes over a damaged checkpoint in the fast set")
def test_a_changed_float_is_found_and_the_checkpoint_before_it_used(tmp_path: Path) -> None:
    """It was trained on, with a loss of 1e28, and saved over good checkpoints."""
    isthmus.train(two_replicas(), steps=4, checkpoint=tmp_path, every=2, trusted=CODE)
    damaged = tmp_path / "step-00000004"
    part = next(damaged.glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-4:] = torch.tensor([1e28]).numpy().tobytes()
    part.write_bytes(data)
    heard: list[object] = []
    result = isthmus.train(
        two_stages(), steps=6, checkpoint=tmp_path, resume=True, trusted=CODE, listen=lambda n: heard.append(n.news)
    )
    passed, resumed = (next(n for n in heard if isinstance(n, kind)) for kind in (CheckpointPassedOver, Resumed))
    assert passed.path == damaged and str(part) in passed.why and "changed after it was saved" in passed.why
    assert passed.aside == tmp_path / "step-00000004.damaged" and passed.aside.is_dir()
    assert resumed == Resumed(step=2, path=tmp_path / "step-00000002")
    assert result.losses == pytest.approx(plain_losses(6)[2:], rel=1e-5)
    assert {path.name for path in tmp_path.glob("step-*")} == {
        "step-00000002", "step-00000004.damaged", "step-00000006"
    }  # fmt: skip


@pytest.mark.slow("two runs of two processes; `test_folder_lock` holds the lock in the fast set")
def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second is refused before it touches anything; the first goes on to its end."""
    refused: list[CheckpointError] = []

    def second(notice: Notice) -> None:
        if isinstance(notice.news, Stepped) and not refused:
            with pytest.raises(CheckpointError, match="another run is using this folder") as caught:
                isthmus.train(two_stages(), checkpoint=tmp_path, resume=True, trusted=CODE)
            refused.append(caught.value)

    result = isthmus.train(two_stages(), steps=2, checkpoint=tmp_path, trusted=CODE, listen=second)
    assert refused[0].found is not None and f"process {os.getpid()} on host " in refused[0].found
    assert result.checkpoint is not None
    runs = {json.loads((result.checkpoint / "manifest.json").read_text())["run"]}
    for part in result.checkpoint.glob("*.safetensors"):
        with safe_open(part, framework="pt") as file:
            runs.add(file.metadata()["run"])
    assert len(runs) == 1 and len(runs.pop()) == 16


@pytest.mark.slow("three runs of two processes")
def test_another_precision_and_a_changed_model_are_noted(tmp_path: Path) -> None:
    """A run in fp16 saved the factor on its loss too: a run in fp32 has no use for it, and must not be led astray."""
    first = isthmus.train(two_stages(), steps=2, checkpoint=tmp_path, trusted=CODE)
    assert first.checkpoint is not None
    manifest = first.checkpoint / "manifest.json"
    changes = {"precision": "fp16", "loss_scale": {"value": 2.0**40, "steps": 7}}
    rewrite(manifest, json.loads(manifest.read_text()) | changes)
    job = msgspec.structs.replace(JOB, model="tests.deploy.models:changed_gpt")
    heard: list[Resumed] = []

    def listen(notice: Notice) -> None:
        if isinstance(notice.news, Resumed):
            heard.append(notice.news)

    same = isthmus.train(two_stages(), steps=4, checkpoint=tmp_path, resume=True, trusted=CODE, listen=listen)
    assert same.losses == pytest.approx(plain_losses(4)[2:], rel=1e-5)
    (note,) = heard[0].notes
    assert "saved by a run in fp16, and this run computes in fp32" in note
    code = (job.model, DATA)
    isthmus.train(two_stages(job), steps=6, checkpoint=tmp_path, resume=True, trusted=code, listen=listen)
    (note,) = heard[1].notes
    assert "the model's code has changed since" in note and graph().digest[:12] in note
    assert graph(job.model).digest[:12] in note and graph(job.model).parameters == graph().parameters


@pytest.mark.slow("four runs of two processes")
@pytest.mark.parametrize(("before", "now", "said"), [(0.9, 0.0, "it is dropped"), (0.0, 0.9, "it begins at 0")])
def test_momentum_that_comes_or_goes_is_noted_and_saved_again(
    tmp_path: Path, before: float, now: float, said: str
) -> None:
    """A run without momentum loaded it all the same, and could not save what belonged to no optimizer."""

    def plan(momentum: float) -> PlanFile:
        optimizer = Optimizer(name="sgd", learning_rate=1e-2, momentum=momentum)
        return two_stages(msgspec.structs.replace(JOB, optimizer=optimizer))

    heard: list[Resumed] = []

    def listen(notice: Notice) -> None:
        if isinstance(notice.news, Resumed):
            heard.append(notice.news)

    isthmus.train(plan(before), steps=1, checkpoint=tmp_path, trusted=CODE)
    result = isthmus.train(plan(now), steps=2, checkpoint=tmp_path, resume=True, trusted=CODE, listen=listen)
    assert said in heard[0].notes[0] and result.checkpoint is not None
    checkpoint = open_checkpoint(result.checkpoint, verify=True)
    assert bool(checkpoint.names("momentum")) == bool(now)


@pytest.mark.slow("a run of two processes; `test_local` has a silent one in the fast set")
def test_a_worker_that_is_stopped_ends_the_run_by_name() -> None:
    """The others wait for it for ever, and so did the run."""
    workers: dict[int, str] = {}

    def stop(notice: Notice) -> None:
        if isinstance(notice.news, Stepped) and not workers:
            workers.update(children(os.getpid()))
            os.kill(next(process for process, device in workers.items() if device == B), signal.SIGSTOP)

    with pytest.raises(RunError, match=r"gave no sign of life for \d+ s, since \d\d:\d\d:\d\d") as caught:
        isthmus.train(two_stages(), steps=100_000, trusted=CODE, engine=LocalEngine(silence=5.0), listen=stop)
    assert caught.value.where is not None and caught.value.where.startswith(f"worker {B}, stage 1, step ")
    assert caught.value.found is not None and "was stopped by a signal" in caught.value.found
    assert A not in caught.value.found and set(workers.values()) == {A, B} and not any(map(alive, workers))


@pytest.mark.slow("computes for seconds on purpose")
def test_a_worker_that_computes_for_long_is_not_silent() -> None:
    """Its block takes longer than a worker may be silent; the others wait for it."""
    job = msgspec.structs.replace(JOB, loss="tests.deploy.models:slow_loss")
    result = isthmus.train(two_stages(job), steps=1, trusted=(*CODE, job.loss), engine=LocalEngine(silence=2.0))
    assert result.steps == 1 and result.seconds[0] > 4.0


@pytest.mark.slow("a run of two processes; the fast set interrupts one once")
def test_interrupted_twice_while_a_worker_is_stopped() -> None:
    workers: dict[int, str] = {}
    began = 0.0

    def stop(notice: Notice) -> None:
        nonlocal began
        if isinstance(notice.news, Stepped) and not workers:
            workers.update(children(os.getpid()))
            os.kill(min(workers), signal.SIGSTOP)
            began = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)
        if isinstance(notice.news, Interrupt):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        isthmus.train(two_stages(), steps=100_000, trusted=CODE, listen=stop)
    assert time.monotonic() - began < PATIENCE and len(workers) == 2 and not any(map(alive, workers))


@pytest.mark.slow("two runs of two processes; `test_local` tests the guard that ends them")
@pytest.mark.parametrize("stopped", [False, True])
def test_a_parent_that_is_killed(tmp_path: Path, stopped: bool) -> None:
    """Nobody is there to end the workers: they end themselves; one that is stopped cannot, and is ended."""
    plan = written(tmp_path, two_stages())
    code = (
        "import isthmus\n"
        "listen = lambda notice: print(notice, flush=True)\n"
        f"isthmus.train({str(plan)!r}, steps=100_000, trusted={CODE!r}, listen=listen)"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    told = {**os.environ, "TMPDIR": str(folder)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=told)
    assert parent.stdout is not None
    assert any("Stepped(step=1" in line for line in parent.stdout)
    workers = children(parent.pid)
    assert set(workers.values()) == {A, B} and all(map(alive, workers))
    if stopped:
        os.kill(min(workers), signal.SIGSTOP)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE
    while (any(map(alive, workers)) or list(folder.glob("isthmus-*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers)) and not list(folder.glob("isthmus-*"))


def test_code_that_a_plan_names_must_be_named_again() -> None:
    with pytest.raises(PlanError, match="does not run code just because") as caught:
        isthmus.train(two_stages(), trusted=(MODEL,))
    assert caught.value.found == DATA and caught.value.rule == "trust"
    with pytest.raises(PlanError, match="does not run code just because") as caught:
        isthmus.train(two_stages())
    assert caught.value.found == f"{MODEL}, {DATA}"
    assert caught.value.next is not None and f'trusted=["{MODEL}", "{DATA}"]' in caught.value.next
