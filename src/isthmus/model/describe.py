"""Describes a cut trace as the BlockGraph that planners read."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from isthmus.model.costs import kept_by, moved_by, weights_moved_by
from isthmus.model.digest import digest_of
from isthmus.model.graph import NORMS, Block, BlockGraph, Linear, Parameter, Tensor, TensorSplit
from isthmus.model.samples.proof import described, is_apart
from isthmus.model.sections import Section, Sections
from isthmus.model.tensor_parallel.linear_pairs import Pair
from isthmus.model.trace import Op, Trace

__all__ = ["describe", "parameters_of", "tensor_names", "untrained_elements"]


def describe(model: nn.Module, cut: Sections, *, name: str, sequence: int | None) -> BlockGraph:
    """Return the block graph, which says what every block costs and what flows between the blocks."""
    names = _block_names(cut)
    kept = _kept_by_section(cut)
    blocks = tuple(_block(cut, section, names[i], kept[i]) for i, section in enumerate(cut.sections))
    graph = BlockGraph(
        name=name,
        blocks=blocks,
        tensors=tuple(_tensors(cut)),
        parameters=parameters_of(model, blocks, _linears(cut)),
        sequence=sequence,
        buffers=untrained_elements(model),
        outputs=_outputs(cut.trace),
        how="export",
        unreached=cut.trace.unreached,
    )
    return msgspec.structs.replace(graph, digest=digest_of(graph))


def _outputs(trace: Trace) -> float:
    """Return the elements per sample of the first result with numbers, which is what a loss reads.

    Later results are caches and the like.
    """
    values = (trace.values[node][0] for node in trace.outputs if isinstance(node, fx.Node) and node in trace.values)
    return next((value.size.slope for value in values if value.floating), 0.0)


def untrained_elements(model: nn.Module) -> int:
    """Return the elements of buffers, and of parameters that are frozen."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return sum(tensor.numel() for tensor in (*model.buffers(), *frozen))


def parameters_of(model: nn.Module, blocks: Sequence[Block], linears: dict[str, Linear]) -> tuple[Parameter, ...]:
    """Return the trained tensors in the model's own order, each under its first name.

    A parameter that no block uses is not trained.
    """
    used = {name for block in blocks for name in block.parameters}
    names: dict[int, list[str]] = {}
    trained = [(n, p) for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    for name, parameter in trained:
        names.setdefault(id(parameter), []).append(name)
    first = {ties[0]: ties for ties in names.values()}
    return tuple(
        Parameter(
            name=name,
            elements=parameter.numel(),
            shape=tuple(parameter.shape),
            ties=tuple(first[name][1:]),
            linear=linears.get(name),
        )
        for name, parameter in trained
        if name in first and name in used
    )


def _linears(cut: Sections) -> dict[str, Linear]:
    """Return the weights that exactly one operation uses, as matrix products."""
    count = Counter(name for op in cut.trace.ops for name in op.parameters)
    sizes = {a.name: a.content.numel() for a in cut.trace.attributes.values() if a.kind == "parameter"}
    return {
        use.weight: Linear(
            rows=cut.trace.value(use.source).size.slope / use.inputs, inputs=use.inputs, outputs=use.outputs
        )
        for use in cut.uses.values()
        if count[use.weight] == 1 and sizes[use.weight] == use.inputs * use.outputs
    }


def _block(cut: Sections, section: Section, name: str, kept: dict[fx.Node, float]) -> Block:
    trace, flow = cut.trace, cut.flow
    parameters = tuple(dict.fromkeys(p for op in section.ops for p in op.parameters))
    block = Block(
        name=name,
        digest="",
        parameters=parameters,
        forward_flops=sum(cut.flops[op.node][0] for op in section.ops),
        backward_flops=sum(cut.flops[op.node][1] for op in section.ops),
        saved=sum(kept.values()),
        moved=sum(moved_by(trace, flow, op) for op in section.local),
        weights_moved=sum(weights_moved_by(trace, flow, op) for op in section.ops),
        operations=sum(op.node not in flow.views for op in section.local),
        workspace=_workspace(cut, section, kept),
        mixes_samples=_mixing(cut, section),
        tensor=_tensor_split(cut, section, kept),
    )
    return msgspec.structs.replace(block, digest=_block_digest(cut, section, block))


def _mixing(cut: Sections, section: Section) -> tuple[str, ...]:
    """Return why this section may mix samples.

    These are operations that mix samples or are not proven not to, and boundary tensors that no plan can cut.
    """
    flow = cut.flow
    found = [flow.mixing[op.node] for op in section.local if op.node in flow.mixing]
    for node in (*section.incoming, *section.outgoing):
        if not is_apart(flow.samples[node]) and node not in flow.mixing:
            found.append(described(node))
    return tuple(dict.fromkeys(found))


def _kept_by_section(cut: Sections) -> list[dict[fx.Node, float]]:
    """Return the elements kept for backward in each section, by the operation (or input) whose memory it is.

    Each memory counts once in the whole model: in the first later block that keeps it, or else where it was made.
    Several kept views of one memory together count as at most that memory.
    """
    trace, flow = cut.trace, cut.flow
    views: list[dict[fx.Node | str, dict[fx.Node, float]]] = []
    for section in cut.sections:
        views.append({})
        for op in section.ops:
            for kept in kept_by(trace, flow, op):
                views[-1].setdefault(kept.root, {})[kept.node] = kept.elements
    home = {op.node: index for index, section in enumerate(cut.sections) for op in section.ops}
    holder: dict[fx.Node | str, int] = {}
    for index, found in enumerate(views):
        for root in found:
            if root not in holder or holder[root] == home.get(root):  # type: ignore[arg-type]
                holder[root] = index
    result: list[dict[fx.Node, float]] = [{} for _ in cut.sections]
    for root, index in holder.items():
        union = {node: size for found in views for node, size in found.get(root, {}).items()}
        whole = sum(v.size.slope * v.weight for v in trace.values[root]) if isinstance(root, fx.Node) else math.inf
        key = root if isinstance(root, fx.Node) else next(iter(union))
        result[index][key] = result[index].get(key, 0.0) + min(whole, sum(union.values()))
    return result


def _workspace(cut: Sections, section: Section, kept: dict[fx.Node, float]) -> float:
    """Return the largest sum, over one operation, of inputs and results that are not kept anyway."""
    trace, flow = cut.trace, cut.flow

    def size(op: Op) -> float:
        roots = {flow.root[node] for node in (*op.reads, op.node)} - set(kept)
        return sum(
            v.size.slope * v.weight for root in roots if root not in trace.attributes for v in trace.values[root]
        )

    return max((size(op) for op in section.ops if op.node not in flow.views), default=0.0)


def _tensor_split(cut: Sections, section: Section, kept: dict[fx.Node, float]) -> TensorSplit | None:
    here = {op.node for op in section.ops}
    splits = [split for split in cut.splits if split.pair.row.op.node in here]
    if not splits:
        return None
    pairs = [split.pair for split in splits]
    divided = {node for pair in pairs for node in pair.nodes if node is not pair.row.op.node}
    return TensorSplit(
        parameters=tuple(name for pair in pairs for name in pair.parameters),
        flops=sum(cut.flops[node][0] for pair in pairs for node in pair.nodes),
        saved=sum(size for node, size in kept.items() if node in divided),
        reduces=len(pairs),
        elements=sum(_row_elements(cut.trace, pair) for pair in pairs) / len(pairs),
        heads=math.gcd(*(split.limit for split in splits)),
    )


def _row_elements(trace: Trace, pair: Pair) -> float:
    return trace.value(pair.row.op.node).size.slope


def _tensors(cut: Sections) -> list[Tensor]:
    """Return every value that a block takes from outside, model inputs first."""
    targets: dict[fx.Node, list[int]] = {}
    for index, section in enumerate(cut.sections):
        for node in section.incoming:
            targets.setdefault(node, []).append(index)
    home = {op.node: index for index, section in enumerate(cut.sections) for op in section.ops}
    nodes = [*(n for n in cut.trace.inputs if n in targets), *(op.node for op in cut.trace.ops if op.node in targets)]
    names = tensor_names(cut)
    return [_tensor(cut, node, names[node], home.get(node, -1), targets[node]) for node in nodes]


def tensor_names(cut: Sections) -> dict[fx.Node, str]:
    """Return the names of model inputs, and of other tensors by the block that gives them: `transformer.h.0.attn:0`."""
    names = {node: node.name for node in cut.trace.inputs}
    for block, section in zip(_block_names(cut), cut.sections, strict=True):
        names |= {node: f"{block}:{position}" for position, node in enumerate(section.outgoing)}
    return names


def _tensor(cut: Sections, node: fx.Node, name: str, source: int, targets: list[int]) -> Tensor:
    value = cut.trace.value(node)
    return Tensor(
        name=name,
        source=source,
        targets=tuple(targets),
        elements=value.size.slope,
        fixed=value.size.fixed,
        width=value.width,
        split=cut.flow.split[node],
        grad=cut.flow.grad[node],
    )


def _block_names(cut: Sections) -> list[str]:
    """Return the name of each block: the module that its products come from, or else its parameters.

    A name that occurs again gets `#2` and so on.
    """
    names: list[str] = []
    seen: Counter[str] = Counter()
    for section in cut.sections:
        working = [op for op in section.ops if cut.flops[op.node][0] > 0] or [op for op in section.ops if op.parameters]
        modules = [op.module for op in working or section.ops]
        name = _common(modules) or next((m for m in modules if m), section.ops[0].kind)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


def _common(paths: list[str]) -> str:
    """Return the longest common prefix of module paths."""
    shortest, longest = min(parts := [path.split(".") for path in paths]), max(parts)
    count = next((i for i, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest))
    return ".".join(shortest[:count])


def _block_digest(cut: Sections, section: Section, block: Block) -> str:
    """Return the sha256 over the block's operations with their arguments and shapes, and over its costs, without names.

    Devices and dtypes are left out: models choose them by where they run, and a job's precision changes them anyway.
    """
    trace = cut.trace
    place: dict[fx.Node, str] = {node: f"in{i} {_shape(trace, node)}" for i, node in enumerate(section.incoming)}
    computing = []
    for op in section.local:
        source = _unchanged(cut, op)
        if source is None:
            computing.append(op)
        place[op.node] = place[source] if source in place else f"op{len(computing)}"

    def text(argument: Any) -> Any:
        if isinstance(argument, (torch.device, torch.dtype)):
            return type(argument).__name__
        if not isinstance(argument, fx.Node):
            return argument
        if argument in place:
            return place[argument]
        if argument in trace.scalars:
            return f"size{trace.scalars[argument]}"
        return f"{trace.attributes[argument].kind} {_shape(trace, argument)}"

    lines = [
        f"{op.node.target} {map_aggregate((op.node.args, op.node.kwargs), text)} {_shape(trace, op.node)}"
        for op in computing
    ]
    lines.append(f"gives {[place[node] for node in section.outgoing]}")
    norms = tuple(operation for operation in block.mixes_samples if operation in NORMS)
    bare = msgspec.structs.replace(block, name="", digest="", parameters=(), tensor=None, mixes_samples=norms)
    return hashlib.sha256("\n".join([*lines, repr(bare)]).encode()).hexdigest()


def _unchanged(cut: Sections, op: Op) -> fx.Node | None:
    """Return the source of an operation that returns it as it is, or None for other operations.

    Whether such an operation is recorded differs between devices.
    """
    source = op.node.args[0] if op.node.args else None
    if op.node not in cut.flow.views or op.kind not in ("contiguous", "to", "_to_copy", "detach", "alias"):
        return None
    return source if isinstance(source, fx.Node) else None


def _shape(trace: Trace, node: fx.Node) -> str:
    return " ".join(str(value.shapes) for value in trace.values.get(node, ()))
