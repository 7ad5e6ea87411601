"""Compiling, or loading what was compiled before, as a step of its own: it is in no budget and in no planning time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from isthmus.cluster.load import parse_cluster
from isthmus.compiled import telling
from isthmus.model.graph import Block, BlockGraph, Parameter
from isthmus.model.job import Job
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from isthmus.planners.layout.cuts import balanced_cut, pipelines_seconds
from isthmus.planners.layout.device_groups import all_bundles
from isthmus.planners.layout.layout_types import LaneOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.side_by_side import LaneMaker, lanes_plan
from isthmus.planners.problem import Problem, build_problem

__all__ = ["warm_up"]


def warm_up(compiling: Callable[[], None] = lambda: None) -> None:
    """Compile the simulator and the planners (up to a minute, once), or load what was compiled before.

    Every compiled function is called once by planning for a toy: one block on two devices. `compiling` is called when
    something has to be compiled.
    """
    with telling(compiling):
        problem = _toy()
        plan = _toy_plan(problem.job)
        problem.simulator.price(plan)
        problem.simulator.play(plan)
        lanes = LaneMaker(problem, MemoryFit(problem))
        layout = lanes.complete([(bundle,) for bundle in all_bundles(problem)], LaneOptions(1))
        assert layout is not None
        problem.price(lanes_plan(problem, layout))
        balanced_cut([np.ones(1)])
        pipelines_seconds(np.ones((1, 1)), np.ones((1, 1)), np.ones((1, 0)), np.ones(1, np.int64), 1)
        lanes.settled(((("a/CPU/0",),),), 1, LaneOptions(1), 0)


def _toy() -> Problem:
    """Return the problem of training one block with one weight on two devices."""
    cluster = parse_cluster("{kind: cluster, version: 1, name: one, hosts: {a: {region: r, devices: {CPU: 2}}}}")
    block = Block(
        name="b", digest="", parameters=("w",), forward_flops=1.0, backward_flops=2.0, saved=1.0, moved=1.0,
        weights_moved=1.0, operations=1,
    )  # fmt: skip
    weight = Parameter(name="w", elements=1, shape=(1,))
    graph = BlockGraph(name="one", blocks=(block,), tensors=(), parameters=(weight,))
    return build_problem(cluster, (Job(name="one", model="one.json", batch=2),), {"one": graph})


def _toy_plan(job: Job) -> Plan:
    """Return data parallelism over both devices, with a ring."""
    devices = ("a/CPU/0", "a/CPU/1")
    stage = Stage(first="b", last="b", replicas=tuple(Replica(devices=(device,), share=1) for device in devices))
    ring = Sync(bucket="b", how="ring", parameters=("[b]",), participants=devices)
    part = Pipeline(job=job, model_digest="", precision="fp32", micro_batches=1, stages=(stage,), syncs=(ring,))
    return Plan(cluster="one", parts=(part,))
