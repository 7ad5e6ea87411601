"""A captured model as text: its size, what it computes, and its blocks, with equal ones written once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

from isthmus.model.graph import BlockGraph
from isthmus.report.columns import columns, cut, percent
from isthmus.units import format_bytes, format_flops

__all__ = ["Repeat", "TensorPart", "model_text", "repeats", "state_sizes", "tensor_split"]

_LONGEST_PERIOD = 16  # blocks
_ADAM_STATE = 16  # bytes per parameter: weights, gradients and two moments, in fp32 and in 16 bits (with fp32 masters)
_ORIGINS = {
    "file": "read from its file",
    "cache": "from the cache of captured models",
    "captured": "captured just now",
}


class Repeat(NamedTuple):
    """`period` blocks from `start`, `times` times over."""

    start: int
    period: int
    times: int


class TensorPart(NamedTuple):
    """The part of a model that tensor parallelism could divide, and by how many devices (0: any number)."""

    flops: float  # 0 .. 1 of forward FLOPs
    parameters: float  # 0 .. 1
    degree: int


def repeats(digests: Sequence[str]) -> list[Repeat]:
    """Return the sequence as repeats: at each place the pattern that covers most, and the shortest among equals."""
    found, start = [], 0
    while start < len(digests):
        best = Repeat(start, 1, 1)
        for period in range(1, _LONGEST_PERIOD + 1):
            count = _times(digests, start, period)
            if count > 1 and period * count > best.period * best.times:
                best = Repeat(start, period, count)
        found.append(best)
        start += best.period * best.times
    return found


def _times(digests: Sequence[str], start: int, period: int) -> int:
    """Return how many times the `period` digests from `start` follow each other."""
    end = start + period
    while end < len(digests) and digests[end] == digests[end - period]:
        end += 1
    return (end - start) // period


def tensor_split(graph: BlockGraph) -> TensorPart:
    """Return the part of all blocks together that a tensor group could divide."""
    splits = [block.tensor for block in graph.blocks if block.tensor is not None]
    named = {name for split in splits for name in split.parameters}
    elements = sum(graph.parameter[name].elements for name in named)
    forward = sum(block.forward_flops for block in graph.blocks)
    degree = gcd(*(split.heads for split in splits))
    flops = sum(split.flops for split in splits)
    return TensorPart(flops / max(forward, 1.0), elements / max(graph.elements, 1), degree)


def state_sizes(graph: BlockGraph) -> dict[str, float]:
    """Return the bytes of the weights, of all that Adam keeps, and of one sample's activations."""
    saved = sum(block.saved for block in graph.blocks)
    return {
        "weights_fp32": 4 * graph.elements,
        "weights_16bit": 2 * graph.elements,
        "state_adam": _ADAM_STATE * graph.elements,
        "sample_fp32": 4 * saved,
        "sample_16bit": 2 * saved,
    }


def model_text(graph: BlockGraph, origin: str) -> str:
    """Return the whole text, which is about a page."""
    sizes = {name: format_bytes(value) for name, value in state_sizes(graph).items()}
    forward = sum(block.forward_flops for block in graph.blocks)
    sequence = f", sequence {graph.sequence}" if graph.sequence is not None else ""
    how = "the operations that torch.export sees" if graph.how == "export" else "its child modules, as export failed"
    facts = [
        ("parameters", f"{graph.elements:,}"),
        ("FLOPs per sample", f"{format_flops(graph.flops)} ({format_flops(forward)} forward)"),
        ("weights", f"{sizes['weights_fp32']} in fp32, {sizes['weights_16bit']} in 16 bits"),
        ("training state", f"{sizes['state_adam']} with Adam"),
        ("activations", f"{sizes['sample_fp32']} a sample in fp32, {sizes['sample_16bit']} in 16 bits"),
        ("tensor split", _split_line(graph)),
        ("ties", _ties(graph)),
        ("mixes samples", _mixing(graph)),
        ("blocks", f"{len(graph.blocks)}, cut from {how}; {_ORIGINS[origin]}"),
    ]
    return "\n".join([f"{graph.name}{sequence}", "", *columns(facts), "", *_block_rows(graph)])


def _split_line(graph: BlockGraph) -> str:
    part = tensor_split(graph)
    if part.parameters == 0:
        return "nothing that tensor parallelism could divide"
    limit = f", by a divisor of {part.degree}" if part.degree else ""
    return f"{percent(part.flops)} of forward FLOPs, {percent(part.parameters)} of parameters{limit}"


def _ties(graph: BlockGraph) -> str:
    tied = [f"{parameter.name} = {' = '.join(parameter.ties)}" for parameter in graph.parameters if parameter.ties]
    return cut("; ".join(tied), 90) or "none"


def _mixing(graph: BlockGraph) -> str:
    found = Counter(name for block in graph.blocks for name in block.mixes_samples)
    return ", ".join(f"{count} x {name}" for name, count in found.items()) or "no operation does"


def _block_rows(graph: BlockGraph) -> list[str]:
    rows = [("", "block", "parameters", "forward", "saved fp32")]
    for start, period, count in repeats([block.digest for block in graph.blocks]):
        for index in range(start, start + period):
            block, last = graph.blocks[index], graph.blocks[index + period * (count - 1)]
            elements = sum(graph.parameter[name].elements for name in block.parameters)
            rows.append(
                (
                    f"{count} x" if count > 1 else "",
                    cut(block.name if count == 1 else f"{block.name} .. {last.name}", 64),
                    f"{elements:,}",
                    format_flops(block.forward_flops),
                    format_bytes(4 * block.saved),
                )
            )
    return columns(rows, right=(0, 2, 3, 4))
