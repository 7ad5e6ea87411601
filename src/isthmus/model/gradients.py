"""Keeps `torch.export` from losing gradients that a model defines itself.

Export records operations of the forward pass, and autograd later finds their gradients. That is wrong if the model
gives other gradients, by a function of its own (`torch.autograd.Function`) or by a hook on a tensor. Such a model is
not exported; its modules run as they are. A function may also write out the same gradients that its operations have, to
save time or memory. It is then recorded like any other code; a run on random numbers both ways tells the two apart.

`torch.utils.checkpoint` with `use_reentrant=True` is such a function, too. Its result and gradients are those of the
plain call, except that there are no gradients if no input requires one, and so the plain call is recorded.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import function as torch_function
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointFunction

__all__ = ["NoHooks", "plain_gradients"]

_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}
_PLACE = inspect.getattr_static(torch.Tensor, "grad_fn").__get__
_ONE_AT_A_TIME = threading.RLock()
_SIZES = (1.0, 1.0, 1.0, 1e-6, 1e3, 1e6)  # of incoming gradients: some functions clip them
_functions: Any = torch_function
_Base: Any = torch.autograd.Function.__mro__[1]  # from which `Function` inherits the `apply` that runs it
_OF_OPERATIONS = "GeneratedBackwardFor_"  # gradients of `torch.library`, kept with an operation: they are found again


class _OwnGradientError(Exception):
    """Ends an export because the model has gradients that autograd would not find again."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} gives gradients that are not those of its operations")


@contextmanager
def plain_gradients() -> Iterator[None]:
    """Let a model be called whose gradients are those of its operations; raise an exception for any other.

    `Function.apply` itself is left as it is, because a model may have bound it long ago (`own = Own.apply`). What it
    calls is replaced: the `apply` that it inherits, and the one for transforms such as `torch.vmap`.
    """
    with _ONE_AT_A_TIME:
        exporting, transformed = threading.get_ident(), _functions.custom_function_call

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            usual = super(_Base, function).apply
            if threading.get_ident() != exporting or function.__name__.startswith(_OF_OPERATIONS):
                return usual(*args, **kwargs)
            if function is CheckpointFunction:
                return _called_plainly(*args)
            if kwargs or not _adds_nothing(usual, function, args):
                raise _OwnGradientError(function.__name__)
            return function.forward(_Context(), *args)

        def refused(function: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != exporting:
                return transformed(function, *args, **kwargs)
            raise _OwnGradientError(function.__name__)

        _Base.apply = classmethod(apply)
        _functions.custom_function_call = refused
        try:
            with NoHooks():
                yield
        finally:
            del _Base.apply
            _functions.custom_function_call = transformed


def _called_plainly(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Compute what a re-entrant checkpoint computes, which is without gradients unless an argument requires one."""
    if any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args):
        return function(*args)
    with torch.no_grad():
        return function(*args)


class _Context:
    """Stands in for autograd's context in a function's forward.

    What is kept in it is for a backward that is not called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("save_for_", "mark_", "set_materialize_grads")):
            return lambda *args: None
        if name == "needs_input_grad":
            return (True,) * 64
        raise AttributeError(name)


def _adds_nothing(apply: Any, function: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the results and gradients of a function are those of its operations, tried on random numbers."""
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad(), torch.random.fork_rng():
            plain = partial(function.forward, _Context())
            return all(_alike(apply, plain, args, draw, size) for draw, size in enumerate(_SIZES))
    except Exception:  # such a function may need something that is missing here
        return False


def _alike(own: Any, plain: Any, args: tuple[Any, ...], draw: int, size: float) -> bool:
    torch.manual_seed(draw)
    drawn = [_drawn(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
    found = []
    for called in (own, plain):
        given = [arg.clone().requires_grad_() if _is_real(arg) else arg for arg in drawn]
        result = called(*given)
        leaves = [arg for arg in given if _is_real(arg)]
        if not isinstance(result, torch.Tensor) or not result.requires_grad:
            return False
        torch.manual_seed(draw + len(_SIZES))
        gradients = torch.autograd.grad(result, leaves, torch.randn_like(result) * size, allow_unused=True)
        found.append([result.detach(), *(torch.zeros(()) if g is None else g / size for g in gradients)])
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*found, strict=True))


def _is_real(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.is_floating_point()


def _drawn(like: torch.Tensor) -> torch.Tensor:
    """Return a real tensor of a recorded one's shape, with a few samples; refuse whole numbers."""
    shape = [size if isinstance(size, int) else size.node.hint for size in like.shape]
    if not like.is_floating_point():
        raise TypeError("whole numbers mean something")
    return torch.randn(shape, dtype=like.dtype) * 2


class _Node:
    """Stands in for a tensor's node in autograd's graph: it gives the model everything except what sets hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook", "next_functions"):
            raise _OwnGradientError(name)
        return getattr(self._node, name)


class NoHooks(TorchFunctionMode):
    """Refuses hooks that change gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKS:
            raise _OwnGradientError(func.__name__)
        found = func(*args, **(kwargs or {}))
        return _Node(found) if func == _PLACE and found is not None else found
