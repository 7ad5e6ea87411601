"""Train a plan from a loop of your own: its workers are threads of this process, stepped one batch at a time.

Nothing is started, sent or pickled: the module is the caller's own object, copied once for each worker. In exchange
all workers share one interpreter and one machine: their Python code takes turns, torch's kernels run side by side.
"""

from __future__ import annotations

import copy
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import HashStore
from torch.utils import _pytree as pytree

from isthmus.cluster.spec import Cluster
from isthmus.deploy.training import failure
from isthmus.errors import PlanError, RunError, UsageError
from isthmus.model.runnable_blocks import Pieces
from isthmus.model.torch_export import Example
from isthmus.plan.resolve import Resolved, resolve
from isthmus.plan.types import Pipeline, Plan
from isthmus.plan.validate import check
from isthmus.runtime.checkpoint.folder_lock import lock_folder
from isthmus.runtime.checkpoint.manifest import MANIFEST, Header, SavedScale
from isthmus.runtime.checkpoint.reading import Checkpoint, assemble, newest_whole, open_checkpoint
from isthmus.runtime.checkpoint.saving import Piece, finish, write_part
from isthmus.runtime.checkpoint.tensor_file import writing
from isthmus.runtime.checkpoint.worker_state import load_state, saved_pieces
from isthmus.runtime.comm.channel import ChannelError, Channels
from isthmus.runtime.data.datasets import described
from isthmus.runtime.loss import CheckedLoss
from isthmus.runtime.program import Program, programs
from isthmus.runtime.random.draws import draws_of
from isthmus.runtime.worker import DTYPES, Worker
from isthmus.runtime.worker_process import failed
from isthmus.runtime.worker_run import cast_example, check_hooks, cut_model, kept_buffers

__all__ = ["Joined"]

T = TypeVar("T")
_PATIENCE = 2.0  # seconds to wait for a more informative error than a lost channel


class Joined:
    """A plan that is being trained; a context manager.

    Workers are created at the first batch, which shows the form of the model's inputs. `step_number` counts the steps
    done. An error or an interrupt inside a worker's task closes the run, because its workers are no longer at the same
    point.
    """

    def __init__(
        self,
        plan: Plan,
        part: Pipeline,
        cluster: Cluster,
        model: nn.Module,
        loss: Callable[[Any, Any], Any],
        *,
        sequence: int | None = None,
        resume: Path | None = None,
    ) -> None:
        """Prepare the run; `loss(output, targets)` returns the sum of the losses and how many were summed."""
        self.plan, self.job, self.cluster = plan, part.job, cluster
        self.step_number = 0
        check_hooks(model, "each worker trains a copy of the model, which has no hooks")
        self._part, self._model, self._sequence = part, model, sequence
        self._loss = CheckedLoss(loss, "the loss given to join", part.job.batch // part.micro_batches)
        self._checkpoint = _opened(resume) if resume is not None else None
        self._updates = 0
        self._batch: tuple[Example, Any] | None = None
        self._crew: _Crew | None = None
        self._closed: str | None = None  # why it is closed
        self._run = secrets.token_hex(8)
        self._folders: dict[Path, ExitStack] = {}  # folders that it has saved to, which stay locked until it is closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def step(self, batch: tuple[Any, Any]) -> float:
        """Make one update from `(inputs, targets)` of the whole job's batch, and return the mean loss before it.

        Inputs are a tensor, or a tuple or dict of tensors as the module takes them, batch first. Targets are None, or
        tensors, batch first, in any tuples, lists and dicts that the loss takes.
        """
        inputs, targets = batch
        example = Example.of(inputs)
        self._check_batch("inputs", (*example.args, *example.kwargs.values()))
        if targets is not None:
            self._check_batch("targets", pytree.tree_leaves(targets))
        self._batch = (example, targets)
        crew = self._ready()
        number, size = self.step_number, self.job.batch
        with self._closing():
            results = crew.all(lambda worker: worker.step(number, range(number * size, (number + 1) * size)), number)
            result = results[crew.leader]
            self.step_number, self._updates = number + 1, self._updates + (not result.skipped)
        return result.loss

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights (in fp32) and buffers under the model's names, for `model.load_state_dict(...)`."""
        crew = self._ready()
        with self._closing():
            pieces = [piece for found in crew.all(saved_pieces, self.step_number).values() for piece in found]
        by_name: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.quantity in ("weight", "buffer"):
                by_name.setdefault(piece.parameter, []).append(piece)
        state = {name: assemble(found) for name, found in by_name.items()}
        return state | {other: state[name] for other, name in _other_names(self._model).items() if name in state}

    def save(self, folder: str | Path) -> Path:
        """Write a checkpoint as `isthmus train --checkpoint` does, and return its path.

        `resume` and `isthmus train --resume` read it. No other run can save to the folder until this one is closed.
        """
        crew, step = self._ready(), self.step_number
        self._own(Path(folder).absolute())

        def write(worker: Worker) -> Any:
            pieces = saved_pieces(worker)
            return write_part(Path(folder), step, worker.program.device, pieces, run=self._run) if pieces else None

        with self._closing():
            parts = [part for part in crew.all(write, step).values() if part is not None]
            scale = crew.all(lambda worker: worker.scale, step)[crew.leader]
        header = Header.of(
            crew.graph,
            step=step,
            job=self.job,
            precision=self._part.precision,
            updates=self._updates,
            samples=step * self.job.batch,
            loss_scale=SavedScale(value=scale.value, steps=scale.good) if scale.used else None,
            run=self._run,
        )
        return finish(Path(folder), parts, header)

    def close(self) -> None:
        """End all threads. The weights that they trained are gone with them."""
        self._closed = self._closed or "the run was closed"
        while self._folders:
            self._folders.popitem()[1].close()
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def _own(self, folder: Path) -> None:
        """Lock a folder of checkpoints, unless this run already has."""
        if folder not in self._folders:
            with writing(folder, next="Name a folder that can be written to"):
                folder.mkdir(parents=True, exist_ok=True)
            held = ExitStack()
            held.enter_context(lock_folder(folder, self._run))
            self._folders[folder] = held

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the run if the body of the context fails or is interrupted."""
        try:
            yield
        except BaseException as error:
            self._closed = f"the run was closed when it failed ({type(error).__name__})"
            self.close()
            raise

    # -- setting up

    def _ready(self) -> _Crew:
        if self._closed:
            raise UsageError(self._closed, next="Join the plan again; `resume` continues from what was saved")
        if self._crew is None:
            if self._batch is None:
                raise UsageError("nothing was trained yet", next="Call step(batch) first")
            with self._closing():
                self._crew = self._started(self._batch[0])
                if self._checkpoint is not None:
                    self._load(self._crew, self._checkpoint)
        return self._crew

    def _started(self, example: Example) -> _Crew:
        few = cast_example(_rows(example, 0, min(2, self.job.batch)), DTYPES[self._part.precision])
        source = _Source(self._model, few, self._part, self._sequence)
        models = {self.job.name: source.pieces.graph}
        check(self.plan, self.cluster, models)
        made = programs(self.plan, self.cluster, models)
        places = {device: _device(index) for index, device in enumerate(made)}
        _check_meetings(resolve(self.plan, self.cluster, models), places)
        return _Crew(made, places, source, self._loss, self._samples)

    def _load(self, crew: _Crew, checkpoint: Checkpoint) -> None:
        manifest = checkpoint.manifest
        checkpoint.fits(crew.graph)
        state = self._model.state_dict()
        buffers = {name: tuple(state[name].shape) for name in kept_buffers(self._model, crew.graph.unreached)}
        notes = checkpoint.differences(crew.graph, self._part.precision, self.job.optimizer)
        for note in (*notes, *checkpoint.compare_buffers(buffers)):
            warnings.warn(note, stacklevel=5)
        self.step_number, self._updates = manifest.step, manifest.updates
        crew.all(lambda worker: load_state(worker, checkpoint, manifest.updates), manifest.step)

    def _samples(self, numbers: Sequence[int]) -> tuple[Example, Any]:
        """Return the inputs and targets of these samples of the present batch; `numbers` must be consecutive."""
        assert self._batch is not None
        example, targets = self._batch
        low = numbers[0] - self.step_number * self.job.batch
        high = low + len(numbers)
        return _rows(example, low, high), pytree.tree_map_only(Tensor, lambda tensor: tensor[low:high], targets)

    def _check_batch(self, what: str, values: Iterable[Any]) -> None:
        """Raise UsageError unless all values are tensors of the job's batch size: each replica takes some rows."""
        values = list(values)
        if any(not isinstance(value, Tensor) or not value.ndim for value in values) or not values:
            raise UsageError(
                f"the {what} of a batch must be tensors whose first dimension counts the samples",
                found=", ".join(dict.fromkeys(map(described, values))) or "none",
                expected=f"tensors of {self.job.batch} samples",
                next="Let the module or the loss itself hold what is the same for all samples",
            )
        if (sizes := {len(value) for value in values}) != {self.job.batch}:
            raise UsageError(
                f"the {what} are not the job's batch: no plan changes how many samples a step has",
                found=f"{', '.join(map(str, sorted(sizes)))} samples",
                expected=f"{self.job.batch}",
            )


class _Source:
    """The source of every worker's own copy of its blocks."""

    def __init__(self, model: nn.Module, example: Example, part: Pipeline, sequence: int | None) -> None:
        self._model, self._example, self._part, self._sequence = model, example, part, sequence
        self.pieces = self._cut()
        self.draws = draws_of(self.pieces, example)
        self.buffers = kept_buffers(model, self.pieces.graph.unreached)
        self.initial = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for block in self.pieces.blocks:  # what the tracer noted cannot be copied
            for node in block.graph.nodes if isinstance(block, fx.GraphModule) else ():
                node.meta.clear()

    def copy(self, program: Program) -> Pieces:
        """Return copies of the blocks of the program's runs, with ties kept.

        Members of a tensor group get blocks cut from another copy of the model.
        """
        if any(len(run.group) > 1 for run in program.runs):
            return self._cut()
        blocks = {b: self.pieces.blocks[b] for run in program.runs for b in range(run.first, run.last + 1)}
        own = copy.deepcopy(blocks)
        return replace(self.pieces, blocks=tuple(own.get(b, block) for b, block in enumerate(self.pieces.blocks)))

    def _cut(self) -> Pieces:
        module, digest = copy.deepcopy(self._model), self._part.model_digest
        return cut_model(module, self._example, self._part, digest, self._sequence, measure=True)


class _Crew:
    """The workers as threads that all do the same task and answer."""

    def __init__(
        self,
        made: Mapping[str, Program],
        places: Mapping[str, torch.device],
        source: _Source,
        loss: Callable[[Any, Any], tuple[Tensor, Tensor]],
        get: Callable[[Sequence[int]], tuple[Example, Any]],
    ) -> None:
        self.programs, self.graph = made, source.pieces.graph
        self.leader = next(iter(made.values())).leader
        self._networks: dict[str, Channels] = {}
        self._tasks: dict[str, SimpleQueue[Any]] = {device: SimpleQueue() for device in made}
        self._answers: SimpleQueue[tuple[str, Any, BaseException | None]] = SimpleQueue()
        self._threads = []
        store = HashStore()
        try:
            own = {device: source.copy(program) for device, program in made.items()}  # torch.export wants one thread
            for device in made:
                self._networks[device] = Channels(store, device, ways=made[device].ways)
                make = partial(self._made, device, places[device], own.pop(device), source, loss, get)
                thread = threading.Thread(target=self._work, args=(device, make), name=device, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._collect(None)
        except BaseException:
            self.close()
            raise

    def all(self, task: Callable[[Worker], T], step: int) -> dict[str, T]:
        """Run the task on every worker and return what each returned, by device."""
        for tasks in self._tasks.values():
            tasks.put(task)
        return self._collect(step)

    def close(self) -> None:
        """Close the channels, which wakes every worker that waits for a message, then join the threads."""
        for tasks in self._tasks.values():
            tasks.put(None)
        for network in self._networks.values():
            network.close()
        deadline = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _made(self, device: str, place: torch.device, pieces: Pieces, source: _Source, loss: Any, get: Any) -> Worker:
        network, program = self._networks[device], self.programs[device]

        def here(numbers: Sequence[int]) -> tuple[Example, Any]:
            example, targets = get(numbers)
            return example, pytree.tree_map_only(Tensor, lambda tensor: tensor.to(place), targets)

        return Worker(
            program, pieces, source.draws, network, place, loss, here,
            buffers=source.buffers, initial=source.initial,
        )  # fmt: skip

    def _work(self, device: str, make: Callable[[], Worker]) -> None:
        with ExitStack() as stack:
            try:
                worker = make()
                stack.callback(worker.close)
                worker.network.connect()
                self._answers.put((device, None, None))
                while (task := self._tasks[device].get()) is not None:
                    self._answers.put((device, task(worker), None))
            except BaseException as error:  # reported before closing the channels makes other workers fail too
                self._answers.put((device, None, error))

    def _collect(self, step: int | None) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        while len(answers) < len(self.programs):
            device, answer, error = self._answers.get()
            if error is not None:
                raise self._reason(device, error, step)
            answers[device] = answer
        return answers

    def _reason(self, device: str, error: BaseException, step: int | None) -> RunError:
        """Return the first error that is not just a lost channel, if one comes in time."""
        deadline = time.monotonic() + _PATIENCE
        while isinstance(error, ChannelError) and (left := deadline - time.monotonic()) > 0:
            try:
                other, _, found = self._answers.get(timeout=left)
            except Empty:
                break
            if found is not None and not isinstance(found, ChannelError):
                device, error = other, found
        raised = failure(self.programs[device], failed(error, step))
        raised.__cause__ = error
        return raised


def _check_meetings(resolved: Resolved, places: Mapping[str, torch.device]) -> None:
    """Raise PlanError if workers that meet in the backward pass would share a CUDA device.

    Such workers (tensor groups, batch statistics over replicas) wait for each other's sums in the backward pass. A
    process has one backward thread for each CUDA device, so a worker that waits on it would block the one that it waits
    for.
    """
    seen: dict[torch.device, str] = {}
    for part, stage in ((p, stage) for p in resolved.pipelines for stage in p.stages):
        blocks = part.graph.blocks[stage.first : stage.last + 1]
        mixes = len(stage.replicas) > 1 and not stage.duplicate and any(block.statistics for block in blocks)
        for index in (d for r in stage.replicas if mixes or len(r.devices) > 1 for d in r.devices):
            device = resolved.devices[index].name
            place = places[device]
            if place.type == "cuda" and seen.setdefault(place, device) != device:
                raise PlanError(
                    "run",
                    "workers that meet in the backward pass cannot share a CUDA device as threads of one process",
                    where=f"pipeline {part.pipeline.job.name}, stage {blocks[0].name} .. {blocks[-1].name}",
                    found=f"{seen[place]} and {device} on {place}",
                    expected="a CUDA device for each member of a tensor group, and for each replica with batch norm",
                    next="Use `isthmus train`: it runs workers as processes, which can share one",
                )


def _other_names(model: nn.Module) -> dict[str, str]:
    """Return a map from every further name of a tensor in the model's state to its first name."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {other: name for other, name in names.items() if other != name}


def _opened(path: Path) -> Checkpoint:
    """Open the checkpoint, or the newest complete one in a folder of them, and check the hash of every byte."""
    found, refused = (None, []) if (path / MANIFEST).exists() else newest_whole(path)
    for damaged in refused:
        warnings.warn(f"skipping a damaged checkpoint: {damaged.error}", stacklevel=4)
    return found or open_checkpoint(path, verify=True)


def _device(index: int) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device(f"cuda:{index % count}" if count else "cpu")


def _rows(example: Example, low: int, high: int) -> Example:
    return Example(
        args=tuple(value[low:high] for value in example.args),
        kwargs={key: value[low:high] for key, value in example.kwargs.items()},
    )
