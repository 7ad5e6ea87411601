"""The cases that planners are judged on: files under cases/planner, and clusters of any size made from a seed.

A folder is a group: its `jobs.yaml` lists jobs, each for the cluster file of its name or else for `cluster.yaml`.

    tag       TAG's six models on its testbed          equal   eight equal devices: nothing to win, nothing to lose
    unequal   30 random clusters, one job each         large   five large models on clusters that can hold them
    geo       10 random clusters over several regions  small   62 cases small enough for an exact search
    held      24 cases like nothing that the network of `learned` was trained on
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from _results import ROOT

from isthmus.cluster.load import build_cluster, load_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model import source
from isthmus.model.cache import content_key, model_code, read, versions, write
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.model.load_job import load_workload
from isthmus.planners.problem import Problem, build_problem

__all__ = ["GROUPS", "SCALES", "Case", "Scale", "case_named", "cases", "problem_of", "scale_cluster", "scale_job"]

FOLDER = ROOT / "benchmarks" / "cases" / "planner"
GROUPS = ("tag", "unequal", "geo", "large", "equal", "small", "held")
SMALL_BLOCKS = 8  # of every model of the group small
SCALE_MODEL = "zoo:gpt2-xl"  # 98 blocks; sixteen devices hold it, ten thousand are not too many for its batch
SCALE_KINDS = ("A100-40GB", "V100-16GB", "T4", "RTX-3090", "A10", "V100-32GB")
SCALE_SEED = 6400


class Case(NamedTuple):
    """One job on one cluster."""

    group: str
    name: str
    cluster: Cluster
    job: Job


class Scale(NamedTuple):
    """The size of a made cluster."""

    devices: int
    kinds: int = 3
    regions: int = 5


SCALES = (
    *(Scale(devices) for devices in (16, 128, 1024, 10_000)),
    *(Scale(128, kinds=kinds) for kinds in (1, 2, 4, 5, 6)),
    *(Scale(128, regions=regions) for regions in (1, 2, 3, 4, 6, 7, 8)),
)


def cases(group: str) -> Iterator[Case]:
    """The cases of a group, in the order of its jobs."""
    for job in load_workload(FOLDER / group / "jobs.yaml").jobs:
        own = FOLDER / group / f"{job.name}.yaml"
        yield Case(group, job.name, load_cluster(own if own.is_file() else FOLDER / group / "cluster.yaml"), job)


def case_named(group: str, name: str) -> Case:
    return next(case for case in cases(group) if case.name == name)


def problem_of(case: Case, seed: int) -> Problem:
    """A problem that no planner has looked at."""
    return build_problem(case.cluster, (case.job,), {case.job.name: _graph_of(case)}, seed)


def _graph_of(case: Case) -> BlockGraph:
    """The model of a case; those of the group small in few blocks."""
    if case.group == "small":
        return _in_few_blocks(case.job.model, case.job.sequence)
    return _graph(case.job.model, case.job.sequence)


@cache
def _graph(model: str, sequence: int | None) -> BlockGraph:
    return source.load_graph(model, sequence=sequence)


@cache
def _in_few_blocks(model: str, sequence: int | None) -> BlockGraph:
    """As `source.load_graph`, kept in the same cache."""
    key = content_key(["planner cases", model, str(sequence), str(SMALL_BLOCKS), versions("torch"), model_code()])
    stored = read(key)
    if stored is not None:
        return msgspec.json.decode(stored, type=BlockGraph)
    import torch

    from isthmus.model.capture import capture

    with torch.device("meta"):
        built = source.build(model, sequence)
    example = built.example(2, device="meta")
    graph = capture(built.module, example, name=built.name, sequence=built.sequence, max_blocks=SMALL_BLOCKS)
    write(key, msgspec.json.encode(graph))
    return graph


def scale_job(scale: Scale) -> Job:
    """Four samples a device."""
    return Job(name="scale", model=SCALE_MODEL, batch=4 * scale.devices, sequence=1024, precision="fp16")


def scale_cluster(scale: Scale) -> Cluster:
    """A cluster of just so many devices: regions of unequal size, each with one to three kinds, hosts of 2 to 8.

    Regions and kinds take turns, so that each comes at least once; the last host of a sort may be smaller. Links within
    a region have 25 to 100 Gbit/s, between regions 1 to 10 Gbit/s and 5 to 120 ms, for the region's pairs together 2 to
    8 times as much.
    """
    rng = random.Random(SCALE_SEED + scale.devices * 100 + scale.kinds * 10 + scale.regions)
    sorts = list(_sorts(scale, rng))
    hosts: dict[str, dict[str, Any]] = {}
    for (region, kind), devices in zip(sorts, _divided(scale.devices, len(sorts), rng), strict=True):
        hosts |= _hosts(region, SCALE_KINDS[kind], devices, 8 if scale.devices >= 1000 else 4, rng)
    name = f"scale-{scale.devices}-{scale.kinds}-{scale.regions}"
    return build_cluster({"name": name, "hosts": hosts, "links": list(_links(scale.regions, rng))}, name)


def _sorts(scale: Scale, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Pairs of region and kind: every region, every kind, and a few more."""
    most = scale.devices // 2
    pairs = [(i % scale.regions, i % scale.kinds) for i in range(max(scale.regions, scale.kinds))]
    others = [(r, k) for r in range(scale.regions) for k in range(scale.kinds) if (r, k) not in pairs]
    rng.shuffle(others)
    yield from sorted([*pairs, *others[: min(scale.regions, most - len(pairs))]])


def _divided(total: int, parts: int, rng: random.Random) -> list[int]:
    """Whole numbers of at least 1, the largest about four times the smallest, that add up to the total."""
    weights = [rng.uniform(1, 4) for _ in range(parts)]
    counts = [max(1, int(total * weight / sum(weights))) for weight in weights]
    for i in range(total - sum(counts)):
        counts[i % parts] += 1
    return counts


def _hosts(region: int, kind: str, devices: int, largest: int, rng: random.Random) -> Mapping[str, dict[str, Any]]:
    """Full hosts, and one with what is left over."""
    size = rng.choice([size for size in (2, 4, 8) if size <= largest])
    name, fields = (
        f"r{region}-{kind.lower()}-",
        {"region": f"region{region}", "nic": rng.choice(["25 Gbit/s", "100 Gbit/s"])},
    )
    full, left = divmod(devices, size)
    hosts = {f"{name}[1-{full}]": {**fields, "devices": {kind: size}}} if full else {}
    return hosts | ({f"{name}x": {**fields, "devices": {kind: left}}} if left else {})


def _links(regions: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    for a in range(regions):
        lan = rng.choice(["25 Gbit/s", "50 Gbit/s", "100 Gbit/s"])
        yield {"between": (f"region{a}", f"region{a}"), "bandwidth": lan, "latency": "0.05 ms"}
        for b in range(a + 1, regions):
            gbits = rng.choice([1, 2, 5, 10])
            yield {
                "between": (f"region{a}", f"region{b}"),
                "bandwidth": f"{gbits} Gbit/s",
                "latency": f"{rng.randint(5, 120)} ms",
                "trunk": f"{gbits * rng.choice([2, 4, 8])} Gbit/s",
            }
