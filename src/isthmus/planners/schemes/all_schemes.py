"""The usual ways to train, each as good as its users would make it. They are what a planner must beat.

- `data-even`: every device that holds the model has all of it and takes an equal share; gradients by ring.
- `data`: the same with shares that make all finish together, gradients by ring or tree.
- `pipeline`: one chain of stages, cut so that the slowest stage is as fast as can be and every stage fits.
- `tensor`: the whole model on tensor groups, data parallel over several of them (`grid`).
- `fsdp`: the whole model on every device, state sharded over all of them (`fsdp`).
- `grid`: equal tensor x pipeline x data degrees (Megatron): the same cut and shares for all (`grid`).
- `region`: a pipeline of regions along the best links, each with a few stages and shares by speed (`region`).
- `classes`: stages of one kind and region each, even layers, equal replicas (`classes`).

Each tries the device sets of `devices` or parts of its own, several micro-batch sizes, and recompute on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from isthmus.planners.layout.layout_types import Staged, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Problem
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.classes import classes
from isthmus.planners.schemes.data_parallel import data, data_even
from isthmus.planners.schemes.device_sets import device_sets, fastest
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.fsdp import fsdp
from isthmus.planners.schemes.grid import grid, tensor
from isthmus.planners.schemes.region import region
from isthmus.planners.schemes.staged_ideas import own_times, staged_ideas

__all__ = ["SCHEMES", "Scheme", "pipeline"]

Scheme = Callable[[Problem, MemoryFit, Fix], Iterator[Idea]]
_WAYS = (StageOptions(), StageOptions(recompute=True))


def pipeline(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose one stage a device, in the order of the cluster file."""
    chains = [fastest(problem, devices, len(problem.graph.blocks)) for devices in device_sets(problem)]
    for chain in dict.fromkeys(chains):
        for count in micro_batch_counts(problem.job.batch, 1):
            staged = Staged(tuple((((device,), problem.job.batch // count),) for device in chain), count)
            cuts = [own_times(problem, staged.stages)]
            yield from staged_ideas(problem, memory, staged, cuts, _WAYS, range(len(chain) - 1))


SCHEMES: dict[str, Scheme] = {
    "data-even": data_even,
    "data": data,
    "pipeline": pipeline,
    "tensor": tensor,
    "fsdp": fsdp,
    "grid": grid,
    "region": region,
    "classes": classes,
}
