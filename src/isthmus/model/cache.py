"""A folder of captured models, in which the name of an entry hashes everything the capture depends on.

An entry is therefore never stale and never needs a check of dates. A cache that cannot be read or written is treated as
empty: nothing fails, and no message is shown.
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
    """Return the entry of that key, or None if there is none."""
    path = _entry(key)
    try:
        return path.read_bytes() if path else None
    except OSError:
        return None


def write(key: str, data: bytes) -> None:
    """Store an entry; do nothing if it cannot be written."""
    path = _entry(key)
    if path is None:
        return
    with contextlib.suppress(OSError, FileError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, data)


def content_key(parts: Iterable[str | bytes]) -> str:
    """Return the sha256, in hex, of the parts.

    Each part is preceded by its length, so that different lists of parts cannot give the same bytes.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def versions(*packages: str) -> str:
    """Return `isthmus 0.1.0 torch 2.13.0 ...`, read from the installed metadata without importing the packages."""
    return f"isthmus {isthmus.__version__}" + "".join(f" {name} {_version(name)}" for name in packages)


def model_code() -> str:
    """Return the hash of the source of this package: the zoo, the capture, and the types it fills."""
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
