"""A job of one sample a step: models with a branch for it are refused, others are accepted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.single_sample import check_single_sample
from isthmus.model.torch_export import Example


class Body(nn.Module):
    """A linear layer, and what a test does with its output."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layer(x))


BRANCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "another operation": lambda h: h * 5 if h.shape[0] == 1 else h,
    "another number": lambda h: h * (5 if h.shape[0] == 1 else 3),
    "another dimension": lambda h: h.squeeze().sum(-1),
    "another function": lambda h: h.relu() if len(h) > 1 else h.tanh(),
}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda h: h,
    "divided by the size": lambda h: h / h.shape[0],
    "reshaped by the size": lambda h: h.view(h.shape[0], 2, 2).flatten(1),
    "dropout": lambda h: nn.functional.dropout(h, 0.5),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch_for_one_sample_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="for a single sample"):
        check_single_sample(Body(BRANCHES[name]), Example(args=(torch.randn(2, 4),), kwargs={}))


@pytest.mark.parametrize("name", PLAIN)
def test_other_models_are_accepted(name: str) -> None:
    check_single_sample(Body(PLAIN[name]), Example(args=(torch.randn(1, 4),), kwargs={}))
