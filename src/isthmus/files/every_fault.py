"""Finds every fault of a file in one reading, so that its author can correct all of them at once.

The file is built; whatever is at fault is taken out, and the rest is built again, until it can be built or nothing is
left to take out. A misspelt field gets the name that was most likely meant, so that its value is checked too. A fault
that only comes from what was taken out (its field is missing now, or a link names a host that is gone) is not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from isthmus.errors import FileError
from isthmus.files.document import Document
from isthmus.files.fault_words import Fault, ValuePath, replaced, value_at

__all__ = ["build_or_every_fault"]

T = TypeVar("T")

_MOST_FAULTS = 20  # reported at most
_MOST_ROUNDS = 60


def build_or_every_fault(document: Document, build: Callable[[Document], T]) -> T:
    """Return what `build` makes of the document, or raise the error of the first line, with all `others`."""
    try:
        return build(document)
    except FileError as error:
        first, *others = sorted([error, *_others(document, build, error)], key=lambda fault: fault.line)
    first.others = tuple({str(other): other for other in others if str(other) != str(first)}.values())
    raise first


def _others(document: Document, build: Callable[[Document], T], error: FileError) -> list[FileError]:
    """Return the errors that would come after this one."""
    mending, found = _Mending(document), list[FileError]()
    mended = mending.without(error)
    for _ in range(_MOST_ROUNDS):
        if mended is None or len(found) + 1 >= _MOST_FAULTS:
            break
        try:
            build(mended)
            break
        except FileError as other:
            if not mending.explains(other):
                found.append(other)
            mended = mending.without(other)
    return found


class _Mending:
    """A document, with a record of what was taken out of it or put in so that the rest can be checked."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._gone: set[ValuePath] = set()
        self._filled: dict[ValuePath, Any] = {}
        self._passed: set[ValuePath] = set()  # places of names that nothing defines, and that are left in

    def without(self, error: FileError) -> Document | None:
        """Return the document without what is at fault, or None if nothing can be taken out."""
        fault = error.fault
        if not isinstance(fault, Fault):
            return None
        if fault.passable:
            return self._past(fault)
        if fault.meant is not None and fault.meant not in (value_at(self._document.value, fault.path[:-1]) or {}):
            return self._renamed(fault.path, fault.meant)
        target = _target(fault)
        if fault.placeholder is not None and self._filled.get(target) != fault.placeholder:
            self._filled[target] = fault.placeholder
            return self._changed(target[:-1], lambda parent: parent | {target[-1]: fault.placeholder})
        path = fault.path
        while path in self._gone or path in self._filled:
            path = path[:-1]
        return self._removed(path) if path else None

    def explains(self, error: FileError) -> bool:
        """Return whether the fault may come from what was taken out of the document or put in."""
        fault = error.fault
        if not isinstance(fault, Fault):
            return True
        touched = (*self._gone, *self._filled)
        if any(_may_name(path, pattern) for path in touched for pattern in fault.refers):
            return True
        if not self._passed.isdisjoint(fault.refers):
            return True
        if fault.passable:
            return False
        target = _target(fault)
        below = any(path[: len(target)] == target for path in (*self._gone, *self._filled))
        return below or any(target[: len(path)] == path for path in self._filled)

    def _removed(self, path: ValuePath) -> Document | None:
        parent, key = value_at(self._document.value, path[:-1]), path[-1]
        if not isinstance(parent, dict | list) or (isinstance(parent, dict) and key not in parent):
            return None
        self._gone.add(path)
        self._document = msgspec.structs.replace(self._document, dropped=self._document.dropped | {path})
        if isinstance(parent, dict):
            return self._changed(path[:-1], lambda old: {name: old[name] for name in old if name != key})
        return self._changed(path[:-1], lambda old: [None if at == key else item for at, item in enumerate(old)])

    def _past(self, fault: Fault) -> Document:
        if fault.refers:
            self._passed.add(fault.path)
        passed = self._document.passed | {(fault.path, fault.what)}
        self._document = msgspec.structs.replace(self._document, passed=passed)
        return self._document

    def _renamed(self, path: ValuePath, name: str) -> Document:
        new, lines = (*path[:-1], name), self._document.lines
        moved = {(*new, *at[len(path) :]): line for at, line in lines.items() if at[: len(path)] == path}
        self._document = msgspec.structs.replace(self._document, lines={**lines, **moved})
        return self._changed(
            path[:-1], lambda old: {name if key == path[-1] else key: item for key, item in old.items()}
        )

    def _changed(self, path: ValuePath, change: Callable[[Any], Any]) -> Document:
        value = replaced(self._document.value, path, change)
        self._document = msgspec.structs.replace(self._document, value=value)
        return self._document


def _target(fault: Fault) -> ValuePath:
    return fault.path if fault.lacks is None else (*fault.path, fault.lacks)


def _may_name(path: ValuePath, pattern: ValuePath) -> bool:
    """Return whether a name that the pattern allows may have stood at `path`, or below it."""
    return len(path) <= len(pattern) and all(wanted in ("*", part) for part, wanted in zip(path, pattern, strict=False))
