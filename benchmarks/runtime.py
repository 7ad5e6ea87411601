"""The runtime against stock torch: DistributedDataParallel, and torch.distributed.pipelining with 1F1B.

Two workers, one thread each, on loopback (Gloo). Each comparison has the same model, weights, samples, cut, micro-
batches and fused AdamW on both sides; for DDP the plan's buckets are those of DDP's defaults, for the pipeline stock
torch gets the all-reduce of the tied embedding that it leaves to its users. All worlds live at once and take turns of
a few steps, the others blocked on a pipe; a ratio is of two turns next to each other, and the median over all rounds
is claimed. Losses must agree.

The floor is the step's FLOPs at the rate of a plain matrix product on both cores at once, with the idle part of the
pipeline where there is one; messages, norms and the update are not in it.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _results import at_most, finish, options
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from isthmus.cluster.load import parse_cluster
from isthmus.model.built import BuiltModel
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.model.zoo.gpt import GPT, gpt
from isthmus.plan.types import Pipeline, Plan, Replica, Stage, Sync
from isthmus.plan.validate import check
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.process_memory import keep_freed_memory
from isthmus.runtime.program import Program, programs
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.worker import Worker

DEVICES = ("h/CPU/0", "h/CPU/1")
OPTIMIZER = Optimizer(learning_rate=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
TIED = "transformer.wte.weight"
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's defaults
PRELOAD = ["torch.distributed.pipelining", "isthmus.runtime.worker", "isthmus.model.runnable_blocks"]
SAMPLES = 64  # different ones, in memory: nobody waits for data
CLUSTER = """
kind: cluster
version: 1
name: loopback
devices: {CPU: {compute: 50 GFLOP/s, memory: 8 GB, memory_bandwidth: 10 GB/s}}
hosts:
  h: {region: here, devices: {CPU: 2}, bandwidth: 2 GB/s, latency: 50 us}
"""


class Case(NamedTuple):
    """A model and how it is trained."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    micro_batches: int  # of the pipeline
    sequence: int = 128
    vocabulary: int = 256


class World(NamedTuple):
    """Two processes that train a case in one way."""

    case: Case
    shape: str  # "data" or "pipeline"
    ours: bool
    seed: int


Step = Callable[[int], tuple[float | None, int]]  # trains a step; its loss, if it is known here, and bytes sent so far


class Turn(NamedTuple):
    """What a worker did: wall and CPU seconds, its losses (none where it has no part of them), bytes sent if known."""

    wall: float
    cpu: float
    losses: tuple[float, ...]
    sent: int


CASES = (
    Case("gpt-tiny", layers=6, width=256, heads=8, batch=8, micro_batches=4),
    Case("gpt-wide", layers=4, width=512, heads=8, batch=4, micro_batches=4),
)
SHAPES = {"data": "DDP", "pipeline": "pipelining 1F1B"}


# -- what both sides have


def built(world: World) -> BuiltModel:
    """The zoo's gpt-tiny, or one that is wider, with the weights of the seed."""
    case = world.case
    torch.manual_seed(world.seed)
    return gpt(
        name=case.name, sequence=case.sequence, layers=case.layers, width=case.width, heads=case.heads,
        longest=case.sequence, vocabulary=case.vocabulary, dropout=0.0,
    )  # fmt: skip


def samples(world: World, model: BuiltModel) -> Callable[[Sequence[int]], tuple[Example, Tensor]]:
    """Samples by number."""
    example, target = model.draw(SAMPLES, world.seed)
    tokens = example.args[0]
    assert target is not None

    def get(numbers: Sequence[int]) -> tuple[Example, Tensor]:
        places = torch.tensor([number % SAMPLES for number in numbers])
        return Example(args=(tokens[places],)), target[places]

    return get


def batch_of(world: World, step: int) -> range:
    return range(step * world.case.batch, (step + 1) * world.case.batch)


# -- ours


def plan_of(world: World, pieces: Pieces) -> Plan:
    """Data parallelism with DDP's buckets, or two stages cut between the same layers."""
    case, graph = world.case, pieces.graph
    names = [block.name for block in graph.blocks]
    middle = names.index(f"transformer.h.{case.layers // 2}.attn")
    if world.shape == "data":
        replicas = [Replica(devices=(device,), share=case.batch // 2) for device in DEVICES]
        stages = [Stage(first=names[0], last=names[-1], replicas=tuple(replicas))]
        buckets = list(buckets_like_ddp(graph))
    else:
        front, back = (Replica(devices=(device,), share=case.batch // case.micro_batches) for device in DEVICES)
        stages = [
            Stage(first=names[0], last=names[middle - 1], replicas=(front,)),
            Stage(first=names[middle], last=names[-1], replicas=(back,)),
        ]
        buckets = [[TIED]]
    part = Pipeline(
        job=Job(name=case.name, model=f"{case.name}.json", batch=case.batch, optimizer=OPTIMIZER, seed=world.seed),
        model_digest=graph.digest,
        precision="fp32",
        micro_batches=1 if world.shape == "data" else case.micro_batches,
        stages=tuple(stages),
        syncs=tuple(
            Sync(bucket=f"bucket {i}", how="ring", parameters=tuple(bucket), participants=DEVICES)
            for i, bucket in enumerate(buckets)
        ),
    )
    return Plan(cluster="loopback", parts=(part,))


def buckets_like_ddp(graph: BlockGraph) -> Iterator[list[str]]:
    """Parameters in the order in which the backward pass finishes them; a bucket is closed once it is large enough."""
    finished = list(dict.fromkeys(name for block in graph.blocks for name in reversed(block.parameters)))[::-1]
    bucket, size, limit = [], 0, FIRST_BUCKET
    for name in finished:
        bucket.append(name)
        size += graph.parameter[name].elements * 4
        if size >= limit:
            yield bucket
            bucket, size, limit = [], 0, BUCKET
    if bucket:
        yield bucket


def programs_of(world: World) -> dict[str, Program]:
    model = built(world)
    pieces = cut(model.module, model.example(2), name=world.case.name, sequence=world.case.sequence)
    plan, cluster, models = plan_of(world, pieces), parse_cluster(CLUSTER), {world.case.name: pieces.graph}
    check(plan, cluster, models)
    return programs(plan, cluster, models)


def our_steps(world: World, rank: int, folder: str, program: Program) -> Step:
    """A worker as `runtime.serving` makes it."""
    keep_freed_memory()
    model = built(world)
    example = model.example(2)
    pieces = cut(model.module, example, name=world.case.name, sequence=world.case.sequence)
    network = Channels(dist.FileStore(f"{folder}/store"), DEVICES[rank])
    worker = Worker(
        program, pieces, draws_of(pieces, example), network, torch.device("cpu"), model.loss, samples(world, model)
    )
    network.connect()

    def step(number: int) -> tuple[float | None, int]:
        result = worker.step(number, batch_of(world, number))
        return result.loss, worker.bytes_sent

    return step


# -- stock torch


def stock_steps(world: World, rank: int, folder: str) -> Step:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = built(world)
    return (ddp_steps if world.shape == "data" else pipelining_steps)(world, rank, model)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    rate, decay = OPTIMIZER.learning_rate, OPTIMIZER.weight_decay
    return torch.optim.AdamW(module.parameters(), lr=rate, betas=OPTIMIZER.betas, weight_decay=decay, fused=True)


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def ddp_steps(world: World, rank: int, model: BuiltModel) -> Step:
    module, get = DistributedDataParallel(model.module), samples(world, model)
    optimizer, share = adamw(module), world.case.batch // 2

    def step(number: int) -> tuple[float | None, int]:
        example, target = get(batch_of(world, number)[rank * share : (rank + 1) * share])
        loss = mean_loss(module(*example.args), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()), 0

    return step


class _Front(nn.Module):
    """Embeddings and the first half of the layers."""

    def __init__(self, model: GPT, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
        self.h = nn.ModuleList(list(model.transformer.h)[:layers])

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for layer in self.h:
            x = layer(x)
        return x


class _Back(nn.Module):
    """The other half, the last norm and the head."""

    def __init__(self, model: GPT, layers: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(list(model.transformer.h)[layers:])
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        out: Tensor = self.lm_head(self.ln_f(x))
        return out


def pipelining_steps(world: World, rank: int, model: BuiltModel) -> Step:
    assert isinstance(model.module, GPT)
    part = (_Back if rank else _Front)(model.module, world.case.layers // 2)
    tied = part.lm_head.weight if isinstance(part, _Back) else part.wte.weight
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, world.case.micro_batches, loss_fn=mean_loss)
    optimizer, get = adamw(part), samples(world, model)

    def step(number: int) -> tuple[float | None, int]:
        example, target = get(batch_of(world, number))
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(*example.args, return_outputs=False)
        else:
            schedule.step(target=target, losses=losses, return_outputs=False)
        dist.all_reduce(tied.grad)
        optimizer.step()
        optimizer.zero_grad()
        return (float(torch.stack(losses).detach().mean()) if rank else None), 0

    return step


# -- turns


def work(world: World, rank: int, folder: str, program: Program | None, pipe: Connection) -> None:
    """A worker's life: for every number that comes, so many steps; for 0, the rate of a matrix product."""
    torch.set_num_threads(1)
    step = stock_steps(world, rank, folder) if program is None else our_steps(world, rank, folder, program)
    done = 0
    pipe.send("ready")
    while (steps := pipe.recv()) is not None:
        if steps == 0:
            pipe.send(matrix_rate(world.case))
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        told = [step(number) for number in range(done, done + steps)]
        losses = tuple(loss for loss, _ in told if loss is not None)
        pipe.send(Turn(time.perf_counter() - wall, time.process_time() - cpu, losses, told[-1][1]))
        done += steps
    os._exit(0)  # as others may still wait for messages


def matrix_rate(case: Case) -> float:
    """FLOP/s of the largest product of a layer, for one micro-batch."""
    rows = case.batch // 2 * case.sequence
    a, b = torch.randn(rows, case.width), torch.randn(4 * case.width, case.width)
    best = 0.0
    for _ in range(20):
        begin = time.perf_counter()
        nn.functional.linear(a, b)
        best = max(best, 2 * a.numel() * 4 * case.width / (time.perf_counter() - begin))
    return best


class Running:
    """The processes of a world."""

    def __init__(self, world: World, folder: str) -> None:
        self.world, self.sent = world, 0
        self.losses: list[float] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        made = programs_of(world) if world.ours else {}
        own = tempfile.mkdtemp(dir=folder)
        self._pipes, self._processes = [], []
        for rank, device in enumerate(DEVICES):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(world, rank, own, made.get(device), there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def ready(self) -> None:
        """Waits until both have a model and are connected."""
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def ask(self, what: int | None) -> list[Any]:
        """What both answer."""
        for pipe in self._pipes:
            pipe.send(what)
        return [] if what is None else [pipe.recv() for pipe in self._pipes]

    def turn(self, steps: int) -> tuple[float, float]:
        """Wall and CPU seconds of a step."""
        turns: list[Turn] = self.ask(steps)
        told = [turn.losses for turn in turns if turn.losses]
        self.losses += [statistics.fmean(each) for each in zip(*told, strict=True)]
        self.sent = sum(turn.sent for turn in turns)
        return max(turn.wall for turn in turns) / steps, sum(turn.cpu for turn in turns) / steps

    def end(self) -> None:
        """Ends both."""
        self.ask(None)
        for process in self._processes:
            process.join()


class Pair:
    """Ours and stock, turn by turn."""

    def __init__(self, case: Case, shape: str, seed: int, folder: str) -> None:
        self.case, self.shape = case, shape
        self.ours, self.stock = (Running(World(case, shape, ours, seed), folder) for ours in (True, False))
        self.turns: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        self.rates: list[float] = []

    def warm_up(self, steps: int) -> None:
        """Steps that do not count: they make connections and buffers."""
        for side in (self.ours, self.stock):
            side.ready()
            side.turn(steps)
        self.warmed = self.ours.sent, len(self.ours.losses)

    def round(self, number: int, steps: int) -> None:
        """A turn each, who begins alternates; now and then what the machine can do."""
        for ours in (True, False) if number % 2 else (False, True):
            self.turns[ours].append((self.ours if ours else self.stock).turn(steps))
        self.rates.append(statistics.fmean(self.stock.ask(0)))

    def ratios(self, what: int) -> list[float]:
        """Ours over stock, round by round: of wall (0) or CPU (1) seconds."""
        return [ours[what] / stock[what] for ours, stock in zip(self.turns[True], self.turns[False], strict=True)]

    def row(self) -> dict[str, Any]:
        """Medians; quartiles of the ratio."""
        low, median, high = statistics.quantiles(self.ratios(0), n=4)
        ours, stock = (statistics.median(wall for wall, _ in self.turns[side]) for side in (True, False))
        return {
            "against": f"{SHAPES[self.shape]}, {self.case.name}",
            "ours_ms": ours * 1e3,
            "stock_ms": stock * 1e3,
            "floor_ms": self.floor() * 1e3,
            "ratio": median,
            "ratio_quartiles": f"{low:.3f} .. {high:.3f}",
            "cpu_ratio": statistics.median(self.ratios(1)),
            "MB_a_step": (self.ours.sent - self.warmed[0]) / (len(self.ours.losses) - self.warmed[1]) / 1e6,
            "losses_apart": self.apart(),
        }

    def floor(self) -> float:
        """Seconds of a step's FLOPs, two workers at once."""
        case = self.case
        parameters = 12 * case.layers * case.width**2 + case.width * case.vocabulary
        attention = 2 * case.layers * case.width * case.sequence  # causal: half of the scores
        flops = (6 * parameters + 3 * attention) * case.batch * case.sequence
        idle = 1 + 1 / case.micro_batches if self.shape == "pipeline" else 1
        return idle * flops / 2 / statistics.median(self.rates)

    def apart(self) -> float:
        """The largest relative difference of losses."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.ours.losses, self.stock.losses, strict=True))


def main() -> int:
    called = options("runtime", __doc__)
    rounds, steps = (6, 2) if called.quick else (50, 2)
    with tempfile.TemporaryDirectory() as folder:
        pairs = [Pair(case, shape, called.seed, folder) for case in CASES for shape in SHAPES]
        for pair in pairs:
            pair.warm_up(2)
        for number in range(rounds):
            for pair in pairs:
                pair.round(number, steps)
        rows = [pair.row() for pair in pairs]
        for pair in pairs:
            pair.ours.end()
            pair.stock.end()
    claims = []
    for shape, name in SHAPES.items():
        worst = max(row["ratio"] for pair, row in zip(pairs, rows, strict=True) if pair.shape == shape)
        claims.append(at_most(f"Worst-case step time of the runtime relative to torch {name}", worst, 1.05))
    apart = max(row["losses_apart"] for row in rows)
    claims.append(at_most("Largest relative difference from the losses of torch", apart, 1e-4))
    return finish(called, rows, claims, others={"rounds": rounds, "steps_a_turn": steps})


if __name__ == "__main__":
    sys.exit(main())
