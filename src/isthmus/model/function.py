"""Models that a user's function builds. Functions are imported and called only because the user named them.

A model's function returns a module, or a module and its example inputs: a tensor, a tuple or a dict of tensors whose
first dimension is the batch. If it takes an argument `sequence`, it is given the job's.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.errors import IsthmusError, ModelError
from isthmus.files import close_name
from isthmus.model.built import BuiltModel
from isthmus.model.capture import Example
from isthmus.model.zoo.synthetic import cross_entropy

__all__ = ["build", "call", "find", "said"]

_CALLABLE = "a function that can be called without arguments, on the meta device too"
_RESULT = "an nn.Module, or a pair of an nn.Module and its example inputs (a tensor, or a tuple or dict of tensors)"


def build(module: str, function: str, sequence: int | None = None) -> BuiltModel:
    """Call the function and return the model that it built, with its example inputs and the default loss."""
    where = f"{module}:{function}"
    called = find(where)
    taken = "sequence" in _parameters(called)
    result = call(called, {} if sequence is None else {"sequence": sequence}, where, expected=_CALLABLE)
    model, given = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ModelError(
            "The function returned no model", where=where, found=f"a {type(model).__name__}", expected=_RESULT
        )
    if given is not None and sequence is not None and not taken:
        raise ModelError(
            "The sequence is fixed by the example that the function returned",
            where=where,
            found=f"sequence {sequence}",
            next="Leave it out, or give the function an argument named sequence",
        )
    example = _guess(model, sequence, where) if given is None else _example(given, where)
    draw = partial(_repeated, example=example)
    return BuiltModel(name=where, module=model, sequence=sequence, draw=draw, loss=cross_entropy)


def find(spec: str, error: type[IsthmusError] = ModelError) -> Callable[..., Any]:
    """Return the function that `package.module:function` names; raise `error` if there is none."""
    module, _, function = spec.partition(":")
    holder = _import(module, spec, error)
    found = getattr(holder, function, None)
    if found is None:
        own = [name for name, value in vars(holder).items() if callable(value) and value.__module__ == module]
        next = close_name(function, own) or (f"It has {', '.join(own[:8])}" if own else None)
        raise error(f"{module} has no function {function!r}", where=spec, next=next)
    if not callable(found):
        raise error("this is not a function", where=spec, found=f"{function} = {found!r:.60}")
    called: Callable[..., Any] = found
    return called


def _import(module: str, where: str, error: type[IsthmusError]) -> ModuleType:
    """Import a module; the working directory is searched last, so that no file there hides an installed package."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as problem:
        raise error(
            "The module cannot be imported",
            where=where,
            found=said(problem),
            next="Run from the directory that holds it, or install it",
        ) from problem


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return ()


def call(
    function: Callable[..., Any],
    offered: Mapping[str, Any],
    where: str,
    *,
    expected: str,
    error: type[IsthmusError] = ModelError,
) -> Any:
    """Call the function with those of the offered arguments that it takes, and return its result."""
    taken = _parameters(function)
    try:
        return function(**{name: value for name, value in offered.items() if name in taken})
    except IsthmusError:
        raise
    except (Exception, SystemExit) as problem:
        raise error("The function failed", where=where, found=said(problem), expected=expected) from problem


def _example(given: object, where: str) -> Example:
    """Return example inputs given in any of the accepted forms; each needs a batch dimension, of equal size."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(given, Example):
        args, kwargs = given.args, given.kwargs
    elif isinstance(given, Mapping):
        kwargs = {str(key): value for key, value in given.items()}
    else:
        args = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    values = [*args, *kwargs.values()]
    if not values or not all(isinstance(value, Tensor) for value in values):
        kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise ModelError("The example inputs are not tensors", where=where, found=kinds, expected=_RESULT)
    if len({value.shape[:1] for value in values}) > 1 or not all(value.shape[:1] > (0,) for value in values):
        raise ModelError(
            "The example inputs have no common batch dimension",
            where=where,
            found=", ".join(str(tuple(value.shape)) for value in values),
            expected="the same size, at least 1, in dimension 0 of each",
        )
    return Example(args=args, kwargs=kwargs)


def _guess(model: nn.Module, sequence: int | None, where: str) -> Example:
    """Return inputs for a model that came without, if its first layer is a linear layer or an embedding."""
    first = next((module for module in model.modules() if not any(module.children())), None)
    if isinstance(first, nn.Linear):
        return Example(args=(torch.zeros(2, first.in_features),), kwargs={})
    if isinstance(first, nn.Embedding) and sequence is not None:
        return Example(args=(torch.zeros(2, sequence, dtype=torch.long),), kwargs={})
    need = "a sequence" if isinstance(first, nn.Embedding) else "example inputs"
    raise ModelError(
        f"This model needs {need}",
        where=where,
        found=f"a first layer {type(first).__name__}",
        next=f"Return {_RESULT}" + ("; or give --sequence N" if need == "a sequence" else ""),
    )


def _repeated(batch: int, seed: int, *, example: Example) -> tuple[Example, None]:
    """Return `batch` samples of the example, repeated in order, and None because no targets are known.

    The seed chooses the sample to begin with.
    """

    def repeat(value: Tensor) -> Tensor:
        return value[(torch.arange(batch, device=value.device) + seed % len(value)) % len(value)]

    args = tuple(repeat(value) for value in example.args)
    return Example(args=args, kwargs={key: repeat(value) for key, value in example.kwargs.items()}), None


def said(error: BaseException) -> str:
    """Return an error of other people's code in one line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
