"""The engine that needs nothing but this machine: one process for each device of the plan.

Processes find each other through a file in a private folder, and talk over loopback only; in an emulated world each
runs on its host there, and they talk over its links. Each is the leader of a session of its own, so that Ctrl-C
reaches the parent alone; it ends with the parent (worker_process.py), and what it has started ends with the guard
(cleanup_process.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self

import msgspec

from isthmus.deploy import cleanup_process as guard
from isthmus.deploy.engine import Ended, Garbled, Interrupt, Notice, Said, Silent
from isthmus.deploy.free_memory import check_fit, free_on_gpus, free_on_host, gpu_needs, host_needs
from isthmus.runtime.protocol import Alive, Clock, Command, Event, Hello, Start, StepOrder, WorkerPlace

__all__ = ["LocalEngine", "WorkerSetting"]

_LAST_LINES = 20
_LOOK = 1.0  # seconds between two looks at workers and at where they run
_SILENCE = 30.0  # seconds without a sign of life; computing with Python's lock held is no fault
_STARTING = 4.0  # times as long may pass before the first: many processes begin at once
_BUSY = 0.05  # of a processor: who uses that much while he is silent is computing
_BEATS = 10  # signs of life in that time
_LAST_WORDS = 1.0  # seconds to read what an ended worker has told and printed
_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "isthmus.runtime.worker_process",
)  # -P: no file of the working directory hides a module


class WorkerSetting(Protocol):
    """How workers run, where that is not plainly on this machine: on emulated hosts, say."""

    @property
    def interface(self) -> str:
        """The network device by which workers reach each other; none named: loopback."""

    def command(self, device: str, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` where the worker of a device belongs."""

    def slower(self, device: str) -> float:
        """Return how many times slower than this machine the device computes."""

    def describe(self) -> str:
        """Return where the devices run, for people: the text that follows `2 devices of the plan,`."""

    def check(self) -> None:
        """RunError if it is not there any more: workers that wait for each other would not notice."""


class LocalEngine:
    """Workers as processes of this machine, whatever devices the plan has."""

    def __init__(
        self,
        setting: WorkerSetting | None = None,
        *,
        nccl: bool = False,
        silence: float = _SILENCE,
        ignore_memory: bool = False,
    ) -> None:
        """`nccl`: GPUs that have one worker each talk over it. `silence`: seconds that no worker may be silent.

        `ignore_memory`: workers start even if they are predicted to need more memory than is free.
        """
        self._setting, self._nccl, self._silence = setting, nccl, silence
        self._ignore_memory = ignore_memory

    def check_memory(self, own: Mapping[str, float], building: float) -> None:
        """RunError if the workers need more than is free on this machine or on one of its GPUs."""
        if self._ignore_memory:
            return
        count = _accelerators() if self._setting is None else 0
        check_fit("this machine", host_needs(own, building, on_gpus=count > 0), free_on_host())
        for number, (needs, free) in enumerate(zip(gpu_needs(own, count), free_on_gpus(count), strict=True)):
            check_fit(f"cuda:{number}", needs, free)

    def start(self, orders: Mapping[str, StepOrder]) -> _Processes:
        """A process for each. The calling thread must outlive the run: the kernel ends workers with it."""
        folder = Path(tempfile.mkdtemp(prefix="isthmus-"))  # mode 0700
        places = [self._place(device, number, len(orders), folder) for number, device in enumerate(orders)]
        check = self._setting.check if self._setting is not None else lambda: None
        named = dict(zip(orders, places, strict=True))
        return _Processes(folder, orders, named, self._command, check, self._silence)

    def describe(self, workers: int) -> str:
        """Return a line for people that says where the workers run."""
        if self._setting is not None:
            return f"{workers} device{'s' * (workers > 1)} of the plan, {self._setting.describe()}"
        count, cores = _accelerators(), _cores()
        where = f"{count} CUDA device{'s' * (count > 1)}" if count else f"{cores} core{'s' * (cores > 1)}"
        if workers == 1:
            return f"1 device of the plan runs as a process on this machine ({where})"
        return f"{workers} devices of the plan run as processes on this machine ({where})"

    def _command(self, device: str) -> list[str]:
        """Its last word is the device's name, for people who look at the list of processes."""
        command = [*_COMMAND, device]
        return command if self._setting is None else self._setting.command(device, command)

    def _place(self, device: str, number: int, workers: int, folder: Path) -> WorkerPlace:
        store, parent, beat = str(folder / "store"), os.getpid(), self._silence / _BEATS
        if self._setting is not None:
            interface, slower = self._setting.interface, self._setting.slower(device)
            return WorkerPlace(
                store=store, device="cpu", threads=1, interface=interface, slower=slower, parent=parent, beat=beat
            )
        count = _accelerators()
        return WorkerPlace(
            store=store,
            parent=parent,
            beat=beat,
            device=f"cuda:{number % count}" if count else "cpu",
            threads=max(1, _cores() // workers),
            nccl=self._nccl and count >= workers,
        )


class _Processes:
    """The processes of one run."""

    def __init__(
        self,
        folder: Path,
        orders: Mapping[str, StepOrder],
        places: Mapping[str, WorkerPlace],
        command: Callable[[str], Sequence[str]],
        check: Callable[[], None],
        silence: float,
    ) -> None:
        """`folder` goes with them; `check` raises if where they run has gone; `silence`: seconds that are too many."""
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._folder, self._check, self._silence = folder, check, silence
        self._workers: dict[str, _Process] = {}
        self._guard = _Guard(folder)
        self._looked = self._excused = time.monotonic()
        try:
            for device, order in orders.items():
                start = Start(order=order, place=places[device])
                self._workers[device] = _Process(device, command(device), start, self._notices, self._guard)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def next(self, timeout: float | None = None) -> Notice | None:
        """The next notice."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        pause = min(_LOOK, self._silence / _BEATS)
        while True:
            if time.monotonic() >= self._looked + pause:
                self._look()
            with contextlib.suppress(Empty):
                return self._notices.get(timeout=max(0.0, min(pause, end - time.monotonic())))
            if time.monotonic() >= end:
                return None

    def command(self, worker: str, number: int) -> None:
        """Passes a command on."""
        self._workers[worker].tell(Command(number=number))

    def interrupt(self) -> None:
        """An Interrupt among the notices; a SimpleQueue may be put to from a signal handler."""
        self._notices.put(Notice("", Interrupt()))

    def _look(self) -> None:
        """Looks at where workers run, and who of them is silent: each of those is told once."""
        self._check()
        now = time.monotonic()
        if now - self._looked > self._silence / 2:  # this process was held up itself: signs of life may lie unread
            self._excused = now
        self._looked = now
        for device, process in self._workers.items():
            seconds = now - max(process.heard, self._excused)
            limit = self._silence * (1.0 if process.begun else _STARTING)
            if seconds > limit / 2 and process.computes(limit / 4):
                process.heard = now
            elif seconds > limit and not process.ended:
                process.heard = math.inf
                self._notices.put(Notice(device, Silent(seconds=seconds, state=process.state())))

    def _end(self) -> None:
        for process in self._workers.values():
            process.kill()
        for process in self._workers.values():
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._guard.close()


class _Guard:
    """The process that ends what workers have started, should this one be killed."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-I", "-S", str(guard.__file__), str(folder)]
        self._popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        self._lock = threading.Lock()

    def tell(self, what: str) -> None:
        """`+PID` for a worker that is there, `-PID` for one that is gone."""
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # it was killed, or closed
            self._popen.stdin.write(what.encode() + b"\n")
            self._popen.stdin.flush()

    def close(self) -> None:
        """The run is over."""
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.wait()


class _Process:
    """One worker: two threads read what it tells and what it prints, and close these pipes; a third sees its end."""

    def __init__(
        self, device: str, command: Sequence[str], start: Start, notices: SimpleQueue[Notice], guard: _Guard
    ) -> None:
        self.begun = self.ended = False  # whether it told anything, and whether it is gone
        self.heard = time.monotonic()  # when it last told anything
        self._asked = 0.0  # when it was last asked whether it computes,
        self._used: float | None = None  # ... and the processor's seconds that it had used by then
        self._device, self._notices, self._guard = device, notices, guard
        self._lock, self._reaping = threading.Lock(), threading.Lock()
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        guard.tell(f"+{self._popen.pid}")
        self._printed = threading.Thread(target=self._listen, name=f"{device} prints", daemon=True)
        self._told = threading.Thread(target=self._read, name=f"{device} tells", daemon=True)
        self._seen = threading.Thread(target=self._watch, name=f"{device} ends", daemon=True)
        for thread in (self._printed, self._told, self._seen):
            thread.start()
        self.tell(start)

    def tell(self, message: msgspec.Struct) -> None:
        """A line to the worker."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # it is gone: its end comes as a notice
            assert self._popen.stdin is not None
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def kill(self) -> None:
        """At once, with all that it started; once it was reaped, that is done, and its number may be another's."""
        with self._reaping:
            if self._popen.returncode is None:
                self._kill_group()

    def wait(self) -> None:
        """Until it is gone and its pipes are read, or held by a process that has left its group."""
        self._seen.join()
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # of a line that it never read
            self._popen.stdin.close()

    def computes(self, every: float) -> bool:
        """Return whether the process used a processor since it was last asked: it holds Python's lock.

        The answer is no where it was asked less than `every` seconds ago, and where the system does not say. A process
        that waits while it holds the lock uses next to nothing.
        """
        now = time.monotonic()
        if now < self._asked + every:
            return False
        known, used, since = self._used, self._processor_seconds(), now - self._asked
        self._asked, self._used = now, used
        return known is not None and used is not None and used - known >= _BUSY * since

    def _processor_seconds(self) -> float | None:
        try:
            user, system = self._stat()[11:13]
            return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return None

    def _stat(self) -> list[str]:
        """Return the fields of the process in Linux's /proc/PID/stat, from its state on."""
        return Path(f"/proc/{self._popen.pid}/stat").read_text().rpartition(")")[2].split()

    def state(self) -> str:
        """Return what the system says of the process, for people."""
        try:
            letter = self._stat()[0]
        except (OSError, IndexError):
            return f"process {self._popen.pid}"
        stopped = (
            " was stopped by a signal (SIGSTOP, or a debugger)" if letter in "Tt" else " is there but does not answer"
        )
        return f"process {self._popen.pid}{stopped}"

    def _watch(self) -> None:
        """Waits for its end and ends what it started, which may hold its pipes, while its number is still its own."""
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        self.ended = True
        with self._reaping:
            self._kill_group()
            self._guard.tell(f"-{self._popen.pid}")
            exit_code = self._popen.wait()
        deadline = time.monotonic() + _LAST_WORDS
        for reader in (self._told, self._printed):
            reader.join(timeout=max(0.0, deadline - time.monotonic()))
        name = signal.Signals(-exit_code).name if exit_code < 0 else None
        self._notices.put(Notice(self._device, Ended(exit_code=exit_code, signal=name, last=tuple(self._last))))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break  # it was killed while it wrote
                try:
                    event: Event = msgspec.json.decode(line, type=Event)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self._notices.put(Notice(self._device, Garbled(line=line.decode(errors="replace").rstrip())))
                    break
                self.begun, self.heard, self._used = True, time.monotonic(), None
                if isinstance(event, Hello):
                    self.tell(Clock(now=time.perf_counter()))
                elif not isinstance(event, Alive):
                    self._notices.put(Notice(self._device, event))

    def _listen(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip()
                self._last.append(text)
                self._notices.put(Notice(self._device, Said(line=text)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerators() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
