"""Built-in models, by name. Importing this module does not import torch; building a model does.

The files in reading order:

- `__init__.py`: the table of models, with their sizes and sequences.
- `tiny.py`: small models that train on a laptop in seconds.
- `gpt.py`: GPT-2 and GPT-3.
- `llama.py`: Llama 3.
- `mixtral.py`: Mixtral, a mixture of experts.
- `grouped.py`: the grouped matrix product that Mixtral uses.
- `opt.py`: OPT.
- `bert.py`: BERT.
- `roberta.py`: RoBERTa.
- `xlnet.py`: XLNet.
- `transformer.py`: the first transformer.
- `t5.py`: T5.
- `vit.py`: the Vision Transformer.
- `vision.py`: VGG, ResNet and Wide ResNet.
- `inception.py`: Inception-v3.
- `synthetic.py`: the synthetic samples and the loss that the models train with.

To add a model, add an `_Entry` to `_TABLE` in this file: its builder, its sequence and its sizes. If no builder fits,
write a new file with a function that takes `name`, `sequence` and the sizes, and returns a `BuiltModel`.
"""

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
    """One model: `builder` is module.function of this package, `config` its arguments.

    `sequence` None means there is none.
    """

    builder: str
    sequence: int | None
    config: Mapping[str, Any]


def _gpt(layers: int, width: int, heads: int, longest: int, **others: float) -> _Entry:
    config = {"layers": layers, "width": width, "heads": heads, "longest": longest, **others}
    return _Entry("gpt.gpt", longest, config)


def _bert(layers: int, width: int, heads: int, inner: int, *, builder: str = "bert.bert") -> _Entry:
    config = {"layers": layers, "width": width, "heads": heads, "inner": inner, "longest": 512}
    return _Entry(builder, 512, config)


def _tag_bert(layers: int, width: int, longest: int) -> _Entry:
    sizes = {"layers": layers, "width": width, "heads": 16, "inner": width}
    return _Entry("bert.bert_spans", 128, {**sizes, "longest": longest, "vocabulary": 305220})


def _llama(layers: int, width: int, heads: int, kv_heads: int, inner: int, *, builder: str = "llama.llama") -> _Entry:
    config = {"layers": layers, "width": width, "heads": heads, "kv_heads": kv_heads, "inner": inner}
    return _Entry(builder, 8192, config)


_TRANSFORMER = {"layers": 6, "width": 512, "heads": 8, "inner": 2048}
_WIDE = {"layers": 24, "width": 1024}

# The sizes of GPT-3 are those of table 2.1 of its paper. In two of its rows the width is not heads times head size: the
# paper gives 1.3b 24 heads of 128 at width 2048 (here 16 heads), and 13b the width 5140 (here 40 heads of 128 = 5120).
# tag-*: the variants that TAG (Zhang et al. 2023) was measured with, as in the files of its release. The MLPs of its
# BERTs are as wide inside as outside, and their head finds answer spans; the layers and the vocabulary of its
# transformer are inferred (docs/zoo.md).
_TABLE: Mapping[str, _Entry] = MappingProxyType(
    {
        "vgg19": _Entry("vision.vgg", None, {"convolutions": (2, 2, 4, 4, 4)}),
        "inception-v3": _Entry("inception.inception", None, {}),
        "resnet101": _Entry("vision.resnet", None, {"bottlenecks": (3, 4, 23, 3)}),
        "wideresnet101": _Entry("vision.resnet", None, {"bottlenecks": (3, 4, 23, 3), "widening": 2}),
        "vit-large": _Entry("vit.vit", None, {**_WIDE, "heads": 16, "size": 224, "patch": 16}),
        "transformer": _Entry("transformer.transformer", 256, {**_TRANSFORMER, "vocabulary": 37000}),
        "bert-small": _bert(4, 512, 8, 2048),
        "bert-large": _bert(24, 1024, 16, 4096),
        "roberta-large": _bert(24, 1024, 16, 4096, builder="roberta.roberta"),
        "xlnet-large": _Entry("xlnet.xlnet", 512, {**_WIDE, "heads": 16, "inner": 4096}),
        "gpt2": _gpt(12, 768, 12, 1024),
        "gpt2-medium": _gpt(24, 1024, 16, 1024),
        "gpt2-large": _gpt(36, 1280, 20, 1024),
        "gpt2-xl": _gpt(48, 1600, 25, 1024),
        "gpt3-1.3b": _gpt(24, 2048, 16, 2048, dropout=0.0),
        "gpt3-2.7b": _gpt(32, 2560, 32, 2048, dropout=0.0),
        "gpt3-6.7b": _gpt(32, 4096, 32, 2048, dropout=0.0),
        "gpt3-13b": _gpt(40, 5120, 40, 2048, dropout=0.0),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, dropout=0.0),
        "opt-175b": _Entry("opt.opt", 2048, {"layers": 96, "width": 12288, "heads": 96, "longest": 2048}),
        "t5-11b": _Entry("t5.t5", 512, {**_WIDE, "heads": 128, "size": 128, "inner": 65536}),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336),
        "llama3-70b": _llama(80, 8192, 64, 8, 28672),
        "mixtral-8x7b": _llama(32, 4096, 32, 8, 14336, builder="mixtral.mixtral"),
        "tag-transformer": _Entry(
            "transformer.transformer", 10, {**_TRANSFORMER, "vocabulary": 50000, "shared": False}
        ),
        "tag-bert-small": _tag_bert(4, 1024, 512),
        "tag-bert-large": _tag_bert(24, 2048, 1024),
        "gpt-tiny": _gpt(6, 256, 8, 128, vocabulary=256, dropout=0.0),
        "mlp-tiny": _Entry("tiny.mlp", None, {"features": 64, "width": 256, "layers": 4}),
        "cnn-tiny": _Entry("tiny.cnn", None, {"size": 32, "channels": (32, 64, 128)}),
    }
)


def names() -> tuple[str, ...]:
    """Return the names of all models of the zoo."""
    return tuple(_TABLE)


def sequence_of(name: str, sequence: int | None = None) -> int | None:
    """Return the sequence that `build(name, sequence)` will use, or None if the model has none.

    That is the given sequence, or else the model's own.
    """
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
    """Build a model of the zoo on torch's current default device."""
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
    close = difflib.get_close_matches(name[:80], _TABLE, n=3)
    meant = " or ".join(f"zoo:{other}" for other in close)
    raise ModelError(
        "The zoo has no such model",
        where=f"zoo:{name[:80]}",
        expected=f"one of {', '.join(_TABLE)}",
        next=f"Did you mean {meant}?" if close else "Choose one of these",
    )
