"""The folder for results that can be computed again."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path | None:
    """Return $ISTHMUS_CACHE, else $XDG_CACHE_HOME/isthmus, else ~/.cache/isthmus, or None if there is no home."""
    if chosen := os.environ.get("ISTHMUS_CACHE"):
        return Path(chosen)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if Path(shared).is_absolute():
        return Path(shared) / "isthmus"
    try:
        return Path.home() / ".cache" / "isthmus"
    except RuntimeError:
        return None
