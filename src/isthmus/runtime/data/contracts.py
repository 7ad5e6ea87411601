"""Try the user's data and loss on two samples before anything long is done.

Workers check them as well, in their first step, but that comes after planning, starting and building. Here the model is
built without weights, and random numbers of the right form stand in for its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from isthmus.model import source
from isthmus.model.built import BuiltModel
from isthmus.model.job import Job
from isthmus.model.load_job import named_code
from isthmus.runtime.data.sources import open_samples
from isthmus.runtime.loss import open_loss
from isthmus.runtime.starting_weights import check_weights

__all__ = ["check_contracts"]


def check_contracts(job: Job) -> None:
    """Refuse starting weights or data that do not fit the model, and a loss that is not a sum.

    This runs the code that the job names.
    """
    own = {job.data, job.loss} & {*named_code(job)}
    files = job.data.startswith(("text:", "tokens:"))
    if not own and not files and job.weights is None:
        return
    with torch.device("meta"):
        built = source.build(job.model, job.sequence, job.frozen)
    check_weights(job, built.module)
    if not own and not files:
        return
    samples = open_samples(job, built)
    numbers = range(2 if samples.count is None else min(2, samples.count))
    _, target = samples.get(numbers)
    if not own:
        return
    loss, output = open_loss(job, built), _stand_in(built, len(numbers))
    if output is not None:
        loss(output, target)


def _stand_in(built: BuiltModel, samples: int) -> Any:
    """Return random numbers in the form of the model's output; None if that form cannot be known without weights."""
    example = built.example(samples, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            output = built.module(*example.args, **example.kwargs)
    except Exception:  # a model that needs real numbers; the workers will check it
        return None
    draws = torch.Generator().manual_seed(0)

    def filled(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.is_floating_point():
            return torch.zeros(leaf.shape, dtype=leaf.dtype)
        return torch.rand(leaf.shape, generator=draws).to(leaf.dtype).requires_grad_()

    return pytree.tree_map(filled, output)
