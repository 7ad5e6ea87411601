"""A cluster as text: its devices by class, its hosts, the links between its regions, and a map."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from isthmus.cluster.importers.result import Finding, Imported
from isthmus.cluster.islands import islands_note
from isthmus.cluster.spec import PRECISIONS, Cluster, Host, Link
from isthmus.report.class_names import HostClass, device_classes, host_classes
from isthmus.report.columns import columns, cut
from isthmus.units import format_bit_rate, format_byte_rate, format_bytes, format_compute, format_seconds

__all__ = ["cluster_notes", "cluster_text", "import_text"]

_LEGEND = (
    "~ marks values that are not in the file: they come from the catalog, a usual value or, for latency, the distance.",
    "Rates and latencies are one way. Rates inside a host are in bytes, between hosts in bits.",
)
_WIDEST_MATRIX = 6  # regions
_MOST_LINKS = 12  # links between hosts that are listed one by one
_MOST_NOTES = 4  # links that are faster than a nic
_MOST_ROWS = 4  # rows of a finding that are quoted


def cluster_text(cluster: Cluster) -> str:
    """Return the whole text, which is about a page."""
    devices, hosts, regions = len(cluster.devices), len(cluster.hosts), len(cluster.regions)
    lines = [f"{cluster.name}: {_count(devices, 'device')}, {_count(hosts, 'host')}, {_count(regions, 'region')}", ""]
    lines += [*_devices(cluster), "", *_hosts(cluster), ""]
    if cluster.links:
        lines += [*_links(cluster), ""]
    lines += ["map", *(f"  {line}" for line in _map(cluster)), "", *_LEGEND]
    for note in cluster_notes(cluster):
        lines += ["", *textwrap.wrap(f"note: {note}.", 118)]
    return "\n".join(lines)


def cluster_notes(cluster: Cluster) -> list[str]:
    """Return notes for readers of a cluster: hosts that no link joins, and links that a nic holds back."""
    slow = [note for link in cluster.links if (note := _held_back(cluster, link)) is not None]
    more = [f"{len(slow) - _MOST_NOTES} more links are faster than a nic"] if len(slow) > _MOST_NOTES else []
    note = islands_note(cluster)
    return [*([note] if note is not None else []), *slow[:_MOST_NOTES], *more]


def _held_back(cluster: Cluster, link: Link) -> str | None:
    """Return a note if no host at one end of the link has a nic that fills it; None if each end has such a host."""
    for end in dict.fromkeys(link.between):
        named = [cluster.hosts[end]] if end in cluster.hosts else []
        hosts = named or [host for host in cluster.hosts.values() if host.region == end]
        best = max(host.nic_best for host in hosts)
        if best < link.bandwidth:
            whose = f"{hosts[0].name}'s nic ({format_bit_rate(best)}), which limits it"
            if len(hosts) > 1:
                whose = f"every nic of {end} (at most {format_bit_rate(best)}), which limit it"
            return f"link {' - '.join(link.between)} ({format_bit_rate(link.bandwidth)}) is faster than {whose}"
    return None


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _devices(cluster: Cluster) -> list[str]:
    rows = [("devices", "number", "memory", "bandwidth", *PRECISIONS)]
    for group in device_classes(cluster):
        kind = cluster.kinds[group.kind]
        rates = [kind.compute.get(precision) for precision in PRECISIONS]
        rows.append(
            (
                group.name,
                str(len(group.devices)),
                format_bytes(kind.memory),
                format_byte_rate(kind.memory_bandwidth),
                *("-" if rate is None else format_compute(rate) for rate in rates),
            )
        )
    return columns(rows, right=range(1, 7))


def _hosts(cluster: Cluster) -> list[str]:
    rows: list[tuple[str, ...]] = [("hosts", "region", "number", "between devices", "nic", "bus", "memory", "cores")]
    for name, hosts in host_classes(cluster):
        host = hosts[0]
        inner = f"{_marked(host, 'bandwidth')}, {_marked(host, 'latency')}"
        figures = [_marked(host, field) for field in ("nic", "bus", "memory", "cores")]
        rows.append((name, host.region, str(len(hosts)), inner, *figures))
    return columns(rows, right=range(2, 8))


def _marked(host: Host, field: str) -> str:
    """Return the value as text, with ~ before it if the file did not give it."""
    value = getattr(host, field)
    if field == "cores":
        text = str(value)
    elif field == "latency":
        text = format_seconds(value)
    elif field == "nic":
        text = format_bit_rate(value)
        if host.nic_in != host.nic:
            text = f"{text} up, {format_bit_rate(host.nic_in)} down"
    else:
        text = format_bytes(value) if field == "memory" else format_byte_rate(value)
    return f"~{text}" if field in host.imputed else text


def _links(cluster: Cluster) -> list[str]:
    regions = cluster.regions
    shared = [link for link in cluster.links if link.between[0] not in cluster.hosts]
    own = [link for link in cluster.links if link.between[0] in cluster.hosts]
    between = {pair: link for link in shared for pair in (link.between, link.between[::-1])}
    if len(regions) > _WIDEST_MATRIX or not shared:
        rows = [(" - ".join(link.between), _figures(link)) for link in shared]
        return columns([("links", ""), *rows, *_own_links(cluster, own)])
    matrix = [("links", *regions)]
    for a in regions:
        matrix.append((a, *(_figures(between[a, b]) if (a, b) in between else "-" for b in regions)))
    return [*columns(matrix), *(": ".join(row) for row in _own_links(cluster, own))]


def _own_links(cluster: Cluster, links: list[Link]) -> list[tuple[str, str]]:
    """Return the links between hosts one by one or, if there are many, by region with the range of their figures."""
    if len(links) <= _MOST_LINKS:
        return [(" - ".join(link.between), _figures(link)) for link in links]
    groups: dict[tuple[str, ...], list[Link]] = {}
    for link in links:
        groups.setdefault(tuple(cluster.hosts[end].region for end in link.between), []).append(link)
    return [(" - ".join(regions), _ranges(group)) for regions, group in groups.items()]


def _ranges(links: list[Link]) -> str:
    rates = sorted({link.bandwidth for link in links})
    latencies = sorted({link.latency for link in links})
    spans = [
        " to ".join(dict.fromkeys(show(value) for value in (values[0], values[-1])))
        for values, show in ((rates, format_bit_rate), (latencies, format_seconds))
    ]
    return ", ".join([*spans, f"{_count(len(links), 'pair')} of hosts"])


def _figures(link: Link) -> str:
    trunk = f", trunk {format_bit_rate(link.trunk)}" if link.trunk is not None else ""
    mark = "~" if "latency" in link.imputed else ""
    return f"{format_bit_rate(link.bandwidth)}, {mark}{format_seconds(link.latency)}{trunk}"


def _map(cluster: Cluster) -> Iterator[str]:
    """Yield each region with its hosts below it, and the regions that it reaches."""
    groups = host_classes(cluster)
    for region in cluster.regions:
        yield region
        yield from (f"|-- {_host_line(group)}" for group in groups if group.hosts[0].region == region)
        for link in cluster.links:
            if region in link.between and link.between[0] != link.between[1]:
                other = link.between[link.between.index(region) - 1]
                mark = "~" if "latency" in link.imputed else ""
                yield f"|== {format_bit_rate(link.bandwidth)}, {mark}{format_seconds(link.latency)} ==> {other}"


def _host_line(group: HostClass) -> str:
    devices = ", ".join(f"{count} x {kind}" for kind, count in group.hosts[0].devices.items()) or "no devices"
    return f"{group.name}: {devices}{' each' if len(group.hosts) > 1 else ''}"


def import_text(imported: Imported, file: str) -> str:
    """Return a text that says what was imported, what the importer found, and which file was written."""
    cluster = imported.cluster
    counts = (_count(len(cluster.devices), "device"), _count(len(cluster.hosts), "host"))
    head = f"{', '.join(counts)} and {_count(len(cluster.links), 'link')} from {imported.source}"
    findings = [line for finding in imported.findings for line in _finding(finding)]
    return "\n".join([head, "", *findings, "", f"written to {file}; look at it: isthmus cluster show {file}"])


def _finding(finding: Finding) -> Iterator[str]:
    yield from textwrap.wrap(f"{finding.kind}: {finding.what}; {finding.done}", 118, subsequent_indent="  ")
    yield from (cut(f"    {row}") for row in finding.rows[:_MOST_ROWS])
    left = len(finding.rows) - _MOST_ROWS
    if left > 0:
        yield f"    ... {left} more; --json lists them all"
