"""Why devices are unused and which links help: what is claimed is planned anew from a cluster file that says so."""

from __future__ import annotations

import re

import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.explain.link_changes import FasterLinks, NewLinks
from isthmus.explain.link_trials import MARGIN, WhyUnused, explain_unused
from isthmus.explain.why_unused import idle_devices
from isthmus.model.graph import BlockGraph
from isthmus.planners.portfolio import Choice, choose_plan
from tests.plan.small_models import chain
from tests.planners.test_portfolio import devices_of, problem

CITIES = """
kind: cluster
version: 1
name: cities
devices:
  card: {compute: 10 TFLOP/s, memory: 8 GB, memory_bandwidth: 500 GB/s}
  other: {compute: OTHER, memory: MEMORY, memory_bandwidth: 500 GB/s}
hosts:
  oslo1: {region: oslo, devices: {card: 1}}
  oslo2: {region: oslo, devices: {card: 1}}
  lima1: {region: lima, devices: {other: 1}}
links:
  - {between: [oslo, oslo], bandwidth: 10 Gbit/s, latency: 0.1 ms}
  - {between: [oslo, lima], bandwidth: BANDWIDTH, latency: LATENCY}
"""
SAME = {"OTHER": "10 TFLOP/s", "MEMORY": "8 GB", "BANDWIDTH": "10 Mbit/s", "LATENCY": "1 ms"}


def cities(**fields: str) -> str:
    text = CITIES
    for word, value in {**SAME, **fields}.items():
        text = text.replace(word, value)
    return text


def model() -> BlockGraph:
    return chain(6, width=1024, rows=1024)


def planned(text: str) -> Choice:
    return choose_plan(problem(parse_cluster(text), model(), batch=32, precision="fp32"))


def explained(text: str) -> tuple[Choice, tuple[WhyUnused, ...]]:
    choice = planned(text)
    return choice, explain_unused(problem(parse_cluster(text), model(), batch=32, precision="fp32"), choice.price)


def gains(text: str, device: str, step: float) -> bool:
    """Whether a plan for the cluster of a file uses a device and saves enough."""
    choice = planned(text)
    return device in devices_of(choice) and choice.price.step_seconds <= (1 - MARGIN) * step


def test_the_slowest_link_that_helps_is_found_by_planning() -> None:
    choice, (why,) = explained(cities())
    step = choice.price.step_seconds
    assert why.idle.devices == ("lima1/other/0",) and why.idle.reason == "slower"
    assert why.with_them is None or why.with_them > step
    assert why.useful is not None and why.useful.step_seconds <= (1 - MARGIN) * step
    rate, before = re.findall(r"([\d.]+ [MG]bit/s)", why.useful.change)
    assert before == "10 Mbit/s" and "one way" not in why.useful.change
    mega = round(10 * why.useful.factor)
    assert gains(cities(BANDWIDTH=rate), "lima1/other/0", step)
    assert not gains(cities(BANDWIDTH=f"{mega / 2} Mbit/s"), "lima1/other/0", step)


@pytest.mark.slow("many searches; the shorter ones here are in the fast set")
def test_a_long_link_must_also_be_nearer() -> None:
    choice, (why,) = explained(cities(LATENCY="800 ms"))
    assert why.useful is not None
    rate, latency = re.findall(
        r"at ([\d.]+ [MG]bit/s) .*?, ([\d.]+ [mu]s) instead of 800 ms one way", why.useful.change
    )[0]
    faster = cities(BANDWIDTH=rate, LATENCY=latency)
    assert gains(faster, "lima1/other/0", choice.price.step_seconds)
    assert not gains(cities(BANDWIDTH="10 Gbit/s", LATENCY="800 ms"), "lima1/other/0", choice.price.step_seconds)


def test_a_device_that_adds_nothing_is_not_helped_by_any_link() -> None:
    _, (why,) = explained(cities(OTHER="1 GFLOP/s"))
    assert why.useful is None and why.tried == "links of 1024 times the bandwidth and as many times less latency"


def test_too_little_memory_is_told_and_not_blamed_on_the_link() -> None:
    _, (why,) = explained(cities(MEMORY="1 MB", BANDWIDTH="10 Gbit/s", LATENCY="0.1 ms"))
    assert why.idle.reason == "memory" and "other has 1 MB" in why.why and why.useful is None and not why.tried


def test_a_device_without_the_precision() -> None:
    task = problem(parse_cluster(cities(OTHER="{fp32: 10 TFLOP/s}")), model(), batch=32, precision="bf16")
    price = choose_plan(task).price
    (why,) = explain_unused(task, price)
    assert why.idle.reason == "precision" and why.why == "other has no bf16" and not why.tried


def test_a_new_link_for_a_host_that_has_none() -> None:
    text = cities()
    apart = text[: text.rindex("  - {between")]
    choice, (why,) = explained(apart)
    assert why.idle.reason == "link" and why.why == "no link joins it to the devices that are used"
    assert why.useful is not None
    found = re.fullmatch(r"new link oslo - lima of ([\d.]+ [MG]bit/s), 20 ms one way", why.useful.change)
    assert found is not None
    joined = f"{apart}  - {{between: [oslo, lima], bandwidth: {found[1]}, latency: 20 ms}}\n"
    joined = joined.replace("{region: lima,", "{region: lima, nic: 100 Gbit/s,")
    assert gains(joined, "lima1/other/0", choice.price.step_seconds)


def test_every_device_in_use_needs_no_word() -> None:
    choice, unused = explained(cities(BANDWIDTH="10 Gbit/s", LATENCY="0.1 ms"))
    assert unused == () and not any("not used" in note for note in choice.notes)


def test_a_plan_notes_devices_that_it_does_not_use() -> None:
    (note,) = [note for note in planned(cities()).notes if "not used" in note]
    assert note == "1 of 3 devices is not used (on lima1); `isthmus explain` says why"


def test_a_plan_that_is_not_the_fastest_is_told_so() -> None:
    """A plan of one device, where all three are near: the remedy is another plan and no link."""
    task = problem(parse_cluster(cities(BANDWIDTH="10 Gbit/s", LATENCY="0.1 ms")), model(), batch=32, precision="fp32")
    alone = problem(parse_cluster(cities().split("  oslo2")[0] + "links: []\n"), model(), batch=32, precision="fp32")
    unused = explain_unused(task, choose_plan(alone).price)
    assert {name for each in unused for name in each.idle.devices} == {"oslo2/card/0", "lima1/other/0"}
    assert all("plan again" in each.why and not each.tried for each in unused)


def test_faster_links_leave_all_else_as_it_is() -> None:
    cluster = parse_cluster(cities())
    changed = FasterLinks(cluster, ["lima1"], ["oslo1", "oslo2"], latency=True).by(4)
    (inner, outer), (same, faster) = cluster.links, changed.links
    assert same == inner and changed.kinds == cluster.kinds
    assert faster.bandwidth == 4 * outer.bandwidth and faster.latency == pytest.approx(outer.latency / 4)
    assert changed.hosts == cluster.hosts  # nics are wide enough
    assert FasterLinks(cluster, ["lima1"], ["oslo1"], latency=False).by(1024).hosts["oslo1"].nic == 1024 * 1.25e6


def test_a_nic_that_is_faster_down_than_up_becomes_wide_both_ways() -> None:
    nic = "{region: lima, devices: {other: 1}, nic: {up: 2 Mbit/s, down: 9 Mbit/s}}"
    text = cities().replace("{region: lima, devices: {other: 1}}", nic)
    host = FasterLinks(parse_cluster(text), ["lima1"], ["oslo1"], latency=False).by(1024).hosts["lima1"]
    assert host.nic == host.nic_in == 1024 * 1.25e6


def test_hosts_of_one_shape_and_reason_are_one_group() -> None:
    text = cities().replace("lima1: {region: lima, devices: {other: 1}}", "lima1: {region: lima, devices: {other: 1}}\n"
                            "  lima2: {region: lima, devices: {other: 1}}")  # fmt: skip
    task = problem(parse_cluster(text), model(), batch=32, precision="fp32")
    (group,) = idle_devices(task, ["oslo1/card/0", "oslo2/card/0"])
    assert str(group) == "2 other of lima1, lima2" and group.hosts == ("lima1", "lima2")
    assert NewLinks(task.cluster, group.hosts, ["oslo1"], 0.02).pairs == [("lima", "lima")]
