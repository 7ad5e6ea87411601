"""A captured model as a JSON file (`kind: model`), so that a plan can be made where the model's code is not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import FileError
from isthmus.files import Document, read_json, write_json
from isthmus.model.digest import digest_of
from isthmus.model.graph import BlockGraph, Parameter, Tensor

__all__ = ["read_graph", "save_graph"]

_LARGEST = 64_000_000  # bytes of a file
_VERSION = 1
_REMEDY = "Capture the model again where its code is, and save it with this version of Isthmus"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = "model"
    version: int = _VERSION
    graph: dict[str, Any]


def save_graph(graph: BlockGraph, path: Path | str) -> None:
    """Writes the graph with its digest as computed now."""
    marked = msgspec.structs.replace(graph, digest=digest_of(graph))
    write_json(path, _File(graph=_plain(marked)))


def read_graph(path: Path | str) -> BlockGraph:
    """Reads what `save_graph` wrote; anything else is refused, a graph that was edited afterwards too."""
    plain = read_json(path, _File, kind="model", version=_VERSION, limit=_LARGEST).graph
    graph = Document(name=str(path), value=plain).convert(BlockGraph)
    if _plain(graph) != plain:
        raise FileError("the model has fields that this program does not know", where=str(path), next=_REMEDY)
    for fault in _faults(graph):
        raise FileError(fault, where=str(path), next=_REMEDY)
    return graph


def _plain(graph: BlockGraph) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(graph))
    return plain


def _faults(graph: BlockGraph) -> Iterator[str]:
    """What would lead a planner astray, most telling first; none for a graph that a capture made."""
    if graph.digest != digest_of(graph):
        yield "the model does not match its digest: the file was changed after it was written"
    if not graph.blocks:
        yield "the model has no blocks"
    if len(graph.by_name) < len(graph.blocks) or len(graph.parameter) < len(graph.parameters):
        yield "two blocks or two parameters have the same name"
    for block in graph.blocks:
        if missing := set(block.parameters) - graph.parameter.keys():
            yield f"block {block.name} uses the parameter {min(missing)}, which is not listed"
    yield from (fault for parameter in graph.parameters if (fault := _parameter_fault(parameter)))
    yield from (fault for tensor in graph.tensors if (fault := _tensor_fault(tensor, len(graph.blocks))))


def _parameter_fault(parameter: Parameter) -> str | None:
    if min(parameter.shape, default=0) < 0 or parameter.elements != math.prod(parameter.shape):
        return f"parameter {parameter.name} has {parameter.elements} elements in the shape {parameter.shape}"
    return None


def _tensor_fault(tensor: Tensor, blocks: int) -> str | None:
    inside = all(tensor.source < target < blocks for target in tensor.targets)
    if tensor.source < -1 or not inside:
        return f"tensor {tensor.name} goes from block {tensor.source} to {tensor.targets} of {blocks}"
    if tensor.elements < 0 or tensor.fixed < 0:
        return f"tensor {tensor.name} has {tensor.elements} elements per sample and {tensor.fixed} in all"
    return None
