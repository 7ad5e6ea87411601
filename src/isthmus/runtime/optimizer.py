"""The update: torch's own optimizers on the flat tensors of buckets.

The rules of Adam, AdamW and SGD work element by element. So updating a stretch of a flat tensor is the same as updating
its parameters one by one, as long as all of them have the same settings: a stretch lies in one parameter group.

16-bit weights have fp32 master copies. In fp16 losses are scaled: a step whose gradients are not finite is skipped and
halves the scale, and 2000 good steps in a row double it.

With `average`, each worker keeps an exponential moving average of the fp32 weights that it updates: the weights after
the first update, then after each one a_t = d a_(t-1) + (1 - d) w_t, as `torch.optim.swa_utils` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isthmus.model.graph import BlockGraph
from isthmus.model.job import Optimizer
from isthmus.model.parameter_groups import group_of
from isthmus.runtime.buckets import Bucket

__all__ = ["LossScale", "Updater", "quantities"]


class _Stretch(NamedTuple):
    """Elements [lo, hi) of a bucket's piece, all of one parameter group."""

    lo: int
    hi: int
    group: int
    target: nn.Parameter  # a view of the piece's master


class _Piece:
    """The piece of one bucket that this worker updates: its fp32 master, stretches and average."""

    def __init__(self, bucket: Bucket, settings: Optimizer, graph: BlockGraph) -> None:
        self.bucket = bucket
        self.master = _master(bucket)
        self.average: Tensor | None = None
        self.stretches = [
            _Stretch(lo, hi, group, nn.Parameter(self.master[lo:hi]))
            for lo, hi, group in _stretches(bucket, settings, graph)
        ]


class Updater:
    """Updates the pieces of buckets that this worker is responsible for."""

    def __init__(self, settings: Optimizer, buckets: Sequence[Bucket], graph: BlockGraph) -> None:
        self.settings = settings
        self.pieces = [_Piece(bucket, settings, graph) for bucket in buckets if bucket.piece.numel()]
        groups: dict[int, list[nn.Parameter]] = {}
        for piece in self.pieces:
            for stretch in piece.stretches:
                groups.setdefault(stretch.group, []).append(stretch.target)
        self.torch = _optimizer(settings, groups) if groups else None
        self._rates = [group["lr"] for group in self.torch.param_groups] if self.torch is not None else []

    def square(self) -> float:
        """Return the sum of squares of the gradient's elements that this worker counts."""
        parts = [part for piece in self.pieces for part in piece.bucket.counted()]
        return math.fsum(float(torch.linalg.vector_norm(part, dtype=torch.float32)) ** 2 for part in parts)

    def step(self, factor: float, rate: float = 1.0) -> None:
        """Update the weights with the gradient times `factor`, at `rate` times the learning rates."""
        if self.torch is None:
            return
        for group, own in zip(self.torch.param_groups, self._rates, strict=True):
            group["lr"] = own * rate
        for piece in self.pieces:
            gradient = piece.bucket.gradient.to(device=piece.master.device, dtype=piece.master.dtype).mul_(factor)
            for stretch in piece.stretches:
                stretch.target.grad = gradient[stretch.lo : stretch.hi]
        self.torch.step()
        for piece in self.pieces:
            for stretch in piece.stretches:
                stretch.target.grad = None
            if piece.master.data_ptr() != piece.bucket.piece.data_ptr():
                piece.bucket.piece.copy_(piece.master)
            self._follow(piece)

    def _follow(self, piece: _Piece) -> None:
        """Let the average of a piece follow its weights."""
        if self.settings.average is None:
            return
        if piece.average is None:
            piece.average = piece.master.clone()
        else:
            piece.average.lerp_(piece.master, 1.0 - self.settings.average)

    def state(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the fp32 weights, the moments and the average of a bucket's piece, each as a flat tensor."""
        piece = self._piece(bucket)
        found = {"weight": piece.master.detach()}
        for name in quantities(self.settings):
            parts = [self.torch.state.get(stretch.target, {}).get(name) for stretch in piece.stretches if self.torch]
            if parts and all(isinstance(part, Tensor) for part in parts):
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        if piece.average is not None:
            found["average"] = piece.average
        return found

    def load(self, bucket: Bucket, state: Mapping[str, Tensor], steps: int) -> None:
        """Load into a bucket's piece what `state` returned after this number of updates.

        Moments that were not saved begin at zero, and an average that was not saved begins at the weights.
        """
        piece = self._piece(bucket)
        with torch.no_grad():
            piece.master.copy_(state["weight"])
            if bucket.piece_mask is not None:
                piece.master.mul_(bucket.piece_mask.to(piece.master.device))
            if piece.master.data_ptr() != bucket.piece.data_ptr():
                bucket.piece.copy_(piece.master)
        if self.settings.average is not None and steps:
            piece.average = state.get("average", piece.master).to(piece.master, copy=True)
        names = [name for name in quantities(self.settings) if name in state]
        if self.torch is None or not names:
            return
        flat = {name: state[name].to(piece.master) for name in names}
        if self.settings.name != "sgd":
            flat |= {name: torch.zeros_like(piece.master) for name in quantities(self.settings) if name not in flat}
        for stretch in piece.stretches:
            moments = {name: tensor[stretch.lo : stretch.hi].clone() for name, tensor in flat.items()}
            if self.settings.name != "sgd":
                moments["step"] = torch.tensor(float(steps), dtype=torch.float32, device=piece.master.device)
            self.torch.state[stretch.target] = moments

    def _piece(self, bucket: Bucket) -> _Piece:
        return next(piece for piece in self.pieces if piece.bucket is bucket)


def quantities(settings: Optimizer) -> tuple[str, ...]:
    """Return torch's names of the tensors that an optimizer keeps for each parameter."""
    if settings.name == "sgd":
        return ("momentum_buffer",) if settings.momentum else ()
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings.amsgrad else ()))


def _stretches(bucket: Bucket, settings: Optimizer, graph: BlockGraph) -> Iterator[tuple[int, int, int]]:
    """Yield neighbouring elements of a bucket's piece that are in one parameter group: first, end and group."""
    held = []
    for name in bucket.names:
        lo, hi = (place - bucket.bounds[0] for place in bucket.held(name))
        if lo < hi:
            held.append((lo, hi, group_of(settings, graph.parameter[name])))
    for group, run in groupby(held, key=lambda one: one[2]):
        members = list(run)
        yield members[0][0], members[-1][1], group


def _master(bucket: Bucket) -> Tensor:
    """Return the tensor that the optimizer updates: the weights, or an fp32 copy, in host memory where spilled."""
    piece = bucket.piece if bucket.exact is None else bucket.exact
    bucket.exact = None
    home = torch.device("cpu") if bucket.spec.spill != "none" else piece.device
    piece = piece if piece.dtype == torch.float32 and piece.device == home else piece.to(home, torch.float32)
    return piece.detach()


def _optimizer(settings: Optimizer, groups: Mapping[int, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """Return torch's optimizer of these parameters; group 0 has the optimizer's own settings."""
    given: list[dict[str, Any]] = []
    for number, targets in sorted(groups.items()):
        own = settings.groups[number - 1] if number else None
        rate = own.learning_rate if own is not None else None
        decay = own.weight_decay if own is not None else None
        given.append(
            {
                "params": list(targets),
                "lr": settings.learning_rate if rate is None else rate,
                "weight_decay": settings.decay if decay is None else decay,
            }
        )
    if settings.name == "sgd":
        return torch.optim.SGD(
            given, lr=settings.learning_rate, momentum=settings.momentum, dampening=settings.dampening,
            weight_decay=settings.decay, nesterov=settings.nesterov, maximize=settings.maximize, fused=True,
        )  # fmt: skip
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(
        given, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=settings.decay,
        amsgrad=settings.amsgrad, maximize=settings.maximize, fused=True,
    )  # fmt: skip


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
