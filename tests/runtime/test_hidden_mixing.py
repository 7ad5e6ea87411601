"""Mixing that no operation shows, on two replicas: trained like plain torch, or refused before anything is updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import isthmus
from isthmus.errors import DataError, ModelError
from isthmus.model.graph import NORMS
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.types import Plan, Replica, Stage, Sync
from isthmus.runtime.batch_statistics import unchanged
from isthmus.runtime.loss import CheckedLoss
from isthmus.runtime.worker_run import cast_module, check_hooks
from tests.runtime.test_samples import CLUSTER, FIRST, SECOND, SGD, UPDATES, trained_or_refused, vectors
from tests.runtime.world import Cutting, Task, assert_same, pipeline_plan, reference, train
from tests.sample_models import WIDTH, Body, SampleModel


class Own(nn.Module):
    """A body that torch.export is kept from following."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, h: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("not for export")
        return self.body(h)


class Normed(nn.Module):
    """A batch norm, and a body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm, self.body = nn.BatchNorm1d(WIDTH), body

    def forward(self, h: Tensor) -> Tensor:
        return self.body(self.norm(h))


class NormAndRelu(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input)) * 2


class MeanBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] - grads[0].mean(0)


class TripledBack(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return TripledBack.apply(x), in_dims[0]


BOUND, BOUND_TRIPLED = MeanBack.apply, TripledBack.apply


def task_of(body: Callable[[], Body]) -> Task:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return SampleModel(body())

    return Task(make, vectors, cross_entropy)


def two(pieces: Cutting, first: int = 5, second: int = 3) -> Plan:
    names, blocks = tuple(p.name for p in pieces.graph.parameters), pieces.graph.blocks
    replicas = (Replica(devices=(FIRST,), share=first), Replica(devices=(SECOND,), share=second))
    stage = Stage(first=blocks[0].name, last=blocks[-1].name, replicas=replicas)
    sync = Sync(bucket="all", parameters=names, how="ring", participants=(FIRST, SECOND))
    return pipeline_plan(pieces, [stage], [sync], batch=first + second, optimizer=SGD)


def sure(pieces: Cutting) -> Cutting:
    """With all doubts struck out: only the first step can find them."""
    blocks = tuple(
        msgspec.structs.replace(block, mixes_samples=tuple(m for m in block.mixes_samples if m in NORMS))
        for block in pieces.graph.blocks
    )
    graph = msgspec.structs.replace(pieces.graph, blocks=blocks)
    return pieces._replace(pieces=dataclasses.replace(pieces.pieces, graph=graph))


def check(task: Task, first: int = 5, second: int = 3) -> None:
    pieces = task.pieces()
    found = train(task, two(pieces, first, second), CLUSTER, pieces, UPDATES)
    assert_same(found, reference(task, two(pieces, first, second), UPDATES), 1e-4)


def refused_in_the_first_step(task: Task, first: int, second: int) -> str:
    pieces = sure(task.pieces())
    with pytest.raises(ModelError, match="measured in the first step") as caught:
        train(task, two(pieces, first, second), CLUSTER, pieces, UPDATES)
    return str(caught.value)


# -- item by item


def _less_the_mean(h: Tensor) -> Tensor:
    return h - h.mean(0)


@pytest.mark.parametrize(("first", "second"), [(5, 3), (1, 1)])
def test_blocks_with_batch_norm_and_single_samples_are_measured(first: int, second: int) -> None:
    refused_in_the_first_step(task_of(lambda: Normed(lambda h: h + h.sum(0))), first, second)


@pytest.mark.parametrize("shares", [(5, 3), (1, 2)])
def test_batch_norm_itself_is_accepted(shares: tuple[int, int]) -> None:
    check(task_of(lambda: Normed(torch.tanh)), *shares)
    check(task_of(lambda: Own(Normed(torch.tanh))), *shares)


def test_a_threshold_between_share_and_batch_is_found() -> None:
    task = task_of(lambda: Own(lambda h: _less_the_mean(h) if h.shape[0] > 30 else h))
    said = refused_in_the_first_step(task, 20, 12)
    assert "for 32 samples at once than for" in said


def test_a_capacity_between_share_and_batch_is_found() -> None:
    task = task_of(lambda: Own(lambda h: h * (torch.ones(len(h)).cumsum(0) <= 30)[:, None]))
    refused_in_the_first_step(task, 28, 12)


def _hooked(change: Callable[[Tensor], Tensor]) -> Body:
    def body(h: Tensor) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(change)
        return h

    return body


BACKWARD: dict[str, Body] = {
    "less the mean": _hooked(_less_the_mean),
    "by the norm": _hooked(lambda g: g / (g.norm() + 1e-3)),
    "function": MeanBack.apply,
}


@pytest.mark.parametrize("name", BACKWARD)
def test_mixing_in_backward_is_found(name: str) -> None:
    assert "gradients" in refused_in_the_first_step(task_of(lambda: Own(BACKWARD[name])), 5, 3)


def test_a_function_that_was_bound_before_the_export_keeps_its_gradients() -> None:
    """`own = Own.apply` in a module of the user's: the export must not take autograd's gradients for it."""
    assert "give other gradients" in trained_or_refused(task_of(lambda: BOUND))


def test_a_function_under_vmap_keeps_its_gradients() -> None:
    assert not trained_or_refused(task_of(lambda: lambda h: torch.vmap(BOUND_TRIPLED)(h)))


def test_a_hook_on_each_sample_is_accepted() -> None:
    check(task_of(lambda: Own(_hooked(lambda g: g * 3))))


def test_subclasses_of_batch_norm_keep_what_they_add() -> None:
    check(task_of(lambda: Own(NormAndRelu(WIDTH))))


class Ghost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.cat([self.norm(part) for part in h.chunk(2, 0)])


def test_a_norm_over_parts_of_the_batch_is_refused() -> None:
    assert "over other groups" in refused_in_the_first_step(task_of(lambda: Own(Ghost())), 5, 3)


def test_a_norm_that_is_called_as_a_function_is_refused() -> None:
    body = Own(lambda h: F.batch_norm(h, None, None, training=True))
    refused_in_the_first_step(task_of(lambda: body), 5, 3)


class Kept(nn.Module):
    """Its buffer is the mean of what it saw; nothing uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(h.mean(0), 0.1)
        return h


def test_a_buffer_of_the_batch_is_refused_by_name() -> None:
    assert "seen" in refused_in_the_first_step(task_of(lambda: Own(Kept())), 5, 3)


def test_a_buffer_written_through_a_view_is_put_back() -> None:
    graph = fx.Graph()
    x, kept = graph.placeholder("x"), graph.get_attr("kept")
    view = graph.call_function(torch.ops.aten.select.int, (kept, 0, 0))
    graph.call_function(torch.ops.aten.add_.Tensor, (view, 1))
    graph.output(x)
    module = fx.GraphModule({"kept": torch.zeros(2)}, graph)
    with unchanged(module):
        module(torch.ones(1))
        assert module.kept.sum() == 1
    assert module.kept.sum() == 0


def test_attributes_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, [torch.zeros(1)]

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen[0] += 1
            self.seen.append(x)
            return x

    module = Counting()
    with unchanged(module):
        module(torch.ones(1))
    assert module.calls == 0 and len(module.seen) == 1 and module.seen[0] == 0


class Normalised(nn.Module):
    """Its block gives nothing but rounding errors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        return F.instance_norm(h[:, None].repeat(1, 2, 8)).mean(2).repeat(1, 3) * self.scale


@pytest.mark.parametrize("wrapped", [Own, lambda body: body])
def test_rounding_errors_are_no_mixing(wrapped: Callable[[Body], Body]) -> None:
    check(task_of(lambda: wrapped(Normalised())))


# -- what a worker does before


class Turned(nn.Module):
    """Turns features by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.polar(torch.ones(WIDTH), torch.arange(WIDTH).float()))

    def forward(self, h: Tensor) -> Tensor:
        return torch.view_as_real(h * self.turn).sum(-1)


def test_complex_buffers_stay_complex() -> None:
    model = cast_module(SampleModel(Own(Turned())), torch.bfloat16)
    assert (
        model.get_buffer("body.body.turn").is_complex() and model.get_parameter("first.weight").dtype is torch.bfloat16
    )
    check(task_of(lambda: Own(Turned())))


def test_complex_parameters_are_refused() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"parameter weight: a trained parameter is complex.*view_as_complex"):
        cast_module(model, torch.float32)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(register: str) -> None:
    model = nn.Linear(2, 2)
    check_hooks(model, "")
    getattr(model.weight, register)(lambda g: None)
    with pytest.raises(ModelError, match=r"parameter weight: a hook is registered on a parameter.*clip"):
        check_hooks(model, "the plan splits the batch")
    with pytest.raises(ModelError, match="each worker trains a copy"):
        isthmus.join(two(task_of(lambda: torch.tanh).pieces()), model, cross_entropy, cluster=CLUSTER)


# -- losses


def _mined(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    losses = F.cross_entropy(output, target, reduction="none")
    return losses.topk(min(len(losses), 3)).values.sum(), len(losses)


def _pairs(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy(output, target)
    same = (target[:, None] == target[None]).triu(1)
    return total + ((output @ output.t()) * same).sum(), count


def _penalty(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy(output, target)
    return total + output.mean(0).square().sum() * 0.05, count


def _aux(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy(output[0], target)
    return total + output[1], count


def _scaled(output: tuple[Tensor, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = cross_entropy(output[0], target)
    return total + output[1] * count, count


OUTPUT, TARGET = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)), torch.arange(7) % 3


@pytest.mark.parametrize(
    ("loss", "output"),
    [(_mined, OUTPUT), (_pairs, OUTPUT), (_penalty, OUTPUT), (_aux, (OUTPUT, torch.tensor(0.5)))],
)
def test_losses_that_do_not_add_up_are_refused(loss: Callable[[Any, Any], Any], output: Any) -> None:
    with pytest.raises(DataError, match=r"the sum of a loss must add up over samples.*multiplied by the count"):
        CheckedLoss(loss, "here")(output, TARGET)


@pytest.mark.parametrize(
    ("loss", "output"),
    [
        (cross_entropy, OUTPUT),
        (cross_entropy, OUTPUT.bfloat16()),
        (_scaled, (OUTPUT, torch.tensor(0.5))),
        (lambda output, target: cross_entropy(output.t(), target), OUTPUT.t()),
    ],
)
def test_losses_that_add_up_are_accepted(loss: Callable[[Any, Any], Any], output: Any) -> None:
    total, count = CheckedLoss(loss, "here")(output, TARGET)
    assert total.ndim == 0 and count == 7


def _hardest(most: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The loss of the hardest samples, which all are while there are few."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each = F.cross_entropy(output, target, reduction="none")
        return each.topk(min(most, len(each))).values.sum(), torch.tensor(float(min(most, len(each))))

    return loss


def _weighted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of samples that add up to 1 over the batch."""
    weights = output.detach().abs().sum(1)
    return (weights / weights.sum() * F.cross_entropy(output, target, reduction="none")).sum(), torch.tensor(1.0)


@pytest.mark.parametrize(("loss", "samples"), [(_hardest(10), 7), (_hardest(1), 1), (_weighted, 1)])
def test_losses_that_do_not_add_up_over_a_whole_micro_batch_are_refused(
    loss: Callable[[Any, Any], Any], samples: int
) -> None:
    with pytest.raises(DataError, match=r"of a loss must add up over samples.*copies"):
        CheckedLoss(loss, "here", micro_batch=16)(OUTPUT[:samples], TARGET[:samples])


@pytest.mark.parametrize("samples", [1, 7])
def test_losses_that_add_up_are_accepted_for_any_part_of_a_micro_batch(samples: int) -> None:
    CheckedLoss(cross_entropy, "here", micro_batch=16)(OUTPUT[:samples], TARGET[:samples])
