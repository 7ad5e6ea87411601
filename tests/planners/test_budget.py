"""What a search may spend: by effort the same plan comes out on every machine; what cannot be run is no answer."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from isthmus.cluster.load import parse_cluster
from isthmus.plan.types import Plan, Replica, Stage, Sync
from isthmus.planners.budget import Limits, Search, sound, usual_effort
from isthmus.planners.layout.build_plan import make_plan, only_pipeline
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.search_state import SearchState
from tests.plan.small_models import chain
from tests.planners.test_portfolio import problem, two_regions

HOSTS = """
kind: cluster
version: 1
name: hosts
devices:
  card: {compute: 10 TFLOP/s, memory: 16 GB, memory_bandwidth: 900 GB/s}
hosts:
  h[1-2]: {region: r, devices: {card: 2}, nic: 10 Gbit/s}
links:
  - {between: [r, r], bandwidth: 10 Gbit/s, latency: 10 us}
"""


def test_a_slow_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no budget is given, no clock is looked at."""
    task = problem(two_regions(), chain(8, width=256))
    one = choose_plan(task)
    real, begun = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: begun + 100 * (real() - begun))
    two = choose_plan(problem(two_regions(), chain(8, width=256)))
    assert one.plan == two.plan and one.calls == two.calls


def test_effort_ends_a_search() -> None:
    task = problem(two_regions(), chain(8))
    search = Search(SearchState(task), Limits(effort=0.001), None)
    assert not search.spent() and search.calls_left() in (0, 1, 2)
    plan = choose_plan(task, planner="data").plan
    for _ in range(3):
        search.price(plan)
    assert search.spent() and search.limits(0.5).effort == 0.0


def test_an_interrupt_in_compiled_code_is_one() -> None:
    """There what the signal raises comes out as the cause of a SystemError."""
    search = Search(SearchState(problem(two_regions(), chain(4))), Limits(), None)

    def ended() -> None:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    def broken() -> None:
        raise SystemError("something else")

    assert search.ended(ended) is None and search.interrupted
    with pytest.raises(SystemError, match="something else"):
        search.ended(broken)


def test_schemes_that_no_budget_was_left_for_are_named() -> None:
    choice = choose_plan(problem(two_regions(), chain(8)), calls=1)
    left = [name for name, outcome in choice.outcomes.items() if outcome.state == "unfinished"]
    assert set(choice.schemes) == set(SCHEMES) and {"data", "pipeline", "grid"} <= set(left)
    assert all(choice.schemes[name] is None for name in left)
    assert f"{len(left)} schemes were not searched to the end;" in " ".join(choice.notes)


@pytest.mark.parametrize(("devices", "seconds"), [(1, 1.6), (64, 1.6), (65, 5.0), (2000, 10.0), (100_000, 40.0)])
def test_more_devices_may_take_longer(devices: int, seconds: float) -> None:
    assert usual_effort(devices) == seconds


def grouped(task: Problem, *groups: tuple[str, ...]) -> Plan:
    blocks = task.graph.blocks
    replicas = tuple(Replica(devices=group, share=8 // len(groups)) for group in groups)
    return make_plan(task, [Stage(first=blocks[0].name, last=blocks[-1].name, replicas=replicas)], 1)


def test_what_can_be_priced_and_not_run_is_no_answer() -> None:
    task = problem(parse_cluster(HOSTS), chain(4, heads=2), batch=8)
    inside = grouped(task, ("h1/card/0", "h1/card/1"), ("h2/card/0", "h2/card/1"))
    across = grouped(task, ("h1/card/0", "h2/card/0"))
    served = only_pipeline(inside)
    syncs = tuple(Sync(bucket=s.bucket, how="server", parameters=s.parameters, participants=s.participants,
                       root="h1/card/0") for s in served.syncs)  # fmt: skip
    assert sound(task, inside)
    assert task.price(across).price.fits and not sound(task, across)
    assert not sound(task, replace(inside, parts=(replace(served, syncs=syncs),)))
