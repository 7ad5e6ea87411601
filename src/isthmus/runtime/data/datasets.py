"""Samples from the user's code, checked and brought into the form with which the model was captured."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from isthmus.errors import DataError, IsthmusError
from isthmus.model.built import BuiltModel
from isthmus.model.function import said
from isthmus.model.torch_export import Example

__all__ = ["CONTRACT", "Dataset", "described", "inputs_of", "refilled"]

CONTRACT = "What data and losses must keep to is in docs/jobs.md, under: Data and a loss of your own"
_MOST = 2**62  # samples
_ITEM = "[number] -> (inputs, target), inputs a tensor, a tuple or a dict of tensors without a batch dimension"
_DATASET = f"a dataset with len() and {_ITEM}; or an object with count and get(numbers) -> (inputs, targets)"


class Dataset:
    """Samples from the user's code, checked and brought into the model's form."""

    def __init__(self, given: Any, where: str, built: BuiltModel) -> None:
        self._given, self._where = given, where
        self._form = built.example(1, device="meta")
        self._names = _input_names(built.module, self._form)
        self._batches = callable(getattr(given, "get", None)) and _has_count(given)
        self._proven = False
        self.count: int | None = self._counted()

    def get(self, numbers: Sequence[int]) -> tuple[Example, Tensor | None]:
        """Return these samples; the first call reads one of them twice, and refuses it if it differs."""
        if not self._proven:
            first, again = (pytree.tree_leaves(self._got(numbers[:1])) for _ in range(2))
            if not all(_same(a, b) for a, b in zip(first, again, strict=True)):
                raise DataError(
                    "a sample differs when it is taken again",
                    where=self._where,
                    found=f"two different samples {numbers[0]}",
                    expected="a sample that depends on its number alone",
                    next="Seed what is random in it (augmentation) with the sample's number",
                )
            self._proven = True
        inputs, target = self._got(numbers)
        return self._fitted(inputs, len(numbers)), target

    def _counted(self) -> int | None:
        try:
            count = self._given.count if self._batches else len(self._given)
        except TypeError as error:
            count = "none" if not self._batches and not hasattr(self._given, "__len__") else said(error)
        except (Exception, SystemExit) as error:
            count = said(error)
        if isinstance(count, int) and count > _MOST:
            count = f"above {_MOST}"
        if count is None or (isinstance(count, int) and count > 0):
            return count
        raise DataError(
            "the function gave no numbered samples",
            where=self._where,
            found=f"a {type(self._given).__name__} with count {count}",
            expected=_DATASET,
            next=CONTRACT,
        )

    def _got(self, numbers: Sequence[int]) -> tuple[Any, Tensor | None]:
        """Return inputs in any of the accepted forms, and targets, both batch first."""
        try:
            items = [self._given.get(list(numbers))] if self._batches else [self._given[number] for number in numbers]
        except IsthmusError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(
                "a sample cannot be read",
                where=self._where,
                found=said(error),
                expected=f"samples {', '.join(map(str, numbers[:4]))}{' ...' if len(numbers) > 4 else ''}",
            ) from error
        for item in items:
            if not isinstance(item, (tuple, list)) or len(item) != 2:
                raise self._bad("a sample is not a pair", described(item), _DATASET)
        pairs = [pytree.tree_map(_tensor, (self._plain(inputs), target)) for inputs, target in items]
        inputs, target = pairs[0] if self._batches else self._stacked(pairs)
        if target is not None and not (isinstance(target, Tensor) and target.shape[:1] == (len(numbers),)):
            raise self._bad("the targets are not one for each sample", described(target), "a tensor, batch first")
        return inputs, target

    def _plain(self, inputs: Any) -> Any:
        """Return the inputs as a tensor, a tuple or a dict."""
        if isinstance(inputs, Example):
            return {**dict(zip(self._names, inputs.args, strict=False)), **inputs.kwargs}
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return tuple(inputs) if isinstance(inputs, (tuple, list)) else inputs

    def _stacked(self, pairs: list[Any]) -> tuple[Any, Tensor | None]:
        try:
            stacked: tuple[Any, Tensor | None] = pytree.tree_map(lambda *parts: _stack(parts), *pairs)
        except (RuntimeError, ValueError, TypeError) as error:
            shapes = dict.fromkeys(", ".join(map(described, pytree.tree_leaves(pair))) for pair in pairs)
            raise self._bad(
                "the samples cannot be stacked", " and ".join(list(shapes)[:4]), "samples of one shape"
            ) from error
        return stacked

    def _fitted(self, inputs: Any, batch: int) -> Example:
        """Return the inputs in the form with which the model was captured; raise DataError if they do not fit."""
        if isinstance(inputs, Mapping):
            values = [inputs[name] for name in self._names] if set(inputs) == set(self._names) else []
        else:
            values = list(inputs) if isinstance(inputs, tuple) else [inputs]
        wanted = inputs_of(self._form)
        if len(values) != len(wanted):
            given = ", ".join(map(str, inputs)) if isinstance(inputs, Mapping) else f"{len(values)} inputs"
            raise self._bad("the samples have other inputs than the model", given, ", ".join(self._names))
        for name, value, like in zip(self._names, values, wanted, strict=True):
            fits = isinstance(value, Tensor) and value.shape == (batch, *like.shape[1:])
            if not fits or _kind(value) != _kind(like):
                where = f"{name} as {described(value)}"
                raise self._bad("the samples do not fit the model", where, f"{described(like)}, for any batch")
        return refilled(self._form, [v.to(like.dtype) for v, like in zip(values, wanted, strict=True)])

    def _bad(self, what: str, found: str, expected: str) -> DataError:
        return DataError(what, where=self._where, found=found, expected=expected, next=CONTRACT)


def _has_count(given: Any) -> bool:
    """Return whether an object has a `count`, even one that fails when it is read."""
    try:
        return hasattr(type(given), "count") or hasattr(given, "count")
    except (Exception, SystemExit):  # raised by a property
        return True


def _tensor(value: Any) -> Any:
    """Return arrays and numbers as tensors (floats in fp32), and everything else unchanged."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float32)
    return torch.as_tensor(value) if isinstance(value, (np.ndarray, np.generic, int, bool)) else value


def _stack(parts: Sequence[Any]) -> Any:
    if all(part is None for part in parts):
        return None
    return torch.stack(list(parts))


def _same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return a is b
    return bool(((a == b) | ((a != a) & (b != b))).all())  # NaN counts as equal to NaN


def _input_names(module: nn.Module, form: Example) -> list[str]:
    """Return the names of the model's inputs in the order of the form; positional ones are named as in its forward."""
    names = [*inspect.signature(module.forward).parameters]
    return [*(names[i] if i < len(names) else f"input{i}" for i in range(len(form.args))), *form.kwargs]


def inputs_of(example: Example) -> list[Tensor]:
    """Return all inputs, positional ones first."""
    return [*example.args, *example.kwargs.values()]


def refilled(form: Example, values: Sequence[Tensor]) -> Example:
    """Return an example of the same form with other values."""
    count = len(form.args)
    return Example(args=tuple(values[:count]), kwargs=dict(zip(form.kwargs, values[count:], strict=True)))


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "mask"
    return "real" if value.is_floating_point() else "complex" if value.is_complex() else "integer"


def described(value: Any) -> str:
    """Return a text that describes a value: the dtype and shape of a tensor, else the name of its type."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
