"""Builds the cluster where a source only names hosts and counts their devices, as hostfiles and batch systems do."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.cluster.importers.result import Finding
from isthmus.cluster.load import build_cluster
from isthmus.cluster.spec import Cluster

__all__ = ["Around", "cluster_of"]


class Around(msgspec.Struct, frozen=True, kw_only=True):
    """What such sources leave out and a person must give: the kind of device, the region and the link between hosts."""

    name: str
    kind: str
    region: str
    bandwidth: str | None = None
    latency: str | None = None


def cluster_of(devices: Mapping[str, int], around: Around, where: str) -> tuple[Cluster, tuple[Finding, ...]]:
    """Return the cluster of these hosts, each with so many devices, and the assumptions that were made about it."""
    hosts = {host: {"region": around.region, "devices": {around.kind: count}} for host, count in devices.items()}
    cluster = build_cluster({"name": around.name, "hosts": hosts, "links": _links(around)}, where)
    return cluster, (_kind(around), *_no_link(around, len(hosts)))


def _links(around: Around) -> list[dict[str, object]]:
    figures = {"bandwidth": around.bandwidth, "latency": around.latency}
    given = {field: figure for field, figure in figures.items() if figure is not None}
    return [{"between": [around.region, around.region], **given}] if given else []


def _kind(around: Around) -> Finding:
    return Finding(
        kind="assumed-kind",
        what="the source does not say what its devices are",
        done=f"every device is taken for {around.kind}",
    )


def _no_link(around: Around, hosts: int) -> tuple[Finding, ...]:
    if hosts == 1 or around.bandwidth is not None or around.latency is not None:
        return ()
    done = "no link is written, so the hosts cannot talk: give --bandwidth and --latency, or write it under links:"
    return (Finding(kind="no-link", what="the source does not say what joins its hosts", done=done),)
