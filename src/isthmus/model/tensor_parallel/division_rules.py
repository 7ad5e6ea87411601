"""Rules for how a tensor that is divided over the members of a tensor group stays divided through operations.

A *divided* tensor has one dimension that consists of sections; a member holds an equal slice of each section (one
section, or three if query, key and value come from one layer). A rule for each kind of operation says how its result is
divided if its operands are. An operation without a rule is refused, so whatever passes computes in every member, slice
by slice, what the whole would. The number of members does not matter here: it must divide every section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from isthmus.errors import ModelError
from isthmus.model.trace import Op, Trace, tensors_of

__all__ = ["CUTS", "RESHAPES", "VIEWS", "DividedTensor", "Rules", "refusal", "reshaped"]

_POINTWISE = {
    "gelu", "silu", "relu", "relu_", "sigmoid", "tanh", "mul", "add", "sub", "neg", "dropout", "dropout_", "div", "to",
    "clone", "contiguous", "leaky_relu", "elu", "softplus", "hardswish", "pow", "mish", "clamp", "relu6", "silu_",
    "gelu_", "_to_copy", "square", "mul_", "div_", "add_", "masked_fill", "where", "detach", "alias",
}  # fmt: skip
RESHAPES = {"view", "_unsafe_view", "reshape", "flatten", "unflatten"}
CUTS = {"split", "split_with_sizes", "chunk", "slice"}
_MOVES = {
    "transpose", "permute", "t", "mT", "numpy_T", "swapaxes", "swapdims", "movedim", "unsqueeze", "squeeze", "expand",
    "select", "unbind", *CUTS,
}  # fmt: skip
VIEWS = _MOVES | RESHAPES | {"detach", "alias"}  # views of one tensor


@dataclass(frozen=True)
class DividedTensor:
    """A divided tensor: of each of the `sections` of dimension `dim`, given by size, a member holds an equal slice."""

    dim: int
    sections: tuple[int, ...]


def refusal(op: Op, why: str) -> ModelError:
    """Return the error that names an operation which cannot work on slices."""
    return ModelError(
        "a pair of linear layers cannot be divided over a tensor group",
        where=op.module or None,
        found=f"{op.kind} ({op.node.name}), which {why}",
        next="Run this block on single devices",
    )


@dataclass(eq=False)
class Rules:
    """The tensors that are divided so far, at one probe of the trace.

    `entering` has tensors from outside by their reader; a DividedTensor if a member needs only its part of them.
    """

    trace: Trace
    probe: int
    parts: dict[fx.Node, tuple[DividedTensor, ...]] = field(default_factory=dict)
    entering: dict[tuple[fx.Node, fx.Node], DividedTensor | None] = field(default_factory=dict)

    def divide(self, op: Op) -> None:
        """Find out how the operation's results are divided."""
        if op.mutates is not None and op.mutates not in self.parts:
            raise refusal(op, "writes into a tensor that is not divided")
        parts = self._rule(op)(op)
        if any(max(part.sections) == 1 for part in parts):
            raise refusal(op, "has one element along the dimension to divide")
        self.parts[op.node] = parts

    def shape(self, node: Any) -> tuple[int, ...]:
        """Return the shape of a node's only tensor."""
        return self.trace.value(node).shapes[self.probe]

    def only(self, op: Op, node: Any) -> DividedTensor:
        """Return the part of an operand that must be divided."""
        parts = self.parts.get(node, ())
        if len(parts) != 1:
            raise refusal(op, "needs an operand divided that is not")
        return parts[0]

    def _rule(self, op: Op) -> Callable[[Op], tuple[DividedTensor, ...]]:
        for kinds, rule in ((_POINTWISE, self._pointwise), (RESHAPES, self._reshape), (_MOVES, self._move)):
            if op.kind in kinds:
                return rule
        rules = {
            "getitem": self._item,
            "cat": self._cat,
            "softmax": self._softmax,
            "matmul": self._product,
            "bmm": self._product,
            "baddbmm": self._product,
            "scaled_dot_product_attention": self._attention,
        }
        if op.kind not in rules:
            raise refusal(op, "has no rule for divided tensors")
        return rules[op.kind]

    def _enter(self, op: Op, operand: Any, back: int, sections: tuple[int, ...]) -> None:
        """Check and record another operand of an operation whose result is divided `back` dimensions from the end.

        It is divided in the same way, or comes from outside and is as large there as the result, or is broadcast.
        """
        shape = self.shape(operand)
        if operand in self.parts:
            if self.only(op, operand) != DividedTensor(len(shape) + back, sections):
                raise refusal(op, "combines tensors that are divided in different ways")
        elif len(shape) < -back or shape[back] == 1:
            self.entering[op.node, operand] = None
        elif shape[back] == sum(sections):
            self.entering[op.node, operand] = DividedTensor(len(shape) + back, sections)
        else:
            raise refusal(op, "broadcasts a divided dimension")

    def _pointwise(self, op: Op) -> tuple[DividedTensor, ...]:
        """Divide a pointwise operation.

        All operands are divided alike, counted from the last dimension, or enter from outside.
        """
        shape = op.values[0].shapes[self.probe]
        operands = [node for node in op.node.all_input_nodes if node in self.trace.values]
        divided = next((node for node in operands if node in self.parts), None)
        part = self.only(op, divided)
        back = part.dim - len(self.shape(divided))
        if shape[back] != sum(part.sections):
            raise refusal(op, "broadcasts a divided dimension")
        for operand in operands:
            self._enter(op, operand, back, part.sections)
        return (DividedTensor(len(shape) + back, part.sections),)

    def _reshape(self, op: Op) -> tuple[DividedTensor, ...]:
        source = op.node.args[0]
        part = reshaped(self.only(op, source), self.shape(source), op.values[0].shapes[self.probe])
        if part is None:
            raise refusal(op, "takes sections apart")
        return (part,)

    def _move(self, op: Op) -> tuple[DividedTensor, ...]:
        """Divide an operation that moves dimensions or takes parts of them.

        It is done to a tensor without data whose stride is 1 along the divided dimension and 0 along the others. The
        strides of the results then show where that dimension went, and their offsets which of its indices they have.
        """
        source = op.node.args[0]
        part, shape = self.only(op, source), self.shape(source)
        strides = [int(dim == part.dim) for dim in range(len(shape))]
        blank = torch.empty_strided(shape, strides, device="meta")
        args, kwargs = map_arg(
            (op.node.args, op.node.kwargs), lambda node: blank if node is source else self._number(op, node)
        )
        target: Any = op.node.target
        return tuple(self._found(op, part, moved) for moved in tensors_of(target(*args, **kwargs)))

    def _number(self, op: Op, node: fx.Node) -> int:
        pair = self.trace.scalars.get(node)
        if pair is None:
            raise refusal(op, "takes a size that depends on data")
        return int(pair[self.probe])

    def _found(self, op: Op, part: DividedTensor, moved: torch.Tensor) -> DividedTensor:
        dims = [dim for dim, size in enumerate(moved.shape) if size > 1 and moved.stride(dim)]
        if len(dims) != 1 or moved.stride(dims[0]) != 1:
            raise refusal(op, "removes the divided dimension")
        start = int(moved.storage_offset())
        stop = start + moved.shape[dims[0]]
        ends = list(accumulate(part.sections, initial=0))
        if start not in ends or stop not in ends:
            raise refusal(op, "takes sections apart")
        return DividedTensor(dims[0], part.sections[ends.index(start) : ends.index(stop)])

    def _item(self, op: Op) -> tuple[DividedTensor, ...]:
        source, index = op.node.args
        return (self.parts[source][index],)  # type: ignore[index]

    def _cat(self, op: Op) -> tuple[DividedTensor, ...]:
        """Divide a concatenation.

        Along another dimension all tensors are divided alike; along the divided one their sections follow each other.
        """
        tensors, dim = [*op.node.args, op.node.kwargs.get("dim", 0)][:2]
        parts = [self.only(op, node) for node in tensors]  # type: ignore[union-attr]
        along = int(dim) % len(op.values[0].shapes[0])  # type: ignore[arg-type]
        if len({part.dim for part in parts}) > 1 or (along != parts[0].dim and len(set(parts)) > 1):
            raise refusal(op, "joins tensors that are divided in different ways")
        joined = tuple(size for part in parts for size in part.sections)
        return (DividedTensor(along, joined) if along == parts[0].dim else parts[0],)

    def _softmax(self, op: Op) -> tuple[DividedTensor, ...]:
        source, dim = op.node.args[:2]
        part = self.only(op, source)
        if dim % len(op.values[0].shapes[0]) == part.dim:  # type: ignore[operator]
            raise refusal(op, "normalises along the divided dimension")
        return (part,)

    def _product(self, op: Op) -> tuple[DividedTensor, ...]:
        """Divide products of matrices, one for each index of the divided dimension."""
        *added, left, right = op.node.args
        part, rank = self.only(op, left), len(op.values[0].shapes[0])
        if self.only(op, right) != part or part.dim >= rank - 2 or len(self.shape(left)) != rank:
            raise refusal(op, "multiplies along the divided dimension")
        for operand in added:
            self._enter(op, operand, part.dim - rank, part.sections)
        return (part,)

    def _attention(self, op: Op) -> tuple[DividedTensor, ...]:
        """Divide attention by heads, which are computed apart; several query heads may share one key and value head."""
        query, key, value = (self.only(op, node) for node in op.node.args[:3])
        rank = len(op.values[0].shapes[0])
        single = query.dim == key.dim == rank - 3 and len(query.sections) == len(key.sections) == 1
        shared = single and bool(op.node.kwargs.get("enable_gqa"))
        if key != value or (query != key and not shared) or query.dim >= rank - 2:
            raise refusal(op, "takes query, key and value that are divided in different ways")
        for operand in op.node.all_input_nodes:
            if operand not in op.node.args[:3] and operand in self.trace.values:
                self._enter(op, operand, query.dim - rank, query.sections)
        return (query,)


def reshaped(part: DividedTensor, old: Sequence[int], new: Sequence[int]) -> DividedTensor | None:
    """Return how a tensor of shape `old` is divided when it is viewed as `new`, or None if no dimension shows it.

    In the flattened tensor equal sections of L indices, I elements each, repeat with the period P = L * I: element e
    has index (e mod P) / I. A dimension of `new` with stride s and size z shows that if s divides P and P divides s *
    z: as s * z / P sections of P / s. Sections of unequal size must stay within one dimension.
    """
    inner = math.prod(old[part.dim + 1 :])
    period = part.sections[0] * inner
    found = []
    for dim, size in enumerate(new):
        stride = math.prod(new[dim + 1 :])
        if len(set(part.sections)) > 1:
            if math.prod(new[:dim]) == math.prod(old[: part.dim]) and all(
                s * inner % stride == 0 for s in part.sections
            ):
                found.append(DividedTensor(dim, tuple(section * inner // stride for section in part.sections)))
        elif period % stride == 0 and stride * size % period == 0:
            found.append(DividedTensor(dim, (period // stride,) * (stride * size // period)))
    return max(found, key=lambda each: max(each.sections), default=None)
