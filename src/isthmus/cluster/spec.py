"""The types of a cluster: region > host > device, and the links between hosts.

All values are in base units (bytes, seconds, bytes per second). A value that the file did not give is filled in when
the file is loaded, and its field name is listed in `imputed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Literal

import msgspec

from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

__all__ = ["PRECISIONS", "TCP_PAYLOAD", "Cluster", "Device", "DeviceKind", "Host", "Link", "Precision"]

Precision = Literal["fp32", "bf16", "fp16"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
TCP_PAYLOAD = 1460 / 1500  # part of a link's bandwidth that carries data: 40 of a packet's 1500 bytes are headers


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device: its memory, and its dense peak rate in each precision that it has."""

    name: str
    compute: Mapping[Precision, FlopsPerSecond]
    memory: Bytes
    memory_bandwidth: BytesPerSecond
    bus: BytesPerSecond  # host memory to one such device, each way
    peer: BytesPerSecond  # usual rate between two such devices of one host, each way

    def computes_in(self, precision: Precision, mixed: bool) -> Precision | None:
        """Return the precision in which a device of this kind computes a job, or None if it cannot.

        That is the job's precision, unless the kind lacks it or is slower in it than in fp32. In that case the device
        computes in fp32 if the job is mixed, and not at all otherwise.
        """
        own, full = self.compute.get(precision), self.compute.get("fp32")
        if own is not None and (full is None or own >= full):
            return precision
        return "fp32" if mixed and full is not None else None


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device, named `host/kind/index`; the index counts the devices of that kind on that host from 0."""

    name: str
    host: str
    kind: str
    index: int


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One machine: how many devices of which kinds it has, and how they are joined to each other and to the network."""

    name: str
    region: str
    devices: Mapping[str, int]
    bandwidth: BytesPerSecond  # between two of its devices, each way
    latency: Seconds  # between two of its devices
    nic: BytesPerSecond  # to all other hosts together; from them too, if `down` is not given
    bus: BytesPerSecond  # host memory to one device, each way
    memory: Bytes
    cores: int
    address: str | None = None
    imputed: frozenset[str] = frozenset()
    down: BytesPerSecond | msgspec.UnsetType = msgspec.UNSET  # from all other hosts together, if it differs from `nic`

    @property
    def nic_in(self) -> BytesPerSecond:
        """Return the rate at which the host's NIC can receive from other hosts, in bytes per second."""
        return self.nic if self.down is msgspec.UNSET else self.down

    @property
    def nic_best(self) -> BytesPerSecond:
        """Return the rate of the faster direction of the host's NIC, which bounds may rely on."""
        return max(self.nic, self.nic_in)

    @property
    def shape(self) -> tuple[object, ...]:
        """Return a value that is equal for hosts that differ in nothing but their names.

        Hosts of equal shape and equal links form classes.
        """
        kinds = tuple(self.devices.items())
        return (
            self.region,
            kinds,
            self.bandwidth,
            self.latency,
            self.nic,
            self.nic_in,
            self.bus,
            self.memory,
            self.cores,
        )


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """The bandwidth and latency that one pair of hosts can reach, each way.

    `between` names two hosts or two regions (which may be the same). `trunk` caps all flows between the two regions
    together, each way; only a link between regions has one.
    """

    between: tuple[str, str]
    bandwidth: BytesPerSecond
    latency: Seconds
    trunk: BytesPerSecond | None = None
    imputed: frozenset[str] = frozenset()


class Cluster(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A whole cluster. Hosts are in the order of the file, and so are devices: by host, then by kind, then by index."""

    name: str
    kinds: Mapping[str, DeviceKind]
    hosts: Mapping[str, Host]
    links: tuple[Link, ...]

    @cached_property
    def devices(self) -> Mapping[str, Device]:
        """Return every device by its name, in order."""
        return {
            (name := f"{host.name}/{kind}/{index}"): Device(name=name, host=host.name, kind=kind, index=index)
            for host in self.hosts.values()
            for kind, count in host.devices.items()
            for index in range(count)
        }

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Return the names of the regions in order of first appearance."""
        return tuple(dict.fromkeys(host.region for host in self.hosts.values()))

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {pair: link for link in self.links for pair in (link.between, link.between[::-1])}

    def kind_of(self, device: str) -> DeviceKind:
        """Return the kind of the named device."""
        return self.kinds[self.devices[device].kind]

    def host_of(self, device: str) -> Host:
        """Return the host of the named device."""
        return self.hosts[self.devices[device].host]

    def link(self, a: str, b: str) -> Link | None:
        """Return the link between two different hosts: their own, or else their regions'.

        None if they cannot talk directly.
        """
        own = self._links.get((a, b))
        return own if own is not None else self._links.get((self.hosts[a].region, self.hosts[b].region))

    def trunk(self, a: str, b: str) -> BytesPerSecond | None:
        """Return the cap on all flows between two regions together, if their link has one."""
        link = self._links.get((a, b))
        return link.trunk if link is not None else None
