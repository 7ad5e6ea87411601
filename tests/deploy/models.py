"""What the tests of running train: a GPT of two layers, numbered samples for it, and code that fails on purpose."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.synthetic import cross_entropy

SEQUENCE, VOCABULARY, COUNT = 8, 64, 48


def small_gpt() -> tuple[nn.Module, Tensor]:
    model = GPT(layers=2, width=16, heads=2, longest=SEQUENCE, vocabulary=VOCABULARY, dropout=0.0)
    return model, torch.zeros(2, SEQUENCE, dtype=torch.long)


class Halved(nn.Module):
    """Computes half of what it is given; has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Watched(nn.Module):
    """Reads its first layer without gradients, so that no loss reaches it, though it is not frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        out: Tensor = self.second(x)
        return out


def watched() -> tuple[nn.Module, Tensor]:
    return Watched(), torch.zeros(2, 4)


class Vectors:
    """Eight vectors of two classes."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(-1, 1, 4) * number, torch.tensor(number % 2)


def vectors() -> Vectors:
    return Vectors()


def changed_gpt() -> tuple[nn.Module, Tensor]:
    """As small_gpt is after somebody has worked on it: the same parameters, another computation."""
    model, example = small_gpt()
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.GELU):
                setattr(module, name, Halved())
    return model, example


class Samples:
    """48 sequences; the token after t is mostly t + 1, so that there is something to learn."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(SEQUENCE + 1) * (1 + number % 3) + number) % VOCABULARY
        return tokens[:-1], tokens[1:]


def samples() -> Samples:
    return Samples()


def slow_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Takes its time, as a large block does."""
    time.sleep(4.0)
    return cross_entropy(output, target)


_calls = 0


def failing_loss(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Fails in the third step of two micro-batches; three calls more prove the loss on its first use."""
    global _calls
    _calls += 1
    if _calls > 4 + 4:
        raise ValueError("the loss has had enough")
    print("one more loss")
    return cross_entropy(output, target)


def mean_loss(output: Any, target: Tensor) -> tuple[Tensor, int]:
    """What most losses are, and what cannot be split."""
    total, count = cross_entropy(output, target)
    return total / count, 1


def no_pairs() -> list[int]:
    """Data that are no samples."""
    return [1, 2, 3]
