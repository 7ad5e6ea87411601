"""Strict JSON: duplicate keys, NaN and infinities are refused.

A file is written beside its place, then renamed into it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from isthmus.errors import FileError
from isthmus.files.document import Document, check_text, read_text
from isthmus.files.fault_words import ValuePath, show_path

__all__ = ["encode_json", "parse_json", "plain_target", "read_json", "write_json", "write_whole"]

T = TypeVar("T")

_LARGEST = 64 * 2**20  # bytes
_DEEPEST = 64


class _Refused(ValueError):
    """The reason for a refusal, raised inside the decoder, where the file's name is not known."""


def read_json(
    path: str | Path,
    type: type[T],
    *,
    kind: str | None = None,
    version: int = 1,
    error: type[FileError] = FileError,
    limit: int = _LARGEST,
) -> T:
    """Read a file as `type`; if `kind` is given, the file must state that kind and a version up to `version`."""
    document = parse_json(read_text(path, limit, error), name=str(path), error=error)
    if kind is not None:
        document.check(kind, version=version)
    return document.convert(type)


def parse_json(text: str, *, name: str, error: type[FileError] = FileError) -> Document:
    """Return `text` as a document; `name` stands for the file in errors."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as problem:
        where = f"{name} line {problem.lineno} column {problem.colno}"
        raise error(f"this is not JSON: {problem.msg}", where=where) from None
    except _Refused as problem:
        raise error(str(problem), where=name) from None
    except ValueError:  # Python limits the digits of a whole number
        raise error("a number has too many digits", where=name) from None
    except RecursionError:
        raise error("the file is nested too deeply", where=name, expected=f"at most {_DEEPEST} levels") from None
    document = Document(name=name, value=value, error=error)
    _check_values(document)
    return document


def write_json(path: str | Path, value: object) -> None:
    """Write `value` (a struct or plain values) with an indent of two spaces."""
    write_whole(path, msgspec.json.format(encode_json(value, name=str(path)), indent=2) + b"\n")


def plain_target(path: str | Path, error: type[FileError] = FileError) -> Path:
    """Return the path that a file is to be written to, with symlinks followed.

    Refuse a path at which something exists that is not a plain file.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise error("this is a folder", where=str(path), expected="the name of a file", next="Name a file in it")
    if target.exists() and not target.is_file():
        raise error("this is a pipe, a device or a socket", where=str(path), expected="a plain file, or none yet",
                    next="Name another file")  # fmt: skip
    return target


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none.

    It is written beside its place, flushed to disk, and renamed into place.
    """
    path = plain_target(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.aside")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as problem:
        reason = f"cannot write the file: {problem.strerror}"
        raise FileError(reason, where=str(path), next="Check its folder") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)  # already gone if the write succeeded


def encode_json(value: object, *, name: str = "the value") -> bytes:
    """Return compact JSON that is the same for equal values: fields and maps in their own order, sets sorted."""
    plain = msgspec.to_builtins(value, str_keys=True)
    sorted_sets = msgspec.to_builtins(value, str_keys=True, order="deterministic")
    return msgspec.json.encode(_stable(plain, sorted_sets, name, ()))


def _stable(plain: Any, sorted_sets: Any, name: str, path: ValuePath) -> Any:
    """Return the value with the order of maps from `plain` and the order of sets (lists by now) from `sorted_sets`.

    Refuse NaN and infinities.
    """
    if isinstance(plain, dict):
        return {key: _stable(item, sorted_sets[key], name, (*path, key)) for key, item in plain.items()}
    if isinstance(plain, list | tuple):
        pairs = enumerate(zip(plain, sorted_sets, strict=True))
        return [_stable(item, other, name, (*path, index)) for index, (item, other) in pairs]
    if isinstance(sorted_sets, float) and not math.isfinite(sorted_sets):
        raise FileError("JSON has no such number", where=f"{name} at {show_path(path)}", found=repr(sorted_sets))
    return sorted_sets


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _Refused(f"key {twice[:60]!r} is given twice in one object")
    return entries


def _no_constant(word: str) -> NoReturn:
    raise _Refused(f"{word} is not a JSON number")


def _check_values(document: Document) -> None:
    """Refuse what the decoder accepts: too deep nesting, numbers too large for a float, unusable text."""
    todo: list[tuple[ValuePath, Any]] = [((), document.value)]
    while todo:
        path, value = todo.pop()
        if len(path) > _DEEPEST:
            raise document.fault((), "the file is nested too deeply", expected=f"at most {_DEEPEST} levels")
        if isinstance(value, dict):
            todo.extend(((*path, key), item) for key, item in value.items())
            if unusable := check_text("".join(value)):
                raise document.fault(path, "a key is not text", found=unusable)
        elif isinstance(value, list):
            todo.extend(((*path, index), item) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise document.fault(path, "a number is out of range", expected="at most 1e308")
        elif isinstance(value, str) and (unusable := check_text(value)):
            raise document.fault(path, "a value is not text", found=unusable)
