from __future__ import annotations

from collections import defaultdict

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.diff import diff
from isthmus.plan.parameter_pieces import common, merge, subtract
from isthmus.plan.text import parse
from isthmus.plan.types import Pipeline, Plan
from tests.plan.golden_files import cluster, golden, models, text_path
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs, models_of, plans

ATLANTIC = cluster()
Element = tuple[str, str, str, int]  # job, parameter, weights or state, which element

ranges = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5).map(
    lambda pairs: merge((min(pair), max(pair)) for pair in pairs)
)


def _set(pieces: list[tuple[int, int]]) -> set[int]:
    return {element for lo, hi in pieces for element in range(lo, hi)}


@given(ranges, ranges)
def test_ranges_are_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    assert _set(subtract(a, b)) == _set(a) - _set(b)
    assert _set(common(a, b)) == _set(a) & _set(b)
    assert _set(merge([*a, *b])) == _set(a) | _set(b)


def _held(plan: Plan, graph: BlockGraph) -> dict[str, set[Element]]:
    """Element by element what each device holds; every split by counting down a list."""
    held: dict[str, set[Element]] = defaultdict(set)
    for part in plan.parts:
        job = part.job if isinstance(part, Pipeline) else part.jobs[0].job
        precision = part.precision if isinstance(part, Pipeline) else part.jobs[0].precision
        stateful = job.optimizer.name != "sgd" or precision != "fp32"
        if isinstance(part, Pipeline):
            for stage in part.stages:
                blocks = graph.blocks[graph.by_name[stage.first] : graph.by_name[stage.last] + 1]
                for r, replica in enumerate(stage.replicas):
                    for j, device in enumerate(replica.devices):
                        for block in blocks:
                            for name in block.parameters:
                                own = list(range(graph.parameter[name].elements))
                                if block.tensor and name in block.tensor.parameters:
                                    own = _nth(own, j, len(replica.devices))
                                mine = _nth(own, r, len(stage.replicas))
                                weights = mine if stage.state == "sharded-all" else own
                                state = mine if stage.state != "replicated" else own
                                held[device] |= {(job.name, name, "weights", e) for e in weights}
                                held[device] |= {(job.name, name, "state", e) for e in state if stateful}
        else:
            for index, shard in enumerate(part.jobs[0].shards):
                device = part.devices[index % len(part.devices)]
                for block in graph.blocks[graph.by_name[shard.first] : graph.by_name[shard.last] + 1]:
                    for name in block.parameters:
                        elements = range(graph.parameter[name].elements)
                        held[device] |= {(job.name, name, "weights", e) for e in elements}
                        held[device] |= {(job.name, name, "state", e) for e in elements if stateful}
    return held


def _nth(items: list[int], index: int, count: int) -> list[int]:
    return [
        item for at, item in enumerate(items) if len(items) * index // count <= at < len(items) * (index + 1) // count
    ]


def _tiny(graph: BlockGraph) -> BlockGraph:
    """The same graph with parameters of 5 to 9 elements."""
    small = [
        msgspec.structs.replace(parameter, elements=5 + index % 5) for index, parameter in enumerate(graph.parameters)
    ]
    return msgspec.structs.replace(graph, parameters=tuple(small))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), clusters(), graphs().map(_tiny))
def test_moves_and_drops_are_the_difference_of_what_is_held(
    data: st.DataObject, cluster: Cluster, graph: BlockGraph
) -> None:
    old, new = data.draw(plans(cluster, graph)), data.draw(plans(cluster, graph))
    found = diff(old, new, cluster, models_of(old, graph) | models_of(new, graph))
    before, after = _held(old, graph), _held(new, graph)
    anywhere = set().union(*before.values())
    for device in cluster.devices:
        mine = [move for move in found.moves if move.to == device]
        missing = after[device] - before[device]
        assert sum(move.weights + move.state for move in mine) == len(missing)
        assert sum(move.weights + move.state for move in mine if move.source is None) == len(missing - anywhere)
        gone = sum(drop.weights + drop.state for drop in found.drops if drop.device == device)
        assert gone == len(before[device] - after[device])
    for move in found.moves:
        if move.source is not None:
            has = [e for e in before[move.source] if e[:2] == (move.job, move.parameter)]
            assert move.weights <= sum(e[2] == "weights" for e in has)
            assert move.state <= sum(e[2] == "state" for e in has)


DATA = """plan for atlantic
pipeline job: small:chain, batch 8, precision fp32
  schedule 1f1b, micro-batches 1
  stage embed .. head
    va1/fast/0: share 4
    va2/old/0: share 4
  sync all ring: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over va1/fast/0 va2/old/0
"""
WIDER = DATA.replace("va2/old/0: share 4", "va2/old/0: share 2\n    NEW: share 2").replace("2/old/0\n", "2/old/0 NEW\n")


@pytest.mark.parametrize(
    ("precision", "job", "size"),
    [
        ("fp32", "", 4 + 8),
        ("fp16", "", 2 + 12),
        ("bf16", "job optimizer sgd", 2 + 4),
        ("fp32", "job optimizer sgd", 4),
        ("fp32", "job optimizer sgd, momentum 0.9", 4 + 4),
    ],
)
def test_one_more_replica_gets_weights_and_state_once(precision: str, job: str, size: int) -> None:
    def made(text: str) -> Plan:
        text = text.replace("precision fp32", f"precision {precision}").replace("NEW", "va1/fast/1")
        return parse(text.replace("  schedule", f"  {job}\n  schedule") if job else text)

    found = diff(made(DATA), made(WIDER), ATLANTIC, {"job": chain()})
    assert found.moved_bytes == size * chain().elements
    assert found.new_bytes == 0 and not found.drops
    assert {move.source for move in found.moves} == {"va1/fast/0"}


@pytest.mark.parametrize(
    ("new", "source"),
    [
        ("va1/fast/3", "va1/fast/0"),
        ("va2/old/3", "va2/old/0"),
        ("fra1/game/0", "va1/fast/0"),
        ("tok/fast/1", "va1/fast/0"),
    ],
)
def test_the_nearest_holder_is_the_source(new: str, source: str) -> None:
    found = diff(parse(DATA), parse(WIDER.replace("NEW", new)), ATLANTIC, {"job": chain()})
    assert {(move.source, move.to) for move in found.moves} == {(source, new)}


def test_same_region_comes_before_elsewhere() -> None:
    old = parse(DATA.replace("va2/old/0", "fra1/game/0"))
    new = parse(DATA.replace("va1/fast/0", "fra2/game/0").replace("va2/old/0", "fra1/game/0"))
    assert {move.source for move in diff(old, new, ATLANTIC, {"job": chain()}).moves} == {"fra1/game/0"}


def test_lost_devices_give_nothing() -> None:
    """The only holder of the upper half is gone: that half is new, the lower half moves."""
    old, graph = golden("spilled"), models(golden("spilled"))
    left = {name: host for name, host in ATLANTIC.hosts.items() if name != "va2"}
    smaller = msgspec.structs.replace(ATLANTIC, hosts=left)
    text = text_path("spilled").read_text()
    for index in range(3):
        text = text.replace(f"va2/old/{index}", f"va1/fast/{index}")
    found = diff(old, parse(text), smaller, graph)
    assert found.moved_bytes == 0 and not found.drops
    assert found.new_bytes == (2 + 8) * chain().elements  # fp16 with momentum: fp32 copy and one moment


def test_only_kept_values_of_pruned_tensors_move() -> None:
    old, graph = golden("pruned"), chain()
    new = parse(text_path("pruned").read_text().replace("va1/fast/1", "va1/fast/2"))
    moved = [p for p in graph.parameters if p.name.split(".")[0] == "embed" or p.name[:3] in ("h.1", "h.2", "h.3")]
    size = sum((0.1 * (2 + 12 + 4) if p.linear else 2 + 12) * p.elements for p in moved)
    found = diff(old, new, ATLANTIC, {"pruned": graph})
    assert found.moved_bytes == pytest.approx(size)
    assert sum(drop.bytes for drop in found.drops) == pytest.approx(size)


def test_a_job_that_begins_is_new() -> None:
    two = golden("two-jobs")
    one = Plan(cluster="atlantic", parts=two.parts[:1])
    found = diff(one, two, ATLANTIC, models(two))
    assert found.moved_bytes == 0 and {move.job for move in found.moves} == {"two"}
    assert found.new_bytes > 12 * chain(tied=True).elements
    assert {change.job for change in found.changes} == {"two"} and all(c.old is None for c in found.changes)
    assert {drop.job for drop in diff(two, one, ATLANTIC, models(two)).drops} == {"two"}


def test_settings_that_differ_are_named() -> None:
    text = text_path("tied").read_text()
    new = text.replace("1f1b", "fill-drain").replace("share 5", "share 4").replace("share 3", "share 4")
    new = new.replace("high ring", "high tree")
    found = diff(parse(text), parse(new), ATLANTIC, {"tied": chain(tied=True)})
    assert not found.moves and not found.drops
    assert [change.what for change in found.changes] == [
        "schedule",
        "replica at va1/fast/0",
        "replica at va2/old/0",
        "sync high",
    ]
    shares = found.changes[2]
    assert shares.old == "embed .. h.2, on va2/old/0: share 3" and shares.new == "embed .. h.2, on va2/old/0: share 4"


def test_the_text_names_devices_sources_and_bytes() -> None:
    found = diff(parse(DATA), parse(WIDER.replace("NEW", "va1/fast/1")), ATLANTIC, {"job": chain()})
    count, size = len(chain().parameters), 12 * chain().elements
    lines = found.text().splitlines()
    assert f"va1/fast/1: receives from va1/fast/0 {count} parameters, {size / 1e6:.4g} MB" in lines
    assert lines[-1] == f"in all: {size / 1e6:.4g} MB moved, 0 B new"
    assert any(line.startswith("job, sync all: ring: ") and " -> ring: " in line for line in lines)
