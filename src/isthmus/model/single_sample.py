"""Refuses a model that computes something else for a batch of one sample.

An export is made with several samples. Where the model's code asks for the batch size, as in `if x.shape[0] == 1`, it
has the branch for several. A worker's share of one sample is part of a larger batch, so that is right, except for a job
whose whole batch is one sample.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.repeated_calls import recorded_call
from isthmus.model.restored_state import kept_state
from isthmus.model.seen_by import has_own_code
from isthmus.model.torch_export import Example

__all__ = ["check_single_sample"]


def check_single_sample(model: nn.Module, example: Example) -> None:
    """Refuse a model whose operations on one sample differ from those on two and three, in kind or in a number.

    A number that differs between two samples and three depends on the batch size as it should.
    """
    if not has_own_code(model):
        return
    one, two, three = (_recorded(model, example, samples) for samples in (1, 2, 3))
    names = [[line.split(" ", 1)[0] for line in lines] for lines in (one, two)]
    other = next((line for line, mate, third in zip(one, two, three, strict=False) if _branches(line, mate, third)), "")
    if names[0] != names[1] or other:
        raise ModelError(
            "the model computes something else for a single sample than for several",
            where=type(model).__name__,
            found=other[:80] or f"{len(one)} operations for one sample, {len(two)} for two",
            expected="the same operations for every batch size, or a batch of two samples or more",
            next="Set batch: 2 or more in the job, or remove the branch on the batch size",
        )


def _branches(one: str, two: str, three: str) -> bool:
    """Return whether a number is the same for two samples and three, and another for one."""
    words = one.split(" "), two.split(" "), three.split(" ")
    if len(words[0]) != len(words[1]):
        return True
    return any(b == c != a for a, b, c in zip(*words, strict=False))


def _recorded(model: nn.Module, example: Example, samples: int) -> list[str]:
    def rows(value: Tensor) -> Tensor:
        return value[:1].repeat(samples, *[1] * (value.ndim - 1))

    args = tuple(map(rows, example.args))
    with kept_state(model), torch.random.fork_rng():
        return recorded_call(model, args, {key: rows(value) for key, value in example.kwargs.items()})
