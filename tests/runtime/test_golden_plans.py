"""The golden plans that are pipelines train, on a model whose blocks have their names."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.model.job import Job
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.types import Pipeline, Plan
from tests.plan.golden_files import NAMES, cluster, golden
from tests.runtime.world import Cutting, Task, assert_same, reference, train

TOLERANCE = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}
PIPELINES = [
    (name, number) for name in NAMES for number, part in enumerate(golden(name).parts) if isinstance(part, Pipeline)
]


class Middle(nn.Module):
    """A pair of products that a tensor group can divide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Golden(nn.Module):
    """Blocks `embed`, `h.1` .. `h.6`, `head`."""

    def __init__(self, width: int = 16, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.h = nn.ModuleDict({str(i): Middle(width) for i in range(1, 7)})
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, width, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.h.values():
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


def get(numbers: range) -> tuple[Example, Tensor]:
    sources = [torch.Generator().manual_seed(number) for number in numbers]
    inputs = torch.stack([torch.randn(3, 16, generator=source) for source in sources])
    targets = torch.stack([torch.randint(16, (3,), generator=source) for source in sources])
    return Example(args=(inputs,), kwargs={}), targets


def make(tied: bool) -> nn.Module:
    torch.manual_seed(3)
    return Golden(tied=tied)


@cache
def cutting(tied: bool, precision: str) -> Cutting:
    return task(tied).pieces(precision)


def task(tied: bool) -> Task:
    return Task(lambda: make(tied), get, cross_entropy)  # type: ignore[arg-type]


def small(part: Pipeline, found: Cutting) -> Plan:
    """The same part with the real model's digest, gentle steps, and without what only planning needs."""
    kept = {field: getattr(part.job, field) for field in ("name", "model", "batch", "mixed", "sparsity", "seed")}
    job = Job(**kept, optimizer=msgspec.structs.replace(part.job.optimizer, name="sgd", learning_rate=0.05))
    return Plan(cluster="atlantic", parts=(msgspec.structs.replace(part, job=job, model_digest=found.graph.digest),))


@pytest.mark.parametrize("name,number", PIPELINES)
def test_golden_plans_train_like_one_process(name: str, number: int) -> None:
    part = golden(name).parts[number]
    assert isinstance(part, Pipeline)
    tied = part.job.model == "small:tied"
    found = cutting(tied, part.precision)
    assert [block.name for block in found.graph.blocks] == ["embed", *(f"h.{i}" for i in range(1, 7)), "head"]
    plan = small(part, found)
    result = train(task(tied), plan, cluster(), found, 2, checked=name != "interleaved")
    assert_same(result, reference(task(tied), plan, 2), TOLERANCE[part.precision])
