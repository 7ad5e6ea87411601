"""Choices one after another: every whole draft is a setting, every setting of whole sorts is one draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.planners.budget import Limits, Search
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker
from isthmus.planners.learned.decisions import APART, IDLE, NEW, Asked, Decision, Draft, Drafts, even, path_to
from isthmus.planners.learned.tree_search import Leaves, SearchTree
from isthmus.planners.problem import Floats, Problem
from isthmus.planners.search.candidates import Candidates
from isthmus.planners.search_state import SearchState
from tests.plan.small_models import chain
from tests.plan.strategies import clusters
from tests.planners.test_portfolio import problem, two_regions

THREE_ALIKE = """
kind: cluster
version: 1
name: alike
devices:
  card: {compute: 100 TFLOP/s, memory: 16 GB, memory_bandwidth: 1000 GB/s}
hosts:
  "h[1-3]": {region: here, devices: {card: 1}, nic: 10 Gbit/s}
"""


def whole_drafts(drafts: Drafts, draft: Draft = Draft()) -> Iterator[Draft]:  # noqa: B008
    actions = drafts.actions(draft)
    if draft.whole:
        yield draft
    for action in actions:
        yield from whole_drafts(drafts, draft.having(action))


def random_draft(drafts: Drafts, random: Random) -> Draft:
    draft = Draft()
    while actions := drafts.actions(draft):
        draft = draft.having(random.choice(actions))
    return draft


def candidates_of(task: Problem, **limits: int) -> Candidates:
    search = Search(SearchState(task), Limits(**limits), None)
    return Candidates(task, LaneMaker(task, MemoryFit(task), search.state), search, None)


@settings(max_examples=40)
@given(clusters(), st.integers(0, 2**16))
def test_a_whole_draft_is_a_setting_and_back(cluster: Cluster, seed: int) -> None:
    """No device is in two lanes; the setting is said by a draft with the same choices, and a path leads there."""
    task = problem(cluster, chain(6), 24)
    drafts, random = Drafts(task), Random(seed)
    for _ in range(5):
        draft = random_draft(drafts, random)
        if not draft.whole:  # more lanes than samples
            continue
        setting = drafts.setting(draft)
        devices = [device for part in setting.parts for bundle in part for device in bundle.devices]
        assert devices and len(devices) == len(set(devices))
        again = drafts.draft_of(setting)
        assert again is not None and drafts.setting(again).signature == setting.signature
        path = path_to(drafts, again)
        assert path and path[-1][0].having(path[-1][1]) == again
        assert all(action in drafts.actions(before) for before, action in path)


def test_roles_of_equal_hosts_have_one_order() -> None:
    """Of the 14 ways to give three hosts roles (lanes numbered as they are opened), these are left; the two with lanes
    of two hosts and of one differ only in which lane is opened first.
    """
    drafts = Drafts(problem(parse_cluster(THREE_ALIKE), chain(6), 24))
    found = {draft.roles for draft in whole_drafts(drafts) if draft.degree == 1}
    alone, several = {(0, IDLE, IDLE), (0, 0, IDLE), (0, 1, IDLE)}, {(0, 0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 2)}
    assert found == alone | several


def test_what_can_be_chosen() -> None:
    drafts = Drafts(problem(two_regions(), chain(6), 24))
    start = Draft(degree=1)
    assert drafts.actions(start) == [Decision("role", NEW), Decision("role", APART), Decision("role", IDLE)]
    assert Decision("role", 0) in drafts.actions(start.having(Decision("role", NEW)))
    idle = start.having(Decision("role", IDLE))
    assert Decision("role", IDLE) not in drafts.actions(idle)  # somebody must work
    one = Draft(1, (0, IDLE), micro_batches=1)
    assert drafts.actions(one) == [Decision("ahead", 0)]  # a single micro-batch has none after it


def test_the_tree_finds_the_best_of_all_drafts() -> None:
    """Against pricing every draft there is."""
    task = problem(two_regions(), chain(6), 24)
    drafts, leaves = Drafts(task), Leaves(candidates_of(task), Drafts(task))
    best = min(leaves.price(draft) for draft in whole_drafts(drafts))
    candidates = candidates_of(problem(two_regions(), chain(6), 24), calls=600)
    SearchTree(candidates, even).grow()
    assert candidates.limit <= best * 1.001


def wrong(candidates: Candidates, drafts: Drafts, asked: Sequence[Asked]) -> list[Floats]:
    """Sure of the last action, always: the last devices idle, all state sharded."""
    return [np.array([1e-6] * (len(actions) - 1) + [1.0]) for _, actions in asked]


def test_a_prior_that_is_wrong_is_doubted_in_time() -> None:
    task = problem(two_regions(), chain(6), 24)
    best = min(Leaves(candidates_of(task), Drafts(task)).price(draft) for draft in whole_drafts(Drafts(task)))
    candidates = candidates_of(problem(two_regions(), chain(6), 24), calls=600)
    tree = SearchTree(candidates, wrong)
    for _ in range(3):
        tree.round()
    assert candidates.limit > best * 1.05
    tree.grow()
    assert candidates.limit <= best * 1.001


def test_the_same_seed_gives_the_same_plan() -> None:
    found = []
    for _ in range(2):
        candidates = candidates_of(problem(two_regions(), chain(8), 48), calls=60)
        SearchTree(candidates, even).grow()
        found.append(candidates.best)
        assert candidates.search.made <= 60 + 3
    assert found[0] is not None and found[1] is not None and found[0].plan == found[1].plan
