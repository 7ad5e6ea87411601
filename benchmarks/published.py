"""Published step times of Megatron on A100s against the simulator.

The data (vTrain's validation set: 708 runs on one host, 51 on 8 to 64 hosts) lies beside a checkout in ../shared/data
and is not part of the project; without it this benchmark is skipped. Every run is priced as
`--fix tp=..,pp=..,dp=..,micro=..` prices it, first with the catalog's figures alone, then with six constants of the
A100 kind fitted on one random half of the runs and judged on the other half:

    matmul, memory, launch      what the kind reaches of its catalog figures (`cost.compute.Efficiency`)
    bandwidth, latency          between two devices of a host
    nic                         of a host, also what a pair of hosts can reach

What is priced is what was run, as its authors' settings say: every layer is computed again for its backward (embedding
and head are not), attention writes its scores out, embedding and head are split over the tensor group, gradients are
reduced after the last backward. The fit minimises a soft sum of squared log errors, hosts weighted alike, with a weak
pull towards plain values (`START`) for what the drawn half does not determine.

The times on many hosts are measured steps. Those on one host are said to be, but with all else equal they are linear in
layers and in micro-batches to the last digit, so they were put together from measured kernels: they judge blocks,
all-reduces and the pipeline's order, not what happens between them.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from _results import ROOT, at_least, at_most, finish, options, skip
from msgspec.structs import replace
from scipy.optimize import least_squares
from scipy.stats import spearmanr
from torch import Tensor, nn

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import USUAL, Efficiency
from isthmus.cost.simulate import Simulator
from isthmus.model.capture import capture
from isthmus.model.graph import BlockGraph, TensorSplit
from isthmus.model.job import Job
from isthmus.model.zoo import gpt
from isthmus.plan.types import Pipeline, Plan, Stage, Sync
from isthmus.planners.problem import build_problem
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.grid import megatron_plan

DATA = ROOT.parent / "shared" / "data"
KIND = "A100-80GB"
VOCABULARY = 51200  # GPT-2's, padded as Megatron pads it
Floats = npt.NDArray[np.float64]


class Run(NamedTuple):
    """One measured run."""

    devices: int
    batch: int
    micro: int
    width: int
    heads: int
    layers: int
    sequence: int
    tp: int
    dp: int
    pp: int
    seconds: float


class Constants(NamedTuple):
    """What is fitted; the defaults are the catalog's and the cluster file's."""

    matmul: float = USUAL.matmul
    memory: float = USUAL.memory
    launch: float = USUAL.launch
    bandwidth: float = 300e9
    latency: float = 5e-6
    nic: float = 100e9  # 800 Gbit/s


def read(name: str) -> list[Run]:
    """The rows of one file; the larger file has the number of parameters as its first column."""
    with (DATA / name).open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [Run(*map(int, row[-11:-1]), float(row[-1]) / 1e3) for row in rows]


class UnfusedAttention(nn.Module):
    """Attention that writes its scores out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, width] -> the same."""
        batch, sequence, width = x.shape
        parts = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, sequence, self.heads, -1).transpose(1, 2) for part in parts)
        y = self.attn_dropout(torch.softmax(q @ k.transpose(-1, -2), dim=-1)) @ v
        out: Tensor = self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(batch, sequence, width)))
        return out


def graph_of(run: Run) -> BlockGraph:
    """The measured model: two blocks a layer, embedding and head."""
    shape = {"layers": run.layers, "width": run.width, "heads": run.heads, "longest": run.sequence}
    with torch.device("meta"):
        built = gpt.gpt(name="gpt", sequence=run.sequence, vocabulary=VOCABULARY, **shape)
        for layer in built.module.transformer.h:
            layer.attn = UnfusedAttention(run.width, run.heads, 0.1)
        graph = capture(
            built.module, built.example(4), name="gpt", sequence=run.sequence, max_blocks=2 * run.layers + 2
        )
    return split_vocabulary(graph, run.sequence * run.width)


def split_vocabulary(graph: BlockGraph, elements: int) -> BlockGraph:
    """Embedding and head share a weight; each member of a tensor group has some of its rows."""
    embedding, *layers, head = graph.blocks
    shared = {"parameters": ("transformer.wte.weight",), "reduces": 1, "elements": elements}
    looked_up = TensorSplit(flops=0.0, saved=0.0, **shared)
    computed = TensorSplit(flops=head.forward_flops, saved=head.saved, **shared)
    embedding, head = replace(embedding, tensor=looked_up), replace(head, tensor=computed)
    return replace(graph, blocks=(embedding, *layers, head))


def cluster_of(devices: int, made: Constants) -> Cluster:
    """Hosts of eight A100 each."""
    hosts = max(1, devices // 8)
    bandwidth, nic = f"{made.bandwidth / 1e9:.9f} GB/s", f"{made.nic / 1e9:.9f} GB/s"
    inside = f"bandwidth: {bandwidth}, latency: {made.latency * 1e6:.9f} us, nic: {nic}"
    text = "kind: cluster\nversion: 1\nname: a100\n"
    text += f"hosts:\n  h[1-{hosts}]: {{region: r, devices: {{{KIND}: 8}}, {inside}}}\n"
    if hosts > 1:
        text += f"links:\n  - {{between: [r, r], bandwidth: {nic}, latency: 10 us}}\n"
    return parse_cluster(text)


def name_of(run: Run) -> str:
    return f"gpt-{run.width}-{run.layers}"


def as_measured(plan: Plan, graph: BlockGraph) -> Plan:
    """The plan as the measured programme carries it out."""
    (pipeline,) = plan.parts
    assert isinstance(pipeline, Pipeline)
    stages = recomputed(pipeline.stages, [block.name for block in graph.blocks])
    return replace(plan, parts=(replace(pipeline, stages=stages, syncs=reduced_at_once(pipeline.syncs)),))


def recomputed(stages: Sequence[Stage], names: Sequence[str]) -> tuple[Stage, ...]:
    """Layers are computed again; embedding and head, as stages of their own on the same devices, are not."""
    first, *others = (replace(stage, recompute=True) for stage in stages)
    *inner, last = (replace(first, first=names[1]), *others)
    embedding = replace(stages[0], last=names[0])
    head = replace(stages[-1], first=names[-1])
    return embedding, *inner, replace(last, last=names[-2]), head


def reduced_at_once(syncs: Sequence[Sync]) -> tuple[Sync, ...]:
    """All gradients of a stage in one bucket."""
    buckets: dict[tuple[str, ...], list[Sync]] = {}
    for sync in syncs:
        buckets.setdefault(sync.participants, []).append(sync)
    return tuple(
        replace(first, parameters=tuple(word for sync in (first, *rest) for word in sync.parameters))
        for first, *rest in buckets.values()
    )


class Pricer:
    """Prices the runs; what does not depend on the constants (models, plans) is made once."""

    def __init__(self) -> None:
        self.graphs: dict[str, BlockGraph] = {}
        self.plans: dict[Run, Plan] = {}

    def graph(self, run: Run) -> BlockGraph:
        """The run's model; jobs are named by its shape."""
        if name_of(run) not in self.graphs:
            self.graphs[name_of(run)] = graph_of(run)
        return self.graphs[name_of(run)]

    def plan(self, run: Run, cluster: Cluster) -> Plan:
        """The run's layout."""
        if run not in self.plans:
            job = Job(name=name_of(run), model="gpt", batch=run.batch, precision="fp16")
            problem = build_problem(cluster, (job,), {job.name: self.graph(run)})
            plan = megatron_plan(problem, Fix(run.tp, run.pp, run.dp, run.micro))
            self.plans[run] = as_measured(plan, self.graph(run))
        return self.plans[run]

    def seconds(self, runs: Sequence[Run], made: Constants) -> Floats:
        """Step times of runs."""
        efficiency = {KIND: Efficiency(matmul=made.matmul, memory=made.memory, launch=made.launch)}
        simulators = {}
        priced = []
        for run in runs:
            devices = max(8, run.devices)
            if devices not in simulators:
                simulators[devices] = Simulator(cluster_of(devices, made), self.graphs, efficiency)
            plan = self.plan(run, simulators[devices].cluster)
            priced.append(simulators[devices].price(plan).step_seconds)
        return np.array(priced)


# Where the fit starts, and what it is weakly pulled to: eager kernels of a large framework, and the rate inside a host
# that the authors of the data reckon with.
START = Constants(launch=40e-6, bandwidth=150e9, latency=10e-6)


def fit(pricer: Pricer, parts: Sequence[Sequence[Run]], calls: int) -> Constants:
    """Constants for the drawn halves; both parts (one host, many hosts) weigh the same."""
    start = np.log(START)
    weights = [(max(map(len, parts)) / len(part)) ** 0.5 for part in parts]

    def errors(logs: Floats) -> Floats:
        made = Constants(*np.exp(logs).tolist())
        wrong = [w * np.log(pricer.seconds(p, made) / measured(p)) for w, p in zip(weights, parts, strict=True)]
        return np.concatenate((*wrong, logs - start))

    span = np.log(20.0)  # each constant stays within a factor of 20 of where it starts
    found = least_squares(
        errors, start, bounds=(start - span, start + span), loss="soft_l1", f_scale=0.05, diff_step=1e-3, max_nfev=calls
    )
    return Constants(*np.exp(found.x).tolist())


def measured(runs: Sequence[Run]) -> Floats:
    return np.array([run.seconds for run in runs])


def judge(pricer: Pricer, runs: Sequence[Run], made: Constants) -> tuple[float, float]:
    """Mean absolute error and rank correlation."""
    priced, real = pricer.seconds(runs, made), measured(runs)
    return float(np.abs(priced / real - 1).mean()), float(spearmanr(priced, real).statistic)


def halves(runs: list[Run], rng: np.random.Generator) -> tuple[list[Run], list[Run]]:
    order = rng.permutation(len(runs))
    return [runs[i] for i in order[: len(runs) // 2]], [runs[i] for i in order[len(runs) // 2 :]]


def main() -> int:
    called = options("published", __doc__)
    if not (DATA / "published_a100_one_host.csv").exists():
        return skip(called, f"the published runs are not there: {Path('..') / 'shared' / 'data'}")
    one, many = read("published_a100_one_host.csv"), read("published_a100_many_hosts.csv")
    pricer = Pricer()
    rows, started = [], time.monotonic()
    for name, runs in (("one host", one), ("many hosts", many)):
        error, rank = judge(pricer, runs, Constants())
        rows.append(
            {"runs": name, "number": len(runs), "constants": "catalog", "error": error, "rank correlation": rank}
        )
    errors: dict[str, list[float]] = {"one host": [], "many hosts": []}
    ranks: list[float] = []
    for seed in range(called.seed, called.seed + (1 if called.quick else 3)):
        rng = np.random.default_rng(seed)
        (drawn, left), (far_drawn, far_left) = halves(one, rng), halves(many, rng)
        made = fit(pricer, (drawn, far_drawn), calls=8 if called.quick else 15)
        for name, runs in (("one host", left), ("many hosts", far_left)):
            error, rank = judge(pricer, runs, made)
            errors[name].append(error)
            row = {"runs": name, "number": len(runs), "constants": f"fitted, half {seed}", "error": error}
            rows.append({**row, "rank correlation": rank, **made._asdict()})
        ranks.append(judge(pricer, [*left, *far_left], made)[1])
    claims = [
        at_most(
            "Mean error of predicted step times on one host, held-out half of published runs",
            float(np.mean(errors["one host"])),
            0.08,
        ),
        at_most(
            "Mean error of predicted step times on many hosts, held-out half of published runs",
            float(np.mean(errors["many hosts"])),
            0.09,
        ),
        at_least("Rank correlation of predicted and published step times, held-out half", min(ranks), 0.97),
    ]
    return finish(called, rows, claims, others={"seconds": time.monotonic() - started})


if __name__ == "__main__":
    sys.exit(main())
