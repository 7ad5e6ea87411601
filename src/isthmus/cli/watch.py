"""The watchers of a run: a bar or lines for people, a file of events for programs, and curves for other tools."""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from isthmus.deploy.engine import (
    CheckpointKept,
    CheckpointPassedOver,
    Garbled,
    Interrupt,
    Notice,
    Resumed,
    Said,
    Silent,
)
from isthmus.errors import FileError, UsageError
from isthmus.model.job import Job
from isthmus.plan.file import plan_digest
from isthmus.plan.types import Plan
from isthmus.runtime.protocol import Done, Failed, Ready, Stepped, Traffic
from isthmus.units import format_bytes, format_seconds

__all__ = ["Bar", "Board", "EventFile", "WandbRun", "check_tensorboard", "check_wandb"]

_WIDE = 110  # columns of a terminal that has room for a bar
_LINE_EVERY = 10.0  # seconds between two lines, if there is no terminal


class _Watch(ABC):
    """A listener to the notices of a run, which is closed after it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    @abstractmethod
    def hear(self, notice: Notice) -> None:
        """Take note of something that happened."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Finish after the run is over."""


class Bar(_Watch):
    """Shows step, loss, samples and tokens a second, time, bytes and the time left on standard error.

    `predicted` is the time that was predicted for these devices and links; if it is None, no prediction is shown.
    `sequence` is the number of tokens in a sample, for models that have them.
    """

    def __init__(self, steps: int, batch: int, predicted: float | None, sequence: int | None = None) -> None:
        self._steps, self._batch, self._predicted, self._sequence = steps, batch, predicted, sequence
        self._stream = sys.stderr
        self._sent: dict[str, int] = {}
        self._next_line = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            console = Console(file=self._stream)
            bar = [BarColumn(bar_width=16), TimeRemainingColumn()] if console.width >= _WIDE else []
            text = TextColumn("{task.description}", markup=False)
            self._bar = Progress(MofNCompleteColumn(), *bar, text, console=console)
            self._task = self._bar.add_task("starting workers", total=self._steps)
            self._bar.start()
        return self

    def hear(self, notice: Notice) -> None:
        """Show the notice if it is for people."""
        match notice.news:
            case Traffic(sent=sent) | Done(sent=sent):
                self._sent[notice.worker] = sent
            case Stepped() as step:
                self._step(step)
            case Said(line=line):
                self._say(f"{notice.worker} | {line}")
            case CheckpointKept(path=path):
                self._say(f"saved {path}")
            case CheckpointPassedOver(path=path, why=why, aside=aside):
                self._say(f"skipping a damaged checkpoint: {why}" + (f" It is now {aside}" if aside else ""))
            case Resumed(step=number, path=path, notes=notes):
                for text in (f"resuming from {path}, after step {number}", *(f"note: {note}" for note in notes)):
                    self._say(text)
            case Interrupt():
                self._say("stopping after this step; press Ctrl-C again to stop at once")
            case _:
                pass

    def _step(self, step: Stepped) -> None:
        loss = "loss not a number" if step.loss is None else f"loss {step.loss:.4f}"
        predicted = "" if self._predicted is None else f" ({format_seconds(self._predicted)} predicted)"
        rate = self._batch / step.seconds
        tokens = "" if self._sequence is None else f" ({rate * self._sequence:.3g} tokens/s)"
        text = (
            f"{loss}  {rate:.3g} samples/s{tokens}  {format_seconds(step.seconds)}{predicted}"
            f"  {format_bytes(sum(self._sent.values()))} sent"
        )
        text += "  (skipped: gradients overflowed)" * step.skipped
        done = step.step + 1
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=text)
        elif time.monotonic() >= self._next_line or done == self._steps:
            self._next_line = time.monotonic() + _LINE_EVERY
            left = f"  {format_seconds((self._steps - done) * step.seconds)} left" if done < self._steps else ""
            self._say(f"step {done}/{self._steps}  {text}{left}")

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def close(self, error: BaseException | None) -> None:
        """Stop the bar, and leave its last state on the screen."""
        if self._bar is not None:
            self._bar.stop()


class EventFile(_Watch):
    """Writes one JSON object a line: `time` (seconds since 1970) and `event`; steps are counted from 1.

    `shaped` says whether the cluster's links were emulated; it is None if the cluster was not emulated at all. If the
    run is `resumed`, its events go behind those that are in the file already.
    """

    def __init__(
        self,
        path: str,
        job: Job,
        plan: Plan,
        steps: int,
        predicted: float,
        shaped: bool | None = None,
        *,
        resumed: bool = False,
    ) -> None:
        try:
            self._file = Path(path).open("a" if resumed else "w", encoding="utf-8")  # noqa: SIM115 - closed with the run
        except OSError as error:
            raise FileError(f"cannot be written: {error.strerror}", where=path) from None
        self._steps = steps
        self._write("begin", job=job.name, model=job.model, batch=job.batch, plan=plan_digest(plan), steps=steps,
                    predicted_step_seconds=predicted, shaped=shaped)  # fmt: skip

    def hear(self, notice: Notice) -> None:
        """Write the notice into the file."""
        match notice.news:
            case Ready():
                self._write("ready", worker=notice.worker)
            case Stepped(step=step, loss=loss, norm=norm, seconds=seconds, skipped=skipped):
                left = (self._steps - step - 1) * seconds
                self._write("step", step=step + 1, loss=loss, norm=norm, seconds=seconds, skipped=skipped,
                            seconds_left=left)  # fmt: skip
            case CheckpointPassedOver(path=path, why=why, aside=aside):
                self._write("damaged", path=str(path), what=why, aside=None if aside is None else str(aside))
            case Resumed(step=step, path=path, notes=notes):
                self._write("resume", step=step, path=str(path), notes=notes)
            case CheckpointKept(step=step, path=path):
                self._write("checkpoint", step=step, path=str(path))
            case Said(line=line):
                self._write("said", worker=notice.worker, line=line)
            case Interrupt():
                self._write("interrupt")
            case Done(sent=sent, memory=memory):
                self._write("done", worker=notice.worker, bytes_sent=sent, memory=memory)
            case Failed(what=what):
                self._write("failed", worker=notice.worker, what=what)
            case Silent(seconds=seconds, state=state):
                self._write("silent", worker=notice.worker, seconds=seconds, state=state)
            case Garbled(line=line):
                self._write("failed", worker=notice.worker, what=f"it sent a line that is not an event: {line[:100]}")
            case _:
                pass

    def _write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"time": time.time(), "event": event, **values}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self, error: BaseException | None) -> None:
        """Write how the run ended as the last line."""
        self._write("end", error=None if error is None else str(error) or type(error).__name__)
        self._file.close()


def check_tensorboard() -> None:
    """Refuse curves for TensorBoard if it is not installed, before anything is planned."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise UsageError(
            "TensorBoard is not installed", where="--tensorboard", next="pip install 'isthmus[tensorboard]'"
        ) from None


class Board(_Watch):
    """Writes curves for TensorBoard."""

    def __init__(self, folder: str, batch: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._batch = batch
        self._writer = SummaryWriter(folder)

    def hear(self, notice: Notice) -> None:
        """Add a point to each curve for every step."""
        for step, values in _points(notice, self._batch):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self, error: BaseException | None) -> None:
        """Close the writer, which writes what is left."""
        self._writer.close()


def check_wandb() -> None:
    """Refuse curves for Weights & Biases if it is not installed, before anything is planned."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise UsageError(
            "Weights & Biases is not installed", where="--wandb", next="pip install 'isthmus[wandb]'"
        ) from None


class WandbRun(_Watch):
    """Writes curves for Weights & Biases into a folder, offline: `wandb sync` sends them later, if wanted."""

    def __init__(self, folder: str, job: Job) -> None:
        import wandb

        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, disable_git=True, save_code=False)
        settings = {"job": json.loads(msgspec.json.encode(job))}
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._batch = job.batch
        self._run: Any = wandb.init(
            project="isthmus", name=job.name, dir=folder, mode="offline", config=settings, settings=quiet
        )

    def hear(self, notice: Notice) -> None:
        """Add a point to each curve for every step."""
        for step, values in _points(notice, self._batch):
            self._run.log(values, step=step)

    def close(self, error: BaseException | None) -> None:
        """Finish the run, and end the process that writes its files."""
        import wandb

        self._run.finish(exit_code=0 if error is None else 1)
        wandb.teardown()


def _points(notice: Notice, batch: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield the points that a notice adds to the curves: the step, counted from 1, and the values that are known."""
    if isinstance(step := notice.news, Stepped):
        values = {"loss": step.loss, "norm": step.norm, "seconds": step.seconds}
        values["samples a second"] = batch / step.seconds
        yield step.step + 1, {name: value for name, value in values.items() if value is not None}
