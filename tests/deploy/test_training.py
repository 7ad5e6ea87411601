"""Real processes: whatever happens to them, the run ends with the right answer or one error, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch

import isthmus
from isthmus.deploy.engine import Kept, Notice
from isthmus.errors import CheckpointError, PlanError, RunError
from isthmus.runtime.checkpoint import latest
from isthmus.runtime.protocol import Ready, Stepped
from tests.deploy.jobs import (
    DATA,
    JOB,
    MODEL,
    A,
    B,
    alive,
    children,
    plain_losses,
    two_replicas,
    two_stages,
    written,
)

CODE = (MODEL, DATA)


@pytest.fixture(autouse=True)
def at_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the tests' code from there."""
    monkeypatch.chdir(root)


def test_killed_then_resumed_under_another_plan_then_interrupted(tmp_path: Path) -> None:
    """kill -9 of a worker of two replicas; two stages go on from what was saved, until Ctrl-C saves and stops them."""
    workers: dict[int, str] = {}
    losses: dict[int, float | None] = {}
    killed = 0.0

    def kill(notice: Notice) -> None:
        nonlocal killed
        if isinstance(news := notice.news, Stepped):
            losses[news.step] = news.loss
        if isinstance(news, Kept) and not killed:
            workers.update(children(os.getpid()))
            killed = time.monotonic()
            os.kill(next(process for process, device in workers.items() if device == A), signal.SIGKILL)

    with pytest.raises(RunError, match=r"killed \(SIGKILL\)") as caught:
        isthmus.train(two_replicas(), steps=100_000, checkpoint=tmp_path, every=2, trusted=CODE, listen=kill)
    assert time.monotonic() - killed < 5.0
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
        manifest.write_text(json.dumps(saved | {"job": saved["job"] | changes}))
        with pytest.raises(CheckpointError, match=f"another {', '.join(changes)}. Found") as caught:
            isthmus.train(two_stages(), checkpoint=tmp_path, resume=True, trusted=CODE)
        assert caught.value.found == found


def test_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Nobody is there to end the workers: they end themselves."""
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
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, workers)) and not list(folder.glob("isthmus-*"))


def test_code_that_a_plan_names_must_be_named_again() -> None:
    with pytest.raises(PlanError, match="no reason to run code") as caught:
        isthmus.train(two_stages(), trusted=(MODEL,))
    assert caught.value.found == DATA and caught.value.rule == "trust"
    with pytest.raises(PlanError, match="no reason to run code") as caught:
        isthmus.train(two_stages())
    assert caught.value.found == f"{MODEL}, {DATA}"
    assert caught.value.next is not None and f"--model {MODEL} --model {DATA}" in caught.value.next
