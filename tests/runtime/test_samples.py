"""Models that mix samples, on two unequal replicas: trained like plain torch, or refused before anything is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import isthmus
from isthmus.errors import ModelError, PlanError
from isthmus.model.graph import NORMS
from isthmus.model.job import Optimizer
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from tests.model.test_samples import STEPS, Composed
from tests.runtime.world import Cutting, Task, assert_same, pipeline_plan, reference, small_cluster, train
from tests.sample_models import APART, INPUTS, MIXING, UNFOLLOWED, SampleModel

CLUSTER = small_cluster(devices=2)
FIRST, SECOND = "h0/CPU/0", "h1/CPU/0"
BATCH, UPDATES = 8, 2
SGD = Optimizer(name="sgd", learning_rate=0.1)
EVERY = MIXING | UNFOLLOWED | APART


class Seeded:
    """Makes the same model each time."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> nn.Module:
        torch.manual_seed(5)
        return SampleModel(EVERY[self.name](), words=self.name.startswith("words_"))


def vectors(numbers: Sequence[int]) -> tuple[Example, Tensor]:
    rows = [torch.randn(INPUTS, generator=torch.Generator().manual_seed(n)) for n in numbers]
    return Example(args=(torch.stack(rows),)), torch.tensor([n % 3 for n in numbers])


def split_plan(pieces: Cutting, *, trust: bool = False) -> Plan:
    """Two replicas of 5 and 3 samples."""
    names, blocks = tuple(p.name for p in pieces.graph.parameters), pieces.graph.blocks
    replicas = (Replica(devices=(FIRST,), share=5), Replica(devices=(SECOND,), share=3))
    stage = Stage(first=blocks[0].name, last=blocks[-1].name, replicas=replicas)
    sync = Sync(bucket="all", parameters=names, how="ring", participants=(FIRST, SECOND))
    made = pipeline_plan(pieces, [stage], [sync], batch=BATCH, optimizer=SGD)
    return _trusting(made) if trust else made


def whole_plan(pieces: Cutting) -> Plan:
    blocks = pieces.graph.blocks
    stage = Stage(first=blocks[0].name, last=blocks[-1].name, replicas=(Replica(devices=(FIRST,), share=BATCH),))
    return pipeline_plan(pieces, [stage], batch=BATCH, optimizer=SGD)


def _trusting(plan: Plan) -> Plan:
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    job = msgspec.structs.replace(part.job, trust_independent_samples=True)
    return msgspec.structs.replace(plan, parts=(msgspec.structs.replace(part, job=job),))


def trained_or_refused(task: Task) -> str:
    """Trains on two unequal replicas; what it gives must be what plain torch gives."""
    try:
        pieces = task.pieces()
        plan = split_plan(pieces)
        found = train(task, plan, CLUSTER, pieces, UPDATES)
    except (ModelError, PlanError) as refused:
        return str(refused)
    assert_same(found, reference(task, plan, UPDATES), 1e-4)
    return ""


@pytest.mark.parametrize("name", EVERY)
def test_a_model_trains_like_plain_torch_or_is_refused(name: str) -> None:
    refused = trained_or_refused(Task(Seeded(name), vectors, cross_entropy))
    assert bool(refused) == (name not in APART)
    if refused and name in MIXING:
        assert "may mix samples, and the plan splits the batch into replicas" in refused
        assert "--trust-independent-samples" in refused


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3))
def test_compositions_train_like_plain_torch_or_are_refused(steps: list[str]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return Composed(steps)

    try:
        for size in (2, 3, 5, BATCH):
            make()(torch.randn(size, INPUTS))
    except (RuntimeError, IndexError):
        return  # makes no sense for every size of batch
    trained_or_refused(Task(make, vectors, squares))


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A loss for outputs of any width."""
    return (output - 0.1).square().mean(1).sum(), torch.tensor(float(len(target)))


@pytest.mark.parametrize("name", ["roll", "sorted by a feature", "capacity", "halves swapped", "divides by the size"])
def test_the_whole_batch_on_one_replica_trains_like_plain_torch(name: str) -> None:
    task = Task(Seeded(name), vectors, cross_entropy)
    pieces = task.pieces()
    assert_same(train(task, whole_plan(pieces), CLUSTER, pieces, UPDATES), reference(task, whole_plan(pieces), UPDATES))


def test_micro_batches_are_refused_too() -> None:
    pieces = Task(Seeded("roll"), vectors, cross_entropy).pieces()
    blocks = pieces.graph.blocks
    stage = Stage(first=blocks[0].name, last=blocks[-1].name, replicas=(Replica(devices=(FIRST,), share=4),))
    plan = pipeline_plan(pieces, [stage], batch=BATCH, micro_batches=2, optimizer=SGD)
    with pytest.raises(PlanError, match="splits the batch into micro-batches"):
        train(Task(Seeded("roll"), vectors, cross_entropy), plan, CLUSTER, pieces, UPDATES)


@pytest.mark.parametrize("name", ["roll", "mean of the batch", "adds the place", "sorted by a feature", "all pairs"])
def test_what_a_wrong_proof_would_let_through_is_measured_in_the_first_step(name: str) -> None:
    """The second line of defence: with all doubts struck out, the worker itself finds the difference."""
    task = Task(Seeded(name), vectors, cross_entropy)
    pieces = task.pieces()
    sure = tuple(
        msgspec.structs.replace(block, mixes_samples=tuple(m for m in block.mixes_samples if m in NORMS))
        for block in pieces.graph.blocks
    )
    graph = msgspec.structs.replace(pieces.graph, blocks=sure)
    pieces = pieces._replace(pieces=dataclasses.replace(pieces.pieces, graph=graph))
    with pytest.raises(ModelError, match=r"measured in the first step; nothing was updated"):
        train(task, split_plan(pieces), CLUSTER, pieces, UPDATES)


def test_who_trusts_is_believed() -> None:
    """The user answers for it: nothing is refused, and nothing is measured."""
    task = Task(Seeded("roll"), vectors, cross_entropy)
    pieces = task.pieces()
    found = train(task, split_plan(pieces, trust=True), CLUSTER, pieces, UPDATES)
    with pytest.raises(AssertionError):
        assert_same(found, reference(task, split_plan(pieces), UPDATES))


def rolled() -> tuple[nn.Module, Tensor]:
    """A model for `tests.runtime.test_samples:rolled`."""
    torch.manual_seed(0)
    return SampleModel(MIXING["roll"]()), torch.zeros(2, INPUTS)


def test_a_plan_that_is_found_keeps_the_batch_whole_unless_trusted(tmp_path: Path) -> None:
    spec = "tests.runtime.test_samples:rolled"
    found = isthmus.plan(spec, CLUSTER, batch=BATCH)
    (part,) = found.plan.parts
    assert isinstance(part, Pipeline)
    assert part.micro_batches == 1 and all(len(stage.replicas) == 1 for stage in part.stages)
    assert any("because samples may influence each other: roll (line " in note for note in found.notes)
    trusting = isthmus.plan(spec, CLUSTER, batch=BATCH, trust_independent_samples=True)
    (part,) = trusting.plan.parts
    assert isinstance(part, Pipeline) and part.job.trust_independent_samples
    assert any("the batch is split although samples may influence each other" in note for note in trusting.notes)
