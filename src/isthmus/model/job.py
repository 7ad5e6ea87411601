"""A job: a model to train, with its batch and optimizer. A workload: several jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.cluster.spec import Precision

__all__ = ["SHAPES", "Job", "Optimizer", "ParameterGroup", "RateSchedule", "Workload"]


SHAPES = ("constant", "linear", "cosine", "warmup-stable-decay")  # of learning-rate schedules


class RateSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The factor on every learning rate over the steps; `runtime.learning_rate` has the formulas.

    `shape` is constant, linear, cosine, warmup-stable-decay, or a function of one's own from the step to the factor.
    """

    shape: str = "constant"
    warmup: int = 0  # steps in which the factor rises from 0 to 1
    decay: int | None = None  # steps of the decay at the end (warmup-stable-decay); None: a tenth of all
    end: float = 0.0  # the factor in the end
    steps: int | None = None  # of the whole schedule; None: the job's


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters with settings of their own, chosen by patterns like `*.bias`; the first group that matches holds."""

    parameters: tuple[str, ...]
    learning_rate: float | None = None  # None: the optimizer's
    weight_decay: float | None = None


class Optimizer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer and its settings. The defaults are those of `torch.optim`: the weight decay depends on the name."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8  # adam and adamw
    amsgrad: bool = False  # adam and adamw
    momentum: float = 0.0  # sgd only
    dampening: float = 0.0  # sgd only
    nesterov: bool = False  # sgd only
    maximize: bool = False
    weight_decay: float | None = None  # filled in when the optimizer is made: 0.01 for adamw, else 0
    clip: float | None = None
    schedule: RateSchedule = RateSchedule()
    groups: tuple[ParameterGroup, ...] = ()
    average: float | None = None  # decay of an exponential moving average of the weights; None: there is none

    def __post_init__(self) -> None:
        if self.weight_decay is None:
            msgspec.structs.force_setattr(self, "weight_decay", 0.01 if self.name == "adamw" else 0.0)

    @property
    def decay(self) -> float:
        """Return the weight decay as a number."""
        return self.weight_decay or 0.0

    @property
    def moments(self) -> int:
        """Return the number of fp32 values that are kept for each weight, besides an exact copy of it."""
        own = 2 + self.amsgrad if self.name != "sgd" else int(self.momentum != 0)
        return own + (self.average is not None)


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
    compile: bool = False  # blocks are compiled by torch.compile
    seed: int = 0
    weights: str | None = None  # starting weights: a safetensors file or a folder of them; None: drawn from the seed
    frozen: tuple[str, ...] = ()  # patterns of parameters that are not trained
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
