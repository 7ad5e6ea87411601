"""The cards of a map: one for each region, or for each host of a single region, with its devices as squares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from isthmus.cluster.spec import Cluster, Host
from isthmus.report.columns import percent
from isthmus.report.markup import Markup, tag
from isthmus.units import format_bandwidth

__all__ = ["Card", "cards_of", "draw_card", "level"]

_HOST_CARDS = 12  # hosts of a single region that get a card each
_DEVICE_SQUARES = 2000  # devices that get a square each; beyond that a square is a host
_HOST_SQUARES = 2000  # beyond that a square is several hosts
_NAMED = 24  # hosts that are named
_PAD, _TITLE, _GAP = 12.0, 34.0, 2.0
_CHARACTER = 6.2  # width of one, at the size of a host's name
_STEPS = (0.0, 0.1, 0.25, 0.5, 0.75)  # where one shade of load or computing ends and the next begins


class Card(NamedTuple):
    """A region or a host, as it is drawn on the map."""

    name: str
    hosts: tuple[Host, ...]
    per: int  # hosts that share a square; 0: each device has its own
    columns: int
    square: float
    cell: tuple[float, float]  # size of the cell of one host, or of one square
    named: bool  # whether its hosts have room for their names

    @property
    def number(self) -> int:
        """Return the number of devices on the card."""
        return sum(sum(host.devices.values()) for host in self.hosts)

    @property
    def cells(self) -> int:
        """Return the number of places in the card's grid."""
        return math.ceil(len(self.hosts) / max(self.per, 1))

    @property
    def size(self) -> tuple[float, float]:
        """Return the width and height of the card."""
        rows = math.ceil(self.cells / self.columns)
        width = max(self.columns * self.cell[0], 8.5 * len(self.name), 96.0) + 2 * _PAD
        return width, rows * self.cell[1] + _TITLE + _PAD


def level(part: float) -> int:
    """Return the shade of a load or a share of computing: 0 for none, then 1 to 5."""
    return sum(part > step for step in _STEPS)


def cards_of(cluster: Cluster) -> list[Card]:
    """Return a card for each region, or for each host if there is one region with few hosts."""
    hosts = list(cluster.hosts.values())
    if len(cluster.regions) == 1 and len(hosts) <= _HOST_CARDS:
        return [_card(cluster, host.name, [host]) for host in hosts]
    return [_card(cluster, region, [h for h in hosts if h.region == region]) for region in cluster.regions]


def _card(cluster: Cluster, name: str, hosts: Sequence[Host]) -> Card:
    devices, count = len(cluster.devices), len(cluster.hosts)
    per = 0 if devices <= _DEVICE_SQUARES else math.ceil(count / _HOST_SQUARES)
    square = next(size for most, size in ((16, 26.0), (64, 16.0), (400, 11.0), (math.inf, 8.0)) if devices <= most)
    cell = (square + _GAP, square + _GAP)
    named = per == 0 and count <= _NAMED and [host.name for host in hosts] != [name]
    if per == 0:
        across = max(_across(sum(host.devices.values())) for host in hosts)
        down = max(math.ceil(sum(host.devices.values()) / across) for host in hosts)
        label = max(len(host.name) for host in hosts) * _CHARACTER if named else 0.0
        cell = (max(across * cell[0], label) + 12, down * cell[1] + (26 if named else 10))
    cells = math.ceil(len(hosts) / max(per, 1))
    columns = max(1, min(cells, round(math.sqrt(cells * 1.6 * cell[1] / cell[0]))))
    return Card(name, tuple(hosts), per, columns, square, cell, named)


def _across(devices: int) -> int:
    """Return the number of squares of one host side by side; 8 devices are drawn 4 by 2."""
    return max(1, math.ceil(math.sqrt(devices * 2)) if devices > 3 else devices)


def draw_card(
    card: Card,
    centre: Sequence[float],
    computing: Mapping[str, float],
    nics: Mapping[str, float],
    tip: str,
    load: float,
) -> Markup:
    """Draw the card: its name, its hosts with their devices shaded by computing, and borders coloured by load."""
    width, height = card.size
    left, top = centre[0] - width / 2, centre[1] - height / 2
    devices = f"{card.number} device{'' if card.number == 1 else 's'}"
    head = [
        tag("rect", x=left, y=top, width=width, height=height, rx=10.0, class_=f"card edge{level(load)}", data_tip=tip,
            tabindex="0"),
        tag("text", card.name, x=left + _PAD, y=top + 17, class_="region"),
        tag("text", devices, x=left + _PAD, y=top + 30, class_="small"),
    ]  # fmt: skip
    offset = (width - card.columns * card.cell[0]) / 2
    for index in range(card.cells):
        x = left + offset + index % card.columns * card.cell[0]
        y = top + _TITLE + index // card.columns * card.cell[1] + 2
        if card.per:
            head.append(_square(card.hosts[index * card.per : (index + 1) * card.per], x, y, card.square, computing))
        else:
            head.append(_host(card, card.hosts[index], x, y, computing, nics))
    return tag("g", *head)


def _square(hosts: Sequence[Host], x: float, y: float, size: float, computing: Mapping[str, float]) -> Markup:
    """Draw one square for several hosts, shaded by their mean."""
    devices = [name for host in hosts for name in _devices(host)]
    mean = sum(computing.get(name, 0.0) for name in devices) / max(len(devices), 1)
    names = hosts[0].name if len(hosts) == 1 else f"{hosts[0].name} to {hosts[-1].name}"
    tip = f"{names}\n{len(devices)} devices\ncomputing {percent(mean)} of the step"
    return tag("rect", x=x, y=y, width=size, height=size, rx=2.0, class_=f"device busy{level(mean)}", data_tip=tip)


def _host(
    card: Card, host: Host, x: float, y: float, computing: Mapping[str, float], nics: Mapping[str, float]
) -> Markup:
    names = _devices(host)
    across = max(1, int((card.cell[0] - 12 + _GAP) // (card.square + _GAP)))
    across = min(across, _across(len(names)))
    drawn = len(card.hosts) > 1 or card.name != host.name
    nic = nics.get(host.name, 0.0)
    kinds = ", ".join(f"{count} × {kind}" for kind, count in host.devices.items()) or "no devices"
    tip = f"host {host.name}\n{kinds}\nnic {format_bandwidth(host.nic)}, load {percent(nic)}"
    inside = card.cell[0] - 4
    parts = [
        tag("rect", x=x + 2, y=y + 2, width=inside, height=card.cell[1] - 4, rx=5.0,
            class_=f"host edge{level(nic)}" if drawn else "host plain", data_tip=tip)
    ]  # fmt: skip
    pitch = card.square + _GAP
    start = x + 2 + (inside - across * pitch + _GAP) / 2
    for index, name in enumerate(names):
        share = computing.get(name)
        kind = "idle" if share is None else f"busy{level(share)}"
        said = "not used" if share is None else f"computing {percent(share)} of the step"
        parts.append(
            tag("rect", x=start + index % across * pitch, y=y + 6 + index // across * pitch,
                width=card.square, height=card.square, rx=2.0, class_=f"device {kind}", data_tip=f"{name}\n{said}")
        )  # fmt: skip
    if card.named:
        parts.append(tag("text", host.name, x=x + card.cell[0] / 2, y=y + card.cell[1] - 7, class_="hostname"))
    return tag("g", *parts)


def _devices(host: Host) -> list[str]:
    return [f"{host.name}/{kind}/{index}" for kind, count in host.devices.items() for index in range(count)]
