"""Workers as threads of one process, on real Gloo pairs: the same executor as in training, without starting processes.

`reference` is the judge: a plain loop over one process's model that knows nothing of plans.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.torch_export import Example
from isthmus.plan.types import Pipeline, Plan, Stage, Sync
from isthmus.plan.validate import check
from isthmus.runtime.checkpoint.manifest import Header
from isthmus.runtime.checkpoint.reading import open_checkpoint
from isthmus.runtime.checkpoint.saving import Piece, finish, write_part
from isthmus.runtime.checkpoint.worker_state import load_state, saved_pieces
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.placed_blocks import Draws
from isthmus.runtime.program import programs
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.worker import DTYPES, Worker, must_keep_order
from isthmus.runtime.worker_run import cast_module

DEADLINE = 120.0  # seconds
DEVICE = torch.device(os.environ.get("ISTHMUS_TEST_DEVICE", "cpu"))  # where workers and reference compute
Loss = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
Get = Callable[[Sequence[int]], tuple[Example, Tensor]]


class Cutting(NamedTuple):
    """A model's blocks, and what is random in them."""

    pieces: Pieces
    draws: Draws

    @property
    def graph(self) -> BlockGraph:
        return self.pieces.graph


@dataclass(frozen=True)
class Task:
    """Something to train: how to make the model (equal each time), its samples, its loss."""

    make: Callable[[], nn.Module]
    get: Get
    loss: Loss

    def pieces(self, precision: str = "fp32", max_blocks: int = 128) -> Cutting:
        """The model's blocks; what the tracer noted in their graphs cannot be copied and is dropped."""
        model = cast_module(self.make(), DTYPES[precision])
        example = self.get(range(2))[0]
        cast = tuple(v.to(DTYPES[precision]) if v.is_floating_point() else v for v in example.args)
        example = Example(args=cast, kwargs=example.kwargs)
        found = cut(model, example, name="task", max_blocks=max_blocks)
        draws = draws_of(found, example)
        for block in found.blocks:
            for node in block.graph.nodes if isinstance(block, fx.GraphModule) else ():
                node.meta.clear()
        return Cutting(found, draws)


@dataclass(frozen=True)
class Result:
    losses: list[float]
    weights: dict[str, Tensor]  # of every parameter, from each worker that has it: they must agree


def small_cluster(hosts: int = 2, devices: int = 4, regions: int = 2, *, chain: bool = False) -> Cluster:
    """CPU devices a0 .. on hosts h0 ..: `h0/CPU/0`. In a chain only a region and the next have a link."""
    lines = "".join(f"  h{i}: {{region: r{i % regions}, devices: {{CPU: {devices}}}}}\n" for i in range(hosts))
    links = "".join(
        f"  - {{between: [r{a}, r{b}], bandwidth: 1 Gbit/s, latency: 1 ms}}\n"
        for a in range(regions)
        for b in range(a, min(a + 2, regions) if chain else regions)
    )
    kind = "{compute: 1 TFLOP/s, memory: 64 GB, memory_bandwidth: 50 GB/s}"
    return parse_cluster(
        f"kind: cluster\nversion: 1\nname: small\ndevices:\n  CPU: {kind}\nhosts:\n{lines}links:\n{links}"
    )


def pipeline_plan(
    pieces: Cutting,
    stages: Sequence[Stage],
    syncs: Sequence[Sync] = (),
    *,
    batch: int,
    micro_batches: int = 1,
    optimizer: Optimizer | None = None,
    precision: Any = "fp32",
    sparsity: float | None = None,
    **others: Any,
) -> Plan:
    job = Job(
        name="job", model="task.json", batch=batch, optimizer=optimizer or Optimizer(learning_rate=1e-2),
        sparsity=sparsity,
    )  # fmt: skip
    part = Pipeline(
        job=job, model_digest=pieces.graph.digest, precision=precision, micro_batches=micro_batches,
        stages=tuple(stages), syncs=tuple(syncs), **others,
    )  # fmt: skip
    return Plan(cluster="small", parts=(part,))


def train(
    task: Task,
    plan: Plan,
    cluster: Cluster,
    pieces: Cutting,
    steps: int,
    *,
    checked: bool = True,
    folder: Path | None = None,
    resume: Path | None = None,
) -> Result:
    """Runs the plan with a thread for each worker, to the end of step `steps`.

    From `resume`, a checkpoint, where one is given; saves one to `folder`, if there is one.
    """
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    models = {part.job.name: pieces.graph}
    if checked:
        check(plan, cluster, models)
    made = programs(plan, cluster, models)
    if DEVICE.type == "cuda" and any(must_keep_order(program, pieces.pieces) for program in made.values()):
        pytest.skip("threads of one process share the autograd thread of a GPU: sums in backward need processes")
    grouped = [device for device, program in made.items() if any(len(run.group) > 1 for run in program.runs)]
    owned = {device: task.pieces(part.precision).pieces for device in grouped}  # its parts are cut from a model's own
    initial = {name: parameter.detach() for name, parameter in task.make().named_parameters()}
    checkpoint = None if resume is None else open_checkpoint(resume)
    first = 0 if checkpoint is None else checkpoint.manifest.step
    buffers = [name for name, _ in task.make().named_buffers()]
    store = torch.distributed.HashStore()
    batch = part.job.batch
    losses: dict[str, list[float]] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    saved: dict[str, list[Piece]] = {}
    failures: list[BaseException] = []
    done = threading.Barrier(len(made))

    def work(device: str) -> None:
        try:
            own = owned.get(device) or dataclasses.replace(pieces.pieces, blocks=copy.deepcopy(pieces.pieces.blocks))
            network = Channels(store, device, ways=made[device].ways)
            worker = Worker(
                made[device], own, pieces.draws, network, DEVICE, task.loss, task.get, buffers=buffers, initial=initial
            )
            if checkpoint is not None:
                load_state(worker, checkpoint, checkpoint.manifest.updates)
            results = [worker.step(s, range(s * batch, (s + 1) * batch)) for s in range(first, steps)]
            losses[device] = [result.loss for result in results]
            weights[device] = {
                name: parameter.detach().float().cpu().clone()
                for bucket in worker.buckets
                if bucket.resident
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
                if name not in bucket.cuts
            }
            saved[device] = saved_pieces(worker)
            done.wait(DEADLINE)  # others may still need this worker's relay
            if checked:
                _talked_directly(network, cluster)
            worker.close()
        except BaseException as failure:
            failures.append(failure)
            done.abort()

    threads = [threading.Thread(target=work, args=(device,), daemon=True) for device in made]
    for thread in threads:
        thread.start()
    until = monotonic() + DEADLINE
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            if failures:
                raise failures[0]
            assert monotonic() < until, "the workers wait for each other"
    everywhere = list(losses.values())
    assert all(each == everywhere[0] for each in everywhere)
    _agreed(weights, exact=all(sync.how != "duplicate" for sync in part.syncs))
    if folder is not None:
        parts = [write_part(folder, steps, f"worker-{i}", own) for i, own in enumerate(saved.values()) if own]
        header = Header.of(
            pieces.graph, step=steps, job=part.job, precision=part.precision, updates=steps, samples=steps * batch
        )
        finish(folder, parts, header)
    return Result(everywhere[0], _assembled(saved, pieces))


def _talked_directly(network: Channels, cluster: Cluster) -> None:
    """Every connection is inside a host, or between two that have a link."""
    for channel in network.channels:
        one, other = (cluster.devices[device].host for device in (channel.me, channel.near))
        assert one == other or cluster.link(one, other) is not None, f"{one} and {other} have no link"


def _assembled(saved: dict[str, list[Piece]], pieces: Cutting) -> dict[str, Tensor]:
    """Weights from what the workers would save: every element once."""
    graph = pieces.graph
    found = {parameter.name: torch.full((parameter.elements,), torch.nan) for parameter in graph.parameters}
    for piece in (piece for own in saved.values() for piece in own if piece.quantity == "weight"):
        whole = torch.arange(found[piece.parameter].numel()).view(piece.shape)
        if piece.cut is not None:
            sections = whole.split(piece.cut.sections, piece.cut.dim)
            parts = [section.chunk(piece.cut.members, piece.cut.dim)[piece.cut.member] for section in sections]
            whole = torch.cat(parts, piece.cut.dim)
        places = whole.reshape(-1)[piece.start : piece.start + piece.data.numel()]
        assert found[piece.parameter][places].isnan().all(), f"{piece.parameter} is saved twice"
        found[piece.parameter][places] = piece.data.float()
    assert not any(tensor.isnan().any() for tensor in found.values())
    return {name: tensor.view(graph.parameter[name].shape) for name, tensor in found.items()}


def _agreed(weights: dict[str, dict[str, Tensor]], *, exact: bool) -> None:
    """Whoever has a parameter has the same bits, unless everybody computed it alone."""
    found: dict[str, Tensor] = {}
    for device, own in weights.items():
        for name, tensor in own.items():
            if name in found:
                same = torch.equal if exact else partial(torch.allclose, rtol=1e-4, atol=1e-5)
                assert same(found[name], tensor), f"{name} differs on {device}"
            found[name] = tensor


def reference(task: Task, plan: Plan, steps: int) -> Result:
    """One process, the model as it is, gradients of the mean over the whole batch."""
    part = plan.parts[0]
    assert isinstance(part, Pipeline)
    settings, dtype = part.job.optimizer, DTYPES[part.precision]
    model = task.make().to(DEVICE)
    masters = dict(model.named_parameters())
    masks = _masks(model, part.job.sparsity)
    optimizer = _optimizer(settings, list(masters.values()))
    size = part.job.batch // part.micro_batches
    losses = []
    for step in range(steps):
        compute = copy.deepcopy(model).to(dtype) if dtype != torch.float32 else model
        total, count = 0.0, 0.0
        sums = {name: torch.zeros_like(p) for name, p in masters.items()}
        for m in range(part.micro_batches):
            numbers = range(step * part.job.batch + m * size, step * part.job.batch + (m + 1) * size)
            example, target = task.get(numbers)
            args = [v.to(DEVICE, dtype) if v.is_floating_point() else v.to(DEVICE) for v in example.args]
            kwargs = {name: v.to(DEVICE) for name, v in example.kwargs.items()}
            loss, n = task.loss(compute(*args, **kwargs), target.to(DEVICE))
            gradients = torch.autograd.grad(loss, list(compute.parameters()), allow_unused=True)
            for name, gradient in zip(masters, gradients, strict=True):
                if gradient is not None:
                    sums[name] += gradient.float()
            total, count = total + float(loss.detach()), count + float(n)
        for name, parameter in masters.items():
            parameter.grad = sums[name] / count * masks.get(name, 1.0)
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(list(masters.values()), settings.clip)
        optimizer.step()
        if compute is not model:
            for name, buffer in model.named_buffers():
                buffer.copy_(dict(compute.named_buffers())[name])
        losses.append(total / count)
    return Result(losses, {name: p.detach().cpu() for name, p in masters.items()})


def _masks(model: nn.Module, sparsity: float | None) -> dict[str, Tensor]:
    """Of each linear layer's weight that nothing else uses the largest are kept, by number; the rest is zero."""
    masks = {}
    users = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for name, weight in model.named_parameters() if sparsity else ():
        if id(weight) in linear and users[id(weight)] == 1:
            order = weight.detach().abs().flatten().sort(descending=True, stable=True).indices
            mask = torch.zeros(weight.numel(), device=weight.device)
            mask[order[: round((1 - (sparsity or 0.0)) * weight.numel())]] = 1.0
            masks[name] = mask.view(weight.shape)
            weight.data.mul_(masks[name])
    return masks


def _optimizer(settings: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if settings.name == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings.learning_rate, momentum=settings.momentum, weight_decay=settings.weight_decay
        )
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay)


def assert_same(found: Result, wanted: Result, tolerance: float = 1e-5) -> None:
    """Losses and final weights agree, relative to their size."""
    for step, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-3), f"loss of step {step}: {a} and {b}"
    assert found.weights.keys() == wanted.weights.keys()
    off = sum(float((found.weights[name] - tensor).double().square().sum()) for name, tensor in wanted.weights.items())
    size = sum(float(tensor.double().square().sum()) for tensor in wanted.weights.values())
    assert off**0.5 <= tolerance * size**0.5, f"weights are off by {(off / size) ** 0.5:.2e} of their length"
