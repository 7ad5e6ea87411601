"""Finds which tensors of a trace share memory, need gradients or are constant, and how a split batch's results combine.

- *root* of a tensor: the tensor whose memory it shares (views and in-place results share their input's).
- *constant*: computed from no input and no parameter, without randomness (position ids, causal masks, rotary tables);
  every block that uses one computes it again, so constants are never sent.
- *split* of a tensor: `concat` if a dimension grows with the batch; `sum` if a sum over the batch removed it;
  `whole` if it never depended on the batch, or was mixed over it in another way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from isthmus.model.graph import NORMS, Split
from isthmus.model.samples.proof import State, prove
from isthmus.model.samples.rules import SAMPLE_RULES
from isthmus.model.trace import Op, Trace, Value, memory_root

__all__ = ["TraceFlow", "alias", "flow_of", "is_view"]

_VIEWS = {
    "view", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split",
    "split_with_sizes", "chunk", "unbind", "getitem", "t", "numpy_T", "mT", "unflatten", "detach", "detach_", "alias",
    "narrow", "diagonal", "movedim", "swapaxes", "swapdims", "view_as", "expand_as", "as_strided", "unfold",
    "tensor_split", "view_as_real", "view_as_complex", "lift_fresh_copy", "squeeze_", "unsqueeze_", "transpose_",
    "broadcast_to", "unsafe_split", "unsafe_chunk", "adjoint", "mH", "real", "positive", "lift_fresh",
}  # fmt: skip
_MAYBE_COPY = {"reshape", "flatten", "contiguous", "ravel", "reshape_as"}
_CASTS = {"to", "_to_copy", "type_as", "float", "double", "half", "bfloat16"}
_DROPOUTS = {"dropout", "dropout_", "feature_dropout", "alpha_dropout", "native_dropout"}
_NO_GRAD = {"detach", "detach_"}
_FORMS = {"new_ones", "new_zeros", "new_full", "new_empty"}  # these take only dtype and device from their input
_LINEAR = {"add", "sub", "neg", "mul", "div", "sum", "to", "_to_copy", "stack", "cat"} | _VIEWS | _MAYBE_COPY


@dataclass(frozen=True, eq=False)
class TraceFlow:
    """Facts about each node of a trace, by node."""

    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    views: set[fx.Node] = field(default_factory=set)  # operations that copy nothing
    grad: dict[fx.Node, bool] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)
    split: dict[fx.Node, Split] = field(default_factory=dict)
    samples: dict[fx.Node, tuple[State, ...]] = field(default_factory=dict)  # how each node depends on samples
    mixing: dict[fx.Node, str] = field(default_factory=dict)  # operations that mix samples or may do so


def flow_of(trace: Trace) -> TraceFlow:
    """Return all facts, found in passes over the operations in execution order."""
    flow = TraceFlow()
    for node in (*trace.inputs, *trace.attributes):
        flow.root[node] = node
        flow.grad[node] = node in trace.attributes and trace.attributes[node].kind == "parameter"
        flow.split[node] = "whole" if node in trace.attributes else "concat"
    for op in trace.ops:
        alias(trace, flow, op)
        flow.grad[op.node] = _needs_grad(trace, flow, op)
        _join(trace, flow, op)
    _find_mixing(trace, flow)
    _find_constants(trace, flow)
    return flow


def alias(trace: Trace, flow: TraceFlow, op: Op) -> None:
    """Record whose memory an operation's result shares."""
    source = op.mutates or (op.node.args[0] if op.node.args else None)
    shares = op.mutates is not None or is_view(trace, flow, op)
    if shares and op.mutates is None:
        flow.views.add(op.node)
    flow.root[op.node] = flow.root[source] if shares and isinstance(source, fx.Node) else op.node


def is_view(trace: Trace, flow: TraceFlow, op: Op) -> bool:
    """Return whether an operation only views its first input's memory in another way."""
    source = op.node.args[0] if op.node.args else None
    if not isinstance(source, fx.Node) or source not in trace.values:
        return False
    if op.kind in _CASTS:
        return op.values[0].dtype == trace.value(source).dtype
    if op.kind in _DROPOUTS:
        return len(op.node.args) > 2 and bool(op.node.args[1] == 0 or op.node.args[2] is False)
    if op.kind in _MAYBE_COPY:
        return _after_attention(trace, flow, source) or _viewable(trace.value(source), op.values[0], op.kind)
    return op.kind in _VIEWS


def _after_attention(trace: Trace, flow: TraceFlow, source: fx.Node) -> bool:
    """Return whether a tensor is the result of attention, whose heads can be joined again without a copy.

    Flash attention writes its result as (batch, position, head, width).
    """
    op = trace.op.get(flow.root[source])
    return op is not None and op.kind == "scaled_dot_product_attention"


def _viewable(source: Value, result: Value, kind: str) -> bool:
    shadow = torch.empty_strided(source.shapes[0], source.stride, device="meta")
    if kind == "contiguous":
        return shadow.is_contiguous()
    try:
        shadow.view(result.shapes[0])
    except RuntimeError:
        return False
    return True


def _needs_grad(trace: Trace, flow: TraceFlow, op: Op) -> bool:
    if op.kind in _NO_GRAD or not any(value.floating for value in op.values):
        return False
    if op.kind == "wrap_with_set_grad_enabled" and op.node.args[0] is False:
        return False
    return any(flow.grad.get(source, False) for source in op.node.all_input_nodes)


def _join(trace: Trace, flow: TraceFlow, op: Op) -> None:
    """Record how the parts of a split batch become this operation's whole result."""
    sources = [node for node in op.node.all_input_nodes if node in trace.values and op.kind not in _FORMS]
    splits = {flow.split[node] for node in sources if node not in trace.attributes}
    if any(value.batch_dims for value in op.values):
        flow.split[op.node] = "concat"
    elif "concat" in splits:
        flow.split[op.node] = "sum" if _sums(op) else "whole"
    else:
        flow.split[op.node] = "sum" if "sum" in splits and op.kind.rstrip("_") in _LINEAR else "whole"


def _sums(op: Op) -> bool:
    """Return whether an operation that loses the batch dimension adds up the samples."""
    reduction = op.node.kwargs.get("reduction", op.node.args[3] if len(op.node.args) > 3 else None)
    return op.kind == "sum" or (op.kind in ("cross_entropy_loss", "nll_loss") and bool(reduction == 2))


def _find_mixing(trace: Trace, flow: TraceFlow) -> None:
    """Record the operations that mix samples or may mix them.

    Batch statistics are recorded by the operation's kind, and operations that are not proven to keep samples apart by
    their line of code.
    """
    proven = prove(trace, SAMPLE_RULES)
    flow.samples.update(proven.states)
    flow.mixing.update(proven.unproven)
    for op in trace.ops:
        if op.kind in NORMS and op.node not in flow.mixing and bool(op.node.args[5]):
            flow.mixing[op.node] = op.kind


def _find_constants(trace: Trace, flow: TraceFlow) -> None:
    """Record the constants, in passes from the first operation to the last.

    A tensor that something not constant writes into is no constant, and neither are its readers.
    """
    banned: set[fx.Node] = set()
    state = {memory_root(op.mutates) for op in trace.ops if op.mutates is not None} & trace.attributes.keys()
    state |= {node for op in trace.ops for node in op.changes}
    state |= {source for op in trace.ops if op.kind == "batch_norm" for source in op.node.all_input_nodes[3:5]}
    while True:
        flow.constant.clear()
        for op in trace.ops:
            if flow.root[op.node] not in banned and _is_constant(trace, flow, op, state):
                flow.constant.add(op.node)
        written = {flow.root[op.node] for op in trace.ops if op.mutates is not None and op.node not in flow.constant}
        if written <= banned:
            return
        banned |= written


def _is_constant(trace: Trace, flow: TraceFlow, op: Op, state: set[fx.Node]) -> bool:
    random = torch.Tag.nondeterministic_seeded in getattr(op.node.target, "tags", ())
    if op.parameters or random or not state.isdisjoint(op.node.all_input_nodes):
        return False
    return all(source in flow.constant for source in op.reads)
