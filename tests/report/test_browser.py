"""The page in a real browser: no error, everything drawn, hovering shows a value, and it fits a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.report.html import write_report
from tests.report.browser import Browser, find_chromium
from tests.report.subjects import HOSTILE, hostile_subject, subject

PROGRAM = find_chromium()

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed: the page is not opened")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report(subject("two-depths"), path)
    return path


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    """The middle of an element, scrolled into sight."""
    script = f"""(() => {{
        const element = document.querySelector({selector!r});
        element.scrollIntoView({{ block: "center" }});
        const box = element.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2, box.width, box.height];
    }})()"""
    x, y, width, height = browser.run(script)
    assert width > 0 and height > 0
    browser.settle()
    return x, y


def shades(browser: Browser, canvas: str) -> int:
    """Different colours on a canvas."""
    return browser.run(f"""(() => {{
        const canvas = document.getElementById({canvas!r});
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        return new Set(new Uint32Array(pixels.buffer)).size;
    }})()""")


def picture(browser: Browser) -> str:
    return browser.run('document.getElementById("chart").toDataURL()')


def tip(browser: Browser) -> str:
    return browser.run('(({ hidden, textContent }) => hidden ? "" : textContent)(document.getElementById("tip"))')


def hover_chart(browser: Browser) -> str:
    """Moves down over the first instants of the chart until something is said."""
    script = "(({ left, top, width, height }) => [left, top, width, height])"
    left, top, width, height = browser.run(f'{script}(document.getElementById("chart").getBoundingClientRect())')
    for y in range(36, int(height), 6):
        browser.mouse("moved", left + (5 if width < 560 else 221), top + y)
        if "\njob " in tip(browser):
            return tip(browser)
    return ""


def test_everything_is_there_and_answers(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert shades(browser, "chart") > 4 and shades(browser, "overview") > 2
    browser.mouse("moved", *middle(browser, ".map.wide .card"))
    assert "devices" in tip(browser)
    x, y = middle(browser, ".bars li")
    browser.mouse("moved", x, y)
    assert "a step" in tip(browser)
    middle(browser, "#rows")
    said = hover_chart(browser).splitlines()
    assert len(said) >= 4 and said[2].startswith("job ") and " to " in said[3]
    assert browser.errors == []


def test_zooming_and_back(browser: Browser, page: Path) -> None:
    browser.open(page)
    x, y = middle(browser, "#chart")
    whole = picture(browser)
    browser.mouse("wheel", x, y, deltaX=0, deltaY=-300, modifiers=2)  # 2: Ctrl
    closer = picture(browser)
    assert closer != whole
    browser.mouse("pressed", x, y, button="left", clickCount=1)
    browser.mouse("moved", x - 80, y, button="left", buttons=1)
    browser.mouse("released", x - 80, y, button="left", clickCount=1)
    assert picture(browser) != closer
    browser.run('document.getElementById("reset").click()')
    browser.mouse("moved", 2, 2)
    assert picture(browser) == whole
    assert browser.errors == []


def test_light_and_dark(browser: Browser, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, dark=True)
    dark, picture_of_dark = browser.run(ground), picture(browser)
    browser.run('document.getElementById("theme").click()')
    browser.settle()
    switched = browser.run(ground), picture(browser)
    browser.open(page)
    assert switched == (browser.run(ground), picture(browser)) != (dark, picture_of_dark)
    assert browser.errors == []


def test_hostile_names_on_a_phone(browser: Browser, page: Path) -> None:
    write_report(hostile_subject(), page.with_name("hostile.html"))
    browser.open(page.with_name("hostile.html"), width=390, height=844)
    assert browser.run("document.documentElement.scrollWidth") <= 390, "no sideways scrolling"
    middle(browser, "#rows")
    said = hover_chart(browser)
    assert any(hostile in said for hostile in HOSTILE)
    assert browser.run("document.title").startswith(HOSTILE[1])
    assert browser.run('document.querySelectorAll("img, script:not([type])").length') == 1
    assert browser.errors == []


def test_panels_side_by_side_are_filled(browser: Browser, page: Path) -> None:
    """Beside each other stand only panels of the same rows: none is half empty."""
    browser.open(page)
    sizes = browser.run("""[...document.querySelectorAll(".pair > section")].map((panel) =>
        [panel.getBoundingClientRect().bottom, panel.lastElementChild.getBoundingClientRect().bottom])""")
    assert len(sizes) == 2 and all(bottom - used < 60 for bottom, used in sizes)
