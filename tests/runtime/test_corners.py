"""Corners of models and plans in which a runtime goes wrong in silence, hangs or crashes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import ModelError, PlanError
from isthmus.model.job import Optimizer
from isthmus.model.zoo.synthetic import cross_entropy
from tests.runtime.tasks import TASKS, Chain, Layer, pieces_of, seeded, vectors
from tests.runtime.test_plans import SGD, check_same, named, stage, sync
from tests.runtime.world import Task

HALVES = {"batch": 12, "micro_batches": 2, "optimizer": SGD}


class Features(nn.Module):
    """Gives its logits, and the features after some layers beside them."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.inp, self.out, self.after = nn.Linear(8, 16), nn.Linear(16, 5), after
        self.h = nn.ModuleList(Layer(16) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [self.inp(x)]
        for layer in self.h:
            values.append(layer(values[-1]))
        return self.out(values[-1]), values[self.after]


class Skips(nn.Module):
    """Twelve tensors over one boundary."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(depth))
        self.up = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(depth))
        self.out = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            seen.append(x)
        for layer, skip in zip(self.up, reversed(seen), strict=True):
            x = torch.tanh(layer(x)) + skip
        out: Tensor = self.out(x.mean((2, 3)))
        return out


class Table(nn.Module):
    """A view of a parameter is used far from where it is held."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(8, 16), nn.Linear(16, 5)
        self.table = nn.Parameter(torch.linspace(-1, 1, 16))
        self.h = nn.ModuleList(Layer(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        row = self.table[:16].view(1, 16)
        x = self.inp(x) + row
        for layer in self.h:
            x = layer(x) + row
        out: Tensor = self.out(x)
        return out


def first_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    return cross_entropy(output[0], target)


def both_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = first_loss(output, target)
    return total + output[1].square().mean(1).sum(), count


def weighted_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Counts below one."""
    total, count = cross_entropy(output, target)
    return total * 0.01, count * 0.01


TASKS |= {
    "last-features": Task(seeded(lambda: Features(4)), vectors((8,)), first_loss),
    "last-features-used": Task(seeded(lambda: Features(4)), vectors((8,)), both_loss),
    "early-features": Task(seeded(lambda: Features(1)), vectors((8,)), first_loss),
    "early-features-used": Task(seeded(lambda: Features(1)), vectors((8,)), both_loss),
    "skips": Task(seeded(Skips), vectors((2, 4, 4)), cross_entropy),
    "table": Task(seeded(Table), vectors((8,)), cross_entropy),
    "weighted": Task(seeded(Chain), vectors((8,)), weighted_loss),
}


@pytest.mark.parametrize("task", ["last-features", "last-features-used", "early-features", "weighted"])
def test_several_outputs_and_small_counts(task: str, steps: int) -> None:
    last = len(pieces_of(task).graph.blocks) - 1
    check_same(task, named(task, [stage(f"0-{last - 1} a6"), stage(f"{last}-z b6")], [], **HALVES), steps)


def test_a_loss_that_needs_what_another_stage_made_says_so() -> None:
    plan = named("early-features-used", [stage("0-3 a6"), stage("4-z b6")], [], **HALVES)
    with pytest.raises(ModelError, match="made in an earlier stage"):
        check_same("early-features-used", plan, steps=1)


def test_many_tensors_over_one_boundary(steps: int) -> None:
    half = len(pieces_of("skips").graph.blocks) // 2
    check_same("skips", named("skips", [stage(f"0-{half - 1} a6"), stage(f"{half}-z b6")], [], **HALVES), steps)


def test_a_view_of_sharded_weights_leaves_its_stage(steps: int) -> None:
    stages = [stage("0-0 a2 b4", state="sharded-all"), stage("1-z a2 b4", state="sharded-all")]
    steady = {**HALVES, "optimizer": Optimizer(name="sgd", learning_rate=0.02)}  # at ten times that its loss explodes
    check_same("table", named("table", stages, [sync("ring 0-0 ab"), sync("ring 1-z ab")], **steady), steps)


def test_batch_statistics_of_pipelines_of_different_depth(steps: int) -> None:
    stages, syncs = [stage("0-1 a3 b5"), stage("2-z a3 c5")], [sync("ring 0-1 ab"), sync("ring 2-z ac")]
    others = {"batch": 16, "micro_batches": 2, "optimizer": SGD}
    check_same("normed", named("normed", stages, syncs, schedule="fill-drain", **others), steps)
    with pytest.raises(PlanError, match="would wait for each other"):
        check_same("normed", named("normed", stages, syncs, schedule="1f1b", **others), steps=1)


def test_a_duplicate_last_stage_that_runs_as_one_with_another(steps: int) -> None:
    stages = [stage("0-2 b6"), stage("3-z a6 b6")]
    check_same("chain", named("chain", stages, [sync("duplicate 3-z ab")], **HALVES), steps)


def test_gradients_inside_a_run_are_not_asked_of_it() -> None:
    stages = [stage("0-2 a6 b6"), stage("3-z b6 c6")]
    plan = named("chain", stages, [sync("duplicate 0-2 ab"), sync("duplicate 3-z bc")], **HALVES)
    with pytest.raises(PlanError, match="counted twice"):
        check_same("chain", plan, steps=1)


@pytest.mark.parametrize("between", [None, "2-3 c6"])
def test_a_sharded_bucket_of_two_stages(between: str | None, steps: int) -> None:
    """They run as one unit after the other, or as two runs."""
    first, last = ("0-1", "4-z") if between else ("0-3", "4-z")
    stages = [stage(f"{first} a2 b4", state="sharded-all"), stage(f"{last} a2 b4", state="sharded-all")]
    middle = [stage(between)] if between else []
    syncs = [sync(f"ring {first},{last} ab")]
    check_same("chain", named("chain", [stages[0], *middle, stages[1]], syncs, **HALVES), steps)


def test_a_bucket_may_have_any_name(steps: int) -> None:
    tie = msgspec.structs.replace(sync("ring transformer.wte.weight ab"), bucket="stage 0")
    check_same("gpt", named("gpt", [stage("0-3 a6"), stage("4-z b6")], [tie], **HALVES), steps)


def test_masks_of_tensor_groups_and_factors(steps: int) -> None:
    others = {**HALVES, "sparsity": 0.5}
    check_same("chain", named("chain", [stage("0-z ab6", kept=0.5)], [], **others), steps)
    factors = sync("factors h.0.up.weight,h.2.down.weight ab")
    stages = [stage("0-z a2 b4", kept=0.5)]
    check_same("chain", named("chain", stages, [factors, sync("ring 0-z ab")], **others), steps)


def test_sharded_state_over_unequal_groups_is_refused() -> None:
    stages = [stage("0-3 a2 b4", state="sharded-optimizer"), stage("4-z cd6")]
    syncs = [sync("ring transformer.wte.weight abc"), sync("ring 0-3 ab")]
    with pytest.raises(PlanError, match="different sizes"):
        check_same("gpt", named("gpt", stages, syncs, **HALVES), steps=1)


def test_masks_leave_out_what_is_no_linear_weight(steps: int) -> None:
    """Tables of tokens and places, and a head that shares one, are not pruned."""
    others = {**HALVES, "sparsity": 0.75}
    stages = [stage("0-3 a6", kept=0.25), stage("4-z b6", kept=0.25)]
    check_same("gpt", named("gpt", stages, [sync("ring transformer.wte.weight ab")], **others), steps)
