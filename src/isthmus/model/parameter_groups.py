"""Which parameters a job freezes, and in which group of the optimizer each of the others is.

Patterns are those of `fnmatch`: `*.bias`, `transformer.h.[0-3].*`. A parameter with several names (a tie) matches if
any of its names does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from isthmus.errors import JobError
from isthmus.files import close_name
from isthmus.model.graph import BlockGraph, Parameter
from isthmus.model.job import Job, Optimizer

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_groups", "freeze", "group_of"]


def group_of(optimizer: Optimizer, parameter: Parameter) -> int:
    """Return the number of the first group whose patterns match, counted from 1; 0 if there is none."""
    names = (parameter.name, *parameter.ties)
    for number, group in enumerate(optimizer.groups, start=1):
        if any(fnmatchcase(name, pattern) for pattern in group.parameters for name in names):
            return number
    return 0


def check_groups(job: Job, graph: BlockGraph) -> None:
    """Refuse patterns of the optimizer's groups that match no trained parameter."""
    names = [name for parameter in graph.parameters for name in (parameter.name, *parameter.ties)]
    for index, group in enumerate(job.optimizer.groups):
        _check_patterns(group.parameters, names, f"job {job.name}: optimizer.groups[{index}]")


def freeze(module: nn.Module, patterns: Sequence[str], where: str) -> None:
    """Make the parameters that match untrained; refuse patterns that match none, and a model with nothing to train."""
    if not patterns:
        return
    named = dict(module.named_parameters(remove_duplicate=False))
    _check_patterns(patterns, named, f"{where}: frozen")
    for name, parameter in named.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise JobError(
            "every parameter is frozen", where=f"{where}: frozen", found=", ".join(patterns),
            expected="at least one parameter that is trained",
        )  # fmt: skip


def _check_patterns(patterns: Iterable[str], names: Iterable[str], where: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise JobError(
                "the pattern matches no parameter",
                where=where,
                found=pattern,
                expected=f"a pattern like *.bias; the model has {', '.join(known[:4])}, ...",
                next=close_name(pattern, known),
            )
