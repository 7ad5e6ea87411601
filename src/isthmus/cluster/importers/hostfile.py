"""Imports hostfiles as MPI and DeepSpeed write them: one `name slots=N` per line; `#` begins a comment."""

from __future__ import annotations

import re
from pathlib import Path

from isthmus.cluster.importers.hosts import Around, cluster_of
from isthmus.cluster.importers.result import Imported
from isthmus.errors import ClusterError
from isthmus.files import NAME_RULE, expecting, is_name
from isthmus.files.document import read_text

__all__ = ["import_hostfile", "parse_hostfile"]

_LARGEST = 16 * 2**20  # bytes
_LINE = re.compile(r"(?P<name>\S+)\s+slots\s*=\s*(?P<slots>[0-9]{1,6})", re.ASCII)


def import_hostfile(path: str | Path, around: Around) -> Imported:
    """Import the cluster that a hostfile describes, with one device per slot."""
    with expecting(path, "hostfile", error=ClusterError):
        slots = parse_hostfile(read_text(path, _LARGEST, ClusterError), where=str(path))
    cluster, findings = cluster_of(slots, around, str(path))
    return Imported(cluster=cluster, source=f"the hostfile {Path(path).name}", findings=findings)


def parse_hostfile(text: str, where: str) -> dict[str, int]:
    """Return the number of slots of each host, in the order of the text; errors name the file `where`."""
    slots: dict[str, int] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        name, count = _entry(content, f"{where} line {number}")
        if name in slots:
            raise ClusterError(
                f"host {name!r} is given twice",
                where=f"{where} line {number}",
                found=f"it on line {lines[name]} as well",
            )
        slots[name], lines[name] = count, number
    if not slots:
        raise ClusterError("the hostfile names no host", where=where, expected="lines like worker-1 slots=4")
    return slots


def _entry(content: str, where: str) -> tuple[str, int]:
    match = _LINE.fullmatch(content)
    if match is None:
        raise ClusterError(
            "this line cannot be read", where=where, found=repr(content[:80]), expected="a line like worker-1 slots=4"
        )
    if not is_name(match["name"]):
        raise ClusterError(
            "this is not a valid host name", where=where, found=repr(match["name"][:80]), expected=NAME_RULE
        )
    if int(match["slots"]) < 1:
        raise ClusterError(f"host {match['name']!r} has no slots", where=where, expected="at least 1")
    return match["name"], int(match["slots"])
