"""Fits the network to records: cross-entropy between what it says of actions and what searches found."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from isthmus.planners.learned.graph_network import Batch, GraphNetwork, batch_of
from isthmus.planners.learned.prior import save_network
from isthmus.planners.learned.training.lessons import Lessons, Sample
from isthmus.planners.learned.training.record import Record

__all__ = ["Recipe", "fit"]

_HELD = 10  # one problem in so many is kept to judge, and does not teach


class Recipe(NamedTuple):
    """The length of the training, the size of the network, and the device."""

    epochs: int = 30
    samples: int = 48  # of each record in an epoch
    batch: int = 64
    rate: float = 1e-3
    width: int = 96
    layers: int = 3
    workers: int = 0
    device: str = "cpu"
    seed: int = 0
    blind: str = ""  # what the network may not see, for ablations: feedback, devices, model


class _Samples(IterableDataset[tuple[Batch, Tensor]]):
    """Batches drawn from records; each worker has its own part of them, and prepares it once."""

    def __init__(self, records: Sequence[Record], recipe: Recipe, epoch: int, *, judges: bool) -> None:
        self.records, self.recipe, self.epoch, self.judges = records, recipe, epoch, judges
        self._known: dict[int, Lessons] = {}

    def __iter__(self) -> Iterator[tuple[Batch, Tensor]]:
        info = get_worker_info()
        mine, of = (info.id, info.num_workers) if info is not None else (0, 1)
        self.epoch += 1
        draw = random.Random(f"{self.recipe.seed} {0 if self.judges else self.epoch} {mine}")
        order = list(range(mine, len(self.records), of))
        draw.shuffle(order)
        waiting: list[Sample] = []
        for chunk in range(0, len(order), self.recipe.batch):
            for i in order[chunk : chunk + self.recipe.batch]:
                if i not in self._known:
                    self._known[i] = Lessons(self.records[i], self.recipe.blind)
                waiting += self._known[i].some(self.recipe.samples, draw)
            draw.shuffle(waiting)
            while len(waiting) >= self.recipe.batch:
                now, waiting = waiting[: self.recipe.batch], waiting[self.recipe.batch :]
                yield _batched(now)
        if waiting:
            yield _batched(waiting)


def _batched(samples: Sequence[Sample]) -> tuple[Batch, Tensor]:
    target = torch.from_numpy(np.concatenate([sample.target for sample in samples]).astype(np.float32))
    return batch_of([sample.looked for sample in samples]), target


def fit(records: Sequence[Record], recipe: Recipe, file: Path, told: Callable[[dict[str, Any]], None]) -> None:
    """Train, and write the network after each epoch, and that epoch's losses beside it. A run goes on where it was
    left.
    """
    torch.manual_seed(recipe.seed)
    teaching = [record for record in records if record.seed % _HELD]
    judging = [record for record in records if not record.seed % _HELD]
    network = GraphNetwork(recipe.width, recipe.layers).to(recipe.device)
    optimizer = torch.optim.AdamW(network.parameters(), recipe.rate, weight_decay=0.01)
    first = _resume(file.with_suffix(".state"), network, optimizer)
    train, held = (_loader(part, recipe, first, judges) for part, judges in ((teaching, False), (judging, True)))
    for epoch in range(first, recipe.epochs):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs)))
        begun = time.monotonic()
        losses = [_step(network, optimizer, batch, target, recipe.device) for batch, target in train]
        row: dict[str, Any] = {"epoch": epoch, "loss": float(np.mean(losses)), **_judged(network, held, recipe.device)}
        row |= {"seconds": time.monotonic() - begun, "records": len(records)}
        save_network(network, file)
        _keep(network, optimizer, epoch + 1, file.with_suffix(".state"))
        with file.with_suffix(".jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        told(row)


def _keep(network: GraphNetwork, optimizer: torch.optim.Optimizer, epoch: int, file: Path) -> None:
    """Write the network and what the optimizer remembers of each parameter; a kill leaves the old file or the new."""
    kept = optimizer.state_dict()["state"]
    tensors = {f"{i}/{name}": tensor for i, state in kept.items() for name, tensor in state.items()}
    tensors |= {f"network/{name}": tensor for name, tensor in network.state_dict().items()}
    part = file.with_suffix(".part")
    save_file({key: x.cpu().contiguous() for key, x in tensors.items()}, part, metadata={"epoch": str(epoch)})
    part.replace(file)


def _resume(state: Path, network: GraphNetwork, optimizer: torch.optim.Optimizer) -> int:
    """Load what there is; return the epoch to go on with."""
    if not state.is_file():
        return 0
    kept: dict[str, dict[str, Tensor]] = {}
    with safe_open(state, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118
            of, _, name = key.partition("/")
            kept.setdefault(of, {})[name] = opened.get_tensor(key)
        epoch = int(opened.metadata()["epoch"])
    network.load_state_dict(kept.pop("network"))
    optimizer.load_state_dict({**optimizer.state_dict(), "state": {int(of): tensors for of, tensors in kept.items()}})
    return epoch


def _loader(records: Sequence[Record], recipe: Recipe, epoch: int, judges: bool) -> Any:
    workers = min(recipe.workers, max(1, len(records) // 8)) if recipe.workers else 0
    return DataLoader(
        _Samples(records, recipe, epoch, judges=judges),
        batch_size=None,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if workers else None,
    )


def _loss(likely: Tensor, batch: Batch, target: Tensor) -> Tensor:
    """Return the mean over drafts of sum_a p(a) (log p(a) - log q(a)): 0 where the network says what the searches
    found.
    """
    loss: Tensor = (target * (target.clamp(min=1e-9).log() - likely)).sum() / len(batch.whole)
    return loss


def _step(network: GraphNetwork, optimizer: torch.optim.Optimizer, batch: Batch, target: Tensor, device: str) -> float:
    here = batch.to(device)
    loss = _loss(network(here), here, target.to(device))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def _judged(network: GraphNetwork, held: Any, device: str) -> dict[str, float]:
    """Return the loss on problems that taught nothing, and the part of drafts in which the network's first action is
    the best known.
    """
    losses, right, drafts = [], 0.0, 0
    for on_cpu, wanted in held:
        batch, target, count = on_cpu.to(device), wanted.to(device), len(on_cpu.whole)
        likely = network(batch)
        losses.append(float(_loss(likely, batch, target)))
        top = likely.new_full((count,), -torch.inf).scatter_reduce(0, batch.of, likely, "amax")
        best = target.new_zeros(count).scatter_reduce(0, batch.of, target, "amax")
        hit = (likely == top[batch.of]) & (target >= 0.99 * best[batch.of])
        right += float(likely.new_zeros(count).index_add_(0, batch.of, hit.float()).clamp(max=1.0).sum())
        drafts += count
    return {"held_loss": float(np.mean(losses)) if losses else float("nan"), "held_first": right / max(drafts, 1)}
