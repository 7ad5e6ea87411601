"""Layers that mix samples: a plan that splits their micro-batch changes what they compute."""

from __future__ import annotations

from isthmus.errors import PlanError
from isthmus.plan.resolve import ResolvedPipeline, ResolvedStage

__all__ = ["NORMS", "check_mixing"]

NORMS = ("batch_norm", "native_batch_norm")  # what `statistics` synchronises over replicas


def check_mixing(part: ResolvedPipeline) -> None:
    """Refuses a plan that splits a micro-batch where samples are mixed. Batch norm is synchronised over replicas."""
    for stage in part.stages:
        split = len(stage.replicas) > 1 and not stage.duplicate
        sliced = any(replica.slices > 1 for replica in stage.replicas)
        for block in part.graph.blocks[stage.first : stage.last + 1]:
            for operation in block.mixes_samples:
                if sliced or (split and operation not in NORMS):
                    raise _mixes(part, stage, block.name, operation, "slices" if sliced else "replicas")


def _mixes(part: ResolvedPipeline, stage: ResolvedStage, block: str, operation: str, how: str) -> PlanError:
    first, last = (part.graph.blocks[number].name for number in (stage.first, stage.last))
    normed = operation in NORMS
    return PlanError(
        "mixes-samples",
        f"block {block} mixes samples ({operation}), and the plan splits its micro-batch into {how}",
        where=f"pipeline {part.pipeline.job.name}, stage {first} .. {last}",
        expected="one slice" if normed else "the whole micro-batch on one replica, in one slice",
        next="Give the stage one slice for each replica" if normed else "Let one replica take the whole micro-batch",
    )
