"""Strict YAML: maps with text keys, lists, and plain scalars (whole number, number, true/false, null, text).

Plain scalars mean what YAML 1.2 says. Some YAML is refused, because readers disagree about it or because it hides what
the file says: bare yes/no/on/off/y/n, 22:22, 010, 0x1f, 1_000, .nan, numbers out of range, empty values, duplicate or
non-text keys, anchors, aliases, merge keys, tags, directives, several documents, more than 32 levels. The values are
built from the parser's events alone, so there is no constructor that a tag could reach.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from isthmus.errors import FileError
from isthmus.files.document import Document, check_text, read_text
from isthmus.files.fault_words import ValuePath, show_value

__all__ = ["parse_yaml", "read_yaml"]

_LARGEST = 16 * 2**20  # bytes
_DEEPEST = 32
_MOST = 200_000  # values; reading so many takes about a second, and ten thousand hosts need half as many

_SWITCH = re.compile(r"y|n|yes|no|on|off", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", re.ASCII)
_UNCLEAR = {  # pattern of the text: how readers differ about it
    re.compile(r"[-+]?0[0-9]+", re.ASCII): "eight-based to some readers, ten-based to others",
    re.compile(r"[-+]?0(o[0-7]+|x[0-9a-fA-F]+|b[01]+)", re.ASCII): "a number to some readers, text to others",
    re.compile(r"[-+]?[0-9]+(_[0-9]+)+(\.[0-9_]*)?", re.ASCII): "a number to some readers, text to others",
    re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9]*)?", re.ASCII): "a sixty-based number to some readers",
    re.compile(r"[-+]?\.(inf|nan)", re.IGNORECASE): "not a finite number",
}
_COUNTED = re.compile(r"(?P<count>[0-9]+) ?[xX*]? ?(?P<name>[A-Za-z][\w.-]*)")  # `4x RTX-3090`, `4 T4`
_CONSTANTS = {"null": None, "Null": None, "NULL": None, "~": None} | {
    word: word.casefold() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml gives the same events ten times faster


def read_yaml(path: str | Path, *, error: type[FileError] = FileError) -> Document:
    """Read a file as a document with lines."""
    return parse_yaml(read_text(path, _LARGEST, error), name=str(path), error=error)


def parse_yaml(text: str, *, name: str, error: type[FileError] = FileError) -> Document:
    """Return `text` as a document with lines; `name` stands for the file in errors."""
    if len(text) > _LARGEST:
        raise error("the text is too large", where=name, expected=f"at most {_LARGEST} bytes")
    if unusable := check_text(text):
        raise error("this is not text", where=name, found=unusable)
    return _Builder(text.removeprefix("\ufeff"), name, error).document()


class _Builder:
    """Builds values from the parser's events, and notes the line of each."""

    def __init__(self, text: str, name: str, error: type[FileError]) -> None:
        self._text = text
        self._name = name
        self._error = error
        self._lines: dict[ValuePath, int] = {}
        self._events: Iterator[Any] = iter(yaml.parse(text, Loader=_LOADER))

    def document(self) -> Document:
        try:
            value = self._document()
        except yaml.YAMLError as problem:
            raise self._not_yaml(problem) from None
        return Document(name=self._name, value=value, lines=self._lines, error=self._error)

    def _document(self) -> object:
        next(self._events)  # the stream's start
        start = next(self._events)
        if isinstance(start, yaml.StreamEndEvent):
            raise self._error("the file is empty", where=self._name, expected="a map with kind and version")
        if start.version or start.tags:
            raise self._fault(start, "directives (%) are not allowed here", next="Remove the line")
        first = next(self._events)
        self._lines[()] = first.start_mark.line + 1
        value = self._node(first, ())
        next(self._events)  # the document's end
        more = next(self._events)
        if not isinstance(more, yaml.StreamEndEvent):
            raise self._fault(more, "the file holds several documents", next="Keep one, remove the line ---")
        return value

    def _node(self, event: Any, path: ValuePath) -> object:
        self._refuse_references(event)
        if len(self._lines) > _MOST:
            raise self._fault(event, "the file has too many values", expected=f"at most {_MOST}")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if len(path) >= _DEEPEST:
            raise self._fault(event, "the file is nested too deeply", expected=f"at most {_DEEPEST} levels")
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _refuse_references(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent):
            raise self._fault(event, "aliases (*name) are not allowed here", next="Write the value out")
        if event.anchor is not None:
            raise self._fault(
                event, "anchors (&name) are not allowed here", next="Write the value out where it is used"
            )
        # libyaml drops a lone "!" from the event, so the text itself is checked too
        if event.tag is not None or self._text.startswith("!", event.start_mark.index):
            raise self._fault(event, "tags (!name) are not allowed here", next="Remove the tag")

    def _sequence(self, path: ValuePath) -> list[object]:
        items: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            inner = (*path, len(items))
            self._lines[inner] = event.start_mark.line + 1
            items.append(self._node(event, inner))
        return items

    def _mapping(self, path: ValuePath) -> dict[str, object]:
        entries: dict[str, object] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event)
            inner = (*path, key)
            if key in entries:
                raise self._fault(
                    event,
                    f"key {key!r} is given twice",
                    found=f"it on line {self._lines[inner]} as well",
                    next="Remove one",
                )
            self._lines[inner] = event.start_mark.line + 1
            value = next(self._events)
            if isinstance(value, yaml.ScalarEvent) and not value.value and _is_plain(value):
                self._refuse_references(value)
                raise self._fault(value, "a value is missing", found=f"{key[:60]!r} alone", next=_remedy(key))
            entries[key] = self._node(value, inner)
        return entries

    def _key(self, event: Any) -> str:
        self._refuse_references(event)
        if not isinstance(event, yaml.ScalarEvent):
            raise self._fault(event, "a map or list cannot be a key", expected="text")
        if event.value == "<<" and _is_plain(event):
            raise self._fault(event, "merge keys (<<) are not allowed here", next="Write the fields out")
        key = self._scalar(event)
        if not isinstance(key, str):
            raise self._fault(event, "a key must be text", found=show_value(key), next=f'Quote it: "{event.value}"')
        return key

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        if unusable := check_text(text):
            raise self._fault(event, "a value is not text", found=unusable)
        return self._plain(event, text) if _is_plain(event) else text

    def _plain(self, event: Any, text: str) -> object:
        if not text:
            raise self._fault(event, "a value is missing", next="Write it, or leave the field out")
        if _SWITCH.fullmatch(text):
            raise self._fault(
                event,
                f"bare {text} means true or false to some readers",
                next=f'Quote it: "{text}", or write true or false',
            )
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        for pattern, difference in _UNCLEAR.items():
            if pattern.fullmatch(text):
                raise self._fault(
                    event,
                    f"{text[:40]} is {difference}",
                    next=f'Quote it if it is text: "{text[:40]}", else write a plain number',
                )
        return self._number(event, text) if _FLOAT.fullmatch(text) else text

    def _number(self, event: Any, text: str) -> int | float:
        whole = _INTEGER.fullmatch(text) is not None
        value = int(text) if whole and len(text) <= 20 else float(text)
        in_range = abs(value) < 2**63 if whole else math.isfinite(value)
        if not in_range:
            raise self._fault(
                event, "a number is out of range", found=text[:40], expected="below 2^63 if whole, else below 1e308"
            )
        return value

    def _fault(
        self, event: Any, what: str, *, found: str | None = None, expected: str | None = None, next: str | None = None
    ) -> FileError:
        where = f"{self._name} line {event.start_mark.line + 1}"
        return self._error(what, where=where, found=found, expected=expected, next=next)

    def _not_yaml(self, problem: Any) -> FileError:
        mark = getattr(problem, "problem_mark", None)
        # a reader's error has no mark, only the position of the first character that YAML does not allow
        before = self._text[: problem.position] if isinstance(problem, yaml.reader.ReaderError) else ""
        line = mark.line if mark is not None else before.count("\n")
        reason = getattr(problem, "problem", None) or getattr(problem, "reason", None) or "unreadable"
        tab = any("\t" in text for text in self._text.split("\n")[line : line + 1])
        remedy = "Indent with spaces, not tabs" if tab else "Check indentation, quotes and brackets near here"
        return self._error(f"this is not YAML: {reason}", where=f"{self._name} line {line + 1}", next=remedy)


def _remedy(key: str) -> str:
    """Return what to write in place of a key without a value, such as `{RTX-3090: 4}` for `4x RTX-3090`."""
    if match := _COUNTED.fullmatch(key):
        return f"Write it like {{{match['name']}: {match['count']}}}"
    return "Write it, or leave the field out"


def _is_plain(event: Any) -> bool:
    return not event.style  # libyaml says "", the pure parser None; quoted and block scalars have a letter
