"""The cluster as a map: a card for each region, and links as wide as their bandwidth and coloured by their load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from isthmus.cluster.places import find_place
from isthmus.cluster.spec import Cluster, Link
from isthmus.cost.timeline import LinkUse, Timeline
from isthmus.report.cards import Card, cards_of, draw_card, level
from isthmus.report.columns import percent
from isthmus.report.layout import Floats, arrange, bounds, globe, spread
from isthmus.report.markup import Markup, join, tag
from isthmus.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["Edge", "edges_of", "map_figure"]

_MARGIN = (88.0, 48.0)  # between cards, on a wide map and on a tall one
_BORDER = 28.0
_NARROWEST = (760.0, 340.0)  # width of the drawing, so that one card alone is not enlarged
_WIDTHS = (2.0, 11.0)
_LABELLED = 6  # links that are shown with their figures
_ALONG = (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74)  # where on a link its figures may be, the best first
_BEND = 0.09  # fraction of its length by which a link is bent, so that links through a card's middle stay apart


_Box = tuple[float, float, float, float]  # left, top, right, bottom
_Curve = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]


class MapLink(NamedTuple):
    """The traffic in one direction between two cards in a step."""

    bytes: float
    load: float  # of the busiest link among them
    busiest: LinkUse | None


class Edge(NamedTuple):
    """Two cards that can talk (or one card's own network), with the traffic in each direction."""

    ends: tuple[int, int]
    link: Link
    number: int  # links between them
    ways: tuple[MapLink, MapLink]

    @property
    def load(self) -> float:
        """Return the load of the busier direction."""
        return max(way.load for way in self.ways)

    @property
    def wide(self) -> float:
        """Return the bytes a second that all flows together can reach, or else those of one pair of hosts."""
        return self.link.trunk or self.link.bandwidth


def edges_of(cluster: Cluster, cards: Sequence[Card], timeline: Timeline) -> list[Edge]:
    """Return an edge for every pair of cards with a link between them, and for every card with links inside it."""
    of_host = {host.name: index for index, card in enumerate(cards) for host in card.hosts}
    of_region = {}  # empty where each host has its own card
    if len(cards) == len(cluster.regions):
        of_region = {card.hosts[0].region: index for index, card in enumerate(cards)}
    ways = _ways(timeline, of_host, of_region)
    nothing = MapLink(0.0, 0.0, None)
    return [
        Edge((a, b), links[0], len(links), (ways.get((a, b), nothing), ways.get((b, a), nothing)))
        for (a, b), links in _links(cluster, cards, of_host, of_region).items()
    ]


def _links(
    cluster: Cluster, cards: Sequence[Card], of_host: Mapping[str, int], of_region: Mapping[str, int]
) -> dict[tuple[int, int], list[Link]]:
    """Return the links between each two cards, lower number first: that of the regions first, then the widest."""
    if not of_region:
        linked = {(a, b): cluster.link(cards[a].name, cards[b].name) for a, b in combinations(range(len(cards)), 2)}
        return {pair: [link] for pair, link in linked.items() if link is not None}
    found: dict[tuple[int, int], list[Link]] = {}
    for link in sorted(cluster.links, key=lambda link: (link.between[0] in of_host, -link.bandwidth)):
        a, b = sorted((of_host if link.between[0] in of_host else of_region)[end] for end in link.between)
        found.setdefault((a, b), []).append(link)
    return found


def _ways(
    timeline: Timeline, of_host: Mapping[str, int], of_region: Mapping[str, int]
) -> dict[tuple[int, int], MapLink]:
    """Return the traffic from card to card: bytes of all pairs of hosts, and the highest load of a pair or trunk."""
    found: dict[tuple[int, int], MapLink] = {}
    for use in timeline.links:
        source, _, target = use.name.partition(" to ")
        trunk = target.endswith(" trunk")
        numbers = of_region if trunk else of_host
        a, b = numbers.get(source), numbers.get(target.removesuffix(" trunk"))
        if a is None or b is None:
            continue
        before = found.get((a, b), MapLink(0.0, 0.0, None))
        busiest = use if before.busiest is None or use.load > before.load else before.busiest
        found[a, b] = MapLink(before.bytes + (0.0 if trunk else use.bytes), busiest.load, busiest)
    return found


def map_figure(cluster: Cluster, timeline: Timeline) -> Markup:
    """Draw the whole map as SVG, twice: wide for screens and paper, tall for phones; the page shows one of them."""
    cards = cards_of(cluster)
    edges = edges_of(cluster, cards, timeline)
    points = _points(cards, edges)
    step = timeline.step_seconds or 1.0
    computing = {use.name: use.computing / step for use in timeline.devices}
    nics = _nics(timeline)
    own = {edge.ends[0]: edge for edge in edges if edge.ends[0] == edge.ends[1]}
    outer = [edge for edge in edges if edge.ends[0] != edge.ends[1]]
    said = f"Map of {cluster.name}: {len(cards)} places, {len(outer)} links between them"
    sizes = np.array([card.size for card in cards])
    figures = []
    for tall in (False, True):
        centres = arrange(points, sizes, _MARGIN[tall], tall)
        drawn = [
            draw_card(card, centres[n].tolist(), computing, nics, _card_tip(card, own.get(n)), _load(own.get(n)))
            for n, card in enumerate(cards)
        ]
        shapes = [*_lines(cards, outer, centres.tolist()), *drawn]
        figures.append(_drawing(shapes, bounds(centres, sizes), tall, said))
    return join(figures)


def _drawing(shapes: Sequence[Markup], box: Sequence[float], tall: bool, said: str) -> Markup:
    """Draw one SVG around the shapes, on a background of dots."""
    left, top, right, bottom = box
    spare = max(0.0, _NARROWEST[tall] - (right - left)) / 2 + _BORDER
    x, y, width, height = left - spare, top - _BORDER, right - left + 2 * spare, bottom - top + 2 * _BORDER
    name = "tall" if tall else "wide"
    ground = [
        tag("defs", tag("pattern", tag("circle", cx=9, cy=9, r=1, class_="dot"), id=f"dots-{name}", width=18, height=18,
                        patternUnits="userSpaceOnUse")),
        tag("rect", x=x, y=y, width=width, height=height, rx=10, class_="sea"),
        tag("rect", x=x, y=y, width=width, height=height, rx=10, fill=f"url(#dots-{name})"),
    ]  # fmt: skip
    view = f"{x:.0f} {y:.0f} {width:.0f} {height:.0f}"
    return tag("svg", *ground, *shapes, viewBox=view, role="img", aria_label=said, class_=f"map {name}")


def _nics(timeline: Timeline) -> dict[str, float]:
    """Return the load of each host's nic in its busier direction."""
    nics: dict[str, float] = {}
    for use in timeline.links:
        host, nic, _ = use.name.partition(" nic ")
        if nic:
            nics[host] = max(nics.get(host, 0.0), use.load)
    return nics


def _load(edge: Edge | None) -> float:
    return edge.load if edge is not None else 0.0


def _points(cards: Sequence[Card], edges: Sequence[Edge]) -> Floats:
    """Return where the cards would ideally be: as on the globe if every one is a known place, else by latency."""
    places = [find_place(card.name) for card in cards]
    known = [(place.latitude, place.longitude) for place in places if place is not None]
    if len(known) == len(cards):
        return globe(np.array(known))
    latency = np.full((len(cards), len(cards)), np.inf)
    np.fill_diagonal(latency, 0.0)
    for edge in edges:
        a, b = edge.ends
        if a != b:
            latency[a, b] = latency[b, a] = edge.link.latency
    return spread(latency)


def _lines(cards: Sequence[Card], edges: Sequence[Edge], centres: Sequence[Sequence[float]]) -> list[Markup]:
    """Draw the links, idle ones first so that loaded ones are above them, and their figures above all links."""
    wide = [math.log(edge.wide) for edge in edges]
    low, high = min(wide, default=0.0), max(wide, default=0.0)
    taken = [_box(centre[0], centre[1], *card.size) for card, centre in zip(cards, centres, strict=True)]
    drawn, written = [], []
    for edge in sorted(edges, key=lambda edge: edge.load):
        share = (math.log(edge.wide) - low) / (high - low) if high > low else 0.4
        width = _WIDTHS[0] + share * (_WIDTHS[1] - _WIDTHS[0])
        curve = _bent(centres[edge.ends[0]], centres[edge.ends[1]])
        path = "M{:.1f} {:.1f}Q{:.1f} {:.1f} {:.1f} {:.1f}".format(*(value for point in curve for value in point))
        tip = _edge_tip(cards, edge)
        shapes = [
            tag("path", d=path, stroke_width=width, class_=f"link load{level(edge.load)}"),
            tag("path", d=path, class_="reach", data_tip=tip, tabindex="0", aria_label=tip),
        ]
        if len(edges) <= _LABELLED:
            figures = f"{format_bandwidth(edge.link.bandwidth)}, {format_seconds(edge.link.latency)}"
            written += _pill(f"{figures} · {percent(edge.load)}", curve, taken)
        drawn.append(tag("g", *shapes, class_="edge"))
    return [*drawn, *written]


def _pill(text: str, curve: _Curve, taken: list[_Box]) -> list[Markup]:
    """Draw the figures of a link on it, clear of what is `taken`, and add them to that; draw nothing without room."""
    width = 6.3 * len(text) + 18
    for x, y in (_on(curve, part) for part in _ALONG):
        box = _box(x, y, width, 22.0)
        if not any(_overlap(box, other) for other in taken):
            taken.append(box)
            return [
                tag("rect", x=box[0], y=box[1], width=width, height=22, rx=11, class_="pill"),
                tag("text", text, x=x, y=y + 4, class_="figure"),
            ]
    return []


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _overlap(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _bent(a: Sequence[float], b: Sequence[float]) -> _Curve:
    """Return a slightly bent curve between two points: its ends, and the control point between them."""
    dx, dy = b[0] - a[0], b[1] - a[1]
    middle = (a[0] + b[0]) / 2 + 2 * _BEND * dy, (a[1] + b[1]) / 2 - 2 * _BEND * dx
    return (a[0], a[1]), middle, (b[0], b[1])


def _on(curve: _Curve, part: float) -> tuple[float, float]:
    """Return the point at a fraction of a curve: 0 is its beginning, 1 its end."""
    weights = ((1 - part) ** 2, 2 * part * (1 - part), part**2)
    x, y = (sum(weight * point[axis] for weight, point in zip(weights, curve, strict=True)) for axis in (0, 1))
    return x, y


def _edge_tip(cards: Sequence[Card], edge: Edge) -> str:
    a, b = (cards[end].name for end in edge.ends)
    lines = [f"{a} – {b}", *_figures(edge)]
    for way, words in zip(edge.ways, (f"{a} → {b}", f"{b} → {a}"), strict=True):
        lines += _way_lines(way, words)
    return "\n".join(lines)


def _figures(edge: Edge) -> list[str]:
    trunk = f", trunk {format_bandwidth(edge.link.trunk)}" if edge.link.trunk else ""
    several = [f"{edge.number - 1} more links between pairs of hosts"] if edge.number > 1 else []
    imputed = "~" if "latency" in edge.link.imputed else ""
    latency = f"{imputed}{format_seconds(edge.link.latency)}"
    return [f"{format_bandwidth(edge.link.bandwidth)} a pair of hosts{trunk}, {latency}", *several]


def _way_lines(way: MapLink, words: str) -> list[str]:
    if way.busiest is None:
        return [f"{words}: nothing"]
    capacity = format_bandwidth(way.busiest.capacity)
    return [
        f"{words}: {format_bytes(way.bytes)} a step",
        f"   busiest: {way.busiest.name}, {percent(way.load)} of {capacity}",
    ]


def _card_tip(card: Card, own: Edge | None) -> str:
    hosts = f"{len(card.hosts)} host{'' if len(card.hosts) == 1 else 's'}, {card.number} devices"
    lines = [card.name, hosts]
    if own is not None:
        lines += _figures(own)
        lines += _way_lines(own.ways[0], "inside")
    return "\n".join(lines)
