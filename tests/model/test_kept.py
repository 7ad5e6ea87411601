"""What a model keeps in Python: a forward that changes it is not exported, and everything is put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.capture import Example, capture
from isthmus.model.torch_export import NotExportedError, export_model

EXAMPLE = Example(args=(torch.zeros(2, 4),))


class Keeps(nn.Module):
    """A layer, and a step that may keep something."""

    def __init__(self, step: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.step = nn.Linear(4, 4), step
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.ema, self.first, self.last = 0, 0.5, True, None
        self.seen: list[Tensor] = []
        self.table: dict[str, int] = {"a": 1}

    @cached_property
    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.step(self, h)
        return h * 2


def buffer(m: Any, h: Tensor) -> None:
    m.mean = 0.9 * m.mean + 0.1 * h.detach().mean(0)


def number(m: Any, h: Tensor) -> None:
    m.calls += 1


def fraction(m: Any, h: Tensor) -> None:
    m.ema = 0.5 * m.ema + 0.1


def first(m: Any, h: Tensor) -> None:
    m.first = False


def once(m: Any, h: Tensor) -> None:
    """Does more in the first call than in the next."""
    if m.first:
        m.first = bool((h * 3).ndim > 5)


def last(m: Any, h: Tensor) -> None:
    m.last = h.detach()


def new(m: Any, h: Tensor) -> None:
    m.other = h.shape[1]


def listed(m: Any, h: Tensor) -> None:
    m.seen.append(h.detach())


def tabled(m: Any, h: Tensor) -> None:
    m.table["a"] += 1


def drawn(m: Any, h: Tensor) -> None:
    random.random()


def drawn_by_numpy(m: Any, h: Tensor) -> None:
    np.random.rand()


@pytest.mark.parametrize(
    "step",
    [buffer, number, fraction, once, last, listed, tabled, drawn, drawn_by_numpy],
    ids=lambda s: s.__name__,
)
def test_a_forward_that_keeps_something_is_not_exported(step: Callable[[Any, Tensor], Any]) -> None:
    model = Keeps(step)
    before = dict(vars(model)) | {"mean": model.mean, "seen": list(model.seen), "table": dict(model.table)}
    states = random.getstate(), str(np.random.get_state())
    with pytest.raises(NotExportedError, match=r"call of the model (changes|does)|was assigned during export"):
        export_model(model, EXAMPLE)
    assert (random.getstate(), str(np.random.get_state())) == states
    assert vars(model).keys() | {"mean"} == before.keys()
    assert all(getattr(model, name) is before[name] for name in ("calls", "ema", "first", "last", "mean"))
    assert model.seen == before["seen"] and model.table == before["table"]


def the_same(m: Any, h: Tensor) -> None:
    m.calls, m.ema, m.table["a"] = 0, 0.25 * 2, 1


def cached(m: Any, h: Tensor) -> None:
    assert m.scale == 2.0


@pytest.mark.parametrize("step", [the_same, cached, first, new])
def test_a_forward_that_keeps_nothing_new_is_exported(step: Callable[[Any, Tensor], Any]) -> None:
    export_model(Keeps(step), EXAMPLE)


@pytest.mark.filterwarnings("ignore:The tensor attribute", "ignore:.*weight_norm. is deprecated")
def test_layers_of_torch_are_exported() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.LSTM(4, 4), nn.utils.weight_norm(nn.Linear(4, 4))  # type: ignore[no-untyped-call]

        def forward(self, x: Tensor) -> Any:
            return self.last(self.layer(x[None])[0])

    export_model(Recurrent(), EXAMPLE)


def test_an_error_says_where_a_model_needs_data() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:  # here
                return self.layer(x)
            return x

    with pytest.raises(
        ModelError, match=r"DataDependentOutputException: .*\(line \d+ of test_kept.py: if x.sum\(\) > 0"
    ):
        capture(Decides(), EXAMPLE, name="m")
