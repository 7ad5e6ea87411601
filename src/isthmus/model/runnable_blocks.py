"""Makes the blocks of `capture` runnable: one module per block, with the model's own parameters and their names."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from isthmus.errors import ModelError, UsageError
from isthmus.model.describe import describe, tensor_names
from isthmus.model.graph import BlockGraph
from isthmus.model.modules import ModuleCut, cut_modules
from isthmus.model.quiet import without_weight_warnings
from isthmus.model.sections import Section, Sections, cut_trace
from isthmus.model.torch_export import Example, LinearSize, NotExportedError
from isthmus.model.trace import Op, Trace, trace
from isthmus.model.unreached import without_unreached

__all__ = ["Builder", "Pieces", "cut"]


@dataclass(frozen=True, eq=False)
class Pieces:
    """A model as blocks. Block i takes the tensors `incoming[i]` and gives `outgoing[i]`, both by tensor name.

    `inputs` names the model's inputs in the order of the example's flattened (args, kwargs). `batch_dims` gives the
    dimension along which a tensor that joins by `concat` is cut by samples. A parameter used in several blocks is the
    same object in each, under its first name. `rest` is what the model's state has and no block holds, because no block
    uses it.
    """

    graph: BlockGraph
    blocks: tuple[nn.Module, ...]
    incoming: tuple[tuple[str, ...], ...]
    outgoing: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str | _Literal, ...]
    batch_dims: dict[str, int]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    rest: dict[str, torch.Tensor]
    sections: Sections | None = None  # what the blocks were made from; None: child modules

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks one after another, and return what the model returns."""
        known = self.bind(args, kwargs)
        for block, taken, given in zip(self.blocks, self.incoming, self.outgoing, strict=True):
            known |= zip(given, block(*(known[name] for name in taken)), strict=True)
        return self.result(known)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the model's inputs by tensor name; they must be given as in the example."""
        ordered = {key: kwargs[key] for key in self.in_spec.child(1).context if key in kwargs}
        leaves, spec = pytree.tree_flatten((args, ordered))
        if spec != self.in_spec or len(ordered) != len(kwargs):
            raise UsageError(
                "the blocks were called with other inputs than the model was captured with",
                found=f"{len(args)} positional, keywords {sorted(kwargs)}",
                expected=f"{', '.join(self.inputs)}, given as in the example",
            )
        return dict(zip(self.inputs, leaves, strict=True))

    def result(self, known: dict[str, Any]) -> Any:
        """Return the model's output, made from the tensors by name."""
        leaves = [known[leaf] if isinstance(leaf, str) else leaf.content for leaf in self.outputs]
        return pytree.tree_unflatten(leaves, self.out_spec)


@dataclass(frozen=True)
class _Literal:
    """A part of the output that is not a tensor of the trace."""

    content: Any


def cut(
    model: nn.Module,
    example: Example,
    *,
    name: str,
    sequence: int | None = None,
    max_blocks: int = 128,
    measure: bool = True,
) -> Pieces:
    """Cut a model into runnable blocks; `graph` equals what `capture` gives for the same model.

    `measure` is as in `cut_modules`; a worker does without it, because its plan was judged before.
    """
    if max_blocks < 1:
        raise UsageError("a model needs at least one block", found=f"max_blocks={max_blocks}", expected="1 or more")
    try:
        with without_weight_warnings():
            traced = trace(model, example)
    except NotExportedError:
        chain = cut_modules(model, example, name=name, sequence=sequence, max_blocks=max_blocks, measure=measure)
        return _from_modules(model, chain, example)
    traced = without_unreached(traced)
    sections = cut_trace(traced, max_blocks)
    names = tensor_names(sections)
    exchanged = {node: names[node] for s in sections.sections for node in (*s.incoming, *s.outgoing)}
    blocks = tuple(Builder(sections, section).module() for section in sections.sections)
    return Pieces(
        graph=describe(model, sections, name=name, sequence=sequence),
        blocks=blocks,
        incoming=tuple(tuple(names[node] for node in section.incoming) for section in sections.sections),
        outgoing=tuple(tuple(names[node] for node in section.outgoing) for section in sections.sections),
        inputs=tuple(names[node] for node in traced.inputs),
        outputs=tuple(_output(traced, names, leaf) for leaf in traced.outputs),
        batch_dims={name: _batch_dim(traced, node) for node, name in exchanged.items()},
        in_spec=traced.in_spec,
        out_spec=traced.out_spec,
        rest=_rest(model, blocks),
        sections=sections,
    )


def _rest(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    held = {id(tensor) for block in blocks for tensor in (*block.parameters(), *block.buffers())}
    state = model.state_dict(keep_vars=True)
    return {name: t.detach() for name, t in state.items() if isinstance(t, torch.Tensor) and id(t) not in held}


def _output(trace: Trace, names: dict[fx.Node, str], leaf: Any) -> str | _Literal:
    if not isinstance(leaf, fx.Node):
        return _Literal(leaf)
    if leaf in trace.attributes:
        return _Literal(trace.attributes[leaf].content)
    if leaf in trace.scalars:
        raise ModelError(
            "the model's output holds a number that depends on the batch",
            found=leaf.name,
            expected="tensors and constants",
        )
    return names[leaf]


def _batch_dim(trace: Trace, node: fx.Node) -> int:
    """Return the dimension to cut by samples, or -1 if there is none."""
    return next(iter(trace.value(node).batch_dims), -1)


class Builder:
    """Copies a section's operations into a graph of its own."""

    def __init__(self, cut: Sections, section: Section) -> None:
        self.trace, self.section = cut.trace, section
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, Any] = {}
        self.contents: dict[str, Any] = {}
        self.batch: fx.Node | None = None

    def module(self) -> fx.GraphModule:
        """Return the section as a module."""
        for node in self.section.incoming:
            self.copies[node] = self.graph.placeholder(node.name)
        for op in self.section.local:
            self.copies[op.node] = self.operation(op)
        self.graph.output(tuple(self.copies[node] for node in self.section.outgoing))
        return fx.GraphModule(self.contents, self.graph)

    def operation(self, op: Op) -> fx.Node:
        """Return the node that stands for an operation in this graph."""
        return self.graph.node_copy(op.node, self.copy)

    def content(self, node: fx.Node) -> Any:
        """Return the content that a node reads by name in this graph."""
        return self.trace.attributes[node].content

    def copy(self, node: fx.Node) -> Any:
        """Return the node or number that stands in this graph for a node of the whole graph."""
        if node not in self.copies:
            self.copies[node] = self._scalar(node) if node in self.trace.scalars else self._attribute(node)
        return self.copies[node]

    def _attribute(self, node: fx.Node) -> fx.Node:
        name = self.trace.attributes[node].name
        self.contents[name] = self.content(node)
        return self.graph.get_attr(name)

    def _scalar(self, node: fx.Node) -> Any:
        """Return a number that comes from sizes, computed again in this graph.

        Sizes of tensors are computed as lines on the batch, arithmetic as in the model.
        """
        pair = self.trace.scalars[node]
        if pair is None or any(source in self.trace.scalars for source in node.all_input_nodes):
            return self.graph.node_copy(node, self.copy)
        if pair[0] == pair[1]:
            return int(pair[0])
        line = LinearSize.through(self.trace.probes, *pair)
        scaled = self._local_batch()
        if line.slope != 1:
            scaled = self.graph.call_function(operator.mul, (scaled, int(line.slope)))
        return scaled if line.fixed == 0 else self.graph.call_function(operator.add, (scaled, int(line.fixed)))

    def _local_batch(self) -> Any:
        """Return the batch size, read from the first incoming tensor that has it as a dimension."""
        for node in self.section.incoming:
            pairs = list(zip(*self.trace.value(node).shapes, strict=True))
            if self.batch is None and self.trace.probes in pairs:
                size = (self.copies[node], pairs.index(self.trace.probes))
                self.batch = self.graph.call_function(torch.ops.aten.sym_size.int, size)
        assert self.batch is not None
        return self.batch


def _from_modules(model: nn.Module, cut: ModuleCut, example: Example) -> Pieces:
    """Return the blocks of a chain of child modules, or of the whole model as one block."""
    inputs = tuple(tensor.name for tensor in cut.graph.tensors if tensor.source == -1)
    links = tuple(tensor.name for tensor in cut.graph.tensors if tensor.source >= 0)
    in_spec = pytree.tree_flatten((example.args, example.kwargs))[1]
    whole = cut.runs[0][0][0] == ""
    blocks = (_Whole(model, in_spec),) if whole else tuple(_Run(run) for run in cut.runs)
    return Pieces(
        graph=cut.graph,
        blocks=blocks,
        incoming=(inputs, *((link,) for link in links)),
        outgoing=(*((link,) for link in links), ("output",)),
        inputs=inputs,
        outputs=("output",),
        batch_dims={tensor.name: 0 if tensor.split == "concat" else -1 for tensor in cut.graph.tensors},
        in_spec=in_spec,
        out_spec=pytree.tree_flatten(0)[1],
        rest=_rest(model, blocks),
    )


class _Run(nn.Module):
    """Child modules one after another, under the paths that they have in the model."""

    def __init__(self, children: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self._order = [module for _, module in children]
        for path, module in children:
            _attach(self, path, module)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the result of the chain."""
        for module in self._order:
            inputs = (module(*inputs),)
        return inputs


def _attach(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(last, module)


class _Whole(nn.Module):
    """A model that takes its inputs flattened; its parts keep their names."""

    def __init__(self, model: nn.Module, in_spec: pytree.TreeSpec) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is not registered under a new name
        self._call = _caller(in_spec)
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the model itself and take its buffers again, because moving replaces buffers."""
        self._buffers.update(self._model[0]._apply(fn, recurse)._buffers)  # type: ignore[no-untyped-call]
        return self

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Return the model's result."""
        return (self._call(self._model[0], inputs),)


def _caller(in_spec: pytree.TreeSpec) -> Callable[[nn.Module, Sequence[Any]], Any]:
    """Return a function that calls a model with flat inputs.

    It is a function because torch warns when a spec is copied.
    """

    def call(model: nn.Module, inputs: Sequence[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(inputs, in_spec)
        return model(*args, **kwargs)

    return call
