"""The page: whole, self-contained, true to the timeline, and deaf to hostile names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cost.timeline import Activity
from isthmus.report.columns import sentence
from isthmus.report.html import Subject, report_html
from isthmus.report.limits import limit_words
from isthmus.report.markup import escape, prose, tag
from isthmus.report.packed import LANES, TICKS, kept_activities, pack
from tests.plan.golden_files import NAMES
from tests.report.subjects import HOSTILE, hostile_subject, subject

VOID = {"meta"}
SECTIONS = {"title", "schemes-title", "time-title", "map-title", "timeline-title", "memory-title", "plan-title"}


class Page(HTMLParser):
    """Elements in order, with their attributes and own text; a tag that closes nothing is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.texts).append(data)

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for element, attributes in self.elements if element == name]


def data_of(page: Page) -> dict[str, Any]:
    found = json.loads(page.scripts[0])
    assert isinstance(found, dict)
    return found


def unpacked(data: dict[str, Any]) -> Iterator[Activity]:
    """The activities again, by the description in packed.py."""
    tick = data["step"] / data["ticks"]
    for name, lanes in data["tracks"]:
        for lane, *columns in lanes:
            now = 0
            for what, gap, length, tail, size in zip(*columns, strict=True):
                kind, job, label = data["what"][what]
                start, sent, end = now + gap, now + gap + length, now + gap + length + tail
                yield Activity(
                    name.partition(" +")[0], data["lanes"][lane], data["kinds"][kind], job, label, start * tick,
                    sent * tick, end * tick, data["bytes"][size],
                )  # fmt: skip
                now = sent


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_whole_and_alone(name: str) -> None:
    text = report_html(subject(name))
    page = Page(text)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids) and set(ids) >= SECTIONS
    policy = next(meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    for element, attributes in page.elements:
        assert element not in ("link", "img", "iframe", "object", "embed", "base", "form"), element
        assert not {"src", "href", "action", "xlink:href"} & set(attributes), element
    assert not re.search(r"https?:|@import|url\((?!#dots)", text), "nothing from outside"
    labels = [attributes.get("aria-labelledby") for attributes in page.all("section")]
    assert all(label in ids for label in labels)


@pytest.mark.parametrize("name", NAMES)
def test_the_data_is_the_timeline(name: str) -> None:
    given = subject(name)
    data = data_of(Page(report_html(given)))
    assert data["dropped"] == 0 and data["step"] == given.timeline.step_seconds
    found = sorted(unpacked(data), key=lambda a: (a.track, a.lane, a.label, a.bytes, a.start))
    wanted = sorted(given.timeline.activities, key=lambda a: (a.track, a.lane, a.label, round(a.bytes), a.start))
    assert len(found) == len(wanted)
    slack = 3 * given.timeline.step_seconds / TICKS
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[:5] == theirs[:5] and mine.bytes == round(theirs.bytes)
        assert mine[5:8] == pytest.approx(theirs[5:8], abs=slack)
    members = sorted(track for _, tracks in data["groups"] for track in tracks)
    assert members == list(range(len(data["tracks"]))), "every track is in one group"


TRACKS = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 50), max_size=12), max_size=4)


@given(TRACKS, st.integers(0, 40))
def test_what_is_left_out_is_the_shortest(lengths: dict[str, list[int]], most: int) -> None:
    tracks = {
        name: [Activity(name, LANES[0], "forward", "j", "", 100.0 * n, 100.0 * n + k, 100.0 * n + k, 0.0)
               for n, k in enumerate(values)]
        for name, values in lengths.items()
    }  # fmt: skip
    kept = kept_activities(tracks, most)
    total = sum(map(len, kept.values()))
    assert total <= most or total == 0
    assert total == sum(map(len, tracks.values())) or total + len(tracks) > most, "no room is wasted"
    for name, activities in tracks.items():
        assert [a for a in activities if a in kept[name]] == kept[name], "in order"
        left = [a.end - a.start for a in activities if a not in kept[name]]
        assert not left or not kept[name] or max(left) <= min(a.end - a.start for a in kept[name])


def test_a_page_that_leaves_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    given = subject("two-depths")
    packed = pack(given.timeline, given.cluster, {}, most=20)
    assert packed["dropped"] == len(given.timeline.activities) - sum(
        len(lane[1]) for _, lanes in packed["tracks"] for lane in lanes
    )
    assert packed["dropped"] > 0
    monkeypatch.setattr("isthmus.report.html.pack", lambda *args: packed)
    assert f"{packed['dropped']:,} activities are left out" in report_html(given)


def test_hostile_names_stay_text() -> None:
    text = report_html(hostile_subject())
    page, plain = Page(text), Page(report_html(subject("two-depths")))
    assert len(page.scripts) == len(page.all("script")) == 2 and page.scripts[1] == plain.scripts[1]
    assert {element for element, _ in page.elements} == {element for element, _ in plain.elements}
    assert all(not name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert not any(hostile in text for hostile in HOSTILE)
    assert {what[2] for what in data_of(page)["what"]} == {f"{hostile} #1" for hostile in HOSTILE}
    shown = "".join(page.texts)
    assert all(hostile in shown for hostile in HOSTILE[:3]), "they are shown, as text"
    assert "$style ${script} $$ \ufffdreversed\ufffd" in shown, "what cannot be seen is made visible"


@given(st.text())
def test_markup_escapes_everything(text: str) -> None:
    page = Page(str(tag("p", text, title=text, class_=None)))
    seen = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    assert page.elements == [("p", {"title": seen})] and "".join(page.texts) == seen
    assert escape(escape(text)) == escape(text)


def test_figures_of_the_first_lines() -> None:
    given = subject("two-depths")
    shown = " ".join(Page(report_html(given)).texts)
    assert "the plan takes 2.00 x" in shown and "seed 3" in shown and "hand" in shown
    assert "not measurements" in shown and "today by nobody" in shown and "0" * 64 in shown


def test_other_machines_take_the_bound_and_the_schemes_away() -> None:
    given = subject("two-depths")
    fields = {name: getattr(given, name) for name in ("file", "cluster", "price", "timeline", "made")}
    shown = " ".join(Page(report_html(Subject(**fields, same=False))).texts)
    assert "lower bound" not in shown and "not the cluster the plan was made for" in shown
    assert "priced with other inputs" in shown and "made from another" not in shown
    assert "made from another cluster" in " ".join(Page(report_html(Subject(**fields, match=False))).texts)
    bare = {**fields, "file": msgspec.structs.replace(given.file, predicted=None)}
    assert "holds no schemes" in " ".join(Page(report_html(Subject(**bare, same=False))).texts)


def test_a_file_that_predicts_something_else() -> None:
    given = subject("two-depths")
    assert given.file.predicted is not None
    predicted = msgspec.structs.replace(given.file.predicted, step_seconds=given.price.step_seconds / 3)
    file = msgspec.structs.replace(given.file, predicted=predicted)
    changed = Subject(file=file, cluster=given.cluster, price=given.price, timeline=given.timeline, made="")
    assert "the time here is 3.00 x that" in report_html(changed) and "x that" not in report_html(given)


def test_commands_are_code_and_not_in_backticks() -> None:
    assert prose("see `isthmus explain` <b>") == "see <code>isthmus explain</code> &lt;b&gt;"
    idle = subject("two-depths").timeline
    assert "`isthmus explain`" in limit_words(idle)
    text = report_html(subject("two-depths"))
    shown = text[text.index("<main>") : text.index("</main>")]
    assert "`" not in shown and "<code>isthmus explain</code>" in shown


def test_names_are_shown_as_they_are_written() -> None:
    assert sentence("oslo1 to lima2 is the busiest link") == "oslo1 to lima2 is the busiest link."
    assert sentence("the plan does not fit") == "The plan does not fit."
    style = (files("isthmus.report") / "page" / "style.css").read_text("utf-8")
    assert "text-transform" not in style


def test_nothing_to_compare_with_leaves_no_empty_panel() -> None:
    given = vars(subject("two-depths"))
    bare = report_html(Subject(**{**given, "file": msgspec.structs.replace(given["file"], predicted=None)}))
    assert "Beside the usual schemes" not in bare and "Beside the usual schemes" in report_html(Subject(**given))
