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
    resumed: Sequence[int] = (),
    held_out: tuple[Sequence[int], Sequence[float | None]] | None = None,
) -> Markup:
    """Draw one value over the steps; draw nothing if fewer than two values are known.

    `least` is where the axis of values begins, if not at the lowest value. `marked` is the predicted value, which is
    drawn across the chart. `resumed` are the steps at which the run was resumed. `held_out` has the steps and the
    values of evaluations on held-out samples, which are drawn as a second line.
    """
    points = _known(steps, values)
    if len(points) < 2:
        return Markup()
    judged = _known(*held_out) if held_out is not None else []
    low, high = _range([value for _, value in points + judged] + ([marked] if marked is not None else []), least)
    first, last = points[0][0], max(points[-1][0], judged[-1][0] if judged else 0)

    def across(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / max(last - first, 1)

    def up(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low)

    def line(along: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in along)

    drawn = [
        *_value_axis(low, high, up, shown),
        *_step_axis(first, last, across),
        *(_marked(marked, up, shown) if marked is not None else []),
        *(_resumed(across(step)) for step in resumed if step > first),
        tag("polyline", points=line(points)),
        *([tag("polyline", points=line(judged), class_="held-out")] if len(judged) > 1 else []),
        *_pointed(title, points, across, up, shown),
        *(_judged(title, step, value, across, up, shown) for step, value in judged),
        tag("text", title, x=0.0, y=14.0, class_="title"),
        *(_legend() if judged else []),
    ]
    label = f"{title}: {shown(points[0][1])} at step {points[0][0]}, {shown(points[-1][1])} at step {points[-1][0]}"
    if judged:
        label += f"; on held-out samples {shown(judged[-1][1])} at step {judged[-1][0]}"
    return tag("svg", *drawn, viewBox=f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", role="img", aria_label=label, class_="chart")


def _known(steps: Sequence[int], values: Sequence[float | None]) -> list[tuple[int, float]]:
    """Return the points whose values are known, or some of them if they are many."""
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    return [*known[: -1 : math.ceil(len(known) / _POINTS)], known[-1]] if known else []


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


def _resumed(x: float) -> Markup:
    """Draw a line down where the run was resumed."""
    tip = "the run was resumed here"
    return tag("line", x1=x, x2=x, y1=_TOP, y2=_HEIGHT - _BOTTOM, class_="resumed", data_tip=tip)


def _judged(
    title: str,
    step: int,
    value: float,
    across: Callable[[float], float],
    up: Callable[[float], float],
    shown: Callable[[float], str],
) -> Markup:
    """Draw one evaluation as a dot that can be pointed at."""
    tip = f"step {step:,}\n{title} on held-out samples {shown(value)}"
    return tag("circle", cx=across(step), cy=up(value), r=3.5, class_="held-out", data_tip=tip)


def _legend() -> list[Markup]:
    """Name the two lines of a chart."""
    right = _WIDTH - _RIGHT
    return [
        tag("line", x1=right - 170, x2=right - 150, y1=10.0, y2=10.0, class_="trained"),
        tag("text", "training", x=right - 144, y=14.0),
        tag("line", x1=right - 84, x2=right - 64, y1=10.0, y2=10.0, class_="held-out"),
        tag("text", "held-out", x=right - 58, y=14.0),
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
