"""Imports the machines of the Hulk paper: 47 in 12 cities, with the time to send 64 bytes between pairs of them.

Milliseconds are taken as round trips, so a link's latency is half. The files give neither bandwidth nor how many
devices a machine has: one bandwidth is assumed for all links, and the number of devices is the machine's memory divided
by the memory of the kind that stands for its compute capability, rounded, and at least one.

`fill` also links the machines that have no measured time: each pair of cities gets a link of its own. Its latency is
half the median of the pair's rows. A pair without rows gets no latency, so that loading imputes it by distance and
marks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.importers.hulk_clean import Cleaned, clean
from isthmus.cluster.importers.hulk_files import HulkMachine, Machines, Row, city_medians, read_machines, read_rows
from isthmus.cluster.importers.result import Finding, Imported
from isthmus.cluster.load import build_cluster
from isthmus.errors import ClusterError

__all__ = ["KINDS", "import_hulk"]

# The kind that stands for each compute capability: a common card, preferably one whose memory divides the machines'.
KINDS: Mapping[float, str] = {6.1: "GTX-1080", 7.0: "V100-32GB", 7.5: "TITAN-RTX", 8.0: "A100-40GB", 8.6: "RTX-3090"}

_PUBLISHED = {frozenset(("nanjing", "london")): 176.7}  # ms, from the paper's own table, where the file differs
_ASSUMED = "1 Gbit/s"

Cities = list[frozenset[str]]


def import_hulk(
    nodes: str | Path, edges: str | Path, *, name: str = "hulk", bandwidth: str | None = None, fill: bool = False
) -> Imported:
    """Import the cluster of the two files, cleaned; the findings say what was wrong and what was assumed."""
    machines = read_machines(nodes)
    rows = read_rows(edges, machines)
    cleaned = clean(machines, rows)
    hosts = {machine.host: _host(machine, str(nodes)) for machine in machines.values()}
    between = [*_links(machines, cleaned), *(_fillers(machines, cleaned) if fill else ())]
    links = [link | {"bandwidth": bandwidth or _ASSUMED} for link in between]
    cluster = build_cluster({"name": name, "hosts": hosts, "links": links}, str(edges))
    findings = (
        *_assumptions(machines, bandwidth),
        *_blanks(machines),
        *cleaned.findings,
        *_published(machines, cleaned.rows),
        *_gaps(machines, rows, cleaned, fill=fill),
    )
    return Imported(
        cluster=cluster, source=f"the Hulk data, {Path(nodes).name} and {Path(edges).name}", findings=findings
    )


def _host(machine: HulkMachine, where: str) -> dict[str, Any]:
    kind = KINDS.get(machine.capability)
    if kind is None:
        raise ClusterError(
            f"machine {machine.node} has a compute capability that no kind stands for",
            where=where,
            found=f"{machine.capability:g}",
            expected=f"one of {', '.join(f'{known:g}' for known in KINDS)}",
        )
    return {"region": machine.city, "devices": {kind: max(1, round(machine.memory / CATALOG[kind].memory))}}


def _links(machines: Machines, cleaned: Cleaned) -> Iterator[dict[str, Any]]:
    for (a, b), ms in sorted(cleaned.times.items()):
        yield {"between": [machines[a].host, machines[b].host], "latency": f"{ms / 2!r} ms"}


def _city_pairs(machines: Machines) -> Cities:
    """Return every pair of cities that has a pair of machines.

    A city with several machines is also paired with itself.
    """
    found = [frozenset((machines[a].city, machines[b].city)) for a, b in combinations(machines, 2)]
    return list(dict.fromkeys(found))


def _fillers(machines: Machines, cleaned: Cleaned) -> Iterator[dict[str, Any]]:
    medians = city_medians(cleaned.rows, machines)
    for cities in _city_pairs(machines):
        ends = sorted(cities) * (3 - len(cities))
        latency = {"latency": f"{medians[cities] / 2!r} ms"} if cities in medians else {}
        yield {"between": ends, **latency}


def _assumptions(machines: Machines, bandwidth: str | None) -> Iterator[Finding]:
    yield Finding(
        kind="round-trip",
        what="the files do not say whether milliseconds are one way",
        done="they are taken as round trips: latency is half",
    )
    if bandwidth is None:
        yield Finding(
            kind="assumed-bandwidth",
            what="the files have no bandwidth",
            done=f"every link has {_ASSUMED}; give --bandwidth for another",
        )
    kinds = ", ".join(f"{capability} {kind}" for capability, kind in KINDS.items())
    yield Finding(
        kind="kind-for-capability",
        what="the files have compute capabilities, not kinds of device",
        done=f"taken for: {kinds}",
    )
    off = [machine for machine in machines.values() if _devices_memory(machine) != machine.memory]
    yield Finding(
        kind="devices-from-memory",
        what="how many devices a machine has cannot be known",
        done=f"its memory divided by that of its kind, rounded; {len(off)} machines do not come out even",
        rows=tuple(f"{machine.row}: {_devices_memory(machine) / 1e9:g} GB" for machine in off),
    )


def _devices_memory(machine: HulkMachine) -> float:
    kind = CATALOG[KINDS[machine.capability]]
    return max(1, round(machine.memory / kind.memory)) * kind.memory


def _blanks(machines: Machines) -> Iterator[Finding]:
    rows = tuple(repr(machine.row) for machine in machines.values() if machine.blank)
    if rows:
        yield Finding(kind="blank-in-name", what="a city is written with a blank at its end", done="removed", rows=rows)


def _published(machines: Machines, rows: list[Row]) -> Iterator[Finding]:
    medians = city_medians(rows, machines)
    for cities, ms in _PUBLISHED.items():
        if cities in medians and abs(medians[cities] - ms) > 0.1 * ms:
            found = [row for row in rows if {machines[row.a].city, machines[row.b].city} == cities]
            what = f"{' - '.join(sorted(cities))}: the file says {medians[cities]:g} ms, the paper's table {ms:g} ms"
            yield Finding(kind="differs-from-paper", what=what, done="the file's is kept", rows=tuple(map(str, found)))


def _gaps(machines: Machines, rows: list[Row], cleaned: Cleaned, *, fill: bool) -> Iterator[Finding]:
    pairs = _city_pairs(machines)
    measured = city_medians([row for row in rows if row.a != row.b], machines)
    trusted = city_medians(cleaned.rows, machines)
    none = [cities for cities in pairs if cities not in measured]
    lost = [cities for cities in pairs if cities in measured and cities not in trusted]
    more = f"; {len(lost)} more ({', '.join(map(_label, lost))}) none that can be trusted" if lost else ""
    yield Finding(
        kind="cities-without-row",
        what=f"{len(none)} pairs of cities have no row{more}",
        done="linked; latency imputed by distance" if fill else "not linked; --fill links them by distance",
        rows=tuple(map(_label, none)),
    )
    total = len(machines) * (len(machines) - 1) // 2
    yield Finding(
        kind="machines-without-row",
        what=f"{len(cleaned.times)} of {total} pairs of machines have a time after cleaning",
        done="the others share their cities' link" if fill else "the others are not linked; --fill links their cities",
    )


def _label(cities: frozenset[str]) -> str:
    return " - ".join(sorted(cities) * (3 - len(cities)))
