"""Compilation of Python loops with numba: three decorators and one cache.

By default numba keeps compiled code beside each source file and checks that file alone. A function that was compiled
together with one from another file would then stay as it was when the other file changes. So our compiled code goes
into a folder of the user's cache that is named by a hash of all sources concerned: it is never stale, and the folder of
an installed package need not be writable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event

from isthmus.files.cache_folder import cache_folder

__all__ = ["compiled", "inlined", "lean", "telling"]

Function = TypeVar("Function", bound=Callable[..., Any])


def _code() -> str:
    """Return a hash of the sources whose compiled functions call each other; other files call none of another file."""
    here, digest = Path(__file__).parent, hashlib.sha256()
    for file in (*sorted((here / "plan").rglob("*.py")), *sorted((here / "cost").rglob("*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


if not os.environ.get("NUMBA_CACHE_DIR") and (folder := cache_folder()) is not None:
    numba.config.CACHE_DIR = str(folder / f"numba-{_code()}")  # type: ignore[attr-defined]

_PLAIN: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy"}
_LEAN: dict[str, Any] = {**_PLAIN, "_nrt": False}  # _nrt: numba's runtime, which counts references


def compiled(function: Function) -> Function:
    """Compile a function."""
    made: Function = numba.njit(**_PLAIN)(function)
    return made


def lean(function: Function) -> Function:
    """Compile a function that uses only the arrays it is given, and count no references; it may not create arrays."""
    made: Function = numba.njit(**_LEAN)(function)
    return made


def inlined(function: Function) -> Function:
    """Compile a function like `lean`, and inline it into its callers: a call would pass seven words for each array."""
    made: Function = numba.njit(**_LEAN, forceinline=True)(function)
    return made


class _First(event.Listener):
    """Reports once that something is being compiled; code that is loaded from the cache does not count."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell: Callable[[], None] | None = tell

    def on_start(self, event: Any) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def on_end(self, event: Any) -> None:
        pass


@contextlib.contextmanager
def telling(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` when the first function has to be compiled within the context, if there is one."""
    with event.install_listener("numba:compile", _First(tell)):
        yield
