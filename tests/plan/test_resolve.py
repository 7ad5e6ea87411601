from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.resolve import ResolvedPipeline, resolve, suppliers
from isthmus.plan.text import parse
from isthmus.plan.types import Pipeline
from tests.plan.golden_files import cluster, golden, models
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs, models_of, plans

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def _samples(pipeline: Pipeline, stage: int) -> list[set[int]]:
    """Samples of each replica, dealt out one by one."""
    size = pipeline.job.batch // pipeline.micro_batches
    replicas = pipeline.stages[stage].replicas
    if len(replicas) > 1 and {replica.share for replica in replicas} == {size}:
        return [set(range(size)) for _ in replicas]
    deck = iter(range(size))
    return [{next(deck) for _ in range(replica.share)} for replica in replicas]


@QUICK
@given(st.data(), clusters(), graphs())
def test_names_become_numbers(data: st.DataObject, cluster: Cluster, graph: BlockGraph) -> None:
    """Blocks, devices, samples, holders and syncs, each against a slow count."""
    plan = data.draw(plans(cluster, graph))
    resolved = resolve(plan, cluster, models_of(plan, graph))
    names = list(cluster.devices)
    part, pipeline = resolved.parts[0], plan.parts[0]
    assert isinstance(part, ResolvedPipeline) and isinstance(pipeline, Pipeline)
    for index, (run, stage) in enumerate(zip(part.stages, pipeline.stages, strict=True)):
        assert (graph.blocks[run.first].name, graph.blocks[run.last].name) == (stage.first, stage.last)
        assert [tuple(names[d] for d in r.devices) for r in run.replicas] == [r.devices for r in stage.replicas]
        assert [set(range(r.lo, r.hi)) for r in run.replicas] == _samples(pipeline, index)
        assert all(part.stage_of[block] == index for block in range(run.first, run.last + 1))
    for name, holders in part.holders.items():
        users = [b for b, block in enumerate(graph.blocks) if name in block.parameters]
        slow = {(s, r) for b in users for s in [part.stage_of[b]] for r in range(len(part.stages[s].replicas))}
        assert set(holders) == slow and len(holders) == len(slow)
        firsts = {pipeline.stages[s].replicas[r].devices[0] for s, r in slow}
        assert {names[d] for d in part.participants(name)} == firsts
        assert (name in part.sync_of) == (len(firsts) > 1)


@QUICK
@given(st.data(), clusters(), graphs())
def test_every_sample_comes_from_exactly_one_replica(data: st.DataObject, cluster: Cluster, graph: BlockGraph) -> None:
    """Both ways between every two stages; from a copy on the receiver's own device where there is one."""
    plan = data.draw(plans(cluster, graph))
    resolved = resolve(plan, cluster, models_of(plan, graph))
    part, pipeline = resolved.parts[0], plan.parts[0]
    assert isinstance(part, ResolvedPipeline) and isinstance(pipeline, Pipeline)
    for s, sender in enumerate(part.stages):
        have = _samples(pipeline, s)
        for t, stage in enumerate(part.stages):
            for receiver, need in zip(stage.replicas, _samples(pipeline, t), strict=True):
                flows = suppliers(resolved, sender, receiver)
                got = [sample for _, lo, hi in flows for sample in range(lo, hi)]
                assert sorted(got) == sorted(need)
                assert all(set(range(lo, hi)) <= have[replica] for replica, lo, hi in flows)
                own = [r.number for r in sender.replicas if r.devices[0] == receiver.devices[0]]
                if sender.duplicate and own:
                    assert [replica for replica, _, _ in flows] == own


def test_a_block_stands_for_its_parameters_that_no_sync_names() -> None:
    plan = golden("tied")
    (part,) = resolve(plan, cluster(), models(plan)).pipelines
    assert [sync.parameters for sync in part.syncs] == [
        ("embed.weight",),
        ("h.1.up", "h.1.down", "h.1.bias", "h.2.up", "h.2.down", "h.2.bias"),  # not embed.weight again
        ("h.6.up", "h.6.down", "h.6.bias"),
    ]


def test_ties_have_every_replica_of_every_stage_that_uses_them() -> None:
    plan = golden("tied")
    (part,) = resolve(plan, cluster(), models(plan)).pipelines
    assert part.holders["embed.weight"] == ((0, 0), (0, 1), (2, 0), (2, 1))
    names = [list(cluster().devices)[device] for device in part.participants("embed.weight")]
    assert names == ["va1/fast/0", "va2/old/0", "va1/fast/1"]  # va1/fast/0 holds it twice, and is one participant


def test_duplicates_serve_the_nearest_and_equally_near_ones_take_turns() -> None:
    text = """plan for atlantic
pipeline job: small:chain, batch 8, precision fp32
  schedule 1f1b, micro-batches 1
  stage embed .. h.1
    va1/fast/0: share 8
    va1/fast/1: share 8
    fra1/game/0: share 8
  stage h.2 .. head
    va1/fast/2: share 1
    va1/fast/3: share 1
    va1/fast/1: share 1
    fra2/game/0: share 1
    va2/old/0: share 1
    tok/fast/0: share 1
    tok/fast/1: share 2
"""
    resolved = resolve(parse(text), cluster(), {"job": chain()})
    (part,) = resolved.pipelines
    chosen = [suppliers(resolved, part.stages[0], replica) for replica in part.stages[1].replicas]
    assert [flow[0][0] for flow in chosen] == [0, 1, 1, 2, 0, 2, 0]  # host, host, self, region, region, any, any
    assert chosen[-1] == ((0, 6, 8),)
