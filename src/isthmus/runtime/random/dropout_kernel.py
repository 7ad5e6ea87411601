"""The Triton kernel of dropout by hashed numbers; imported for tensors on a GPU only.

Programs are numbered by sample and by block of a sample's elements, so the sample of an element is found without a
division where the samples lie in the first dimension. 32-bit arithmetic wraps around, as in `hashed.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isthmus.runtime.random.hashed import Form, threshold

__all__ = ["dropout", "mixed"]

_BLOCK = 4096  # elements of a program: 32 bytes a thread in 16 bits, with 8 warps
_MOST_ROWS = 65535  # programs in the second dimension of a grid


@triton.jit  # type: ignore[untyped-decorator]
def mixed(place: Any, a: Any, b: Any) -> Any:
    """Return the signed hash of places (unsigned, 32 bits) with the keys of their sample."""
    x = place * 0x9E3779B1 + a
    x = (x ^ (x >> 16)) * 0x7FEB352D + b
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _dropout(
    x: Any,
    y: Any,
    keys: Any,
    below: Any,
    factor: Any,
    elements: Any,  # of a sample
    samples: Any,
    merged: Any,  # entries of the samples' dimension for each sample
    rest: Any,  # elements behind the samples' dimension
    inside: Any,  # elements behind the dimension that is split,
    part: Any,  # ... its size here,
    start: Any,  # ... where this part begins,
    whole: Any,  # ... and its whole size
    first: tl.constexpr,  # whether the samples lie in the first dimension
    is_split: tl.constexpr,
    block: tl.constexpr,
) -> None:
    sample = tl.program_id(0)
    place = tl.program_id(1) * block + tl.arange(0, block)
    here = place < elements
    if first:
        at = sample.to(tl.int64) * elements + place
    else:
        before, behind = place // (merged * rest), place % (merged * rest)
        at = (before.to(tl.int64) * samples + sample) * (merged * rest) + behind
    if is_split:
        place = (place // (inside * part) * whole + start + place // inside % part) * inside + place % inside
    a = tl.load(keys + 2 * sample).to(tl.uint32, bitcast=True)
    b = tl.load(keys + 2 * sample + 1).to(tl.uint32, bitcast=True)
    kept = mixed(place.to(tl.uint32), a, b) < below
    value = tl.load(x + at, mask=here, other=0.0).to(tl.float32) * factor
    tl.store(y + at, tl.where(kept, value, 0.0).to(y.dtype.element_ty), mask=here)


def dropout(x: Tensor, keys: Tensor, p: float, form: Form) -> Tensor:
    """Return x times its mask over 1 - p."""
    x = x.contiguous()
    y = torch.empty_like(x)
    elements = form.elements
    block = max(_BLOCK, triton.next_power_of_2(-(-elements // _MOST_ROWS)))
    inside, part, start, whole = form.part
    with torch.cuda.device(x.device):
        _dropout[(form.samples, -(-elements // block))](
            x, y, keys.contiguous(), threshold(1 - p), 1 / (1 - p), elements, form.samples, form.merged, form.rest,
            inside, part, start, whole,
            first=form.dim == 0, is_split=form.split is not None, block=block, num_warps=8,
        )  # fmt: skip
    return y
