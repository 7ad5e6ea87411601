"""Compiling Python loops with numba: three decorators and one cache.

numba keeps compiled code beside each source file and looks at that file alone: a function that was compiled together
with one from another file would stay as it was when the other changes. So our code goes into a folder of the user's
cache that is named by a hash of all our sources: it is never stale, and installed packages need not be writable.
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
    """Hash of the sources whose compiled functions call each other; others call none of another file."""
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
    """Compile a function that only uses the arrays it is given: no references are counted. Making one is refused."""
    made: Function = numba.njit(**_LEAN)(function)
    return made


def inlined(function: Function) -> Function:
    """The same, and put it into its callers' code: a call hands over seven words for each array."""
    made: Function = numba.njit(**_LEAN, forceinline=True)(function)
    return made


class _First(event.Listener):
    """Tells once that something is being compiled; what comes out of the cache is not."""

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
    """Meanwhile, `tell` is called when the first function has to be compiled: not where all were before."""
    with event.install_listener("numba:compile", _First(tell)):
        yield
