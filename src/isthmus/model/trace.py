"""Reads an exported program as one list of tensor operations."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from isthmus.model.torch_export import Example, Exported, LinearSize, NotExportedError, export_model

__all__ = ["Attribute", "Op", "Trace", "Value", "arguments_of", "bound", "described", "kind_of", "tensors_of", "trace"]
__all__ += ["memory_root", "written_by"]

_CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range"}
_CHECKS |= {"sym_constrain_range_for_size", "_check_is_size", "check_is_size"}
_SAME_MEMORY = {
    "getitem",
    "_unsafe_view",
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "unsafe_split",
    "unsafe_chunk",
}
_CASTS = {"to", "type_as", "float", "double", "half", "bfloat16"}
_TORCH = PurePath(torch.__file__).parent


@dataclass(frozen=True)
class Value:
    """A tensor at both probes."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    stride: tuple[int, ...]  # at the lower probe
    dtype: torch.dtype
    size: LinearSize

    @property
    def floating(self) -> bool:
        """Return whether gradients can flow through the value."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    @property
    def width(self) -> int | None:
        """Return the bytes per element, or None if the job's precision decides."""
        return None if self.floating else self.dtype.itemsize

    @property
    def weight(self) -> float:
        """Return how many elements of four bytes one element counts as.

        It is 1 if the job's precision decides the width.
        """
        return 1.0 if self.floating else self.dtype.itemsize / 4

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """Return the dimensions that grow with the batch."""
        return tuple(d for d, (low, high) in enumerate(zip(*self.shapes, strict=True)) if low != high)


@dataclass(frozen=True)
class Attribute:
    """Something that a graph reads by name: a parameter, a buffer, a constant or a nested graph."""

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
    changes: tuple[fx.Node, ...] = ()  # buffers that a nested graph writes into


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
        """Return each operation by its node."""
        return {op.node: op for op in self.ops}

    def value(self, node: fx.Node) -> Value:
        """Return the only tensor of a node."""
        return self.values[node][0]


def tensors_of(content: Any) -> list[torch.Tensor]:
    """Return the tensors in a node's recorded value."""
    return [leaf for leaf in pytree.tree_leaves(content) if isinstance(leaf, torch.Tensor)]


def trace(model: nn.Module, example: Example) -> Trace:
    """Return the model's operations as one list.

    Raise a NotExportedError that says why if there is no list that does what the model does.
    """
    return _Reader(model, export_model(model, example)).trace()


def _symbolic_size(probes: tuple[int, int]) -> Callable[[Any], tuple[int, int]]:
    """Return a function that gives a size's values at both probes.

    Sizes that depend on data (not on shapes) are taken as those of the batch.
    """
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
                if isinstance(content, fx.GraphModule):
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

    def _nested(self, content: fx.GraphModule) -> None:
        """Record the sizes inside a nested graph (a region in another precision, for example)."""
        for node in content.graph.nodes:
            if values := self._values(node):
                self.values[node] = values
            elif node.op in ("placeholder", "call_function"):
                _check_seen(node)
                self.scalars[node] = self._scalar(node.meta.get("val"))

    def _call(self, node: fx.Node) -> None:
        kind = kind_of(node.target)
        if kind in _CHECKS or (kind == "rand" and not node.users):  # a toss with a known result (torch_export.py)
            return
        values, changes = self._values(node), self._changes(node)
        if not values:
            if changes:
                raise NotExportedError(f"{described(node)} changes buffers and gives nothing")
            _check_seen(node)
            self.scalars[node] = self._scalar(node.meta.get("val"))
            return
        self.values[node] = values
        reads, parameters = self._needs(node)
        op = Op(len(self.ops), node, kind, _module(node), reads, parameters, values, written_by(node), changes)
        self.ops.append(op)

    def _changes(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Return the buffers from outside that a nested graph writes into; nothing else refers to them."""
        places = [place for place, leaf in enumerate(node.args) if isinstance(leaf, fx.Node) and leaf.op == "get_attr"]
        contents = [self.attributes[node.args[place]].content for place in places]  # type: ignore[index]
        graphs = [content for content in contents if isinstance(content, fx.GraphModule)]
        if len(graphs) != 1:
            if any(map(_written_inputs, graphs)):
                raise NotExportedError(f"{described(node)} writes into a tensor from outside")
            return ()
        taken = node.args[places[0] + 1 :]
        found = [taken[number] for number in _written_inputs(graphs[0])]
        roots = tuple(memory_root(source) for source in found if isinstance(source, fx.Node))
        if any(root not in self.attributes for root in roots):
            raise NotExportedError(f"{described(node)} writes into a tensor from outside")
        return roots

    def _needs(self, node: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[str, ...]]:
        """Return the tensors and parameters that a node reads.

        A size of a tensor does not count as reading the tensor, unless it depends on data.
        """
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
        size = LinearSize.through(self.probes, *(float(torch.Size(s).numel()) for s in shapes))
        return Value(shapes, stride, tensor.dtype, size)

    def _scalar(self, content: Any) -> tuple[float, float] | None:
        """Return a size's values at both probes, or None if it depends on data or is not a line on the batch."""
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
    """Return the kind of an operation: `aten::add_` -> `add_`; anything else by its own name."""
    schema = getattr(target, "_schema", None)
    return str(schema.name).rpartition("::")[2] if schema is not None else str(getattr(target, "__name__", target))


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operation by name, defaults included."""
    arguments = target._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in arguments}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return a node's arguments by name, or by their places if its function has no schema."""
    if getattr(node.target, "_schema", None) is None:
        return {str(place): value for place, value in enumerate(node.args)} | node.kwargs
    return bound(node.target, node.args, node.kwargs)


def _written(node: fx.Node) -> list[Any]:
    """Return the arguments that an operation writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    given = arguments_of(node) if written else {}
    return [given[name] for name in written if given[name] is not None]


def written_by(node: fx.Node) -> fx.Node | None:
    """Return the tensor that an operation writes into and gives back.

    Raise a NotExportedError if it writes in another way.
    """
    written = _written(node)
    if not written:
        return None
    returns = node.target._schema.returns  # type: ignore[union-attr]
    gives = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    if len(written) > 1 or not isinstance(written[0], fx.Node) or not gives:
        raise NotExportedError(f"{described(node)} writes into tensors that it does not give back")
    return written[0]


def _check_seen(node: fx.Node) -> None:
    """Refuse an operation that gives nothing and so must do something else, unless it is a check."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and kind_of(node.target) not in _CHECKS and (_written(node) or not schema.returns):
        raise NotExportedError(f"{described(node)} gives nothing back")


def memory_root(node: fx.Node) -> fx.Node:
    """Return the tensor whose memory a tensor may share, through any number of views and writes."""
    while (source := _shared(node)) is not None:
        node = source
    return node


def _shared(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function":
        return None
    if (written := _written(node)) and isinstance(written[0], fx.Node):
        return written[0]
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(source, fx.Node):
        return source if _looks(source.target) else None  # parts of one tensor, or tensors of their own
    if not isinstance(source, fx.Node) or not (_looks(node.target) or kind_of(node.target) in _SAME_MEMORY):
        return None
    types = {getattr(each.meta.get("val"), "dtype", None) for each in (source, node)}
    return None if kind_of(node.target) in _CASTS and len(types) > 1 else source


def _looks(target: Any) -> bool:
    """Return whether torch says that a result may be a view of the first argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and bool(schema.arguments) and schema.arguments[0].alias_info is not None


def _written_inputs(graph: fx.GraphModule) -> list[int]:
    """Return the numbers of the inputs that a nested graph writes into."""
    inputs = graph.graph.find_nodes(op="placeholder")
    written = {memory_root(source) for node in graph.graph.nodes if (source := written_by(node)) is not None}
    return [number for number, node in enumerate(inputs) if node in written]


def described(node: fx.Node) -> str:
    """Describe an operation by its kind and the line of code that it comes from, leaving out torch's own code."""
    kind, stack = kind_of(node.target), node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', stack)
    if not frames:
        return kind
    own = [frame for frame in frames if not PurePath(frame[0]).is_relative_to(_TORCH)]
    file, line, text = (own or frames)[-1]
    return f"{kind} (line {line} of {PurePath(file).name}: {text.strip()[:80]})"


def _module(node: fx.Node) -> str:
    """Return the path of the innermost module that a node comes from."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_empty_nn_module_stack") else path
