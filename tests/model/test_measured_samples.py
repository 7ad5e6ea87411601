"""What is measured of models that torch.export cannot follow."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.modules import cut_modules
from isthmus.model.runnable_blocks import cut
from isthmus.model.samples.measured import measured_mixing
from isthmus.model.torch_export import Example
from isthmus.runtime.random.draws import draws_of
from tests.runtime.test_hidden_mixing import BACKWARD, Ghost, Kept, NormAndRelu, Own
from tests.sample_models import INPUTS, WIDTH, Body, SampleModel

EXAMPLE = Example(args=(torch.zeros(2, INPUTS),))


def why(body: Body) -> str | None:
    model = SampleModel(body)
    (found,) = measured_mixing(model, [[("", model)]], EXAMPLE)
    return found


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h / self.calls


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_call = True

    def forward(self, h: Tensor) -> Tensor:
        was, self.first_call = self.first_call, False
        return h * 0.1 if was else h


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        out = h if self.last is None else h + self.last.mean(0)
        self.last = h.detach()
        return out


CALLS = "the same samples twice give other numbers"
REFUSED: dict[str, tuple[Callable[[], Body], str]] = {
    "threshold": (lambda: lambda h: h - h.mean(0) if h.shape[0] > 20 else h, "24 samples at once"),
    "capacity": (lambda: lambda h: h * (torch.ones(len(h)).cumsum(0) <= 20)[:, None], "24 samples at once"),
    "hook": (lambda: BACKWARD["less the mean"], "give other gradients"),
    "norm of gradients": (lambda: BACKWARD["by the norm"], "give other gradients"),
    "function": (lambda: BACKWARD["function"], "give other gradients"),
    "ghost batch norm": (Ghost, "batch norm in other groups"),
    "functional batch norm": (lambda: lambda h: F.batch_norm(h, None, None, training=True), "give other numbers"),
    "mean that is kept": (Kept, r"a buffer that changes with each call \(body.seen\)"),
    "spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), "changes with each call"),
    "counter": (Counting, CALLS),
    "first call": (First, CALLS),
    "last result": (Last, CALLS),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_is_found(name: str) -> None:
    make, said = REFUSED[name]
    found = why(make())
    assert found is not None
    assert re.search(said, found)


ACCEPTED: dict[str, Callable[[], Body]] = {
    "layer": lambda: nn.Linear(WIDTH, WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm and relu": lambda: NormAndRelu(WIDTH),
    "dropout": lambda: nn.Dropout(0.5),
    "gradients of each sample": lambda: _three_times,
    "rounding errors": lambda: lambda h: F.layer_norm(h, (WIDTH,)).mean(1, keepdim=True).expand_as(h),
}


def _three_times(h: Tensor) -> Tensor:
    h = h * 1.0
    h.register_hook(lambda g: g * 3)
    return h


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_keeps_samples_apart_is_accepted(name: str) -> None:
    assert why(ACCEPTED[name]()) is None


def _plain(model: SampleModel) -> dict[str, object]:
    """Attributes of its body that are no containers."""
    (body,) = (m for m in model.modules() if isinstance(m, (Counting, First, Last)))
    return {name: content for name, content in vars(body).items() if not isinstance(content, (dict, list, set))}


@pytest.mark.parametrize("body", [Counting, First, Last])
def test_cutting_and_measuring_leave_a_model_as_it_was(body: Callable[[], nn.Module]) -> None:
    model = SampleModel(Own(body()))
    before = _plain(model)
    weights = copy.deepcopy(model.state_dict())
    pieces = cut(model, EXAMPLE, name="x")
    draws_of(pieces, EXAMPLE)
    assert pieces.graph.how == "modules"
    assert _plain(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_cause_is_told() -> None:
    model = SampleModel(Own(lambda h: h if h.sum() > 0 else -h))
    with pytest.raises(ModelError, match=r"DataDependent.* \(line \d+ of test_measured_samples.py: .*h.sum\(\) > 0"):
        cut_modules(model, EXAMPLE, name="x")
