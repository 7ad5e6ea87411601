"""Proves, operation by operation, that a model keeps the samples of a batch apart.

Each tensor of a trace gets a *state* that says how its elements depend on the samples:

- `Free`: on no sample, and not on the size of the batch;
- `Rows(dim, per)`: dimension `dim` has `per` rows for each sample, sample after sample; each row depends on nothing but
  its own sample. With `outer` all samples come several times, with `order` the rows are those that an index has picked,
  in its order (tokens sorted by expert);
- the states of indices below, by which rows are picked and put back;
- `Mixed`: in a way that no rule knows.

A rule (`rules.py`) gives the state of an operation's results if it can prove it from the states of what the operation
reads. If no rule can, the operation is *unproven*: a plan that splits the batch there might compute something else than
one process does. By induction over the operations, every result without an unproven operation before it is what it
would be if each sample were alone in its batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from isthmus.model.graph import NORMS
from isthmus.model.trace import Trace, Value, arguments_of, described, kind_of, memory_root, written_by

__all__ = ["FREE", "MIXED", "Bounds", "Call", "Counts", "Free", "Inverse", "Listed", "Mixed", "Position", "SortOrder"]
__all__ += ["Rows", "Rule", "SampleProof", "Sorted", "State", "Unproven", "described", "is_apart", "nested", "prove"]
__all__ += ["rows_per_sample"]


_SIZED = {  # arguments that may be as large as the batch
    "*": "wrap_with_autocast wrap_with_set_grad_enabled",  # regions, whose operations are proven one by one
    "size": """view _unsafe_view expand broadcast_to zeros ones full empty rand randn randint new_zeros new_ones
        new_full new_empty""",
    "shape": "reshape",
    "sizes": "unflatten",
    "end": "slice arange",
    "length": "narrow",
    "split_size": "split unsafe_split",
    "split_sizes": "split_with_sizes",
    "repeats": "repeat",
    "dims": "tile",
}
_SIZES = {kind: name for name, kinds in _SIZED.items() for kind in kinds.split()}


class Unproven(Exception):
    """Says that no rule proves an operation; for an operation inside a region, the text says which."""


@dataclass(frozen=True)
class Free:
    """The state of what depends on no sample, and not on how many there are."""


@dataclass(frozen=True)
class Mixed:
    """The state of what depends on samples in a way that is not known."""


@dataclass(frozen=True)
class Rows:
    """Row i of dimension `dim` belongs to sample (i // per) % batch, or with `order` to the sample that the index says.

    `outer` is how often all samples follow each other (positions outside, samples inside). If `below` is given, the
    values are integers in [0, below).
    """

    dim: int
    per: int
    order: fx.Node | None = None
    outer: int = 1
    below: int | None = None

    def at(self, dim: int) -> Rows:
        """Return the same rows in another dimension, of other values."""
        return Rows(dim, self.per, self.order, self.outer)


@dataclass(frozen=True)
class Position:
    """The number of each row along `dim`, of which every sample has `per`: an arange over the batch."""

    dim: int
    per: int


@dataclass(frozen=True)
class Sorted:
    """The keys of all rows in ascending order, one for each row, in [0, below); `sort` is the operation."""

    sort: fx.Node
    per: int
    below: int | None


@dataclass(frozen=True)
class SortOrder:
    """For each place of a sort, the row that stands there, divided by `share` (`row // share`).

    A sample has `per` rows.
    """

    sort: fx.Node
    per: int
    share: int = 1


@dataclass(frozen=True)
class Inverse:
    """For each row, its place in a sort."""

    sort: fx.Node
    per: int


@dataclass(frozen=True)
class Counts:
    """The number of keys of a sort that have each of the values 0, 1, ..., groups - 1."""

    sort: fx.Node
    groups: int


@dataclass(frozen=True)
class Bounds:
    """The number of keys of a sort that are at most 0, 1, ..., groups - 1: where the rows of each group end."""

    sort: fx.Node
    groups: int


@dataclass(frozen=True)
class Listed:
    """The numbers of the rows, of `per` a sample, that a mask picks.

    Whether a row is picked depends on its own sample alone.
    """

    mask: fx.Node
    per: int


State = Free | Mixed | Rows | Position | Sorted | SortOrder | Inverse | Counts | Bounds | Listed
FREE, MIXED = Free(), Mixed()
Rule = Callable[["Call"], State | Sequence[State]]


@dataclass(frozen=True, eq=False)
class SampleProof:
    """The states of each node's results, and the operations that no rule proves, with their lines of code."""

    states: dict[fx.Node, tuple[State, ...]] = field(default_factory=dict)
    unproven: dict[fx.Node, str] = field(default_factory=dict)


def is_apart(states: Sequence[State]) -> bool:
    """Return whether tensors may be cut between samples: their rows lie sample after sample, or have no samples."""
    return all(isinstance(s, Free) or (isinstance(s, Rows) and s.order is None and s.outer == 1) for s in states)


def prove(trace: Trace, rules: Mapping[str, Rule]) -> SampleProof:
    """Return the states of all operations, found in execution order."""
    samples = SampleProof()
    for node in trace.inputs:
        samples.states[node] = (Rows(0, 1),)
    for node in trace.attributes:
        samples.states[node] = (FREE,)
    for op in trace.ops:
        _step(Call(trace, samples, op.node, op.values), rules, op.mutates)
    for node in trace.outputs:
        if isinstance(node, fx.Node) and node in trace.op and not is_apart(samples.states[node]):
            samples.unproven.setdefault(node, described(node))
    return samples


def nested(call: Call, graph: fx.GraphModule, given: Sequence[Any], rules: Mapping[str, Rule]) -> list[State]:
    """Return the states of the results of a nested graph, such as a region in another precision."""
    inner, trace = SampleProof(), call.trace
    taken = graph.graph.find_nodes(op="placeholder")
    for node, source in zip(taken, given, strict=True):
        inner.states[node] = call.states(source) if source in trace.values else (FREE,)
    for node in graph.graph.nodes:
        if node.op == "output":
            return [state for source in node.all_input_nodes for state in inner.states[source]]
        if node.op != "placeholder" and node not in trace.scalars:
            mutates = written_by(node)
            _step(Call(trace, inner, node, trace.values[node]), rules, mutates)
            if (mutates is not None and memory_root(mutates) in taken) or _keeps_statistics(node):
                inner.unproven.setdefault(node, described(node))
        if inner.unproven:
            raise Unproven(next(iter(inner.unproven.values())))
    raise Unproven


def _keeps_statistics(node: fx.Node) -> bool:
    """Return whether a nested operation is a batch norm in training, whose statistics nothing would make whole."""
    return kind_of(node.target) in NORMS and bool(node.args[5])


def _step(call: Call, rules: Mapping[str, Rule], mutates: fx.Node | None) -> None:
    samples, trace = call.samples, call.trace
    try:
        found = _judged(call, rules)
        if mutates is not None:
            _write(trace, samples, mutates, found[0])
    except (Unproven, KeyError, IndexError, TypeError, ValueError) as error:  # KeyError and the like: an unknown form
        inner = str(error) if isinstance(error, Unproven) else ""
        samples.unproven[call.node] = inner or described(call.node)
        found = tuple(_assumed(trace, value) for value in call.values)
        if mutates is not None:
            _spoil(trace, samples, mutates)
    samples.states[call.node] = found


def _judged(call: Call, rules: Mapping[str, Rule]) -> tuple[State, ...]:
    if call.odd_scalars() or call.counts_samples():
        raise Unproven
    if call.is_free():
        return (FREE,) * len(call.values)
    rule = rules["pointwise"] if call.pointwise else rules.get(call.kind) or rules.get(call.kind.rstrip("_"))
    if rule is None:
        raise Unproven
    found = rule(call)
    states = tuple(found) if isinstance(found, Sequence) else (found,) * len(call.values)
    if len(states) != len(call.values) or any(isinstance(state, Mixed) for state in states):
        raise Unproven
    for state, value in zip(states, call.values, strict=True):
        call.check(state, value)
        if call.draws() and not is_apart([state]):  # the numbers drawn for a sample depend on the place of its rows
            raise Unproven
    return states


def _assumed(trace: Trace, value: Value) -> State:
    """Return rows for an unproven operation's result if its shape suggests them; the operation itself is refused."""
    dims = value.batch_dims
    if len(dims) == 1 and (per := rows_per_sample(trace, value, dims[0])):
        return Rows(dims[0], per)
    return MIXED


def rows_per_sample(trace: Trace, value: Value, dim: int) -> int | None:
    """Return how many rows of a dimension a sample has, or None if the dimension is no multiple of the batch."""
    (low, high), (p, q) = (shape[dim] for shape in value.shapes), trace.probes
    return low // p if low % p == 0 and low // p * q == high and low >= p else None


def _write(trace: Trace, samples: SampleProof, target: fx.Node, result: State) -> None:
    """Let an operation write into memory that others see.

    What it writes must have the state of what was there.
    """
    root = memory_root(target)
    if root in trace.attributes:
        name = trace.attributes[root].name
        if not (isinstance(result, Free) and name.rpartition(".")[2] == "num_batches_tracked"):
            raise Unproven
    if _overlaps(trace.value(target)):
        raise Unproven
    before = samples.states[target][0]
    if isinstance(before, Rows) and isinstance(result, Rows):
        before, result = before.at(before.dim), result.at(result.dim)
    if before == result:
        _forget_values(samples, root)
        return
    if not isinstance(result, Inverse):  # an inverse is written whole, into memory of its own
        raise Unproven
    _spoil(trace, samples, target)
    samples.states[target] = (result,)


def _overlaps(value: Value) -> bool:
    """Return whether several elements share a place, as in an expanded tensor: all of them would be written at once."""
    return any(size > 1 and step == 0 for size, step in zip(value.shapes[0], value.stride, strict=True))


def _forget_values(samples: SampleProof, root: fx.Node) -> None:
    """Forget what was known from the values of a memory: how large they are, and which rows they pick or sort."""
    names = {root, root.args[0]} if root.target is operator.getitem else {root}  # keys or order, of a sort
    for node, states in samples.states.items():
        if any(isinstance(state, Rows) and state.below is not None for state in states) and memory_root(node) is root:
            samples.states[node] = tuple(replace(s, below=None) if isinstance(s, Rows) else s for s in states)
        if any((by := _identity(state)) is not None and memory_root(by) in names for state in states):
            samples.states[node] = (MIXED,) * len(states)


def _identity(state: State) -> fx.Node | None:
    """Return the mask or sort that a state refers to."""
    if isinstance(state, Rows):
        return state.order
    if isinstance(state, Listed):
        return state.mask
    return state.sort if isinstance(state, (Sorted, SortOrder, Inverse, Counts, Bounds)) else None


def _spoil(trace: Trace, samples: SampleProof, target: fx.Node) -> None:
    """Forget what was known of all tensors that may share memory with the target."""
    family = {target}
    for op in trace.ops:  # in execution order: views come after what they look at
        sources = [node for node in op.node.all_input_nodes if node in trace.values]
        if op.node in family:
            family |= set(sources[:1])
        elif any(node in family for node in sources[:1]):
            family.add(op.node)
    for node in family & samples.states.keys():
        samples.states[node] = (MIXED,) * len(samples.states[node])


class Call:
    """One operation as its rule sees it: its arguments by name, their states, and the shapes of its results."""

    def __init__(self, trace: Trace, samples: SampleProof, node: fx.Node, values: tuple[Value, ...]) -> None:
        self.trace, self.samples, self.node, self.values = trace, samples, node, values
        self.kind = kind_of(node.target)
        self.args: dict[str, Any] = arguments_of(node)

    @property
    def pointwise(self) -> bool:
        """Return whether torch says that each element of the result depends on the same element of the arguments."""
        return torch.Tag.pointwise in getattr(self.node.target, "tags", ())

    @property
    def rank(self) -> int:
        """Return the number of dimensions of the first result."""
        return len(self.values[0].shapes[0])

    @property
    def tensors(self) -> list[fx.Node]:
        """Return all tensors among the arguments."""
        return [node for node in self.node.all_input_nodes if node in self.trace.values]

    def state(self, node: Any) -> State:
        """Return the state of an argument; anything but a tensor is free."""
        if not isinstance(node, fx.Node) or node in self.trace.scalars:
            return FREE
        states = self.samples.states[node]
        if len(states) != 1:
            raise Unproven
        return states[0]

    def states(self, node: fx.Node) -> tuple[State, ...]:
        """Return all states of an argument with several results."""
        return self.samples.states[node]

    def of(self, name: str) -> State:
        """Return the state of a named argument."""
        return self.state(self.args.get(name))

    def value(self, node: fx.Node) -> Value:
        """Return the shapes of an argument."""
        return self.trace.value(node)

    def rank_of(self, node: fx.Node) -> int:
        """Return the number of dimensions of an argument."""
        return len(self.value(node).shapes[0])

    def size(self, node: fx.Node, dim: int) -> int | None:
        """Return a size if it does not depend on the batch, else None."""
        low, high = (shape[dim] for shape in self.value(node).shapes)
        return low if low == high else None

    def rows(self, node: Any) -> Rows:
        """Return the state of an argument that must be rows; raise Unproven if it is not."""
        state = self.state(node)
        if not isinstance(state, Rows):
            raise Unproven
        return state

    def free(self, *nodes: Any) -> None:
        """Require that arguments depend on no sample; raise Unproven if they do."""
        if not all(isinstance(self.state(node), Free) for node in nodes):
            raise Unproven

    def is_free(self) -> bool:
        """Return whether no input depends on the batch, and no output has its size."""
        states = (state for node in self.tensors for state in self.samples.states[node])
        sizes = any(map(self.batch_scalar, self.node.all_input_nodes)) or any(v.batch_dims for v in self.values)
        return not sizes and all(isinstance(s, Free) for s in states)

    def odd_scalars(self) -> bool:
        """Return whether a number is used that depends on data, or on the batch but not as a straight line."""
        return any(self.trace.scalars[n] is None for n in self.node.all_input_nodes if n in self.trace.scalars)

    def batch_scalar(self, argument: Any) -> bool:
        """Return whether a number depends on the batch."""
        numbers = self.trace.scalars.get(argument) if isinstance(argument, fx.Node) else None
        return numbers is not None and numbers[0] != numbers[1]

    def counts_samples(self) -> bool:
        """Return whether the batch size is an argument that is not a size: it would be a number like any other."""
        size = _SIZES.get(self.kind)
        others = [value for name, value in self.args.items() if name != size]
        return size != "*" and any(map(self.batch_scalar, pytree.tree_leaves(others)))

    def draws(self) -> bool:
        """Return whether the operation draws random numbers; dropout that drops nothing draws none."""
        rate = self.args.get("p", self.args.get("dropout_p"))
        off = self.args.get("train", True) is False or (isinstance(rate, (int, float)) and rate == 0)
        return torch.Tag.nondeterministic_seeded in getattr(self.node.target, "tags", ()) and not off

    def grown(self) -> State:
        """Return the state of a result whose elements are alike for all samples.

        It is rows if its shape has the batch once, and free if it has not.
        """
        dims = self.values[0].batch_dims
        if not dims:
            return FREE
        per = rows_per_sample(self.trace, self.values[0], dims[0])
        if len(dims) > 1 or per is None:
            raise Unproven
        return Rows(dims[0], per)

    def check(self, state: State, value: Value) -> None:
        """Require that a state fits the shape.

        What has rows must have them in the only dimension that grows with the batch.
        """
        dims = value.batch_dims
        if isinstance(state, (Rows, Position)):
            fits = dims == (state.dim,)
        else:
            fits = dims == (() if isinstance(state, (Free, Counts, Bounds)) else (0,))
        if isinstance(state, Rows) and state.order is None:
            fits = fits and rows_per_sample(self.trace, value, state.dim) == state.per * state.outer
        if not fits:
            raise Unproven
