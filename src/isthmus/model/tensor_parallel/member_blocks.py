"""Makes the blocks that one member of a tensor group computes, Megatron style (Shoeybi et al., 2019).

A pair of linear layers y = f(x A) B + b (`divide_pair` says what may lie between) becomes, in member i of n,

    y = leave(f(enter(x) A_i) B_i) + b,    A = [A_1 ... A_n],  B = [B_1; ...; B_n],

where *enter* is the identity forward and adds the members' gradients backward, *leave* adds the members' products
forward and is the identity backward. Everything outside of pairs is computed by every member alike: the result of a
pair is equal in all of them (leave gives all the same sum), and so is the gradient that goes back from one (enter does
this). Hence parameters outside of pairs have the same gradient in every member, the slices of A and B have their slice
of the whole gradient, and nothing more has to be reduced inside a group.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from isthmus.errors import ModelError, UsageError
from isthmus.model.runnable_blocks import Builder, Pieces
from isthmus.model.sections import Section, Sections
from isthmus.model.tensor_parallel.check_division import prove
from isthmus.model.tensor_parallel.crossing import Enter, Leave, Reduce, TakePart
from isthmus.model.tensor_parallel.divide_pair import PairSplit
from isthmus.model.tensor_parallel.division_rules import CUTS, DividedTensor
from isthmus.model.tensor_parallel.member_slices import ParameterSlice
from isthmus.model.trace import Op

__all__ = ["MemberBlocks", "ParameterSlice", "Reduce", "divide_blocks"]

_SIZES = {"view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "unflatten": 2}  # which argument has the sizes


@dataclass(frozen=True, eq=False)
class MemberBlocks:
    """One member's part of some blocks.

    The modules take and give the same tensors as those of `Pieces`. Their parameters have the model's names; those in
    `slices` are the member's part, the others are the model's own, whole. `random` names the nodes that draw random
    numbers for a divided tensor and says which part of it the member has (one section, so one range of `dim`): for
    dropout, the part of its result; for attention, the part of its weights (batch, heads, queries, keys). Nodes have
    the names that they have in the blocks of `Pieces`.
    """

    blocks: tuple[nn.Module, ...]
    slices: dict[str, ParameterSlice]
    random: dict[str, ParameterSlice]


def divide_blocks(pieces: Pieces, *, member: int, members: int, blocks: Iterable[int], reduce: Reduce) -> MemberBlocks:
    """Return the given blocks as member `member` (from 0) of `members` devices computes them.

    `reduce` adds a contiguous tensor over all members and gives each the same sum, bit for bit; it may work in place.
    All members call it for the same tensors in the same order. Call this function once for all blocks of a worker: the
    parts are new parameters each time, cut from the model's present ones.
    """
    if not 0 <= member < members:
        raise UsageError("no such member of a tensor group", found=f"member {member} of {members}")
    if pieces.sections is None:
        raise ModelError(
            "the model was cut at its child modules, which a tensor group cannot divide",
            where=pieces.graph.name,
            next="Use a plan whose replicas are single devices",
        )
    built: list[nn.Module] = []
    slices: dict[str, ParameterSlice] = {}
    random: dict[str, ParameterSlice] = {}
    proven: set[tuple[str, int]] = set()  # equal blocks that are divided alike are proven once
    for index in blocks:
        section = pieces.sections.sections[index]
        splits = _splits(pieces.sections, section)
        if not splits:
            built.append(pieces.blocks[index])
            continue
        for split in splits:
            _check_members(split, members)
        builder = _MemberBuilder(pieces.sections, section, splits, member, members, reduce)
        built.append(module := builder.module())
        if (alike := (pieces.graph.blocks[index].digest, len(splits))) not in proven:
            prove(module, builder.trace, section, builder.parts, builder.copies, members)
            proven.add(alike)
        slices |= builder.slices
        random |= builder.random
    return MemberBlocks(tuple(built), slices, random)


def _splits(cut: Sections, section: Section) -> list[PairSplit]:
    here = {op.node for op in section.ops}
    return [split for split in cut.splits if split.pair.row.op.node in here]


def _check_members(split: PairSplit, members: int) -> None:
    if split.limit % members:
        raise ModelError(
            f"{split.pair.row.weight} and the layers before it cannot be divided",
            where=split.pair.row.op.module or None,
            found=f"{members} members for {split.limit} equal parts",
            expected=f"a number of members that divides {split.limit}",
        )


class _MemberBuilder(Builder):
    """Copies a section's operations; those of pairs are copied for one member."""

    def __init__(
        self, cut: Sections, section: Section, splits: list[PairSplit], member: int, members: int, reduce: Reduce
    ) -> None:
        super().__init__(cut, section)
        self.flow = cut.flow
        self.member, self.members, self.reduce = member, members, reduce
        self.parts = {node: parts for split in splits for node, parts in split.parts.items()}
        self.split_of = {node: split for split in splits for node in split.nodes}
        self.entered: dict[tuple[PairSplit, fx.Node, DividedTensor | None], fx.Node] = {}
        self.slices: dict[str, ParameterSlice] = {}
        self.random: dict[str, ParameterSlice] = {}

    def operation(self, op: Op) -> fx.Node:
        """Return the node of an operation; if it belongs to a pair, it computes the member's part."""
        split = self.split_of.get(op.node)
        if split is None:
            return super().operation(op)
        if op is split.pair.row.op:
            return self._row(split, op)
        copy = self.graph.node_copy(op.node, lambda source: self._read(split, op, source))
        with self.graph.inserting_before(copy):
            copy.args = self._arguments(split, op, copy.args)
        if op.node in split.random:
            self.random[copy.name] = self._slice(split.parts[op.node][0])
        return copy

    def content(self, node: fx.Node) -> Any:
        """Return what a node reads by name, which is the member's part for a divided parameter."""
        content = super().content(node)
        if node not in self.parts:
            return content
        part = self._slice(self.parts[node][0])
        self.slices[self.trace.attributes[node].name] = part
        return nn.Parameter(part.cut(content.detach()))

    def _slice(self, part: DividedTensor) -> ParameterSlice:
        return ParameterSlice(dim=part.dim, sections=part.sections, member=self.member, members=self.members)

    def _read(self, split: PairSplit, op: Op, source: fx.Node) -> Any:
        """Return an operand: inside the pair as it is; from outside through `enter` if it has a gradient, then cut.

        There is one `enter` for each tensor that a pair reads, however many of its operations read it.
        """
        if (op.node, source) not in split.entering:
            return self.copy(source)
        if (split, source, None) not in self.entered:
            whole = self.copy(source)
            grad = self.flow.grad[source]
            self.entered[split, source, None] = self._module("enter", Enter(self.reduce), whole) if grad else whole
        part = split.entering[op.node, source]
        if part is not None and (split, source, part) not in self.entered:
            cut = self._module("cut", TakePart(self._slice(part)), self.entered[split, source, None])
            self.entered[split, source, part] = cut
        return self.entered[split, source, part]

    def _row(self, split: PairSplit, op: Op) -> fx.Node:
        """Return the row layer: the member's product without the bias, then the sum over all members, then the bias."""
        args, target, bias, aten = op.node.args, op.node.target, None, torch.ops.aten
        if op.kind == "addmm":
            target, bias, args = aten.mm.default, args[0], args[1:3]
        elif op.kind == "linear":
            bias, args = args[2] if len(args) > 2 else None, args[:2]
        args, kwargs = fx.map_arg((args, op.node.kwargs), lambda source: self._read(split, op, source))
        product = self.graph.create_node("call_function", target, args, kwargs)
        total = self._module("leave", Leave(self.reduce), product)
        if not isinstance(bias, fx.Node):
            return total
        return self.graph.call_function(aten.add.Tensor, (total, self.copy(bias)))

    def _module(self, name: str, module: nn.Module, argument: fx.Node) -> fx.Node:
        path = f"tensor_group.{name}_{len(self.contents)}"
        self.contents[path] = module
        return self.graph.call_module(path, (argument,))

    def _arguments(self, split: PairSplit, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, with the sizes along the divided dimension divided."""
        if op.kind in CUTS - {"chunk"}:
            return self._cut_arguments(split, op, args)
        if op.kind not in _SIZES:
            return args
        place, dim = _SIZES[op.kind], split.parts[op.node][0].dim
        if op.kind == "unflatten":
            dim -= args[1] % len(self.trace.value(op.node.all_input_nodes[0]).shapes[0])
        sizes = [self._divided(size) if each == dim else size for each, size in enumerate(args[place])]
        return (*args[:place], sizes, *args[place + 1 :])

    def _cut_arguments(self, split: PairSplit, op: Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the divided arguments of an operation that takes a dimension apart.

        If that is the divided dimension, it is taken apart at the ends of sections.
        """
        source = op.node.all_input_nodes[0]
        part, size = split.parts[source][0], sum(split.parts[source][0].sections)
        dim = args[1] if op.kind == "slice" else args[2] if len(args) > 2 else 0
        if dim % len(self.trace.value(source).shapes[0]) != part.dim:
            return args
        if op.kind == "slice":  # a slice without an end has a huge one
            return (*args[:2], *(end if end is None else self._divided(min(end, size)) for end in args[2:4]), *args[4:])
        sizes = args[1]
        divided = [self._divided(each) for each in sizes] if isinstance(sizes, (list, tuple)) else self._divided(sizes)
        return (args[0], divided, *args[2:])

    def _divided(self, size: Any) -> Any:
        if isinstance(size, fx.Node):
            return self.graph.call_function(operator.floordiv, (size, self.members))
        return size if size == -1 else size // self.members
