"""A model as one list of tensor operations, read off an exported program."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from isthmus.model.export import Example, Exported, Line, export_model

__all__ = ["Attribute", "Op", "Trace", "Value", "arguments_of", "bound", "kind_of", "tensors_of", "trace"]

_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
_CHECKS |= {"sym_constrain_range_for_size", "_check_is_size", "check_is_size"}


@dataclass(frozen=True)
class Value:
    """A tensor at both probes."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    stride: tuple[int, ...]  # at the lower probe
    dtype: torch.dtype
    size: Line

    @property
    def floating(self) -> bool:
        """Whether gradients can flow through it."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def width(self) -> int | None:
        """Bytes per element where the job's precision does not decide."""
        return None if self.floating else self.dtype.itemsize

    @property
    def weight(self) -> float:
        """One element, counted in elements of four bytes where the job's precision does not decide."""
        return 1.0 if self.floating else self.dtype.itemsize / 4

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The dimensions that grow with the batch."""
        return tuple(d for d, (low, high) in enumerate(zip(*self.shapes, strict=True)) if low != high)


@dataclass(frozen=True)
class Attribute:
    """Something a graph reads by name: a parameter, a buffer, a constant or a nested graph."""

    kind: str
    name: str
    content: Any


@dataclass(frozen=True, eq=False)
class Op:
    """One tensor operation. `reads` are the nodes (operations, model inputs) whose tensors it needs."""

    index: int
    node: fx.Node
    kind: str
    module: str
    reads: tuple[fx.Node, ...]
    parameters: tuple[str, ...]
    values: tuple[Value, ...]
    mutates: fx.Node | None


@dataclass(frozen=True, eq=False)
class Trace:
    """A whole exported model. `ops` are in execution order; `scalars` are integers that come from sizes."""

    probes: tuple[int, int]
    inputs: tuple[fx.Node, ...]
    ops: tuple[Op, ...]
    values: dict[fx.Node, tuple[Value, ...]]
    scalars: dict[fx.Node, tuple[float, float] | None]
    attributes: dict[fx.Node, Attribute]
    outputs: tuple[Any, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    unreached: tuple[str, ...] = ()  # parameters that no loss can reach; they count as buffers

    @cached_property
    def op(self) -> dict[fx.Node, Op]:
        """Each operation by its node."""
        return {op.node: op for op in self.ops}

    def value(self, node: fx.Node) -> Value:
        """The only tensor of a node."""
        return self.values[node][0]


def tensors_of(content: Any) -> list[torch.Tensor]:
    """The tensors in a node's recorded value."""
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, torch.Tensor)]


def trace(model: nn.Module, example: Example) -> Trace | None:
    """The model's operations, or None where `torch.export` cannot follow it."""
    exported = export_model(model, example)
    return None if exported is None else _Reader(model, exported).trace()


def _symbolic_size(probes: tuple[int, int]) -> Callable[[Any], tuple[int, int]]:
    """size -> its values at both probes. Sizes that depend on data (not on shapes) are taken as the batch's."""
    known: dict[Any, tuple[int, int]] = {}

    def at_probes(size: Any) -> tuple[int, int]:
        if isinstance(size, int):
            return size, size
        expression = size.node.expr
        if expression not in known:
            low, high = (expression.subs(dict.fromkeys(expression.free_symbols, p)) for p in probes)
            known[expression] = int(low), int(high)
        return known[expression]

    return at_probes


class _Reader:
    """Reads an exported program into a Trace."""

    def __init__(self, model: nn.Module, exported: Exported) -> None:
        self.model, self.program, self.probes = model, exported.program, exported.probes
        self.at_probes = _symbolic_size(exported.probes)
        self.values: dict[fx.Node, tuple[Value, ...]] = {}
        self.scalars: dict[fx.Node, tuple[float, float] | None] = {}
        self.attributes: dict[fx.Node, Attribute] = {}
        self.inputs: list[fx.Node] = []
        self.ops: list[Op] = []
        self.first_names = _first_names(model)

    def trace(self) -> Trace:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        outputs: tuple[Any, ...] = ()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "get_attr":
                content = operator.attrgetter(node.target)(self.program.graph_module)
                self.attributes[node] = Attribute("module", node.target, content)
                self._nested(content)
            elif node.op == "output":
                outputs = tuple(pytree.tree_leaves(node.args[0], is_leaf=lambda leaf: leaf is None))
            else:
                self._call(node)
        return Trace(
            probes=self.probes,
            inputs=tuple(self.inputs),
            ops=tuple(self.ops),
            values=self.values,
            scalars=self.scalars,
            attributes=self.attributes,
            outputs=outputs,
            in_spec=_spec(self.program.call_spec.in_spec),
            out_spec=_spec(self.program.call_spec.out_spec),
        )

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        self.values[node] = self._values(node)
        if spec.kind is InputKind.USER_INPUT:
            self.inputs.append(node)
        elif spec.kind is InputKind.PARAMETER:
            parameter = self.model.get_parameter(spec.target)
            kind = "parameter" if parameter.requires_grad else "buffer"
            self.attributes[node] = Attribute(kind, self.first_names[id(parameter)], parameter)
        elif spec.kind is InputKind.BUFFER:
            self.attributes[node] = Attribute("buffer", spec.target, operator.attrgetter(spec.target)(self.model))
        else:
            self.attributes[node] = Attribute("constant", spec.target, self.program.constants[spec.target])

    def _nested(self, content: Any) -> None:
        """Sizes inside a nested graph (a region without gradients, say), for its costs only."""
        if isinstance(content, fx.GraphModule):
            self.values |= {node: values for node in content.graph.nodes if (values := self._values(node))}

    def _call(self, node: fx.Node) -> None:
        kind = kind_of(node.target)
        if kind in _CHECKS or (kind == "rand" and not node.users):  # a coin whose side was known (export.py)
            return
        values = self._values(node)
        if not values:
            self.scalars[node] = self._scalar(node.meta.get("val"))
            return
        self.values[node] = values
        reads, parameters = self._needs(node)
        mutates = node.args[0] if _mutates(node.target) and isinstance(node.args[0], fx.Node) else None
        op = Op(len(self.ops), node, kind, _module(node), reads, parameters, values, mutates)
        self.ops.append(op)

    def _needs(self, node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[str, ...]]:
        """Tensors and parameters that a node reads; a size of a tensor is no read of it unless it depends on data."""
        reads: dict[fx.Node, None] = {}
        parameters: dict[str, None] = {}
        for source in node.all_input_nodes:
            if source in self.scalars:
                reads |= dict.fromkeys(self._scalar_reads(source))
            elif source in self.attributes:
                if self.attributes[source].kind == "parameter":
                    parameters[self.attributes[source].name] = None
            else:
                reads[source] = None
        return tuple(reads), tuple(parameters)

    def _scalar_reads(self, node: fx.Node) -> Iterable[fx.Node]:
        for source in node.all_input_nodes:
            if source in self.scalars:
                yield from self._scalar_reads(source)
            elif self.scalars[node] is None and source not in self.attributes:
                yield source

    def _values(self, node: fx.Node) -> tuple[Value, ...]:
        return tuple(map(self._value, tensors_of(node.meta.get("val"))))

    def _value(self, tensor: torch.Tensor) -> Value:
        pairs = [self.at_probes(size) for size in tensor.shape]
        stride = tuple(self.at_probes(size)[0] for size in tensor.stride())
        shapes = tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)
        size = Line.through(self.probes, *(float(torch.Size(s).numel()) for s in shapes))
        return Value(shapes, stride, tensor.dtype, size)

    def _scalar(self, content: Any) -> tuple[float, float] | None:
        """A size's values at both probes; None for what depends on data, or not as a line on the batch."""
        if isinstance(content, torch.SymInt):
            expression = content.node.expr
            sized = all(str(symbol).startswith("s") for symbol in expression.free_symbols)
            straight = all(expression.diff(symbol).is_Integer for symbol in expression.free_symbols)
            return self.at_probes(content) if sized and straight else None
        if isinstance(content, int) and not isinstance(content, bool):
            return content, content
        return None


def _first_names(model: nn.Module) -> dict[int, str]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return names


def _spec(spec: pytree.TreeSpec | None) -> pytree.TreeSpec:
    assert spec is not None
    return spec


def kind_of(target: Any) -> str:
    """`aten::add_` -> `add_`; anything else by its own name."""
    schema = getattr(target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", target))


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of an operation by name, defaults included."""
    arguments = target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name; by their places where its function has no schema."""
    if getattr(node.target, "_schema", None) is None:
        return {str(place): value for place, value in enumerate(node.args)} | node.kwargs
    return bound(node.target, node.args, node.kwargs)


def _mutates(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def _module(node: fx.Node) -> str:
    """Path of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else path
