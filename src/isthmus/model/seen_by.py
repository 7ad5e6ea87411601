"""Finds what a model's functions see besides its modules: global variables, closures, attributes of classes.

A forward may count its calls there, too. Only code of the user's and of libraries on top of torch is followed, from
the methods of the modules' classes and the functions that the modules hold to the functions that these name.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

__all__ = ["counted", "has_own_code", "own_attributes", "seen_by"]

_FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "isthmus", "transformers"}


def seen_by(model: nn.Module) -> dict[str, Any]:
    """Return the values that the functions of a model see outside of it, by name."""
    found, functions = _own_code(model)
    waiting = list(functions.values())
    while waiting:
        _function(waiting.pop(), found, functions, waiting)
    return found


def has_own_code(model: nn.Module) -> bool:
    """Return whether a model runs functions of the user's, and not only those of libraries that are known."""
    return bool(_own_code(model)[1])


def _own_code(model: nn.Module) -> tuple[dict[str, Any], dict[int, FunctionType]]:
    """Return the attributes of the user's classes of modules, and the functions that these classes and modules hold."""
    found: dict[str, Any] = {}
    functions: dict[int, FunctionType] = {}
    for kind in {type(module): None for module in model.modules()}:
        for base in kind.__mro__:
            if not _is_foreign(base.__module__):
                _class(base, found, functions)
    for module in model.modules():
        for value in list(vars(module).values()):
            for held in list(value.values()) if isinstance(value, dict) else [value]:  # such as hooks
                _hold(held, functions)
    return found, functions


def own_attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of the user's; None for any other value."""
    if isinstance(value, (nn.Module, Tensor, type, ModuleType, FunctionType, MethodType)):
        return None
    if _is_foreign(type(value).__module__):
        return None
    found = getattr(value, "__dict__", None)
    return dict(found) if isinstance(found, dict) else None


def counted(value: Any) -> str | None:
    """Return what tells the next number of an `itertools.count`; None for any other value."""
    return repr(value) if isinstance(value, itertools.count) else None


def _is_foreign(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _FOREIGN


def _hold(value: Any, functions: dict[int, FunctionType]) -> bool:
    """Keep a function of the user's to be looked into; whether the value is any function at all."""
    value = value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value
    if not isinstance(value, FunctionType):
        return False
    if not _is_foreign(value.__module__):
        functions.setdefault(id(value), value)
    return True


def _class(base: type, found: dict[str, Any], functions: dict[int, FunctionType]) -> None:
    for name, value in vars(base).items():
        if not _hold(value, functions) and not name.startswith("__"):
            found[f"{base.__qualname__}.{name}"] = value


def _function(
    function: FunctionType, found: dict[str, Any], functions: dict[int, FunctionType], waiting: list[FunctionType]
) -> None:
    """Note the variables that a function names, and the functions among them, which are looked into in turn."""
    for name, value in _variables(function):
        known = len(functions)
        if _hold(value, functions):
            waiting += list(functions.values())[known:]
        elif not isinstance(value, (type, ModuleType, nn.Module)):
            found[f"{name} in {function.__qualname__}"] = value


def _variables(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the names and values of a function's global variables, of its closure, and of its own attributes."""
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # it has no value yet
            continue
        yield name, content
    yield from vars(function).items()


def _names(compiled: CodeType) -> set[str]:
    inner = (_names(part) for part in compiled.co_consts if isinstance(part, CodeType))
    return set(compiled.co_names).union(*inner)
