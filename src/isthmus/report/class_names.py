"""Names for classes of devices that are equal in kind, host shape and region, like `tokyo[1-64]/V100-16GB/*`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from isthmus.cluster.spec import Cluster, Host

__all__ = ["DeviceClass", "HostClass", "device_classes", "host_classes"]

_NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>[0-9]+)")
_LISTED = 3  # names that are written out if they are not a range


class HostClass(NamedTuple):
    """Hosts of one region and one shape."""

    name: str
    hosts: tuple[Host, ...]


class DeviceClass(NamedTuple):
    """Devices of one kind on hosts of one class."""

    name: str
    region: str
    kind: str
    devices: tuple[str, ...]


def host_classes(cluster: Cluster) -> tuple[HostClass, ...]:
    """Return the hosts grouped by region, devices and figures (imputed or not), in order of first appearance."""
    groups: dict[object, list[Host]] = {}
    for host in cluster.hosts.values():
        figures = (host.bandwidth, host.latency, host.nic, host.nic_in, host.bus, host.memory, host.cores, host.imputed)
        groups.setdefault((host.region, tuple(host.devices.items()), figures), []).append(host)
    return tuple(HostClass(_name([host.name for host in hosts]), tuple(hosts)) for hosts in groups.values())


def device_classes(cluster: Cluster) -> tuple[DeviceClass, ...]:
    """Return every device in its class, in order of first appearance."""
    found = []
    for name, hosts in host_classes(cluster):
        for kind, count in hosts[0].devices.items():
            devices = tuple(f"{host.name}/{kind}/{index}" for host in hosts for index in range(count))
            label = devices[0] if len(devices) == 1 else f"{name}/{kind}/*"
            found.append(DeviceClass(label, hosts[0].region, kind, devices))
    return tuple(found)


def _name(hosts: Sequence[str]) -> str:
    """Return `tokyo[1-64]` for consecutively numbered hosts, else the names, cut after a few."""
    if len(hosts) == 1:
        return hosts[0]
    matches = [_NUMBERED.fullmatch(host) for host in hosts]
    first, last = matches[0], matches[-1]
    if first and last:
        numbers = range(int(first["number"]), int(last["number"]) + 1)
        padded = len(first["number"]) if first["number"].startswith("0") else 0
        if [f"{first['head']}{number:0{padded}d}" for number in numbers] == list(hosts):
            return f"{first['head']}[{first['number']}-{last['number']}]"
    rest = len(hosts) - _LISTED
    return ",".join(hosts[:_LISTED]) + (f",+{rest}" if rest > 0 else "")
