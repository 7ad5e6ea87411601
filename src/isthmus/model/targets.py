"""Checks that a job has something to train its model towards, before anything is planned or started.

A model of the zoo or of transformers brings samples with targets. A user's function gives a module and example inputs,
and nothing says what should come out: its job must name data, or a loss that needs no targets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from isthmus.errors import DataError
from isthmus.model import source
from isthmus.model.built import BuiltModel
from isthmus.model.job import Job

__all__ = ["check_targets"]


def check_targets(job: Job) -> None:
    """Refuse a job whose model brings no targets, and that names neither data nor a loss.

    This runs the model's code.
    """
    if (job.data, job.loss) != ("synthetic", "default") or not isinstance(source.parse(job.model), source.Function):
        return
    with torch.device("meta"):
        built = source.build(job.model, job.sequence, job.frozen)
    raise DataError(
        "this model has no synthetic targets, and the default loss (cross entropy) needs some",
        where=job.model,
        found=_output(built),
        next=(
            "Name data with targets in a job file (data: package.module:function), a loss too if it is not cross "
            "entropy over the last dimension (loss: package.module:function), and plan that job; see docs/jobs.md"
        ),
    )


def _output(built: BuiltModel) -> str | None:
    """Return the form of the model's output, or None if that cannot be told without weights."""
    example = built.example(2, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            output = built.module(*example.args, **example.kwargs)
    except Exception:  # a model that needs real numbers
        return None
    shapes = [list(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return f"an output of {' and '.join(map(str, shapes[:4]))} for 2 samples" if shapes else None
