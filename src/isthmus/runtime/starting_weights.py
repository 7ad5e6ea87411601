"""Starting weights from files: one safetensors file, or a folder as transformers writes it.

A folder has `model.safetensors`, or `model.safetensors.index.json` and the files that it names. Files are mapped to
memory, so that a worker reads the tensors that it holds and no others. Names and shapes must be those of the model: a
tensor that is missing or that the model does not have is refused. A tied parameter may stand under any of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from isthmus.errors import DataError
from isthmus.files import close_name
from isthmus.model.job import Job

__all__ = ["StartingWeights", "check_weights"]

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_INDEX = 256 * 2**20  # bytes


class _Index(msgspec.Struct):
    """What an index file says: the file of each tensor, by name."""

    weight_map: dict[str, str]


class StartingWeights:
    """The tensors of a file or folder, by name."""

    def __init__(self, path: Path) -> None:
        """Read the names and shapes."""
        self.path = path
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _files(path):
            for name in _names(file):
                if name in self._files:
                    raise self._bad(f"two files hold {name}", f"{self._files[name].name} and {file.name}")
                self._files[name] = file

    def load(self, module: nn.Module, wanted: Collection[str] | None = None) -> None:
        """Copy into a module's parameters and saved buffers, or those that are `wanted`, what the files hold for them.

        Refuse files that do not fit the whole module.
        """
        places = self._places(module)
        with torch.no_grad():
            for name, tensor in _state(module).items():
                if wanted is None or name in wanted:
                    first, *others = places[name]
                    tensor.copy_(self._tensor(first))
                    self._check_tied(first, others)

    def check(self, module: nn.Module) -> None:
        """Refuse files whose names or shapes differ from the module's."""
        self._places(module)

    def _check_tied(self, first: str, others: Sequence[str]) -> None:
        """Refuse other values under another name of a tied parameter: the model could hold only one of them."""
        for other in others:
            if not torch.equal(self._tensor(other), self._tensor(first)):
                raise self._bad(
                    "the weights have two tensors for one tied parameter of the model", f"{first} and {other} differ",
                    "one tensor, or two that are equal", "Use a model that does not tie them",
                )  # fmt: skip

    def _places(self, module: nn.Module) -> dict[str, list[str]]:
        """Return for each name of the module's state the names in the files: several if a tie is saved twice."""
        found, left = dict[str, list[str]](), set(self._files)
        names = _names_of_ties(module)
        for name, tensor in _state(module).items():
            here = [other for other in names.get(name, (name,)) if other in self._files]
            if not here:
                near = close_name(name, sorted(left))
                raise self._bad(f"the weights lack {name}", f"{len(self._files)} other tensors", next=near)
            shape = self._shape(here[0])
            if shape != tuple(tensor.shape):
                raise self._bad(f"{here[0]} has another shape than the model's", str(shape), str(tuple(tensor.shape)))
            kind = self._dtype(here[0])
            if _is_real(kind) != tensor.is_floating_point():
                expected = str(tensor.dtype).removeprefix("torch.")
                raise self._bad(f"{here[0]} holds another kind of numbers than the model's", kind, expected)
            found[name] = here
            left -= set(here)
        if left:
            raise self._bad("the weights have tensors that the model does not have", ", ".join(sorted(left)[:4]))
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def _dtype(self, name: str) -> str:
        """Return the dtype of a tensor as safetensors writes it, like BF16."""
        return str(self._file(name).get_slice(name).get_dtype())

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]

    def _bad(self, what: str, found: str, expected: str | None = None, next: str | None = None) -> DataError:
        return DataError(what, where=f"weights: {self.path}", found=found, expected=expected, next=next)


def check_weights(job: Job, module: nn.Module) -> None:
    """Refuse a job's starting weights if they cannot be read, or do not fit its model; no tensor is read."""
    if job.weights is not None:
        StartingWeights(Path(job.weights)).check(module)


def _is_real(dtype: str) -> bool:
    """Return whether a dtype that safetensors writes is one of floating-point numbers."""
    return dtype.startswith(("F", "BF"))


def _state(module: nn.Module) -> Mapping[str, Tensor]:
    """Return the module's parameters, ties once, and the buffers that are saved."""
    state = module.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in state}
    return {**dict(module.named_parameters()), **buffers}


def _names_of_ties(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter, by its first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {each[0]: tuple(each) for each in names.values()}


def _files(path: Path) -> Iterator[Path]:
    """Yield the safetensors files of a path."""
    if _is_file(path):
        yield path
    elif _is_folder(path):
        if (path / _ONE).is_file():
            yield path / _ONE
        elif (path / _INDEX).is_file():
            for name in sorted(set(_read_index(path / _INDEX).weight_map.values())):
                if Path(name).name != name or not _is_file(path / name):
                    raise DataError(
                        "the index names a file that is not there", where=str(path / _INDEX), found=name,
                        expected="safetensors files in the same folder",
                    )  # fmt: skip
                yield path / name
        else:
            raise DataError(
                "the folder has no weights", where=f"weights: {path}", expected=f"{_ONE}, or {_INDEX} and its files"
            )
    else:
        raise DataError(
            "there are no such weights", where=f"weights: {path}",
            expected="a safetensors file, or a folder that transformers' save_pretrained wrote",
        )  # fmt: skip


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or its folder may not be read
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _read_index(path: Path) -> _Index:
    try:
        if path.stat().st_size > _LARGEST_INDEX:
            raise msgspec.DecodeError(f"it is larger than {_LARGEST_INDEX} bytes")
        return msgspec.json.decode(path.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise DataError("the index of the weights cannot be read", where=str(path), found=str(problem)[:200]) from None


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as problem:
        raise DataError(
            "this is not a safetensors file", where=f"weights: {path}", found=str(problem)[:200],
            next="Files of pickled tensors (.bin, .pt) are never read: save them with safetensors.torch.save_model",
        ) from None  # fmt: skip
