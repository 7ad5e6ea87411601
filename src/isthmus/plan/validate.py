"""The check of a whole plan: one short name and one clear error for each rule.

Layers that mix samples are not an error here, because that depends on what the runtime can synchronise.
"""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.cluster.spec import Cluster
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.plan.resolve import Resolved, resolve
from isthmus.plan.rules.connections import check_reach
from isthmus.plan.rules.shape import check_shape
from isthmus.plan.rules.stages import check_one_job, check_pool, check_stages
from isthmus.plan.rules.sync_rules import check_syncs
from isthmus.plan.types import Plan

__all__ = ["RULES", "check"]

RULES = {
    "parts": "a plan has at least one part",
    "unique-jobs": "each job is in one part, and has a name of its own",
    "job": "each job is one that a job file may describe",
    "micro-batches": "1 or more",
    "ahead": "0 or more",
    "batch-divides": "the micro-batches divide the batch",
    "replicas": "each stage has at least one replica, and each replica at least one device",
    "device-once-per-stage": "a device is in one replica of a stage at most, once",
    "shares-cover": "shares sum to the micro-batch, or two replicas or more take all of it: a duplicate stage",
    "slices": "from 1 to the share",
    "mask-range": "`kept` is what the job's sparsity leaves; a job without sparsity has none",
    "unique-buckets": "each sync of a pipeline has a name of its own",
    "segments": "1 to 1024",
    "size": "at most 5 million operations, and 20 million sync messages of a device, a step",
    "server-root": "`server` has a root, and no other sync has one",
    "model-digest": "the model is the one that the plan was made for",
    "known-model": "the model of each job is given",
    "known-device": "the cluster has every device that the plan names",
    "known-block": "the model has every block that the plan names",
    "known-parameter": "the model has every parameter that a sync names, under its first name",
    "device-one-job": "a device works for one pipeline or one pool; the root of a sync too",
    "stages-cover-blocks": "stages follow each other: every block once, in the model's order",
    "tensor-group": "devices of one kind, direct links, something to split, heads that divide; one group for a device",
    "sharded-replicas": "sharded state has two replicas or more with samples of their own and equal groups; "
    "`sharded-all` also has equal slices, ring syncs and no parameter tied across stages",
    "precision": "the job's own, and every device has it, not slower than fp32 (or the job is mixed)",
    "place": "the places that the job gives exist, and are kept",
    "sync-twice": "no parameter is in two syncs",
    "sync-needless": "no sync without parameters, or of a parameter with one holder",
    "sync-participants": "exactly the holders, each once; the listed order is the ring's",
    "duplicate-iff": "`duplicate` if and only if all participants compute every use on all samples",
    "factors-linear": "`factors` only for untied linear weights that all replicas hold alike",
    "sparse-mask": "`sparse` only where there is a mask",
    "sync-missing": "a parameter of several replicas is in a sync",
    "pool-devices": "a pool has jobs, and distinct devices",
    "pool-one-host": "the devices of a pool are of one host",
    "pool-caps": "a cap for each device of a pool, above 0 and within its memory",
    "shards-cover-blocks": "shards follow each other: every block once, in the model's order",
    "via": "a relay is a path of links, one for each pair of hosts",
    "reachable": "hosts that must talk have a link or a relay",
}


def check(plan: Plan, cluster: Cluster, models: Mapping[str, BlockGraph]) -> Resolved:
    """Return the plan in numbers if it keeps every rule, else raise PlanError with the first rule that it breaks.

    `models` has the block graph of each job by the job's name.
    """
    check_shape(plan)
    _check_digests(plan, models)
    resolved = resolve(plan, cluster, models)
    check_one_job(resolved)
    for pipeline in resolved.pipelines:
        check_stages(pipeline, resolved, cluster)
        check_syncs(pipeline, resolved)
    for pool in resolved.pools:
        check_pool(pool, resolved, cluster)
    check_reach(resolved, cluster)
    return resolved


def _check_digests(plan: Plan, models: Mapping[str, BlockGraph]) -> None:
    for job in plan.job_parts:
        graph = models.get(job.job.name)
        if graph is not None and job.model_digest and job.model_digest != graph.digest:
            raise PlanError(
                "model-digest",
                f"the model of job {job.job.name} is not the one that the plan was made for",
                where="plan",
                found=f"a model with digest {graph.digest or '(none)'}",
                expected=job.model_digest,
                next="Make a new plan: isthmus plan",
            )
