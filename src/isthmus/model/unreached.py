"""Finds the parameters that no loss can reach, such as those that are only read without gradients.

torch leaves the gradient of such a parameter None, and its optimizers pass it over. Here it is left out of training, as
a frozen parameter is: no update, no weight decay, no sync.

A *family* is a set of tensors that views and writes connect; `detach` begins a new one. A family is reached if it has
an output of the model, or if an operation reads it whose result is reached and has a gradient. All writes into a family
count as coming before all reads of it: a parameter may count as reached although it is not, but never the other way
round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import fx

from isthmus.errors import ModelError
from isthmus.model.flow import TraceFlow, alias
from isthmus.model.trace import Op, Trace

__all__ = ["without_unreached"]

_ENDS = {
    "detach", "detach_", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_full", "new_empty",
}  # fmt: skip


def without_unreached(trace: Trace) -> Trace:
    """Return the same trace with the parameters that no loss can reach as buffers; `unreached` names them."""
    reached = _reached(trace)
    names = {trace.attributes[node].name for node in reached if node in trace.attributes}
    parameters = {a.name for a in trace.attributes.values() if a.kind == "parameter"}
    unreached = tuple(
        dict.fromkeys(a.name for a in trace.attributes.values() if a.kind == "parameter" and a.name not in names)
    )
    if parameters and not names & parameters:
        raise ModelError(
            "no loss can reach a parameter of the model",
            found=f"{unreached[0]} and all others are read without gradients, or not at all",
            expected="an output that requires gradients, as the model gives it under plain torch",
            next="Look for torch.no_grad(), detach() and checkpoints with use_reentrant=True around the whole model",
        )
    if not unreached:
        return trace
    attributes = {
        node: replace(a, kind="buffer") if a.kind == "parameter" and a.name in unreached else a
        for node, a in trace.attributes.items()
    }
    ops = tuple(replace(op, parameters=_without(op.parameters, unreached)) for op in trace.ops)
    return replace(trace, attributes=attributes, ops=ops, unreached=unreached)


def _without(names: Iterable[str], left_out: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in left_out)


def _reached(trace: Trace) -> set[fx.Node]:
    """Return every node whose family a loss reaches."""
    family = _families(trace)
    reached = {family[node] for node in trace.outputs if isinstance(node, fx.Node) and node in family}
    while True:
        before = len(reached)
        for op in reversed(trace.ops):
            if family[op.node] in reached and _passes(op):
                reached |= {family[node] for node in op.node.all_input_nodes if node in family}
        if len(reached) == before:
            return {node for node, first in family.items() if first in reached}


def _passes(op: Op) -> bool:
    return op.kind not in _ENDS and any(value.floating for value in op.values)


def _families(trace: Trace) -> dict[fx.Node, fx.Node]:
    """Return each node's family, named by its first node."""
    flow, family = TraceFlow(), {node: node for node in (*trace.inputs, *trace.attributes)}
    flow.root.update(family)
    for op in trace.ops:
        alias(trace, flow, op)
        source = op.mutates or (op.node.args[0] if op.node.args else None)
        shares = flow.root[op.node] is not op.node and op.kind not in _ENDS and isinstance(source, fx.Node)
        family[op.node] = family[source] if shares else op.node  # type: ignore[index]
    return family
