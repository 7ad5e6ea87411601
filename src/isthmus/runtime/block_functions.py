"""An exported block as a function of its random keys, its tensors and its inputs.

Random operations of the graph become functions of the keys (`random/dropout.py`, `random/attention_by_sample.py`), and
weights and buffers become arguments. So equal blocks have equal code, which `torch.compile` translates once, and no
mode has to watch every operation while a block runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from isthmus.model.trace import bound, kind_of
from isthmus.runtime.random.attention_by_sample import attention_by_sample
from isthmus.runtime.random.draws import Draw, active, draws_itself
from isthmus.runtime.random.dropout import hashed_dropout

__all__ = ["BlockFunction", "block_function"]

_PLACED = ("dropout", "scaled_dot_product_attention")  # the random operations that become functions of keys


@dataclass(frozen=True, eq=False)
class BlockFunction:
    """`code(keys, *tensors, *inputs)` computes the block; `text` is equal for blocks that compute the same."""

    code: Callable[..., Sequence[Any]]
    tensors: tuple[Tensor, ...]
    text: str

    def __call__(self, keys: Tensor | None, *inputs: Any) -> Sequence[Any]:
        """Run the block; `keys` are those of its random operations, [operations, samples, 2]."""
        return self.code(keys, *self.tensors, *inputs)


def block_function(module: nn.Module, draws: Sequence[Draw]) -> BlockFunction | None:
    """Return the block as a function, or None if it has no graph, calls modules, or draws other random numbers."""
    if not isinstance(module, fx.GraphModule) or any(draw.operation not in _PLACED for draw in draws):
        return None
    if any(not _is_plain(module, node) for node in module.graph.nodes):
        return None
    graph, tensors = _lifted(module, {draw.node: (index, draw) for index, draw in enumerate(draws)})
    made = fx.GraphModule({}, graph)
    return BlockFunction(made.forward, tuple(tensors), made.code)


def _is_plain(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node needs no module but for its tensors."""
    return node.op != "call_module" and (node.op != "get_attr" or isinstance(_content(module, node), Tensor))


def _content(module: fx.GraphModule, node: fx.Node) -> Any:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def _lifted(module: fx.GraphModule, draws: dict[str, tuple[int, Draw]]) -> tuple[fx.Graph, list[Tensor]]:
    """Return the block's graph with keys and tensors as its first inputs, and the tensors."""
    graph = fx.Graph()
    keys = graph.placeholder("keys")
    known: dict[fx.Node, fx.Node] = {}
    tensors: dict[str, tuple[fx.Node, Tensor]] = {}
    nodes = list(module.graph.nodes)
    for node in nodes:
        if node.op == "get_attr":
            target = str(node.target)
            if target not in tensors:
                tensors[target] = graph.placeholder(f"tensor_{len(tensors)}"), _content(module, node)
            known[node] = tensors[target][0]
    inputs = [node for node in nodes if node.op == "placeholder"]
    known |= {node: graph.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    each = graph.call_function(torch.unbind, (keys,)) if draws else None
    for node in nodes:
        if node in known:
            continue
        if node.name in draws and node.op == "call_function":
            index, draw = draws[node.name]
            known[node] = _drawn(graph, node, draw, (each, index), known)
        else:
            args, kwargs = (fx.map_arg(given, known.__getitem__) for given in (node.args, node.kwargs))
            known[node] = graph.create_node(node.op, node.target, args, kwargs)  # its name follows from its place here
    return graph, [tensor for _, tensor in tensors.values()]


def _drawn(
    graph: fx.Graph, node: fx.Node, draw: Draw, keys: tuple[fx.Node | None, int], known: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Add a random operation as a function of its keys."""
    own = graph.call_function(operator.getitem, keys)
    assert draws_itself(node.target) and active(node.target, node.args, node.kwargs)
    given = fx.map_arg(bound(node.target, node.args, node.kwargs), known.__getitem__)
    if kind_of(node.target) == "dropout":
        named = {"p": given["p"], "dim": draw.dim, "split": draw.split}
        return graph.call_function(hashed_dropout, (given["input"], own), named)
    named = {
        "p": given["dropout_p"], "mask": given.get("attn_mask"), "causal": given.get("is_causal", False),
        "scale": given.get("scale"), "gqa": given.get("enable_gqa", False), "dim": draw.dim, "split": draw.split,
    }  # fmt: skip
    return graph.call_function(attention_by_sample, (given["query"], given["key"], given["value"], own), named)
