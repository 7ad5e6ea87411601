"""Counter-based random numbers: each is a hash of a key and of its own place, computed on the tensor's device.

For sample s and element i (its number within the sample, other dimensions in order), with two 32-bit keys a, b of
(what is drawn, s) and all arithmetic modulo 2^32, bits = h(i) with

    x = 0x9E3779B1 i + a;   x = 0x7FEB352D (x xor x >> 16) + b;   x = 0x846CA68B (x xor x >> 15);   h = x xor x >> 16

read as a signed number. This is a Weyl sequence through the mixer `lowbias32` of C. Wellons, keyed twice so that no two
streams share a part. The integers are the same on every device, and so is everything that is decided by comparing them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ModelError
from isthmus.runtime.random.draws import Draw, Split

__all__ = ["Form", "Lot", "bits", "sample_keys", "threshold"]

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

_HALF = 1 << 31
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}  # bits of evenly spaced numbers in [0, 1)


@dataclass(frozen=True, eq=False)
class Lot:
    """The numbers that one random operation draws for some samples.

    `base` is the hash of everything but sample and element.
    """

    base: int
    block: str
    draw: Draw
    samples: Numbers

    def chance(self, p: float | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return booleans that are True with probability p, to the nearest 2^-32."""
        bits = self._bits(shape, device)
        if isinstance(p, Tensor):
            return bits.double() + _HALF < p.double() * 2.0**32
        below = threshold(p)
        if below <= -_HALF or below >= _HALF:
            return torch.full(tuple(shape), below >= _HALF, device=device)
        return bits < below

    def uniform(self, shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return uniform numbers of at least 0 and below 1, also after rounding to the type.

        They have as many random bits as the type represents evenly, and 32 if the type has more.
        """
        digits = _DIGITS.get(dtype, 32)
        whole = self._bits(shape, device).long() + _HALF
        wide = torch.float32 if dtype in _DIGITS else torch.float64
        return ((whole >> (32 - digits)).to(wide) * 2.0**-digits).to(dtype)

    def normal(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return normal numbers of mean 0 and deviation 1 in fp64, by the method of Box and Muller."""
        radius, angle = (self._bits(shape, device, stream).double() + (_HALF + 0.5) for stream in (0, 1))
        return torch.sqrt(-2 * torch.log(radius * 2.0**-32)) * torch.cos(angle * (2 * math.pi * 2.0**-32))

    def integer(self, low: int, high: int, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return integers from low to high - 1; raise ModelError if these are more than 2^31."""
        if high - low > _HALF:
            raise ModelError(
                "a random integer has too wide a range",
                where=f"block {self.block}",
                found=f"{low} to {high}",
                expected=f"at most {_HALF} values",
            )
        return ((self._bits(shape, device).long() + _HALF) * (high - low) >> 32) + low

    def _bits(self, shape: Sequence[int], device: torch.device, stream: int = 0) -> Tensor:
        """Return 32 random bits for every element, as signed integers."""
        dim, samples = self.draw.dim, len(self.samples)
        if dim >= len(shape) or not samples or shape[dim] % samples:
            raise ModelError(
                f"what {self.draw.operation} draws is not shaped by samples",
                where=f"block {self.block}",
                found=f"a tensor {list(shape)} for {samples} samples",
                expected=f"a multiple of the samples in dimension {dim}",
            )
        keys = sample_keys([(self.base + stream) % (1 << 64)], self.samples)[0]
        return bits(torch.from_numpy(keys).to(device, non_blocking=True), Form.of(shape, samples, dim, self.draw.split))


class Form(NamedTuple):
    """The shape of what is drawn, with `samples` samples in dimension `dim`, `merged` entries of it for each."""

    shape: tuple[int, ...]
    samples: int
    dim: int
    merged: int
    split: Split | None

    @classmethod
    def of(cls, shape: Sequence[int], samples: int, dim: int, split: Split | None) -> Form:
        """Return the form of a tensor."""
        return cls(tuple(shape), samples, dim, shape[dim] // samples, split)

    @property
    def inner(self) -> list[int]:
        """Return the shape of one sample."""
        return [*self.shape[: self.dim], self.merged, *self.shape[self.dim + 1 :]]

    @property
    def elements(self) -> int:
        """Return the number of elements of a sample."""
        return math.prod(self.inner)

    @property
    def rest(self) -> int:
        """Return the number of elements behind the dimension of the samples."""
        return math.prod(self.shape[self.dim + 1 :])

    @property
    def part(self) -> tuple[int, int, int, int]:
        """Return of the dimension that is split: the elements behind it, its size, its start and its whole size."""
        if self.split is None:
            return 1, 1, 0, 1
        inner, dim = self.inner, self.split.dim
        return math.prod(inner[dim + 1 :]), inner[dim], self.split.start, self.split.whole


def sample_keys(bases: Sequence[int], samples: Numbers) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return two keys for each base and sample, [bases, samples, 2], by the finaliser of splitmix64."""
    x = _finished(samples + np.uint64(0x9E3779B97F4A7C15)) + np.array(bases, dtype=np.uint64)[:, None]
    return _finished(x).view(np.int32).reshape(len(bases), len(samples), 2)


def threshold(chance: float) -> int:
    """Return the number that the bits of an element are below with this chance, to the nearest 2^-32."""
    return round(chance * 2.0**32) - _HALF


def bits(keys: Tensor, form: Form) -> Tensor:
    """Return 32 bits for every element, as signed integers, from the keys [samples, 2] of its sample."""
    a, b = keys[:, 0].view(-1, 1), keys[:, 1].view(-1, 1)
    found = _mixed(_places(form, keys.device), a, b)
    return found.view(form.samples, *form.inner).movedim(0, form.dim).reshape(form.shape)


def _places(form: Form, device: torch.device) -> Tensor:
    """Return each element's number within its sample; for a member with a part, within the whole sample."""
    inner, split = form.inner, form.split
    if split is None:
        return torch.arange(form.elements, dtype=torch.int32, device=device)
    inner[split.dim] = split.whole
    places = torch.arange(math.prod(inner), dtype=torch.int32, device=device).view(inner)
    return places.narrow(split.dim, split.start, form.inner[split.dim]).reshape(-1)


def _mixed(places: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x = places * _signed(0x9E3779B1) + a
    x.bitwise_xor_(_shifted(x, 16)).mul_(_signed(0x7FEB352D)).add_(b)
    x.bitwise_xor_(_shifted(x, 15)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift to the right, with zeros coming in."""
    return (x >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= _HALF else x


def _finished(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
