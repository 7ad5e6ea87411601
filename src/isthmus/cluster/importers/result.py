"""The result of an importer: a cluster, and what it found, assumed, corrected or left out on the way."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from isthmus.cluster.spec import Cluster

__all__ = ["Finding", "Imported"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that the user of the cluster should know; `rows` quotes the input with its line numbers."""

    kind: str
    what: str
    done: str
    rows: tuple[str, ...] = ()


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """An imported cluster; `source` says in one line what it was made from."""

    cluster: Cluster
    source: str
    findings: tuple[Finding, ...] = ()

    def comments(self) -> Iterator[str]:
        """Yield the comments for the head of the written file: the cluster's source, and each finding in a line."""
        yield f"Imported from {self.source}."
        yield from (f"{finding.kind}: {finding.what}; {finding.done}." for finding in self.findings)
