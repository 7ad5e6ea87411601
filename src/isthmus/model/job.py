"""A job: a model to train, with its batch and optimizer. A workload: several jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.cluster.spec import Precision

__all__ = ["Job", "Optimizer", "Workload"]


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer and its settings. The defaults are those of `torch.optim`: the weight decay depends on the name."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.0  # sgd only
    weight_decay: float | None = None  # filled in when the optimizer is made: 0.01 for adamw, else 0
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.weight_decay is None:
            msgspec.structs.force_setattr(self, "weight_decay", 0.01 if self.name == "adamw" else 0.0)

    @property
    def decay(self) -> float:
        """Return the weight decay as a number."""
        return self.weight_decay or 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model to train. `batch` is the number of samples per step of the whole job; no plan changes it."""

    name: str
    model: str
    batch: int
    sequence: int | None = None
    steps: int = 1000
    optimizer: Optimizer = Optimizer()
    precision: Precision | None = None  # None: the fastest that every used device has; the plan states it
    mixed: bool = False  # kinds that lack the precision compute in fp32
    seed: int = 0
    data: str = "synthetic"
    loss: str = "default"
    sparsity: float | None = None
    place: Mapping[str, str] = {}
    priority: float = 1.0
    deadline: str | None = None
    trust_independent_samples: bool = False  # the user vouches that samples stay apart where that is not proven


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Several jobs for one cluster."""

    name: str
    jobs: tuple[Job, ...]
