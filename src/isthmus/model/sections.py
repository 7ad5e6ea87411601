"""Cuts a trace into sections: which operations each block runs, and which tensors it takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from isthmus.errors import ModelError
from isthmus.model.blocks import Item, choose_blocks
from isthmus.model.costs import backward_flops, forward_flops
from isthmus.model.flow import TraceFlow, flow_of
from isthmus.model.samples.proof import Mixed, State, is_apart
from isthmus.model.tensor_parallel.divide_pair import PairSplit, split_pairs
from isthmus.model.tensor_parallel.linear_pairs import LinearUse, Pair, find_pairs, linear_uses
from isthmus.model.trace import Op, Trace

__all__ = ["Section", "Sections", "cut_trace"]

_FEW = 8  # samples over which a tensor of fixed size is spread when places to cut are compared


@dataclass(frozen=True)
class Section:
    """One block: its operations, the constants it computes for itself, and the tensors it exchanges."""

    ops: tuple[Op, ...]
    constants: tuple[Op, ...]
    incoming: tuple[fx.Node, ...]
    outgoing: tuple[fx.Node, ...]  # for later blocks or the model's output

    @property
    def local(self) -> list[Op]:
        """Return all operations, in execution order."""
        return sorted((*self.ops, *self.constants), key=lambda op: op.index)


@dataclass(frozen=True, eq=False)
class Sections:
    """A whole cut, with everything that was found out on the way."""

    trace: Trace
    flow: TraceFlow
    uses: dict[fx.Node, LinearUse]
    splits: tuple[PairSplit, ...]  # what a tensor group can divide
    flops: dict[fx.Node, tuple[float, float]]  # forward, backward
    sections: tuple[Section, ...]


def cut_trace(trace: Trace, max_blocks: int) -> Sections:
    """Cut a trace into at most `max_blocks` sections."""
    flow = flow_of(trace)
    uses = linear_uses(trace, flow)
    pairs = find_pairs(trace, flow, uses)
    splits = split_pairs(trace, flow, pairs)
    flops = {op.node: (forward_flops(trace, op), backward_flops(trace, flow, op)) for op in trace.ops}
    main = [op for op in trace.ops if op.node not in flow.constant]
    if not main:
        raise ModelError("the model computes nothing from its inputs", expected="at least one operation on an input")
    number = {op.node: index for index, op in enumerate(main)}
    joins = [[number[node] for node in nodes if node in number] for nodes in _joins(trace, flow, pairs, splits)]
    runs = choose_blocks(_items(trace, main, number, flops), joins + _silent(trace, main), max_blocks)
    parts = [[main[index] for index in sorted(run)] for run in runs]
    return Sections(trace, flow, uses, tuple(splits), flops, _sections(trace, flow, parts))


def _items(
    trace: Trace, main: list[Op], number: dict[fx.Node, int], flops: dict[fx.Node, tuple[float, float]]
) -> list[Item]:
    work = max(sum(sum(flops[op.node]) for op in main), 1.0)
    owned = _owned(trace, main)
    elements = max(sum(owned.values()), 1.0)
    return [
        Item(
            reads=tuple(number[node] for node in op.reads if node in number),
            share=(sum(flops[op.node]) / work + owned.get(op.node, 0.0) / elements) / 2,
            elements=sum(value.weight * (value.size.slope + value.size.fixed / _FEW) for value in op.values),
            heavy=any(v.batch_dims for v in op.values) and (flops[op.node][0] > 0 or op.kind == "embedding"),
            module=op.module,
        )
        for op in main
    ]


def _owned(trace: Trace, main: list[Op]) -> dict[fx.Node, float]:
    """Return the parameter elements of each operation; a tied parameter counts where it is first used."""
    sizes = {a.name: float(a.content.numel()) for a in trace.attributes.values() if a.kind == "parameter"}
    owned: dict[fx.Node, float] = {}
    for op in main:
        owned[op.node] = sum(sizes.pop(name, 0.0) for name in op.parameters)
    return owned


def _joins(trace: Trace, flow: TraceFlow, pairs: list[Pair], splits: list[PairSplit]) -> list[list[fx.Node]]:
    """Return the groups of nodes that no cut may separate.

    The groups are: layer pairs and their weights; tuples and their items; a memory and what writes into it; and tensors
    whose samples do not lie one after another, with all that reads them.
    """
    joins = [list(pair.nodes) for pair in pairs] + [split.nodes for split in splits]
    joins += [[op.node, *op.node.args[:1]] for op in trace.ops if op.kind == "getitem"]  # type: ignore[list-item]
    joins += [[op.node, *_readers(trace, op.node)] for op in trace.ops if _stays_whole(flow.samples[op.node])]
    written = {flow.root[op.node] for op in trace.ops if op.mutates is not None}
    for root in written - set(trace.attributes):
        joins.append(_written_together(trace, flow, root))
    return joins


def _stays_whole(states: tuple[State, ...]) -> bool:
    """Return whether a tensor cannot be cut between its samples, although it is known how it depends on them.

    Tensors of which that is not known are refused anyway.
    """
    return not is_apart(states) and not any(isinstance(state, Mixed) for state in states)


def _readers(trace: Trace, node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user in trace.op]


def _written_together(trace: Trace, flow: TraceFlow, root: fx.Node) -> list[fx.Node]:
    """Return the nodes that share a memory up to its last writer, and later readers of the earlier ones.

    These readers see what was written.
    """
    sharing = [op for op in trace.ops if flow.root[op.node] is root]
    last = max(op.index for op in sharing if op.mutates is not None)
    early = {op.node for op in sharing if op.index < last}
    late = [op.node for op in trace.ops if op.index > last and not early.isdisjoint(op.reads)]
    return [*early, *late, *(op.node for op in sharing if op.index == last)]


def _silent(trace: Trace, main: list[Op]) -> list[list[int]]:
    """Return operations that only change state (counters of batch norm), each joined with its neighbour."""
    read = {node for op in trace.ops for node in op.reads} | {n for n in trace.outputs if isinstance(n, fx.Node)}
    last = len(main) - 1
    return [[i, i + 1 if i < last else i - 1] for i, op in enumerate(main) if op.node not in read and last > 0]


def _sections(trace: Trace, flow: TraceFlow, parts: list[list[Op]]) -> tuple[Section, ...]:
    home = {op.node: index for index, part in enumerate(parts) for op in part}
    results = [node for node in trace.outputs if isinstance(node, fx.Node)]
    sections = []
    taken = [_taken(trace, flow, part, home, index) for index, part in enumerate(parts)]
    for index, part in enumerate(parts):
        constants = taken[index][1]
        last = index == len(parts) - 1
        given = {node for other in range(index + 1, len(parts)) for node in taken[other][0]} | set(results)
        outgoing = [op.node for op in part if op.node in given]
        if last:
            fixed = [node for node in dict.fromkeys(results) if node in flow.constant]
            constants = _constants(trace, flow, [*(op.node for op in constants), *fixed])
            outgoing += fixed
        sections.append(Section(tuple(part), tuple(constants), tuple(taken[index][0]), tuple(outgoing)))
    return tuple(sections)


def _taken(
    trace: Trace, flow: TraceFlow, part: list[Op], home: dict[fx.Node, int], index: int
) -> tuple[list[fx.Node], list[Op]]:
    """Return the tensors that a part needs from outside, model inputs first, and the constants that it computes."""
    constants = _constants(trace, flow, [node for op in part for node in op.reads if node in flow.constant])
    reads = dict.fromkeys(node for op in part for node in op.reads if node not in flow.constant)
    incoming = [node for node in reads if home.get(node, -1) != index]
    if _needs_batch(trace, [*part, *constants]) and not any(_shows_batch(trace, node) for node in incoming):
        incoming.append(trace.inputs[0])
    order = {node: position for position, node in enumerate([*trace.inputs, *(op.node for op in trace.ops)])}
    return sorted(incoming, key=order.__getitem__), constants


def _constants(trace: Trace, flow: TraceFlow, wanted: list[fx.Node]) -> list[Op]:
    """Return the wanted constants with all that they are computed from, and everything that writes into them."""
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in flow.constant:
        if trace.op[node].mutates is not None:
            writers.setdefault(flow.root[node], []).append(node)
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [*trace.op[node].reads, *writers.get(flow.root[node], [])]
    return sorted((trace.op[node] for node in found), key=lambda op: op.index)


def _needs_batch(trace: Trace, ops: list[Op]) -> bool:
    """Return whether one of the operations takes a number that depends on the batch."""
    scalars = [trace.scalars[node] for op in ops for node in op.node.all_input_nodes if node in trace.scalars]
    return any(scalar is None or scalar[0] != scalar[1] for scalar in scalars)


def _shows_batch(trace: Trace, node: fx.Node) -> bool:
    return trace.probes in zip(*trace.value(node).shapes, strict=True)
