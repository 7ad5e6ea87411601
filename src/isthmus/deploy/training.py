"""Run a plan: send workers their orders, follow their events, finish checkpoints, and report one error on failure."""

from __future__ import annotations

import secrets
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from isthmus.cost.timeline import Timeline
from isthmus.deploy.engine import (
    CheckpointKept,
    CheckpointPassedOver,
    Ended,
    Engine,
    Garbled,
    Interrupt,
    Notice,
    Resumed,
    Running,
    Silent,
)
from isthmus.deploy.worker_timeline import measured_timeline
from isthmus.errors import CheckpointError, RunError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.runtime.checkpoint.manifest import Header, PartInfo
from isthmus.runtime.program import Program
from isthmus.runtime.protocol import STOP, Done, Failed, Ready, Saving, StepOrder, Stepped, Wrote

if TYPE_CHECKING:
    from isthmus.runtime.checkpoint.reading import Checkpoint

__all__ = ["Listener", "RunResult", "RunSettings", "failure", "train"]

Listener = Callable[[Notice], None]
_LAST_WORDS = 2.0  # seconds
_PATIENCE = (0.0, 0.5, 5.0)  # seconds to wait for a better reason, by the rank of the one known


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run.

    `stop` counts steps of the whole training, including those before a resumed checkpoint. `every` is the number of
    steps between two checkpoints, and `keep` is how many checkpoints stay.
    """

    stop: int
    folder: Path | None = None
    every: int | None = None
    keep: int = 2
    resume: bool = False
    export: Path | None = None  # where to write the weights at the end
    record: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. All fields but `last_step` cover this run only."""

    last_step: int  # number of steps of the whole training, including those before a resumed checkpoint
    losses: tuple[float | None, ...]  # None: not a finite number
    seconds: tuple[float, ...]
    bytes_sent: int
    memory: Mapping[str, int]  # peak bytes, by worker
    workers: tuple[str, ...]
    checkpoint: Path | None
    interrupted: bool
    timeline: Timeline | None  # of the last step, as measured, if it was recorded
    predicted_step_seconds: float | None = None

    @property
    def steps(self) -> int:
        """Return how many steps this run made."""
        return len(self.losses)

    @property
    def loss(self) -> float | None:
        """Return the loss of the last step; None if there was no step or the loss was not a finite number."""
        return self.losses[-1] if self.losses else None

    @property
    def step_seconds(self) -> float | None:
        """Return the median step time in seconds.

        If there are several steps, the first is left out, because it also creates connections and buffers.
        """
        return statistics.median(self.seconds[1:] or self.seconds) if self.seconds else None


def train(
    programs: Mapping[str, Program], graph: BlockGraph, engine: Engine, settings: RunSettings, listen: Listener
) -> RunResult:
    """Run the workers of one job to the end, or to the step after which they are interrupted.

    The first interrupt (Ctrl-C, SIGTERM) saves, if there is a folder, and stops after the present step. The second ends
    everything at once with KeyboardInterrupt.
    """
    if settings.export is None:
        return _trained(programs, graph, engine, settings, listen)
    from isthmus.runtime.checkpoint.reading import export, open_checkpoint

    with tempfile.TemporaryDirectory(prefix="isthmus-") as name:
        aside = settings if settings.folder is not None else replace(settings, folder=Path(name))
        result = _trained(programs, graph, engine, aside, listen)
        assert result.checkpoint is not None
        export(open_checkpoint(result.checkpoint, verify=True), settings.export)
    return result if settings.folder is not None else replace(result, checkpoint=None)


def _trained(
    programs: Mapping[str, Program], graph: BlockGraph, engine: Engine, settings: RunSettings, listen: Listener
) -> RunResult:
    run = secrets.token_hex(8)
    with _own_folder(settings.folder, run):
        return _followed(programs, graph, engine, settings, listen, run)


@contextmanager
def _own_folder(folder: Path | None, run: str) -> Iterator[None]:
    """Create the folder of checkpoints and lock it against other runs."""
    if folder is None:
        yield
        return
    from isthmus.runtime.checkpoint.folder_lock import lock_folder

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            "checkpoints cannot be written there",
            where=str(folder),
            found=str(error.strerror),
            expected="a folder that can be written, or one that can be made",
        ) from error
    with lock_folder(folder, run):
        yield


def _followed(
    programs: Mapping[str, Program],
    graph: BlockGraph,
    engine: Engine,
    settings: RunSettings,
    listen: Listener,
    run: str,
) -> RunResult:
    first, resumed = _begin(next(iter(programs.values())), graph, settings, listen)
    orders = {
        device: StepOrder(
            program=program,
            model=graph.digest,
            first=first,
            stop=settings.stop,
            folder=None if settings.folder is None else str(settings.folder.absolute()),
            run=run,
            every=settings.every,
            resume=None if resumed is None else str(resumed.absolute()),
            record=settings.record,
        )
        for device, program in programs.items()
    }
    if first >= settings.stop:
        return _Run(programs, graph, settings, listen, resumed, run).result(first)
    with engine.start(orders) as running:
        followed = _Run(programs, graph, settings, listen, resumed, run)
        with _interrupts(running):
            followed.follow(running)
        return followed.result(first)


def _begin(program: Program, graph: BlockGraph, settings: RunSettings, listen: Listener) -> tuple[int, Path | None]:
    """Return the first step and the checkpoint to resume from, after removing what an ended run left unfinished."""
    from isthmus.runtime.checkpoint.reading import clear
    from isthmus.runtime.checkpoint.saving import saved_folders

    if settings.folder is None:
        return 0, None
    there = saved_folders(settings.folder)  # damaged ones too: somebody may repair them
    if there and not settings.resume:
        raise CheckpointError(
            "there is a checkpoint already",
            where=str(there[0]),
            expected="an empty folder",
            next="Continue from it with --resume, or name another folder",
        )
    clear(settings.folder)
    checkpoint = _newest(settings.folder, listen) if settings.resume else None
    if checkpoint is None:
        return 0, None
    checkpoint.fits(graph)
    _check_same_job(checkpoint, program.job)
    saved = checkpoint.manifest
    notes = checkpoint.differences(graph, program.precision, program.job.optimizer)
    if graph.buffers or checkpoint.names("buffer"):
        notes += checkpoint.compare_buffers(_buffers(program.job, graph))
    listen(Notice("", Resumed(step=saved.step, path=checkpoint.path, notes=notes)))
    return saved.step, checkpoint.path


def _buffers(job: Job, graph: BlockGraph) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the model keeps besides trained parameters."""
    import torch

    from isthmus.model import source
    from isthmus.runtime.worker_run import kept_buffers

    with torch.device("meta"):
        module = source.build(job.model, job.sequence, job.frozen).module
    state = module.state_dict()
    return {name: tuple(state[name].shape) for name in kept_buffers(module, graph.unreached)}


def _newest(folder: Path, listen: Listener) -> Checkpoint | None:
    """Return the newest checkpoint that is complete to the last byte; rename newer ones that are damaged."""
    from isthmus.runtime.checkpoint.reading import newest_whole
    from isthmus.runtime.checkpoint.saving import set_aside

    checkpoint, refused = newest_whole(folder)
    for path, error in refused:
        listen(Notice("", CheckpointPassedOver(path=path, why=str(error), aside=set_aside(path))))
    return checkpoint


def _check_same_job(checkpoint: Checkpoint, job: Job) -> None:
    before, now = _what_is_trained(checkpoint.manifest.job), _what_is_trained(job)
    if other := [field for field in now if before[field] != now[field]]:
        raise CheckpointError(
            f"the checkpoint is of another job: another {', '.join(other)}",
            where=str(checkpoint.path),
            found=", ".join(f"{field} {before[field]}" for field in other),
            expected=", ".join(f"{field} {now[field]}" for field in other),
            next="Train with the job that it was saved by, or into another folder",
        )


def _what_is_trained(job: Job) -> dict[str, object]:
    """Return the settings that a training keeps from first to last step; rates, steps and the plan may change."""
    fields = ("batch", "sequence", "seed", "frozen", "data", "loss", "sparsity")
    return {field: getattr(job, field) for field in fields} | {"optimizer": job.optimizer.name}


class _Run:
    """The state of a run, as known from the workers' notices."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        graph: BlockGraph,
        settings: RunSettings,
        listen: Listener,
        checkpoint: Path | None,
        name: str,
    ) -> None:
        """Begin with what was known before the workers started; `name` is the run's identity."""
        self._name = name
        self._programs, self._graph, self._settings, self._listen = programs, graph, settings, listen
        self._some = next(iter(programs.values()))
        self._checkpoint = checkpoint
        self._interrupted = False
        self._ready: set[str] = set()
        self._done: dict[str, Done] = {}
        self._steps: list[Stepped] = []
        self._saving: dict[int, Saving] = {}
        self._parts: dict[int, dict[str, PartInfo | None]] = {}

    def follow(self, running: Running) -> None:
        """Follow the workers' notices until every worker is done; raise RunError if one fails."""
        while len(self._done) < len(self._programs):
            notice = running.next()
            if notice is None:
                continue
            self._listen(notice)
            news = notice.news
            if isinstance(news, Silent):
                raise self._silence(running, notice, news)
            if isinstance(news, Failed | Garbled) or (isinstance(news, Ended) and notice.worker not in self._done):
                raise self._reason(running, notice)
            if isinstance(news, Interrupt):
                self._interrupt(running)
            else:
                self._take(notice)

    def _take(self, notice: Notice) -> None:
        match notice.news:
            case Ready():
                self._ready.add(notice.worker)
            case Stepped() as step:
                self._steps.append(step)
            case Saving() as saving:
                self._saving[saving.step] = saving
                self._finish(saving.step)
            case Wrote(step=number, part=part):
                self._parts.setdefault(number, {})[notice.worker] = part
                self._finish(number)
            case Done() as done:
                self._done[notice.worker] = done
            case _:
                pass

    def _interrupt(self, running: Running) -> None:
        """Stop after the present step; if not all workers are ready, there is nothing to save, so stop at once."""
        if len(self._ready) < len(self._programs):
            raise KeyboardInterrupt
        self._interrupted = True
        running.command(self._some.leader, STOP)

    def _finish(self, step: int) -> None:
        """Finish the checkpoint of a step once all its parts have come."""
        parts, saving = self._parts.get(step, {}), self._saving.get(step)
        if saving is None or len(parts) < len(self._programs):
            return
        from isthmus.runtime.checkpoint.reading import finish

        assert self._settings.folder is not None
        header = Header.of(
            self._graph,
            step=step,
            job=self._some.job,
            precision=self._some.precision,
            updates=saving.updates,
            samples=step * self._some.job.batch,
            loss_scale=saving.loss_scale,
            run=self._name,
        )
        written = [part for part in parts.values() if part is not None]
        self._checkpoint = finish(self._settings.folder, written, header, keep=self._settings.keep)
        del self._parts[step], self._saving[step]
        self._listen(Notice("", CheckpointKept(step=step, path=self._checkpoint)))

    def _reason(self, running: Running, first: Notice) -> RunError:
        """Return the error that best explains a failure.

        One worker's end takes others with it, so this waits a little for a more informative notice. A signal is the
        best reason, then an error, and a lost channel is the worst.
        """
        best, gone = first, {first.worker}
        ended = {first.worker} if isinstance(first.news, Ended) else set()
        deadline = time.monotonic() + _PATIENCE[_rank(best)]
        while len(gone) < len(self._programs) and (left := deadline - time.monotonic()) > 0:
            notice = running.next(timeout=left)
            if notice is not None:
                self._listen(notice)
            if notice is None or not isinstance(notice.news, Failed | Garbled | Ended) or notice.worker in self._done:
                continue
            if isinstance(notice.news, Ended):
                ended.add(notice.worker)
            told = notice.worker in gone and isinstance(notice.news, Ended) and notice.news.signal is None
            if not told:  # the end of a worker that has already failed is no news
                gone.add(notice.worker)
                best = min(best, notice, key=_rank)
                deadline = min(deadline, time.monotonic() + _PATIENCE[_rank(best)])
        if best.worker not in ended:
            self._hear_out(running, best.worker)
        return self._error(best)

    def _hear_out(self, running: Running, worker: str) -> None:
        """Listen to what a worker that failed still says until it ends, for at most _LAST_WORDS seconds."""
        deadline = time.monotonic() + _LAST_WORDS
        while (left := deadline - time.monotonic()) > 0:
            notice = running.next(timeout=left)
            if notice is not None:
                self._listen(notice)
                if notice.worker == worker and isinstance(notice.news, Ended):
                    return

    def _error(self, notice: Notice) -> RunError:
        program, news = self._programs[notice.worker], notice.news
        if isinstance(news, Failed):
            return failure(program, news)
        where = self._where(notice.worker)
        if isinstance(news, Garbled):
            return RunError(
                "the worker sent a line that is not an event",
                where=where,
                found=f"the line {news.line[:100]!r}",
                expected="one JSON object a line, on a pipe that nothing else writes to",
                next="Look for code that writes to file descriptors by their number",
            )
        assert isinstance(news, Ended)
        what = (
            f"the worker was killed ({news.signal})"
            if news.signal
            else f"the worker ended with exit code {news.exit_code}"
        )
        memory = "The system kills processes that take too much memory: look in its log"
        return RunError(
            what,
            where=where,
            found=f"as its last line: {news.last[-1]}" if news.last else None,
            next=memory if news.signal == "SIGKILL" else None,
        )

    def _silence(self, running: Running, first: Notice, news: Silent) -> RunError:
        """Return an error that names every silent worker; a worker that stands still does not silence the others."""
        others, deadline = [], time.monotonic() + _LAST_WORDS
        while time.monotonic() < deadline and (notice := running.next(timeout=0.0)) is not None:
            self._listen(notice)
            if isinstance(notice.news, Silent):
                others.append(f"worker {notice.worker}: {notice.news.state}")
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - news.seconds))
        return RunError(
            f"the worker gave no sign of life for {news.seconds:.0f} s, since {since}",
            where=self._where(first.worker),
            found="; ".join([news.state, *others]),
            next="The run was ended. See what stopped or blocked it, then continue with --resume",
        )

    def _where(self, worker: str) -> str:
        return _where(self._programs[worker], self._steps[-1].step + 1 if self._steps else None)

    def result(self, first: int) -> RunResult:
        """Return the result of the run."""
        spans = {worker: done.spans for worker, done in self._done.items() if done.spans}
        steps = self._steps[-1].step + 1 if self._steps else first
        return RunResult(
            last_step=steps,
            losses=tuple(step.loss for step in self._steps),
            seconds=tuple(step.seconds for step in self._steps),
            bytes_sent=sum(done.sent for done in self._done.values()),
            memory={worker: done.memory for worker, done in self._done.items()},
            workers=tuple(self._programs),
            checkpoint=self._checkpoint,
            interrupted=self._interrupted and steps < self._settings.stop,
            timeline=measured_timeline(spans, self._some.job.name) if spans else None,
        )


def failure(program: Program, news: Failed) -> RunError:
    """Return the error that a worker reported when it failed, with its name, its stages and the step."""
    what = f"{news.where}: {news.what}" if news.where else news.what
    where = _where(program, news.step)
    return RunError(what, where=where, found=news.found, expected=news.expected, next=news.next)


def _where(program: Program, step: int | None) -> str:
    """Return where an error occurred, as in `worker va1/A100-40GB/0, stages 2, 3, step 7`; the first step is 1."""
    stages = [str(stage) for run in program.runs for stage in run.stages]
    held = f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}" if stages else "no stage"
    return f"worker {program.device}, {held}, {'before the first step' if step is None else f'step {step + 1}'}"


def _rank(notice: Notice) -> int:
    """Return how well a notice explains a failure; smaller is better."""
    if isinstance(notice.news, Ended):
        return 0 if notice.news.signal else 1
    return 2 if isinstance(notice.news, Failed) and notice.news.lost else 1


@contextmanager
def _interrupts(running: Running) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a notice, and a second one into KeyboardInterrupt.

    This only works in the main thread; elsewhere signals are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked = False

    def heard(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        running.interrupt()

    before = {number: signal.signal(number, heard) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
