"""Stages and cuts by dynamic programming against all of them, priced by the formula written once more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Layout
from isthmus.planners.layout.device_groups import all_bundles, orders
from isthmus.planners.layout.layout_types import Bundle, Need, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.stage_dp import Arranged, Arranger
from isthmus.planners.layout.stage_shares import Sharing
from isthmus.planners.layout.stage_tables import StageTables, sync_seconds
from isthmus.planners.problem import Problem
from isthmus.units import Bytes
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.test_portfolio import problem, two_regions

Groups = Sequence[tuple[str, ...]]


class Plain:
    """The formula of `arrange`, without tables: seconds of a stage, and of what passes between two."""

    def __init__(self, task: Problem, samples: int, count: int, held: StageOptions, ahead: int) -> None:
        self.task, self.samples, self.count, self.held, self.ahead = task, samples, count, held, ahead
        self.memory, self.sharing = MemoryFit(task), Sharing(task)
        self._stages: dict[object, tuple[float, bool]] = {}

    def stage(self, groups: Groups, a: int, b: int, after: int) -> tuple[float, bool]:
        """Seconds on blocks a .. b - 1 with so many stages after it, and whether activations are made again."""
        key = tuple(groups), a, b, after
        if key not in self._stages:
            self._stages[key] = self._stage(groups, a, b, min(after + 1 + (self.ahead if after else 0), self.count))
        return self._stages[key]

    def _stage(self, groups: Groups, a: int, b: int, flight: int) -> tuple[float, bool]:
        task, fits = self.task, {}
        stage = self.sharing.stage(groups, self.samples)
        rows = [task.block_seconds(*task.replica_kind(group), share) for group, share in stage]
        forward, backward = max(rows, key=lambda row: float(row.sum()))[:, a:b].sum(axis=1)
        everyone = tuple(device for group in groups for device in group)
        for again in (False, True):
            needs = [Need(group, len(group), len(groups), share, flight) for group, share in stage]
            roomy = all(self.memory.fits(need, self.held._replace(recompute=again))[a, b] for need in needs)
            fits[again] = roomy and bool(self.memory.allowed(everyone)[a, b])
        if not fits[True]:
            return float("inf"), True
        inside = [name for block in task.graph.blocks[a:b] for name in block.parameters]  # a tie: in every block of it
        elements = sum(task.graph.parameter[name].elements for name in inside)
        per_byte, waits = sync_seconds(task, [group[0] for group in groups])
        sync = per_byte * elements * task.table.width * (task.kept or 1.0) + waits
        again = not fits[False]
        return self.count * (forward * (1 + again) + backward) + max(0.0, sync - backward), again

    def passing(self, groups: Groups, last: str, first: str, b: int) -> float:
        """Seconds in which all samples go from a stage, whose last device is named, to the next one's first."""
        cluster, size = self.task.simulator.priced_cluster, [0.0, 0.0]
        for tensor in self.task.graph.tensors:
            width = tensor.width or self.task.table.width
            if tensor.source < b <= max(tensor.targets, default=-1) and tensor.source >= 0:
                size[0] += tensor.elements * width
                size[1] += tensor.elements * width * tensor.grad
        host, other = cluster.host_of(last), cluster.host_of(first)
        bytes_all = self.count * self.samples * max(size)
        if host.name == other.name:
            return bytes_all / host.bandwidth / len({cluster.devices[g[0]].host for g in groups})
        link = cluster.link(host.name, other.name)
        if link is None:
            return float("inf") if bytes_all else 0.0
        rate = min(link.bandwidth, host.nic, other.nic) * len({cluster.devices[g[0]].host for g in groups})
        trunk = cluster.trunk(host.region, other.region)
        return bytes_all / min(rate, trunk or float("inf"))

    def slowest(self, stages: Sequence[Groups], firsts: Sequence[int], *, passes: bool = True) -> float:
        """What the dynamic programme makes least."""
        ends, depth = (*firsts[1:], len(self.task.graph.blocks)), len(stages)
        times = [self.stage(stages[s], firsts[s], ends[s], depth - 1 - s)[0] for s in range(depth)]
        if passes and depth > 1:
            pairs = zip(pairwise(stages), ends[:-1], strict=True)
            times += [self.passing(one, one[-1][0], two[0][0], b) for (one, two), b in pairs]
        return max(times)


def rows_of_stages(bundles: Sequence[Bundle], depth: int) -> Iterator[list[Groups]]:
    """All ways to make so many stages of bundles in a row, of two regions at most each; some bundles may stay idle."""
    for marks in combinations(range(len(bundles) + 1 + depth - 1), 2 * depth):
        # a stage's end and the next one's start may be one place: they are drawn apart, then moved together
        places = [mark - s // 2 for s, mark in enumerate(marks)]
        runs = [bundles[a:b] for a, b in zip(places[::2], places[1::2], strict=True)]
        if all(len({bundle.region for bundle in run}) <= 2 for run in runs):
            yield [[group for bundle in run for group in bundle.groups] for run in runs]


def every_depth(arranger: Arranger, bundles: Sequence[Bundle], *fixed: Any) -> list[Arranged]:
    """The best arrangement of each depth that is possible."""
    solved = arranger.solved(bundles, *fixed)
    return [arranger.traced(solved, depth) for depth in np.flatnonzero(solved.slowest < np.inf).tolist() if depth]


def cuts(blocks: int, depth: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in combinations(range(1, blocks), depth - 1)]


def tight(cluster: Cluster, graph: BlockGraph, random: Random) -> Cluster:
    """With so little memory that some stages do not fit, or only if activations are made again."""
    whole = 16 * graph.elements + 24 * 4 * sum(block.saved for block in graph.blocks)
    kinds = {
        name: replace(kind, memory=Bytes(6e8 + whole * 10 ** random.uniform(-1, 0.5)))
        for name, kind in cluster.kinds.items()
    }
    return replace(cluster, kinds=kinds)


@settings(max_examples=60)
@given(clusters(), graphs(), st.integers(0, 2**16))
def test_the_best_of_all_stages_and_cuts(cluster: Cluster, graph: BlockGraph, seed: int) -> None:
    random = Random(seed)
    graph = chain(5, width=512, rows=16) if random.random() < 0.3 else graph
    if random.random() < 0.6:
        cluster = tight(cluster, graph, random)
    place = {random.choice(graph.blocks).name: random.choice(cluster.regions)} if random.random() < 0.3 else {}
    task = problem(cluster, graph, 24, sparsity=random.choice((None, 0.5)), place=place)
    bundles = random.choice(orders(task, all_bundles(task, random.choice((1, 1, 2))) or all_bundles(task)))
    start = random.randrange(max(1, len(bundles) - 3))
    bundles = bundles[start : start + 4]
    count, ahead = random.choice((1, 4, 12)), random.choice((0, 2))
    state: Layout = random.choice(("replicated", "sharded-optimizer"))
    held = StageOptions(False, state, random.random() < 0.3)
    arranger = Arranger(task, MemoryFit(task), Sharing(task))
    fixed = 24 // count, count, held, ahead
    found = {len(one.stages): one for one in every_depth(arranger, bundles, *fixed)}
    plain, blocks = Plain(task, *fixed), len(graph.blocks)
    for depth in range(1, min(len(bundles), blocks) + 1):
        options = [
            plain.slowest(stages, firsts) for stages in rows_of_stages(bundles, depth) for firsts in cuts(blocks, depth)
        ]
        best = min(options, default=float("inf"))
        assert (depth in found) == (best < float("inf"))
        if depth in found:
            one = found[depth]
            assert plain.slowest(one.stages, one.firsts) == pytest.approx(best, rel=1e-9)
            holds_as_it_says(plain, one)
            assert arranger.recut(one, *fixed) == one, "all borders were tried"
    cuts_again(plain, fixed, bundles, random)


def cuts_again(plain: Plain, fixed: Any, bundles: Sequence[Bundle], random: Random) -> None:
    """Where a border was left out at first, stages are cut in the best way of all, as far as their own times go."""
    arranger, blocks = Arranger(plain.task, plain.memory, plain.sharing), len(plain.task.graph.blocks)
    fewer = np.delete(arranger.borders, random.randrange(1, blocks))
    arranger.runs = StageTables(plain.task, plain.memory, plain.sharing, fewer)
    for one in every_depth(arranger, bundles, *fixed):
        recut, depth = arranger.recut(one, *fixed), len(one.stages)
        holds_as_it_says(plain, recut)
        assert recut.stages == one.stages and set(one.firsts) <= set(arranger.borders.tolist())
        least = min(plain.slowest(one.stages, firsts, passes=False) for firsts in cuts(blocks, depth))
        assert plain.slowest(recut.stages, recut.firsts, passes=False) == pytest.approx(least, rel=1e-9)


def holds_as_it_says(plain: Plain, one: Arranged) -> None:
    """Activations are made again where they must, and nowhere else."""
    ends, depth = (*one.firsts[1:], len(plain.task.graph.blocks)), len(one.stages)
    spans = zip(one.stages, one.firsts, ends, strict=True)
    assert one.recompute == tuple(plain.stage(g, a, b, depth - 1 - s)[1] for s, (g, a, b) in enumerate(spans))


def test_models_of_many_blocks_are_cut_at_some_borders_first() -> None:
    task = problem(two_regions(), chain(60, width=256, rows=64))
    arranger = Arranger(task, MemoryFit(task), Sharing(task))
    assert arranger.borders[0] == 0 and arranger.borders[-1] == 60 and len(arranger.borders) <= 30
    plain, fixed = Plain(task, 2, 12, StageOptions(), 0), (2, 12, StageOptions(), 0)
    for one in every_depth(arranger, all_bundles(task), *fixed):
        assert set(one.firsts) <= set(arranger.borders.tolist())
        recut = arranger.recut(one, *fixed)
        before, after = (plain.slowest(a.stages, a.firsts, passes=False) for a in (one, recut))
        assert after <= before * (1 + 1e-9)
