"""Isthmus: the fastest way to train on the machines you have.

>>> cluster = isthmus.load_cluster("cluster.yaml")
>>> choice = isthmus.plan("zoo:gpt2-xl", cluster, batch=256)
>>> isthmus.simulate(choice.plan, cluster).price.step_seconds
>>> isthmus.train(choice.plan, cluster, steps=100).loss

A name is imported when it is first used.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.api import Simulated, capture, join, load_cluster, load_profile, plan, simulate, train
    from isthmus.cluster.spec import Cluster
    from isthmus.errors import IsthmusError
    from isthmus.model.graph import BlockGraph
    from isthmus.model.job import Job, Workload
    from isthmus.model.profile import Profile
    from isthmus.plan.types import Plan
    from isthmus.planners.portfolio import Choice

__all__ = [
    "BlockGraph",
    "Choice",
    "Cluster",
    "IsthmusError",
    "Job",
    "Plan",
    "Profile",
    "Simulated",
    "Workload",
    "capture",
    "join",
    "load_cluster",
    "load_profile",
    "plan",
    "simulate",
    "train",
]

__version__ = "0.1.0"

_HOME = {
    "BlockGraph": "isthmus.model.graph",
    "Choice": "isthmus.planners.portfolio",
    "Cluster": "isthmus.cluster.spec",
    "IsthmusError": "isthmus.errors",
    "Job": "isthmus.model.job",
    "Plan": "isthmus.plan.types",
    "Profile": "isthmus.model.profile",
    "Simulated": "isthmus.api",
    "Workload": "isthmus.model.job",
    "capture": "isthmus.api",
    "join": "isthmus.api",
    "load_cluster": "isthmus.cluster.load",
    "load_profile": "isthmus.model.load_profile",
    "simulate": "isthmus.api",
    "train": "isthmus.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Plan(ModuleType):
    # `isthmus.plan` is a package (what a plan is) and a verb (find one), whichever is imported first.

    def __call__(self, *args: Any, **kwargs: Any) -> Choice:
        """Find a plan."""
        choice: Choice = _verb()(*args, **kwargs)
        return choice

    @property
    def __signature__(self) -> inspect.Signature:
        """Return the verb's signature, which `inspect` and notebooks show."""
        return inspect.signature(_verb())

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """Return the verb's docstring below its signature, which `help` shows."""
        first, _, rest = (inspect.getdoc(_verb()) or "").partition("\n")
        signature = inspect.signature(_verb())
        taken = [f"    {text}," for text in _written(signature)]
        call = "\n".join(["plan(", *taken, f") -> {signature.return_annotation}"])
        return f"{first}\n\n{call}\n{rest}"


def _written(signature: inspect.Signature) -> list[str]:
    """Return the parameters as they are written in code, with a star before keyword-only ones."""
    given = list(signature.parameters.values())
    texts = [
        f"{one.name}: {one.annotation}" + ("" if one.default is one.empty else f" = {one.default!r}") for one in given
    ]
    named = [one.kind is one.KEYWORD_ONLY for one in given]
    return [*texts[: named.index(True)], "*", *texts[named.index(True) :]] if any(named) else texts


def _verb() -> Any:
    from isthmus.api import plan

    return plan


import_module("isthmus.plan").__class__ = _Plan
