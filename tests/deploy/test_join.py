"""A loop of one's own: the same losses and weights as a plain loop, for modules of both kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isthmus
from isthmus.errors import RunError, UsageError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.plan.file import PlanFile
from isthmus.plan.types import Pipeline, Plan, Replica, Stage
from tests.deploy.jobs import DATA, MODEL, A, B, two_devices, two_replicas, two_stages

BATCH, STEPS = 6, 4


class Straight(nn.Sequential):
    """torch.export follows it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


class Stubborn(nn.Sequential):
    """torch.export does not follow a layer that loops over samples; child modules are cut instead."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), _OneByOne(), nn.Linear(16, 16), _OneByOne(), nn.Linear(16, 4))


class _OneByOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.relu() for row in x])


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(output.numel())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, 4, generator=generator)) for _ in range(STEPS)
    ]


def plan_for(graph: BlockGraph) -> PlanFile:
    """Two stages, the first on one device, the second on the other."""
    names = [block.name for block in graph.blocks]
    assert len(names) > 1
    stages = (
        Stage(first=names[0], last=names[0], replicas=(Replica(devices=(A,), share=BATCH // 2, slices=1),)),
        Stage(first=names[1], last=names[-1], replicas=(Replica(devices=(B,), share=BATCH // 2, slices=2),)),
    )
    job = Job(name="own", model="own.json", batch=BATCH, optimizer=Optimizer(learning_rate=1e-2))
    part = Pipeline(job=job, model_digest=graph.digest, precision="fp32", micro_batches=2, stages=stages)
    return PlanFile(plan=Plan(cluster="desk", parts=(part,)), cluster=two_devices())


def plain(model: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for inputs, target in batches()[:steps]:
        loss = (model(inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return kind()


@pytest.mark.parametrize(("kind", "how"), [(Straight, "export"), (Stubborn, "modules")])
def test_a_loop_of_ones_own(kind: type[nn.Module], how: str, tmp_path: Path) -> None:
    model = made(kind)
    graph = isthmus.capture(model, torch.zeros(2, 8), name="own")
    assert graph.how == how
    wanted, weights = plain(made(kind), STEPS)
    untouched = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with isthmus.join(plan_for(graph), model, squares) as run:
        found = [run.step(batch) for batch in batches()[:2]]
        run.save(tmp_path)
        found += [run.step(batch) for batch in batches()[2:]]
        state = run.state_dict()
    assert found == pytest.approx(wanted, rel=1e-5)
    torch.testing.assert_close(state, weights)
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in model.state_dict().items())
    model.load_state_dict(state)
    with isthmus.join(plan_for(graph), made(kind), squares, resume=tmp_path) as run:
        assert [run.step(batch) for batch in batches()[2:]] == pytest.approx(wanted[2:], rel=1e-5)


def test_a_model_by_its_name() -> None:
    """The job's own model and loss, under two plans: the same losses."""
    tokens = torch.arange(4 * 9).view(4, 9) % 64
    batch = tokens[:, :-1], tokens[:, 1:].contiguous()
    losses = []
    for file in (two_stages(), two_replicas()):
        with isthmus.join(file, trusted=(MODEL, DATA)) as run:
            losses.append([run.step(batch) for _ in range(3)])
            assert {"lm_head.weight", "transformer.wte.weight"} <= run.state_dict().keys()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0][2] < losses[0][0]


def test_what_fails_is_named() -> None:
    graph = isthmus.capture(made(Straight), torch.zeros(2, 8), name="own")

    def loss(output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        if target.sum() > 1e6:
            raise ValueError("too much")
        return squares(output, target)

    run = isthmus.join(plan_for(graph), made(Straight), loss)
    (inputs, target), *_ = batches()
    with pytest.raises(UsageError, match="no plan changes how many samples"):
        run.step((inputs[:3], target[:3]))
    with pytest.raises(UsageError, match="nothing was trained yet"):
        run.state_dict()
    run.step((inputs, target))
    with pytest.raises(RunError, match="ValueError: too much") as caught:
        run.step((inputs, target + 1e7))
    assert caught.value.where == f"worker {B}, stage 1, step 2"
    run.close()
    with pytest.raises(UsageError, match="was closed"):
        run.step((inputs, target))
    with pytest.raises(UsageError, match="needs its loss"):
        isthmus.join(plan_for(graph), made(Straight))
