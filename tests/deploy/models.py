"""What the tests of running train: a GPT of two layers, numbered samples for it, and code that fails on purpose."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from isthmus.model.zoo.gpt import GPT
from isthmus.model.zoo.synthetic import cross_entropy

SEQUENCE, VOCABULARY, COUNT = 8, 64, 48


def small_gpt() -> tuple[nn.Module, Tensor]:
    model = GPT(layers=2, width=16, heads=2, longest=SEQUENCE, vocabulary=VOCABULARY, dropout=0.0)
    return model, torch.zeros(2, SEQUENCE, dtype=torch.long)


class Samples:
    """48 sequences; the token after t is mostly t + 1, so that there is something to learn."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(SEQUENCE + 1) * (1 + number % 3) + number) % VOCABULARY
        return tokens[:-1], tokens[1:]


def samples() -> Samples:
    return Samples()


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
