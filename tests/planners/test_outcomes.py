"""What came of each scheme is told as it is, and a larger budget never gives a worse plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.errors import NoPlanError, NoPlanYetError
from isthmus.model.job import Job
from isthmus.model.source import load_graph
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem, build_problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from tests.plan.small_models import chain
from tests.planners.test_portfolio import problem, two_regions

CITIES = ("berlin", "cairo", "lagos", "lima", "osaka", "paris", "perth", "quito")


def eight_cities() -> Problem:
    """Return gpt3-1.3b on 64 hosts with one V100 each, eight in each of eight cities."""
    hosts = "".join(
        f"  {city}[1-8]: {{region: {city}, devices: {{V100-32GB: 1}}, nic: 10 Gbit/s}}\n" for city in CITIES
    )
    inside = "".join(f"  - {{between: [{c}, {c}], bandwidth: 10 Gbit/s, latency: 50 us}}\n" for c in CITIES)
    across = "".join(
        f"  - {{between: [{a}, {b}], bandwidth: 1 Gbit/s, latency: {20 + 10 * (j - i)} ms}}\n"
        for i, a in enumerate(CITIES)
        for j, b in enumerate(CITIES)
        if i < j
    )
    text = f"kind: cluster\nversion: 1\nname: cities\nhosts:\n{hosts}links:\n{inside}{across}"
    job = Job(name="job", model="zoo:gpt3-1.3b", batch=488)
    return build_problem(parse_cluster(text), (job,), {"job": load_graph(job.model)})


@pytest.mark.slow("a search of ten seconds")
def test_schemes_for_many_cities_are_searched_to_their_end() -> None:
    """What takes long to search is no reason to call it impossible, or to leave it out of the comparison."""
    choice = choose_plan(eight_cities())
    assert {name: choice.outcomes[name].state for name in ("region", "classes")} == dict.fromkeys(
        ("region", "classes"), "found"
    )
    assert all(outcome.state != "unfinished" for outcome in choice.outcomes.values())


def test_a_short_budget_is_no_proof() -> None:
    """With 0.3 s the schemes of a large search are unfinished; none is said to be impossible that time finds."""
    choice = choose_plan(eight_cities(), budget=0.3)
    states = {name: outcome.state for name, outcome in choice.outcomes.items()}
    assert set(states) == set(SCHEMES) and "unfinished" in states.values()
    assert states["region"] != "cannot run" and states["classes"] != "cannot run"
    assert all(outcome.seconds is None for outcome in choice.outcomes.values() if outcome.state != "found")


def test_what_cannot_run_says_why() -> None:
    """Tensor groups need several devices in one host; replicas of the whole model need room for it."""
    choice = choose_plan(problem(two_regions("1.0 GB"), chain(6, width=4096, rows=8), batch=24))
    even = choice.outcomes["data-even"]
    assert even.state == "cannot run" and even.reason == "none of its layouts fits in memory"
    assert even.seconds is None and even.best_so_far is None


def test_no_plan_within_a_budget_is_not_no_plan() -> None:
    """What ends early says so; what is searched to its end says that nothing fits."""
    spilled = problem(two_regions("1.0 GB"), chain(6, width=4096, rows=8), batch=24)
    with pytest.raises(NoPlanYetError, match=r"larger --budget or --calls"):
        choose_plan(spilled, budget=0.0)
    assert choose_plan(spilled).price.fits
    task = problem(two_regions("0.7 GB"), chain(6, width=4096))
    with pytest.raises(NoPlanError) as whole:
        choose_plan(task, planner="data-even")
    assert not isinstance(whole.value, NoPlanYetError) and "--budget" not in str(whole.value)


@pytest.mark.slow("up to 75 searches")
@settings(max_examples=25, deadline=None)
@given(
    blocks=st.integers(2, 10),
    batch=st.integers(2, 48),
    width=st.sampled_from([64, 256, 512]),
    planner=st.sampled_from(["auto", "split", "search", "grid", "region", "classes"]),
    calls=st.lists(st.integers(1, 400), min_size=2, max_size=3),
)
def test_more_calls_never_give_a_worse_plan(
    blocks: int, batch: int, width: int, planner: str, calls: list[int]
) -> None:
    task = problem(two_regions(), chain(blocks, width=width), batch)
    found = [float("inf")]
    for allowed in sorted(calls):
        try:
            choice = choose_plan(task, planner=planner, calls=allowed)
        except NoPlanYetError:
            assert found == [float("inf")], "more calls lose a plan"
            continue
        assert choice.calls <= allowed
        found.append(choice.price.step_seconds)
    assert found == sorted(found, reverse=True)
