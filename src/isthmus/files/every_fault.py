"""Finds every fault of a file in one reading, so that its writer need not come back once for each.

The file is built; what is at fault is taken out, and the rest is built again, until it can be built or nothing is left
to take out. A fault that only comes from what was taken out (its field is missing now, a link names a host that is
gone) is not reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from isthmus.errors import FileError
from isthmus.files.document import Document
from isthmus.files.explain import Fault, ValuePath

__all__ = ["build_or_every_fault"]

T = TypeVar("T")

_MOST_FAULTS = 20  # that are told of
_MOST_ROUNDS = 60


def build_or_every_fault(document: Document, build: Callable[[Document], T]) -> T:
    """What `build` makes of the document; where it cannot, its first error, which has all `others` with it."""
    try:
        return build(document)
    except FileError as error:
        error.others = tuple(_others(document, build, error))
        raise


def _others(document: Document, build: Callable[[Document], T], error: FileError) -> list[FileError]:
    """The errors that would come after this one."""
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
    """A document, and what was taken out of it or put in for the sake of the rest."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._gone: set[ValuePath] = set()
        self._filled: dict[ValuePath, Any] = {}
        self._unknown: set[ValuePath] = set()  # where names may have stood

    def without(self, error: FileError) -> Document | None:
        """The document without what is at fault; None where nothing can be taken out."""
        fault = error.fault
        if not isinstance(fault, Fault):
            return None
        target = _target(fault)
        if fault.placeholder is not None and self._filled.get(target) != fault.placeholder:
            self._filled[target] = fault.placeholder
            self._unknown.add(target)
            return self._changed(target[:-1], lambda parent: parent | {target[-1]: fault.placeholder})
        path = fault.path
        while path in self._gone or path in self._filled:
            path = path[:-1]
        return self._removed(path) if path else None

    def explains(self, error: FileError) -> bool:
        """Whether the fault may come from what was taken out or put in."""
        fault = error.fault
        if not isinstance(fault, Fault):
            return True
        if fault.refers and any(path[: len(fault.refers)] == fault.refers for path in self._unknown):
            return True
        target = _target(fault)
        below = any(path[: len(target)] == target for path in (*self._gone, *self._filled))
        return below or any(target[: len(path)] == path for path in self._filled)

    def _removed(self, path: ValuePath) -> Document | None:
        parent, key = _at(self._document.value, path[:-1]), path[-1]
        if not isinstance(parent, dict | list) or (isinstance(parent, dict) and key not in parent):
            return None
        self._gone.add(path)
        if isinstance(_at(parent, (key,)), dict):
            self._unknown.add(path)
        if isinstance(parent, dict):
            return self._changed(path[:-1], lambda old: {name: old[name] for name in old if name != key})
        changed = self._changed(path[:-1], lambda old: [None if at == key else item for at, item in enumerate(old)])
        self._document = msgspec.structs.replace(changed, dropped=changed.dropped | {path})
        return self._document

    def _changed(self, path: ValuePath, change: Callable[[Any], Any]) -> Document:
        value = _replaced(self._document.value, path, change)
        self._document = msgspec.structs.replace(self._document, value=value)
        return self._document


def _target(fault: Fault) -> ValuePath:
    return fault.path if fault.lacks is None else (*fault.path, fault.lacks)


def _at(value: Any, path: ValuePath) -> Any:
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return None
    return value


def _replaced(value: Any, path: ValuePath, change: Callable[[Any], Any]) -> Any:
    """A copy of the value with the part at `path` changed."""
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], change)
    return copy
