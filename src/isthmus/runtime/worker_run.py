"""The life of one worker: create its model, data and channels; step, save, and report the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import FileStore

from isthmus.errors import ModelError, PlanError
from isthmus.model import source
from isthmus.model.built import BuiltModel
from isthmus.model.job import Job
from isthmus.model.runnable_blocks import Pieces, cut
from isthmus.model.single_sample import check_single_sample
from isthmus.model.torch_export import Example
from isthmus.plan.types import Pipeline
from isthmus.runtime.checkpoint.manifest import SavedScale
from isthmus.runtime.checkpoint.reading import open_checkpoint
from isthmus.runtime.checkpoint.saving import Saver
from isthmus.runtime.checkpoint.worker_state import load_state, saved_pieces
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.compiler import Compiler
from isthmus.runtime.data.sample_order import SampleOrder
from isthmus.runtime.data.sources import open_samples
from isthmus.runtime.loss import CheckedLoss, open_loss
from isthmus.runtime.process_memory import keep_freed_memory, peak_bytes, share_freed_memory, start_peak
from isthmus.runtime.program import Program
from isthmus.runtime.protocol import STOP, Done, Event, Measured, Ready, Saving, Start, Stepped, Traffic, Wrote
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.starting_weights import StartingWeights
from isthmus.runtime.worker import DTYPES, Step, Worker

if TYPE_CHECKING:
    from isthmus.runtime.worker_process import Mailbox

__all__ = [
    "WorkerRun",
    "build_model",
    "cast_example",
    "cast_module",
    "check_hooks",
    "cut_model",
    "kept_buffers",
    "release_unused",
]

_TRAFFIC = 0.5  # seconds between two reports of bytes sent


class WorkerRun:
    """One worker of a run; `step` is its present step (None: before the first)."""

    def __init__(self, start: Start, tell: Callable[[Event], None], mailbox: Mailbox, offset: float) -> None:
        """Take the order; `offset` is the parent's clock minus ours, in seconds."""
        self.order, self.program, self.tell, self._offset = start.order, start.order.program, tell, offset
        self.step: int | None = None
        self._place, self._mailbox = start.place, mailbox
        self._leads = self.program.device == self.program.leader
        self._updates = start.order.first
        self._next_traffic = 0.0
        folder = start.order.folder
        self._saver = Saver(Path(folder), self.program.device, start.order.run) if folder is not None else None

    def run(self) -> None:
        """Run from the first step to the last, or to the one after which all workers are told to stop."""
        worker, order = self._made(), self.order
        self.tell(Ready())
        for number in range(order.first, order.stop):
            self.step = number
            self._stepped(worker, number)
            ends = number + 1 == order.stop or worker.totals.command == STOP
            if ends or (order.every and (number + 1) % order.every == 0):
                self._save(worker, number + 1)
            self._tell_saved(wait=ends)
            if ends:
                break
        self.tell(Done(sent=worker.bytes_sent, memory=peak_bytes(worker.device), spans=self._spans(worker)))

    # -- before the first step

    def _made(self) -> Worker:
        share_freed_memory()
        torch.set_num_threads(self._place.threads)
        device = torch.device(self._place.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        built, loss = build_model(self.program.job)
        weights = None
        if self.program.job.weights is not None and self.order.resume is None:
            weights = StartingWeights(Path(self.program.job.weights))
            weights.load(built.module, self._held(built.module))
        loss.micro_batch = self.program.micro_batch
        if _splits(self.program) and not self.program.job.trust_independent_samples:
            check_hooks(built.module, "the plan splits the batch, and each part's gradient would be changed by itself")
        job = self.program.job
        example = cast_example(built.example(2), DTYPES[self.program.precision])
        initial = {name: parameter.detach() for name, parameter in built.module.named_parameters()}
        pieces = cut_model(built.module, example, self.program, self.order.model, built.sequence, measure=False)
        if weights is not None:  # no bucket has the parameters that no loss can reach, but the model may read them
            weights.load(built.module, pieces.graph.unreached)
        samples = open_samples(job, built)
        self._numbers = SampleOrder(seed=job.seed, count=samples.count)
        compiler = Compiler() if job.compile else None
        if compiler is not None:
            loss.compile(compiler.code)
        network = Channels(
            FileStore(self._place.store), self.program.device, interface=self._place.interface, nccl=self._place.nccl,
            ways=self.program.ways,
        )  # fmt: skip
        worker = Worker(
            self.program, pieces, draws_of(pieces, example), network, device, loss, samples.get,
            buffers=kept_buffers(built.module, pieces.graph.unreached), initial=initial, slower=self._place.slower,
            compiler=compiler,
        )  # fmt: skip
        release_unused(built.module.named_parameters(), worker)
        if self.order.resume is not None:
            self._resume(worker, Path(self.order.resume))
        network.connect()
        start_peak(device)
        keep_freed_memory()
        if self._leads:
            self._mailbox.deliver(worker.totals.ask)
        return worker

    def _held(self, module: torch.nn.Module) -> set[str]:
        """Return the names of the trained parameters that this worker has, and of everything that is not trained."""
        own = {name for bucket in self.program.buckets for name in bucket.parameters}
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        return own | {name for name in module.state_dict() if name not in trained}

    def _resume(self, worker: Worker, path: Path) -> None:
        checkpoint = open_checkpoint(path)  # whoever chose it has verified the hashes
        self._updates = checkpoint.manifest.updates
        load_state(worker, checkpoint, self._updates)

    # -- a step

    def _stepped(self, worker: Worker, number: int) -> None:
        began = perf_counter()
        if self.order.record:
            worker.record()
        result: Step = worker.step(number, self._numbers.numbers(number, self.program.job.batch))
        self._updates += not result.skipped
        if perf_counter() > self._next_traffic:
            self._next_traffic = perf_counter() + _TRAFFIC
            self.tell(Traffic(sent=worker.bytes_sent))
        if self._leads:
            self.tell(
                Stepped(
                    step=number,
                    loss=_finite(result.loss),
                    norm=_finite(result.norm),
                    seconds=perf_counter() - began,
                    skipped=result.skipped,
                )
            )

    def _save(self, worker: Worker, step: int) -> None:
        if self._saver is None:
            return
        if self._leads:
            scale = SavedScale(value=worker.scale.value, steps=worker.scale.good) if worker.scale.used else None
            self.tell(Saving(step=step, updates=self._updates, loss_scale=scale))
        pieces = saved_pieces(worker)
        if pieces:
            self._saver.save(step, pieces)
        else:
            self.tell(Wrote(step=step, part=None))

    def _tell_saved(self, *, wait: bool) -> None:
        if self._saver is not None:
            for saved in self._saver.saved(wait=wait):
                self.tell(Wrote(step=saved.step, part=saved.part))

    # -- after the last

    def _spans(self, worker: Worker) -> tuple[Measured, ...]:
        runs = {run.number: _stages(run.stages) for run in self.program.runs}
        buckets = {spec.number: spec.name for spec in self.program.buckets}
        return tuple(
            Measured(
                what=span.what,
                label=(buckets if span.what == "sync" else runs)[span.run],
                micro_batch=span.micro_batch,
                begin=span.begin + self._offset,
                end=span.end + self._offset,
            )
            for span in worker.spans
        )


def _stages(numbers: Sequence[int]) -> str:
    """Return the name of a run's stages as the simulator writes it."""
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}-{numbers[-1]}"


def build_model(job: Job) -> tuple[BuiltModel, CheckedLoss]:
    """Return the job's model, with the weights that its seed gives, and its loss.

    This runs the code that the job names.
    """
    torch.manual_seed(job.seed)
    built = source.build(job.model, job.sequence, job.frozen)
    return built, open_loss(job, built)


def cut_model(
    module: torch.nn.Module,
    example: Example,
    part: Pipeline | Program,
    digest: str,
    sequence: int | None,
    *,
    measure: bool,
) -> Pieces:
    """Cut the model, in the plan's precision, into the blocks for which the plan was made; `measure` as in `cut`."""
    if part.job.batch == 1:
        check_single_sample(module, example)
    pieces = cut(
        cast_module(module, DTYPES[part.precision]), example, name=part.job.name, sequence=sequence, measure=measure
    )
    if digest and pieces.graph.digest != digest:
        raise PlanError(
            "model-digest",
            "the model is not the one that the plan was made for: its code has changed since",
            where=part.job.model,
            found=f"{len(pieces.graph.blocks)} blocks with the digest {pieces.graph.digest[:12]}",
            expected=f"the digest {digest[:12]}",
            next="Plan again",
        )
    return pieces


def cast_module(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Cast all real tensors of the module to one dtype.

    Complex buffers stay as they are; complex trained parameters are refused.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise ModelError(
                "a trained parameter is complex",
                where=f"parameter {name}",
                found=str(parameter.dtype).removeprefix("torch."),
                expected="real parameters",
                next="Keep the real and the imaginary part as the last dimension, and use torch.view_as_complex",
            )

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module._apply(cast)  # type: ignore[no-untyped-call, no-any-return]


def check_hooks(module: torch.nn.Module, why: str) -> None:
    """Refuse trained parameters whose gradients a hook may change; `why` says what would happen to them."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise ModelError(
                f"a hook is registered on a parameter, and {why}",
                where=f"parameter {name}",
                found="register_hook or register_post_accumulate_grad_hook",
                expected="parameters without hooks",
                next="Change the gradient inside the forward, on a tensor of the samples; for clipping say clip in the "
                "job; or plan with one replica and one micro-batch (--fix dp=1,micro=1)",
            )


def _splits(program: Program) -> bool:
    """Return whether the gradient of any parameter is the sum of several gradients."""
    parts = (run.slices > 1 or len(run.group) > 1 or run.hi - run.lo < program.micro_batch for run in program.runs)
    return program.micro_batches > 1 or any(parts)


def cast_example(example: Example, dtype: torch.dtype) -> Example:
    """Cast all real example inputs to one dtype."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return Example(
        args=tuple(map(cast, example.args)), kwargs={key: cast(value) for key, value in example.kwargs.items()}
    )


def kept_buffers(module: torch.nn.Module, unreached: Sequence[str]) -> list[str]:
    """Return the buffers in the model's state, and the parameters that are not trained (frozen or unused)."""
    state = module.state_dict(keep_vars=True)
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad or name in unreached]
    return [*(name for name, _ in module.named_buffers() if name in state), *frozen]


def release_unused(parameters: Iterable[tuple[str, torch.nn.Parameter]], worker: Worker) -> None:
    """Release the memory of weights that other workers hold, even if something still refers to them."""
    used = {id(parameter) for bucket in worker.buckets for parameter in bucket.parameters}
    for name, parameter in parameters:
        if parameter.requires_grad and id(parameter) not in used and name not in worker.graph.unreached:
            parameter.data = parameter.data.new_empty(0)


def _finite(number: float | None) -> float | None:
    """Return the number, or None if it is not finite, which JSON cannot express."""
    return number if number is not None and math.isfinite(number) else None
