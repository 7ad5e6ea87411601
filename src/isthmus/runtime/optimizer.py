"""The update: torch's own optimizers on the flat tensors of buckets.

All parameters of a bucket have the same settings, and the rules of Adam, AdamW and SGD work element by element. So
updating a flat tensor, or a piece of one, is the same as updating its parameters one by one.

16-bit weights have fp32 master copies. In fp16 losses are scaled: a step whose gradients are not finite is skipped and
halves the scale, and 2000 good steps in a row double it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from isthmus.model.job import Optimizer
from isthmus.runtime.buckets import Bucket

__all__ = ["LossScale", "Updater"]

QUANTITIES = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Updater:
    """Updates the pieces of buckets that this worker is responsible for."""

    def __init__(self, settings: Optimizer, buckets: Sequence[Bucket]) -> None:
        self.settings = settings
        self.buckets = [bucket for bucket in buckets if bucket.piece.numel()]
        self.targets = [nn.Parameter(_master(bucket)) for bucket in self.buckets]
        self.torch = _optimizer(settings, self.targets) if self.targets else None

    def square(self) -> float:
        """Return the sum of squares of the gradient's elements that this worker counts."""
        parts = [part for bucket in self.buckets for part in bucket.counted()]
        return math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float32)) ** 2 for part in parts)

    def step(self, factor: float) -> None:
        """Update the weights with the gradient times `factor`."""
        for bucket, target in zip(self.buckets, self.targets, strict=True):
            gradient = bucket.gradient
            if gradient.dtype == target.dtype and gradient.device == target.device:
                target.grad = gradient.mul_(factor)
            else:
                target.grad = gradient.to(device=target.device, dtype=target.dtype).mul_(factor)
        if self.torch is not None:
            self.torch.step()
        for bucket, target in zip(self.buckets, self.targets, strict=True):
            target.grad = None
            if target.data_ptr() != bucket.piece.data_ptr():
                bucket.piece.copy_(target.detach())

    def state(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the fp32 weights and the moments of a bucket's piece, each as a flat tensor."""
        index = next(i for i, other in enumerate(self.buckets) if other is bucket)
        target = self.targets[index]
        found = {"weight": target.detach()}
        kept = self.torch.state.get(target, {}) if self.torch is not None else {}
        for name in QUANTITIES[self.settings.name]:
            if isinstance(kept.get(name), Tensor):
                found[name] = kept[name]
        return found

    def load(self, bucket: Bucket, state: dict[str, Tensor], steps: int) -> None:
        """Load into a bucket's piece what `state` returned after this number of updates."""
        index = next(i for i, other in enumerate(self.buckets) if other is bucket)
        target = self.targets[index]
        with torch.no_grad():
            target.copy_(state["weight"])
            if bucket.piece_mask is not None:
                target.mul_(bucket.piece_mask.to(target.device))
            if target.data_ptr() != bucket.piece.data_ptr():
                bucket.piece.copy_(target)
        if self.torch is not None and len(state) > 1:
            moments = {name: tensor.to(target) for name, tensor in state.items() if name != "weight"}
            if self.settings.name != "sgd":
                moments["step"] = torch.tensor(float(steps), dtype=torch.float32, device=target.device)
            self.torch.state[target] = moments


def _master(bucket: Bucket) -> Tensor:
    """Return the tensor that the optimizer updates: the weights, or an fp32 copy, in host memory where spilled."""
    piece = bucket.piece if bucket.exact is None else bucket.exact
    bucket.exact = None
    home = torch.device("cpu") if bucket.spec.spill != "none" else piece.device
    return piece if piece.dtype == torch.float32 and piece.device == home else piece.to(home, torch.float32)


def _optimizer(settings: Optimizer, targets: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = settings.learning_rate, settings.decay
    if settings.name == "sgd":
        return torch.optim.SGD(targets, lr=rate, momentum=settings.momentum, weight_decay=decay, fused=True)
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(targets, lr=rate, betas=settings.betas, weight_decay=decay, fused=True)


class LossScale:
    """The factor by which losses are multiplied in fp16."""

    def __init__(self, *, used: bool, value: float = 2.0**16, good: int = 0) -> None:
        self.used, self.value, self.good = used, value if used else 1.0, good

    def follow(self, finite: bool) -> None:
        """Adjust the scale after a step whose gradients were finite, or were not."""
        if not self.used:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.good == 2000:
            self.value, self.good = self.value * 2, 0
