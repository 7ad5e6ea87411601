"""Compute times of blocks on each device kind, for a number of samples.

Without a measured profile the times come from a roofline model with the figures of the catalog. For one forward over s
samples

    work = flops * s / (peak rate * matmul) + (moved * s + weights) * width / (memory bandwidth * memory)
    time = max(operations * launch, work)

The two parts of the work are added, and not the larger one taken, because a block is a series of kernels, some bound by
arithmetic and some by memory, and they run one after another. `launch` is the time that the processor needs to start
one kernel, and small work waits for it. Backward has its own FLOPs, moves twice the elements, and starts twice as many
kernels. The loss moves the model's outputs in fp32: three copies forward, two backward.

`width` is the bytes of an element in the computation: those of the job or, where a kind computes a mixed job in fp32,
4.

A tensor group of n devices divides what can be split by n and adds the all-reduces of its row-split layers. Each of
them is a ring on the group's own links and takes 2(n - 1)(latency + bytes / (n * bandwidth)), which is what the event
engine gives too when nothing else uses those links.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import DeviceKind, Precision
from isthmus.model.graph import Block, BlockGraph

__all__ = ["HOST_ADAM", "USUAL", "WIDTH_OF", "BlockArrays", "Efficiency", "Group", "block_arrays", "block_seconds"]

Floats = npt.NDArray[np.float64]
Group = tuple[int, float, float]  # devices, bandwidth and latency between them

WIDTH_OF: dict[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
HOST_ADAM = 0.26e9  # parameters a second that one host core updates (4.2e9 on 16 threads, measured, fp32 AdamW)
LOSS_FORWARD, LOSS_BACKWARD = 3.0, 2.0  # fp32 copies of the model's outputs that a loss moves


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What a device kind reaches in practice: fractions of its catalog figures, and the time to start a kernel."""

    matmul: float = 0.6  # part of the peak rate that large matrix products reach
    memory: float = 0.8  # part of the peak memory bandwidth that copies reach
    launch: float = 8e-6  # seconds to start one kernel


USUAL = Efficiency()


class BlockArrays(NamedTuple):
    """A model's blocks as columns; figures are per sample unless their comment says otherwise."""

    forward_flops: Floats
    backward_flops: Floats
    forward_moved: Floats  # elements of the computed width
    backward_moved: Floats
    weights: Floats  # elements read, whatever the number of samples
    operations: Floats
    split: Floats  # part of the work that a tensor group divides
    reduces: Floats
    reduced: Floats  # elements of one all-reduce


def block_arrays(graph: BlockGraph, width: int) -> BlockArrays:
    """Return the columns of a model; its loss counts as memory traffic of the last block."""
    blocks = graph.blocks
    loss = np.zeros(len(blocks))
    loss[-1] = graph.outputs * 4 / width
    moved = np.array([block.moved for block in blocks])
    tensors = [block.tensor for block in blocks]
    return BlockArrays(
        forward_flops=np.array([block.forward_flops for block in blocks]),
        backward_flops=np.array([block.backward_flops for block in blocks]),
        forward_moved=moved + LOSS_FORWARD * loss,
        backward_moved=2 * moved + LOSS_BACKWARD * loss,
        weights=np.array([block.weights_moved for block in blocks]),
        operations=np.array([float(block.operations) for block in blocks]),
        split=np.array([_split(block) for block in blocks]),
        reduces=np.array([float(tensor.reduces) if tensor else 0.0 for tensor in tensors]),
        reduced=np.array([tensor.elements if tensor else 0.0 for tensor in tensors]),
    )


def _split(block: Block) -> float:
    return min(1.0, block.tensor.flops / max(block.forward_flops, 1.0)) if block.tensor is not None else 0.0


def block_seconds(
    blocks: BlockArrays,
    kind: DeviceKind,
    width: int,
    flops: float,
    group: Group,
    samples: int,
    made: Efficiency = USUAL,
) -> Floats:
    """Return cumulative seconds, [2, blocks + 1]: forward and backward of all blocks before each block."""
    degree, bandwidth, latency = group
    part = 1.0 - blocks.split * (1.0 - 1.0 / degree)
    arithmetic = part * (samples / (flops * made.matmul))
    memory = part * (width / (kind.memory_bandwidth * made.memory))
    launch = blocks.operations * made.launch
    forward = blocks.forward_flops * arithmetic + (blocks.forward_moved * samples + blocks.weights) * memory
    backward = blocks.backward_flops * arithmetic + (blocks.backward_moved * samples + 2 * blocks.weights) * memory
    sums = np.zeros((2, len(part) + 1))
    np.maximum(forward, launch, out=sums[0, 1:])
    np.maximum(backward, 2 * launch, out=sums[1, 1:])
    if degree > 1:
        sending = blocks.reduced * (samples * width / (degree * bandwidth))
        sums[:, 1:] += blocks.reduces * (2 * (degree - 1)) * (latency + sending)
    return np.cumsum(sums, axis=1, out=sums)
