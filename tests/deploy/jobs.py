"""Plans for the small GPT, and a plain loop in one process that knows nothing of plans."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model import source
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.zoo.synthetic import cross_entropy
from isthmus.plan.file import PlanFile, save_plan
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from isthmus.runtime.data.sample_order import SampleOrder
from tests.deploy import models

BATCH = 4
MODEL, DATA = "tests.deploy.models:small_gpt", "tests.deploy.models:samples"
TRUSTED = ("--model", MODEL, "--model", DATA)
JOB = Job(
    name="small", model=MODEL, data=DATA, batch=BATCH, steps=6, precision="fp32", seed=3,
    optimizer=Optimizer(learning_rate=1e-2, clip=1.0),
)  # fmt: skip
A, B = "here/CPU/0", "here/CPU/1"


@cache
def two_devices() -> Cluster:
    text = "kind: cluster\nversion: 1\nname: desk\nhosts:\n  here: {region: home, devices: {CPU: 2}}\n"
    return parse_cluster(text)


@cache
def graph(model: str = MODEL) -> BlockGraph:
    return source.load_graph(model)


def two_stages(job: Job = JOB) -> PlanFile:
    """Uneven stages; the tied embedding is synced between the first and the last."""
    names = [block.name for block in graph().blocks]
    cut = len(names) // 3
    stages = (
        Stage(first=names[0], last=names[cut], replicas=(Replica(devices=(A,), share=BATCH // 2),)),
        Stage(first=names[cut + 1], last=names[-1], replicas=(Replica(devices=(B,), share=BATCH // 2),)),
    )
    tied = [p.name for p in graph().parameters if p.ties]
    syncs = (Sync(bucket="tied", how="ring", parameters=tuple(tied), participants=(A, B)),)
    return _file(job, stages, syncs, micro_batches=2)


def two_replicas(job: Job = JOB) -> PlanFile:
    """Unequal shares."""
    names = [block.name for block in graph().blocks]
    replicas = (Replica(devices=(A,), share=3), Replica(devices=(B,), share=1))
    stages = (Stage(first=names[0], last=names[-1], replicas=replicas),)
    syncs = (Sync(bucket="all", how="ring", parameters=tuple(f"[{name}]" for name in names), participants=(A, B)),)
    return _file(job, stages, syncs, micro_batches=1)


def one_group() -> PlanFile:
    """Both devices compute every block together."""
    names = [block.name for block in graph().blocks]
    stages = (Stage(first=names[0], last=names[-1], replicas=(Replica(devices=(A, B), share=BATCH),)),)
    return _file(JOB, stages, (), micro_batches=1)


def _file(job: Job, stages: tuple[Stage, ...], syncs: tuple[Sync, ...], micro_batches: int) -> PlanFile:
    part = Pipeline(
        job=job,
        model_digest=graph(job.model).digest,
        precision="fp32",
        micro_batches=micro_batches,
        stages=stages,
        syncs=syncs,
    )
    return PlanFile(plan=Plan(cluster="desk", parts=(part,)), cluster=two_devices())


def written(folder: Path, file: PlanFile) -> Path:
    path = folder / "plan.json"
    save_plan(path, file)
    return path


@cache
def plain_losses(steps: int = JOB.steps) -> tuple[float, ...]:
    """One process, the model as it is."""
    torch.manual_seed(JOB.seed)
    model, _ = models.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, order, losses = models.samples(), SampleOrder(seed=JOB.seed, count=models.COUNT), []
    for step in range(steps):
        pairs = [data[number] for number in order.numbers(step, BATCH)]
        total, count = cross_entropy(model(torch.stack([x for x, _ in pairs])), torch.stack([y for _, y in pairs]))
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((total / count).item())
    return tuple(losses)


def children(parent: int) -> dict[int, str]:
    """Workers that a process has started, by process id, and the device of each."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # no process, or one that has just ended
        if above == parent and "isthmus.runtime.worker_process" in words:
            found[int(folder.name)] = words[-2]
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
