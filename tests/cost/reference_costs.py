"""Seconds of blocks and bytes of stages, from the formulas in the docstrings of `cost.compute` and `cost.memory`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from isthmus.cluster.spec import Cluster, DeviceKind
from isthmus.cost.compute import USUAL
from isthmus.model.graph import Block, BlockGraph
from isthmus.model.job import Optimizer
from isthmus.plan.resolve import ResolvedPipeline
from isthmus.plan.types import Stage

__all__ = ["WIDTH", "StageFacts", "block_seconds", "computing", "sending", "slowest", "state_of", "weights_come"]

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


def computing(kind: DeviceKind, precision: str, mixed: bool) -> tuple[float, int]:
    """FLOP/s and bytes of a computed element: fp32 where a mixed job's kind lacks the precision or is slower in it."""
    rates: dict[str, float] = {str(name): float(value) for name, value in kind.compute.items()}
    name = "fp32" if mixed and rates.get("fp32", 0.0) > rates.get(precision, 0.0) else precision
    return rates[name], WIDTH[name]


def block_seconds(
    graph: BlockGraph, b: int, cluster: Cluster, group: tuple[str, ...], precision: str, mixed: bool, samples: int
) -> tuple[float, float]:
    """Forward and backward of one block on a device or tensor group: `cost.compute`'s docstring."""
    kind, n, block = cluster.kind_of(group[0]), len(group), graph.blocks[b]
    flops, width = computing(kind, precision, mixed)
    split = block.tensor if n > 1 else None
    whole = 1.0 if split is None else 1.0 - min(1.0, split.flops / max(1.0, block.forward_flops)) * (n - 1) / n
    moving = width / (USUAL.memory * kind.memory_bandwidth)
    loss = graph.outputs * 4 / width if b == len(graph.blocks) - 1 else 0.0
    bytes_forward = (block.moved + 3 * loss) * samples + block.weights_moved
    bytes_backward = (2 * block.moved + 2 * loss) * samples + 2 * block.weights_moved
    forward = whole * (samples * block.forward_flops / (USUAL.matmul * flops) + bytes_forward * moving)
    backward = whole * (samples * block.backward_flops / (USUAL.matmul * flops) + bytes_backward * moving)
    times = max(forward, block.operations * USUAL.launch), max(backward, 2 * block.operations * USUAL.launch)
    sent = sending(graph, b, cluster, group, precision, mixed, samples)
    return times[0] + sent, times[1] + sent


def sending(
    graph: BlockGraph, b: int, cluster: Cluster, group: tuple[str, ...], precision: str, mixed: bool, samples: int
) -> float:
    """The all-reduces of one block on a tensor group, one way."""
    n, split = len(group), graph.blocks[b].tensor
    if n == 1 or split is None:
        return 0.0
    width = computing(cluster.kind_of(group[0]), precision, mixed)[1]
    latency, bandwidth = slowest(cluster, group)
    return split.reduces * 2 * (n - 1) * (latency + split.elements * samples * width / (n * bandwidth))


def slowest(cluster: Cluster, group: tuple[str, ...]) -> tuple[float, float]:
    """Longest latency around a tensor group's ring, and what its slowest message gets when all are sent at once."""
    latencies, roads = [], []
    for a, b in pairwise((*group, group[0])):
        one, other = cluster.host_of(a), cluster.host_of(b)
        if one.name == other.name:
            latencies.append(one.latency)
            roads.append({f"{a} out": one.bandwidth, f"{b} in": one.bandwidth})
            continue
        link, trunk = cluster.link(one.name, other.name), cluster.trunk(one.region, other.region)
        assert link is not None
        latencies.append(link.latency)
        roads.append(
            {f"{one.name} out": one.nic, f"{other.name} in": other.nic_in, f"{one.name} {other.name}": link.bandwidth}
        )
        if trunk is not None:
            roads[-1][f"{one.region} {other.region} trunk"] = trunk
    messages = Counter(name for road in roads for name in road)
    return max(latencies), min(size / messages[name] for road in roads for name, size in road.items())


def state_of(precision: str, optimizer: Optimizer, kept: float | None) -> tuple[float, float, float]:
    """Weight, gradient and optimizer bytes per element; `kept` of a masked stage counts exempt tensors as kept."""
    half = precision != "fp32"
    moments = 8.0 if optimizer.name != "sgd" else 4.0 if optimizer.momentum else 0.0
    if kept is None:
        return (2.0, 2.0, 4.0 + moments) if half else (4.0, 4.0, moments)
    return (3.0, 2.0, 4.0 + moments) if half else (5.0, 4.0, moments)  # dense, with a mask of one byte


def weights_come(stage: Stage) -> str:
    return "gathered" if stage.state == "sharded-all" else "loaded" if stage.spill == "all" else "resident"


class StageFacts:
    """What one stage holds on a replica of some kind, from its parameters by name."""

    def __init__(self, part: ResolvedPipeline, s: int, kind: DeviceKind) -> None:
        self.stage, self.graph = part.pipeline.stages[s], part.graph
        self.range = range(part.stages[s].first, part.stages[s].last + 1)
        self.blocks = [part.graph.blocks[b] for b in self.range]
        self.width = computing(kind, part.pipeline.precision, part.pipeline.job.mixed)[1]  # of activations
        self.copy = 4.0 if self.width > WIDTH[part.pipeline.precision] else 0.0  # of each weight, to compute with
        self.split = {name for block in self.blocks if block.tensor for name in block.tensor.parameters}
        whole, pruned = self.count(self.blocks, 1), self.count(self.blocks, 1, linear=True)
        lost = 0.0 if self.stage.kept is None else 1.0 - self.stage.kept
        self.kept = 1.0 - lost * pruned / whole if whole else 1.0
        masked = None if self.stage.kept is None else self.kept
        self.weight, self.gradient, self.optimizer = state_of(
            part.pipeline.precision, part.pipeline.job.optimizer, masked
        )

    def count(self, blocks: Iterable[Block], degree: int, *, linear: bool = False) -> float:
        """Elements of blocks on each device of a tensor group, ties once; `linear`: only what a mask prunes."""
        names = dict.fromkeys(name for block in blocks for name in block.parameters)
        sizes = {n: p.elements for n in names if (p := self.graph.parameter[n]).linear or not linear}
        return sum(size / (degree if name in self.split else 1) for name, size in sizes.items())

    def elements(self, degree: int) -> float:
        return self.count(self.blocks, degree)

    def state(self, degree: int, parts: list[range]) -> tuple[float, float]:
        """Bytes on a device and on its host; `parts`: blocks whose weights stream in together, two sets at a time."""
        n = len(self.stage.replicas)
        whole = self.elements(degree)
        sets = [self.count([self.graph.blocks[b] for b in part if b in self.range], degree) for part in parts]
        streaming = 2 * max(sets, default=0.0) * (self.weight + self.gradient + self.copy)
        resident = whole * (self.weight + self.gradient)
        optimizer = whole * self.optimizer / (1 if self.stage.state == "replicated" else n)
        if self.stage.state == "sharded-all":
            resident /= n
        room = streaming if weights_come(self.stage) == "gathered" else whole * self.copy
        return (resident + room, optimizer) if self.stage.spill != "none" else (resident + optimizer + room, 0.0)

    def saved(self, degree: int) -> float:
        """Bytes per sample from forward to backward: all that is saved, or what enters the blocks."""
        if not self.stage.recompute:
            split = [block.tensor.saved if block.tensor else 0.0 for block in self.blocks]
            parts = zip(self.blocks, split, strict=True)
            kept = self.width * sum(block.saved - part * (1 - 1 / degree) for block, part in parts)
            return kept + (4 * self.graph.outputs if self.range[-1] == len(self.graph.blocks) - 1 else 0.0)
        return sum(
            tensor.elements * (tensor.width or self.width) * sum(target in self.range for target in tensor.targets)
            for tensor in self.graph.tensors
        )

    def transient(self) -> float:
        """Bytes per sample while computing: the largest workspace, and the largest block that is being recomputed."""
        last = self.range[-1] == len(self.graph.blocks) - 1
        kept = [self.width * block.saved for block in self.blocks]
        kept[-1] += 4 * self.graph.outputs if last else 0.0
        again = max(kept) if self.stage.recompute else 0.0
        return self.width * max(block.workspace for block in self.blocks) + again
