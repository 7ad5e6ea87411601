"""Loads a YAML file that states its kind: reads it, checks the kind, and builds what it describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from isthmus.errors import FileError
from isthmus.files.document import Document
from isthmus.files.every_fault import build_or_every_fault
from isthmus.files.kinds import expecting
from isthmus.files.strict_yaml import read_yaml

__all__ = ["build_document", "load_yaml"]

T = TypeVar("T")


def load_yaml(path: str | Path, builders: Mapping[str, Callable[[Document], T]], *, error: type[FileError]) -> T:
    """Return what a file of one of these kinds describes; `builders` gives for each kind how it is built."""
    with expecting(path, *builders, error=error):
        return build_document(read_yaml(path, error=error), builders)


def build_document(document: Document, builders: Mapping[str, Callable[[Document], T]]) -> T:
    """Return what a document of one of these kinds describes, or raise one error with every fault."""
    return build_or_every_fault(document, builders[document.check(*builders)])
