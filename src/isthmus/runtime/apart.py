"""The second line of defence: in the first step a worker measures that its blocks keep samples apart.

Each block whose batch a plan splits runs once more on two parts of its first samples, with the same random numbers,
and the results are compared. What was proven is so confirmed on real data; what the proof had wrong is found before
anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.errors import ModelError
from isthmus.model.pieces import Pieces
from isthmus.model.trace import tensors_of
from isthmus.runtime.flows import cut
from isthmus.runtime.program import Program, Run
from isthmus.runtime.statistics import unchanged

__all__ = ["ApartCheck"]

_LIMITS = {torch.float16: 1e-1, torch.bfloat16: 1e-1}  # of |whole - parts| / |whole|; rounding stays far below
_LIMIT = 1e-2


class ApartCheck:
    """Compares what blocks give for samples at once and in two parts; every block once."""

    def __init__(self, program: Program, pieces: Pieces) -> None:
        self._program, self._pieces = program, pieces
        self._seen: set[int] = set()

    def wanted(self, run: Run, block: int, samples: int) -> bool:
        """Whether to measure a block: once, if its batch is split and nothing else explains a difference."""
        program, known = self._program, self._pieces.graph.blocks[block]
        whole = program.micro_batches == 1 and samples == program.micro_batch
        if block in self._seen or whole or samples < 2 or len(run.group) > 1:
            return False
        self._seen.add(block)
        return not known.statistics and not program.job.trust_independent_samples

    def compare(
        self,
        block: int,
        module: nn.Module,
        taken: Sequence[Any],
        places: Sequence[int],
        random: Callable[[Sequence[int]], AbstractContextManager[Any]],
    ) -> None:
        """Raises ModelError where the block gives something else for parts of the samples than for all at once."""
        names, total = self._pieces.incoming[block], len(places)
        dims = [self._pieces.batch_dims[name] for name in names]

        def run(lo: int, hi: int) -> Sequence[Tensor]:
            part = [cut(t.detach(), d, total, lo, hi).clone() for t, d in zip(taken, dims, strict=True)]
            with random(places[lo:hi]):
                return module(*part)  # type: ignore[no-any-return]

        middle = (total + 1) // 2 if total > 2 else 1
        own_code = self._pieces.graph.how == "modules"  # which may ask for gradients, to hook on them
        with torch.set_grad_enabled(own_code), unchanged(module):
            whole, parts = run(0, total), (run(0, middle), run(middle, total))
        for number, name in enumerate(self._pieces.outgoing[block]):
            dim = self._pieces.batch_dims.get(name, 0)
            if not _same(whole[number], [part[number] for part in parts], dim):
                raise self._refused(block)

    def _refused(self, block: int) -> ModelError:
        return ModelError(
            "a block gives something else for parts of a batch than for the whole: it mixes samples, or depends on how "
            "many there are",
            where=f"block {self._pieces.graph.blocks[block].name}, measured in the first step; nothing was updated",
            expected="each sample's result to be its own whatever samples are with it, as the plan splits the batch",
            next="Plan with one replica and one micro-batch (--fix dp=1,micro=1); or, if the difference is meant, say "
            "--trust-independent-samples",
        )


def _same(whole: Any, parts: Sequence[Any], dim: int) -> bool:
    """Whether parts joined along `dim` are the whole; what has no batch dimension must be the same in each part."""
    leaves = [tensors_of(one) for one in (whole, *parts)]
    for tensor, *others in zip(*leaves, strict=True):
        joined = others if dim < 0 or tensor.ndim <= dim else [torch.cat(others, dim)]
        if not all(other.shape == tensor.shape and _near(tensor, other) for other in joined):
            return False
    return True


def _near(whole: Tensor, other: Tensor) -> bool:
    if not whole.is_floating_point():
        return torch.equal(whole, other)
    a, b = whole.detach().double(), other.detach().double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    return bool((a - b).norm() <= _LIMITS.get(whole.dtype, _LIMIT) * a.norm())
