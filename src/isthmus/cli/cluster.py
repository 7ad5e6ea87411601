"""The command `isthmus cluster show FILE`."""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from isthmus.cli.console import Answer, ProgressLine
from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster, Device, Host, Link
from isthmus.report.class_names import device_classes
from isthmus.report.cluster_text import cluster_notes, cluster_text

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Return the devices, hosts and links of a cluster, and what was filled in."""
    cluster = load_cluster(args.file)
    return Answer(values=_values(cluster), text=cluster_text(cluster))


def _values(cluster: Cluster) -> dict[str, Any]:
    imputed = {host.name: sorted(host.imputed) for host in cluster.hosts.values() if host.imputed}
    imputed |= {" - ".join(link.between): sorted(link.imputed) for link in cluster.links if link.imputed}
    return {
        "name": cluster.name,
        "regions": list(cluster.regions),
        "hosts": [_host(host) for host in cluster.hosts.values()],
        "devices": [_device(cluster, device) for device in cluster.devices.values()],
        "classes": [
            {"name": c.name, "region": c.region, "kind": c.kind, "devices": len(c.devices)}
            for c in device_classes(cluster)
        ],
        "kinds": msgspec.to_builtins(list(cluster.kinds.values())),
        "links": [_link(link) for link in cluster.links],
        "imputed": imputed,
        "notes": cluster_notes(cluster),
    }


def _host(host: Host) -> dict[str, Any]:
    return {**msgspec.to_builtins(host), "imputed": sorted(host.imputed)}


def _device(cluster: Cluster, device: Device) -> dict[str, Any]:
    return {**msgspec.to_builtins(device), "region": cluster.hosts[device.host].region}


def _link(link: Link) -> dict[str, Any]:
    return {**msgspec.to_builtins(link), "imputed": sorted(link.imputed)}
