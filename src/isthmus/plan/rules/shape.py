"""Rules that a plan keeps or breaks by itself, whatever the model and the cluster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from isthmus.errors import JobError, PlanError
from isthmus.model.job import Job
from isthmus.model.load_job import check_job
from isthmus.plan.resolve import is_duplicate
from isthmus.plan.types import Pipeline, Plan, Pool, Stage, Sync

__all__ = ["MOST_MESSAGES", "check_shape"]


MOST_OPERATIONS = 5_000_000  # forwards of one step that the simulator accepts
MOST_MESSAGES = 20_000_000  # messages that one device sends in the syncs of one step
MOST_SEGMENTS = 1024
MOST_AHEAD = 1_000_000  # micro-batches


def check_shape(plan: Plan) -> None:
    """Refuse numbers out of range, names used twice, shares that do not make up the micro-batch, and unsound jobs."""
    if not plan.parts:
        raise PlanError(
            "parts", "the plan trains nothing", where="plan", found="no parts", expected="a pipeline or a pool"
        )
    _unique("unique-jobs", "job", (job.name for job in plan.jobs), "plan")
    for job in plan.jobs:
        _check_job(job)
    for part in plan.parts:
        if isinstance(part, Pipeline):
            _check_pipeline(part)
        else:
            _check_pool(part)


def _check_job(job: Job) -> None:
    try:
        check_job(job)
    except JobError as broken:
        raise PlanError(
            "job", broken.what, where=f"job {job.name}", found=broken.found, expected=broken.expected
        ) from None


def _unique(rule: str, thing: str, names: Iterable[str], where: str) -> None:
    name, count = max(Counter(names).items(), key=lambda item: item[1], default=("", 0))
    if count > 1:
        raise PlanError(
            rule, f"{count} {thing}s have one name", where=where, found=name, expected="a name of its own for each"
        )


def _check_pipeline(pipeline: Pipeline) -> None:
    where = f"pipeline {pipeline.job.name}"
    _check_batch(pipeline, where)
    if not 0 <= pipeline.ahead <= MOST_AHEAD:
        expected = f"0 to {MOST_AHEAD:,}"
        raise PlanError("ahead", "ahead is out of range", where=where, found=str(pipeline.ahead), expected=expected)
    micro_batch = pipeline.job.batch // pipeline.micro_batches
    for stage in pipeline.stages:
        at = f"{where}, stage {stage.first} .. {stage.last}"
        _check_replicas(stage, at)
        _check_shares(stage, micro_batch, at)
        _check_mask(pipeline.job, stage.kept, at)
    _unique("unique-buckets", "sync", (sync.bucket for sync in pipeline.syncs), where)
    for sync in pipeline.syncs:
        _check_sync(sync, f"{where}, sync {sync.bucket}")
    _check_size(pipeline, where)


def _check_batch(pipeline: Pipeline, where: str) -> None:
    batch, count = pipeline.job.batch, pipeline.micro_batches
    if count < 1:
        raise PlanError("micro-batches", "too few micro-batches", where=where, found=str(count), expected="1 or more")
    if batch % count:
        raise PlanError(
            "batch-divides",
            "the micro-batches do not divide the batch",
            where=where,
            found=f"batch {batch} in {count} micro-batches",
            expected=f"a number of micro-batches that divides {batch}",
        )


def _check_size(pipeline: Pipeline, where: str) -> None:
    """Refuse a pipeline whose step has more operations or messages than any sensible plan."""
    slices = sum(replica.slices for stage in pipeline.stages for replica in stage.replicas)
    messages = sum(len(sync.participants) * sync.segments for sync in pipeline.syncs)
    for what, count, most in (
        ("operations: micro-batches x slices of all replicas", pipeline.micro_batches * slices, MOST_OPERATIONS),
        ("messages: participants x segments of all syncs", messages, MOST_MESSAGES),
    ):
        if count > most:
            raise PlanError(
                "size", f"a step has too many {what}", where=where, found=f"{count:,}", expected=f"at most {most:,}"
            )


def _check_replicas(stage: Stage, where: str) -> None:
    if not stage.replicas or not all(replica.devices for replica in stage.replicas):
        raise PlanError(
            "replicas",
            "no replica computes the stage" if not stage.replicas else "a replica has no device",
            where=where,
            found="no replica" if not stage.replicas else "an empty replica",
            expected="one replica or more, each with one device or more",
        )
    devices = Counter(device for replica in stage.replicas for device in replica.devices)
    twice = next((device for device, count in devices.items() if count > 1), None)
    if twice is not None:
        raise PlanError(
            "device-once-per-stage",
            "a device is listed twice in one stage",
            where=where,
            found=twice,
            expected="each device in one replica, once",
            next="Give the replica a larger share, or more slices",
        )


def _check_shares(stage: Stage, micro_batch: int, where: str) -> None:
    shares = [replica.share for replica in stage.replicas]
    if min(shares) < 1 or (sum(shares) != micro_batch and not is_duplicate(stage, micro_batch)):
        raise PlanError(
            "shares-cover",
            "the shares do not make up the micro-batch",
            where=where,
            found=f"{' + '.join(map(str, shares))} = {sum(shares)}",
            expected=f"positive shares with sum {micro_batch}, or two replicas or more with {micro_batch} each",
        )
    for replica in stage.replicas:
        if not 1 <= replica.slices <= replica.share:
            raise PlanError(
                "slices",
                f"the share of {replica.devices[0]} cannot be run in so many slices",
                where=where,
                found=f"{replica.slices} slices of {replica.share} samples",
                expected=f"1 to {replica.share}",
            )


def _check_mask(job: Job, kept: float | None, where: str) -> None:
    """Refuse a mask that does not keep what the job's sparsity leaves; without sparsity there is no mask."""
    wanted = 1.0 - job.sparsity if job.sparsity else None
    if kept is None and wanted is None:
        return
    if kept is None or wanted is None or not math.isclose(kept, wanted, rel_tol=1e-6):
        raise PlanError(
            "mask-range",
            "the mask keeps another fraction than the job asks for",
            where=where,
            found="no mask" if kept is None else f"kept {kept!r}",
            expected="no mask: the job has no sparsity" if wanted is None else f"kept {wanted:.6g}",
        )


def _check_sync(sync: Sync, where: str) -> None:
    if not 1 <= sync.segments <= MOST_SEGMENTS:
        raise PlanError(
            "segments",
            "the number of segments is out of range",
            where=where,
            found=str(sync.segments),
            expected=f"1 to {MOST_SEGMENTS}",
        )
    if (sync.root is not None) != (sync.how == "server"):
        raise PlanError(
            "server-root",
            "a server sync needs a root, and no other sync has one",
            where=where,
            found=f"{sync.how} with root {sync.root}" if sync.root is not None else f"{sync.how} without root",
            expected="a device as root" if sync.how == "server" else "no root",
        )


def _check_pool(pool: Pool) -> None:
    for job in pool.jobs:
        _check_mask(job.job, job.kept, f"pool, job {job.job.name}")
    if not pool.jobs or not pool.devices or len(set(pool.devices)) < len(pool.devices):
        raise PlanError(
            "pool-devices",
            "a pool needs jobs and distinct devices",
            where="pool",
            found=f"{len(pool.jobs)} jobs on {', '.join(pool.devices) or 'no devices'}",
            expected="one job or more, one device or more, each device once",
        )
