"""Buckets: parameters kept as one flat tensor with one flat gradient, synced as soon as the gradient is final.

A bucket's gradients are final when the last backward of every run that uses them has passed them. Its sync then runs in
a thread of its own while the backward goes on. With state `sharded-optimizer`, the ring stops when each participant has
the sum of its piece; the participant updates that piece, and the new weights go around. With `sharded-all`, a worker
keeps only its piece of weights and gradients, and memory for the rest exists only while it is used (`sharded_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from isthmus.runtime.checkpoint.extents import MemberCut
from isthmus.runtime.comm.factors import Factors
from isthmus.runtime.comm.syncs import SyncMethod, piece_bounds
from isthmus.runtime.comm.worker_threads import WorkerThreads
from isthmus.runtime.executor import WorkSpan
from isthmus.runtime.pace import Pace
from isthmus.runtime.program import BucketSpec, StageRun

__all__ = ["Bucket", "Buckets", "Served"]


class Bucket:
    """One flat tensor of weights and one of gradients; the parameters are views of them."""

    def __init__(
        self, spec: BucketSpec, parameters: Mapping[str, nn.Parameter], device: str, cuts: Mapping[str, MemberCut],
        initial: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Move the parameters into flat tensors.

        `cuts` says what a member of a tensor group has of the parameters that are split. `initial` holds the model's
        first parameters in fp32, if its own are rounded to 16 bits.
        """
        self.spec, self.names = spec, spec.parameters
        self.sync: SyncMethod | None = None  # set later: a sync needs the parameters in place
        self.parameters = [parameters[name] for name in spec.parameters]
        ends = list(accumulate(parameter.numel() for parameter in self.parameters))
        self.ranges = dict(zip(self.names, zip([0, *ends[:-1]], ends, strict=True), strict=True))
        position = next((i for i, group in enumerate(spec.groups) if device in group), 0)
        self.first = position == 0
        total, count = ends[-1], len(spec.members) if spec.layout != "replicated" else 1
        self.bounds = piece_bounds(total, count, position if count > 1 else 0)
        like = self.parameters[0]
        self.weights = torch.empty(total, dtype=like.dtype, device=like.device)
        self.gradients = torch.zeros_like(self.weights)  # if scattered, those of one backward
        for name, parameter in zip(self.names, self.parameters, strict=True):
            lo, hi = self.ranges[name]
            self.weights[lo:hi].copy_(parameter.detach().reshape(-1))
            parameter.data = self.weights[lo:hi].view(parameter.shape)
            parameter.grad = self.gradients[lo:hi].view(parameter.shape)
        self.cuts = {name: cuts[name] for name in self.names if name in cuts}
        self.mask = self._mask(spec.kept, initial) if spec.kept is not None else None
        self.exact = self._exact(initial)
        self.resident = spec.layout != "sharded-all"
        self.scattered = not self.resident and not spec.late  # gradients are summed after each backward
        own = slice(*self.bounds)  # the piece that this worker updates
        self.piece, self.gradient = self.weights[own], self.gradients[own]
        self.piece_mask = None if self.mask is None else self.mask[own]
        if not self.resident:
            self.piece = self.piece.clone()
            self.release()
        if self.scattered:
            self.gradient, self.mask = self.gradient.clone(), None
            self.piece_mask = None if self.piece_mask is None else self.piece_mask.clone()
            self.close()
        group = next((group for group in spec.groups if device in group), (device,))
        self.owned_names = tuple(name for name in self.names if group[0] == device or name in cuts)

    def _mask(self, kept: float, initial: Mapping[str, Tensor]) -> Tensor:
        """Zero all but the largest elements of each pruned weight, and return a mask that is True for those kept."""
        mask = torch.ones(self.weights.numel(), dtype=torch.bool, device=self.weights.device)
        own = dict(zip(self.names, self.parameters, strict=True))
        for name in self.spec.pruned:
            whole = initial.get(name, own[name]).detach().to(mask.device)
            chosen = torch.zeros(whole.numel(), dtype=torch.bool, device=mask.device)
            order = torch.sort(whole.abs().reshape(-1), descending=True, stable=True).indices
            chosen[order[: round(kept * whole.numel())]] = True
            chosen = chosen.view(whole.shape)
            part = self.cuts[name].slice.cut(chosen) if name in self.cuts else chosen
            mask[slice(*self.ranges[name])] = part.reshape(-1)
        self.weights.mul_(mask)
        return mask

    def _exact(self, initial: Mapping[str, Tensor]) -> Tensor | None:
        """Return the piece in fp32 before it was rounded; None if that is not needed or not known."""
        if self.weights.dtype == torch.float32 or not all(name in initial for name in self.names):
            return None
        rows = []
        for name in self.names:
            whole = initial[name].detach().to(self.weights.device, torch.float32)
            rows.append((self.cuts[name].slice.cut(whole) if name in self.cuts else whole).reshape(-1))
        flat = torch.cat(rows)
        return (flat if self.mask is None else flat * self.mask)[slice(*self.bounds)].clone()

    def counted(self) -> Iterator[Tensor]:
        """Yield the parts of the gradient that count here, and on no other worker, for its norm."""
        if self.spec.layout == "replicated" and not self.first:
            return
        for name in self.owned_names:
            lo, hi = (place - self.bounds[0] for place in self.held(name))
            if lo < hi:
                yield self.gradient[lo:hi]

    def held(self, name: str) -> tuple[int, int]:
        """Return the range [lo, hi) of a parameter in the flat tensor, limited to the piece that is updated here."""
        lo, hi = self.ranges[name]
        return max(lo, self.bounds[0]), max(min(hi, self.bounds[1]), max(lo, self.bounds[0]))

    def clear(self) -> None:
        """Set the gradients to zero at the beginning of a step."""
        (self.gradient if self.scattered else self.gradients).zero_()

    def reduce(self) -> None:
        """Make the gradient the sum over all participants: all of it, or the piece that is updated here."""
        if self.mask is not None:
            self.gradients.mul_(self.mask)
        if self.sync is None or self.spec.how in (None, "duplicate"):
            return
        if self.spec.how == "sparse" and self.mask is not None and self.spec.layout == "replicated":
            kept = self.gradients[self.mask]
            self.sync.all_reduce(kept)
            self.gradients[self.mask] = kept
        elif self.spec.layout != "replicated" and self.sync.scatters:
            self.sync.reduce_scatter(self.gradients)
        else:
            self.sync.all_reduce(self.gradients)
            if self.mask is not None and self.spec.how == "factors":
                self.gradients.mul_(self.mask)  # the products of factors were added without the mask

    def share(self) -> None:
        """Send the new weights of an updated piece to everybody."""
        if self.spec.layout == "sharded-optimizer" and self.sync is not None:
            self.sync.all_gather(self.weights)

    def restore(self) -> None:
        """Allocate memory for all weights, and copy the piece into its place."""
        self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())
        self.weights[slice(*self.bounds)].copy_(self.piece)

    def release(self) -> None:
        """Release the memory of all weights; the views stay."""
        self.weights.untyped_storage().resize_(0)

    def open(self) -> None:
        """Allocate memory for the gradients of one backward, and set them to zero."""
        self.gradients.untyped_storage().resize_(self.gradients.numel() * self.gradients.element_size())
        self.gradients.zero_()

    def scatter(self) -> None:
        """Add the sum over all participants of one backward's gradients to the piece's gradient, and release them."""
        if self.sync is not None:  # numpy, which adds, pins the storage of a tensor that it sees, so it gets an alias
            self.sync.reduce_scatter(from_dlpack(self.gradients))
        self.gradient.add_(self.gradients[slice(*self.bounds)])
        if self.piece_mask is not None:
            self.gradient.mul_(self.piece_mask)
        self.close()

    def close(self) -> None:
        """Release the memory of all gradients; the views stay."""
        self.gradients.untyped_storage().resize_(0)


@dataclass(frozen=True)
class Served:
    """A bucket that this worker adds up for others, without a part of its own."""

    number: int
    sync: SyncMethod
    elements: int
    dtype: torch.dtype
    device: torch.device

    def reduce(self) -> None:
        """Serve one sum; call this once per step."""
        self.sync.all_reduce(torch.zeros(self.elements, dtype=self.dtype, device=self.device))


class Buckets:
    """All buckets of a worker: watches the backward pass, and syncs gradients that are final."""

    def __init__(
        self, buckets: Sequence[Bucket], served: Sequence[Served], used: Mapping[int, Sequence[str]], pace: Pace
    ) -> None:
        """Watch the parameters; `used` lists the parameters of each run, by its number."""
        self.buckets, self.served, self._pace = buckets, served, pace
        whole = [bucket for bucket in buckets if not bucket.scattered]
        self._home = {name: bucket for bucket in whole for name in bucket.names}
        self.used = {run: frozenset(names) & self._home.keys() for run, names in used.items()}
        self._uses = {name: sum(name in names for names in used.values()) for name in self._home}
        self._current: int | None = None
        self._passed: set[tuple[int, str]] = set()
        self._left: dict[int, int] = {}
        self._threads = WorkerThreads()
        self.spans: list[WorkSpan] | None = None
        for bucket in whole:
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True) if bucket.sync is not None else ():
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda _, name=name: self._accumulated(name)
                )

    def begin(self) -> None:
        """Begin a step with gradients of zero."""
        self._passed.clear()
        self._left = {b.spec.number: sum(self._uses[name] for name in b.names) for b in self.buckets if not b.scattered}
        for bucket in self.buckets:
            bucket.clear()
        for served in self.served:
            self.start(served.number, served.reduce)

    def final(self, run: StageRun, begins: bool) -> None:
        """Note that the last backward of a run begins or has ended; at its end all of its parameters are final."""
        self._current = run.number if begins else None
        if not begins:
            for name in self.used[run.number]:
                self._pass(run.number, name)

    def _accumulated(self, name: str) -> None:
        if self._current is not None and name in self.used[self._current]:
            self._pass(self._current, name)

    def _pass(self, run: int, name: str) -> None:
        if (run, name) in self._passed:
            return
        self._passed.add((run, name))
        bucket = self._home[name]
        self._left[bucket.spec.number] -= 1
        if self._left[bucket.spec.number] == 0:
            self._pace.keep()
            if bucket.sync is None:
                bucket.reduce()
            else:
                self.start(bucket.spec.number, bucket.reduce)

    def start(self, number: int, work: Callable[[], None]) -> None:
        """Start work for a bucket; it runs after the bucket's earlier work."""
        self._threads.start(number, partial(self._run, number, work))

    def _run(self, number: int, work: Callable[[], None]) -> None:
        begin = perf_counter()
        work()
        if self.spans is not None:
            self.spans.append(WorkSpan("sync", number, 0, begin, perf_counter()))

    def wait(self) -> None:
        """Wait until all syncs of the step are done."""
        self._threads.wait()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
        for bucket in self.buckets:
            if isinstance(bucket.sync, Factors):
                bucket.sync.close()

    def share(self) -> None:
        """Send the new weights of sharded optimizers around, all buckets at once, and wait."""
        for bucket in self.buckets:
            if bucket.spec.layout == "sharded-optimizer":
                self.start(bucket.spec.number, bucket.share)
        self.wait()
