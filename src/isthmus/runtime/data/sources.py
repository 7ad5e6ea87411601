"""The samples of a job, by number. A sample depends on its number alone, so any worker can get any sample.

synthetic                   drawn for each number from the job's seed; endless
text:FILE                   the bytes of a file as tokens, each followed by its next byte
tokens:FILE                 the numbers of a file as tokens: a .npy of 16 or 32 bits, else raw 16 bits, little-endian
package.module:function     the user's: a dataset with `len()` and `[number] -> (inputs, target)`, or Samples

The order in which a job goes through its samples is in `sample_order.py`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.errors import DataError
from isthmus.model.built import BuiltModel
from isthmus.model.function import call, find
from isthmus.model.job import Job
from isthmus.model.torch_export import Example
from isthmus.runtime.data.datasets import Dataset, described, inputs_of, refilled

__all__ = ["Samples", "open_samples"]

_BYTES = 256
_NPY = b"\x93NUMPY"  # the first bytes of a .npy file


class Samples(Protocol):
    """Numbered samples; `count` is None if they never end."""

    @property
    def count(self) -> int | None:
        """Return the number of samples, which are numbered 0 .. count - 1; None if they never end."""

    def get(self, numbers: Sequence[int]) -> tuple[Example, Tensor | None]:
        """Return the inputs of these samples as the model takes them, batch first, and their targets; on the CPU."""


def open_samples(job: Job, built: BuiltModel) -> Samples:
    """Return the samples that the job's `data` names.

    This imports the code that it names: call it only if `named_code(job)` is trusted.
    """
    if job.data == "synthetic":
        return _Synthetic(job, built)
    kind, _, path = job.data.partition(":")
    if kind in ("text", "tokens"):
        return _Sequences(kind, Path(path), built)
    offered = {"seed": job.seed} if built.sequence is None else {"seed": job.seed, "sequence": built.sequence}
    expected = "a function that can be called without arguments, or with seed and sequence"
    given = call(find(job.data, DataError), offered, job.data, expected=expected, error=DataError)
    return Dataset(given, job.data, built)


class _Synthetic:
    """Samples that the model draws for itself, each from a seed of its own."""

    count = None

    def __init__(self, job: Job, built: BuiltModel) -> None:
        self._seed, self._draw = job.seed, built.draw
        example, target = built.draw(1, 0)
        if any(value.is_meta for value in inputs_of(example)):
            raise DataError(
                "the model was built without data, and so was its example",
                where=built.name,
                next="Name a data function in the job: data: package.module:function",
            )
        if target is None and job.loss == "default":
            raise DataError(
                "there are no synthetic targets for this model, and the default loss needs some",
                where=built.name,
                next="Name data or a loss in the job: data: package.module:function, loss: package.module:function",
            )

    def get(self, numbers: Sequence[int]) -> tuple[Example, Tensor | None]:
        """Draw these samples."""
        drawn = [self._draw(1, _seed_of(self._seed, number)) for number in numbers]
        args = zip(*(example.args for example, _ in drawn), strict=True)
        kwargs = {key: torch.cat([example.kwargs[key] for example, _ in drawn]) for key in drawn[0][0].kwargs}
        targets = [target for _, target in drawn if target is not None]
        return Example(args=tuple(map(torch.cat, args)), kwargs=kwargs), torch.cat(targets) if targets else None


def _seed_of(seed: int, number: int) -> int:
    """Return 63 bits that differ for each pair of a seed and a number."""
    return int.from_bytes(blake2b(f"sample {seed} {number}".encode(), digest_size=8).digest(), "little") >> 1


class _Sequences:
    """A file of tokens as samples, which predict the next token.

    Sample i is the tokens i s .. (i + 1) s of the file, with s the length of a sequence: all but the last are inputs,
    all but the first are targets. The bytes of `text:FILE` are tokens themselves; `tokens:FILE` holds numbers of 16 or
    32 bits. A file that changes after it was opened is refused, because its samples would be others.
    """

    def __init__(self, kind: str, path: Path, built: BuiltModel) -> None:
        self._path, self._where = path, f"{kind}:{path}"
        self._state = self._look()
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)
        self._start = 0  # the byte at which the tokens begin
        if kind == "tokens":
            self._dtype, self._start = _stored(path, self._where)
        self._vocabulary = _vocabulary(built)
        self._form = _next_token_form(built, self._where, known=_BYTES if kind == "text" else 1)
        self._length = inputs_of(self._form)[0].shape[1]
        tokens = (self._state.size - self._start) // self._dtype.itemsize
        if tokens <= self._length:
            what, unit = ("text", "bytes") if kind == "text" else ("file", "tokens")
            raise DataError(
                f"the {what} is too short for one sample",
                where=self._where,
                found=f"{tokens} {unit}",
                expected=f"at least {self._length + 1}: a sequence and the {unit[:-1]} after it",
            )
        self.count = (tokens - 1) // self._length

    def get(self, numbers: Sequence[int]) -> tuple[Example, Tensor]:
        """Read these samples."""
        width, size = self._dtype.itemsize, self._length + 1
        try:
            with self._path.open("rb", buffering=0) as file:
                self._check_same(_State.of(os.fstat(file.fileno())))
                read = [
                    os.pread(file.fileno(), size * width, self._start + number * self._length * width)
                    for number in numbers
                ]
        except OSError as error:
            raise self._unreadable(error) from error
        if any(len(part) != size * width for part in read):
            found, expected = str(list(numbers)[:8]), f"numbers below {self.count}"
            raise DataError("a sample lies outside of the text", where=self._where, found=found, expected=expected)
        stored = np.frombuffer(b"".join(read), dtype=self._dtype).reshape(len(read), size)
        outside = stored[(stored < 0) | (stored >= self._vocabulary)]
        if outside.size:
            raise DataError(
                "a token is not in the model's vocabulary",
                where=self._where,
                found=f"token {int(outside[0])}, read as {self._dtype.name}",
                expected=f"tokens from 0 to {self._vocabulary - 1}",
                next="Use the model's own tokenizer; save 32-bit tokens as .npy",
            )
        tokens = torch.from_numpy(stored.astype(np.int64))
        return refilled(self._form, [tokens[:, :-1].contiguous()]), tokens[:, 1:].contiguous()

    def _look(self) -> _State:
        try:
            found = self._path.stat()
            if stat.S_ISREG(found.st_mode):
                self._path.open("rb").close()
        except OSError as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device or a pipe"
            raise DataError("this is not a file", where=self._where, found=kind, expected="a file of text")
        return _State.of(found)

    def _check_same(self, now: _State) -> None:
        if now != self._state:
            raise DataError(
                "the text was changed while it was used",
                where=self._where,
                found=f"{now.size} bytes, written at another time",
                expected=f"the {self._state.size} bytes that were there when training began",
                next="Start again, on a copy that nobody writes to",
            )

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            "the text cannot be read",
            where=self._where,
            found=error.strerror or type(error).__name__,
            expected="a file on every machine that computes the first or the last stage",
        )


@dataclass(frozen=True)
class _State:
    """The properties by which a changed file is detected."""

    size: int
    written: int  # ns
    file: int

    @classmethod
    def of(cls, found: os.stat_result) -> _State:
        return cls(found.st_size, found.st_mtime_ns, found.st_ino)


def _stored(path: Path, where: str) -> tuple[np.dtype[Any], int]:
    """Return the dtype of a file's tokens and the byte at which they begin; nothing is unpickled."""
    with path.open("rb") as file:
        whole = os.fstat(file.fileno()).st_size
        is_array = path.suffix.lower() == ".npy" or file.read(len(_NPY)) == _NPY
    if not is_array:
        if whole % 2:
            raise DataError(
                "the file does not hold whole tokens", where=where, found=f"{whole} bytes",
                expected="raw tokens of 2 bytes each, or a .npy file",
            )  # fmt: skip
        return np.dtype("<u2"), 0
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except Exception as problem:  # numpy raises whatever it meets while it reads the header as Python
        found = str(problem)[:200] or type(problem).__name__
        raise DataError("the tokens cannot be read", where=where, found=found, expected="a .npy file") from None
    if mapped.ndim != 1 or mapped.dtype.kind not in "ui" or mapped.dtype.itemsize not in (2, 4):
        raise DataError(
            "this is no file of tokens",
            where=where,
            found=f"an array {mapped.dtype.name}{list(mapped.shape)}",
            expected="one dimension of integers of 16 or 32 bits",
        )
    if whole != mapped.offset + mapped.nbytes:
        raise DataError(
            "the file is larger than its array", where=where, found=f"{whole} bytes",
            expected=f"{mapped.offset + mapped.nbytes}: {mapped.size} tokens and what is before them",
        )  # fmt: skip
    return mapped.dtype, int(mapped.offset)


def _vocabulary(built: BuiltModel) -> int:
    """Return the number of tokens that the model knows: the rows of its first embedding."""
    return next((m.num_embeddings for m in built.module.modules() if isinstance(m, nn.Embedding)), 0)


def _next_token_form(built: BuiltModel, where: str, known: int) -> Example:
    """Return an example of a model that reads one sequence of tokens, knows so many, and predicts the next token.

    Raise DataError for any other model.
    """
    example, target = built.draw(1, 0)
    inputs = inputs_of(example)
    vocabulary = _vocabulary(built)
    shifted = target is None or (target.shape == inputs[0].shape and torch.equal(target[:, :-1], inputs[0][:, 1:]))
    if len(inputs) != 1 or inputs[0].ndim != 2 or inputs[0].is_floating_point():
        found = "inputs " + ", ".join(described(value) for value in inputs)
    elif vocabulary < known:
        found = f"a vocabulary of {vocabulary}"
    elif not shifted:
        found = "a model that does not predict the next token"
    else:
        return example
    raise DataError(
        f"{built.name} cannot be trained on {'the bytes of a file' if known == _BYTES else 'a file of tokens'}",
        where=where,
        found=found,
        expected=f"a model that predicts the next of a sequence of tokens, and knows {known} or more",
        next="Use data: synthetic, or name a function: data: package.module:function",
    )
