"""A directory of captured models, named by what they were captured from.

The name of an entry hashes everything the capture depends on, so an entry is never stale and never needs a check of
dates. A cache that cannot be read or written is as good as none: nothing fails, nothing is said.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import isthmus
from isthmus.errors import FileError
from isthmus.files import cache_folder, write_whole

__all__ = ["content_key", "model_code", "read", "versions", "write"]


def read(key: str) -> bytes | None:
    """The entry of that key, or None."""
    path = _entry(key)
    try:
        return path.read_bytes() if path else None
    except OSError:
        return None


def write(key: str, data: bytes) -> None:
    """Stores an entry; one that cannot be written is left out."""
    path = _entry(key)
    if path is None:
        return
    with contextlib.suppress(OSError, FileError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, data)


def content_key(parts: Iterable[str | bytes]) -> str:
    """sha256, in hex, of the parts, each preceded by its length so that no two lists of parts run into one."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def versions(*packages: str) -> str:
    """`isthmus 0.1.0 torch 2.13.0 ...`, read from the installed metadata: the packages are not imported."""
    return f"isthmus {isthmus.__version__}" + "".join(f" {name} {_version(name)}" for name in packages)


def model_code() -> str:
    """Hash of the source of this package: the zoo, the capture, the types it fills."""
    here = Path(__file__).parent
    files = sorted(here.rglob("*.py"))
    return content_key(part for file in files for part in (str(file.relative_to(here)), file.read_bytes()))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _entry(key: str) -> Path | None:
    folder = cache_folder()
    return folder / f"{key}.json" if folder else None
