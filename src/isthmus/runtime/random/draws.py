"""Find the random operations of a block, and along which dimension the samples lie in what they draw.

For an exported block this is read off its graph, where sizes that grow with the batch are marked. A block of child
modules is run without data at two batch sizes instead, and what it draws is compared. If parts of several samples are
merged into one dimension, the samples are assumed to lie outermost in it, as everywhere in a cut model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import ModelError
from isthmus.model.restored_state import kept_state
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.torch_export import Example, probes_of
from isthmus.model.trace import bound, kind_of, tensors_of
from isthmus.runtime.random.plain_attention import PlainAttention

__all__ = ["Draw", "Split", "active", "draws_itself", "draws_of", "refused"]

_SEEDED = torch.Tag.nondeterministic_seeded
_DROPOUTS = {"dropout", "dropout_", "feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"}
_DROPOUTS |= {"feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout"}
_KNOWN = _DROPOUTS | {"scaled_dot_product_attention", "bernoulli", "bernoulli_", "uniform_", "exponential_", "normal_"}
_KNOWN |= {"normal", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like"}


class Split(NamedTuple):
    """A part of a dimension of what is drawn, from `start` of `whole` on (the heads of a tensor group's member)."""

    dim: int
    start: int
    whole: int


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A random operation of a block, in the order of execution; `node` is its name in the block's graph, if it has one.

    `dim` is the dimension of the samples in what it draws. With `split` it draws a part of what the whole would draw.
    """

    operation: str
    dim: int
    node: str = ""
    split: Split | None = None


def draws_of(pieces: Pieces, example: Example) -> tuple[tuple[Draw, ...], ...]:
    """Return the random operations of every block in training mode; raise ModelError for one that is not supported."""
    if pieces.graph.how == "export":
        named = zip(pieces.graph.blocks, pieces.blocks, strict=True)
        return tuple(tuple(_drawn(block.name, module)) for block, module in named)
    return _watched(pieces, example)


def draws_itself(target: Any) -> bool:
    """Return whether an operation takes random numbers from a device's generator."""
    return _SEEDED in getattr(target, "tags", ())


def active(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random operation draws with these arguments: not at dropout 0 or 1, or outside training."""
    given = bound(target, args, kwargs)
    if given.get("train", True) is False or given.get("training", True) is False or given.get("num_layers") == 1:
        return False
    rate = next((given[name] for name in ("dropout_p", "dropout") if name in given), None)
    if kind_of(target) in _DROPOUTS:
        rate = given["p"]
    return not isinstance(rate, (int, float)) or 0 < rate < 1


def refused(block: str, operation: str) -> ModelError:
    """Return the error for an operation whose numbers cannot be made a function of the sample."""
    return ModelError(
        "a random operation cannot be made the same on every device",
        where=f"block {block}",
        found=operation,
        expected="dropout, bernoulli, rand, randn, randint, normal_, uniform_ or exponential_, without a generator",
        next="Build it from those, or draw the numbers in the data",
    )


# -- from a graph


def _drawn(block: str, module: nn.Module) -> Iterator[Draw]:
    assert isinstance(module, fx.GraphModule)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            continue
        for inner in node.all_input_nodes:
            nested = getattr(module, str(inner.target), None) if inner.op == "get_attr" else None
            if isinstance(nested, fx.GraphModule):
                yield from _drawn(block, nested)
        if node.op == "call_function" and draws_itself(node.target) and active(node.target, node.args, node.kwargs):
            if kind_of(node.target) not in _KNOWN:
                raise refused(block, str(node.target))
            yield Draw(operation=kind_of(node.target), dim=_sample_dim(block, node), node=node.name)


def _sample_dim(block: str, node: fx.Node) -> int:
    """Return the only dimension that grows with the batch.

    For attention this is read from its result, whose first dimensions are those of its scores.
    """
    shape = tensors_of(node.meta["val"])[0].shape
    return _only(block, str(node.target), shape, [dim for dim, size in enumerate(shape) if not isinstance(size, int)])


def _only(block: str, operation: str, shape: Sequence[Any], growing: list[int]) -> int:
    if len(growing) == 1:
        return growing[0]
    raise ModelError(
        f"what {operation} draws is not shaped by samples",
        where=f"block {block}",
        found=f"a tensor {[str(size) for size in shape]}",
        expected="one dimension that grows with the batch",
        next="Draw for each sample: a tensor whose first dimension is the batch",
    )


# -- from a run without data


class _Recording(TorchDispatchMode):
    """Records the random operations that run and the shapes that they draw."""

    def __init__(self, block: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block = block
        self.found: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws_itself(func) and active(func, args, kwargs):
            given = bound(func, args, kwargs)
            like = given.get("self", given.get("input"))
            if kind_of(func) not in _KNOWN:
                raise refused(self.block, str(func))
            self.found.append((kind_of(func), tuple(like.shape if isinstance(like, Tensor) else given["size"])))
        return func(*args, **kwargs)


def _watched(pieces: Pieces, example: Example) -> tuple[tuple[Draw, ...], ...]:
    probes = probes_of(example)
    low, high = (_run(pieces, example, probe) for probe in probes)
    return tuple(_compared(few, many, probes) for few, many in zip(low, high, strict=True))


def _run(pieces: Pieces, example: Example, batch: int) -> list[_Recording]:
    """Return a recording of what each block draws at random for a batch of this size."""
    recorded = []
    device = next((p.device for block in pieces.blocks for p in block.parameters()), torch.device("cpu"))
    with kept_state(*pieces.blocks), FakeTensorMode(allow_non_fake_inputs=True):

        def fresh(value: Tensor) -> Tensor:
            return torch.zeros((batch, *value.shape[1:]), dtype=value.dtype, device=device)

        kwargs = {key: fresh(value) for key, value in example.kwargs.items()}
        known = pieces.bind(tuple(map(fresh, example.args)), kwargs)
        for block, module, taken, given in zip(
            pieces.graph.blocks, pieces.blocks, pieces.incoming, pieces.outgoing, strict=True
        ):
            with _Recording(block.name) as recording, PlainAttention():
                known |= zip(given, module(*(known[name] for name in taken)), strict=True)
            recorded.append(recording)
    return recorded


def _compared(low: _Recording, high: _Recording, probes: tuple[int, int]) -> tuple[Draw, ...]:
    if [kind for kind, _ in low.found] != [kind for kind, _ in high.found]:
        raise ModelError(
            "how often a block draws depends on the batch",
            where=f"block {low.block}",
            found=f"{len(low.found)} random operations for {probes[0]} samples, {len(high.found)} for {probes[1]}",
            expected="as many whatever the batch: one for all samples together",
        )
    draws = []
    for (kind, small), (_, large) in zip(low.found, high.found, strict=True):
        growing = [dim for dim, (a, b) in enumerate(zip(small, large, strict=True)) if a * probes[1] == b * probes[0]]
        draws.append(Draw(operation=kind, dim=_only(low.block, kind, small, growing)))
    return tuple(draws)
