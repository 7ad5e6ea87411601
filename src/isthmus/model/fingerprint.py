"""The hash of a model that a user's function built: its whole tree of objects, and the code it came from.

Two builds with equal fingerprints do the same work, so they share a captured graph. If the tree has something that
cannot be described reliably (an array, a generator, an object with slots), the model has no fingerprint and is captured
each time. What the code reads elsewhere (environment, files) is seen only as far as it shows in the tree.
"""

from __future__ import annotations

import enum
import sys
import sysconfig
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, ModuleType
from typing import TYPE_CHECKING, Any

from isthmus.model.cache import content_key, versions

if TYPE_CHECKING:
    from torch import nn

    from isthmus.model.capture import Example

__all__ = ["fingerprint"]

_VERSIONED = ("torch", "transformers")
_KNOWN = frozenset(("isthmus", *_VERSIONED, *sys.stdlib_module_names))  # their versions stand for their code


def fingerprint(module: nn.Module, example: Example) -> str | None:
    """Return a hash of everything that a model does, or None if that cannot be described.

    It covers objects, parameter names, shapes and dtypes, ties, example shapes, code and versions.
    """
    tree = _Tree()
    try:
        parts = [*tree.describe(module), *tree.describe(example.args), *tree.describe(example.kwargs)]
        return content_key([*parts, *_code(tree.holders), versions(*_VERSIONED)])
    except (_UnknownError, OSError, RecursionError):
        return None


class _UnknownError(Exception):
    """Raised where something cannot be described."""


class _Tree:
    """Walks objects depth first; an object met again is named by its number, which keeps ties and ends cycles."""

    def __init__(self) -> None:
        self.holders: set[str] = set()  # modules of the classes and functions met
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # objects kept alive, so that no id is used again during the walk

    def describe(self, value: Any) -> Iterator[str]:
        """Yield text parts that are equal if, and only if, the values are equal."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield repr(value)
        elif (number := self._numbers.get(id(value))) is not None:
            yield f"#{number}"
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._alive.append(value)
            yield from self._new(value)

    def _new(self, value: Any) -> Iterator[str]:
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, MethodDescriptorType, ModuleType)):
            yield from self._code(value)
        elif isinstance(value, partial):
            yield from self._items("partial", (value.func, value.args, value.keywords))
        elif isinstance(value, weakref.ref):  # nn.GRU and similar layers refer to their weights so
            yield from self._items("ref", (value(),))
        elif isinstance(value, enum.Enum):
            yield from self._items(value.name, (type(value),))
        elif isinstance(value, Mapping):
            yield from self._items(type(value).__name__, (part for item in value.items() for part in item))
        elif isinstance(value, (tuple, list)):
            yield from self._items(type(value).__name__, value)
        elif isinstance(value, (set, frozenset)):
            yield from self._items("set", sorted(value, key=repr))
        else:
            yield from self._object(value)

    def _object(self, value: Any) -> Iterator[str]:
        """Describe a tensor by its type, shape and dtype, and any other object by its class and attributes.

        Whether a tensor requires a gradient is described too. A dtype, device, layout or memory format is described by
        its text.
        """
        import torch

        if isinstance(value, torch.Tensor):
            yield f"{type(value).__name__} {tuple(value.shape)} {value.dtype} {value.requires_grad}"
        elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            yield repr(value)
        elif hasattr(value, "__dict__") and not any(vars(kind).get("__slots__") for kind in type(value).__mro__):
            yield from self._items("object", (type(value), dict(vars(value))))
        else:
            raise _UnknownError(type(value).__name__)

    def _code(self, value: Any) -> Iterator[str]:
        """Describe a class or function by its full name, and what a function has bound (defaults, closure) by value."""
        module = getattr(value, "__module__", None) or ""
        self.holders |= {kind.__module__ for kind in value.__mro__} if isinstance(value, type) else {module}
        yield f"{module}:{getattr(value, '__qualname__', value.__name__)}"
        if isinstance(value, FunctionType):
            bound = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from self._items("bound", (value.__defaults__, value.__kwdefaults__, *bound))

    def _items(self, kind: str, values: Any) -> Iterator[str]:
        yield f"{kind}("
        for value in values:
            yield from self.describe(value)
        yield ")"


def _code(holders: set[str]) -> Iterator[str | bytes]:
    """Yield names and sources of all loaded modules that the model may depend on.

    These are the modules of the packages that hold a class of the tree, and all modules that are not installed.
    """
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = {name: file for name, file in files.items() if _root(name) not in _KNOWN}
    if any(own.get(name, "") is None for name in holders):
        raise _UnknownError("code without a file")
    roots = {_root(name) for name in holders}
    paths = sysconfig.get_paths()
    installed = tuple(paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, file in sorted(own.items()):
        if file and (_root(name) in roots or not file.startswith(installed)):
            yield name
            yield Path(file).read_bytes()


def _root(module: str) -> str:
    return module.partition(".")[0]
