"""A checkpoint saved under one plan goes on under another, with the losses of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.model.job import Optimizer
from isthmus.plan.types import Plan
from isthmus.runtime.checkpoint.reading import latest, open_checkpoint
from tests.runtime.tasks import TASKS, pieces_of
from tests.runtime.test_plans import CLUSTER, SGD, grouped, named, stage, sync
from tests.runtime.world import Result, assert_same, reference, train

CLIPPED = Optimizer(name="adamw", learning_rate=1e-2, clip=0.5)


def gpt(kind: str, optimizer: Optimizer) -> Plan:
    """The same job as one of several plans."""
    others = {"batch": 12, "micro_batches": 2, "optimizer": optimizer}
    tie = "transformer.wte.weight"
    if kind == "alone":
        return named("gpt", [stage("0-z a6")], [], **others)
    if kind == "grouped":
        return grouped("gpt", optimizer=optimizer)
    if kind == "sharded":
        return named("gpt", [stage("0-z a2 b4", state="sharded-all")], [sync("ring 0-z ab")], **others)
    if kind == "stages":
        stages = [stage("0-2 a2 b4", state="sharded-optimizer"), stage("3-z c6", recompute=True)]
        return named("gpt", stages, [sync(f"ring {tie} abc"), sync("ring 0-2 ab")], **others)
    raise ValueError(kind)


PAIRS = [("alone", "stages"), ("stages", "sharded"), ("sharded", "grouped"), ("grouped", "alone")]


@pytest.mark.parametrize(
    "before,after",
    [*PAIRS[:2], *(pytest.param(*pair, marks=pytest.mark.slow("traces tensor groups")) for pair in PAIRS[2:])],
)
def test_another_plan_goes_on_where_one_stopped(before: str, after: str, tmp_path: Path) -> None:
    optimizer = SGD if "grouped" in (before, after) else CLIPPED
    first, second = gpt(before, optimizer), gpt(after, optimizer)
    begun = train(TASKS["gpt"], first, CLUSTER, pieces_of("gpt"), 2, folder=tmp_path)
    ended = train(TASKS["gpt"], second, CLUSTER, pieces_of("gpt"), 4, resume=latest(tmp_path))
    whole = reference(TASKS["gpt"], first, 4)
    assert_same(Result(begun.losses + ended.losses, ended.weights), whole, 2e-5)


def test_batch_statistics_go_on(tmp_path: Path) -> None:
    one = named("normed", [stage("0-1 a3 b5"), stage("2-z c8")], [sync("ring 0-1 ab")], batch=8, optimizer=SGD)
    other = named("normed", [stage("0-0 a8"), stage("1-z b8")], [], batch=8, optimizer=SGD)
    train(TASKS["normed"], one, CLUSTER, pieces_of("normed"), 2, folder=tmp_path / "one")
    train(TASKS["normed"], other, CLUSTER, pieces_of("normed"), 2, folder=tmp_path / "other")
    once, again = (open_statistics(tmp_path / name) for name in ("one", "other"))
    assert once.keys() == again.keys() and once
    for name, values in once.items():
        assert values == pytest.approx(again[name], rel=1e-4, abs=1e-6)


def open_statistics(folder: Path) -> dict[str, list[float]]:
    path = latest(folder)
    assert path is not None
    checkpoint = open_checkpoint(path, verify=True)
    return {name: checkpoint.read(name, "buffer").float().tolist() for name in checkpoint.names("buffer")}
