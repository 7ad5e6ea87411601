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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import ModelError
from isthmus.runtime.random.draws import Draw

__all__ = ["Lot"]

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
    samples: np.ndarray[Any, np.dtype[np.uint64]]

    def chance(self, p: float | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
        """Return booleans that are True with probability p, to the nearest 2^-32."""
        bits = self._bits(shape, device)
        if isinstance(p, Tensor):
            return bits.double() + _HALF < p.double() * 2.0**32
        below = round(p * 2.0**32) - _HALF
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
        inner = [*shape[:dim], shape[dim] // samples, *shape[dim + 1 :]]  # the shape of one sample
        a, b = (key.to(device, non_blocking=True).view(-1, 1) for key in self._keys(stream))
        bits = _mixed(self._places(inner, device), a, b)
        return bits.view(samples, *inner).movedim(0, dim).reshape(tuple(shape))

    def _keys(self, stream: int) -> tuple[Tensor, Tensor]:
        """Return two keys for each sample, by the finaliser of splitmix64."""
        x = _finished(self.samples + np.uint64(0x9E3779B97F4A7C15)) + np.uint64((self.base + stream) % (1 << 64))
        keys = torch.from_numpy(_finished(x).view(np.int32).reshape(-1, 2))
        return keys[:, 0].contiguous(), keys[:, 1].contiguous()

    def _places(self, inner: list[int], device: torch.device) -> Tensor:
        """Return each element's number within its sample; for a member with a part, within the whole sample."""
        split = self.draw.split
        if split is None:
            return torch.arange(math.prod(inner), device=device).int()
        whole = [*inner]
        whole[split.dim] = split.whole
        places = torch.arange(math.prod(whole), device=device).int().view(whole)
        return places.narrow(split.dim, split.start, inner[split.dim]).reshape(-1)


def _mixed(places: Tensor, a: Tensor, b: Tensor) -> Tensor:
    x = places.mul_(_signed(0x9E3779B1)) + a
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
