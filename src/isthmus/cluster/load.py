"""Reads a cluster file (device kinds, hosts and links), fills in what it leaves out, and marks what was filled in.

A host named `tokyo[1-64]` stands for 64 equal hosts tokyo1 ... tokyo64 (`node[01-16]`: node01 ... node16). A link names
two hosts, or two regions, or one region twice; a pair of hosts without any link cannot talk directly.

What a host leaves out is imputed:

- `bandwidth` and `bus` are those of the slowest of its device kinds; `latency` is 5 us.
- `nic` is 10 Gbit/s, or the rate of the fastest link of the host or of its region if that is more (nobody buys a link
  that the NIC cannot fill).
- `memory` is 16 GB plus twice the memory of its devices; `cores` is 8 per device.

A device kind that the catalog does not know must give compute, memory and memory_bandwidth; one that it knows may
replace some of the catalog's figures. A missing `bus` is PCIe 3 with 16 lanes, a missing `peer` is the bus. A link
between two regions that are known places may leave out its latency (see `places`); no link may leave out its bandwidth.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.places import find_place, imputed_latency
from isthmus.cluster.spec import PRECISIONS, Cluster, DeviceKind, Host, Link, Precision
from isthmus.errors import ClusterError
from isthmus.files import (
    NAME_RULE,
    Document,
    ValuePath,
    build_document,
    close_name,
    encode_json,
    is_name,
    load_yaml,
    parse_yaml,
    show_path,
)
from isthmus.units import (
    BytesPerSecond,
    close_quantity,
    format_bandwidth,
    format_bytes,
    format_compute,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_compute,
    parse_seconds,
)

__all__ = ["build_cluster", "cluster_digest", "load_cluster", "parse_cluster"]

_MOST_DEVICES = 200_000
_BUS = 12e9  # bytes per second: PCIe 3 x16, the slowest bus still in use
_NIC = 10e9 / 8  # bytes per second
_LATENCY = 5e-6  # seconds between two devices of one host
# Figures that stand in for those that a device kind lacks, so that other faults of the file can be found.
_SOME: dict[str, Any] = {"compute": {"fp32": 1e12}, "memory": 1e9, "memory_bandwidth": 1e11}
_NAMES_OF_HOSTS = (("hosts", "*"), ("hosts", "*", "region"))  # the places in the file that name hosts and regions
_PATTERN = re.compile(
    r"(?P<head>[^\[\]]{0,64})\[(?P<first>[0-9]{1,6})-(?P<last>[0-9]{1,6})\](?P<tail>[^\[\]]{0,64})", re.ASCII
)
_ADDRESS = re.compile(r"[A-Za-z0-9:\[][A-Za-z0-9.:\[\]_%-]{0,252}")

ComputeText = Annotated[str, msgspec.Meta(examples=["35 TFLOP/s"])]
BytesText = Annotated[str, msgspec.Meta(examples=["40 GB"])]
BandwidthText = Annotated[str, msgspec.Meta(examples=["25 Gbit/s"])]
SecondsText = Annotated[str, msgspec.Meta(examples=["44 ms"])]
Counts = Annotated[dict[str, int], msgspec.Meta(examples=["{RTX-3090: 4}"])]


class _Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    compute: ComputeText | dict[Precision, ComputeText] | None = None
    memory: BytesText | None = None
    memory_bandwidth: BandwidthText | None = None
    bus: BandwidthText | None = None
    peer: BandwidthText | None = None


class _Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    up: BandwidthText
    down: BandwidthText


class _Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    region: str
    devices: Counts
    bandwidth: BandwidthText | None = None
    latency: SecondsText | None = None
    nic: BandwidthText | _Nic | None = None
    bus: BandwidthText | None = None
    memory: BytesText | None = None
    cores: int | None = None
    address: str | None = None


class _Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    between: tuple[str, str]
    bandwidth: BandwidthText | None = None
    latency: SecondsText | None = None
    trunk: BandwidthText | None = None


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    devices: dict[str, _Kind] = {}
    hosts: dict[str, _Host]
    links: list[_Link | None] = []  # null in the place of a faulty link, while the others are checked


class _Measure(msgspec.Struct, frozen=True):
    """How a quantity is read and shown, and the range of values that is believable."""

    parse: Callable[[str], float]
    least: float
    most: float
    show: Callable[[float], str]

    @property
    def span(self) -> str:
        """Return the believable range as text: `1 ns to 60 s`."""
        return f"{self.show(self.least)} to {self.show(self.most)}"


_MEASURES = {
    "compute": _Measure(parse_compute, 1e6, 1e18, format_compute),
    "memory": _Measure(parse_bytes, 1e6, 1e15, format_bytes),
    "latency": _Measure(parse_seconds, 1e-9, 60.0, format_seconds),
}
_RATE = _Measure(parse_bandwidth, 125.0, 1e15, format_bandwidth)  # every other quantity of the file


def load_cluster(path: str | Path) -> Cluster:
    """Load the cluster that a file describes."""
    return load_yaml(path, {"cluster": _built}, error=ClusterError)


def parse_cluster(text: str, where: str = "cluster.yaml") -> Cluster:
    """Return the cluster that the text of a file describes; errors name the file `where`."""
    return build_document(parse_yaml(text, name=where, error=ClusterError), {"cluster": _built})


def build_cluster(value: Mapping[str, Any], where: str) -> Cluster:
    """Return the cluster that a file with these values would describe, with the same checks and the same filling in.

    Errors name the file `where`.
    """
    plain = {"kind": "cluster", "version": 1} | dict(value)
    return build_document(Document(name=where, value=plain, error=ClusterError), {"cluster": _built})


def cluster_digest(cluster: Cluster) -> str:
    """Return the sha256 of the cluster's JSON: fields in order, hosts in order, sets sorted."""
    return hashlib.sha256(encode_json(cluster)).hexdigest()


def _built(document: Document) -> Cluster:
    file = document.convert(_File)
    _check_name(document, ("name",), file.name)
    kinds = dict(CATALOG) | {name: _kind(document, name, raw) for name, raw in file.devices.items()}
    hosts = _hosts(document, file, kinds)
    links = _links(document, file, hosts)
    used = dict.fromkeys(kind for host in hosts.values() for kind in host.devices)
    return Cluster(
        name=file.name, kinds={name: kinds[name] for name in used}, hosts=_with_nics(hosts, links), links=links
    )


def _with_nics(hosts: Mapping[str, Host], links: tuple[Link, ...]) -> dict[str, Host]:
    """Return the hosts, giving each one without a NIC of its own a NIC that fills its fastest link."""
    fastest: dict[str, BytesPerSecond] = {}
    for link in links:
        for end in link.between:
            fastest[end] = max(link.bandwidth, fastest.get(end, link.bandwidth))
    return {
        name: msgspec.structs.replace(
            host, nic=max(host.nic, fastest.get(name, host.nic), fastest.get(host.region, host.nic))
        )
        if "nic" in host.imputed
        else host
        for name, host in hosts.items()
    }


def _check_name(document: Document, path: ValuePath, name: str) -> None:
    if not is_name(name):
        raise document.fault(
            path,
            f"{show_path(path)}: this is not a valid name",
            found=repr(name[:80]),
            expected=NAME_RULE,
        )


def _amount(document: Document, path: ValuePath, text: str, measure: _Measure) -> float:
    """Return the quantity in base units; refuse zero, negative and unbelievable values."""
    try:
        value = measure.parse(text)
    except ValueError as problem:
        negative = text.lstrip().startswith("-")
        raise document.fault(
            path,
            f"{show_path(path)} is {'negative' if negative else 'not a quantity'}",
            found=repr(text[:60]),
            expected=measure.span if negative else str(problem),
            next=close_quantity(text, measure.parse),
        ) from None
    if value == 0:
        raise document.fault(path, f"{show_path(path)} is 0", expected="more than 0")
    if not measure.least <= value <= measure.most:
        raise document.fault(path, f"{show_path(path)} is out of range", found=repr(text), expected=measure.span)
    return value


def _amounts(document: Document, path: ValuePath, raw: msgspec.Struct, *fields: str) -> dict[str, Any]:
    """Return the quantities that `raw` gives, by field, in base units."""
    given = {field: getattr(raw, field) for field in fields if getattr(raw, field) is not None}
    return {
        field: _amount(document, (*path, field), text, _MEASURES.get(field, _RATE)) for field, text in given.items()
    }


def _kind(document: Document, name: str, raw: _Kind) -> DeviceKind:
    path = ("devices", name)
    _check_name(document, path, name)
    given = _amounts(document, path, raw, "memory", "memory_bandwidth", "bus", "peer")
    if raw.compute is not None:
        given["compute"] = _compute(document, (*path, "compute"), raw.compute)
    if name in CATALOG:
        return msgspec.structs.replace(CATALOG[name], **given)
    missing = [field for field in _SOME if field not in given and (*path, field) not in document.dropped]
    if missing:
        document.refuse(
            path,
            f"device kind {name!r} is not in the catalog and lacks {', '.join(missing)}",
            expected="compute, memory and memory_bandwidth",
            next=close_name(name, CATALOG),
        )
    bus = given.get("bus", _BUS)
    return DeviceKind(**({"name": name, "bus": bus, "peer": bus} | _SOME | given))


def _compute(document: Document, path: ValuePath, raw: str | Mapping[Precision, str]) -> dict[Precision, float]:
    """Return the rates by precision; a single rate holds for every precision."""
    if isinstance(raw, str):
        return dict.fromkeys(PRECISIONS, _amount(document, path, raw, _MEASURES["compute"]))
    if "fp32" not in raw:
        raise document.fault(
            path, f"{show_path(path)} lacks fp32", expected="a rate for fp32, and for any other precision that it has"
        )
    return {name: _amount(document, (*path, name), text, _MEASURES["compute"]) for name, text in raw.items()}


def _hosts(document: Document, file: _File, kinds: Mapping[str, DeviceKind]) -> dict[str, Host]:
    hosts: dict[str, Host] = {}
    keys: dict[str, str] = {}  # host -> the key it was written under
    devices = 0
    for key, raw in file.hosts.items():
        path = ("hosts", key)
        names = _expand(document, key)
        devices += len(names) * sum(_counts(document, key, raw, kinds))
        if max(devices, len(hosts) + len(names)) > _MOST_DEVICES:
            raise document.fault(
                path, "the cluster is too large", expected=f"at most {_MOST_DEVICES} devices and hosts"
            )
        model = _host(document, key, raw, kinds, alone=len(names) == 1)
        for name in names:
            _check_name(document, path, name)
            if name in hosts:
                raise document.fault(path, f"host {name!r} is given twice", found=f"it under {keys[name]!r} as well")
            hosts[name] = msgspec.structs.replace(model, name=name)
            keys[name] = key
    _check_hosts(document, hosts, keys, devices)
    return hosts


def _expand(document: Document, key: str) -> list[str]:
    """Expand `tokyo[1-64]` to tokyo1 ... tokyo64; return any other key by itself."""
    if "[" not in key and "]" not in key:
        return [key]
    match = _PATTERN.fullmatch(key)
    first, last = (int(match["first"]), int(match["last"])) if match else (1, 0)
    if not match or first > last:
        raise document.fault(
            ("hosts", key),
            "this host pattern cannot be read",
            found=repr(key[:80]),
            expected="one range, like tokyo[1-64]",
        )
    width = len(match["first"]) if match["first"].startswith("0") else 0
    return [f"{match['head']}{number:0{width}d}{match['tail']}" for number in range(first, last + 1)]


def _counts(document: Document, key: str, raw: _Host, kinds: Mapping[str, DeviceKind]) -> Iterator[int]:
    for kind, count in raw.devices.items():
        path = ("hosts", key, "devices", kind)
        if kind not in kinds:
            raise document.fault(
                path,
                f"host {key}: unknown device kind {kind!r}",
                expected="a kind of the catalog or of this file's devices",
                next=close_name(kind, kinds) or f"Describe it under devices:, or use one of {', '.join(kinds)}",
                refers=(("devices", kind),),
            )
        if count < 1:
            raise document.fault(path, f"host {key} has {count} devices of kind {kind}", expected="at least 1")
        yield count


def _host(document: Document, key: str, raw: _Host, kinds: Mapping[str, DeviceKind], *, alone: bool) -> Host:
    """Return the host under `key`, with what it leaves out filled in; `alone` says that the key stands for one host."""
    path = ("hosts", key)
    _check_name(document, (*path, "region"), raw.region)
    _check_address(document, path, raw.address, alone=alone)
    given = _amounts(document, path, raw, "bandwidth", "latency", "bus", "memory") | _nic(document, path, raw)
    if raw.cores is not None:
        if not 1 <= raw.cores <= 100_000:
            raise document.fault((*path, "cores"), f"host {key} has {raw.cores} cores", expected="1 to 100000")
        given["cores"] = raw.cores
    imputed = _imputed([(kinds[name], count) for name, count in raw.devices.items()])
    return Host(
        name=key,
        region=raw.region,
        devices=raw.devices,
        address=raw.address,
        imputed=frozenset(imputed.keys() - given.keys()),
        **(imputed | given),
    )


def _nic(document: Document, path: ValuePath, raw: _Host) -> dict[str, Any]:
    """Return one rate for both directions, or one for each."""
    if not isinstance(raw.nic, _Nic):
        return _amounts(document, path, raw, "nic")
    ways = _amounts(document, (*path, "nic"), raw.nic, "up", "down")
    return {"nic": ways["up"]} | ({"down": ways["down"]} if ways["down"] != ways["up"] else {})


def _imputed(devices: list[tuple[DeviceKind, int]]) -> dict[str, Any]:
    """Return what a host with these devices most likely has, as described at the head of this file."""
    return {
        "bandwidth": min((kind.peer for kind, _ in devices), default=_BUS),
        "latency": _LATENCY,
        "nic": _NIC,
        "bus": min((kind.bus for kind, _ in devices), default=_BUS),
        "memory": 16e9 + 2 * sum(kind.memory * count for kind, count in devices),
        "cores": 8 * max(1, sum(count for _, count in devices)),
    }


def _check_address(document: Document, path: ValuePath, address: str | None, *, alone: bool) -> None:
    if address is None:
        return
    if not _ADDRESS.fullmatch(address):
        raise document.fault(
            (*path, "address"),
            "this is not a valid address",
            found=repr(address[:80]),
            expected="a host name or IP address",
        )
    if not alone:
        raise document.fault(
            (*path, "address"), "one address cannot serve several hosts", next="Write these hosts one by one"
        )


def _check_hosts(document: Document, hosts: Mapping[str, Host], keys: Mapping[str, str], devices: int) -> None:
    if not hosts:
        document.refuse(("hosts",), "the cluster has no hosts", expected="at least one host", refers=(("hosts", "*"),))
    elif not devices:
        document.refuse(
            ("hosts",),
            "the cluster has no devices",
            expected="at least one device on some host",
            refers=(("hosts", "*", "devices", "*"),),
        )
    for host in hosts.values():
        if host.region in hosts:
            document.refuse(
                ("hosts", keys[host.region]),
                f"{host.region!r} names both a host and a region, so a link could mean either",
                next=f"Rename one of them: the host might be {host.region}1",
            )


def _links(document: Document, file: _File, hosts: Mapping[str, Host]) -> tuple[Link, ...]:
    regions = dict.fromkeys(host.region for host in hosts.values())
    seen: dict[frozenset[str], int] = {}
    links = []
    for index, raw in enumerate(file.links):
        path = ("links", index)
        if raw is None:
            if path in document.dropped:
                continue
            raise document.fault(path, f"links[{index}] has a wrong value", found="null", expected="a map")
        given = _amounts(document, path, raw, "bandwidth", "latency", "trunk")
        _check_ends(document, (*path, "between"), raw, hosts, regions)
        first = seen.setdefault(frozenset(raw.between), index)
        if first != index:
            document.refuse(
                path, f"{_label(raw)} is given twice", found=f"it at {document.where(('links', first))} as well"
            )
        links.append(_link(document, path, raw, given, between_hosts=raw.between[0] not in regions))
    return tuple(links)


def _label(raw: _Link) -> str:
    return f"link {raw.between[0]}–{raw.between[1]}"


def _check_ends(
    document: Document,
    path: ValuePath,
    raw: _Link,
    hosts: Mapping[str, Host],
    regions: Mapping[str, None],
) -> None:
    for end in raw.between:
        if end not in hosts and end not in regions:
            document.refuse(
                path,
                f"{_label(raw)}: no host or region is named {end[:80]!r}",
                expected="two hosts or two regions",
                next=close_name(end, [*regions, *hosts]),
                refers=_NAMES_OF_HOSTS,
            )
    a, b = raw.between
    if {(end in hosts) - (end in regions) for end in (a, b)} == {1, -1}:
        document.refuse(
            path,
            f"{_label(raw)} joins a host and a region",
            expected="two hosts or two regions",
            refers=_NAMES_OF_HOSTS,
        )
    if a == b and a in hosts and a not in regions:
        document.refuse(
            path,
            f"{_label(raw)} joins a host to itself",
            expected="two different hosts",
            next="What joins a host's devices is the host's own bandwidth and latency",
        )


def _link(document: Document, path: ValuePath, raw: _Link, given: Mapping[str, Any], *, between_hosts: bool) -> Link:
    if "bandwidth" not in given:
        raise document.fault(
            path,
            f"{_label(raw)} lacks bandwidth",
            expected="bandwidth: like 1 Gbit/s",
            lacks="bandwidth",
            placeholder="1 Gbit/s",
        )
    if between_hosts and "trunk" in given:
        raise document.fault(
            (*path, "trunk"),
            f"{_label(raw)} joins hosts and has a trunk",
            expected="a trunk only between regions",
            next="Remove trunk; bandwidth already caps this pair",
        )
    imputed = {} if "latency" in given else {"latency": _far(document, path, raw, between_hosts=between_hosts)}
    return Link(between=raw.between, imputed=frozenset(imputed), **{**given, **imputed})


def _far(document: Document, path: ValuePath, raw: _Link, *, between_hosts: bool) -> float:
    """Return the latency of a link that gives none, from the distance of its regions if both are known places."""
    places = [None if between_hosts else find_place(end) for end in raw.between]
    if places[0] is not None and places[1] is not None:
        return imputed_latency(places[0], places[1])
    unknown = [end for end, place in zip(raw.between, places, strict=True) if place is None]
    raise document.fault(
        path,
        f"{_label(raw)} lacks latency",
        found=None if between_hosts else f"no known place {' or '.join(dict.fromkeys(map(repr, unknown)))}",
        expected="latency: like 40 ms, half of what ping shows",
        refers=((*path, "between"), *_NAMES_OF_HOSTS),
        lacks="latency",
        placeholder="40 ms",
        next=None if between_hosts else "Or name both regions after known places, like virginia or eu-west-1",
    )
