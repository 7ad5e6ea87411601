"""A second line of defence: in the first step a worker measures that its blocks keep samples apart.

Each block whose batch a plan splits runs once more on two parts of its first samples, with the same random numbers, and
the results are compared; a single sample is compared with two copies of it. Batch norm uses fixed statistics meanwhile.
For child modules, whose code was not analysed, gradients are compared too, and the samples are repeated until they are
as many as the whole micro-batch has. This confirms on real data what was proven before, and finds errors of the proof
before anything is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.errors import IsthmusError, ModelError
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.samples.fixed_norms import fixed_norms
from isthmus.model.samples.measured import own_buffers
from isthmus.model.trace import tensors_of
from isthmus.runtime.batch_statistics import unchanged
from isthmus.runtime.block_calls import Call
from isthmus.runtime.program import Program, StageRun

__all__ = ["ApartCheck"]

_LIMITS = {torch.float16: 1e-1, torch.bfloat16: 1e-1, torch.float64: 1e-3}  # of |whole - parts| / |whole|
_LIMIT, _LIMIT_ON_GPU = 1e-3, 1e-2  # rounding stays far below; a GPU may use other kernels for other sizes, in TF32
_NOISE, _MOST_NOISE = 4, 4e-3  # rounding errors of numbers around 1, and the largest: smaller differences do not count
_SMALL = 1e-2  # of the longest gradient of a parameter; shorter ones, perhaps rounding errors, count as that long

Calls = Callable[[Sequence[int]], Call]  # the block as a function, for samples at these places


@dataclass
class _Outcome:
    """What a block returned for some samples, and the state that it left."""

    results: list[Any]
    gradients: list[Tensor]  # of inputs, cut by samples
    weights: list[Tensor]  # gradients of parameters
    buffers: list[Tensor]
    rows: list[int]  # number of rows that each batch norm had


class ApartCheck:
    """Compares the results of blocks for all samples at once and for two parts of them, once for every block."""

    def __init__(self, program: Program, pieces: Pieces) -> None:
        self._program, self._pieces = program, pieces
        self._seen: set[int] = set()

    def wanted(self, run: StageRun, block: int, samples: int) -> bool:
        """Return whether to measure a block: once, if its batch is split and the job does not vouch for its samples."""
        program = self._program
        whole = program.micro_batches == 1 and samples == program.micro_batch
        if block in self._seen or whole or samples < 1 or len(run.group) > 1:
            return False
        return not program.job.trust_independent_samples

    def compare(self, block: int, module: nn.Module, taken: Sequence[Any], places: Sequence[int], calls: Calls) -> None:
        """Raise ModelError if the block's results for parts of the samples differ from those for all at once."""
        self._seen.add(block)
        trial = _Trial(self._pieces, block, module, taken, places, calls)
        total = len(places)
        if total > 1:
            middle = (total + 1) // 2 if total > 2 else 1
            whole, parts = list(range(total)), [list(range(middle)), list(range(middle, total))]
        else:
            whole, parts = [0, 0], [[0], [0]]
        try:
            found = [trial.run(rows) for rows in (whole, *parts)]
        except (IsthmusError, torch.OutOfMemoryError):
            raise
        except Exception as fault:  # anything that the user's code does with fewer samples
            raise self._refused(block, f"{type(fault).__name__} on a part of {total} samples: {fault}") from fault
        wrong = trial.difference(found[0], found[1:])
        if wrong is None and self._program.micro_batches > 1:
            wrong = trial.changed(found[0])
        if wrong is None and self._pieces.graph.how == "modules":
            wrong = self._of_many(trial, total)
        if wrong is not None:
            raise self._refused(block, wrong)

    def _of_many(self, trial: _Trial, total: int) -> str | None:
        """Return what differs with as many samples as the whole micro-batch has; None: nothing, or no room to try."""
        rows = [number % total for number in range(self._program.micro_batch)]
        few = trial.run(range(total), backward=False)
        try:
            many = trial.run(rows, backward=False)
        except torch.OutOfMemoryError:  # the plan may give this worker a part because there is no memory for more
            return None
        return trial.repeated(many, few, rows)

    def _refused(self, block: int, wrong: str) -> ModelError:
        return ModelError(
            "a block gives something else for parts of a batch than for the whole: it mixes samples, or depends on how "
            "many there are",
            where=f"block {self._pieces.graph.blocks[block].name}, measured in the first step; nothing was updated",
            found=wrong,
            expected="each sample's result to be its own whatever samples are with it, as the plan splits the batch",
            next="Plan with one replica and one micro-batch (--fix dp=1,micro=1); or, if the difference is meant, say "
            "--trust-independent-samples",
        )


class _Trial:
    """A block and its samples, to be run as often as needed."""

    def __init__(
        self,
        pieces: Pieces,
        block: int,
        module: nn.Module,
        taken: Sequence[Any],
        places: Sequence[int],
        calls: Calls,
    ) -> None:
        self._module, self._taken, self._places, self._calls = module, taken, places, calls
        self._own_code = pieces.graph.how == "modules"  # it may ask for gradients, and change them
        self._dims = [pieces.batch_dims[name] for name in pieces.incoming[block]]
        self._out_dims = [pieces.batch_dims.get(name, 0) for name in pieces.outgoing[block]]
        self._names = pieces.outgoing[block]
        self._before = [buffer.clone() for buffer in own_buffers(module).values()]

    def run(self, rows: Sequence[int], *, backward: bool = True) -> _Outcome:
        """Run the block on these of its samples, and restore its state afterwards."""
        backward = backward and self._own_code
        inputs = [self._picked(tensor.detach(), dim, rows) for tensor, dim in zip(self._taken, self._dims, strict=True)]
        leaves = [one.requires_grad_() for one in inputs if backward and one.is_floating_point()]
        given = [one * 1 if one.requires_grad else one for one in inputs]  # the block may change these
        with torch.set_grad_enabled(self._own_code), unchanged(self._module), fixed_norms(self._module) as seen:
            results = list(self._calls([self._places[row] for row in rows])(*given))
            buffers = [buffer.clone() for buffer in own_buffers(self._module).values()]
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            found = self._gradients(results, [*leaves, *parameters], rows) if backward else []
        return _Outcome(results, found[: len(leaves)], found[len(leaves) :], buffers, seen)

    def _picked(self, tensor: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
        if dim < 0:
            return tensor.clone()
        each = tensor.shape[dim] // len(self._places)
        index = torch.tensor([row * each + one for row in rows for one in range(each)], device=tensor.device)
        return tensor.index_select(dim, index)

    def _gradients(self, results: Sequence[Any], leaves: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Return gradients by `torch.autograd.grad`, which calls no hooks of parameters, as those are for the step.

        Return none if the block forbids it (checkpointing by re-entrance).
        """
        roots, seeds = [], []
        for result, dim in zip(results, self._out_dims, strict=True):
            for root in tensors_of(result):
                if root.requires_grad:
                    roots.append(root)
                    seeds.append(self._seeds(root, dim, rows))
        if not roots or not leaves:
            return []
        try:
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        except RuntimeError as fault:
            if "Checkpointing is not compatible" in str(fault):
                return []
            raise
        return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]

    def _seeds(self, root: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
        """Return a gradient for each sample that is the same whatever samples are with it."""
        if dim < 0 or root.ndim <= dim or root.shape[dim] % len(rows):
            return torch.ones_like(root)
        shape = [size // len(rows) * len(self._places) if d == dim else size for d, size in enumerate(root.shape)]
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        return self._picked(drawn, dim, rows).to(root.device, root.dtype)

    # -- comparing

    def difference(self, whole: _Outcome, parts: Sequence[_Outcome]) -> str | None:
        """Return what differs between a run on all samples and runs on parts of them, or None if nothing does."""
        for number, name in enumerate(self._names):
            if not _same(whole.results[number], [part.results[number] for part in parts], self._out_dims[number]):
                return f"other numbers in {name}"
        if any(len(part.buffers) != len(whole.buffers) for part in parts):
            return "other buffers"
        for number, (name, buffer) in enumerate(zip(own_buffers(self._module), whole.buffers, strict=True)):
            if not all(_near(buffer, part.buffers[number]) for part in parts):
                return f"other numbers in the buffer {name}"
        if any(len(part.rows) != len(whole.rows) for part in parts) or any(
            rows != sum(others) for rows, *others in zip(whole.rows, *(part.rows for part in parts), strict=True)
        ):
            return "batch norms over other groups of samples"
        return self._backward(whole, parts)

    def _backward(self, whole: _Outcome, parts: Sequence[_Outcome]) -> str | None:
        if any(len(part.gradients) != len(whole.gradients) for part in parts):
            return "other gradients"
        dims = [dim for dim, taken in zip(self._dims, self._taken, strict=True) if taken.is_floating_point()]
        for number, (gradient, dim) in enumerate(zip(whole.gradients, dims, strict=False)):
            others = [part.gradients[number] for part in parts]
            if not _same(gradient, [sum(others[1:], others[0])] if dim < 0 else others, dim):
                return "other gradients of its inputs"
        longest = max((float(gradient.norm()) for gradient in whole.weights), default=0.0)
        for gradient, *others in zip(whole.weights, *(part.weights for part in parts), strict=True):
            if not _near(gradient, sum(others[1:], others[0]), _SMALL * longest):
                return "gradients of parameters that do not add up"
        return None

    def changed(self, run: _Outcome) -> str | None:
        """Return a buffer that changes with each call, or None; with more micro-batches it would change more often."""
        for name, before, after in zip(own_buffers(self._module), self._before, run.buffers, strict=False):
            if after.is_floating_point() and not _near(before, after):
                return f"the buffer {name}, which changes with each call, of which a step has one for each micro-batch"
        return None

    def repeated(self, many: _Outcome, few: _Outcome, rows: Sequence[int]) -> str | None:
        """Return what differs if samples are there several times, or None if nothing does."""
        for name, dim, more, less in zip(self._names, self._out_dims, many.results, few.results, strict=True):
            for tensor, other in zip(tensors_of(more), tensors_of(less), strict=True):
                wanted = other if dim < 0 or other.ndim <= dim else self._picked(other, dim, rows)
                if tensor.shape != wanted.shape or not _near(wanted, tensor):
                    return f"other numbers in {name} for {len(rows)} samples at once than for {len(self._places)}"
        return None


def _same(whole: Any, parts: Sequence[Any], dim: int) -> bool:
    """Return whether parts joined along `dim` equal the whole; where there is no batch dimension, each part must."""
    leaves = [tensors_of(one) for one in (whole, *parts)]
    for tensor, *others in zip(*leaves, strict=True):
        joined = others if dim < 0 or tensor.ndim <= dim else [torch.cat(others, dim)]
        if not all(other.shape == tensor.shape and _near(tensor, other) for other in joined):
            return False
    return True


def _near(whole: Tensor, other: Tensor, size: float = 0.0) -> bool:
    """Return whether |whole - other| / |whole| in the L2 norm is within the limit.

    `size` is the least value that counts as the length of the whole.
    """
    if whole.is_complex():
        return _near(torch.view_as_real(whole), torch.view_as_real(other), size)
    if not whole.is_floating_point():
        return torch.equal(whole, other)
    a, b = whole.detach().double(), other.detach().double()
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return False
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    limit = _LIMITS.get(whole.dtype, _LIMIT if whole.device.type == "cpu" else _LIMIT_ON_GPU)
    noise = min(_NOISE * torch.finfo(whole.dtype).eps, _MOST_NOISE) * a.numel() ** 0.5
    return bool((a - b).norm() <= limit * max(float(a.norm()), size) + noise)
