"""What planners must not overlook: memory, small batches, single hosts, places, masks, budgets; and what they say."""

from __future__ import annotations

import math
import time

import msgspec
import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.cost.timeline import Timeline
from isthmus.errors import NoPlanError, PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.validate import check
from isthmus.planners.layout.build_plan import build_stages, make_plan, sync_messages
from isthmus.planners.layout.layout_types import StageOptions
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.notes import notes_on
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.schemes.device_sets import device_sets
from isthmus.planners.schemes.fix import Fix, parse_fix
from isthmus.planners.schemes.grid import megatron_plan
from tests.plan.small_models import chain
from tests.planners.test_portfolio import devices_of, pipeline_of, problem, two_regions

UNEVEN = """
kind: cluster
version: 1
name: uneven
devices:
  small: {compute: 100 TFLOP/s, memory: 1.3 GB, memory_bandwidth: 900 GB/s}
  large: {compute: 100 TFLOP/s, memory: 2.2 GB, memory_bandwidth: 900 GB/s}
hosts:
  a: {region: r, devices: {small: 1}}
  b: {region: r, devices: {large: 1}}
links:
  - {between: [r, r], bandwidth: 10 Gbit/s, latency: 0.1 ms}
"""
EQUAL = """
kind: cluster
version: 1
name: equal
hosts:
  h[1-HOSTS]: {region: r, devices: {A100-40GB: 8}}
links:
  - {between: [r, r], bandwidth: 1 Gbit/s, latency: 1 ms}
"""


def test_stages_are_cut_by_memory_too() -> None:
    """Equal speeds, unequal memory: the even cut does not fit, an uneven one does."""
    task = problem(parse_cluster(UNEVEN), chain(14, width=2200), batch=8)
    even = megatron_plan(task, Fix(pp=2, dp=1, tp=1, micro=1))
    assert [shortage.where for shortage in task.price(even).price.shortages] == ["a/small/0"]
    for planner in ("pipeline", "grid"):
        choice = choose_plan(task, planner=planner)
        assert choice.price.fits and len(pipeline_of(choice).stages) == 2


def test_one_fast_host_beats_all_hosts_over_slow_links() -> None:
    """32 devices behind 1 Gbit/s: nothing is as fast as the eight of one host."""
    choice = choose_plan(problem(parse_cluster(EQUAL.replace("HOSTS", "4")), chain(8, width=1024), batch=64))
    assert len({device.split("/")[0] for device in devices_of(choice)}) == 1
    sets = device_sets(problem(parse_cluster(EQUAL.replace("HOSTS", "4")), chain(8)))
    assert sorted(len(members) for members in sets) == [1, 8, 16, 32], "equal hosts are tried once"


@pytest.mark.parametrize("planner", ["data-even", "data"])
def test_a_batch_smaller_than_the_cluster(planner: str) -> None:
    """Data parallelism takes the fastest devices, not none."""
    task = problem(two_regions(), chain(8, width=256), batch=2)
    assert set(devices_of(choose_plan(task, planner=planner))) <= {"a/quick/0", "a/quick/1"}
    odd = problem(parse_cluster(EQUAL.replace("HOSTS", "1")), chain(8, width=1024, rows=512), batch=7)
    assert len(devices_of(choose_plan(odd, planner=planner))) == 7


def test_pruned_jobs_have_masks_and_send_kept_values() -> None:
    pair = parse_fix("tp=1,pp=1,dp=2")
    dense = choose_plan(problem(two_regions(), chain(8, width=512)), fix=pair)
    pruned = choose_plan(problem(two_regions(), chain(8, width=512), sparsity=0.9), fix=pair)
    assert {stage.kept for stage in pipeline_of(pruned).stages} == {0.1}
    assert {sync.how for sync in pipeline_of(pruned).syncs} == {"sparse"}
    assert {sync.how for sync in pipeline_of(dense).syncs} == {"ring"}
    assert pruned.price.step_seconds < dense.price.step_seconds
    assert max(pruned.price.memory.values()) < max(dense.price.memory.values())


@pytest.mark.parametrize("planner", ["data", "pipeline", "tensor", "fsdp", "grid", "region", "classes"])
def test_places_bind_every_planner(planner: str) -> None:
    task = problem(two_regions(), chain(8, width=256), place={"h.6": "west"})
    choice = choose_plan(task, planner=planner)
    check(choice.plan, task.cluster, {"job": task.graph})
    stage = next(s for s in pipeline_of(choice).stages if s.last in ("h.6", "head"))
    assert all(device.startswith("b/") for replica in stage.replicas for device in replica.devices)


def test_a_place_whose_devices_lack_the_precision_names_it() -> None:
    """A GTX-1080Ti is slower in fp16 than in fp32, and stays out where the job gives no precision."""
    text = """
kind: cluster
version: 1
name: mixed
hosts:
  new: {region: r, devices: {V100-16GB: 2}}
  old: {region: s, devices: {GTX-1080Ti: 1}}
links:
  - {between: [r, s], bandwidth: 10 Gbit/s, latency: 0.1 ms}
"""
    for place in ("old", "s"):
        with pytest.raises(NoPlanError, match=r"no device there computes in fp16.*mixed: true") as caught:
            problem(parse_cluster(text), chain(8), place={"h.3": place}, precision=None)
        assert "GTX-1080Ti" in str(caught.value) and "--precision fp32" in str(caught.value)
    allowed = problem(parse_cluster(text), chain(8, width=256), place={"h.3": "old"}, precision=None, mixed=True)
    assert "old/GTX-1080Ti/0" in devices_of(choose_plan(allowed, calls=200))


def test_hosts_without_a_link_are_told() -> None:
    alone = EQUAL[: EQUAL.index("links:")].replace("HOSTS", "2")
    notes = choose_plan(problem(parse_cluster(alone), chain(8)), calls=50).notes
    assert [note for note in notes if note.startswith("no link joins h1 | h2: a plan uses only one of these 2 groups")]
    linked = choose_plan(problem(parse_cluster(EQUAL.replace("HOSTS", "2")), chain(8)), calls=50).notes
    assert not [note for note in linked if "no link joins" in note]


def test_places_that_a_scheme_cannot_keep() -> None:
    """The order of the file is the order of a scheme's stages; `auto` comes back to a region."""
    task = problem(two_regions(), chain(8), place={"embed": "west", "h.3": "east", "head": "west"})
    with pytest.raises(NoPlanError, match=r"no plan of the scheme pipeline keeps the places.*'h.3' in east"):
        choose_plan(task, planner="pipeline")
    kept = choose_plan(task)
    check(kept.plan, task.cluster, {"job": task.graph})
    assert kept.planner == "auto"
    with pytest.raises(PlanError, match="nowhere"):
        problem(two_regions(), chain(8), place={"embed": "nowhere"})


def test_what_is_missing_is_missing_in_the_wanted_scheme() -> None:
    """Pipelines would miss less; who asks for data parallelism is told what that needs."""
    graph = chain(6, width=4096)
    with pytest.raises(NoPlanError, match="no plan of the scheme data-even fits") as data:
        choose_plan(problem(two_regions("0.7 GB"), graph), planner="data-even")
    needed = 16 * graph.elements
    assert data.value.found is not None
    assert float(data.value.found.split("needs ")[1].split(" GB")[0]) * 1e9 >= needed
    with pytest.raises(NoPlanError, match="with --fix tp=2,pp=1 fits"):
        choose_plan(problem(two_regions("0.7 GB"), graph), fix=parse_fix("tp=2,pp=1"))


def test_a_model_without_work_has_a_bound_of_nothing() -> None:
    graph = chain(4)
    idle = tuple(
        msgspec.structs.replace(b, forward_flops=0.0, backward_flops=0.0, moved=0.0, weights_moved=0.0, operations=0)
        for b in graph.blocks
    )
    task = problem(two_regions(), msgspec.structs.replace(graph, blocks=idle, outputs=0.0))
    assert lower_bound(task) == 0.0
    assert choose_plan(task, calls=30).lower_bound == 0.0


def mixing(graph: BlockGraph) -> BlockGraph:
    blocks = [msgspec.structs.replace(b, mixes_samples=("batch_norm",)) for b in graph.blocks[1:2]]
    return msgspec.structs.replace(graph, blocks=(graph.blocks[0], *blocks, *graph.blocks[2:]))


def test_activities_are_made_only_for_who_looks() -> None:
    played = choose_plan(problem(two_regions(), chain(8)), calls=5).timeline
    assert "_made" not in vars(played.activities)
    assert max(activity.end for activity in played.activities) == pytest.approx(played.step_seconds)
    assert len(played.activities[:2]) == 2 and len(played.activities) > 2


def test_notes() -> None:
    task = problem(two_regions(), mixing(chain(8, width=256, rows=256)))
    split = choose_plan(task, planner="data-even")
    assert len(devices_of(split)) > 1 and not any("samples" in note for note in split.notes), "statistics are summed"
    row = choose_plan(task, fix=parse_fix("tp=1,pp=2,dp=1"))
    assert any("bandwidth of 96 Gbit/s is assumed" in note for note in row.notes), "hosts a and b do not say it"
    short = choose_plan(task, calls=1)
    assert any("budget ended" in note for note in short.notes)


def test_a_nic_that_is_assumed_and_binds_is_named() -> None:
    text = EQUAL.replace("HOSTS", "2").replace("1 Gbit/s", "40 Gbit/s").replace(": 8}}", ": 1}, bandwidth: 300 GB/s}")
    choice = choose_plan(problem(parse_cluster(text), chain(8, width=1024)), fix=parse_fix("tp=1,pp=1,dp=2"))
    assert any("nic of 40 Gbit/s is assumed" in note for note in choice.notes)


def test_very_many_devices() -> None:
    """A ring of 720 has a million messages: one bucket, and a note; 1,000 equal devices are planned as copies."""
    graph = chain(6, width=256, rows=65536)
    text = EQUAL.replace("1 Gbit/s", "400 Gbit/s").replace("1 ms", "1 us")
    task = problem(parse_cluster(text.replace("HOSTS", "90")), graph, batch=720)
    members = [((device,), 1) for device in task.usable]
    plan = make_plan(task, build_stages(task, [0], [members], StageOptions()), 1)
    notes = notes_on(task, plan, Timeline(1.0, (), (), ()), spent=False, crowded=0)
    assert sync_messages(plan) == 2 * 720 * 719 and any("720 devices were tried in one bucket only" in n for n in notes)
    large = problem(parse_cluster(text.replace("HOSTS", "125")), chain(6, width=256, rows=2**22), batch=1000)
    found = choose_plan(large, planner="data-even", calls=20)
    assert len(devices_of(found)) == 1000 and found.price.fits and found.price.step_seconds < math.inf


def test_a_batch_of_a_thousand_million() -> None:
    choose_plan(problem(two_regions("900 GB"), chain(6), batch=10), calls=20)  # compiles what is not in the cache
    began = time.process_time()
    choice = choose_plan(problem(two_regions("900 GB"), chain(6), batch=10**9), calls=20)
    assert pipeline_of(choice).micro_batches <= 4096
    assert time.process_time() - began < 10.0
