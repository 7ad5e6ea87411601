"""`auto` against all that it goes beyond; what it gives when it is short of time, or interrupted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import repeat
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.errors import NoPlanError
from isthmus.model.capture import capture
from isthmus.model.graph import BlockGraph
from isthmus.model.torch_export import Example
from isthmus.plan.validate import check
from isthmus.planners.budget import Limits, Search
from isthmus.planners.layout.build_plan import build_stages, make_plan, more_slices, only_pipeline
from isthmus.planners.layout.layout_types import StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.data_parallel import data_even
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search.finishing import finish
from isthmus.planners.search.local_search import explore
from isthmus.planners.search_state import SearchState
from isthmus.planners.warm_up import warm_up
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs
from tests.planners.test_portfolio import pipeline_of, problem, two_regions
from tests.planners.test_schemes import two_hosts
from tests.quiet import needs_quiet


@settings(max_examples=4)
@given(clusters(), graphs(), st.sampled_from((4, 6)), st.integers(0, 2**16))
def test_auto_is_never_slower(cluster: Cluster, graph: BlockGraph, batch: int, seed: int) -> None:
    """Than any scheme, or `split`; the plan fits, keeps every rule, and its place."""
    random = Random(seed)
    place = {random.choice(graph.blocks).name: random.choice(cluster.regions)} if random.random() < 0.3 else {}
    task = problem(cluster, graph, batch, place=place)
    try:
        choice = choose_plan(task)
    except NoPlanError:
        with pytest.raises(NoPlanError):
            choose_plan(task, planner="split")
        return
    assert choice.price.fits and set(choice.schemes) == set(SCHEMES)
    check(choice.plan, task.cluster, {"job": task.graph})  # places, and that devices exist, are rules
    assert choice.price.step_seconds >= choice.lower_bound * (1 - 1e-9)
    rivals = [seconds for seconds in choice.schemes.values() if seconds is not None]
    with suppress(NoPlanError):
        rivals.append(choose_plan(task, planner="split").price.step_seconds)
    assert choice.price.step_seconds <= min(rivals, default=float("inf")) * (1 + 1e-9)


ROW = """
kind: cluster
version: 1
name: row
devices:
  big: {compute: {fp32: 20 TFLOP/s}, memory: 16 GB, memory_bandwidth: 900 GB/s}
  tiny: {compute: {fp32: 0.2 TFLOP/s}, memory: 16 GB, memory_bandwidth: 50 GB/s}
hosts:
  a: {region: ra, devices: {big: 1}}
  m: {region: rm, devices: {tiny: 1}}
  z: {region: rz, devices: {big: 1}}
links:
  - {between: [ra, rm], bandwidth: 10 Gbit/s, latency: 1 ms}
  - {between: [rm, rz], bandwidth: 10 Gbit/s, latency: 1 ms}
"""


def test_auto_relays_where_hosts_have_no_link() -> None:
    """Two quick devices that only a slow one can reach: it passes their messages on, and computes nothing."""
    graph = chain(6, width=512, rows=4096)
    task = problem(parse_cluster(ROW), graph, 64, precision="fp32")
    choice = choose_plan(task)
    part = pipeline_of(choice)
    used = {device for stage in part.stages for replica in stage.replicas for device in replica.devices}
    assert used == {"a/big/0", "z/big/0"} and [via.hosts for via in choice.plan.via] == [("m",)]
    alone = choice.schemes["pipeline"]
    assert alone is not None and choice.price.step_seconds < 0.6 * alone, "one of them computes for itself"
    check(choice.plan, task.cluster, {"job": graph})
    assert any("their messages go over m" in note for note in choice.notes)
    assert choice.price.step_seconds >= choice.lower_bound


class Towers(nn.Module):
    """Two branches whose layers are called in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(64, 64) for _ in range(12)) for _ in range(2))
        self.head = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.relu(left(a)), torch.relu(right(b))
        out: Tensor = self.head(torch.cat((a, b), -1))
        return out


def test_branches_are_placed_apart() -> None:
    """Each on a host of its own: both compute at the same time, and only what joins them crosses the slow link."""
    with torch.device("meta"):
        model, example = Towers(), Example(args=(torch.zeros(2, 256, 64),), kwargs={})
    graph, change = capture(model, example, name="towers"), msgspec.structs.replace
    blocks = [change(block, forward_flops=1e9, backward_flops=2e9) for block in graph.blocks[:-1]]
    weights = [change(weight, elements=4_000_000, shape=(2000, 2000), linear=None) for weight in graph.parameters]
    heavy = change(graph, blocks=(*blocks, graph.blocks[-1]), parameters=tuple(weights))
    cluster = ROW.replace("{tiny: 1}", "{}") + "  - {between: [ra, rz], bandwidth: 1 Gbit/s, latency: 1 ms}\n"
    choice = choose_plan(problem(parse_cluster(cluster), heavy, 32, precision="fp32"))
    stages = pipeline_of(choice).stages
    assert [stage.first for stage in stages] == ["left", "right"], "the first blocks of each"
    assert {replica.devices[0] for stage in stages for replica in stage.replicas} == {"a/big/0", "z/big/0"}


def test_auto_goes_beyond_the_schemes() -> None:
    """Two kinds behind a quick link: unequal shares, in a pipeline or beside each other, beat every scheme."""
    task = problem(two_hosts("40 Gbit/s, latency: 0.1 ms", kind="slow"), chain(7, width=512, rows=1024), batch=48)
    choice, row = choose_plan(task, calls=300), choose_plan(task, planner="split", calls=100)
    rivals = [seconds for seconds in choice.schemes.values() if seconds is not None]
    assert choice.planner == "auto" and row.planner == "split"
    assert choice.price.step_seconds < 0.85 * min(rivals)


@pytest.mark.parametrize("planner", ["auto", "split"])
def test_the_same_calls_give_the_same_plan(planner: str) -> None:
    task = problem(two_regions(), chain(8, width=256), place={"h.6": "west"})
    one, two = (choose_plan(task, planner=planner, calls=120) for _ in range(2))
    assert one.plan == two.plan and one.calls == two.calls <= 120
    last = pipeline_of(one).stages[-1]
    assert all(device.startswith("b/") for replica in last.replicas for device in replica.devices)


def test_no_time_at_all() -> None:
    """A plan, or a clear word that there was no time for one."""
    with pytest.raises(NoPlanError, match=r"no layout was priced|fits in memory"):
        choose_plan(problem(two_regions(), chain(8)), budget=0.0)


@pytest.mark.slow("spends a budget of two seconds")
@needs_quiet()
def test_a_scheme_that_never_ends_thinking_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making ideas counts: what has come by then is priced, and others get their turn."""

    def endless(task: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
        ideas = list(data_even(task, memory, fix))
        yield from ideas
        yield from repeat(ideas[0]._replace(seconds=float("inf")))

    warm_up()
    monkeypatch.setitem(SCHEMES, "data-even", endless)
    start = time.process_time()
    choice = choose_plan(problem(two_regions(), chain(8, width=256)), planner="data-even", budget=2.0)
    assert time.process_time() - start < 10.0
    unfinished = choice.outcomes["data-even"]
    assert unfinished.state == "unfinished" and unfinished.best_so_far == choice.price.step_seconds
    assert choice.schemes["data-even"] is None and choice.schemes["pipeline"] is not None
    assert any("the budget ended the search" in note for note in choice.notes)


@pytest.mark.parametrize(("seconds", "first"), [(2.0, True), (None, False), (60.0, False)])
def test_the_hasty_ask_the_network_first(seconds: float | None, first: bool) -> None:
    task = problem(two_regions(), chain(6))
    search, found = Search(SearchState(task), Limits(seconds, calls=40), None), []
    candidates = Candidates(task, LaneMaker(task, MemoryFit(task), search.state), search, None)
    explore(candidates, [], lambda asked: found.append(len(asked.found)))
    assert len(found) == 1 and (found[0] == 0) == first
    with candidates.search.within(0.01):
        assert candidates.search.hasty == first, "it is the whole budget that counts"


def one_micro_batch(graph: BlockGraph) -> tuple[Problem, Candidates]:
    """Two stages on two hosts, and all samples at once: the second waits for the whole message of the first."""
    task = problem(two_hosts("40 Gbit/s, latency: 0.1 ms", kind="slow"), graph)
    first, *_, last = task.usable
    members = [[((first,), 24)], [((last,), 24)]]
    start = task.price(make_plan(task, build_stages(task, [0, 3], members, StageOptions()), 1))
    search = Search(SearchState(task), Limits(), None)
    candidates = Candidates(task, LaneMaker(task, MemoryFit(task), search.state), search, start)
    return task, candidates


def test_slices_are_taken_as_long_as_they_gain() -> None:
    task, candidates = one_micro_batch(chain(6, width=512, rows=1024))
    before = candidates.limit
    finish(candidates)
    assert candidates.best is not None and candidates.limit < 0.9 * before
    check(candidates.best.plan, task.cluster, {"job": task.graph})
    slices = [stage.replicas[0].slices for stage in only_pipeline(candidates.best.plan).stages]
    assert max(slices) > 1
    for number in range(2):
        plan = more_slices(task, candidates.best.plan, number)
        assert plan is None or task.price(plan).price.step_seconds >= 0.999 * candidates.limit
    start = candidates.best.plan
    for _ in range(6):
        start = more_slices(task, start, 0) or start
    assert only_pipeline(start).stages[0].replicas[0].slices == 24 and more_slices(task, start, 0) is None


def test_samples_that_a_block_mixes_are_not_sliced() -> None:
    graph = chain(6, width=512, rows=1024)
    mixing = msgspec.structs.replace(graph.blocks[1], mixes_samples=("batch_norm",))
    task, candidates = one_micro_batch(
        msgspec.structs.replace(graph, blocks=(graph.blocks[0], mixing, *graph.blocks[2:]))
    )
    assert candidates.best is not None and more_slices(task, candidates.best.plan, 0) is None
    assert more_slices(task, candidates.best.plan, 1) is not None


class Impatience:
    """Presses Ctrl-C when something has been told for the n-th time, of one planner or any."""

    def __init__(self, after: int, what: str = "") -> None:
        self.left, self.what = after, what

    def __call__(self, _: Search, what: str) -> None:
        self.left -= not self.what or what == self.what
        if self.left == 0:
            raise KeyboardInterrupt


def interrupt(patch: pytest.MonkeyPatch, after: int, what: str = "") -> None:
    impatience = Impatience(after, what)
    patch.setattr(Search, "tell", lambda search, told: impatience(search, told))


@pytest.mark.parametrize(
    ("planner", "after", "what"),
    [("auto", 3, ""), ("auto", 2, "grid"), ("auto", 4, "lanes"), ("auto", 1, "split"), ("auto", 1, "syncs"),
     ("split", 30, "split"), ("data", 1, "")],
)  # fmt: skip
def test_interrupted(planner: str, after: int, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best plan so far, and a word of it; that is no worse than the schemes that were priced by then."""
    task = problem(two_regions(), chain(8, width=256))
    interrupt(monkeypatch, after, what)
    choice = choose_plan(task, planner=planner, calls=300)
    assert choice.price.fits and "interrupted: this is the best plan so far" in choice.notes
    assert not any("budget" in note for note in choice.notes)
    check(choice.plan, task.cluster, {"job": task.graph})
    if planner == "auto":
        known = [outcome.seconds or outcome.best_so_far for outcome in choice.outcomes.values()]
        assert choice.price.step_seconds <= min(seconds for seconds in known if seconds is not None)


def test_interrupted_before_anything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        choose_plan(problem(two_regions("0.7 GB"), chain(4, width=4096)))


def test_what_fits_nowhere_is_spilled() -> None:
    """Devices too small for the optimizer's state: it goes to the hosts' memory, and no scheme has a plan."""
    task = problem(two_regions("1.0 GB"), chain(6, width=4096, rows=8), batch=24)
    choice = choose_plan(task)
    assert set(choice.schemes.values()) == {None} and choice.price.fits
    assert {stage.spill for stage in pipeline_of(choice).stages} == {"optimizer"}
