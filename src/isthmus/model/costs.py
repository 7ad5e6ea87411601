"""The cost of each operation: forward and backward FLOPs, elements kept for backward, and elements moved.

FLOPs count a multiplication and an addition as two, and only in products (as `torch.utils.flop_counter` does): a
product of (m, k) and (k, n) costs 2mkn forward and as much again, backward, for each of its two operands that needs a
gradient. Attention is counted in full, causal or not: 2·heads·q·k·(width of keys + width of values) forward, twice that
backward.

Kept elements follow autograd's rules, with fused kernels assumed: attention keeps q, k, v, its result and one number
per query (never the matrix of scores); dropout keeps a mask of one byte per element. Integers and masks count in
elements of four bytes. Parameters are never counted; views keep and move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from isthmus.model.flow import TraceFlow
from isthmus.model.torch_export import LinearSize
from isthmus.model.trace import Op, Trace, Value, kind_of

__all__ = ["SavedTensor", "backward_flops", "forward_flops", "kept_by", "moved_by", "weights_moved_by"]

Shape = tuple[int, ...]


def _matmul(args: list[Any], out: Shape) -> float:
    left, right = args[0], args[1]
    batch = math.prod(out) if len(left) > 1 and len(right) > 1 else max(math.prod(out), 1)
    return float(2 * batch * left[-1])


def _linear(args: list[Any], out: Shape) -> float:
    return float(2 * math.prod(out) * args[1][-1])


def _conv(args: list[Any], out: Shape) -> float:
    return float(2 * math.prod(out) * math.prod(args[1]) / args[1][0])


def _conv_transposed(args: list[Any], out: Shape) -> float:
    return float(2.0 * math.prod(args[0]) * math.prod(args[1]) / args[1][0])


def _convolution(args: list[Any], out: Shape) -> float:
    return _conv_transposed(args, out) if args[6] else _conv(args, out)


def _attention(args: list[Any], out: Shape) -> float:
    query, key, value = args[:3]
    return float(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _einsum(args: list[Any], out: Shape) -> float:
    """Return the FLOPs of two operands: one product and sum for each combination of all indices.

    With more operands the same count is used, because the order of their contraction is not known.
    """
    sides = args[0].replace(" ", "").split("->")[0].split(",")
    sizes: dict[object, int] = {}  # by letter, or by place from the end of what `...` stands for
    for side, shape in zip(sides, args[1], strict=True):
        before, dots, after = side.partition("...")
        hidden = len(shape) - len(before) - len(after) if dots else 0
        names = [*before, *range(-hidden, 0), *after]
        for name, size in zip(names, shape, strict=True):
            sizes[name] = max(sizes.get(name, 1), size)  # a dimension of size 1 is broadcast
    return 2.0 * math.prod(sizes.values()) if len(sides) > 1 else 0.0


def _recurrent(args: list[Any], out: Shape) -> float:
    """Return the FLOPs of a recurrent layer, which uses every weight matrix of every layer once per position."""
    lists = [arg for arg in args[1:] if isinstance(arg, (list, tuple)) and all(isinstance(w, tuple) for w in arg)]
    weights = next(found for arg in lists if (found := [shape for shape in arg if len(shape) == 2]))
    return float(2 * math.prod(args[0][:-1]) * sum(map(math.prod, weights)))


def _grouped(args: list[Any], out: Shape) -> float:
    return float(2 * math.prod(out) * args[0][-1])


_FLOPS: dict[str, Callable[[list[Any], Shape], float]] = {
    "linear": _linear, "mm": _matmul, "bmm": _matmul, "matmul": _matmul, "mv": _matmul, "dot": _matmul,
    "addmm": lambda args, out: _matmul(args[1:], out), "baddbmm": lambda args, out: _matmul(args[1:], out),
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "convolution": _convolution, "_convolution": _convolution,
    "conv_transpose1d": _conv_transposed, "conv_transpose2d": _conv_transposed, "conv_transpose3d": _conv_transposed,
    "scaled_dot_product_attention": _attention, "einsum": _einsum, "_grouped_mm": _grouped, "grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped, "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent,
    "rnn_relu": _recurrent,
}  # fmt: skip


def forward_flops(trace: Trace, op: Op) -> float:
    """Return the FLOPs per sample of one operation; for a nested graph, the sum over its operations."""
    nested = [trace.attributes[node].content for node in op.node.all_input_nodes if _is_nested(trace, node)]
    nodes = [node for content in nested for node in content.graph.nodes] if nested else [op.node]
    return sum(_node_flops(trace, node) for node in nodes if node.op == "call_function")


def _is_nested(trace: Trace, node: fx.Node) -> bool:
    return node in trace.attributes and isinstance(trace.attributes[node].content, fx.GraphModule)


def _node_flops(trace: Trace, node: fx.Node) -> float:
    formula = _FLOPS.get(kind_of(node.target))
    if formula is None:
        return 0.0
    low, high = (formula(_shaped(trace, node.args, probe), trace.value(node).shapes[probe]) for probe in (0, 1))
    return LinearSize.through(trace.probes, low, high).slope


def _shaped(trace: Trace, args: Any, probe: int) -> list[Any]:
    """Return the arguments with every tensor replaced by its shape at a probe."""

    def shape(node: fx.Node) -> Any:
        return trace.value(node).shapes[probe] if node in trace.values else ()

    return list(fx.map_arg(args, shape))


def backward_flops(trace: Trace, flow: TraceFlow, op: Op) -> float:
    """Return the backward FLOPs per sample of one operation.

    They are as many as forward for each of the two operands that needs a gradient, and twice forward for attention and
    nested graphs.
    """
    if not flow.grad[op.node]:
        return 0.0
    if any(_is_nested(trace, node) for node in op.node.all_input_nodes):
        return 2.0 * forward_flops(trace, op)
    if op.kind not in _FLOPS:
        return 0.0
    if op.kind == "scaled_dot_product_attention":
        return 2.0 * forward_flops(trace, op)
    return forward_flops(trace, op) * sum(flow.grad.get(node, False) for node in _operands(op))


def _operands(op: Op) -> list[fx.Node]:
    """Return the two tensors of a product; for a recurrent layer, one of its weights stands for all of them."""
    if op.kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        weights = [node for arg in op.node.args[1:] if isinstance(arg, (list, tuple)) for node in arg]
        return [node for node in (op.node.args[0], weights[-1]) if isinstance(node, fx.Node)]
    args = op.node.args[1] if op.kind == "einsum" else op.node.args
    positions = _OPERANDS.get(op.kind, (0, 1))
    return [args[i] for i in positions if isinstance(args, (list, tuple)) and isinstance(args[i], fx.Node)]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for backward: `elements` per sample, of the memory that `root` stands for."""

    root: fx.Node | str
    node: fx.Node
    elements: float


_OPERANDS = {"addmm": (1, 2), "baddbmm": (1, 2)}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_PRODUCTS = set(_FLOPS) - _RECURRENT - {"scaled_dot_product_attention"} | {"mul"}
_RESULT = {"relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "softmax", "_softmax", "log_softmax", "_log_softmax"}
_RESULT |= {"reciprocal", "hardsigmoid", "relu6", "hardtanh", "logsumexp", "elu", "selu", "celu"}
_NOTHING = {
    "add", "sub", "rsub", "neg", "cat", "stack", "sum", "mean", "clone", "pad", "constant_pad_nd", "roll", "flip",
    "cumsum", "repeat", "to", "_to_copy", "reshape", "flatten", "contiguous", "copy", "zeros_like", "ones_like",
    "type_as", "upsample_nearest2d", "upsample_bilinear2d", "repeat_interleave", "fill", "zero", "tril", "triu",
    "ravel", "round", "floor", "dropout", "cross_entropy_loss",
}  # fmt: skip
_INDEXED = {"embedding", "gather", "index_select", "index", "index_put", "index_add", "scatter", "scatter_add"}
_PICKED = {"topk", "sort", "max", "min", "median", "kthvalue"}
_MASKED = {"where", "masked_fill", "masked_scatter"}
_RECURRENT_KEPT = {"lstm": 6.0, "gru": 5.0, "rnn_tanh": 1.0, "rnn_relu": 1.0}  # results, gates, cells per result


def kept_by(trace: Trace, flow: TraceFlow, op: Op) -> Iterator[SavedTensor]:
    """Yield what autograd keeps of one operation: tensors of the trace, then the operation's own memory."""
    if op.node in flow.views or not flow.grad[op.node]:
        return
    kind = op.kind.rstrip("_") if op.mutates is not None else op.kind
    for node in _kept_tensors(trace, flow, op, kind):
        if flow.root[node] not in trace.attributes:
            yield SavedTensor(flow.root[node], node, _counted(trace.values[node]))
    own = _own_memory(trace, op, kind)
    if own:
        yield SavedTensor(f"{op.node.name} keeps", op.node, own)


def _kept_tensors(trace: Trace, flow: TraceFlow, op: Op, kind: str) -> list[fx.Node]:
    tensors = [node for node in op.node.all_input_nodes if node in trace.values]
    if kind in _PRODUCTS:
        return _kept_operands(flow, op)
    if kind == "div":
        right = [node for node in op.node.args[1:2] if isinstance(node, fx.Node) and node in trace.values]
        return tensors if any(flow.grad[node] for node in right) else right
    if kind in _RESULT:
        return [op.node]
    if kind in _NOTHING or (kind == "adaptive_avg_pool2d" and math.prod(op.values[0].shapes[0][-2:]) == 1):
        return []
    if kind in _INDEXED | _MASKED:
        return [node for node in tensors if not trace.value(node).floating]
    if kind in _PICKED:
        return []
    if kind == "scaled_dot_product_attention":
        return [*(node for node in op.node.args[:3] if isinstance(node, fx.Node)), op.node]
    return [node for node in tensors if trace.value(node).floating or kind == "nll_loss"]


def _kept_operands(flow: TraceFlow, op: Op) -> list[fx.Node]:
    """Return the operands of a product that are kept: each one whose other operand needs a gradient."""
    operands = [node for node in _operands(op) if node in flow.grad]  # the others are numbers
    if len(operands) < 2:
        return []
    left, right = operands[:2]
    return [node for node, other in ((left, right), (right, left)) if flow.grad[other]]


def _own_memory(trace: Trace, op: Op, kind: str) -> float:
    """Return the elements of masks, indices and statistics that only the operation's backward reads."""
    result = op.values[0].size.slope
    if kind in ("dropout", "feature_dropout", "alpha_dropout"):
        return result / 4
    if kind in _PICKED or kind.startswith("max_pool"):
        return 2 * result if len(op.values) > 1 or kind.startswith("max_pool") else 0.0
    if kind == "scaled_dot_product_attention":
        return result / op.values[0].shapes[0][-1]
    if kind == "layer_norm":
        return 2 * result / _normed(trace, op)
    if kind == "cross_entropy_loss":
        return sum(_counted(trace.values[node]) for node in op.node.args[:2] if isinstance(node, fx.Node))
    return result * _RECURRENT_KEPT.get(kind, 0.0)


def _normed(trace: Trace, op: Op) -> float:
    """Return the number of elements over which a layer norm takes its statistics."""
    sizes: Any = op.node.args[1]
    return float(math.prod(size if isinstance(size, int) else (trace.scalars[size] or (1,))[0] for size in sizes))


def _counted(values: tuple[Value, ...]) -> float:
    """Return the elements per sample, each counted by its width."""
    return sum(value.size.slope * value.weight for value in values)


def moved_by(trace: Trace, flow: TraceFlow, op: Op) -> float:
    """Return the elements per sample that are read and written; an embedding reads only the rows it returns."""
    if op.node in flow.views:
        return 0.0
    reads = sum(_counted(trace.values[node]) for node in op.node.all_input_nodes if _travels(trace, node))
    return reads + _counted(op.values) * (2 if op.kind == "embedding" else 1)


def _travels(trace: Trace, node: fx.Node) -> bool:
    return node in trace.values and node not in trace.attributes


def weights_moved_by(trace: Trace, flow: TraceFlow, op: Op) -> float:
    """Return the parameter elements that are read, however many samples there are."""
    if op.node in flow.views or op.kind == "embedding":
        return 0.0
    read = {flow.root[node] for node in op.node.all_input_nodes if node in trace.values}
    parameters = [node for node in read if node in trace.attributes and trace.attributes[node].kind == "parameter"]
    return sum(trace.value(node).size.fixed for node in parameters)
