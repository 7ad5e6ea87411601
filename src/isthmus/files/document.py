"""A parsed file before it has types: its plain values, the line of each, and the conversion to a typed object.

Every file states what it is in `kind` and `version`; these are checked before anything else.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from isthmus.errors import FileError
from isthmus.files.fault_words import Fault, ValuePath, explain, show_path, show_value
from isthmus.files.kinds import KINDS, WRONG, expected, remedy

__all__ = ["NAME_RULE", "Document", "check_text", "is_name", "open_file", "read_text"]

T = TypeVar("T")

NAME_RULE = "letters, digits, . _ -, not beginning with . or -, at most 64 characters"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")

_SAY_THEIR_KIND = ("cluster", "job", "workload", "model", "plan", "profile")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The plain values of one file; `lines` gives the line of each value by its path (empty where unknown)."""

    name: str
    value: Any
    lines: Mapping[ValuePath, int] = {}
    error: type[FileError] = FileError
    dropped: frozenset[ValuePath] = frozenset()  # faulty values that were removed; in lists they are null instead
    passed: frozenset[tuple[ValuePath, str]] = frozenset()  # known faults, which `refuse` does not raise again

    def where(self, path: ValuePath = ()) -> str:
        """Return `cluster.yaml line 22`, or `plan.json at parts[0].stages` if lines are unknown."""
        line = self.line(path)
        if line:
            return f"{self.name} line {line}"
        return f"{self.name} at {show_path(path)}" if path else self.name

    def line(self, path: ValuePath) -> int:
        """Return the line of the value at `path`, or of what holds it; 0 if lines are unknown."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)

    def fault(
        self,
        path: ValuePath,
        what: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        next: str | None = None,
        refers: tuple[ValuePath, ...] = (),
        lacks: str | None = None,
        placeholder: object = None,
    ) -> FileError:
        """Return the error to raise about the value at `path`.

        `refers` gives the places in the file where a missing name could have been defined; "*" stands for any part.
        `lacks` is the field that is missing in the value. `placeholder` is a sound value, with which other faults of
        the file can be found.
        """
        return self._explained(
            Fault(
                path=path,
                what=what,
                found=found,
                expected=expected,
                next=next,
                refers=refers,
                lacks=lacks,
                placeholder=placeholder,
            )
        )

    def refuse(
        self,
        path: ValuePath,
        what: str,
        *,
        found: str | None = None,
        expected: str | None = None,
        next: str | None = None,
        refers: tuple[ValuePath, ...] = (),
    ) -> None:
        """Raise the error about the value at `path`, unless it was raised before.

        The value may stay as it is while later faults of the file are looked for.
        """
        if (path, what) not in self.passed:
            raise self._explained(
                Fault(path=path, what=what, found=found, expected=expected, next=next, refers=refers, passable=True)
            )

    def check(self, *kinds: str, version: int = 1) -> str:
        """Return the file's kind, which must be one of `kinds`.

        Refuse other kinds and versions newer than `version`.
        """
        wanted = " or ".join(kinds)
        if not isinstance(self.value, dict):
            raise self.fault(
                (), f"this is not a {wanted} file", found=show_value(self.value), expected="a map with kind and version"
            )
        kind = self.value.get("kind")
        if kind is None:
            raise self.fault((), "the file does not say its kind", expected=f"kind: {wanted}")
        if kind not in kinds:
            raise self._wrong_kind(kind, kinds)
        self._check_version(version)
        return str(kind)

    def _wrong_kind(self, kind: object, wanted: tuple[str, ...]) -> FileError:
        known = kind if isinstance(kind, str) and kind in KINDS else None
        found = KINDS[known].name if known else f"kind {show_value(kind)}"
        next = remedy(known) if known else f"Known kinds: {', '.join(_SAY_THEIR_KIND)}"
        return self.fault(("kind",), WRONG, found=found, expected=expected(*wanted), next=next)

    def _check_version(self, newest: int) -> None:
        found = self.value.get("version")
        if found is None:
            raise self.fault((), "the file does not say its version", expected=f"version: {newest}")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.fault(
                ("version",), "version is not a version number", found=show_value(found), expected=f"version: {newest}"
            )
        if found > newest:
            raise self.fault(
                ("version",),
                "the file is newer than this program",
                found=f"version {found}",
                expected=f"version {newest} or older",
                next="Update Isthmus: pip install -U isthmus",
            )

    def convert(self, type: type[T]) -> T:
        """Return the document as `type`; `kind` and `version` are left out if the type has no such fields."""
        value = self.value
        if isinstance(value, dict):
            fields = getattr(type, "__struct_encode_fields__", ())
            value = {key: item for key, item in value.items() if key not in ("kind", "version") or key in fields}
        try:
            return msgspec.convert(value, type, strict=True)
        except msgspec.ValidationError as problem:
            raise self._explained(explain(value, type, str(problem))) from None

    def _explained(self, fault: Fault) -> FileError:
        error = self.error(
            fault.what, where=self.where(fault.path), found=fault.found, expected=fault.expected, next=fault.next
        )
        error.fault, error.line = fault, self.line(fault.path)
        return error


def open_file(path: str | Path) -> BinaryIO:
    """Open a plain file for reading; anything else raises an OSError at once. A pipe would wait for its writer."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
    raise OSError(errno.EINVAL, f"this is {kind}, and not a plain file")


def read_text(path: str | Path, limit: int, error: type[FileError]) -> str:
    """Return the text of a file, which must be UTF-8, at most `limit` bytes, without NUL."""
    try:
        with open_file(path) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"cannot read the file: {reason}", where=str(path), next="Check the path") from None
    if len(data) > limit:
        raise error("the file is too large", where=str(path), expected=f"at most {limit} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise error(
            "the file is not UTF-8 text",
            where=f"{path} line {line}",
            found=f"byte 0x{data[problem.start]:02x}",
            next="Save it as UTF-8",
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise error("the file is not text", where=f"{path} line {line}", found="a NUL character")
    return text


def is_name(text: str) -> bool:
    """Return whether a cluster, host, region, device kind or job may have this name (`NAME_RULE`)."""
    return _NAME.fullmatch(text) is not None


def check_text(text: str) -> str | None:
    """Return what makes a string unusable as text anywhere (NUL, half of a surrogate pair), or None."""
    if "\0" in text:
        return "a NUL character"
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        return "half of a surrogate pair"
    return None
