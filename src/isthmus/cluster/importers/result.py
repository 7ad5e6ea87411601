"""What an importer gives back: a cluster, and what it found, assumed, mended or left out on the way."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from isthmus.cluster.spec import Cluster

__all__ = ["Finding", "Imported"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that whoever uses the cluster should know; `rows` quotes the input with its lines."""

    kind: str
    what: str
    done: str
    rows: tuple[str, ...] = ()


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster from elsewhere; `source` says in a line what it was made from."""

    cluster: Cluster
    source: str
    findings: tuple[Finding, ...] = ()

    def comments(self) -> Iterator[str]:
        """The head of the file that is written: where it comes from, and each finding in a line."""
        yield f"Imported from {self.source}."
        yield from (f"{finding.kind}: {finding.what}; {finding.done}." for finding in self.findings)
