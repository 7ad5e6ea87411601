"""What a model keeps outside of its tensors: it trains like plain torch on two unequal replicas, or is refused."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import PlanError
from isthmus.plan.types import Plan, Replica, Stage
from tests.runtime.test_hidden_mixing import Own, task_of
from tests.runtime.test_samples import CLUSTER, FIRST, SGD, trained_or_refused
from tests.runtime.world import Cutting, pipeline_plan, train
from tests.sample_models import WIDTH, Body

COUNT = itertools.count(1)
NUMBERS = [0]
TABLE: dict[int, Tensor] = {}
SCALES = {"up": 2.0}
AFTER = 3  # calls, when a schedule begins: no call of a capture gets there


class Held:
    def __init__(self) -> None:
        self.number = 0


class Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class InClass(nn.Module):
    total = 1.0

    def forward(self, h: Tensor) -> Tensor:
        InClass.total += 1.0
        return h * InClass.total


class InObject(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, h: Tensor) -> Tensor:
        self.held.number += 1
        return h * self.held.number


class InArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.array = np.zeros(1)

    def forward(self, h: Tensor) -> Tensor:
        self.array += 1
        return h * torch.from_numpy(self.array).float()


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, h: Tensor) -> Tensor:
        return h * self.random.random()


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * 2 if self.calls > AFTER else h


class LaterByBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        return torch.where(self.calls > AFTER, h * 2, h)  # type: ignore[operator]


class Shortened(nn.Module):
    def __init__(self, longest: float) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH, max_norm=longest)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table((h[:, 0].abs() * 10).long().clamp(max=6))  # type: ignore[no-any-return]


def _later_by_global(h: Tensor) -> Tensor:
    NUMBERS[0] += 1
    return h * 2 if NUMBERS[0] > AFTER else h


def _later_by_closure() -> Body:
    calls = 0

    def body(h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * 2 if calls > AFTER else h

    return body


def _through_another_function(h: Tensor) -> Tensor:
    return _later_by_global(h)


def _iterated() -> Body:
    numbers = iter(range(1, 1000))
    return lambda h: h * next(numbers)


KEPT: dict[str, Callable[[], Body]] = {
    "counter": lambda: lambda h: h * next(COUNT),
    "class": InClass,
    "object": lambda: InObject(Held()),
    "object with slots": lambda: InObject(Slotted()),
    "iterator": _iterated,
    "array": InArray,
    "clock": lambda: lambda h: h * (1 + time.perf_counter_ns() % 1000),
    "random numbers of its own": Drawing,
    "schedule": Later,
    "schedule by a buffer": LaterByBuffer,
    "schedule by a global variable": lambda: _later_by_global,
    "schedule by a closure": _later_by_closure,
    "schedule in another function": lambda: _through_another_function,
    "shortened rows": lambda: Shortened(0.5),
    "rows that may be shortened later": lambda: Shortened(6.0),
}


def micro_batches(pieces: Cutting) -> Plan:
    blocks = pieces.graph.blocks
    stage = Stage(first=blocks[0].name, last=blocks[-1].name, replicas=(Replica(devices=(FIRST,), share=4),))
    return pipeline_plan(pieces, [stage], batch=8, micro_batches=2, optimizer=SGD)


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("wrapped", [lambda body: body, Own], ids=["exported", "measured"])
def test_what_is_kept_outside_is_refused(name: str, wrapped: Callable[[Body], Body]) -> None:
    NUMBERS[0] = 0
    task = task_of(lambda: wrapped(KEPT[name]()))
    assert "may mix samples" in trained_or_refused(task)
    pieces = task.pieces()
    with pytest.raises(PlanError, match="splits the batch into micro-batches"):
        train(task, micro_batches(pieces), CLUSTER, pieces, 1)


class Cached(nn.Module):
    """Makes a table in the first call."""

    def forward(self, h: Tensor) -> Tensor:
        if h.shape[1] not in TABLE:
            TABLE[h.shape[1]] = torch.linspace(0, 1, h.shape[1])
        return h + TABLE[h.shape[1]] * SCALES["up"]


def test_what_stays_the_same_is_accepted() -> None:
    TABLE.clear()
    TABLE[WIDTH] = torch.linspace(0, 1, WIDTH)
    task = task_of(Cached)
    assert task.pieces().graph.how == "export"
    assert not trained_or_refused(task)
