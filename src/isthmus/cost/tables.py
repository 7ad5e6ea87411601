"""A model in one precision as sums over its blocks, so that any run of blocks is priced by a subtraction.

Kinds that compute a mixed 16-bit job in fp32 (`wide`) have sums of their own: what they compute has 4 bytes an element,
while what they send and the state that they hold still has 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster, Precision
from isthmus.compiled import compiled
from isthmus.cost.compute import (
    LOSS_BACKWARD,
    LOSS_FORWARD,
    USUAL,
    WIDTH_OF,
    BlockArrays,
    Efficiency,
    Group,
    block_arrays,
    block_seconds,
)
from isthmus.cost.profiled import ALONE, ESTIMATED, Profiled
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import Profile
from isthmus.plan.schedule import stage_at

__all__ = ["ALONE", "BlockSpan", "BucketCost", "ModelTable", "Sums", "TensorTable", "stage_links"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_MANY = 2**40  # so many samples that only the work counts


class Sums(NamedTuple):
    """Sums over all blocks before each ([blocks + 1]), and values of each block ([blocks])."""

    elements: Floats  # trained elements; a tied parameter counts in every block that uses it
    split_elements: Floats  # the part that tensor groups divide
    pruned: Floats  # the part that masks apply to: linear weights
    saved: Floats  # bytes per sample kept from forward to backward
    split_saved: Floats
    inputs: Floats  # bytes per sample that enter each block: what recompute keeps
    block_saved: Floats
    block_workspace: Floats


class TensorTable(NamedTuple):
    """Tensors between blocks, flat: tensor i goes to target[first[i]:first[i + 1]]."""

    source: Ints
    first: Ints
    target: Ints
    per_sample: Floats  # bytes
    fixed: Floats  # bytes
    grad: Floats  # 1 where a gradient flows back


class BlockSpan(NamedTuple):
    """The figures of blocks a .. b together."""

    elements: float  # trained, ties counted once
    split_elements: float
    pruned: float
    saved: float
    split_saved: float
    inputs: float
    largest_saved: float  # of one block
    largest_workspace: float
    largest_elements: float


class BucketCost(NamedTuple):
    """The figures of a list of parameters together."""

    elements: float
    split: float  # the part that tensor groups divide
    pruned: float  # the part that masks apply to
    pruned_split: float  # ... of what tensor groups divide
    blocks: tuple[int, ...]  # that use one of them
    factor_bytes: float  # per sample: inputs and output gradients of its linear weights
    output_bytes: float  # ... the output gradients alone
    rebuild_flops: float  # per sample: the product of the two
    rebuild_split: float  # the part of it that tensor groups divide


class ModelTable:
    """All that pricing needs of a model in one precision on one cluster; time tables are made when first used."""

    def __init__(
        self,
        cluster: Cluster,
        graph: BlockGraph,
        precision: Precision,
        mixed: bool,
        efficiency: Mapping[str, Efficiency] | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.graph, self.precision, self.mixed = graph, precision, mixed
        self.width = WIDTH_OF[precision]
        self.sums = _sums(graph, self.width)
        computed = {name: kind.computes_in(precision, mixed) for name, kind in cluster.kinds.items()}
        self.wide = frozenset(name for name, own in computed.items() if own == "fp32" and precision != "fp32")
        self.wide_sums = _sums(graph, 4) if self.wide else self.sums
        self.tensors = _tensors(graph, self.width)
        self.users = _users(graph)
        self.split = frozenset(name for block in graph.blocks if block.tensor for name in block.tensor.parameters)
        self.tied = tuple(
            (users, graph.parameter[name].elements) for name, users in self.users.items() if len(users) > 1
        )
        self.kinds = cluster.kinds
        self.efficiency = efficiency or {}
        self._columns = {width: block_arrays(graph, width) for width in {self.width, 4 if self.wide else self.width}}
        self.profile = profile
        self.profiled = self._profiled(profile, cluster, computed) if profile is not None else None
        self.times = np.zeros((64, 2, len(graph.blocks) + 1))  # rows that are used, then room for more
        self._rows: dict[tuple[str, Group, int], int] = {}
        self._spans: dict[tuple[int, int, bool], BlockSpan] = {}
        self._buckets: dict[tuple[str, ...], BucketCost] = {}

    def flops(self, kind: str) -> float | None:
        """Return the peak FLOP/s at which this kind computes the job, or None if it cannot."""
        own = self.kinds[kind].computes_in(self.precision, self.mixed)
        return None if own is None else self.kinds[kind].compute[own]

    @cached_property
    def update_bandwidth(self) -> Mapping[str, float]:
        """Return, by kind, the bytes a second of an optimizer's update: measured, or a fraction of the memory's."""
        usual = {
            name: kind.memory_bandwidth * self.efficiency.get(name, USUAL).memory for name, kind in self.kinds.items()
        }
        costs = self.profile.device_costs if self.profile is not None else {}
        return usual | {name: own.update_bandwidth for name, own in costs.items() if own.update_bandwidth is not None}

    def row(self, kind: str, group: Group, samples: int) -> int:
        """Return the row of `times` for so many samples on a tensor group (or one device: degree 1) of this kind."""
        key = (kind, group if group[0] > 1 else ALONE, samples)
        if key not in self._rows:
            number = self._rows[key] = len(self._rows)
            if number == len(self.times):
                self.times = np.concatenate((self.times, np.zeros_like(self.times)))
            self.times[number] = self.seconds(kind, key[1], samples)
        return self._rows[key]

    def seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """Return cumulative seconds, [2, blocks + 1]: forward and backward of all blocks before each block."""
        if self.profiled is not None:
            return self.profiled.seconds(kind, group, samples)
        return self._roofline(kind, group, samples)

    def sources(self, row: int) -> Ints:
        """Return where each block's seconds in a row of `times` come from (see `cost.profiled`)."""
        if self.profiled is not None:
            return self.profiled.sources(*list(self._rows)[row])
        return np.full(len(self.graph.blocks), ESTIMATED, np.int32)

    def work(self, kind: str, samples: int) -> Floats:
        """Return the seconds per sample of each block, both ways: its work or, on a measured kind, for `samples`."""
        if self.profiled is not None and kind in self.profiled.kinds:
            return np.asarray(np.diff(self.seconds(kind, ALONE, samples)).sum(axis=0) / samples)
        return self._work(kind, ALONE)

    def least(self, kind: str, samples: int = _MANY) -> Floats:
        """Return for each block the least seconds per sample, both ways, on this kind and up to `samples` samples."""
        if self.profiled is not None and kind in self.profiled.kinds:
            return self.profiled.least(kind, samples, self._work)
        return self._work(kind, ALONE)

    def _work(self, kind: str, group: Group) -> Floats:
        return np.asarray(np.diff(self._roofline(kind, group, _MANY)).sum(axis=0) / _MANY)

    def _roofline(
        self, kind: str, group: Group, samples: int, columns: Mapping[int, BlockArrays] | None = None
    ) -> Floats:
        flops = self.flops(kind)
        if flops is None:
            raise ValueError(f"{kind} does not compute in {self.precision}")
        made, width = self.efficiency.get(kind, USUAL), 4 if kind in self.wide else self.width
        blocks = (columns or self._columns)[width]
        return block_seconds(blocks, self.kinds[kind], width, flops, group, samples, made)

    def _profiled(
        self, profile: Profile, cluster: Cluster, computed: Mapping[str, Precision | None]
    ) -> Profiled | None:
        """Return what the profile says of this model on this cluster; None if that is nothing."""
        columns = {
            width: block_arrays(msgspec.structs.replace(self.graph, outputs=0.0), width) for width in self._columns
        }

        def bare(kind: str, group: Group, samples: int) -> Floats:
            return np.asarray(np.diff(self._roofline(kind, group, samples, columns)))

        def loss(kind: str, group: Group, samples: int) -> Floats:
            part = 1.0 - columns[self.width].split[-1] * (1.0 - 1.0 / group[0])
            reached = self.kinds[kind].memory_bandwidth * self.efficiency.get(kind, USUAL).memory
            copies = np.array([LOSS_FORWARD, LOSS_BACKWARD])
            return np.asarray(copies * (part * self.graph.outputs * 4 * samples / reached))

        known = Profiled(profile, self.graph, cluster, computed, self._roofline, bare, loss)
        return known if known.kinds else None

    def span(self, a: int, b: int, wide: bool = False) -> BlockSpan:
        """Return the figures of blocks a .. b together, computed in the job's width or (`wide`) in 4 bytes."""
        if (a, b, wide) not in self._spans:
            s, largest = (self.wide_sums, self._wide_largest) if wide else (self.sums, self._largest)
            twice = sum(max(0, sum(a <= user <= b for user in users) - 1) * n for users, n in self.tied)
            self._spans[a, b, wide] = BlockSpan(
                elements=float(s.elements[b + 1] - s.elements[a]) - twice,
                split_elements=float(s.split_elements[b + 1] - s.split_elements[a]),
                pruned=float(s.pruned[b + 1] - s.pruned[a]),
                saved=float(s.saved[b + 1] - s.saved[a]),
                split_saved=float(s.split_saved[b + 1] - s.split_saved[a]),
                inputs=float(s.inputs[b + 1] - s.inputs[a]),
                largest_saved=float(largest[0, a, b]),
                largest_workspace=float(largest[1, a, b]),
                largest_elements=float(largest[2, a, b]),
            )
        return self._spans[a, b, wide]

    @cached_property
    def _largest(self) -> Floats:
        return _largest(self.sums)

    @cached_property
    def _wide_largest(self) -> Floats:
        return _largest(self.wide_sums)

    def bucket(self, words: tuple[str, ...], named: frozenset[str]) -> BucketCost:
        """Return the figures of parameters by name; `[block]` is all parameters of the block that are not `named`."""
        if named:
            return self._bucket(words, named)
        if words not in self._buckets:
            self._buckets[words] = self._bucket(words, named)
        return self._buckets[words]

    def _bucket(self, words: tuple[str, ...], named: frozenset[str]) -> BucketCost:
        graph, rows, names = self.graph, list[tuple[float, ...]](), set[str]()
        blocks = dict[int, None]()  # in order
        for word in words:
            listed: tuple[str, ...] = (word,)
            if word[0] == "[":
                index = graph.by_name[word[1:-1]]
                listed, own = graph.blocks[index].parameters, self._own[index]
                if own is not None and named.isdisjoint(listed):
                    rows.append(own)
                    blocks[index] = None
                    continue
                listed = tuple(name for name in listed if name not in named)
            for name in listed:
                if name not in names:
                    names.add(name)
                    rows.append(self._facts[name])
                    blocks.update(dict.fromkeys(self.users[name]))
        sums = [sum(column) for column in zip(*rows, strict=True)] or [0] * 8
        elements, split, pruned, pruned_split, factors, outputs, flops, flops_split = sums
        return BucketCost(
            elements=float(elements),
            split=float(split),
            pruned=float(pruned),
            pruned_split=float(pruned_split),
            blocks=tuple(blocks),
            factor_bytes=factors * self.width,
            output_bytes=outputs * self.width,
            rebuild_flops=flops,
            rebuild_split=flops_split,
        )

    @cached_property
    def _own(self) -> list[tuple[float, ...] | None]:
        """Return the sums of each block's parameters; None if a block has none, or shares one with another block."""
        found: list[tuple[float, ...] | None] = []
        for block in self.graph.blocks:
            rows = [self._facts[name] for name in block.parameters]
            alone = rows and all(len(self.users[name]) == 1 for name in block.parameters)
            found.append(tuple(sum(column) for column in zip(*rows, strict=True)) if alone else None)
        return found

    @cached_property
    def largest_factors(self) -> list[float]:
        """Return for each block the most bytes per sample of inputs and output gradients of one linear weight."""
        rows = [[self._facts[name][4] for name in block.parameters] for block in self.graph.blocks]
        return [max(row, default=0.0) * self.width for row in rows]

    @cached_property
    def weight_bytes(self) -> Floats:
        """Return the sums of weight (or gradient) bytes, and of those that groups divide, [2, blocks + 1]."""
        return np.stack((self.sums.elements, self.sums.split_elements)) * float(self.width)

    @cached_property
    def _facts(self) -> Mapping[str, tuple[float, ...]]:
        """Return for each parameter the figures that `BucketCost` adds up, with factors counted in elements."""
        found = {}
        for p in self.graph.parameters:
            x, split = p.linear, p.name in self.split
            pruned = p.elements if x is not None else 0
            flops = 2.0 * x.rows * x.inputs * x.outputs if x is not None else 0.0
            factors, outputs = (x.rows * (x.inputs + x.outputs), x.rows * x.outputs) if x is not None else (0.0, 0.0)
            parted = (p.elements, pruned, flops) if split else (0, 0, 0.0)
            found[p.name] = (p.elements, parted[0], pruned, parted[1], factors, outputs, flops, parted[2])
        return found


def _cumulative(graph: BlockGraph, value: Callable[[Any], float]) -> Floats:
    return np.concatenate(([0.0], np.cumsum([float(value(block)) for block in graph.blocks])))


def _sums(graph: BlockGraph, width: int) -> Sums:
    size = {parameter.name: parameter.elements for parameter in graph.parameters}
    linear = {parameter.name for parameter in graph.parameters if parameter.linear is not None}
    inputs = np.zeros(len(graph.blocks))
    for tensor in graph.tensors:
        inputs[list(tensor.targets)] += tensor.elements * (tensor.width or width)
    loss = np.zeros(len(graph.blocks) + 1)
    loss[-1] = graph.outputs * 4  # the loss keeps its probabilities in fp32
    return Sums(
        elements=_cumulative(graph, lambda b: sum(size[p] for p in b.parameters)),
        split_elements=_cumulative(graph, lambda b: sum(size[p] for p in b.tensor.parameters) if b.tensor else 0),
        pruned=_cumulative(graph, lambda b: sum(size[p] for p in b.parameters if p in linear)),
        saved=_cumulative(graph, lambda b: b.saved * width) + loss,
        split_saved=_cumulative(graph, lambda b: b.tensor.saved * width if b.tensor else 0),
        inputs=np.concatenate(([0.0], np.cumsum(inputs))),
        block_saved=np.array([b.saved * width for b in graph.blocks]) + loss[1:],
        block_workspace=np.array([b.workspace * width for b in graph.blocks]),
    )


def _largest(sums: Sums) -> Floats:
    """Return the most that one of the blocks first .. last saves, works with, and has to train, [3, first, last]."""
    rows = np.stack((sums.block_saved, sums.block_workspace, np.diff(sums.elements)))
    found = np.zeros((3, rows.shape[1], rows.shape[1]))
    for a in range(rows.shape[1]):
        found[:, a, a:] = np.maximum.accumulate(rows[:, a:], axis=1)
    return found


def _tensors(graph: BlockGraph, width: int) -> TensorTable:
    inner = [tensor for tensor in graph.tensors if tensor.source >= 0]
    counts = [len(tensor.targets) for tensor in inner]
    return TensorTable(
        source=np.array([tensor.source for tensor in inner], np.int32),
        first=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        target=np.array([target for tensor in inner for target in sorted(tensor.targets)], np.int32),
        per_sample=np.array([tensor.elements * (tensor.width or width) for tensor in inner], np.float64),
        fixed=np.array([tensor.fixed * (tensor.width or width) for tensor in inner], np.float64),
        grad=np.array([float(tensor.grad) for tensor in inner]),
    )


def _users(graph: BlockGraph) -> dict[str, tuple[int, ...]]:
    """Return the blocks that use each parameter."""
    users: dict[str, list[int]] = {parameter.name: [] for parameter in graph.parameters}
    for index, block in enumerate(graph.blocks):
        for name in block.parameters:
            users[name].append(index)
    return {name: tuple(blocks) for name, blocks in users.items()}


@compiled
def stage_links(first: Ints, tensors: TensorTable) -> Any:
    """Return the bytes from stage to stage, [from, to]: forwards per sample and fixed, backwards per sample and fixed.

    A tensor that several blocks of one stage use is sent there once. `first` has the first block of each stage.
    """
    n = len(first)
    links = np.zeros((4, n, n))
    for i in range(len(tensors.source)):
        s = stage_at(first, tensors.source[i])
        before = s
        for k in range(tensors.first[i], tensors.first[i + 1]):
            t = stage_at(first, tensors.target[k])
            if t != before:
                links[0, s, t] += tensors.per_sample[i]
                links[1, s, t] += tensors.fixed[i]
                links[2, s, t] += tensors.per_sample[i] * tensors.grad[i]
                links[3, s, t] += tensors.fixed[i] * tensors.grad[i]
                before = t
    return links
