"""Opens the nested graphs of an exported program, so that every operation is in one list.

`torch.export` puts what runs under `torch.no_grad()` into a graph of its own. Once it is opened, an operation of such a
region reads each tensor from outside through a `detach`: no gradient passes, in memory it is the same tensor, and
autograd records nothing, as under `no_grad`. A tensor from outside that the region writes into keeps its own gradient.

A region that switches autocast off changes nothing if no autocast is on around it, and is opened too. Other nested
graphs (branches of `torch.cond`, regions with autocast) stay; each gets the recorded value that export leaves out.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export import ExportedProgram

__all__ = ["open_regions"]

_GRAD = "isthmus_with_grad"  # in a node's meta: whether it runs with gradients; absent: it does


def open_regions(program: ExportedProgram) -> None:
    """Open all regions, innermost first."""
    _open_all(program.graph_module, autocast=False)


def _open_all(module: fx.GraphModule, *, autocast: bool) -> None:
    for node in list(module.graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "get_attr" and isinstance(inner := _content(module, source), fx.GraphModule):
                _open_all(inner, autocast=autocast or (node.target is wrap_with_autocast and bool(node.args[2])))
                _record(node, source, inner)
    for node in list(module.graph.nodes):
        region = _region(module, node, autocast)
        if region is not None:
            _open(module, node, region)
    for node in list(module.graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target is torch.ops.aten._assert_tensor_metadata.default):
            module.graph.erase_node(node)


def _content(module: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def _record(node: fx.Node, graph: fx.Node, inner: fx.GraphModule) -> None:
    """Note the value of a region and, inside it, of its inputs: export knows both and records neither."""
    if node.target not in (wrap_with_autocast, wrap_with_set_grad_enabled):
        return
    taken = node.args[node.args.index(graph) + 1 :]
    for each, source in zip(inner.graph.find_nodes(op="placeholder"), taken, strict=True):
        if isinstance(source, fx.Node) and "val" in source.meta:
            each.meta["val"] = source.meta["val"]
    (output,) = inner.graph.find_nodes(op="output")
    leaves = output.args[0]
    assert isinstance(leaves, tuple | list)
    node.meta["val"] = tuple(leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf for leaf in leaves)


@dataclass(frozen=True)
class _Region:
    """A region to open: whether it runs with gradients, its graph, and its inputs."""

    grad: bool
    inner: fx.GraphModule
    taken: tuple[Any, ...]


def _region(module: fx.GraphModule, node: fx.Node, autocast: bool) -> _Region | None:
    """Return the region that a node stands for, or None if the node stands for no region that is opened."""
    if node.target is wrap_with_set_grad_enabled:
        enabled, graph, *taken = node.args
    elif node.target is wrap_with_autocast and not node.args[2] and not autocast:
        enabled, graph, *taken = True, *node.args[4:]
    else:
        return None
    assert isinstance(graph, fx.Node)
    return _Region(bool(enabled), _content(module, graph), tuple(taken))


def _open(module: fx.GraphModule, node: fx.Node, region: _Region) -> None:
    copier = _Copier(module, node, region.grad)
    results: tuple[Any, ...] = ()
    inputs = iter(region.taken)
    for each in region.inner.graph.nodes:
        if each.op == "placeholder":
            copier.copies[each] = next(inputs)
        elif each.op == "output":
            results = tuple(copier.outside(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in each.args[0])
        else:
            copier.copy(region.inner, each)
    for user in list(node.users):
        place = user.args[1]
        assert isinstance(place, int)
        user.replace_all_uses_with(results[place])
        module.graph.erase_node(user)
    module.graph.erase_node(node)


class _Copier:
    """Copies a region's operations in front of the node that stands for it."""

    def __init__(self, module: fx.GraphModule, before: fx.Node, grad: bool) -> None:
        self.module, self.before, self.grad = module, before, grad
        self.copies: dict[fx.Node, Any] = {}
        self._detached: dict[fx.Node, fx.Node] = {}
        self._written: dict[fx.Node, fx.Node] = {}  # result of a write -> the tensor, with its own gradient

    def copy(self, inner: fx.GraphModule, node: fx.Node) -> None:
        """Put a copy of an operation, or of a nested graph that stays, into the outer graph."""
        graph = self.module.graph
        if node.op == "get_attr":
            name = f"{self.before.name}_{str(node.target).replace('.', '_')}"
            setattr(self.module, name, _content(inner, node))
            with graph.inserting_before(self.before):
                self.copies[node] = graph.get_attr(name)
            return
        grad = self._with_grad(node)
        with graph.inserting_before(self.before):
            made = graph.node_copy(node, lambda source: self._taken(source, grad))
        made.meta = {**node.meta, _GRAD: grad}
        self.copies[node] = made
        first = node.args[0] if node.args else None
        if not grad and _writes(node) and isinstance(first, fx.Node):
            source = self.outside(first)
            if source.meta.get(_GRAD, True):
                self._written[made] = source

    def outside(self, node: fx.Node) -> fx.Node:
        """Return what stands for a node where gradients flow.

        For a tensor that was written into, this is the tensor itself.
        """
        found: fx.Node = self.copies[node]
        return self._written.get(found, found)

    def _with_grad(self, node: fx.Node) -> bool:
        """Return whether a node runs with gradients.

        Taking a tensor out of a tuple is no computation: it has a gradient if the tuple has one.
        """
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return bool(self.copies[node.args[0]].meta.get(_GRAD, True))
        return bool(node.meta.get(_GRAD, self.grad))

    def _taken(self, source: fx.Node, grad: bool) -> Any:
        if grad:
            return self.outside(source)
        found = self.copies[source]
        if not isinstance(found, fx.Node) or not found.meta.get(_GRAD, True) or not _may_have_gradient(found):
            return found
        if found not in self._detached:
            made = self.module.graph.call_function(torch.ops.aten.detach.default, (found,))
            made.meta = {**found.meta, _GRAD: False}
            for key in ("nn_module_stack", "stack_trace"):
                made.meta[key] = self.before.meta.get(key) or found.meta.get(key, {} if key != "stack_trace" else None)
            self._detached[found] = made
        return self._detached[found]


def _may_have_gradient(node: fx.Node) -> bool:
    """Return whether a node gives one floating-point or complex tensor that is no buffer or constant."""
    value = node.meta.get("val")
    real = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return real and not node.name.startswith(("b_", "c_")) if node.op == "placeholder" else real


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return alias is not None and bool(alias.is_write)
