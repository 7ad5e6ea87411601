"""A plan as text that people read in a diff and that parses back to the same plan.

    plan for atlantic
    via va1 - fra over va2
    pipeline gpt2-xl: zoo:gpt2-xl, batch 256, sequence 1024, precision bf16, digest 3f2a
      job optimizer sgd, learning-rate 0.1, steps 500
      rates cosine, warmup 20
      group *.bias *norm*, weight-decay 0.0
      schedule 1f1b, micro-batches 8, ahead 2
      stage h.0.attn .. h.5.mlp, sharded-optimizer, recompute
        va1/A100-40GB/0: share 6
        va1/A100-40GB/1 + va1/A100-40GB/2: share 26, slices 2
      sync b0 ring: [h.0.attn] wte.weight over va1/A100-40GB/0 va1/A100-40GB/1, segments 2
    pool longest-remaining
      device fra/RTX-3090/0, cap 20 GB
      pool-job bert: zoo:bert-small, batch 32, precision fp32
        shard embed .. h.3

There is a line for each stage, replica and sync, and settings at their defaults are left out. Numbers are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import msgspec

from isthmus.model.job import Job, Optimizer, ParameterGroup, RateSchedule
from isthmus.plan.text_lines import quote
from isthmus.plan.text_parse import parse
from isthmus.plan.types import Pipeline, Plan, Pool, PoolJob, Replica, Stage, Sync
from isthmus.units import format_bytes, parse_bytes

__all__ = ["parse", "render", "render_replica", "render_schedule", "render_stage", "render_sync"]

_OPTIMIZER = (
    "learning_rate", "betas", "eps", "amsgrad", "momentum", "dampening", "nesterov", "maximize", "weight_decay", "clip",
    "average",
)  # fmt: skip
_RATES = ("warmup", "decay", "end", "steps")
_GROUP = ("learning_rate", "weight_decay")
_RUN = (
    "steps", "mixed", "compile", "seed", "weights", "frozen", "data", "loss", "sparsity", "place", "priority",
    "deadline",
)  # fmt: skip
_JOB = (*_RUN, "trust_independent_samples")


def render(plan: Plan) -> str:
    """Return the plan as text; equal plans give equal texts."""
    lines = [f"plan for {quote(plan.cluster)}"]
    for via in plan.via:
        a, b = map(quote, via.between)
        lines.append(_joined(f"via {a} - {b} over", *map(quote, via.hosts)))
    for part in plan.parts:
        lines.extend(_pipeline_lines(part) if isinstance(part, Pipeline) else _pool_lines(part))
    return "\n".join(lines) + "\n"


def render_schedule(pipeline: Pipeline) -> str:
    """Return the schedule as text: `schedule 1f1b, micro-batches 8, ahead 2`."""
    ahead = [f"ahead {pipeline.ahead}"] if pipeline.ahead else []
    return ", ".join([f"schedule {pipeline.schedule}", f"micro-batches {pipeline.micro_batches}", *ahead])


def render_stage(stage: Stage) -> str:
    """Return a stage as text, without its replicas: `h.0.attn .. h.5.mlp, sharded-optimizer, recompute`."""
    clauses = [f"{quote(stage.first)} .. {quote(stage.last)}"]
    clauses += [stage.state] if stage.state != "replicated" else []
    clauses += ["recompute"] if stage.recompute else []
    clauses += [f"spill {stage.spill}"] if stage.spill != "none" else []
    clauses += [f"kept {stage.kept!r}"] if stage.kept is not None else []
    return ", ".join(clauses)


def render_replica(replica: Replica) -> str:
    """Return a replica as text: `va1/A100-40GB/1 + va1/A100-40GB/2: share 10, slices 2`."""
    slices = f", slices {replica.slices}" if replica.slices != 1 else ""
    return f"{' + '.join(map(quote, replica.devices))}: share {replica.share}{slices}"


def render_sync(sync: Sync) -> str:
    """Return a sync as text, without its bucket's name: `ring: [h.0.attn] wte.weight over va1/A100-40GB/0 fra/T4/0`."""
    names = _joined(f"{sync.how}:", *map(quote, sync.parameters), "over", *map(quote, sync.participants))
    root = [f"root {quote(sync.root)}"] if sync.root is not None else []
    segments = [f"segments {sync.segments}"] if sync.segments != 1 else []
    return ", ".join([names, *root, *segments])


def _joined(*words: str) -> str:
    return " ".join(words)


def _pipeline_lines(pipeline: Pipeline) -> list[str]:
    lines = [_head("pipeline", pipeline), *(f"  {line}" for line in _job_lines(pipeline.job))]
    lines.append(f"  {render_schedule(pipeline)}")
    for stage in pipeline.stages:
        lines.append(f"  stage {render_stage(stage)}")
        lines.extend(f"    {render_replica(replica)}" for replica in stage.replicas)
    lines.extend(f"  sync {quote(sync.bucket)} {render_sync(sync)}" for sync in pipeline.syncs)
    return lines


def _head(keyword: str, part: Pipeline | PoolJob, *clauses: str) -> str:
    job = part.job
    sequence = [f"sequence {job.sequence}"] if job.sequence is not None else []
    digest = [f"digest {quote(part.model_digest)}"] if part.model_digest else []
    words = [f"batch {job.batch}", *sequence, f"precision {part.precision}", *clauses, *digest]
    return f"{keyword} {quote(job.name)}: {quote(job.model)}, {', '.join(words)}"


def _job_lines(job: Job) -> list[str]:
    """Return lines of the job's fields that are not at their defaults and not in the head line."""
    clauses = [f"optimizer {job.optimizer.name}"] if job.optimizer.name != Optimizer().name else []
    clauses += _changed(job.optimizer, Optimizer(name=job.optimizer.name), _OPTIMIZER)
    clauses += [f"asks {job.precision}"] if job.precision is not None else []
    clauses += _changed(job, Job(name="", model="", batch=0), _JOB)
    lines = [f"job {', '.join(clauses)}"] if clauses else []
    rates = job.optimizer.schedule
    if rates != RateSchedule():
        lines.append(", ".join([f"rates {quote(rates.shape)}", *_changed(rates, RateSchedule(), _RATES)]))
    for group in job.optimizer.groups:
        names = _joined("group", *map(quote, group.parameters))
        lines.append(", ".join([names, *_changed(group, ParameterGroup(parameters=()), _GROUP)]))
    return lines


def _changed(value: msgspec.Struct, default: msgspec.Struct, fields: tuple[str, ...]) -> list[str]:
    pairs = [(field, getattr(value, field)) for field in fields if getattr(value, field) != getattr(default, field)]
    return [_joined(field.replace("_", "-"), *_words(item)) for field, item in pairs]


def _words(value: Any) -> list[str]:
    if value is True:
        return []
    if isinstance(value, Mapping):
        return [quote(word) for item in sorted(value.items()) for word in item]
    if isinstance(value, tuple):
        return [quote(item) if isinstance(item, str) else repr(item) for item in value]
    return [quote(value) if isinstance(value, str) else repr(value)]


def _pool_lines(pool: Pool) -> list[str]:
    lines = [f"pool {pool.policy}{'' if pool.buffered else ', unbuffered'}"]
    for device, cap in zip_longest(pool.devices, pool.caps):
        clauses = [f"device {quote(device)}"] if device is not None else []
        clauses += [f"cap {_exact_bytes(cap)}"] if cap is not None else []
        lines.append(f"  {', '.join(clauses)}")
    for job in pool.jobs:
        flags = [] if job.recompute else ["no-recompute"]
        flags += [f"kept {job.kept!r}"] if job.kept is not None else []
        lines.append(f"  {_head('pool-job', job, *flags)}")
        lines.extend(f"    {line}" for line in _job_lines(job.job))
        lines.extend(f"    shard {quote(shard.first)} .. {quote(shard.last)}" for shard in job.shards)
    return lines


def _exact_bytes(value: float) -> str:
    """Return `20 GB` if that is exactly the value, else all its digits in B."""
    short = format_bytes(value)
    return short if value > 0 and _is(short, value) else f"{value!r} B"


def _is(text: str, value: float) -> bool:
    try:
        return parse_bytes(text) == value
    except ValueError:
        return False
