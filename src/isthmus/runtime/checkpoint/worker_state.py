"""A worker's part of a checkpoint: what it saves, and what it reads back under any plan.

If several workers hold the same values, one saves them: the first participant of a sync, the first member of a tensor
group.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from isthmus.runtime.buckets import Bucket
from isthmus.runtime.checkpoint.manifest import Quantity, quantities_of
from isthmus.runtime.checkpoint.reading import Checkpoint
from isthmus.runtime.checkpoint.saving import Piece
from isthmus.runtime.worker import Worker

__all__ = ["load_state", "saved_pieces"]

_QUANTITIES: dict[str, Quantity] = {
    "weight": "weight",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "momentum",
    "average": "average",
}  # by torch's names


def saved_pieces(worker: Worker) -> list[Piece]:
    """Return copies, in host memory, of everything that this worker must save."""
    found = [piece for bucket in worker.buckets for piece in _pieces(worker, bucket)]
    for name, buffer in worker.own_buffers().items():
        data = buffer.detach().reshape(-1).to("cpu", copy=True)
        found.append(Piece(parameter=name, quantity="buffer", shape=tuple(buffer.shape), data=data))
    return found


def _pieces(worker: Worker, bucket: Bucket) -> Iterator[Piece]:
    if bucket.spec.layout == "replicated" and not bucket.first:
        return
    state, start = worker.updater.state(bucket) if bucket.piece.numel() else {}, bucket.bounds[0]
    for name in bucket.owned_names:
        lo, hi = bucket.held(name)
        for quantity, flat in state.items() if lo < hi else ():
            yield Piece(
                parameter=name,
                quantity=_QUANTITIES[quantity],
                shape=worker.graph.parameter[name].shape,
                data=flat[lo - start : hi - start].detach().to("cpu", copy=True),
                start=lo - bucket.ranges[name][0],
                cut=bucket.cuts.get(name),
            )


def load_state(worker: Worker, checkpoint: Checkpoint, updates: int) -> None:
    """Load weights, moments and buffers from a checkpoint, whoever saved them; `updates` were made before it.

    The loss scale is loaded too if this run uses one; the checkpoint may be of a run in another precision. Only the
    moments that this run's optimizer keeps are loaded; the checkpoint may be of a run with momentum, and this one
    without.
    """
    scale = checkpoint.manifest.loss_scale
    if scale is not None and worker.scale.used:
        worker.scale.value, worker.scale.good = scale.value, scale.steps
    kept = quantities_of(worker.updater.settings)
    for bucket in worker.buckets:
        if bucket.resident:
            with torch.no_grad():
                bucket.weights.copy_(_read(bucket, checkpoint, "weight", (0, bucket.weights.numel())))
                if bucket.mask is not None:
                    bucket.weights.mul_(bucket.mask)
        if bucket.piece.numel():
            state = {
                name: _read(bucket, checkpoint, quantity, bucket.bounds)
                for name, quantity in _QUANTITIES.items()
                if quantity in kept and bucket.names[0] in checkpoint.names(quantity)
            }
            worker.updater.load(bucket, state, updates)
    saved = set(checkpoint.names("buffer"))
    for name, buffer in worker.all_buffers().items():
        if name in saved:  # a new one keeps its first value
            buffer.copy_(checkpoint.read(name, "buffer").view(buffer.shape))


def _read(bucket: Bucket, checkpoint: Checkpoint, quantity: Quantity, bounds: tuple[int, int]) -> Tensor:
    """Return elements [lo, hi) of the bucket's flat tensor."""
    parts = []
    for name in bucket.names:
        first, last = bucket.ranges[name]
        lo, hi = max(first, bounds[0]), min(last, bounds[1])
        if lo < hi:
            parts.append(checkpoint.read(name, quantity, lo - first, hi - first, bucket.cuts.get(name)))
    return torch.cat(parts) if parts else torch.empty(0)
