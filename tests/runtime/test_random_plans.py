"""Plans drawn at random over random small models: the same losses and weights as one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.cluster.spec import Cluster
from isthmus.errors import PlanError
from isthmus.model.job import Optimizer
from isthmus.model.torch_export import Example
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.relays import relays
from isthmus.plan.text import render
from isthmus.plan.types import Pipeline, Plan, Replica, Stage
from isthmus.runtime.program import programs
from tests.plan.strategies import pipelines
from tests.runtime.tasks import Layer
from tests.runtime.world import Cutting, Task, assert_same, pipeline_plan, reference, small_cluster, train

PAIR = small_cluster(hosts=2, devices=3)
CHAIN = small_cluster(hosts=4, devices=2, regions=4, chain=True)


class Random(nn.Module):
    """Layers of different widths of which each may also read an earlier one; the head may share the first weight."""

    def __init__(self, layers: int, skips: tuple[int, ...], tied: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 12, bias=False)
        self.h = nn.ModuleList(Layer(12) for _ in range(layers))
        self.skips, self.norm = skips, nn.LayerNorm(12)
        self.last, self.out = nn.Linear(12, 8), nn.Linear(8, 12, bias=False)
        if tied:
            self.out.weight = self.inp.weight

    def forward(self, x: Tensor) -> Tensor:
        values = [self.inp(x)]
        for index, layer in enumerate(self.h):
            x = values[-1] + values[self.skips[index] % len(values)]
            values.append(layer(x))
        out: Tensor = self.out(torch.tanh(self.last(self.norm(values[-1]))))
        return out


def get(numbers: Any) -> tuple[Example, Tensor]:
    sources = [torch.Generator().manual_seed(number) for number in numbers]
    inputs = torch.stack([torch.randn(8, generator=source) for source in sources])
    targets = torch.stack([torch.randint(12, (), generator=source) for source in sources])
    return Example(args=(inputs,), kwargs={}), targets


def make(layers: int, skips: tuple[int, ...], tied: bool) -> nn.Module:
    torch.manual_seed(11)
    return Random(layers, skips, tied)


MODELS = [(3, (0, 0, 0), False), (4, (0, 1, 0, 2), False), (3, (0, 0, 1), True)]


@cache
def model(number: int) -> tuple[Task, Cutting]:
    task = Task(lambda: make(*MODELS[number]), get, cross_entropy)
    return task, task.pieces()


@st.composite
def cases(draw: Any, cluster: Cluster) -> tuple[int, Plan]:
    number = draw(st.integers(0, len(MODELS) - 1))
    graph = model(number)[1].graph
    devices = draw(st.permutations(list(cluster.devices)))[: draw(st.integers(1, 6))]
    part = draw(pipelines(cluster, graph, devices, "job", False))
    optimizer = Optimizer(name="sgd", learning_rate=0.1, momentum=0.9, clip=draw(st.sampled_from((None, 0.3))))
    job = msgspec.structs.replace(part.job, sparsity=None, optimizer=optimizer)
    stages = tuple(msgspec.structs.replace(stage, kept=None) for stage in part.stages)
    syncs = tuple(msgspec.structs.replace(s, how="ring") if s.how == "sparse" else s for s in part.syncs)
    part = msgspec.structs.replace(
        part, job=job, stages=stages, syncs=syncs, precision="fp32", model_digest=graph.digest
    )
    groups = [replica.devices for stage in part.stages for replica in stage.replicas]
    assume(all(len({cluster.devices[d].host for d in group}) == 1 for group in groups))  # others cannot be run
    assume(not any(s.how == "server" for s in part.syncs) or all(len(group) == 1 for group in groups))
    plan = Plan(cluster=cluster.name, parts=(part,), via=relays(cluster))
    assume(_runs(plan, cluster, number))
    return number, plan


def _runs(plan: Plan, cluster: Cluster, number: int) -> bool:
    """Not what the runtime refuses by name: a gradient that would count twice."""
    try:
        programs(plan, cluster, {"job": model(number)[1].graph})
    except PlanError as refused:
        assert refused.rule == "run" and "counted twice" in str(refused)
        return False
    return True


@given(cases(PAIR))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
def test_random_plans_train_like_one_process(case: tuple[int, Plan]) -> None:
    note(render(case[1]))
    _trains_like_one_process(*case, PAIR)


@given(cases(CHAIN))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
def test_random_plans_over_relays_train_like_one_process(case: tuple[int, Plan]) -> None:
    """Four hosts in a row, of which only neighbours have a link: others talk over one relay or two."""
    note(render(case[1]))
    _trains_like_one_process(*case, CHAIN)


@pytest.mark.parametrize("used", [(0, 3), (0, 2), (3, 1)])
def test_relays_without_a_stage_reach_the_leader(used: tuple[int, int]) -> None:
    """Two stages on hosts that are not neighbours: those between only pass on, and end with the others."""
    cutting = model(0)[1]
    names = [block.name for block in cutting.graph.blocks]
    stages = [
        Stage(first=first, last=last, replicas=(Replica(devices=(f"h{host}/CPU/0",), share=4),))
        for host, first, last in zip(used, (names[0], names[2]), (names[1], names[-1]), strict=True)
    ]
    plan = msgspec.structs.replace(pipeline_plan(cutting, stages, batch=8, micro_batches=2), via=relays(CHAIN))
    _trains_like_one_process(0, plan, CHAIN)


def _trains_like_one_process(number: int, plan: Plan, cluster: Cluster) -> None:
    assert isinstance(plan.parts[0], Pipeline)
    task, cutting = model(number)
    assert_same(train(task, plan, cluster, cutting, 2), reference(task, plan, 2), 2e-5)
