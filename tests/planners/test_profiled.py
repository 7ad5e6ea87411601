"""Planning with measured times: bounds hold whatever was measured, and what was measured decides."""

from __future__ import annotations

from itertools import islice

import msgspec
import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cost.profiled import ALONE
from isthmus.model.job import Job
from isthmus.model.profile import BlockTime, CollectiveTime, Profile
from isthmus.plan.types import Pipeline, Plan
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.lower_bound import lower_bound
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem, build_problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.planners.schemes.fix import Fix
from tests.cost.random_profiles import random_profile
from tests.plan.small_models import chain

CLUSTER = """
kind: cluster
version: 1
name: two
devices:
  quick: {compute: 100 TFLOP/s, memory: 16 GB, memory_bandwidth: 1000 GB/s}
  slow: {compute: 20 TFLOP/s, memory: 16 GB, memory_bandwidth: 400 GB/s}
hosts:
  a: {region: east, devices: {quick: 2}, nic: 100 Gbit/s}
  b: {region: west, devices: {slow: 2}, nic: 10 Gbit/s}
links:
  - {between: [east, west], bandwidth: 1 Gbit/s, latency: 20 ms}
"""


def collectives(cluster: Cluster, seconds: float) -> tuple[CollectiveTime, ...]:
    """Rings and trees of any devices of two hosts, all of one length."""
    one, other = cluster.hosts
    return tuple(
        CollectiveTime(how=how, hosts=(one,) * i + (other,) * j, bytes=1e5, seconds=seconds)
        for how in ("ring", "tree")
        for i in range(3)
        for j in range(3)
        if i + j > 1
    )


def problem(cluster: Cluster, profile: Profile, batch: int = 24) -> Problem:
    job = Job(name="job", model="small:chain", batch=batch)
    return build_problem(cluster, (job,), {"job": chain(5, width=256)}, 0, profile)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("synced", [True, False])
def test_no_plan_of_any_scheme_is_below_its_bounds(seed: int, synced: bool) -> None:
    """Whatever was measured of blocks, devices and messages, and of syncs or not."""
    cluster = parse_cluster(CLUSTER)
    drawn = random_profile(Plan(cluster="two", parts=()), cluster, chain(5, width=256), seed)
    task = problem(cluster, msgspec.structs.replace(drawn, collectives=collectives(cluster, 1e-5) if synced else ()))
    bound, memory, tried = lower_bound(task), MemoryFit(task), 0
    for scheme in SCHEMES.values():
        for idea in islice(scheme(task, memory, Fix()), 60):
            for version in idea.versions():
                seconds = task.price(version.make()).price.step_seconds * (1 + 1e-9)
                assert seconds >= version.seconds >= idea.seconds * (1 - 1e-9) and seconds >= bound
                tried += 1
    assert tried > 100


def test_slowness_measured_on_one_device_is_not_fled_in_tensor_groups() -> None:
    """Times of single devices, thirty times the catalog's: then so are every bound and, with its sends, every plan."""
    cluster, slowdown = parse_cluster(CLUSTER), 30.0
    plain = problem(cluster, Profile())
    points = {
        (block.digest, kind, samples): plain.block_seconds(kind, ALONE, samples)[:, index] * slowdown
        for index, block in enumerate(plain.graph.blocks)
        for kind in cluster.kinds
        for samples in (1, 8, 24)
    }
    blocks = tuple(
        BlockTime(
            block=digest, device=kind, precision="fp32", samples=samples, forward_seconds=forward,
            backward_seconds=backward,
        )
        for (digest, kind, samples), (forward, backward) in points.items()
    )  # fmt: skip
    task = problem(cluster, Profile(blocks=blocks))
    choice = choose_plan(task)
    assert 0.9 * slowdown * lower_bound(plain) <= lower_bound(task) <= choice.price.step_seconds
    assert choice.schemes["tensor"] and choice.schemes["tensor"] >= lower_bound(task)


def test_the_kind_that_was_measured_to_be_fast_gets_the_work() -> None:
    """The catalog says that `quick` is five times as fast; measured, it is a hundred times slower."""
    cluster, digests = parse_cluster(CLUSTER), dict.fromkeys(block.digest for block in chain(5, width=256).blocks)
    blocks = tuple(
        BlockTime(
            block=digest, device=kind, precision="fp32", samples=samples, forward_seconds=samples * each / 3,
            backward_seconds=samples * each * 2 / 3,
        )
        for digest in digests
        for kind, each in (("quick", 1.0), ("slow", 0.01))
        for samples in (1, 24)
    )  # fmt: skip
    profile = Profile(blocks=blocks, collectives=collectives(cluster, 1e-3))
    choice = choose_plan(problem(cluster, profile), planner="data")
    part = choice.plan.parts[0]
    assert isinstance(part, Pipeline)
    shares = {replica.devices[0]: replica.share for stage in part.stages for replica in stage.replicas}
    assert set(shares) == {"b/slow/0", "b/slow/1"} and len(set(shares.values())) == 1
    assert choice.price.step_seconds == pytest.approx(5 * 12 * 0.01, rel=0.05)
    assert choice.lower_bound <= choice.price.step_seconds
