"""Large clusters planned as copies: what hosts a copy has, what becomes of places and trunks, plans that are whole."""

from __future__ import annotations

from isthmus.cluster.load import parse_cluster
from isthmus.plan.validate import check
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.search.large_clusters import COPIED, copied_plan, small_problem
from tests.plan.small_models import chain
from tests.planners.test_portfolio import problem

LARGE = """
kind: cluster
version: 1
name: large
devices:
  quick: {compute: 100 TFLOP/s, memory: 16 GB, memory_bandwidth: 900 GB/s}
  slow: {compute: 30 TFLOP/s, memory: 16 GB, memory_bandwidth: 900 GB/s}
hosts:
  a[1-8]: {region: east, devices: {quick: 8}, nic: 100 Gbit/s}
  b[1-5]: {region: west, devices: {slow: 8}, nic: 100 Gbit/s}
links:
  - {between: [east, east], bandwidth: 100 Gbit/s, latency: 0.1 ms}
  - {between: [west, west], bandwidth: 100 Gbit/s, latency: 0.1 ms}
  - {between: [east, west], bandwidth: 10 Gbit/s, latency: 5 ms, trunk: 40 Gbit/s}
"""


def large(**fields: object) -> Problem:
    return problem(parse_cluster(LARGE), chain(6, width=256, rows=4096), batch=256, **fields)


def test_a_copy_has_its_part_of_each_class_and_trunk() -> None:
    copies = small_problem(large())
    assert copies is not None and copies.number > 1
    each = {"east": 8 // copies.number, "west": 5 // copies.number}
    hosts = [host.region for host in copies.problem.cluster.hosts.values()]
    assert {region: hosts.count(region) for region in each} == each
    used = [host for members in copies.hosts.values() for host in members]
    assert len(set(used)) == len(used) == copies.number * len(hosts)
    trunk, whole = copies.problem.cluster.trunk("east", "west"), parse_cluster(LARGE).trunk("east", "west")
    assert trunk is not None and whole is not None and trunk * copies.number == whole
    assert copies.problem.job.batch * copies.number == 256


def test_what_is_small_or_placed_on_one_host_is_planned_whole() -> None:
    assert small_problem(problem(parse_cluster(LARGE.replace("[1-8]", "[1-2]")), chain(6), batch=256)) is None
    assert small_problem(large(place={"embed": "a3"})) is None
    kept = small_problem(large(place={"embed": "west"}))
    assert kept is None or "west" in kept.problem.cluster.regions


def test_copied_plans_keep_every_rule() -> None:
    task = large()
    copies = small_problem(task)
    assert copies is not None
    small = choose_plan(copies.problem, planner="split", calls=40)
    for how in COPIED:
        plan = copied_plan(task, copies, small.plan, how)
        check(plan, task.cluster, {"job": task.graph})
        price = task.price(plan).price
        assert price.fits and price.step_seconds >= small.price.step_seconds * (1 - 1e-9), "copies wait for each other"
    found = choose_plan(task, planner="split", calls=40)
    check(found.plan, task.cluster, {"job": task.graph})
