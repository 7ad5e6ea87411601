"""The cutter: closed prefixes, sets that stay together, the limit, few elements over cuts, against brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.model.blocks import Item, _branchy, _cheapest, _depth_first, _metis_order, choose_blocks


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Item], list[list[int]]]:
    count = draw(st.integers(1, 24))
    items = []
    for index in range(count):
        reads = draw(st.sets(st.integers(max(0, index - 6), index - 1), max_size=3)) if index else set()
        items.append(
            Item(
                reads=tuple(sorted(reads)),
                share=draw(st.integers(0, 5)) / (5 * count),
                elements=float(draw(st.integers(1, 9))),
                heavy=draw(st.booleans()),
                module=draw(st.sampled_from(["", "a", "a.b", "a.c"])),
            )
        )
    joins = draw(st.lists(st.lists(st.integers(0, count - 1), min_size=2, max_size=3), max_size=3))
    return items, joins


@settings(max_examples=80)
@given(graph=graphs(), limit=st.integers(1, 8))
def test_blocks_are_closed_runs_that_keep_joined_items(graph: tuple[list[Item], list[list[int]]], limit: int) -> None:
    items, joins = graph
    runs = choose_blocks(items, joins, limit)
    assert sorted(itertools.chain(*runs)) == list(range(len(items))) and 1 <= len(runs) <= limit
    block = {item: b for b, run in enumerate(runs) for item in run}
    assert all(block[source] <= block[i] for i, item in enumerate(items) for source in item.reads)
    assert all(len({block[item] for item in join}) == 1 for join in joins)


@settings(max_examples=60)
@given(
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=9),
    prices=st.lists(st.integers(0, 40), min_size=8, max_size=8),
)
def test_dynamic_programme_equals_brute_force(shares: list[int], prices: list[int]) -> None:
    done = np.cumsum([0.0, *shares]) / sum(shares)
    places = np.arange(1, len(shares))
    toll = np.array(prices[: len(shares) - 1]) / 100

    def cost(cuts: tuple[int, ...]) -> float:
        bounds = [0, *cuts, len(shares)]
        return sum((done[b] - done[a]) ** 2 for a, b in itertools.pairwise(bounds)) + sum(toll[c - 1] for c in cuts)

    best = min(
        cost(cuts) for size in range(len(shares)) for cuts in itertools.combinations(range(1, len(shares)), size)
    )
    assert abs(cost(tuple(int(c) for c in _cheapest(done, places, toll))) - best) < 1e-12


def chain(layers: int, width: float = 1.0) -> list[Item]:
    """Layers with a residual connection: norm, product, sum; wide inside, narrow between."""
    items: list[Item] = []
    for layer in range(layers):
        before = (len(items) - 1,) if items else ()
        name = f"h.{layer}"
        items.append(Item(reads=before, share=0.0, elements=width, heavy=False, module=name))
        items.append(Item(reads=(len(items) - 1,), share=1 / layers, elements=width, heavy=True, module=name))
        items.append(Item(reads=(len(items) - 1, *before), share=0.0, elements=width, heavy=False, module=name))
    return items


def test_cuts_fall_between_layers() -> None:
    assert [len(run) for run in choose_blocks(chain(20), [], 128)] == [3] * 20


def test_layers_merge_evenly_under_a_limit() -> None:
    assert {len(run) for run in choose_blocks(chain(24), [], 8)} == {9}


def towers(count: int, depth: int) -> list[Item]:
    """Independent chains whose items are listed in turns, joined at the end."""
    items = [Item(reads=(), share=0.0, elements=0.01, heavy=False, module="in")]
    last = [0] * count
    for _ in range(depth):
        for tower in range(count):
            share = 1 / (count * depth)
            items.append(Item(reads=(last[tower],), share=share, elements=1.0, heavy=True, module=f"t{tower}"))
            last[tower] = len(items) - 1
    items.append(Item(reads=tuple(last), share=0.0, elements=0.01, heavy=False, module="out"))
    return items


def crossing(items: list[Item], runs: list[list[int]]) -> float:
    block = {item: b for b, run in enumerate(runs) for item in run}
    pairs = {(source, block[i]) for i, item in enumerate(items) for source in item.reads if block[i] != block[source]}
    return sum(items[source].elements for source, _ in pairs)


@given(graphs())
def test_going_deep_first_keeps_every_reader_behind_its_sources(graph: tuple[list[Item], list[list[int]]]) -> None:
    items, _ = graph
    position = {item: p for p, item in enumerate(_depth_first(items))}
    assert len(position) == len(items)
    assert all(position[source] < position[i] for i, item in enumerate(items) for source in item.reads)


def test_branches_are_taken_one_after_another() -> None:
    items = towers(4, 6)
    assert _branchy(items, list(range(len(items)))) and not _branchy(chain(20), list(range(60)))
    assert sorted(_metis_order(items, list(range(len(items))), 4)) == list(range(len(items)))
    tower = [items[i].module for i in _depth_first(items)]
    assert [module for module, _ in itertools.groupby(tower)] == ["in", "t0", "t1", "t2", "t3", "out"]
    runs = choose_blocks(items, [], 4)
    in_turns = [list(range(a, b)) for a, b in itertools.pairwise([0, 7, 13, 19, 26])]
    assert len(runs) == 4 and crossing(items, runs) < crossing(items, in_turns) / 2
