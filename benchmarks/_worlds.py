"""Plans for emulated worlds, and training by them: what the benchmarks of predictions and of schemes share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from _results import ROOT

from isthmus import api
from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import TCP_PAYLOAD, Cluster
from isthmus.deploy.local import LocalEngine
from isthmus.deploy.training import RunResult
from isthmus.emulate.act import Emulation, as_emulated, paces
from isthmus.errors import FileError
from isthmus.files.strict_yaml import parse_yaml
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.profile import NetworkCosts, Profile
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from isthmus.planners.layout.cuts import balanced_cut
from isthmus.planners.layout.shares import fair_shares

__all__ = [
    "Case",
    "Constants",
    "Model",
    "calibrated",
    "graph_of",
    "load_cases",
    "make_plan",
    "measured_profile",
    "predict",
    "train",
    "with_constants",
    "world",
]

SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16)


class Model(NamedTuple):
    """What is trained."""

    name: str
    spec: str
    sequence: int | None


class Case(NamedTuple):
    """A plan in a world."""

    world: str
    model: Model
    batch: int
    stages: tuple[tuple[str, ...], ...]  # hosts, with /1 for a host's second device
    micro: int
    schedule: str
    sync: str
    state: str
    recompute: bool

    def __str__(self) -> str:
        stages = " | ".join(" ".join(stage) for stage in self.stages)
        more = [self.schedule] if len(self.stages) > 1 else []
        more += [self.sync] if any(len(stage) > 1 for stage in self.stages) else []
        more += [self.state] if self.state != "replicated" else []
        more += ["recompute"] if self.recompute else []
        return f"{self.world}: {self.model.name} x{self.batch}/{self.micro}, {stages}, {', '.join(more)}"


def load_cases(file: Path) -> dict[str, list[Case]]:
    """The lists of cases of a file, by name."""
    text = dict(parse_yaml(file.read_text(), name=file.name, error=FileError).value)
    models = {
        name: Model(name, _absolute(row["model"]), row.get("sequence")) for name, row in text.pop("models").items()
    }
    return {name: [_case(row, models) for row in rows] for name, rows in text.items()}


def _absolute(spec: str) -> str:
    """Files are named from the root of the repository."""
    kind, _, path = spec.partition(":")
    return f"hf:{ROOT / path}" if kind == "hf" else spec


def _case(row: Mapping[str, Any], models: Mapping[str, Model]) -> Case:
    return Case(
        world=row["world"],
        model=models[row["model"]],
        batch=row["batch"],
        stages=tuple(tuple(part.split()) for part in row["stages"].split("|")),
        micro=row.get("micro", 1),
        schedule=row.get("schedule", "1f1b"),
        sync=row.get("sync", "ring"),
        state=row.get("state", "replicated"),
        recompute=row.get("recompute", False),
    )


@cache
def world(name: str) -> Cluster:
    """A cluster of benchmarks/cases/worlds."""
    return load_cluster(ROOT / "benchmarks" / "cases" / "worlds" / f"{name}.yaml")


@cache
def graph_of(model: Model) -> BlockGraph:
    """The model's blocks."""
    return api.capture(model.spec, sequence=model.sequence)


def make_plan(case: Case) -> Plan:
    """Blocks cut by FLOPs, shares made, both by the speed of devices; a bucket for each part of a stage."""
    cluster, graph = world(case.world), graph_of(case.model)
    slower = paces(cluster)
    speed = {device: 1.0 / slower[cluster.devices[device].kind] for device in cluster.devices}
    placed = [tuple(_device(cluster, text) for text in stage) for stage in case.stages]
    ends = _cuts(graph, [sum(speed[d] for d in stage) for stage in placed])
    size = case.batch // case.micro
    stages, syncs = [], []
    for devices, (first, last) in zip(placed, ends, strict=True):
        shares = fair_shares(size, [partial(_seconds, speed[device]) for device in devices])
        names = [block.name for block in graph.blocks[first : last + 1]]
        replicas = tuple(Replica(devices=(d,), share=s) for d, s in zip(devices, shares, strict=True))
        stages.append(
            Stage(
                first=names[0],
                last=names[-1],
                replicas=replicas,
                state=case.state if len(devices) > 1 else "replicated",  # type: ignore[arg-type]
                recompute=case.recompute,
            )
        )
        if len(devices) > 1:
            syncs += _buckets(case, graph, first, last, devices)
    syncs += _ties(graph, ends, placed)
    job = Job(
        name="job", model=case.model.spec, batch=case.batch, sequence=case.model.sequence, precision="fp32",
        optimizer=Optimizer(learning_rate=1e-4),
    )  # fmt: skip
    pipeline = Pipeline(
        job=job, model_digest=graph.digest, precision="fp32", micro_batches=case.micro,
        schedule=case.schedule, stages=tuple(stages), syncs=tuple(syncs),  # type: ignore[arg-type]
    )  # fmt: skip
    return Plan(cluster=cluster.name, parts=(pipeline,))


def _device(cluster: Cluster, text: str) -> str:
    host, _, index = text.partition("/")
    return [name for name, device in cluster.devices.items() if device.host == host][int(index or 0)]


def _cuts(graph: BlockGraph, speeds: Sequence[float]) -> list[tuple[int, int]]:
    """First and last block of each stage, by FLOPs."""
    flops = np.array([block.forward_flops + block.backward_flops for block in graph.blocks])
    firsts = balanced_cut([flops / speed for speed in speeds])
    assert firsts is not None
    return [(first, after - 1) for first, after in pairwise([*firsts, len(flops)])]


def _seconds(speed: float, samples: int) -> float:
    return samples / speed


def _tied(graph: BlockGraph) -> set[str]:
    users: dict[str, int] = {}
    for block in graph.blocks:
        for name in block.parameters:
            users[name] = users.get(name, 0) + 1
    return {name for name, count in users.items() if count > 1}


def _buckets(case: Case, graph: BlockGraph, first: int, last: int, devices: Sequence[str]) -> list[Sync]:
    """Two buckets for a stage, so that the first goes out while the second is computed; linear weights by factors."""
    tied, linear = _tied(graph), {p.name for p in graph.parameters if p.linear}
    middle = (first + last + 1) // 2
    found = []
    for low, high in ((middle, last + 1), (first, middle)):
        names = [n for block in graph.blocks[low:high] for n in block.parameters if n not in tied]
        factors = [n for n in names if n in linear] if case.sync == "factors" else []
        rest = [n for n in names if n not in factors]
        how = "ring" if case.sync == "factors" else case.sync
        for kind, members in ((how, rest), ("factors", factors)):
            if members:
                found.append(
                    Sync(
                        bucket=f"{kind} {low}-{high - 1}",
                        how=kind,
                        parameters=tuple(members),  # type: ignore[arg-type]
                        participants=tuple(devices),
                        root=devices[0] if kind == "server" else None,
                    )
                )
    return found


def _ties(graph: BlockGraph, ends: Sequence[tuple[int, int]], placed: Sequence[Sequence[str]]) -> list[Sync]:
    found = []
    for name in sorted(_tied(graph)):
        holders = [
            devices
            for (first, last), devices in zip(ends, placed, strict=True)
            if any(name in block.parameters for block in graph.blocks[first : last + 1])
        ]
        members = tuple(dict.fromkeys(device for devices in holders for device in devices))
        if len(members) > 1:
            found.append(Sync(bucket=f"tied {name}", how="ring", parameters=(name,), participants=members))
    return found


@cache
def measured_profile(model: Model) -> Profile:
    """Times of a model's blocks on one core of this machine."""
    from isthmus.runtime.profiling.block_times import profile_model
    from isthmus.runtime.profiling.machine import find_machine

    machine = find_machine("CPU", "fp32", 1)
    found = profile_model(model.spec, machine, sequence=model.sequence, samples=SAMPLES)
    return found.profile


class Constants(NamedTuple):
    """What the runtime adds to what blocks and links take."""

    action: float  # seconds of a core around each forward and backward
    step: float  # seconds of a core once a step
    message: float  # seconds of each message
    compute: float  # how much longer than measured alone blocks take beside other workers


def with_constants(profile: Profile, constants: Constants) -> Profile:
    """A profile of one core with what the runtime adds."""
    blocks = tuple(
        msgspec.structs.replace(
            time,
            forward_seconds=time.forward_seconds * constants.compute,
            backward_seconds=time.backward_seconds * constants.compute,
        )
        for time in profile.blocks
    )
    devices = tuple(
        msgspec.structs.replace(costs, action_seconds=constants.action, step_seconds=constants.step)
        for costs in profile.devices
    )
    network = NetworkCosts(payload=TCP_PAYLOAD, message_seconds=constants.message)
    return msgspec.structs.replace(profile, blocks=blocks, devices=devices, network=network)


def calibrated(profile: Profile, results: Path) -> Profile:
    """With the constants that benchmarks/prediction.py has found."""
    return with_constants(profile, Constants(**json.loads(results.read_text())["constants"]))


def predict(plan: Plan, cluster: Cluster, model: Model, profile: Profile) -> api.Simulated:
    """The plan priced for the emulated world."""
    emulated = as_emulated(profile, paces(cluster))
    return api.simulate(plan, cluster, {"job": graph_of(model)}, profile=emulated)


def train(plan: Plan, cluster: Cluster, steps: int) -> RunResult:
    """Trains by a plan in its emulated world."""
    used = {device for part in plan.parts for stage in part.stages for r in stage.replicas for device in r.devices}  # type: ignore[union-attr]
    hosts = [host for host in cluster.hosts if any(cluster.devices[device].host == host for device in used)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Emulation(cluster, hosts) as emulation:
        assert emulation.world.shaped, emulation.world.reason
        return api.train(plan, cluster, steps=steps, engine=LocalEngine(emulation))
