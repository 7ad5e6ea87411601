"""Columns, classes and repeats: what people read is what there is."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.plan.types import Outcome
from isthmus.report.class_names import device_classes, host_classes
from isthmus.report.cluster_text import cluster_text
from isthmus.report.columns import columns, cut, excerpt, percent, times
from isthmus.report.model_text import repeats, tensor_split
from isthmus.report.outcomes import comparison
from isthmus.report.plan_text import scheme_lines
from tests.plan.small_models import chain

WORDS = st.text("abc.", min_size=1, max_size=6)


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=6))
def test_columns_hold_the_cells_and_line_up(rows: list[tuple[str, str, str]]) -> None:
    lines = columns(rows, right=(1,))
    assert [tuple(line.split()) for line in lines] == rows
    ends = {len(line) - len(line.split()[-1]) for line in lines}
    assert len(ends) == 1, "the last column begins at one place, as the one before it ends at one place"


@given(st.text("ab", max_size=40))
def test_repeats_spell_the_sequence(text: str) -> None:
    found = repeats(text)
    assert "".join(text[start : start + period] * times for start, period, times in found) == text
    assert sum(period * times for _, period, times in found) == len(text)


OUTCOMES = {
    "slow": Outcome(state="found", seconds=4.0),
    "none": Outcome(state="cannot run", reason="it needs two hosts"),
    "left": Outcome(state="unfinished", best_so_far=0.5, reason="spent"),
    "bare": Outcome(state="unfinished"),
    "quick": Outcome(state="found", seconds=1.0),
}


def test_repeats_find_layers() -> None:
    assert [tuple(repeat) for repeat in repeats(["e", *["attn", "mlp"] * 24, "head"])] == [
        (0, 1, 1),
        (1, 2, 24),
        (49, 1, 1),
    ]
    assert [tuple(repeat) for repeat in repeats("aaaa")] == [(0, 1, 4)]
    assert len(repeats([str(index) for index in range(5)])) == 5


@given(st.integers(0, 12), st.integers(1, 9), st.booleans())
def test_a_range_of_hosts_is_named_as_it_was_written(first: int, count: int, padded: bool) -> None:
    written = f"{first:03d}-{first + count:03d}" if padded else f"{first}-{first + count}"
    hosts = f"hosts: {{'node[{written}]': {{region: r, devices: {{T4: 2}}}}, other: {{region: r, devices: {{T4: 1}}}}}}"
    cluster = parse_cluster(f"kind: cluster\nversion: 1\nname: c\n{hosts}\n")
    assert [group.name for group in host_classes(cluster)] == [f"node[{written}]", "other"]
    groups = device_classes(cluster)
    assert [group.name for group in groups] == [f"node[{written}]/T4/*", "other/T4/0"]
    assert [name for group in groups for name in group.devices] == list(cluster.devices)


def test_hosts_that_are_no_range_are_listed() -> None:
    hosts = "".join(f"  {name}: {{region: r, devices: {{T4: 1}}}}\n" for name in ("x1", "x3", "b", "c", "d"))
    cluster = parse_cluster(f"kind: cluster\nversion: 1\nname: c\nhosts:\n{hosts}")
    assert [group.name for group in host_classes(cluster)] == ["x1,x3,b,+2"]


def test_many_regions_are_listed_instead_of_a_matrix() -> None:
    hosts = "".join(f"  h{n}: {{region: r{n}, devices: {{T4: 1}}}}\n" for n in range(9))
    links = "".join(f"  - {{between: [r{n}, r{n + 1}], bandwidth: 1 Gbit/s, latency: 9 ms}}\n" for n in range(8))
    text = cluster_text(parse_cluster(f"kind: cluster\nversion: 1\nname: c\nhosts:\n{hosts}links:\n{links}"))
    assert "r7 - r8" in text and max(map(len, text.splitlines())) < 120


def test_tensor_split_is_a_share_of_the_whole() -> None:
    graph = chain()
    split = tensor_split(graph)
    forward = sum(block.forward_flops for block in graph.blocks)
    assert split.flops == sum(b.tensor.flops for b in graph.blocks if b.tensor) / forward
    assert split.parameters == 6 * 2 * 64 * 64 / graph.elements and split.degree == 8
    assert tensor_split(chain(heads=0)) == (0.0, 0.0, 0)
    bare = msgspec.structs.replace(graph, blocks=())
    assert tensor_split(bare).flops == 0.0


def test_schemes_are_in_order_and_all_there() -> None:
    lines = scheme_lines(OUTCOMES, "quick", 1.0)
    assert [line.split()[0] for line in lines[:6]] == ["scheme", "quick", "slow", "left", "bare", "none"]
    assert "this plan" in lines[1] and "4.00 x" in lines[2] and "cannot run: it needs two hosts" in lines[5]
    assert "not searched to the end, best so far: 500 ms (spent)" in lines[3] and "nothing found" in lines[4]


def test_an_unfinished_scheme_is_never_counted_in_a_ratio() -> None:
    """`left` has a plan that is faster than `slow`, but nobody knows how fast it would become."""
    others = {name: outcome for name, outcome in OUTCOMES.items() if name != "quick"}
    said = comparison(others, "auto", 0.25)
    assert said is not None and "16 x as fast as the best scheme, slow" in said
    assert "of those searched to the end; left, bare were not searched to the end" in said
    ended = {name: outcome for name, outcome in others.items() if outcome.state != "unfinished"}
    assert comparison(ended, "auto", 0.25) == "the plan is 16 x as fast as the best scheme, slow"
    only = comparison({"left": OUTCOMES["left"]}, "auto", 0.25)
    assert only == "not compared with a scheme: left was not searched to the end"
    assert comparison(ended, "none", 8.0) == "the best scheme, slow, is 2.00 x as fast as the plan"
    assert comparison(ended, "slow", 4.0) == "the plan is that of the best scheme, slow"
    assert comparison({}, "auto", 1.0) is None


def test_small_things() -> None:
    assert percent(0.0) == "0 %" and percent(0.001) == "<1 %" and percent(0.994) == "99 %"
    assert times(1.0004) == "1.00 x" and times(123.4) == "123 x"
    assert cut("abcdef", 5) == "ab..." and cut("abcde", 5) == "abcde"
    assert excerpt("a\nb\nc", 2, "see FILE") == ["a", "b", "... 1 more lines; see FILE"] and excerpt("a", 2, "") == [
        "a"
    ]
