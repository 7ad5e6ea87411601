"""Saves a captured model as a JSON file (`kind: model`), so that it can be planned where its code is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import FileError
from isthmus.files import Document, expecting, read_json, write_json
from isthmus.model.digest import digest_of
from isthmus.model.graph import Block, BlockGraph, Parameter, Tensor

__all__ = ["read_graph", "save_graph"]

_LARGEST = 64_000_000  # bytes of a file
_VERSION = 1
_WIDEST = 16  # bytes of one element: a complex number of two doubles
_BLOCK = ("forward_flops", "backward_flops", "saved", "moved", "weights_moved", "operations", "workspace")
_SPLIT = ("flops", "saved", "reduces", "elements", "heads")
_REMEDY = "Capture the model again where its code is, and save it with this version of Isthmus"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = "model"
    version: int = _VERSION
    graph: dict[str, Any]


def save_graph(graph: BlockGraph, path: Path | str) -> None:
    """Write the graph to a file, with its digest computed anew."""
    marked = msgspec.structs.replace(graph, digest=digest_of(graph))
    write_json(path, _File(graph=_plain(marked)))


def read_graph(path: Path | str) -> BlockGraph:
    """Read what `save_graph` wrote; refuse anything else, including a graph that was edited afterwards."""
    with expecting(path, "model"):
        plain = read_json(path, _File, kind="model", version=_VERSION, limit=_LARGEST).graph
    graph = Document(name=str(path), value=plain).convert(BlockGraph)
    if _plain(graph) != {"unreached": [], **plain}:  # older files have no unreached parameters
        raise FileError("the model has fields that this program does not know", where=str(path), next=_REMEDY)
    for fault in _faults(graph):
        raise FileError(fault, where=str(path), next=_REMEDY)
    return graph


def _plain(graph: BlockGraph) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(graph))
    return plain


def _faults(graph: BlockGraph) -> Iterator[str]:
    """Yield the faults that would mislead a planner, the most telling first; a captured graph has none."""
    if graph.digest != digest_of(graph):
        yield "the model does not match its digest: the file was changed after it was written"
    if not graph.blocks:
        yield "the model has no blocks"
    if len(graph.by_name) < len(graph.blocks) or len(graph.parameter) < len(graph.parameters):
        yield "two blocks or two parameters have the same name"
    if bad := _bad_figures(graph, "buffers", "outputs"):
        yield f"the model has {bad}"
    for block in graph.blocks:
        yield from _block_faults(block, graph)
    for parameter in graph.parameters:
        yield from _parameter_faults(parameter)
    for tensor in graph.tensors:
        yield from _tensor_faults(tensor, len(graph.blocks))


def _bad_figures(thing: msgspec.Struct, *fields: str) -> str:
    """Return the first of the fields that is not a figure of 0 or more, as text, or "" if there is none."""
    values = ((field, getattr(thing, field)) for field in fields)
    return next((f"{field} {value}" for field, value in values if not 0 <= value < math.inf), "")


def _nameable(name: str) -> bool:
    """Return whether a name is visible text that a sync cannot take for `[block]`."""
    return name.isprintable() and name.strip() != "" and not name.startswith("[")


def _block_faults(block: Block, graph: BlockGraph) -> Iterator[str]:
    if not _nameable(block.name):
        yield f"a block has the name {block.name[:60]!r}"
    if missing := set(block.parameters) - graph.parameter.keys():
        yield f"block {block.name} uses the parameter {min(missing)}, which is not listed"
    if len(set(block.parameters)) < len(block.parameters):
        yield f"block {block.name} lists a parameter twice"
    if bad := _bad_figures(block, *_BLOCK):
        yield f"block {block.name} has {bad}"
    if block.tensor is not None:
        if unknown := set(block.tensor.parameters) - set(block.parameters):
            yield f"block {block.name} splits the parameter {min(unknown)}, which is not its own"
        if bad := _bad_figures(block.tensor, *_SPLIT):
            yield f"the tensor split of block {block.name} has {bad}"


def _parameter_faults(parameter: Parameter) -> Iterator[str]:
    if not _nameable(parameter.name):
        yield f"a parameter has the name {parameter.name[:60]!r}"
    if min(parameter.shape, default=0) < 0 or parameter.elements != math.prod(parameter.shape):
        yield f"parameter {parameter.name} has {parameter.elements} elements in the shape {parameter.shape}"
    if parameter.linear is not None and (bad := _bad_figures(parameter.linear, "rows", "inputs", "outputs")):
        yield f"the linear layer of parameter {parameter.name} has {bad}"


def _tensor_faults(tensor: Tensor, blocks: int) -> Iterator[str]:
    inside = all(tensor.source < target < blocks for target in tensor.targets)
    if tensor.source < -1 or not inside or len(set(tensor.targets)) < len(tensor.targets):
        yield f"tensor {tensor.name} goes from block {tensor.source} to {tensor.targets} of {blocks}"
    if bad := _bad_figures(tensor, "elements", "fixed"):
        yield f"tensor {tensor.name} has {bad}"
    if tensor.width is not None and not 1 <= tensor.width <= _WIDEST:
        yield f"tensor {tensor.name} has elements of {tensor.width} bytes"
