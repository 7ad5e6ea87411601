"""Small block graphs made by hand: a chain of blocks like a transformer's, with ties and skips on request."""

from __future__ import annotations

import msgspec

from isthmus.model.digest import digest_of
from isthmus.model.graph import Block, BlockGraph, Linear, Parameter, Tensor, TensorSplit

__all__ = ["chain"]


def chain(
    blocks: int = 8,
    *,
    name: str = "chain",
    width: int = 64,
    rows: int = 16,
    vocabulary: int = 500,
    tied: bool = False,
    linear: bool = True,
    heads: int = 8,
    skips: bool = False,
) -> BlockGraph:
    """`embed`, `h.1` ... , `head`: each block feeds the next; with `skips` also the one after that.

    `tied`: the head uses the weights of the embedding. `linear`: weights may be synced by factors. `heads`: how far
    tensor groups may split the middle blocks (0: not at all).
    """
    names = ["embed", *(f"h.{index}" for index in range(1, blocks - 1)), "head"]
    made = [_middle(block, width, rows, heads) for block in names[1:-1]]
    ends = (_end("embed", "embed.weight", width, rows), _end("head", _head(tied), width, rows))
    graph = BlockGraph(
        name=name,
        blocks=(ends[0], *made, ends[1]),
        tensors=_tensors(names, width * rows, skips),
        parameters=_parameters(names, width, rows, vocabulary, tied=tied, linear=linear),
        sequence=rows,
        outputs=float(rows * vocabulary),
    )
    return msgspec.structs.replace(graph, digest=digest_of(graph))


def _head(tied: bool) -> str:
    return "embed.weight" if tied else "head.weight"


def _middle(name: str, width: int, rows: int, heads: int) -> Block:
    flops = 4.0 * rows * width * width
    split = TensorSplit(
        parameters=(f"{name}.up", f"{name}.down"),
        flops=flops,
        saved=1.0 * rows * width,
        reduces=1,
        elements=1.0 * rows * width,
        heads=heads,
    )
    return Block(
        name=name,
        digest="middle",
        parameters=(f"{name}.up", f"{name}.down", f"{name}.bias"),
        forward_flops=flops,
        backward_flops=2 * flops,
        saved=3.0 * rows * width,
        moved=6.0 * rows * width,
        weights_moved=2.0 * width * width + width,
        operations=4,
        tensor=split if heads else None,
    )


def _end(name: str, parameter: str, width: int, rows: int) -> Block:
    return Block(
        name=name,
        digest=name,
        parameters=(parameter,),
        forward_flops=2.0 * rows * width,
        backward_flops=4.0 * rows * width,
        saved=1.0 * rows * width,
        moved=2.0 * rows * width,
        weights_moved=1.0 * rows * width,
        operations=1,
    )


def _tensors(names: list[str], elements: int, skips: bool) -> tuple[Tensor, ...]:
    last = len(names) - 1
    inputs = Tensor(name="tokens", source=-1, targets=(0,), elements=16.0, width=8, grad=False)
    steps = (range(index + 1, min(index + (3 if skips else 2), last + 1)) for index in range(last))
    return (
        inputs,
        *(
            Tensor(name=f"{names[index]}.out", source=index, targets=tuple(targets), elements=float(elements))
            for index, targets in enumerate(steps)
        ),
    )


def _parameters(
    names: list[str], width: int, rows: int, vocabulary: int, *, tied: bool, linear: bool
) -> tuple[Parameter, ...]:
    square = Linear(rows=rows, inputs=width, outputs=width) if linear else None
    table = (vocabulary, width)
    found = [
        Parameter(name="embed.weight", elements=vocabulary * width, shape=table, ties=("head.weight",) if tied else ())
    ]
    for name in names[1:-1]:
        for part in ("up", "down"):
            found.append(Parameter(name=f"{name}.{part}", elements=width * width, shape=(width, width), linear=square))
        found.append(Parameter(name=f"{name}.bias", elements=width, shape=(width,)))
    if not tied:
        product = Linear(rows=rows, inputs=width, outputs=vocabulary) if linear else None
        found.append(Parameter(name="head.weight", elements=vocabulary * width, shape=table, linear=product))
    return tuple(found)
