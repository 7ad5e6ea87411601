"""Batch norm with fixed statistics, for measuring whether samples are kept apart.

Replicas add up the statistics of batch norms, so their mixing of samples is known and no reason to refuse a plan. While
anything else is measured they take the mean 0 and the variance 1, and note how many rows each call has. The rows of the
parts must add up to those of the whole, or else a norm reads something else than the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from isthmus.model.graph import NORMS
from isthmus.model.trace import kind_of

__all__ = ["NormForward", "fixed_norms", "fixed_or"]

Rows = list[int]
Normalise = Callable[..., Tensor]  # input, weight, bias, running mean, running variance, momentum, eps

_ROWS: ContextVar[Rows | None] = ContextVar("rows", default=None)


@contextmanager
def fixed_norms(block: nn.Module) -> Iterator[Rows]:
    """Fix the statistics of batch norms in training inside this context; yield the rows of each call, in order.

    Only calls by batch norm modules, or of an exported graph, are seen: the runtime does not add up the statistics of
    others.
    """
    rows: Rows = []
    with ExitStack() as stack:
        if isinstance(block, fx.GraphModule):
            stack.enter_context(_Functions(fixed_or(_unknown), operations=True))
        else:
            for norm in [m for m in block.modules() if isinstance(m, _BatchNorm)]:
                stack.enter_context(_replaced(norm))
        token = _ROWS.set(rows)
        stack.callback(_ROWS.reset, token)
        yield rows


def fixed_or(normalise: Normalise) -> Normalise:
    """Return a batch norm that is `normalise` or, inside `fixed_norms`, has fixed statistics."""

    def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> Tensor:
        rows = _ROWS.get()
        if rows is None:
            return normalise(x, weight, bias, *others)
        rows.append(len(x))
        return _affine(x, weight, bias)

    return norm


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return the batch norm of x with mean 0 and variance 1."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    scaled = x if weight is None else x * weight.reshape(shape)
    return (scaled if bias is None else scaled + bias.reshape(shape)).to(x.dtype)


def _unknown(*args: Any) -> Tensor:
    raise AssertionError("only within fixed_norms")


class NormForward:
    """Replaces the forward of a batch norm module: it does the same with another batch norm in training.

    A subclass of batch norm may do more in its forward, such as an activation.
    """

    def __init__(self, norm: _BatchNorm, normalise: Normalise) -> None:
        self._usual, self._normalise = norm.forward, normalise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, with the other batch norm in it."""
        with _Functions(self._normalise):
            return self._usual(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Replaces torch's batch norm by another one if it takes statistics of its input."""

    def __init__(self, normalise: Normalise, *, operations: bool = False) -> None:
        super().__init__()
        self._normalise, self._operations = normalise, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _called(func, self._normalise, *args, **kwargs)
        if self._operations and kind_of(func) in NORMS and hasattr(func, "_schema") and args[5]:
            y = self._normalise(*args[:5], *args[6:8])
            return y if kind_of(func) == "batch_norm" else (y, y.new_zeros(y.shape[1]), y.new_ones(y.shape[1]))
        return func(*args, **kwargs)


def _called(
    usual: Any,
    normalise: Normalise,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Call the batch norm with the arguments of `F.batch_norm`."""
    if not training:
        return usual(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    return normalise(input, weight, bias, running_mean, running_var, momentum, eps)


@contextmanager
def _replaced(norm: _BatchNorm) -> Iterator[None]:
    attributes = vars(norm)
    before = attributes.get("forward")
    attributes["forward"] = NormForward(norm, fixed_or(_unknown))
    try:
        yield
    finally:
        del attributes["forward"]
        attributes |= {} if before is None else {"forward": before}
