"""One worker: its blocks, buckets and channels, and the step that ties them together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.cluster.spec import Precision
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.torch_export import Example
from isthmus.runtime.block_calls import BlockCalls
from isthmus.runtime.buckets import Bucket, Buckets, Served
from isthmus.runtime.comm.channel import ChannelError, Channels
from isthmus.runtime.comm.factor_exchange import TurnLine
from isthmus.runtime.comm.factors import make_factors
from isthmus.runtime.comm.relay import pass_on
from isthmus.runtime.comm.syncs import Ring, SyncMethod, make_sync
from isthmus.runtime.comm.totals import Totals
from isthmus.runtime.comm.unequal_groups import UnequalGroups
from isthmus.runtime.compiler import Compiler
from isthmus.runtime.executor import Executor, Hooks, Loss, WorkSpan
from isthmus.runtime.learning_rate import rate_factor
from isthmus.runtime.optimizer import LossScale, Updater
from isthmus.runtime.pace import Pace
from isthmus.runtime.placed_blocks import Draws, Placed, place
from isthmus.runtime.program import BucketSpec, Program, StageRun
from isthmus.runtime.random.randomness import Randomness
from isthmus.runtime.sharded_weights import Gatherer, Scatterer
from isthmus.runtime.weight_turns import stretch_parameters

__all__ = ["DTYPES", "Step", "Worker", "must_keep_order"]

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Get = Callable[[Sequence[int]], tuple[Example, Any]]


@dataclass(frozen=True)
class Step:
    """The result of a step: the mean loss over the whole batch, and the norm of its gradient if it was needed."""

    number: int
    loss: float
    norm: float | None
    skipped: bool  # gradients were not finite, so nothing was updated


class Worker:
    """Trains its part of a job, step by step, together with the other workers of the plan."""

    def __init__(
        self,
        program: Program,
        pieces: Pieces,
        draws: Draws,
        network: Channels,
        device: torch.device,
        loss: Loss,
        get: Get,
        *,
        buffers: Sequence[str] = (),
        initial: Mapping[str, Tensor] | None = None,
        slower: float = 1.0,
        compiler: Compiler | None = None,
    ) -> None:
        """Build the worker from its own `pieces`, in the plan's precision; `draws` are their random operations.

        `get` returns samples by their numbers. `buffers` names what a checkpoint keeps besides parameters (batch
        statistics). `initial` holds the model's parameters before they were rounded to 16 bits. `slower` is the factor
        by which computing is slowed down. `compiler` compiles the blocks.
        """
        self.program, self.graph, self.device, self.dtype = program, pieces.graph, device, DTYPES[program.precision]
        self.network, self._get, self._pace = network, get, Pace(slower)
        pass_on(network, (way[0] for way in program.ways.values()), program.carries)
        placed = place(program, pieces, draws, network, device, self._pace)
        modules = placed.modules
        parameters = {
            name: parameter
            for run in modules.values()
            for module in run
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        stretches = [stretch_parameters(run, pieces.graph) for run in program.runs]
        self.buckets = [
            Bucket(spec, parameters, program.device, placed.cuts, initial or {})
            for spec in program.buckets
            if spec.how is None or any(program.device in group for group in spec.groups)
        ]
        lines: dict[int, TurnLine] = {}
        for bucket in self.buckets:
            bucket.sync = self._sync(bucket.spec, placed, parameters, lines)
        used = {
            run.number: list(dict.fromkeys(name for names in found for name in names))
            for run, found in zip(program.runs, stretches, strict=True)
        }
        self._syncs = Buckets(self.buckets, self._served(), used, self._pace)
        self._gatherer = Gatherer(program, network, self.buckets, stretches)
        self._scatterer = Scatterer(program, self._syncs, self.buckets, stretches)
        own = {block for run in program.runs for block in range(run.first, run.last + 1)}
        randomness = Randomness(program.job.seed, pieces.graph, placed.draws, own)
        calls = BlockCalls(randomness, pieces, device, compiler)
        ordered = must_keep_order(program, pieces) or not all(bucket.resident for bucket in self.buckets)
        hooks = Hooks(watch=self, calls=calls, ordered=ordered, pace=self._pace)
        self.executor = Executor(program, pieces, modules, network, device, loss, hooks)
        self.updater = Updater(program.job.optimizer, self.buckets, pieces.graph)
        self._rate = rate_factor(program.job)
        self.scale = LossScale(used=program.precision == "fp16")
        self.totals = Totals(program, network)
        self._modules, self._buffers = modules, _homes(pieces, buffers)
        self._rest = pieces.rest if program.device == program.leader else {}

    def _sync(
        self, spec: BucketSpec, placed: Placed, parameters: Mapping[str, nn.Parameter], lines: dict[int, TurnLine]
    ) -> SyncMethod | None:
        if len({len(group) for group in spec.groups}) > 1:
            return UnequalGroups(spec, self.program, self.network, self.graph, placed.cuts)
        sync = make_sync(spec, self.program, self.network)
        if spec.how != "factors":
            return sync
        around = sync if isinstance(sync, Ring) and spec.layout != "replicated" else None
        return make_factors(spec, self.program, self.network, placed.modules, parameters, lines, around)

    def _served(self) -> list[Served]:
        """Return the buckets of which this worker is the root but no participant."""
        found = []
        for spec in self.program.buckets:
            if spec.how == "server" and self.program.device not in spec.members:
                sync = make_sync(spec, self.program, self.network)
                assert sync is not None
                elements = sum(self.graph.parameter[name].elements for name in spec.parameters)
                found.append(Served(spec.number, sync, elements, self.dtype, self.device))
        return found

    def step(self, number: int, samples: Sequence[int]) -> Step:
        """Make one update from the samples of the whole batch."""
        job = self.program.job
        self._pace.start()
        self.totals.begin()
        self._syncs.begin()
        self._gatherer.begin()
        self.executor.seed = self.scale.value / job.batch
        try:
            self.executor.step(number, samples, self._samples, self.totals.judged)
            self._syncs.wait()
        except ChannelError:
            if self._gatherer.failure is not None:  # it closed the channels, so that no worker waits for ever
                raise self._gatherer.failure from None
            raise
        self._gatherer.wait()
        total, count = self.totals.counts()
        count = count if count > 0.0 else 1.0  # nothing to learn from: gradients are zero
        factor = job.batch / (count * self.scale.value)
        norm, skipped = None, False
        if job.optimizer.clip is not None or self.scale.used:
            square = self.totals.sum(self.updater.square())
            norm = math.sqrt(square) * factor if math.isfinite(square) else math.inf
            skipped = self.scale.used and not math.isfinite(square)
            if job.optimizer.clip is not None:
                factor *= min(1.0, job.optimizer.clip / (norm + 1e-6))
        if not skipped:
            self._pace.start()
            self.updater.step(factor, self._rate(number))
            self._pace.keep()
            self._syncs.share()
        self.scale.follow(not skipped)
        return Step(number, total / count, norm, skipped)

    def _samples(self, numbers: Sequence[int]) -> tuple[Example, Any]:
        example, target = self._get(numbers)
        return (
            Example(
                args=tuple(self._on(value) for value in example.args),
                kwargs={key: self._on(value) for key, value in example.kwargs.items()},
            ),
            target.to(self.device) if isinstance(target, Tensor) else target,
        )

    def _on(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, self.dtype) if value.is_floating_point() else value.to(self.device)

    def all_buffers(self) -> dict[str, Tensor]:
        """Return the tensors besides trained parameters that this worker holds and that belong in a checkpoint."""
        return self._rest | {
            name: tensor
            for modules in self._modules.values()
            for module in modules
            for name, tensor in (*module.named_buffers(), *module.named_parameters())
            if name in self._buffers
        }

    def own_buffers(self) -> dict[str, Tensor]:
        """Return those of `all_buffers` that this worker saves; the first replica of a stage saves its buffers."""
        return self._rest | {
            name: tensor
            for index, run in enumerate(self.program.runs)
            for (first, last), saves in zip(run.ranges, run.saves, strict=True)
            if saves
            for module in self._modules[index]
            for name, tensor in (*module.named_buffers(), *module.named_parameters())
            if name in self._buffers and first <= self._buffers[name] <= last
        }

    def record(self) -> None:
        """Start to record what is done when, and drop earlier records."""
        self.executor.spans, self._syncs.spans = [], []

    @property
    def spans(self) -> list[WorkSpan]:
        """Return the spans of work done since `record` was called."""
        return [*(self.executor.spans or ()), *(self._syncs.spans or ())]

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent to all other workers since the beginning."""
        return self.network.bytes_sent

    # -- calls from the executor

    def before(self, run: StageRun, stretch: int, backward: bool) -> None:
        """Provide the weights of a stretch and, for a backward, memory for its gradients."""
        self._pace.keep()
        self._gatherer.before(run, stretch)
        if backward:
            self._scatterer.before(run, stretch)
        self._pace.start()

    def after(self, run: StageRun, stretch: int, backward: bool) -> None:
        """Release the weights of a stretch and, after a backward, sum its gradients."""
        self._pace.keep()
        self._gatherer.after(run, stretch)
        if backward:
            self._scatterer.after(run, stretch)

    def final(self, run: StageRun, begins: bool) -> None:
        """Tell the buckets that the last backward of a run begins or has ended."""
        self._syncs.final(run, begins)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in weights that will be dropped."""
        return self._gatherer.holds(tensor)

    def close(self) -> None:
        """End all threads and channels."""
        for part in (self._syncs, self._gatherer, self.totals, self.executor, self.network):
            part.close()


def _homes(pieces: Pieces, names: Sequence[str]) -> dict[str, int]:
    """Return the first block that holds each of these tensors; an untrained tensor may be in several blocks."""
    homes: dict[str, int] = {}
    for index, block in enumerate(pieces.blocks):
        for name, _ in (*block.named_buffers(), *block.named_parameters()):
            homes.setdefault(name, index)
    return {name: homes[name] for name in names if name in homes}


def must_keep_order(program: Program, pieces: Pieces) -> bool:
    """Return whether other workers run the same actions side by side and meet midway, so that none may be overtaken."""
    mixing = [index for index, block in enumerate(pieces.graph.blocks) if block.statistics]
    return any(
        len(run.group) > 1
        or any(
            len(replicas) > 1 and first <= block <= last
            for (first, last), replicas in zip(run.ranges, run.replicas, strict=True)
            for block in mixing
        )
        for run in program.runs
    )
