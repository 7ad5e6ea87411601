"""The charts of a run: axes with round values, and points where the figures are."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.report.chart import chart, ticks

SMALL = st.floats(-1e6, 1e6)


def drawn(*values: float | None, **more: Any) -> ElementTree.Element:
    steps = range(1, len(values) + 1)
    return ElementTree.fromstring(chart("loss", steps, values, lambda value: f"{value:.4g}", **more))


def texts(figure: ElementTree.Element, kind: str) -> list[tuple[float, str]]:
    """Place along its axis, and text, of the ticks of one axis."""
    axis = "y" if kind == "value" else "x"
    found = [each for each in figure.iter("text") if each.get("class") == f"tick {kind}"]
    return [(float(each.get(axis, "")), each.text or "") for each in found]


def line(figure: ElementTree.Element) -> list[tuple[float, float]]:
    (points,) = [each.get("points", "") for each in figure.iter("polyline")]
    return [(float(x), float(y)) for x, y in re.findall(r"(\S+),(\S+)", points)]


@given(SMALL, st.floats(1e-3, 1e6))
def test_ticks_are_round_and_within(low: float, length: float) -> None:
    found = ticks(low, low + length)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * length <= value <= low + length * (1 + 1e-6) for value in found)
    apart = f"{found[1] - found[0]:.0e}"
    assert apart[0] in "125" and found == pytest.approx(
        [found[0] + n * (found[1] - found[0]) for n in range(len(found))]
    )


def test_steps_are_whole() -> None:
    assert ticks(1, 3, whole=True) == [1, 2, 3] and ticks(0, 1000, whole=True) == [0, 200, 400, 600, 800, 1000]


def test_the_line_lies_where_its_axes_say() -> None:
    losses = (6.0, 4.0, 3.0, 2.5, 2.25)
    figure = drawn(*losses)
    marks = [(float(text), y - 4) for y, text in texts(figure, "value")]  # a figure stands 4 below its line
    (a, ya), (b, yb) = marks[0], marks[-1]
    for (x, y), step, loss in zip(line(figure), range(1, 6), losses, strict=True):
        assert y == pytest.approx(ya + (yb - ya) * (loss - a) / (b - a), abs=0.2)
        assert x == pytest.approx({text: at for at, text in texts(figure, "step")}[str(step)], abs=0.2)
    assert [text for _, text in texts(figure, "step")] == ["1", "2", "3", "4", "5", "step"]
    tips = [each.get("data-tip") for each in figure.iter("rect")]
    assert tips[0] == "step 1 loss 6" and len(tips) == 5
    assert "6 at step 1, 2.25 at step 5" in figure.get("aria-label", "")


def test_odd_runs() -> None:
    assert chart("loss", [1], [2.0], str) == "" and chart("loss", [1, 2], [2.0, None], str) == ""
    assert len(line(drawn(2.0, None, 2.0))) == 2  # a loss that does not change, with a gap
    assert len(line(drawn(*map(float, range(100_000))))) <= 241
    assert [text for _, text in texts(drawn(1.0, 2.0, least=0.0, marked=5.0), "value")][-1] == "predicted 5"


def test_held_out_values_stand_on_the_same_axes() -> None:
    figure = drawn(5.0, 3.0, 1.0, held_out=((1, 3), (5.0, 1.0)), resumed=(1, 2))
    trained, held_out = (each.get("points", "").split() for each in figure.iter("polyline"))
    assert held_out == [trained[0], trained[2]]
    dots = [each for each in figure.iter("circle") if each.get("class") == "held-out"]
    assert [f"{float(each.get('cx', '')):.1f},{float(each.get('cy', '')):.1f}" for each in dots] == held_out
    (resumed,) = [each for each in figure.iter("line") if each.get("class") == "resumed"]  # none at the first step
    assert float(resumed.get("x1", "")) == pytest.approx(float(trained[1].split(",")[0]), abs=0.06)
