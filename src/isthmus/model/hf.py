"""Builds models from a transformers configuration, which is one JSON file on this machine.

No hub is asked, and no code but transformers' own is run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from isthmus.errors import ModelError
from isthmus.files import expecting, open_file, wrong_kind

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.model.built import BuiltModel, Draw
    from isthmus.model.capture import Example

__all__ = ["build", "name_of", "read_config"]

_LARGEST = 1 << 20  # bytes of a configuration
_DEFAULT_SEQUENCE = 1024
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions")

# Fields that are removed at every level: they would fetch code or kernels, or change the width of the weights.
_LEFT_OUT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_internal",
        "attn_implementation",
        "auto_map",
        "custom_pipelines",
        "dtype",
        "experts_implementation",
        "quantization_config",
        "torch_dtype",
        "use_pretrained_backbone",
    }
)

# The tasks that a model can be built for, with transformers' table of the classes for each. They are tried in this
# order if the configuration names no architecture (encoders with a masked-token head can also be made causal models).
_TASKS = {
    "Seq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "CausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}


def read_config(path: Path) -> bytes:
    """Return the bytes of a configuration; refuse a file that does not exist or is far too large."""
    try:
        with open_file(path) as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise wrong_kind(path, "config", error=ModelError) or ModelError(
            "The configuration cannot be read",
            where=f"hf:{path}",
            found=error.strerror or type(error).__name__,
            expected="a transformers config.json on this machine (a hub is never asked)",
        ) from error
    if len(data) > _LARGEST:
        raise ModelError("The configuration is too large", where=f"hf:{path}", expected=f"at most {_LARGEST} bytes")
    return data


def name_of(path: Path) -> str:
    """Return the name of a model: `models/opt-1.3b/config.json` -> `opt-1.3b`; `tiny.json` -> `tiny`."""
    return path.parent.name if path.stem == "config" and path.parent.name else path.stem


def build(path: Path, sequence: int | None = None) -> BuiltModel:
    """Build the model of a configuration on torch's current default device, with fresh weights."""
    from isthmus.model.built import BuiltModel
    from isthmus.model.zoo.synthetic import cross_entropy

    where = f"hf:{path}"
    with expecting(path, "config", error=ModelError):
        fields = _fields(read_config(path), where)
    transformers = _transformers(where)
    with _offline(), _explained(where):
        config = transformers.AutoConfig.for_model(**fields)
        task = _task(config, fields, where)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        auto = getattr(transformers, f"AutoModelFor{task}")
        module = auto.from_config(config, trust_remote_code=False)
    length = None if task == "ImageClassification" else _sequence(config, sequence, where)
    if length is None and sequence is not None:
        raise ModelError("This model has no sequence", where=where, found=f"sequence {sequence}", next="Leave it out")
    return BuiltModel(
        name=name_of(path), module=module, sequence=length, draw=_draw(task, config, length), loss=cross_entropy
    )


def _fields(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError("This is not a transformers configuration", where=where, found=str(error)) from error
    if not isinstance(fields.get("model_type"), str):
        raise ModelError(
            "The configuration does not say what it configures", where=where, expected='a "model_type", like "gpt2"'
        )
    return _kept(fields)


def _kept(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value) if isinstance(value, dict) else value for key, value in fields.items() if key not in _LEFT_OUT
    }


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "transformers is not installed", where=where, next="Install it: pip install 'isthmus[hf]'"
        ) from error
    return transformers


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Hold huggingface_hub offline inside this context: whatever a configuration asks for, nothing is fetched."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turn any error of transformers into a ModelError with the first line of its text."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = next(iter(str(error).splitlines()), "")[:200]
        raise ModelError(
            "transformers cannot build this configuration", where=where, found=f"{type(error).__name__}: {text}"
        ) from error


def _task(config: Any, fields: dict[str, Any], where: str) -> str:
    """Return the task by the architecture that the configuration names.

    If it names none, or only the bare model, return the task by the model's type.
    """
    from transformers.models.auto import modeling_auto

    classes = {task: getattr(modeling_auto, table).get(config.model_type) for task, table in _TASKS.items()}
    architecture = next(iter(fields.get("architectures") or ()), None)
    for task, named in classes.items():
        if named and architecture in (named if isinstance(named, tuple) else (named,)):
            return task
    bare = architecture is None or str(architecture).endswith(("Model", "ForPreTraining"))
    possible = [task for task, named in classes.items() if named and bare]
    if not possible:
        raise ModelError(
            "There is no trainer for this architecture",
            where=where,
            found=f"{architecture or 'none'} of type {config.model_type}",
            expected="a model for " + ", ".join(_TASKS),
        )
    decoder_only = not getattr(config, "is_encoder_decoder", False)
    return possible[1] if decoder_only and possible[0] == "Seq2SeqLM" and len(possible) > 1 else possible[0]


def _sequence(config: Any, sequence: int | None, where: str) -> int:
    """Return the given sequence if it fits; else the largest power of two within the model's limit and 1024.

    It is a power of two because some models count a few positions more than they can use.
    """
    text = config.get_text_config()
    limits = (getattr(text, name, None) for name in _LONGEST)
    longest = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
    if sequence is None:
        return 1 << (min(longest or _DEFAULT_SEQUENCE, _DEFAULT_SEQUENCE).bit_length() - 1)
    if sequence < 1 or (longest and sequence > longest):
        raise ModelError(
            "The sequence does not fit", where=where, found=str(sequence), expected=f"1 to {longest or 'any'}"
        )
    return sequence


def _draw(task: str, config: Any, sequence: int | None) -> Draw:
    if sequence is None:
        size = getattr(config, "image_size", 224)
        return partial(
            _images,
            size=size if isinstance(size, int) else size[0],
            classes=config.num_labels,
            channels=getattr(config, "num_channels", 3),
        )
    vocabulary = config.get_text_config().vocab_size
    return partial(_tokens, task=task, vocabulary=vocabulary, sequence=sequence)


def _images(batch: int, seed: int, *, size: int, classes: int, channels: int) -> tuple[Example, Tensor]:
    from isthmus.model.capture import Example
    from isthmus.model.zoo.synthetic import images

    drawn, target = images(batch, seed, size=size, classes=classes, channels=channels)
    return Example(args=(), kwargs={"pixel_values": drawn.args[0]}), target


def _tokens(batch: int, seed: int, *, task: str, vocabulary: int, sequence: int) -> tuple[Example, Tensor]:
    from isthmus.model.capture import Example
    from isthmus.model.zoo.synthetic import masked_tokens, next_tokens

    if task == "MaskedLM":
        drawn, target = masked_tokens(batch, seed, vocabulary=vocabulary, sequence=sequence, mask=vocabulary - 1)
    else:
        drawn, target = next_tokens(batch, seed, vocabulary=vocabulary, sequence=sequence)
    inputs = {"input_ids": drawn.args[0]}
    if task == "Seq2SeqLM":
        inputs["decoder_input_ids"] = drawn.args[0].clone()
    return Example(args=(), kwargs=inputs), target
