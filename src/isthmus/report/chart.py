"""A chart of one value over the steps of a run: a line with axes, ticks and readable values, as script-free SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from isthmus.report.markup import Markup, tag

__all__ = ["chart", "ticks"]

_POINTS = 240  # of a drawn line; each can be pointed at
_WIDTH, _HEIGHT = 420.0, 212.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 14.0, 30.0, 40.0  # room around the plot, for the figures of the axes
_MARKS = 5  # about as many ticks as an axis has
_DOTS = 30  # points that get a dot each


def ticks(low: float, high: float, most: int = _MARKS, whole: bool = False) -> list[float]:
    """Return round values (1, 2 or 5 times a power of ten apart) within a range; with `whole` only whole numbers."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0.0 else 1.0
    apart = next(power * factor for factor in (1.0, 2.0, 5.0, 10.0) if power * factor >= rough * (1 - 1e-9))
    apart = max(1.0, apart) if whole else apart
    first = math.ceil(low / apart - 1e-9)
    return [n * apart for n in range(first, math.floor(high / apart + 1e-9) + 1)]


def chart(
    title: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    shown: Callable[[float], str],
    *,
    least: float | None = None,
    marked: float | None = None,
) -> Markup:
    """Draw one value over the steps; draw nothing if fewer than two values are known.

    `least` is where the axis of values begins, if not at the lowest value. `marked` is the predicted value, which is
    drawn across the chart.
    """
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    if len(known) < 2:
        return Markup()
    points = [*known[: -1 : math.ceil(len(known) / _POINTS)], known[-1]]
    low, high = _range([value for _, value in points] + ([marked] if marked is not None else []), least)
    first, last = points[0][0], points[-1][0]

    def across(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / max(last - first, 1)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    line = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in points)
    drawn = [
        *_value_axis(low, high, up, shown),
        *_step_axis(first, last, across),
        *(_marked(marked, up, shown) if marked is not None else []),
        tag("polyline", points=line),
        *_pointed(title, points, across, up, shown),
        tag("text", title, x=0.0, y=14.0, class_="title"),
    ]
    label = f"{title}: {shown(known[0][1])} at step {known[0][0]}, {shown(known[-1][1])} at step {known[-1][0]}"
    return tag("svg", *drawn, viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", role="img", aria_label=label, class_="chart")


def _range(values: Sequence[float], least: float | None) -> tuple[float, float]:
    """Return the range of the values with a little space around it, which is never empty."""
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (low - room if least is None else min(low, least)), high + room


def _value_axis(low: float, high: float, up: Callable[[float], float], shown: Callable[[float], str]) -> list[Markup]:
    """Draw lines across at round values, with the values to the left."""
    drawn = []
    for value in ticks(low, high):
        y = up(value)
        drawn.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        drawn.append(tag("text", shown(value) if value else "0", x=_LEFT - 8, y=y + 4, class_="tick value"))
    return drawn


def _step_axis(first: int, last: int, across: Callable[[float], float]) -> list[Markup]:
    """Draw the axis below, with whole steps."""
    base = _HEIGHT - _BOTTOM
    drawn = [tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=base, y2=base, class_="axis")]
    for step in ticks(first, last, whole=True):
        x = across(step)
        drawn.append(tag("line", x1=x, x2=x, y1=base, y2=base + 4, class_="axis"))
        drawn.append(tag("text", f"{step:,.0f}", x=x, y=base + 18, class_="tick step"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*drawn, tag("text", "step", x=middle, y=_HEIGHT - 4, class_="tick step")]


def _marked(value: float, up: Callable[[float], float], shown: Callable[[float], str]) -> list[Markup]:
    y = up(value)
    return [
        tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="marked"),
        tag("text", f"predicted {shown(value)}", x=_WIDTH - _RIGHT, y=y + 15, class_="tick value"),
    ]


def _pointed(
    title: str,
    points: Sequence[tuple[int, float]],
    across: Callable[[float], float],
    up: Callable[[float], float],
    shown: Callable[[float], str],
) -> list[Markup]:
    """Draw dots if there are few points, and for each point a strip that shows its value when it is pointed at."""
    few = len(points) <= _DOTS
    dots = [tag("circle", cx=across(step), cy=up(value), r=3.0) for step, value in points] if few else []
    middles = [across(step) for step, _ in points]
    edges = [_LEFT, *((a + b) / 2 for a, b in pairwise(middles)), _WIDTH - _RIGHT]
    strips = [
        tag("rect", x=left, y=_TOP, width=max(right - left, 0.1), height=_HEIGHT - _TOP - _BOTTOM, class_="strip",
            data_tip=f"step {step:,}\n{title} {shown(value)}")
        for (step, value), left, right in zip(points, edges, edges[1:], strict=False)
    ]  # fmt: skip
    return [*dots, *strips]
