"""The engine that needs nothing but this machine: it runs one process for each device of the plan.

The processes find each other through a file in a private folder and talk over loopback only. In an emulated world each
process runs on its emulated host, and they talk over its links. Each process leads a session of its own, so that Ctrl-C
reaches only the parent. It ends with the parent (`worker_process.py`), and the guard (`cleanup_process.py`) ends
whatever it has started.
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
_LOOK = 1.0  # seconds between two checks of the workers and of where they run
_SILENCE = 30.0  # seconds without a sign of life; computing with Python's lock held is not an error
_STARTING = 4.0  # factor on that for the first sign of life, as many processes start at once
_HELD_UP = ("R", "D")  # Linux's letters for a process that could run, and for one that waits for a disk
_BUSY = 0.05  # of a processor: a silent worker that uses at least this much is computing
_BEATS = 10  # signs of life in that time
_LAST_WORDS = 1.0  # seconds to read what an ended worker has sent and printed
_COMMAND = (
    sys.executable,
    "-P",
    "-m",
    "isthmus.runtime.worker_process",
)  # -P: no file of the working directory hides a module


class WorkerSetting(Protocol):
    """How workers run if not directly on this machine: on emulated hosts, for example."""

    @property
    def interface(self) -> str:
        """Return the network device through which workers reach each other; an empty name means loopback."""

    def command(self, device: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` where the worker of a device belongs."""

    def slower(self, device: str) -> float:
        """Return how many times slower than this machine the device computes."""

    def describe(self) -> str:
        """Return where the devices run, for people; this text follows `2 devices of the plan,`."""

    def check(self) -> None:
        """Raise RunError if the setting is gone; workers that wait for each other would not notice that."""


class LocalEngine:
    """The engine that runs workers as processes of this machine, whatever devices the plan has."""

    def __init__(
        self,
        setting: WorkerSetting | None = None,
        *,
        nccl: bool = False,
        silence: float = _SILENCE,
        ignore_memory: bool = False,
    ) -> None:
        """Choose how workers run.

        `nccl` lets GPUs that have one worker each talk over NCCL. `silence` is how many seconds a worker may be silent.
        With `ignore_memory`, workers start even if they are predicted to need more memory than is free.
        """
        self._setting, self._nccl, self._silence = setting, nccl, silence
        self._ignore_memory = ignore_memory

    def check_memory(self, own: Mapping[str, float], building: float) -> None:
        """Raise RunError if the workers need more memory than is free on this machine or on one of its GPUs."""
        if self._ignore_memory:
            return
        count = _accelerators() if self._setting is None else 0
        check_fit("this machine", host_needs(own, building, on_gpus=count > 0), free_on_host())
        for number, (needs, free) in enumerate(zip(gpu_needs(own, count), free_on_gpus(count), strict=True)):
            check_fit(f"cuda:{number}", needs, free)

    def start(self, orders: Mapping[str, StepOrder]) -> _Processes:
        """Start a process for each device. The calling thread must outlive the run: the kernel ends workers with it."""
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
        """Return the command that starts a worker; its last word is the device's name, as a label in process lists."""
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
        """Start the processes.

        `folder` is removed when they end; `check` raises if the place where they run is gone; `silence` is how many
        seconds a worker may be silent.
        """
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
        """Return the next notice, or None if none came in `timeout` seconds; check on the workers meanwhile."""
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
        """Send a command to a worker."""
        self._workers[worker].tell(Command(number=number))

    def interrupt(self) -> None:
        """Put an Interrupt among the notices; a SimpleQueue may be put to from a signal handler."""
        self._notices.put(Notice("", Interrupt()))

    def _look(self) -> None:
        """Check where the workers run and which of them are silent; report each silent one once."""
        self._check()
        now = time.monotonic()
        if now - self._looked > self._silence / 2:  # this process was held up itself, so signs of life may lie unread
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
    """The process that ends whatever the workers have started if this process is killed."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-I", "-S", str(guard.__file__), str(folder)]
        self._popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        self._lock = threading.Lock()

    def tell(self, what: str) -> None:
        """Send the guard a line: `+PID` for a worker that has started, `-PID` for one that has ended."""
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError, ValueError):  # the guard was killed or closed
            self._popen.stdin.write(what.encode() + b"\n")
            self._popen.stdin.flush()

    def close(self) -> None:
        """Tell the guard that the run is over, and wait for its end."""
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.wait()


class _Process:
    """One worker's process.

    Two threads read its events and its output and close these pipes; a third waits for its end.
    """

    def __init__(
        self, device: str, command: Sequence[str], start: Start, notices: SimpleQueue[Notice], guard: _Guard
    ) -> None:
        self.begun = self.ended = False  # whether it has sent anything, and whether it has ended
        self.heard = time.monotonic()  # when it last sent anything
        self._asked = 0.0  # when its processor time was last read,
        self._used: float | None = None  # ... and the seconds that it had used by then
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
        """Send the worker a line."""
        line = msgspec.json.encode(message) + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):  # it is gone: its end comes as a notice
            assert self._popen.stdin is not None
            self._popen.stdin.write(line)
            self._popen.stdin.flush()

    def kill(self) -> None:
        """Kill the process with everything that it started, unless it was reaped.

        A reaped process's group has been killed already, and its number may belong to another process.
        """
        with self._reaping:
            if self._popen.returncode is None:
                self._kill_group()

    def wait(self) -> None:
        """Wait until the process is gone and its pipes are read; a process that left its group may hold them longer."""
        self._seen.join()
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(BrokenPipeError):  # of a line that it never read
            self._popen.stdin.close()

    def computes(self, every: float) -> bool:
        """Return whether the process has used a processor since it was last asked, and so holds Python's lock.

        The answer is False if it was asked less than `every` seconds ago, or if the system does not say. A process that
        only waits while it holds the lock uses next to no processor time. One that could run, or that waits for a disk,
        is kept waiting by the machine, so it counts as computing too.
        """
        now = time.monotonic()
        if now < self._asked + every:
            return False
        if self._letter() in _HELD_UP:
            return True
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

    def _letter(self) -> str:
        """Return the letter by which Linux tells the state of the process; empty if the system does not say."""
        try:
            return self._stat()[0]
        except (OSError, IndexError):
            return ""

    def state(self) -> str:
        """Return what the system says of the process, for people."""
        name, letter = f"process {self._popen.pid}", self._letter()
        if not letter:
            return name
        stopped = (
            "was stopped by a signal (SIGSTOP, or a debugger)" if letter in "Tt" else "is there but does not answer"
        )
        return f"{name} {stopped}"

    def _watch(self) -> None:
        """Wait for the process to end, kill what it started, and report its end.

        What it started may hold its pipes; its process group is killed before it is reaped, while its number is still
        its own.
        """
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
