"""Finds out whether a model's forward changes what it keeps in Python: attributes, buffers, lists, random states.

`torch.export` runs the forward once and records operations on tensors. A counter that is a Python number, a buffer that
is replaced by another tensor, a list of what was seen before: all of these would stay as they were in that one call.
The same holds for what the model's functions keep outside of it (`seen_by.py`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.nn.utils.weight_norm import WeightNorm

from isthmus.model.restored_state import kept_state
from isthmus.model.seen_by import counted, own_attributes, seen_by

__all__ = ["ChangedError", "HiddenState", "settled", "unchanged_by_calls"]

_DEPTH = 3  # levels: an attribute, a container in it, what that holds
_HOOKS = {  # transformers installs these in the first call; they only collect results that were asked for
    *("_output_capturing_hooks_installed", "_forward_hooks", "_forward_hooks_with_kwargs"),
    "_forward_hooks_always_called",
}
_LARGE = 10_000  # a container with more entries than this, such as a vocabulary, is compared by their number
_PLAIN = (bool, int, float, complex, str, bytes)


class ChangedError(Exception):
    """Ends an export because a call of the model changes what the next call sees."""


@dataclass(frozen=True)
class _Value:
    """A value and, for a container, what it held."""

    value: Any
    parts: tuple[tuple[Any, _Value], ...] | None

    @classmethod
    def of(cls, value: Any, depth: int = _DEPTH) -> _Value:
        found = _parts(value) if depth else None
        return cls(value, None if found is None else tuple((k, cls.of(part, depth - 1)) for k, part in found))

    def same(self, now: Any) -> bool:
        """Return whether a value is still the same, or an equal number or text."""
        if now is self.value and self.parts is None:
            return True
        if self.parts is None or type(now) is not type(self.value):
            return type(now) is type(self.value) and isinstance(now, _PLAIN) and repr(now) == repr(self.value)
        found = _parts(now) or ()
        return len(found) == len(self.parts) and all(
            (key is other or key == other) and part.same(new)
            for (key, part), (other, new) in zip(self.parts, found, strict=True)
        )

    def numbers(self, name: str) -> Iterator[tuple[str, Any]]:
        """Return the numbers in a value, with the names and places that lead to them."""
        if isinstance(self.value, (bool, int, float, complex)):
            yield name, self.value
        for key, part in self.parts or ():
            yield from part.numbers(f"{name}.{key}".lstrip("."))


def _parts(value: Any) -> tuple[tuple[Any, Any], ...] | None:
    """Return what a container holds, each item with its key or place, or None if the value is no container."""
    if isinstance(value, (dict, list, tuple, deque, set)) and len(value) > _LARGE:
        return (("the number of entries", len(value)),)
    if isinstance(value, dict):
        return tuple(dict.items(value))
    if isinstance(value, (list, tuple, deque)):
        return tuple(enumerate(value))
    if isinstance(value, set):
        return tuple((part, None) for part in value)
    if (number := counted(value)) is not None:
        return (("the next number", number),)
    found = own_attributes(value)
    return None if found is None else tuple(found.items())


class HiddenState:
    """A record of what the modules of a model and Python's random numbers hold at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module, _Value.of(vars(module))) for name, module in model.named_modules()]
        self._model = model
        self._outside = {name: _Value.of(value) for name, value in seen_by(model).items()}
        self._random = random.getstate()
        self._numpy = _numpy_state()

    def changed(self) -> str | None:
        """Return the name of something that is no longer as it was, or None if nothing has changed."""
        for name, module, before in self._modules:
            assert before.parts is not None
            now, known = vars(module), dict(before.parts)
            for key in {**known, **now}:
                if isinstance(getattr(type(module), key, None), cached_property) or key in _computed(module) | _HOOKS:
                    continue
                if key not in now or key not in known or not known[key].same(now[key]):
                    return f"{name}.{key}".lstrip(".")
        now = seen_by(self._model)
        for name in {**self._outside, **now}:
            if name not in now or name not in self._outside or not self._outside[name].same(now[name]):
                return name
        if random.getstate() != self._random or _numpy_state() != self._numpy:
            return "the state of random numbers outside of torch"
        return None

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that the modules and their functions hold, by name."""
        held = [*((name, value) for name, _, value in self._modules), *self._outside.items()]
        return {name: number for start, value in held for name, number in value.numbers(start)}

    def restore_random(self) -> None:
        """Put back the state of the random numbers of Python and numpy."""
        random.setstate(self._random)
        if self._numpy is not None:
            name, keys, *rest = self._numpy
            sys.modules["numpy"].random.set_state((name, sys.modules["numpy"].frombuffer(keys, "uint32"), *rest))


def _numpy_state() -> tuple[Any, ...] | None:
    """Return the state of numpy's random numbers as values that can be compared, or None if numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


def _computed(module: nn.Module) -> set[str]:
    """Return the attributes that torch computes from parameters in every call.

    They are those of `weight_norm`, and lists in recurrent layers.
    """
    lists = {"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set()
    return lists | {hook.name for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)}


@contextmanager
def unchanged_by_calls(model: nn.Module) -> Iterator[None]:
    """Let a model be called that changes nothing except tensors in place; raise ChangedError for any other."""
    before, called = HiddenState(model), []

    def begin(*_: Any) -> None:
        called.append(HiddenState(model))

    def end(*_: Any) -> None:
        if (name := called.pop().changed()) is not None:
            raise ChangedError(f"each call of the model changes {name}")

    handles = [model.register_forward_pre_hook(begin, prepend=True), model.register_forward_hook(end)]
    try:
        with kept_state(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
        before.restore_random()


def settled(model: nn.Module, called: Callable[[], object], exported: Callable[[], ExportedProgram]) -> ExportedProgram:
    """Export a model that works out some values in its first call, such as sizes, and then keeps them.

    If the first two calls do the same operations, and the second leaves everything as it found it, then all calls do.
    For any other model, raise ChangedError.
    """
    before = HiddenState(model)
    try:
        with kept_state(model):
            first = exported()
        with kept_state(model), torch.random.fork_rng():
            called()
            with unchanged_by_calls(model):
                second = exported()
    finally:
        before.restore_random()
    if str(first.graph) != str(second.graph):
        raise ChangedError("the first call of the model does something else than the next")
    return first
