"""Recognises what a file is, whatever its name, so that a file of the wrong kind gives the same error everywhere.

A reader that fails asks what it was given. If that is another kind of file than it reads, the error says what the file
is, what was expected, and which command takes it. A good file is never read twice.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.errors import FileError, IsthmusError

__all__ = ["KINDS", "WRONG", "expected", "expecting", "kind_of", "remedy", "wrong_kind"]

WRONG = "this is the wrong kind of file"

_LOOKED_AT = 2**20  # bytes
_MAGIC = {
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"GIF8": "a GIF picture",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive, or what torch.save wrote",
    b"\x1f\x8b": "a gzip archive",
    b"\x80\x02": "a pickle, which is never opened here",
    b"\x80\x04": "a pickle, which is never opened here",
}
_JSON_KIND = re.compile(r'\s*\{\s*"kind"\s*:\s*"([a-z]+)"', re.ASCII)
_YAML_KIND = re.compile(r"^\{?\s*kind:\s*[\"']?([a-z]+)\b", re.ASCII | re.MULTILINE)
_TEXT_PLAN = re.compile(r"(\s*(#.*)?\n)*plan for \S+\s*$", re.MULTILINE)
_HOSTFILE = re.compile(r"(\s*(#.*)?\n)*\S+\s+slots\s*=\s*[0-9]+", re.ASCII)
_PAGE = re.compile(r"\s*<(!doctype|html)", re.IGNORECASE)
_STEP = re.compile(r"step-[0-9]+", re.ASCII)


class Kind(NamedTuple):
    """A kind of file: its name, how to recognise or make one, and which command takes it."""

    name: str
    made: str = ""
    taken: str = ""


KINDS = {
    "cluster": Kind("a cluster file", "YAML with kind: cluster", "isthmus cluster show FILE, plan --cluster FILE"),
    "job": Kind("a job file", "YAML with kind: job", "isthmus plan FILE --cluster CLUSTER"),
    "workload": Kind("a workload file", "YAML with kind: workload", "isthmus plan FILE --cluster CLUSTER"),
    "model": Kind(
        "a saved model", "what isthmus model show MODEL --save FILE writes", "isthmus plan FILE --cluster CLUSTER"
    ),
    "plan": Kind("a plan", "what isthmus plan -o FILE writes", "isthmus simulate FILE, report FILE, train FILE"),
    "profile": Kind("a profile", "what isthmus profile MODEL writes", "isthmus plan MODEL --profile FILE"),
    "events": Kind("the events of a run", "what isthmus train --events FILE writes", "isthmus report PLAN --run FILE"),
    "trace": Kind("a timeline", "what isthmus simulate --trace FILE writes", "ui.perfetto.dev"),
    "checkpoint": Kind("a checkpoint", "a folder with a manifest.json", "isthmus export FOLDER -o FILE"),
    "checkpoints": Kind(
        "a folder of checkpoints", "what isthmus train --checkpoint FOLDER writes", "isthmus export FOLDER -o FILE"
    ),
    "weights": Kind("a safetensors file", "what isthmus export writes", "safetensors.torch.load_model"),
    "config": Kind("a transformers configuration", "a config.json", "isthmus plan hf:FILE --cluster CLUSTER"),
    "hostfile": Kind("a hostfile", "lines like worker-1 slots=4", "isthmus cluster import FILE --kind KIND"),
    "page": Kind("an HTML page", taken="a browser"),
    "python": Kind("Python code", taken="isthmus plan package.module:function --cluster CLUSTER"),
    "folder": Kind("a folder"),
    "empty": Kind("an empty file"),
    "binary": Kind("no text"),
}


class _Head(msgspec.Struct):
    """The fields of a JSON object that tell its kind."""

    kind: str = ""
    event: str = ""
    model_type: str = ""
    architectures: msgspec.Raw = msgspec.Raw()
    traceEvents: msgspec.Raw = msgspec.Raw()


@contextlib.contextmanager
def expecting(path: str | Path, *wanted: str, error: type[IsthmusError] = FileError) -> Iterator[None]:
    """Read a file inside this context: if that fails because the file is of another kind than `wanted`, say so."""
    try:
        yield
    except IsthmusError:
        other = wrong_kind(path, *wanted, error=error)
        if other is None:
            raise
        raise other from None


def wrong_kind(
    path: str | Path, *wanted: str, error: type[IsthmusError] = FileError, instead: str | None = None
) -> IsthmusError | None:
    """Return the error about a file that exists and is certainly of none of the kinds `wanted`, else None.

    `instead` states in other words what is expected.
    """
    found = kind_of(path)
    if found is None or found in wanted:
        return None
    name = _magic(Path(path)) if found == "binary" else KINDS[found].name
    return error(WRONG, where=str(path), found=name, expected=instead or expected(*wanted), next=remedy(found))


def expected(*kinds: str) -> str:
    """Return what is expected, like `a cluster file (YAML with kind: cluster)`."""
    known = [KINDS.get(kind) or Kind(f"a {kind} file", f"kind: {kind}") for kind in kinds]
    return " or ".join(f"{kind.name} ({kind.made})" for kind in known)


def remedy(kind: str) -> str | None:
    """Return what takes a file, like `For a plan use: isthmus simulate FILE`, or None if nothing takes it."""
    return f"For {KINDS[kind].name} use: {KINDS[kind].taken}" if KINDS[kind].taken else None


def kind_of(path: str | Path) -> str | None:
    """Return the kind of a file, a key of `KINDS`.

    Return None if the file does not exist, cannot be read, or could be anything.
    """
    if not str(path):
        return None
    path = Path(path)
    try:
        if path.is_dir():
            return _folder_kind(path)
        if not path.is_file():  # a pipe can be read only once
            return None
        with path.open("rb") as file:
            data = file.read(_LOOKED_AT)
    except (OSError, ValueError):
        return None
    return _data_kind(data, path.suffix)


def _folder_kind(path: Path) -> str:
    if (path / "manifest.json").is_file():
        return "checkpoint"
    steps = any(_STEP.fullmatch(entry.name) and entry.is_dir() for entry in path.iterdir())
    return "checkpoints" if steps else "folder"


def _data_kind(data: bytes, suffix: str) -> str | None:
    if not data.strip():
        return "empty"
    if data.startswith(tuple(_MAGIC)):
        return "binary"
    if data[5:10] == b'\0\0\0{"':  # safetensors: eight bytes of the header's length, then the header
        return "weights"
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=len(data) < _LOOKED_AT)
    except UnicodeDecodeError:  # perhaps text in another encoding; the reader of the file says where it fails
        return None
    return _json_kind(text) if text.lstrip().startswith("{") else _text_kind(text, suffix)


def _json_kind(text: str) -> str | None:
    if match := _JSON_KIND.match(text):
        return _known(match[1])
    for part in (text, text.lstrip().partition("\n")[0]):  # one object, or one per line
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            head = msgspec.json.decode(part, type=_Head)
            if head.kind:
                return _known(head.kind)
            told = {"events": head.event, "config": head.model_type or head.architectures, "trace": head.traceEvents}
            return next((kind for kind, value in told.items() if len(value)), None)
    match = _YAML_KIND.match(text)
    return _known(match[1]) if match else None


def _text_kind(text: str, suffix: str) -> str | None:
    if match := _YAML_KIND.search(text):
        return _known(match[1])
    if _PAGE.match(text):
        return "page"
    if _TEXT_PLAN.match(text):
        return "plan"
    if _HOSTFILE.match(text):
        return "hostfile"
    return "python" if suffix == ".py" else None


def _known(kind: str) -> str | None:
    return kind if kind in KINDS else None


def _magic(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        start = file.read(8)
        return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), KINDS["binary"].name)
    return KINDS["binary"].name
