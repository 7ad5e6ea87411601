"""How long a block computes: `a + c * samples` on each device kind.

Without a measured profile the figures are a roofline from the catalog. For one forward over s samples

    a = operations * GAP + weights * width / (memory bandwidth * MEMORY)
    c = flops / (peak rate * MATMUL) + moved * width / (memory bandwidth * MEMORY)

added, not the larger of the two: a block is a row of kernels, some bound by arithmetic, some by memory, and they run
one after another. Backward has its own FLOPs, and moves twice the elements with twice the kernels.

A tensor group of n devices divides what can be split by n and adds the all-reduces of its row-split layers, each as a
ring on the group's own links: 2(n - 1)(latency + bytes / (n * bandwidth)), which the event engine gives too when
nothing else uses those links.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import DeviceKind, Precision
from isthmus.model.graph import Block, BlockGraph

__all__ = ["GAP", "MATMUL", "MEMORY", "WIDTH_OF", "Group", "block_times", "rate"]

Floats = npt.NDArray[np.float64]

MATMUL = 0.6  # part of the peak rate that large matrix products reach
MEMORY = 0.8  # part of the peak memory bandwidth that copies reach
GAP = 2e-6  # seconds between two kernels
WIDTH_OF: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Group = tuple[int, float, float]  # devices, bandwidth and latency between them


def rate(kind: DeviceKind, precision: Precision, mixed: bool) -> float | None:
    """FLOP/s of the kind in this precision; in fp32 where it lacks it (or is slower in it) and the job is mixed."""
    own, full = kind.compute.get(precision), kind.compute.get("fp32")
    if own is not None and not (mixed and full is not None and full > own):
        return own
    return full if mixed else None


def block_times(graph: BlockGraph, kind: DeviceKind, precision: Precision, flops: float, group: Group) -> Floats:
    """Sums over blocks, [4, blocks + 1]: forward a, forward c, backward a, backward c of all blocks before each."""
    width = WIDTH_OF[precision]
    rows = [_block(block, kind, flops, width, group) for block in graph.blocks]
    sums = np.zeros((4, len(rows) + 1))
    np.cumsum(np.array(rows).T.reshape(4, len(rows)), axis=1, out=sums[:, 1:])
    return sums


def _block(block: Block, kind: DeviceKind, flops: float, width: int, group: Group) -> tuple[float, float, float, float]:
    degree, bandwidth, latency = group
    split = block.tensor if degree > 1 else None
    part = 1.0
    reduce_fixed = reduce_slope = 0.0
    if split is not None:
        part = 1.0 - (1.0 - 1.0 / degree) * min(1.0, split.flops / max(block.forward_flops, 1.0))
        reduce_fixed = split.reduces * 2 * (degree - 1) * latency
        reduce_slope = split.reduces * 2 * (degree - 1) / degree * split.elements * width / bandwidth
    memory = width / (kind.memory_bandwidth * MEMORY)
    compute = part / (flops * MATMUL)
    fixed = block.operations * GAP + block.weights_moved * part * memory
    return (
        fixed + reduce_fixed,
        block.forward_flops * compute + block.moved * part * memory + reduce_slope,
        2 * fixed + reduce_fixed,
        block.backward_flops * compute + 2 * block.moved * part * memory + reduce_slope,
    )
