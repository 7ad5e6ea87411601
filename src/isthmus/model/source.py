"""Finds a model by its name, and makes its block graph. The forms of a name:

zoo:NAME                    a built-in model
hf:CONFIG.json              a transformers configuration on this machine
package.module:function     a function that returns a module, or a module and example inputs
MODEL.json                  a captured model, saved before; no code runs
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from isthmus.errors import ModelError
from isthmus.files import wrong_kind
from isthmus.model import cache as store
from isthmus.model import hf, zoo
from isthmus.model.digest import digest_of
from isthmus.model.graph import UNMEASURED, BlockGraph
from isthmus.model.parameter_groups import freeze
from isthmus.model.saved import read_graph, save_graph

if TYPE_CHECKING:
    from isthmus.model.built import BuiltModel

__all__ = [
    "Config",
    "Function",
    "SavedModel",
    "Source",
    "Zoo",
    "build",
    "load_graph",
    "parse",
    "read_graph",
    "save_graph",
]

_FUNCTION = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)", re.ASCII)
_FORMS = "zoo:NAME, hf:CONFIG.json, package.module:function or a saved MODEL.json"
_CODE = "zoo:NAME, hf:CONFIG.json or package.module:function"
_EXAMPLE_BATCH = 2
_MEASURED_BYTES = 4 << 30  # of weights: larger models are not built to be measured


class Zoo(msgspec.Struct, frozen=True, kw_only=True):
    """A built-in model."""

    name: str


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A transformers configuration."""

    path: Path


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the user wrote."""

    module: str
    function: str


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A file that holds a captured model."""

    path: Path


Source = Zoo | Config | Function | SavedModel


def parse(spec: str) -> Source:
    """Parse a model's name; nothing is imported, read or built yet, but a zoo name must exist."""
    kind, _, rest = spec.partition(":")
    if kind == "zoo":
        zoo.sequence_of(rest)
        return Zoo(name=rest)
    if kind == "hf" and rest:
        return Config(path=Path(rest))
    if match := _FUNCTION.fullmatch(spec):
        return Function(module=match[1], function=match[2])
    if spec.endswith(".json"):
        return SavedModel(path=Path(spec))
    other = wrong_kind(spec, "model", error=ModelError, instead=_FORMS)
    if other is not None and spec not in zoo.names():
        raise other
    near = difflib.get_close_matches(spec, zoo.names(), n=1) or ["gpt2"]
    raise ModelError("This names no model", found=repr(spec[:80]), expected=_FORMS, next=f"Try zoo:{near[0]}")


def build(spec: str, sequence: int | None = None, frozen: Sequence[str] = ()) -> BuiltModel:
    """Build the model on torch's current default device; parameters that match a pattern of `frozen` do not train."""
    return _build(parse(spec), sequence, frozen)


def load_graph(
    spec: str,
    *,
    sequence: int | None = None,
    frozen: Sequence[str] = (),
    cache: bool = True,
    capturing: Callable[[], None] = lambda: None,
) -> BlockGraph:
    """Return the block graph of a model from its file or from the cache, or by capture.

    A model is captured on the meta device and its graph stored in the cache. `capturing` is called if the model is
    captured. Parameters that match a pattern of `frozen` are captured as untrained.
    """
    source = parse(spec)
    if isinstance(source, SavedModel):
        return _read_saved(source.path, sequence, frozen)
    built = _on_meta(source, sequence, frozen) if isinstance(source, Function) or not cache else None
    key = _key(source, sequence, frozen, built) if cache else None
    graph = _cached(key)
    if graph is None:
        capturing()
        graph = _capture(built or _on_meta(source, sequence, frozen))
        if any(UNMEASURED in block.unproven for block in graph.blocks) and _bytes(graph) <= _MEASURED_BYTES:
            graph = _capture(_build(source, sequence, frozen))  # with weights, to measure that samples stay apart
        if key:
            store.write(key, msgspec.json.encode(graph))
    return msgspec.structs.replace(graph, name=_name(source))


def _read_saved(path: Path, sequence: int | None, frozen: Sequence[str]) -> BlockGraph:
    graph = read_graph(path)
    if frozen:
        raise ModelError(
            "a captured model cannot be frozen afterwards",
            where=str(path),
            found=f"frozen: {', '.join(frozen)}",
            next="Name the model's code in the job, or capture it with requires_grad False",
        )
    if sequence not in (None, graph.sequence):
        raise ModelError(
            "The model was captured for another sequence",
            where=str(path),
            found=f"sequence {graph.sequence}",
            expected=f"sequence {sequence}",
            next="Capture it again from its code",
        )
    return graph


def _cached(key: str | None) -> BlockGraph | None:
    """Return the stored graph; a broken entry counts as none and will be written again."""
    data = store.read(key) if key else None
    try:
        graph = msgspec.json.decode(data, type=BlockGraph) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return graph if graph and graph.digest == digest_of(graph) else None


def _bytes(graph: BlockGraph) -> int:
    return 4 * (graph.elements + graph.buffers)


def _capture(built: BuiltModel) -> BlockGraph:
    from isthmus.model.capture import capture

    first = next(built.module.parameters(), None)
    example = built.example(_EXAMPLE_BATCH, device="meta" if first is None else first.device)
    return capture(built.module, example, name=built.name, sequence=built.sequence)


def _key(source: Source, sequence: int | None, frozen: Sequence[str], built: BuiltModel | None) -> str | None:
    """Return a hash of everything that the capture depends on, or None if that cannot be told."""
    if isinstance(source, Zoo):
        length = zoo.sequence_of(source.name, sequence)
        return store.content_key(
            ["zoo", source.name, str(length), store.versions("torch"), store.model_code(), *frozen]
        )
    if isinstance(source, Config):
        versions = store.versions("torch", "transformers")
        return store.content_key(
            ["hf", hf.read_config(source.path), str(sequence), versions, store.model_code(), *frozen]
        )
    if built is None:
        return None
    from isthmus.model.fingerprint import fingerprint

    seen = fingerprint(built.module, built.example(_EXAMPLE_BATCH, device="meta"))
    return store.content_key(["function", seen, str(built.sequence), store.model_code(), *frozen]) if seen else None


def _name(source: Zoo | Config | Function) -> str:
    match source:
        case Zoo(name=name):
            return name
        case Config(path=path):
            return hf.name_of(path)
        case Function(module=module, function=function):
            return f"{module}:{function}"


def _on_meta(source: Source, sequence: int | None, frozen: Sequence[str]) -> BuiltModel:
    import torch

    with torch.device("meta"):
        return _build(source, sequence, frozen)


def _build(source: Source, sequence: int | None, frozen: Sequence[str] = ()) -> BuiltModel:
    built = _built(source, sequence)
    freeze(built.module, frozen, built.name)
    return built


def _built(source: Source, sequence: int | None) -> BuiltModel:
    match source:
        case Zoo(name=name):
            return zoo.build(name, sequence)
        case Config(path=path):
            return hf.build(path, sequence)
        case Function():
            from isthmus.model import function

            return function.build(source.module, source.function, sequence)
        case SavedModel(path=path):
            raise wrong_kind(path, "model", error=ModelError, instead=_CODE) or ModelError(
                "A saved model has no code to build", where=str(path), next=f"Name the model's code: {_CODE}"
            )
