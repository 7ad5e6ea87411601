"""Bars, map and words say what the simulator says."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.load import load_cluster, parse_cluster
from isthmus.cost.simulate import Shortage
from isthmus.cost.timeline import DeviceUse, LinkUse, Timeline, covered_length
from isthmus.plan.types import Outcome
from isthmus.report.bars import (
    groups_of,
    memory_bars,
    memory_limits,
    scheme_bars,
    spent_time,
    time_bars,
)
from isthmus.report.cards import cards_of, level
from isthmus.report.headline import headline
from isthmus.report.layout import globe, separate, spread
from isthmus.report.limits import limit_words
from isthmus.report.map import edges_of, map_figure
from tests.plan.golden_files import NAMES
from tests.report.subjects import subject


def widths(markup: str) -> list[float]:
    return [float(width) for width in re.findall(r"width:([0-9.]+)%", markup)]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=12))
def test_the_union_of_intervals(spans: list[tuple[int, int]]) -> None:
    covered = {cell for start, length in spans for cell in range(start, start + length)}
    array = np.array([(start, start + length) for start, length in spans], float).reshape(-1, 2)
    assert covered_length(array) == len(covered)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_spent_once(name: str) -> None:
    given = subject(name)
    step = given.timeline.step_seconds
    spent = spent_time(given.timeline, groups_of(given.file.plan))
    for use in given.timeline.devices:
        parts = spent[use.name]
        assert sum(parts) == pytest.approx(step) and parts.computing == use.computing
        assert -1e-12 <= parts.sending <= use.sending + 1e-12, "what is sent while computing is not counted"
    shares = widths(time_bars(given.cluster, spent, step))
    assert len(shares) == 2 * len(spent) and all(0 <= share <= 100 for share in shares)


def test_members_of_a_tensor_group_compute_with_it() -> None:
    given = subject("tensor-group")
    groups = groups_of(given.file.plan)
    spent = spent_time(given.timeline, groups)
    assert groups
    for first, members in groups.items():
        assert {spent[member].computing for member in members} == {spent[first].computing}


def test_memory_against_its_limits() -> None:
    given = subject("pool")
    limits = memory_limits(given.file.plan, given.cluster)
    pool = given.file.plan.parts[0]
    assert [limits[device] for device in pool.devices] == list(pool.caps)
    assert set(limits) == set(given.cluster.devices)
    peak = given.price.memory
    drawn = memory_bars(given.cluster, peak, limits)
    assert widths(drawn) == pytest.approx([100 * peak[d] / limits[d] for d in peak], abs=0.01)
    small = {device: 0.5 * peak[device] for device in limits if device in peak}
    assert 'class="over"' not in drawn and memory_bars(given.cluster, peak, small).count('class="over"') == len(peak)


def test_schemes_beside_the_bound() -> None:
    seconds = {"slow": 4.0, "endless": 70.0, "mine": 2.0}
    found = {name: Outcome(state="found", seconds=each) for name, each in seconds.items()}
    drawn = scheme_bars({**found, "none": Outcome(state="cannot run", reason="no room")}, "mine", 2.0, 1.0)
    names = re.findall(r'class="name" title="(\w+)"', drawn)
    assert names == ["mine", "slow", "endless", "none"] and "cannot run: no room" in drawn
    left = scheme_bars({"left": Outcome(state="unfinished", best_so_far=1.0)}, "mine", 2.0, None)
    assert "not searched to the end, best so far: 1 s" in left and "0.50 x" not in left
    assert widths(drawn) == [40.0, 80.0, 100.0], "bars end at two and a half times the plan"
    assert drawn.count("left:20.00%") == 4, "the bound is a line through every row"
    assert drawn.count('class="cut"') == 1 and drawn.count('class="none"') == 1 and drawn.count('class="mine"') == 1
    assert "this plan" in scheme_bars({}, "", 2.0, None) and "bound" not in scheme_bars({}, "", 2.0, None)


def test_what_limits_a_plan() -> None:
    def words(computing: float, load: float | None) -> str:
        links = (LinkUse("a to b", 1.0, 1.0, load),) if load is not None else ()
        return limit_words(Timeline(2.0, (DeviceUse("dev", 2 * computing, 0, 0), DeviceUse("z", 0, 0, 2)), links, ()))

    assert words(0.95, 0.3).startswith("Computing limits it: dev computes during 95 % of the step; the link a to b")
    assert words(0.7, 0.6).startswith("No device and no link is busy throughout: the busiest device, dev, computes")
    assert words(0.2, 0.97) == "The network limits it: the link a to b is full for 97 % of the step; dev computes 20 %."
    assert "explain" in words(0.2, 0.3)
    assert words(0.9, None).endswith("nothing is sent.")
    assert limit_words(Timeline(0.0, (), (), ())) == "Nothing is computed."


def test_a_plan_that_does_not_fit_is_said_first() -> None:
    given = subject("two-depths")
    short = given.price._replace(shortages=(Shortage("va1/fast/0", 3e9, 1e9),))
    drawn = headline(given.file, given.cluster, short, given.timeline, True)
    assert "The plan does not fit: va1/fast/0 needs 3 GB and has 1 GB." in drawn
    assert "role" not in headline(given.file, given.cluster, given.price, given.timeline, True)


@pytest.mark.parametrize("name", NAMES)
def test_the_map_carries_what_the_links_carry(name: str) -> None:
    given = subject(name)
    hosts, cards = given.cluster.hosts, cards_of(given.cluster)
    edges = edges_of(given.cluster, cards, given.timeline)
    pairs = {tuple(sorted(link.between)) for link in given.cluster.links}
    assert {tuple(sorted(cards[end].name for end in edge.ends)) for edge in edges} == pairs
    for edge in edges:
        a, b = (cards[end].name for end in edge.ends)
        for (source, target), way in zip(((a, b), (b, a)), edge.ways, strict=True):
            between = [
                use
                for use in given.timeline.links
                for ends in [use.name.split(" to ")]
                if len(ends) == 2 and all(end in hosts for end in ends)
                if (hosts[ends[0]].region, hosts[ends[1]].region) == (source, target)
            ]
            trunk = [use for use in given.timeline.links if use.name == f"{source} to {target} trunk"]
            assert way.bytes == sum(use.bytes for use in between)
            assert way.load == max((use.load for use in between + trunk), default=0.0)
    drawn = map_figure(given.cluster, given.timeline)
    assert drawn.count('class="device ') == 2 * len(given.cluster.devices), "on the wide map and on the tall one"
    assert drawn.count('class="device idle"') == 2 * (len(given.cluster.devices) - len(given.timeline.devices))


def test_figures_of_links_are_not_hidden(root: Path) -> None:
    """They lie clear of cards and of each other, and above every link, on the wide map and on the tall one."""
    cluster = load_cluster(root / "examples" / "clusters" / "four-continents.yaml")
    for drawn in re.findall("<svg.*?</svg>", map_figure(cluster, Timeline(1.0, (), (), ())), re.DOTALL):
        shapes = list(ElementTree.fromstring(drawn).iter())
        kinds = [(each.get("class") or "").split(" ")[0] for each in shapes]
        boxes = [
            tuple(float(each.get(name, "")) for name in ("x", "y", "width", "height"))
            for each, kind in zip(shapes, kinds, strict=True)
            if kind in ("card", "pill")
        ]
        assert kinds.count("card") == 4 and kinds.count("pill") >= 2
        assert kinds.index("pill") > max(n for n, kind in enumerate(kinds) if kind == "link")
        for (x, y, wide, high), (left, top, width, height) in combinations(boxes, 2):
            assert x >= left + width or left >= x + wide or y >= top + height or top >= y + high


def test_one_region_is_a_map_of_hosts() -> None:
    text = "kind: cluster\nversion: 1\nname: c\nhosts: {'h[1-3]': {region: r, devices: {T4: 2}}}\nlinks:\n"
    links = [
        f"- {{between: [{pair}], bandwidth: {rate} Gbit/s, latency: 1 ms}}"
        for pair, rate in (("r, r", 1), ("h1, h3", 9))
    ]
    cluster = parse_cluster(text + "\n".join(links))
    cards = cards_of(cluster)
    edges = edges_of(cluster, cards, Timeline(1.0, (), (LinkUse("h3 to h1", 5.0, 9e9, 0.4),), ()))
    assert [card.name for card in cards] == ["h1", "h2", "h3"]
    wide = {edge.ends: edge.link.bandwidth * 8e-9 for edge in edges}
    assert wide == pytest.approx({(0, 1): 1.0, (0, 2): 9.0, (1, 2): 1.0}), "a pair's own link wins"
    assert [edge.ways[1].bytes for edge in edges if edge.ends == (0, 2)] == [5.0]
    drawn = map_figure(cluster, Timeline(1.0, (), (), ()))
    assert drawn.count('class="edge"') == 6 and "1 Gbit/s, 1 ms" in drawn


@pytest.mark.parametrize(("hosts", "devices", "squares"), [(90, 8, 720), (300, 8, 300), (5000, 1, 1667)])
def test_squares_stand_for_more_in_large_clusters(hosts: int, devices: int, squares: int) -> None:
    text = f"hosts: {{'h[1-{hosts}]': {{region: r, devices: {{T4: {devices}}}}}}}"
    cluster = parse_cluster(f"kind: cluster\nversion: 1\nname: c\n{text}\n")
    drawn = map_figure(cluster, Timeline(1.0, (), (), ()))
    assert drawn.count('class="device ') == 2 * squares and f"{hosts * devices} devices" in drawn


@given(st.lists(st.tuples(*[st.integers(0, 300)] * 2, *[st.integers(40, 200)] * 2), min_size=1, max_size=9))
def test_cards_never_overlap(given: list[tuple[int, int, int, int]]) -> None:
    array = np.array(given, float)
    places = separate(array[:, :2], array[:, 2:], 20.0)
    for i in range(len(places)):
        for j in range(i):
            gap = np.abs(places[i] - places[j]) - (array[i, 2:] + array[j, 2:]) / 2
            assert gap.max() >= 20.0 - 1e-3


def test_points_follow_latency_and_the_globe() -> None:
    line = np.abs(np.subtract.outer(np.arange(4.0), np.arange(4.0))) ** 2 * 1e-3  # square roots lie on a line
    points = spread(line)
    assert (np.diff(points[:, 0]) > 0).all() and points.min() >= 0 and points.max() <= 1
    apart = np.full((2, 2), np.inf)
    np.fill_diagonal(apart, 0.0)
    assert spread(apart)[:, 0].tolist() == [0.0, 1.0] and spread(np.zeros((1, 1))).tolist() == [[0.5, 0.5]]
    tokyo, oregon, virginia = globe(np.array([[35.7, 139.7], [45.6, -121.2], [39.0, -77.5]]))[:, 0]
    assert tokyo < oregon < virginia, "cut in the Atlantic and Asia, not in the Pacific"


def test_shades() -> None:
    assert [level(part) for part in (0.0, 0.001, 0.1, 0.11, 0.3, 0.6, 0.9, 1.0)] == [0, 1, 1, 2, 3, 4, 5, 5]
