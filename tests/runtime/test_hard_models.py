"""Models that capture used to die of or to train wrongly: each trains on two unequal replicas as in plain torch.

The judge is a loop of `backward` and `step` over the model as it is: re-entrant checkpoints refuse anything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isthmus.errors import ModelError, PlanError
from isthmus.model.job import Optimizer
from isthmus.model.runnable_blocks import cut
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.types import Plan, Replica, Stage, Sync
from isthmus.planners.notes import unreached
from tests.runtime.tasks import seeded, vectors
from tests.runtime.world import Cutting, Result, Task, assert_same, pipeline_plan, small_cluster, train

FIRST, SECOND = "h0/CPU/0", "h0/CPU/1"
BATCH, STEPS = 6, 3
ADAMW = Optimizer(name="adamw", learning_rate=0.05, weight_decay=0.1)


class Recurrent(nn.Module):
    """A recurrent layer between two products."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.a, self.r, self.c = nn.Linear(4, 8), kind(8, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.r(self.a(x.view(-1, 2, 4)))[0][:, -1])
        return out


class Three(nn.Module):
    """Three layers, put together by a function."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.how = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 5), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


class Tripled(torch.autograd.Function):
    """Rounds, and passes three times the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


def in_the_middle(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    with torch.no_grad():
        gate = torch.sigmoid(model.b(h)).mean(1, keepdim=True)
    return model.c(h * gate + model.b(h))  # type: ignore[no-any-return]


def written_into(model: Any, x: Tensor) -> Tensor:
    h = model.b(model.a(x))
    with torch.no_grad():
        h.mul_(0.5)
    return model.c(torch.relu(h))  # type: ignore[no-any-return]


def switched_on_again(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    with torch.no_grad():
        off = model.b(h)
        with torch.enable_grad():
            on = model.b(h)
    return model.c(on + off)  # type: ignore[no-any-return]


def half_precision(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        g = torch.relu(model.b(h)).float() + h
    return model.c(g)  # type: ignore[no-any-return]


def in_between(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model.a(x)
        with torch.autocast("cpu", enabled=False):
            g = model.b(h.float())
        return model.c(g + h).float()  # type: ignore[no-any-return]


def full_precision(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    with torch.autocast("cpu", enabled=False):
        g = model.b(h)
    return model.c(torch.relu(g) + h)  # type: ignore[no-any-return]


def checkpointed(model: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda y: torch.relu(model.b(y)), model.a(x), use_reentrant=True)
    return model.c(h)  # type: ignore[no-any-return]


def checkpointed_first(model: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda y: torch.relu(model.a(y)), x, use_reentrant=True)
    return model.c(model.b(h))  # type: ignore[no-any-return]


def first_without_gradients(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = model.a(x)
    return model.c(model.b(h))  # type: ignore[no-any-return]


def written_parts(model: Any, x: Tensor) -> Tensor:
    """The result is a tensor of zeros by name; parameters reach it by writes only."""
    out = x.new_zeros(x.shape[0], 5)
    out[:, :2] = model.c(model.b(model.a(x)))[:, :2]
    out[:, 2:].copy_(model.c(model.a(x))[:, 2:])
    return out


def own_backward(model: Any, x: Tensor) -> Tensor:
    return model.c(Tripled.apply(model.b(model.a(x))))  # type: ignore[no-any-return, no-untyped-call]


def hooked(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    return model.c(model.b(h))  # type: ignore[no-any-return]


class Clipped(torch.autograd.Function):
    """Clips gradients, and only large ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-10, 10)


def clipped(model: Any, x: Tensor) -> Tensor:
    return model.c(Clipped.apply(model.b(model.a(x)) * 1e-3) * 1e3)  # type: ignore[no-any-return, no-untyped-call]


def hooked_on_the_graph(model: Any, x: Tensor) -> Tensor:
    h = model.a(x)
    if h.grad_fn is not None:
        h.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 3 for g in inputs))
    return model.c(model.b(h))  # type: ignore[no-any-return]


def in_groups(model: Any, x: Tensor) -> Tensor:
    """Written by an operation that gives nothing back."""
    h = model.b(model.a(x)).clone()
    torch._foreach_mul_([h], 0.3)
    return model.c(h)  # type: ignore[no-any-return]


@torch.library.custom_op("isthmus_tests::halved_into", mutates_args=("out",))
def halved_into(x: Tensor, out: Tensor) -> None:
    """Writes half of a tensor into another."""
    out.copy_(x * 0.5)


def by_own_operation(model: Any, x: Tensor) -> Tensor:
    h = model.b(model.a(x))
    with torch.no_grad():
        half = torch.zeros_like(h)
        halved_into(h.detach(), half)
    return model.c(h + half)  # type: ignore[no-any-return]


def into_a_given_tensor(model: Any, x: Tensor) -> Tensor:
    h, gate = model.a(x), torch.zeros(16, 16)
    with torch.no_grad():
        torch.mm(torch.eye(16), torch.full((16, 16), 0.1), out=gate)
    return model.c(torch.tanh(model.b(h)) @ gate)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: lambda kind=kind: Recurrent(kind) for kind in (nn.GRU, nn.RNN, nn.LSTM)},  # type: ignore[misc]
    **{
        how.__name__: lambda how=how: Three(how)  # type: ignore[misc]
        for how in (
            in_the_middle, written_into, switched_on_again, half_precision, full_precision, checkpointed,
            checkpointed_first, first_without_gradients, written_parts, own_backward, hooked,
            clipped, hooked_on_the_graph, in_groups, by_own_operation, into_a_given_tensor,
        )
    },
}  # fmt: skip


def task_of(make: Callable[[], nn.Module]) -> Task:
    return Task(seeded(make), vectors((8,)), cross_entropy)


def two_replicas(pieces: Cutting) -> Plan:
    """Four samples on one device, two on the other."""
    names = [block.name for block in pieces.graph.blocks]
    replicas = (Replica(devices=(FIRST,), share=4), Replica(devices=(SECOND,), share=2))
    sync = Sync(bucket="all", how="ring", parameters=tuple(f"[{name}]" for name in names), participants=(FIRST, SECOND))
    stage = Stage(first=names[0], last=names[-1], replicas=replicas)
    return pipeline_plan(pieces, [stage], [sync], batch=BATCH, optimizer=ADAMW)


def plain_torch(task: Task) -> tuple[Result, dict[str, Tensor]]:
    """Losses and weights after some steps, and the weights before them."""
    model = task.make()
    began = copy.deepcopy(dict(model.named_parameters()))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAMW.learning_rate, betas=ADAMW.betas, weight_decay=ADAMW.weight_decay
    )
    losses = []
    for step in range(STEPS):
        example, target = task.get(range(step * BATCH, (step + 1) * BATCH))
        loss, count = task.loss(model(*example.args), target)
        optimizer.zero_grad()
        (loss / count).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item() / float(count))
    return Result(losses, {name: p.detach() for name, p in model.named_parameters()}), began


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_plain_torch(name: str) -> None:
    task = task_of(MODELS[name])
    pieces = task.pieces()
    found = train(task, two_replicas(pieces), small_cluster(), pieces, STEPS)
    wanted, began = plain_torch(task)
    still = {name for name, tensor in wanted.weights.items() if torch.equal(tensor, began[name])}
    assert set(pieces.graph.unreached) == still
    trained = {name: tensor for name, tensor in wanted.weights.items() if name not in still}
    assert_same(found, Result(wanted.losses, trained), 2e-2 if name == "half_precision" else 1e-5)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("how", [checkpointed_first, first_without_gradients])
def test_what_no_loss_reaches_is_named(how: Callable[[Any, Tensor], Tensor]) -> None:
    graph = task_of(lambda: Three(how)).pieces().graph
    assert {parameter.name for parameter in graph.parameters} == {"b.weight", "b.bias", "c.weight", "c.bias"}
    (note,) = unreached(graph)
    assert note == "no loss can reach these parameters, so that they are not trained: a.weight, a.bias"


def test_a_model_that_cannot_be_exported_names_them_too() -> None:
    def apart(model: Any, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            raise RuntimeError("not for export")
        return first_without_gradients(model, x)

    graph = task_of(lambda: Three(apart)).pieces().graph
    assert graph.how == "modules" and graph.unreached == ("a.weight", "a.bias")


def test_a_model_without_any_gradient_is_refused() -> None:
    def none(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model.c(model.b(model.a(x)))  # type: ignore[no-any-return]

    with pytest.raises(ModelError, match="no loss can reach a parameter"):
        task_of(lambda: Three(none)).pieces()


ARITHMETIC: dict[str, Callable[[Tensor], Tensor]] = {
    "divided": lambda h: h / h.shape[0],
    "times the inverse": lambda h: h * (1.0 / h.shape[0]),
    "times the root": lambda h: h * h.shape[0] ** 0.5,
    "plus the count": lambda h: h + (2 * h.shape[0] + 1),
    "minus the square": lambda h: h - h.shape[0] ** 2 / 10,
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_the_batch(name: str) -> None:
    """Two stages train like plain torch; two replicas, which see fewer samples, are refused."""
    task = task_of(lambda: Three(lambda model, x: model.c(torch.tanh(ARITHMETIC[name](model.b(model.a(x)))))))
    pieces = task.pieces()
    assert pieces.graph.how == "export"
    with pytest.raises(PlanError, match="keep"):
        train(task, two_replicas(pieces), small_cluster(), pieces, STEPS)
    names = [block.name for block in pieces.graph.blocks]
    stages = [
        Stage(first=names[0], last=names[0], replicas=(Replica(devices=(FIRST,), share=BATCH),)),
        Stage(first=names[1], last=names[-1], replicas=(Replica(devices=(SECOND,), share=BATCH),)),
    ]
    found = train(task, pipeline_plan(pieces, stages, batch=BATCH, optimizer=ADAMW), small_cluster(), pieces, STEPS)
    assert_same(found, plain_torch(task)[0])


def test_autocast_is_off_only_where_it_was() -> None:
    example, x = Example(args=(torch.zeros(2, 8),)), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    model = seeded(lambda: Three(in_between))()
    assert torch.equal(cut(model, example, name="x").run(x), model(x))


def test_a_checkpoint_needs_no_other_operations() -> None:
    """A re-entrant checkpoint is cut like the plain call."""
    example = Example(args=(torch.zeros(2, 8),))
    plain = Three(lambda model, x: model.c(torch.relu(model.b(model.a(x)))))
    assert cut(Three(checkpointed), example, name="x").graph.digest == cut(plain, example, name="x").graph.digest
