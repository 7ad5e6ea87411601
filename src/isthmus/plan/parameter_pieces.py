"""Which device holds which pieces of which parameters under a plan, and how many bytes a piece has.

A piece is a range [lo, hi) of a tensor's elements. It is the whole tensor, or the j-th of g equal parts in a tensor
group of g devices that splits it. Where n replicas shard it, it is the i-th of n parts of that (the weights under
`sharded-all`, the optimizer state under `sharded-all` and `sharded-optimizer`). In a pool the home of shard i is device
i mod n.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from isthmus.cluster.spec import Precision
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.types import Pipeline, Plan, Pool, Stage

__all__ = [
    "Key",
    "Pieces",
    "Range",
    "Weight",
    "common",
    "element_weight",
    "held_pieces",
    "length",
    "merge",
    "subtract",
    "weights_of",
]

Range = tuple[int, int]
Key = tuple[str, str, bool]  # job, parameter, whether it is the optimizer's state (else the weights)
Pieces = dict[str, dict[Key, list[Range]]]  # device -> its ranges of each, sorted and disjoint

_INDEX = 4  # bytes of the index that says which element a kept value is


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that one element takes when it is sent: its weight and its optimizer state.

    `kept` is the fraction of the elements that is sent, or None for all.
    """

    weights: int
    state: int
    kept: float | None = None

    def bytes(self, weights: int, state: int) -> float:
        """Return the bytes of so many elements of weights and state; kept values of a pruned tensor have an index."""
        dense = self.weights * weights + self.state * state
        return dense if self.kept is None else self.kept * (dense + _INDEX * max(weights, state))


def element_weight(job: Job, precision: Precision, kept: float | None = None) -> Weight:
    """Return the bytes that one element takes when it is sent.

    Weights take 4 bytes (fp32) or 2. State takes 4 bytes for each of the optimizer's `moments`, and 4 more for the fp32
    copy under 16-bit weights. Gradients are not state.
    """
    half = precision != "fp32"
    return Weight(weights=2 if half else 4, state=4 * (job.optimizer.moments + half), kept=kept)


def weights_of(plan: Plan, models: Mapping[str, BlockGraph]) -> dict[tuple[str, str], Weight]:
    """Return the bytes of an element of each (job, parameter); in pruned stages only linear weights are pruned."""
    found: dict[tuple[str, str], Weight] = {}
    for job, precision, kept, names in _runs(plan, models):
        dense, pruned = element_weight(job, precision), element_weight(job, precision, kept)
        for name in names:
            linear = models[job.name].parameter[name].linear is not None
            found.setdefault((job.name, name), pruned if linear else dense)
    return found


def _runs(plan: Plan, models: Mapping[str, BlockGraph]) -> Iterator[tuple[Job, Precision, float | None, Iterable[str]]]:
    for part in plan.parts:
        if isinstance(part, Pipeline):
            for stage in part.stages:
                yield part.job, part.precision, stage.kept, _parameters(models[part.job.name], stage.first, stage.last)
        else:
            for job in part.jobs:
                names = models[job.job.name].parameter
                yield job.job, job.precision, job.kept, names


def _parameters(graph: BlockGraph, first: str, last: str) -> dict[str, None]:
    blocks = graph.blocks[graph.by_name[first] : graph.by_name[last] + 1]
    return {name: None for block in blocks for name in block.parameters}


def held_pieces(plan: Plan, models: Mapping[str, BlockGraph]) -> Pieces:
    """Return the pieces that each device holds."""
    pieces: Pieces = {}
    for part in plan.parts:
        if isinstance(part, Pool):
            _add_pool(pieces, part, models)
        else:
            for stage in part.stages:
                _add_stage(pieces, part, stage, models[part.job.name])
    return {device: {key: merge(ranges) for key, ranges in held.items() if ranges} for device, held in pieces.items()}


def _add_pool(pieces: Pieces, pool: Pool, models: Mapping[str, BlockGraph]) -> None:
    for job in pool.jobs:
        graph = models[job.job.name]
        has_state = element_weight(job.job, job.precision).state > 0
        for index, shard in enumerate(job.shards):
            held = pieces.setdefault(pool.devices[index % len(pool.devices)], {})
            for name in _parameters(graph, shard.first, shard.last):
                whole = (0, graph.parameter[name].elements)
                _hold(held, job.job.name, name, whole, whole if has_state else None)


def _add_stage(pieces: Pieces, pipeline: Pipeline, stage: Stage, graph: BlockGraph) -> None:
    job, count = pipeline.job, len(stage.replicas)
    has_state = element_weight(job, pipeline.precision).state > 0
    blocks = graph.blocks[graph.by_name[stage.first] : graph.by_name[stage.last] + 1]
    split = {name for block in blocks if block.tensor is not None for name in block.tensor.parameters}
    names = _parameters(graph, stage.first, stage.last)
    for index, replica in enumerate(stage.replicas):
        for member, device in enumerate(replica.devices):
            held = pieces.setdefault(device, {})
            for name in names:
                whole = (0, graph.parameter[name].elements)
                own = _part(whole, member, len(replica.devices)) if name in split else whole
                mine = _part(own, index, count)
                weights = mine if stage.state == "sharded-all" else own
                state = mine if stage.state != "replicated" else own
                _hold(held, job.name, name, weights, state if has_state else None)


def _hold(held: dict[Key, list[Range]], job: str, name: str, weights: Range, state: Range | None) -> None:
    held.setdefault((job, name, False), []).append(weights)
    if state is not None:
        held.setdefault((job, name, True), []).append(state)


def _part(whole: Range, index: int, count: int) -> Range:
    """Return the index-th of `count` parts, which are equal to within one element."""
    lo, size = whole[0], whole[1] - whole[0]
    return lo + index * size // count, lo + (index + 1) * size // count


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return the same elements as sorted, disjoint, non-empty ranges."""
    merged: list[Range] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        elif lo < hi:
            merged.append((lo, hi))
    return merged


def subtract(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """Return the elements of `ranges` that are not in `taken`; both must be sorted and disjoint."""
    left = list(ranges)
    for lo, hi in taken:
        left = [piece for a, b in left for piece in ((a, min(b, lo)), (max(a, hi), b)) if piece[0] < piece[1]]
    return left


def common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """Return the elements that are in both; both must be sorted and disjoint."""
    others = list(others)
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d)]


def length(ranges: Iterable[Range]) -> int:
    """Return the number of elements in all ranges together."""
    return sum(hi - lo for lo, hi in ranges)
