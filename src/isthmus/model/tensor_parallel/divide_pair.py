"""Works out how a tensor group's members divide a pair of linear layers and all between them, or why they cannot.

Everything is worked out at both probes of the trace and must agree, so that nothing holds only by chance for one batch
size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import fx

from isthmus.errors import ModelError
from isthmus.model.flow import TraceFlow
from isthmus.model.tensor_parallel.division_rules import CUTS, RESHAPES, VIEWS, DividedTensor, Rules, refusal
from isthmus.model.tensor_parallel.linear_pairs import LinearUse, Pair
from isthmus.model.trace import Op, Trace

__all__ = ["PairSplit", "split_pair", "split_pairs"]


@dataclass(frozen=True, eq=False)
class PairSplit:
    """How a pair is divided, in sizes at the lower probe.

    `parts` has every divided tensor, parameters and their views included (several for an operation with several
    results). `entering` has what the pair reads from outside, by reader and tensor; a DividedTensor if a member reads
    only its part. `random` has the operations that draw random numbers for a divided tensor, always of one section. The
    number of members must divide `limit`.
    """

    pair: Pair
    parts: dict[fx.Node, tuple[DividedTensor, ...]]
    entering: dict[tuple[fx.Node, fx.Node], DividedTensor | None]
    random: frozenset[fx.Node]
    limit: int

    @property
    def nodes(self) -> list[fx.Node]:
        """Return all nodes that must stay together: the pair, its weights and their views."""
        return [*self.parts, self.pair.row.op.node]


def split_pairs(trace: Trace, flow: TraceFlow, pairs: Sequence[Pair]) -> list[PairSplit]:
    """Return the splits of the pairs that two members or more can divide."""
    splits = []
    for pair in pairs:
        try:
            splits.append(split_pair(trace, flow, pair))
        except ModelError:
            continue  # not proven: the pair is computed whole
    return [split for split in splits if split.limit > 1]


def split_pair(trace: Trace, flow: TraceFlow, pair: Pair) -> PairSplit:
    """Return how the pair is divided, or raise a ModelError that names the operation that cannot be.

    A column layer is one section, unless what reads it takes its result apart: then those pieces are the sections.
    """
    errors = []
    for chosen in product(*(_candidates(trace, pair, use) for use in pair.columns)):
        try:
            return _agreed(flow, pair, *(_Walk(trace, probe).run(pair, chosen) for probe in (0, 1)))
        except ModelError as error:
            errors.append(error)
    raise errors[0]


def _agreed(flow: TraceFlow, pair: Pair, low: Rules, high: Rules) -> PairSplit:
    """Return the split that holds at both probes.

    The number of sections may differ if a batch of equal ones was merged.
    """
    for node, parts in low.parts.items():
        for part, other in zip(parts, high.parts[node], strict=True):
            alike = part.sections == other.sections or len({*part.sections, *other.sections}) == 1
            if part.dim != other.dim or not alike:
                raise refusal(low.trace.op.get(node, pair.row.op), "is divided in another way at another batch size")
    if low.entering != high.entering:
        raise refusal(pair.row.op, "reads tensors in another way at another batch size")
    random = frozenset(node for node in pair.inner if _draws(flow, low.trace.op[node]))
    for node in random:
        if len(low.parts[node][0].sections) > 1:  # so that a member's random numbers are one range along one dimension
            raise refusal(low.trace.op[node], "drops elements of a tensor in several sections")
    limit = math.gcd(*(size for parts in low.parts.values() for part in parts for size in part.sections))
    return PairSplit(pair, low.parts, low.entering, random, limit)


def _draws(flow: TraceFlow, op: Op) -> bool:
    """Return whether an operation draws random numbers; dropout that drops nothing counts as a view."""
    seeded = torch.Tag.nondeterministic_seeded in getattr(op.node.target, "tags", ())
    if op.kind != "scaled_dot_product_attention":
        return seeded and op.node not in flow.views
    rate = [*op.node.args[4:5], op.node.kwargs.get("dropout_p", 0.0)][0]
    return seeded and bool(rate != 0)


def _candidates(trace: Trace, pair: Pair, use: LinearUse) -> list[tuple[int, ...]]:
    """Return the sections that a column layer's result may have.

    They are one section, or the pieces into which some reader takes the result apart.
    """
    inner, seen = set(pair.inner), set()
    found: list[tuple[int, ...]] = [(use.outputs,)]
    waiting = [use.op.node]
    while waiting:
        node = waiting.pop()
        for op in (trace.op[user] for user in node.users if user in inner and user not in seen):
            seen.add(op.node)
            if op.kind in CUTS | RESHAPES:
                found.append(_pieces(trace, node, op, use.outputs))
            if len(op.values) == 1 and use.outputs in op.values[0].shapes[0]:
                waiting.append(op.node)
    return list(dict.fromkeys(sizes for sizes in found if sum(sizes) == use.outputs))


def _pieces(trace: Trace, node: fx.Node, op: Op, outputs: int) -> tuple[int, ...]:
    """Return the pieces into which an operation takes a dimension of `outputs` elements, or () if it does not."""
    old, new = trace.value(node).shapes[0], op.values[0].shapes[0]
    if op.kind in RESHAPES:  # (..., 3 * width) viewed as (..., 3, heads, width of a head)
        count = next((size for before, size in zip(old, new, strict=False) if before != size), 0)
        return (outputs // count,) * count if count and outputs % count == 0 else ()
    dim = next((d for d, (before, size) in enumerate(zip(old, new, strict=True)) if before != size), None)
    if dim is None or old[dim] != outputs:
        return ()
    if op.kind != "slice":
        return tuple(value.shapes[0][dim] for value in op.values)
    slices = [
        user.args[2:4] for user in node.users if user.target is op.node.target and user.args[1] == op.node.args[1]
    ]
    ends = {end for ends in slices for end in ends if isinstance(end, int) and 0 <= end <= outputs} | {0, outputs}
    return tuple(stop - start for start, stop in pairwise(sorted(ends)))


class _Walk(Rules):
    """Goes through a pair in execution order."""

    def run(self, pair: Pair, chosen: Sequence[tuple[int, ...]]) -> Rules:
        """Divide everything, with the given sections of the column layers."""
        for use, sections in zip(pair.columns, chosen, strict=True):
            self._column(use, sections)
        for node in pair.inner:
            self.divide(self.trace.op[node])
        self._row(pair.row)
        return self

    def _column(self, use: LinearUse, sections: tuple[int, ...]) -> None:
        """Divide a column layer.

        In y = x W + b, W and b are divided by outputs: x is whole, and y is divided along its last dimension.
        """
        bias, weight = self._operands(use)
        self._divide_parameter(use.op, weight, 0 if use.op.kind == "linear" else -1, sections)
        if bias is not None:
            self._divide_parameter(use.op, bias, -1, sections)
        self._enter_whole(use.op, weight, bias)
        self.parts[use.op.node] = (DividedTensor(len(self.shape(use.op.node)) - 1, sections),)

    def _row(self, use: LinearUse) -> None:
        """Divide a row layer.

        In y = x W + b, x is divided along its last dimension and W by inputs: y is the sum of the members' products.
        """
        bias, weight = self._operands(use)
        part = self.only(use.op, use.source)
        if part.dim != len(self.shape(use.source)) - 1:
            raise refusal(use.op, "multiplies along another dimension than the divided one")
        self._divide_parameter(use.op, weight, 1 if use.op.kind == "linear" else -2, part.sections)
        self._enter_whole(use.op, use.source, weight, bias)

    def _enter_whole(self, op: Op, *known: fx.Node | None) -> None:
        others = [node for node in op.node.all_input_nodes if node in self.trace.values and node not in known]
        self.entering |= {(op.node, node): None for node in others}

    def _operands(self, use: LinearUse) -> tuple[fx.Node | None, fx.Node]:
        """Return the bias and the weight of a product."""
        args = use.op.node.args
        places = {"addmm": (0, 2), "linear": (2, 1)}.get(use.op.kind, (len(args), 1))
        bias, weight = (args[place] if place < len(args) else None for place in places)
        assert isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node))
        others = [node for node in use.op.node.all_input_nodes if node not in (use.source, bias, weight)]
        factors = [value for value in use.op.node.kwargs.values() if not isinstance(value, fx.Node | None)]
        if factors or any(node in self.trace.values and self.trace.value(node).floating for node in others):
            raise refusal(use.op, "does more than a product and a bias")
        return bias, weight

    def _divide_parameter(self, op: Op, operand: fx.Node, dim: int, sections: tuple[int, ...]) -> None:
        """Divide the parameter behind an operand so that the operand is divided along `dim`."""
        chain = self._views(op, operand)
        name = self.trace.attributes[chain[0]].name
        for node, reader in pairwise([*chain, op.node]):
            if any(user is not reader and (user in self.trace.op or user.op == "output") for user in node.users):
                raise refusal(op, f"shares {name} with other operations")
        wanted = DividedTensor(dim % len(self.shape(operand)), sections)
        for own, size in enumerate(self.shape(chain[0])):
            found = self._along(chain, DividedTensor(own, sections)) if size == sum(sections) else None
            if found is not None and found[operand] == (wanted,):
                self.parts |= found
                return
        raise refusal(op, f"takes {name} in a form that cannot be divided")

    def _views(self, op: Op, operand: fx.Node) -> list[fx.Node]:
        """Return a parameter and the views of it that lead to an operand."""
        chain = [operand]
        while chain[0] not in self.trace.attributes:
            view = self.trace.op.get(chain[0])
            if view is None or view.kind not in VIEWS:
                raise refusal(op, "multiplies by, or adds, something else than a parameter")
            chain.insert(0, view.node.all_input_nodes[0])
        return chain

    def _along(self, chain: list[fx.Node], part: DividedTensor) -> dict[fx.Node, tuple[DividedTensor, ...]] | None:
        """Return the parts of a parameter's views if the parameter is divided so, or None if that is impossible."""
        rules = Rules(self.trace, self.probe, {chain[0]: (part,)})
        try:
            for node in chain[1:]:
                rules.divide(self.trace.op[node])
        except ModelError:
            return None
        return rules.parts
