from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph, Linear
from isthmus.model.job import Job
from isthmus.plan.text import parse
from isthmus.plan.types import Pipeline
from isthmus.plan.validate import RULES, check
from isthmus.planners.problem import build_problem
from tests.plan.golden_files import cluster, golden, models, text_path
from tests.plan.small_models import chain
from tests.plan.strategies import clusters, graphs, models_of, plans

ATLANTIC = cluster()
POOL = re.compile(r"  device(.|\n)*B\n")
TABLE = "embed.weight over va1/fast/0 va2/old/0 va1/fast/1"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), clusters(), graphs())
def test_random_plans_keep_every_rule(data: st.DataObject, cluster: Cluster, graph: BlockGraph) -> None:
    plan = data.draw(plans(cluster, graph))
    check(plan, cluster, models_of(plan, graph))


# rule, golden plan, what to replace, by what (several pairs where one change alone would break another rule first)
BREAKS = [
    ("unique-jobs", "two-jobs", "pipeline two:", "pipeline one:"),
    ("unique-jobs", "pool", "pool-job large-rate:", "pool-job small-rate:"),
    ("micro-batches", "spilled", "micro-batches 4", "micro-batches 0"),
    ("ahead", "two-depths", "ahead 2", "ahead -2"),
    ("batch-divides", "spilled", "micro-batches 4", "micro-batches 3"),
    ("job", "spilled", "batch 16", "batch 0"),
    ("job", "spilled", "batch 16", "batch 2147483648"),
    ("job", "pool", "batch 8", "batch 0"),
    ("job", "pruned", "sparsity 0.9", "sparsity 1.0"),
    ("job", "pruned", "sparsity 0.9", "sparsity 0.9, steps -3"),
    ("job", "pruned", "sparsity 0.9", "sparsity 0.9, deadline soon"),
    ("job", "pruned", "sparsity 0.9", "sparsity 0.9, learning-rate inf"),
    ("size", "spilled", ("batch 16", "micro-batches 4"), ("batch 16000000", "micro-batches 4000000")),
    ("replicas", "spilled", "    va2/old/0: share 4\n", ""),
    ("replicas", "spilled", "va2/old/0: share 4", ": share 4"),
    ("device-once-per-stage", "tied", "va2/old/0: share 3", "va1/fast/0: share 3"),
    ("device-once-per-stage", "tensor-group", "va1/fast/0 + va1/fast/1", "va1/fast/0 + va1/fast/0"),
    ("shares-cover", "tied", "share 5", "share 6"),
    ("shares-cover", "tied", "share 5\n    va2/old/0: share 3", "share 8\n    va2/old/0: share 0"),
    ("shares-cover", "server-and-duplicate", "va2/old/0: share 16", "va2/old/0: share 15"),
    ("slices", "spilled", "slices 4", "slices 5"),
    ("slices", "spilled", "slices 4", "slices 0"),
    ("mask-range", "pruned", "kept 0.1", "kept 0.2"),
    ("mask-range", "pruned", "h.3, kept 0.1", "h.3"),
    ("mask-range", "pruned", "sparsity 0.9, ", ""),
    ("mask-range", "pool", "precision bf16", "precision bf16, kept 0.5"),
    ("unique-buckets", "tied", "sync high", "sync low"),
    ("segments", "pruned", "segments 2", "segments 0"),
    ("segments", "pruned", "segments 2", "segments 1025"),
    ("server-root", "two-jobs", ", root va2/old/0", ""),
    ("server-root", "tied", TABLE, f"{TABLE}, root va1/fast/0"),
    ("known-device", "spilled", "va2/old/0", "va2/old/4"),
    ("known-device", "two-jobs", "root va2/old/0", "root va3/old/0"),
    ("known-device", "pool", "fra1/game/3", "fra1/game/4"),
    ("known-device", "tied", TABLE, f"{TABLE} va9/fast/0"),
    ("known-block", "spilled", "h.5, recompute", "h.9, recompute"),
    ("known-block", "tied", "[h.6] over", "[h.9] over"),
    ("known-block", "pool", "shard h.4", "shard h.9"),
    ("known-parameter", "tied", TABLE, TABLE.replace("embed", "head")),
    ("known-parameter", "tied", TABLE, TABLE.replace("embed", "nothing")),
    ("model-digest", "tensor-group", "digest e", "digest 7"),
    ("device-one-job", "two-jobs", "fra1/game/0: share 8", "fra2/game/0: share 8"),
    ("device-one-job", "two-jobs", "root va2/old/0", "root va1/fast/0"),
    ("stages-cover-blocks", "spilled", "stage h.3", "stage h.4"),
    ("stages-cover-blocks", "spilled", "stage h.3", "stage h.2"),
    ("stages-cover-blocks", "spilled", "h.6 .. head", "h.6 .. h.6"),
    ("stages-cover-blocks", "spilled", "h.6 .. head", "head .. h.6"),
    ("stages-cover-blocks", "spilled", re.compile(r"  stage(.|\n)*"), ""),
    ("shards-cover-blocks", "pool", "shard h.4 .. head", "shard h.4 .. h.6"),
    ("shards-cover-blocks", "pool", "shard h.4 .. head", "shard h.3 .. head"),
    ("tensor-group", "tensor-group", "va1/fast/2 + va1/fast/3", "va1/fast/2 + fra1/game/0"),
    ("tensor-group", "tensor-group", "va1/fast/2 + va1/fast/3", "va1/fast/2 + va1/fast/3 + va1/fast/1"),
    ("tensor-group", "spilled", ("h.6 .. head", "h.5, r", "old/2:"), ("head .. head", "h.6, r", "old/2 + va2/old/3:")),
    ("sharded-replicas", "spilled", "spill optimizer", "sharded-optimizer"),
    ("sharded-replicas", "sharded", "whole ring", "whole tree"),
    ("sharded-replicas", "server-and-duplicate", "stage h.4 .. h.5", "stage h.4 .. h.5, sharded-optimizer"),
    ("sharded-replicas", "tensor-group", "stage embed .. h.3", "stage embed .. h.3, sharded-optimizer"),
    ("sharded-replicas", "tied", ("h.6 .. head", "table tree"), ("h.6 .. head, sharded-all", "table ring")),
    ("precision", "spilled", "precision fp16", "precision bf16"),
    ("precision", "tensor-group", "asks fp16", "asks fp32"),
    ("precision", "pool", POOL, "  device va2/old/0, cap 12345678901.0 B\n"),
    ("place", "two-jobs", "h.1 frankfurt", "h.1 tokyo"),
    ("place", "two-jobs", "h.1 frankfurt", "h.1 nowhere"),
    ("place", "two-jobs", "h.1 frankfurt", "nothing* frankfurt"),
    ("place", "two-jobs", "job mixed", "job mixed, place head.weight frankfurt"),  # tied: va2 holds it too
    ("place", "pruned", "head.weight va2", "head.weight va1"),
    ("place", "pool", "priority 2.0", "place h.2 fra2"),
    ("place", "pool", "priority 2.0", "place nothing fra1"),
    ("sync-missing", "tied", " [h.2] over", " over"),
    ("sync-missing", "tied", f"  sync table tree: {TABLE}\n  sync low ring: [embed]", "  sync low ring:"),
    ("sync-twice", "tied", "[h.6] over", "[h.6] h.6.up h.6.up over"),
    ("sync-twice", "tied", "ring: [embed]", "ring: embed.weight"),
    ("sync-twice", "tied", "ring: [h.6]", "ring: [h.6] [h.2]"),
    ("sync-needless", "tied", "[h.2] over", "[h.2] [h.3] over"),
    ("sync-needless", "tied", "  sync high", "  sync none ring: [embed] over va1/fast/0 va2/old/0\n  sync high"),
    ("sync-needless", "tied", "  sync high", "  sync none ring: over va1/fast/0 va2/old/0\n  sync high"),
    ("sync-participants", "tied", TABLE, "embed.weight over va1/fast/0 va2/old/0"),
    ("sync-participants", "tied", TABLE, f"{TABLE} va1/fast/0"),
    ("sync-participants", "tensor-group", "over va1/fast/0", "over va1/fast/1"),
    ("duplicate-iff", "server-and-duplicate", "twin duplicate", "twin ring"),
    ("duplicate-iff", "server-and-duplicate", "top ring", "top duplicate"),
    ("duplicate-iff", "tied", ("share 6", "share 2", "high ring"), ("share 8", "share 8", "high duplicate")),
    ("factors-linear", "server-and-duplicate", "top ring", "top factors"),
    ("factors-linear", "tied", "table tree", "table factors"),
    (
        "factors-linear",
        "tensor-group",
        "  sync low ring",
        "  sync f factors: h.1.up over va1/fast/0 va2/old/0\n  sync low ring",
    ),
    ("sparse-mask", "server-and-duplicate", "top ring", "top sparse"),
    ("via", "interleaved", "over va1", "over fra2"),
    ("via", "interleaved", "over va1", "over nobody"),
    ("via", "interleaved", "over va1", "over va1 tok va1"),
    ("via", "interleaved", "fra1 - tok over va1", "fra1 - va1 over"),
    ("via", "interleaved", "via fra1 - tok over va1\n", "via fra1 - tok over va1\nvia tok - fra1 over va2\n"),
    ("reachable", "interleaved", "via fra1 - tok over va1\n", ""),
    ("reachable", "two-jobs", "root va2/old/0", "root tok/fast/0"),
    ("pool-one-host", "pool", "fra1/game/3", "fra2/game/0"),
    ("reachable", "sharded", "fra1/game/3", "tok/fast/0"),
    ("pool-devices", "pool", "fra1/game/1", "fra1/game/0"),
    ("pool-devices", "pool", re.compile(r"  pool-job(.|\n)*"), ""),
    ("pool-caps", "pool", "cap 20 GB", "cap 25 GB"),
    ("pool-caps", "pool", "cap 20 GB", "cap 0.0 B"),
    ("pool-caps", "pool", ", cap 12345678901.0 B", ""),
    ("parts", "spilled", re.compile(r"pipeline(.|\n)*"), ""),
]


def _broken(name: str, old: str | re.Pattern[str] | tuple[str, ...], new: str | tuple[str, ...]) -> str:
    text = text_path(name).read_text()
    if isinstance(old, re.Pattern):
        return old.sub(str(new), text)
    every = name == "sharded"  # there a device stands in its stage and in the sync
    for a, b in zip((old,) if isinstance(old, str) else old, (new,) if isinstance(new, str) else new, strict=True):
        assert a in text
        text = text.replace(a, b, -1 if every else 1)
    return text


@pytest.mark.parametrize(("rule", "name", "old", "new"), BREAKS)
def test_each_rule_is_broken_by_its_own_change(
    rule: str, name: str, old: str | re.Pattern[str] | tuple[str, ...], new: str | tuple[str, ...]
) -> None:
    plan = parse(_broken(name, old, new))
    assert plan != golden(name)
    with pytest.raises(PlanError) as caught:
        check(plan, ATLANTIC, models(golden(name)))
    assert caught.value.rule == rule, str(caught.value)
    assert caught.value.where and caught.value.found and caught.value.expected


def test_every_rule_is_tested_and_every_tested_rule_is_listed() -> None:
    assert {rule for rule, *_ in BREAKS} | {"known-model"} == set(RULES)


def test_a_job_without_model_is_named() -> None:
    with pytest.raises(PlanError, match="was not given") as caught:
        check(golden("tied"), ATLANTIC, {})
    assert caught.value.rule == "known-model"


def test_a_model_that_cannot_be_split_has_no_tensor_groups() -> None:
    plan = parse(re.sub(", digest .*", "", text_path("tensor-group").read_text()))
    check(plan, ATLANTIC, {"split": chain()})
    with pytest.raises(PlanError) as caught:
        check(plan, ATLANTIC, {"split": chain(heads=0)})
    assert caught.value.rule == "tensor-group"


def test_a_tensor_group_needs_direct_links() -> None:
    """A relay will not do: nothing prices the messages of a group but the links of its own devices."""
    text = re.sub(", digest .*", "", text_path("tensor-group").read_text())
    across = text.replace("va1/fast/2 + va1/fast/3", "va1/fast/2 + tok/fast/0")
    plan = parse(across.replace("atlantic\n", "atlantic\nvia va1 - tok over fra1\n"))
    links = (*ATLANTIC.links[:3], msgspec.structs.replace(ATLANTIC.links[3], between=("frankfurt", "tokyo")))
    check(parse(across), ATLANTIC, {"split": chain()})
    with pytest.raises(PlanError, match="no link between va1 and tok") as caught:
        check(plan, msgspec.structs.replace(ATLANTIC, links=links), {"split": chain()})
    assert caught.value.rule == "tensor-group"


def test_tied_linear_weights_have_no_factors() -> None:
    """Even where the weight is linear, two uses make its gradient a sum of two products."""
    graph = chain(tied=True)
    table = msgspec.structs.replace(graph.parameters[0], linear=Linear(rows=16, inputs=64, outputs=500))
    graph = msgspec.structs.replace(graph, parameters=(table, *graph.parameters[1:]))
    with pytest.raises(PlanError) as caught:
        check(parse(_broken("tied", "table tree", "table factors")), ATLANTIC, {"tied": graph})
    assert caught.value.rule == "factors-linear"


def test_ties_may_be_duplicated_where_every_use_is_on_the_same_devices() -> None:
    text = """plan for atlantic
pipeline tied: small:tied, batch 8, precision fp32
  schedule 1f1b, micro-batches 2
  stage embed .. h.1
    va1/fast/0: share 4
    va1/fast/1: share 4
  stage h.2 .. h.5
    va1/fast/2: share 4
  stage h.6 .. head
    va1/fast/1: share 4
    va1/fast/0: share 4
  sync all duplicate: embed.weight [h.1] [h.6] over va1/fast/0 va1/fast/1
"""
    check(parse(text), ATLANTIC, {"tied": chain(tied=True)})
    with pytest.raises(PlanError) as caught:
        check(parse(text.replace("duplicate", "ring")), ATLANTIC, {"tied": chain(tied=True)})
    assert caught.value.rule == "duplicate-iff"


def test_mixed_jobs_compute_in_fp32_where_a_kind_lacks_the_precision() -> None:
    text = text_path("spilled").read_text().replace("precision fp16", "precision bf16")
    check(parse(text.replace("job optimizer", "job mixed, optimizer")), ATLANTIC, models(golden("spilled")))


def test_a_kind_that_is_slower_in_the_precision_than_in_fp32_does_not_compute_in_it() -> None:
    """The planner leaves such kinds out and the rule refuses them: one question, one answer."""
    slower = msgspec.structs.replace(ATLANTIC.kinds["old"], compute={"fp32": 15.7e12, "fp16": 15e12})
    cluster = msgspec.structs.replace(ATLANTIC, kinds={**ATLANTIC.kinds, "old": slower})
    with pytest.raises(PlanError, match="slower in it than in fp32") as caught:
        check(golden("spilled"), cluster, models(golden("spilled")))
    assert caught.value.rule == "precision"
    mixed = text_path("spilled").read_text().replace("job optimizer", "job mixed, optimizer")
    check(parse(mixed), cluster, models(golden("spilled")))
    job = Job(name="big", model="small:chain", batch=16, precision="fp16")
    assert "va2/old/0" not in build_problem(cluster, (job,), {"big": chain()}).usable


def test_more_messages_than_can_be_played() -> None:
    plan = golden("tied")
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    crowd = msgspec.structs.replace(part.syncs[0], participants=("va1/fast/0",) * 50_000, segments=1024)
    with pytest.raises(PlanError, match="51,200,000") as caught:
        check(msgspec.structs.replace(plan, parts=(msgspec.structs.replace(part, syncs=(crowd,)),)), ATLANTIC, {})
    assert caught.value.rule == "size"


def test_a_duplicate_takes_its_samples_from_itself_and_totals_need_a_way() -> None:
    """Two duplicate stages on hosts without a link: each copy feeds itself, both ways, and only totals are sent."""
    text = """plan for atlantic
via tok - fra1 over va1
pipeline twins: small:chain, batch 8, precision fp32
  schedule 1f1b, micro-batches 2
  stage embed .. h.1
    tok/fast/0: share 4
    fra1/game/0: share 4
  stage h.2 .. head
    tok/fast/0: share 4
    fra1/game/0: share 4
  sync all duplicate: [embed] [h.1] [h.2] [h.3] [h.4] [h.5] [h.6] [head] over tok/fast/0 fra1/game/0
"""
    check(parse(text), ATLANTIC, {"twins": chain()})
    with pytest.raises(PlanError, match="totals of a step"):
        check(parse(text.replace("via tok - fra1 over va1\n", "")), ATLANTIC, {"twins": chain()})


def test_replicas_that_add_up_statistics_need_a_way() -> None:
    """Each talks with the server, which leads too; batch norm makes all talk with all."""
    text = """plan for atlantic
pipeline star: small:chain, batch 12, precision fp32
  schedule 1f1b, micro-batches 2
  stage embed .. head
    va1/fast/0: share 2
    tok/fast/0: share 2
    fra1/game/0: share 2
  sync all server: BLOCKS over va1/fast/0 tok/fast/0 fra1/game/0, root va1/fast/0
"""
    graph = chain()
    text = text.replace("BLOCKS", " ".join(f"[{block.name}]" for block in graph.blocks))
    check(parse(text), ATLANTIC, {"star": graph})
    mixing = msgspec.structs.replace(graph.blocks[1], mixes_samples=("batch_norm",))
    normed = msgspec.structs.replace(graph, blocks=(graph.blocks[0], mixing, *graph.blocks[2:]))
    with pytest.raises(PlanError, match="batch statistics"):
        check(parse(text), ATLANTIC, {"star": normed})
    check(parse(text.replace("pipeline star", "via tok - fra1 over va1\npipeline star")), ATLANTIC, {"star": normed})


ROW = """
kind: cluster
version: 1
name: row
hosts:
  a: {region: ra, devices: {T4: 1}}
  b: {region: rb, devices: {T4: 1}}
  c: {region: rc, devices: {T4: 1}}
  d: {region: rd, devices: {T4: 1}}
links:
  - {between: [ra, rb], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [rb, rc], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [rc, rd], bandwidth: 1 Gbit/s, latency: 1 ms}
"""


def test_a_relay_needs_a_way_to_the_leader() -> None:
    """Four hosts in a row, stages on the ends: b passes on, and must reach d, where losses are computed."""
    text = """plan for row
via a - d over b c
pipeline ends: small:chain, batch 8, precision fp32
  schedule 1f1b, micro-batches 2
  stage embed .. h.3
    a/T4/0: share 4
  stage h.4 .. head
    d/T4/0: share 4
"""
    with pytest.raises(PlanError, match="no link between b and d"):
        check(parse(text), parse_cluster(ROW), {"ends": chain()})
    check(parse(text.replace("pipeline", "via b - d over c\npipeline", 1)), parse_cluster(ROW), {"ends": chain()})
