"""Finds pairs of linear layers that tensor parallelism can split, Megatron style (Shoeybi et al., 2019).

A pair is a *row* layer y = f(A x) B whose input comes only from *column* layers A, through operations that act on each
element or on each head alone, and whose inner values nothing else reads. With A split by columns and B by rows over n
devices, each device computes its part of f(A x) B alone, and one all-reduce adds the parts. `divide_pair` proves
whether everything in between works on parts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx

from isthmus.model.flow import TraceFlow
from isthmus.model.trace import Op, Trace

__all__ = ["LinearUse", "Pair", "find_pairs", "linear_uses"]

_POINTWISE = {
    "gelu", "silu", "relu", "relu_", "sigmoid", "tanh", "mul", "add", "sub", "neg", "dropout", "dropout_", "div", "cat",
    "to", "clone", "contiguous", "reshape", "flatten", "leaky_relu", "elu", "softplus", "hardswish", "pow", "mish",
    "clamp", "relu6", "silu_", "gelu_", "_to_copy", "square", "mul_", "div_", "add_",
}  # fmt: skip
_PER_HEAD = {"scaled_dot_product_attention", "matmul", "bmm", "softmax", "masked_fill", "where", "baddbmm", "einsum"}
_EXPERTS = {"_grouped_mm", "grouped_mm", "grouped_mm_fallback"}  # one matrix per expert, stacked in one weight
_LONGEST = 200  # operations between two linear layers; a layer has a few dozen


@dataclass(frozen=True)
class LinearUse:
    """A matrix product of an activation and a trained weight (or of its rows with one of several stacked weights)."""

    op: Op
    source: fx.Node
    weight: str
    bias: str | None
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Pair:
    """The column layers, what lies between, and the row layer."""

    columns: tuple[LinearUse, ...]
    inner: tuple[fx.Node, ...]
    row: LinearUse

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """Return all nodes that must stay together."""
        return (*(use.op.node for use in self.columns), *self.inner, self.row.op.node)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the divided parameters: weights and biases of the columns, and the weight of the row.

        The row's bias is not divided: it is added once, after the sum.
        """
        columns = [name for use in self.columns for name in (use.weight, use.bias) if name is not None]
        return (*columns, self.row.weight)


def linear_uses(trace: Trace, flow: TraceFlow) -> dict[fx.Node, LinearUse]:
    """Return every product of an activation with one trained matrix, by node."""
    uses = {op.node: _linear_use(trace, flow, op) for op in trace.ops}
    return {node: use for node, use in uses.items() if use is not None}


def _linear_use(trace: Trace, flow: TraceFlow, op: Op) -> LinearUse | None:
    args = op.node.args
    if op.kind == "linear":
        source, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
    elif op.kind == "addmm":
        bias, source, weight = args[:3]
    elif op.kind in ("mm", "matmul") or op.kind in _EXPERTS:
        source, weight, bias = args[0], args[1], None
    else:
        return None
    name = _parameter(trace, flow, weight)
    if name is None or not isinstance(source, fx.Node) or source in trace.attributes:
        return None
    shape = trace.value(weight).shapes[0]  # type: ignore[arg-type]
    if len(shape) != (3 if op.kind in _EXPERTS else 2):
        return None
    outputs, inputs = shape if op.kind == "linear" else (shape[-1], shape[-2])
    return LinearUse(op, source, name, _parameter(trace, flow, bias), inputs, outputs)


def _parameter(trace: Trace, flow: TraceFlow, node: object) -> str | None:
    """Return the name of the parameter that a node is, or is a view of."""
    root = flow.root.get(node) if isinstance(node, fx.Node) else None
    attribute = trace.attributes.get(root) if root is not None else None
    return attribute.name if attribute is not None and attribute.kind == "parameter" else None


def find_pairs(trace: Trace, flow: TraceFlow, uses: dict[fx.Node, LinearUse]) -> list[Pair]:
    """Return all pairs, with each layer in at most one.

    They are found in execution order, so that of three layers in a row the first two pair.
    """
    used = [name for op in trace.ops for name in op.parameters]
    once = {name for name, count in Counter(used).items() if count == 1}
    readers = _readers(trace)
    taken: set[fx.Node] = set()
    pairs = []
    for node, use in uses.items():
        found = _inner(trace, flow, use, uses) if node not in taken and use.weight in once else None
        if found is None:
            continue
        inner, columns = found
        nodes = {*inner, *columns, node}
        alone = all(reader in nodes for n in nodes - {node} for reader in readers.get(n, ()))
        splits = columns and columns.isdisjoint(taken) and all(uses[c].weight in once for c in columns)
        if alone and splits:
            pairs.append(_pair(trace, use, [uses[c] for c in uses if c in columns], inner))
            taken |= nodes
    return pairs


def _readers(trace: Trace) -> dict[fx.Node, list[fx.Node]]:
    """Return the readers of each node; the model's output counts as a reader."""
    readers: dict[fx.Node, list[fx.Node]] = {}
    for op in trace.ops:
        for source in op.reads:
            readers.setdefault(source, []).append(op.node)
    for leaf in trace.outputs:
        if isinstance(leaf, fx.Node):
            readers.setdefault(leaf, []).append(leaf.graph.output_node())
    return readers


def _inner(
    trace: Trace, flow: TraceFlow, row: LinearUse, uses: dict[fx.Node, LinearUse]
) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """Return the nodes between a row layer and its column layers, and the column layers.

    Return None if something that cannot be split stands between.
    """
    inner: set[fx.Node] = set()
    columns: set[fx.Node] = set()
    waiting = [row.source]
    while waiting:
        node = waiting.pop()
        op = trace.op.get(node)
        if op is None or len(inner) > _LONGEST:
            return None
        if node in uses:
            columns.add(node)
        elif node not in inner:
            if (node not in flow.views and op.kind not in _POINTWISE | _PER_HEAD) or op.parameters:
                return None
            inner.add(node)
            waiting += _followed(trace, flow, op)
    return inner, columns


def _followed(trace: Trace, flow: TraceFlow, op: Op) -> list[fx.Node]:
    """Return the inputs that must come from column layers: all but masks and constants."""
    nodes = op.node.args[:3] if op.kind == "scaled_dot_product_attention" else op.node.all_input_nodes
    tensors = [node for node in nodes if isinstance(node, fx.Node) and node in trace.values]
    return [node for node in tensors if trace.value(node).floating and not _is_table(trace, flow, node)]


def _is_table(trace: Trace, flow: TraceFlow, node: fx.Node) -> bool:
    """Return whether a node is a constant, a buffer or a view of one (rotary tables), equal on every device."""
    root = flow.root[node]
    return node in flow.constant or (root in trace.attributes and trace.attributes[root].kind != "parameter")


def _pair(trace: Trace, row: LinearUse, columns: list[LinearUse], inner: set[fx.Node]) -> Pair:
    return Pair(tuple(columns), tuple(sorted(inner, key=lambda node: trace.op[node].index)), row)
