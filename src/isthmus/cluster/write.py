"""Writes a cluster as the text of a cluster file, which loads back equal to the last bit.

Values that loading filled in (`imputed`) are left out, so that the file states only what is known; loading fills them
in and marks them again. Quantities are written in the largest unit that gives the same float back. Consecutive equal
hosts become one line with a pattern: `tokyo[1-64]`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.spec import PRECISIONS, Cluster, DeviceKind, Host, Link
from isthmus.units import parse_bandwidth, parse_bytes, parse_compute, parse_seconds

__all__ = ["cluster_yaml"]

_PLAIN = re.compile(r"(?!(?:y|n|yes|no|on|off|null|true|false)$)[A-Za-z][A-Za-z0-9._-]*", re.IGNORECASE)
_NUMBERED = re.compile(r"(?P<head>.*?)(?P<number>[0-9]{1,6})", re.ASCII)

_Units = Mapping[str, float]
_BYTES: _Units = {"GB": 1e9, "MB": 1e6, "B": 1.0}
_BITS: _Units = {"Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8, "kbit/s": 1e3 / 8, "B/s": 1.0}
_MANY_BYTES: _Units = {"GB/s": 1e9, "B/s": 1.0}
_COMPUTE: _Units = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6, "FLOP/s": 1.0}
_TIME: _Units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def cluster_yaml(cluster: Cluster, comments: Sequence[str] = ()) -> str:
    """Return the text of a file that loads as this cluster, with `comments` at its head, each in lines of its own."""
    lines = [line for comment in comments for line in _comment(comment)]
    lines += ["kind: cluster", "version: 1", f"name: {_name(cluster.name)}"]
    described = [kind for kind in cluster.kinds.values() if CATALOG.get(kind.name) != kind]
    lines += ["devices:", *map(_kind, described)] if described else []
    lines += ["hosts:", *map(_hosts, _runs(list(cluster.hosts.values())))]
    lines += ["links:", *map(_link, cluster.links)] if cluster.links else []
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    """Return the lines of a comment; a character that YAML readers might take for the end of a line is shown as ?."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return textwrap.wrap(shown, 118, initial_indent="# ", subsequent_indent="#   ")


def _name(text: str) -> str:
    """Return a name as YAML: plain where YAML can only read it as text, else in quotes.

    Names and addresses need no escapes.
    """
    return text if _PLAIN.fullmatch(text) else f'"{text}"'


def _map(entries: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {value}" for key, value in entries.items()) + "}"


def _quantity(value: float, units: _Units, parse: Callable[[str], float]) -> str:
    """Return the value in the largest unit that it fills and that gives it back.

    Else all its digits in the base unit.
    """
    for unit, scale in units.items():
        text = f"{value / scale:.15g} {unit}"
        if value >= scale and parse(text) == value:
            return text
    base = next(unit for unit, scale in units.items() if scale == 1.0)
    return f"{value!r} {base}"


def _bytes(value: float) -> str:
    return _quantity(value, _BYTES, parse_bytes)


def _rate(value: float) -> str:
    return _quantity(value, _BITS if value < 2e10 else _MANY_BYTES, parse_bandwidth)


def _seconds(value: float) -> str:
    return _quantity(value, _TIME, parse_seconds)


def _compute(value: float) -> str:
    return _quantity(value, _COMPUTE, parse_compute)


def _kind(kind: DeviceKind) -> str:
    rates: dict[str, str] = {precision: _compute(rate) for precision, rate in kind.compute.items()}
    one = set(rates.values()) if tuple(rates) == PRECISIONS else set()
    figures = {
        "compute": one.pop() if len(one) == 1 else _map(rates),
        "memory": _bytes(kind.memory),
        "memory_bandwidth": _rate(kind.memory_bandwidth),
        "bus": _rate(kind.bus),
        "peer": _rate(kind.peer),
    }
    return f"  {_name(kind.name)}: {_map(figures)}"


def _runs(hosts: Sequence[Host]) -> Iterator[tuple[str, Host]]:
    """Yield each key with its host; consecutive equal hosts that are numbered in order share one key."""
    start = 0
    while start < len(hosts):
        end = start + 1
        while end < len(hosts) and _follows(hosts[start], hosts[end], end - start):
            end += 1
        yield _key(hosts[start], hosts[end - 1]), hosts[start]
        start = end


def _follows(first: Host, host: Host, steps: int) -> bool:
    """Return whether `host` equals `first` except for the number in its name, which is greater by `steps`."""
    match = _NUMBERED.fullmatch(first.name)
    if not match or first.address is not None or int(match["number"]) + steps > 999_999:
        return False
    name = f"{match['head']}{int(match['number']) + steps:0{_width(match['number'])}d}"
    return host == msgspec.structs.replace(first, name=name) and list(host.devices) == list(first.devices)


def _width(number: str) -> int:
    return len(number) if number.startswith("0") else 0


def _key(first: Host, last: Host) -> str:
    begin, end = _NUMBERED.fullmatch(first.name), _NUMBERED.fullmatch(last.name)
    if begin is None or end is None or first is last:
        return _name(first.name)
    head = begin["head"]
    key = f"{head}[{begin['number']}-{end['number']}]"
    return key if _PLAIN.fullmatch(head) else f'"{key}"'


def _hosts(run: tuple[str, Host]) -> str:
    key, host = run
    fields = {
        "region": _name(host.region),
        "devices": _map({_name(kind): str(count) for kind, count in host.devices.items()}),
        "bandwidth": _rate(host.bandwidth),
        "latency": _seconds(host.latency),
        "nic": _rate(host.nic)
        if host.nic == host.nic_in
        else _map({"up": _rate(host.nic), "down": _rate(host.nic_in)}),
        "bus": _rate(host.bus),
        "memory": _bytes(host.memory),
        "cores": str(host.cores),
    }
    if host.address is not None:
        fields["address"] = _name(host.address)
    return f"  {key}: {_map({name: value for name, value in fields.items() if name not in host.imputed})}"


def _link(link: Link) -> str:
    fields = {
        "between": f"[{', '.join(map(_name, link.between))}]",
        "bandwidth": _rate(link.bandwidth),
        "latency": _seconds(link.latency),
    }
    if link.trunk is not None:
        fields["trunk"] = _rate(link.trunk)
    return f"  - {_map({name: value for name, value in fields.items() if name not in link.imputed})}"
