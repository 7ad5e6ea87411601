"""Keeps `torch.export` from losing gradients that a model defines itself.

Export records operations of the forward pass, and autograd later finds their gradients. That is wrong where the model
gives other gradients: by a function of its own (`torch.autograd.Function`) or by a hook on a tensor. Such a model is
not exported; its modules run as they are.

`torch.utils.checkpoint` with `use_reentrant=True` is such a function, too. What it computes and the gradients of it are
those of the plain call, or none at all where no input requires a gradient, and so the plain call is recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["NoHooks", "plain_gradients"]

_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_ONE_AT_A_TIME = threading.RLock()
_OF_OPERATIONS = "GeneratedBackwardFor_"  # gradients that `torch.library` keeps with an operation: they are found again


class _OwnGradientError(Exception):
    """Ends an export: the model has gradients that autograd would not find again."""


@contextmanager
def plain_gradients() -> Iterator[None]:
    """Lets a model be called whose gradients are those of its operations; any other ends with an exception."""
    base = torch.autograd.Function
    with _ONE_AT_A_TIME:
        usual, exporting = base.__dict__["apply"], threading.get_ident()

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != exporting or function.__name__.startswith(_OF_OPERATIONS):
                return usual.__get__(None, function)(*args, **kwargs)
            if function is CheckpointFunction:
                return _called_plainly(*args)
            raise _OwnGradientError(function.__name__)

        setattr(base, "apply", classmethod(apply))  # noqa: B010, mypy wants no method assigned
        try:
            with NoHooks():
                yield
        finally:
            setattr(base, "apply", usual)  # noqa: B010


def _called_plainly(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Computes what a re-entrant checkpoint computes: without gradients, unless an argument requires one."""
    if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)


class NoHooks(TorchFunctionMode):
    """Refuses hooks that change gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            raise _OwnGradientError(func.__name__)
        return func(*args, **(kwargs or {}))
