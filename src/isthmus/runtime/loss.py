"""What training minimises: the model's own loss, or a function of the user's, checked on its first use.

A loss returns the sum over its samples and how many it summed, so that the parts of a batch add up to the whole. A loss
that returns a mean, or compares samples with each other, would train another model under another plan, so it is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from isthmus.errors import DataError, IsthmusError
from isthmus.model.built import BuiltModel
from isthmus.model.function import find, said
from isthmus.model.job import Job
from isthmus.runtime.data.datasets import CONTRACT, described

__all__ = ["CheckedLoss", "open_loss"]

_PAIR = "(sum of the losses, how many were summed), the sum a tensor without dimensions"
_ADDING = (
    f"{_PAIR}; each sample's loss must be its own whatever samples are with it, and a term that does not belong to "
    "samples, such as a penalty on weights, must be multiplied by the count"
)
_MOST_ELEMENTS = 1 << 26  # at most so many are made to check a loss on a whole micro-batch
_OFF, _OFF_16 = 3e-4, 2e-2  # relative: more than rounding, in 32 bits and in 16


def open_loss(job: Job, built: BuiltModel) -> CheckedLoss:
    """Return the loss that the job names.

    This imports the code that it names: call it only if `named_code(job)` is trusted.
    """
    if job.loss == "default":
        return CheckedLoss(built.loss, f"the default loss of {built.name}")
    return CheckedLoss(find(job.loss, DataError), job.loss)


class CheckedLoss:
    """`loss(output, target) -> (sum, count)`, checked when it is first called.

    `micro_batch`: how many samples a step computes at once, of which a worker may have only a few.
    """

    def __init__(self, function: Callable[[Any, Any], Any], where: str, micro_batch: int = 0) -> None:
        self._function, self._where = function, where
        self.micro_batch = micro_batch
        self._proven = False
        self._fast = function  # the same function, perhaps compiled

    def compile(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Compile the function, which is used once it was checked as it is."""
        self._fast = compiler(self._function)

    def __call__(self, output: Any, target: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and their count."""
        if not self._proven:
            self._prove(output, target)
            self._proven = True
        total, count = self._fast(output, target)
        return total, count.detach() if isinstance(count, Tensor) else torch.tensor(float(count), device=total.device)

    def _prove(self, output: Any, target: Tensor | None) -> None:
        total, count = self._tried(output, target)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        if any(tensor.requires_grad for tensor in tensors) and not total.requires_grad:
            raise self._bad("the loss has no gradient", "a sum that was computed apart from the output")
        reals = [tensor for tensor in tensors if tensor.is_floating_point()]
        targets = [leaf for leaf in pytree.tree_leaves(target) if isinstance(leaf, Tensor)]
        counted = [tensor for tensor in (*targets, *reals) if tensor.ndim]
        samples = len(counted[0]) if counted else 0
        if samples >= 2:
            if float(count) <= 0:
                raise self._bad("the count of a loss must be more than 0", f"0 for {samples} samples")
            self._prove_sum(output, target, samples, reals)
        if samples >= 1:
            self._prove_many(output, target, samples, reals)

    def _prove_sum(self, output: Any, target: Tensor | None, samples: int, reals: Sequence[Tensor]) -> None:
        """Check that parts of the samples add up to the whole; a value that is not per sample is in each part."""
        limit = _limit(reals)
        batched = all(tensor.shape[:1] == (samples,) for tensor in reals)

        def part(low: int, high: int) -> tuple[float, float]:
            def cut(leaf: Any) -> Any:
                has = isinstance(leaf, Tensor) and leaf.shape[:1] == (samples,)
                return leaf[low:high].detach() if has else leaf.detach() if isinstance(leaf, Tensor) else leaf

            total, count = self._tried(pytree.tree_map(cut, output), pytree.tree_map(cut, target))
            return float(total), float(count)

        whole = part(0, samples)
        for middle in dict.fromkeys((1, (samples + 2) // 3)):
            try:
                parts = part(0, middle), part(middle, samples)
            except DataError:
                if batched:
                    raise
                return  # an output has its samples in another dimension, so it cannot be cut
            for what, both, a, b in zip(("sum", "count"), whole, *parts, strict=True):
                if abs(both - a - b) > limit * (abs(a) + abs(b)):
                    raise self._bad(
                        f"the {what} of a loss must add up over samples",
                        f"{both:.6g} for {samples} samples, {a:.6g} for the first {middle} and {b:.6g} for the others",
                        _ADDING,
                    )

    def _prove_many(self, output: Any, target: Tensor | None, samples: int, reals: Sequence[Tensor]) -> None:
        """Check that samples repeated to the size of the whole micro-batch give as many times the sum."""
        times = -(-max(self.micro_batch, 2 if samples == 1 else 0) // samples)
        leaves = [leaf for leaf in pytree.tree_leaves((output, target)) if isinstance(leaf, Tensor)]
        fits = all(leaf.shape[:1] in ((), (samples,)) and not leaf.is_meta for leaf in leaves)
        if times < 2 or not fits or sum(leaf.numel() for leaf in leaves) * times > _MOST_ELEMENTS:
            return

        def repeated(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return leaf
            return leaf.detach().repeat(times, *[1] * (leaf.ndim - 1))

        few_each, many_each = (
            [float(part.detach() if isinstance(part, Tensor) else part) for part in self._tried(*given)]
            for given in ((output, target), pytree.tree_map(repeated, (output, target)))
        )
        for what, many, few in zip(("sum", "count"), many_each, few_each, strict=True):
            if abs(many - times * few) > _limit(reals) * times * abs(few):
                raise self._bad(
                    f"the {what} of a loss must add up over samples",
                    f"{many:.6g} for {times * samples} samples, {few:.6g} for {samples} of which these "
                    f"are {times} copies",
                    _ADDING,
                )

    def _tried(self, output: Any, target: Tensor | None) -> tuple[Tensor, Any]:
        """Call the loss function and return its sum and count; raise an error if it fails or gives anything else."""
        try:
            result = self._function(output, target)
        except (IsthmusError, torch.OutOfMemoryError):
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(output, target, error) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise self._bad("the loss is not a pair", described(result))
        total, count = result
        if not isinstance(total, Tensor) or total.ndim or not total.is_floating_point():
            raise self._bad("the sum of a loss must be one number", described(total))
        if (isinstance(count, Tensor) and count.ndim) or not isinstance(count, (Tensor, int, float)):
            raise self._bad("the count of a loss must be one number", described(count))
        self._check_values(total, count)
        return total, count

    def _check_values(self, total: Tensor, count: Any) -> None:
        """Refuse a count that is not a finite real number of 0 or more, and a sum that is not finite."""
        try:
            counted = float(count)
        except (OverflowError, RuntimeError, TypeError, ValueError):  # too large, or complex
            found = described(count) if isinstance(count, Tensor) else "a number beyond 1e308"
            raise self._bad("the count of a loss must be a real number", found) from None
        if not 0 <= counted < math.inf:
            raise self._bad("the count of a loss must be 0 or more, and finite", f"{counted:g}")
        if total.device.type != "meta" and not math.isfinite(summed := float(total.detach())):
            raise self._bad("the sum of a loss must be a finite number", f"{summed:g}")

    def _failed(self, output: Any, target: Tensor | None, error: BaseException) -> DataError:
        if target is None:
            return DataError(
                "the samples have no targets, and the loss needs some",
                where=self._where,
                found=said(error),
                next="Name data with targets, or a loss of your own: loss: package.module:function",
            )
        leaves = ", ".join(described(leaf) for leaf in pytree.tree_leaves(output)[:4])
        return DataError(
            "the loss cannot be computed from the model's output and the targets",
            where=self._where,
            found=f"{said(error)}; output {leaves}; targets {described(target)}",
            next="Name a loss that fits the model and the data: loss: package.module:function",
        )

    def _bad(self, what: str, found: str, expected: str = _PAIR) -> DataError:
        return DataError(what, where=self._where, found=found, expected=expected, next=CONTRACT)


def _limit(reals: Sequence[Tensor]) -> float:
    return _OFF_16 if any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in reals) else _OFF
