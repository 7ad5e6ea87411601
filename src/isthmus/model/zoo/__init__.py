"""Built-in models, by name. Importing this module imports no torch; building a model does."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from isthmus.errors import ModelError

if TYPE_CHECKING:
    from isthmus.model.built import BuiltModel

__all__ = ["build", "names", "sequence_of"]


class _Entry(NamedTuple):
    """`builder` is module.function of this package; `config` its arguments; `sequence` None: the model has none."""

    builder: str
    sequence: int | None
    config: Mapping[str, Any]


def _gpt(layers: int, width: int, heads: int, longest: int, **others: float) -> _Entry:
    config = {"layers": layers, "width": width, "heads": heads, "longest": longest, **others}
    return _Entry("gpt.gpt", longest, config)


def _llama(layers: int, width: int, heads: int, kv_heads: int, inner: int) -> _Entry:
    config = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "inner": inner}
    return _Entry("llama.llama", 8192, config)


# GPT-3 as in table 2.1 of its paper, whose widths and heads do not multiply out in two rows: 1.3b is given 24 heads
# of 128 at width 2048 (here 16), 13b the width 5140 (here 40 heads of 128 = 5120).
_TABLE: Mapping[str, _Entry] = MappingProxyType(
    {
        "vgg19": _Entry("vision.vgg", None, {"convolutions": (2, 2, 4, 4, 4)}),
        "resnet101": _Entry("vision.resnet", None, {"bottlenecks": (3, 4, 23, 3)}),
        "bert-large": _Entry("bert.bert", 512, {"layers": 24, "width": 1024, "heads": 16, "longest": 512}),
        "gpt2": _gpt(12, 768, 12, 1024),
        "gpt2-medium": _gpt(24, 1024, 16, 1024),
        "gpt2-large": _gpt(36, 1280, 20, 1024),
        "gpt2-xl": _gpt(48, 1600, 25, 1024),
        "gpt3-1.3b": _gpt(24, 2048, 16, 2048, dropout=0.0),
        "gpt3-2.7b": _gpt(32, 2560, 32, 2048, dropout=0.0),
        "gpt3-6.7b": _gpt(32, 4096, 32, 2048, dropout=0.0),
        "gpt3-13b": _gpt(40, 5120, 40, 2048, dropout=0.0),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, dropout=0.0),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336),
        "llama3-70b": _llama(80, 8192, 64, 8, 28672),
        "gpt-tiny": _gpt(6, 256, 8, 128, vocabulary=256, dropout=0.0),
        "mlp-tiny": _Entry("tiny.mlp", None, {"features": 64, "width": 256, "layers": 4}),
        "cnn-tiny": _Entry("tiny.cnn", None, {"size": 32, "channels": (32, 64, 128)}),
    }
)


def names() -> tuple[str, ...]:
    """All models of the zoo."""
    return tuple(_TABLE)


def sequence_of(name: str, sequence: int | None = None) -> int | None:
    """The sequence that `build(name, sequence)` will use: the given one, else the model's own; None if it has none."""
    entry = _entry(name)
    if sequence is None:
        return entry.sequence
    where = f"zoo:{name}"
    if entry.sequence is None:
        raise ModelError("This model has no sequence", where=where, found=f"sequence {sequence}", next="Leave it out")
    longest = entry.config.get("longest", math.inf)
    if not 1 <= sequence <= longest:
        expected = "at least 1" if longest == math.inf else f"1 to {longest}"
        raise ModelError("The sequence does not fit", where=where, found=str(sequence), expected=expected)
    return sequence


def build(name: str, sequence: int | None = None) -> BuiltModel:
    """Builds a model of the zoo on torch's default device of the moment."""
    length = sequence_of(name, sequence)
    entry = _entry(name)
    module, function = entry.builder.split(".")
    built: BuiltModel = getattr(import_module(f"{__name__}.{module}"), function)(
        name=name, sequence=length, **entry.config
    )
    return built


def _entry(name: str) -> _Entry:
    if name in _TABLE:
        return _TABLE[name]
    close = difflib.get_close_matches(name, _TABLE, n=3) or list(_TABLE)
    raise ModelError(
        "The zoo has no such model",
        where=f"zoo:{name[:80]}",
        expected=("one of " if len(close) > 1 else "") + ", ".join(close),
        next=f"Try zoo:{close[0]}" if len(close) < len(_TABLE) else "Choose one of these",
    )
