"""Synthetic samples with targets, and the loss that goes with them.

Everything is drawn on the CPU from a generator with the given seed, so that each device sees the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.model.capture import Example

__all__ = ["cross_entropy", "images", "masked_tokens", "next_tokens", "spans", "token_ids", "token_pairs", "vectors"]

IGNORED = -100  # cross entropy's mark for "no target here"


def cross_entropy(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of logits [..., classes] against class numbers [...], and how many were summed.

    `output` is a tensor, or a transformers output that holds `logits`. The sum is in fp32 whatever the logits are.
    """
    logits = getattr(output, "logits", output)
    total = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (target != IGNORED).sum()


def next_tokens(batch: int, seed: int, *, vocabulary: int, sequence: int) -> tuple[Example, Tensor]:
    """Draw token sequences; the target of each position is the token that follows."""
    tokens = token_ids((batch, sequence + 1), vocabulary, _generator(seed))
    return Example(args=(tokens[:, :-1].contiguous(),), kwargs={}), tokens[:, 1:].contiguous()


def masked_tokens(
    batch: int, seed: int, *, vocabulary: int, sequence: int, mask: int, rate: float = 0.15
) -> tuple[Example, Tensor]:
    """Draw token sequences of which a part (at least the first token of each) is masked.

    The targets are the masked tokens.
    """
    generator = _generator(seed)
    tokens = token_ids((batch, sequence), vocabulary, generator)
    hidden = torch.rand((batch, sequence), generator=generator, device="cpu") < rate
    hidden[:, 0] = True
    return Example(args=(tokens.masked_fill(hidden, mask),), kwargs={}), tokens.masked_fill(~hidden, IGNORED)


def token_pairs(batch: int, seed: int, *, vocabulary: int, sequence: int) -> tuple[Example, Tensor]:
    """Draw two sequences of equal length, one to read and one to write.

    The targets are the tokens that follow those of the written sequence.
    """
    generator = _generator(seed)
    source = token_ids((batch, sequence), vocabulary, generator)
    written = token_ids((batch, sequence + 1), vocabulary, generator)
    return Example(args=(source, written[:, :-1].contiguous()), kwargs={}), written[:, 1:].contiguous()


def spans(batch: int, seed: int, *, vocabulary: int, sequence: int) -> tuple[Example, Tensor]:
    """Draw token sequences; the targets [batch, 2] are the first and the last position of an answer."""
    generator = _generator(seed)
    tokens = token_ids((batch, sequence), vocabulary, generator)
    ends = torch.randint(sequence, (batch, 2), generator=generator, device="cpu")
    return Example(args=(tokens,), kwargs={}), ends.sort(dim=1).values


def images(batch: int, seed: int, *, size: int, classes: int, channels: int = 3) -> tuple[Example, Tensor]:
    """Draw images of noise whose mean rises with the class number."""
    return _classified((batch, channels, size, size), seed, classes)


def vectors(batch: int, seed: int, *, features: int, classes: int) -> tuple[Example, Tensor]:
    """Draw vectors of noise whose mean rises with the class number."""
    return _classified((batch, features), seed, classes)


def token_ids(shape: tuple[int, ...], vocabulary: int, generator: torch.Generator) -> Tensor:
    """Draw tokens of which low numbers are far more frequent, as words are, so that there is something to learn."""
    uniform = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float64)
    return (uniform**3 * vocabulary).long()


def _classified(shape: tuple[int, ...], seed: int, classes: int) -> tuple[Example, Tensor]:
    generator = _generator(seed)
    target = torch.randint(classes, shape[:1], generator=generator, device="cpu")
    mean = (target / classes - 0.5).view(-1, *[1] * (len(shape) - 1))
    noise = torch.randn(shape, generator=generator, device="cpu")
    return Example(args=(noise + mean,), kwargs={}), target


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(device="cpu").manual_seed(seed)
