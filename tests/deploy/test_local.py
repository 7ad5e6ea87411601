"""Processes that stand in for workers: whatever these leave running, the engine comes back and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.deploy import local
from isthmus.deploy.engine import Ended, Garbled, Said, Silent
from isthmus.errors import RunError
from isthmus.plan.types import Pipeline
from isthmus.runtime.program import programs
from isthmus.runtime.protocol import StepOrder
from tests.deploy.jobs import A, alive, graph, two_stages
from tests.quiet import PATIENCE, needs_quiet

CHILD = """
import os, subprocess, sys, time
sys.stdin.readline()
child = subprocess.Popen(["sleep", "1000"], stdout=sys.stdout, start_new_session={away})
print(child.pid, file=sys.stderr, flush=True)
{then}
"""


HELLO = 'import os, time; os.write(1, b\'{"is": "hello"}\\n\'); '


def started(
    monkeypatch: pytest.MonkeyPatch, code: str, setting: local.WorkerSetting | None = None, silence: float = 30.0
) -> local._Processes:
    monkeypatch.setattr(local, "_COMMAND", (sys.executable, "-S", "-c", code))
    file = two_stages()
    part = file.plan.parts[0]
    assert isinstance(part, Pipeline) and file.cluster is not None
    program = programs(file.plan, file.cluster, {part.job.name: graph()})[A]
    return local.LocalEngine(setting, silence=silence).start(
        {A: StepOrder(program=program, model=graph().digest, first=0, stop=1)}
    )


@pytest.mark.parametrize("then", ["sys.exit(3)", "time.sleep(1000)"])
def test_what_a_worker_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """The child holds both pipes of a worker that is gone, or that is ended here."""
    with started(monkeypatch, CHILD.format(away=False, then=then)) as running:
        said = running.next(timeout=PATIENCE)
        assert said is not None and isinstance(said.news, Said)
        child = int(said.news.line)
        if "exit" in then:
            ended = running.next(timeout=PATIENCE)
            assert ended is not None and ended.news == Ended(exit_code=3, last=(str(child),))
            assert gone(child)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE and gone(child)


def gone(process: int) -> bool:
    """Whether it ends within some seconds, of the thousand that it would take by itself."""
    until = time.monotonic() + PATIENCE
    while alive(process) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(process)


def test_a_process_that_went_away_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, and holds the pipes until its end, which nobody waits for."""
    with started(monkeypatch, CHILD.format(away=True, then="sys.exit(3)")) as running:
        said = running.next(timeout=PATIENCE)
        assert said is not None and isinstance(said.news, Said)
        began = time.monotonic()
        ended = running.next(timeout=PATIENCE)
        assert ended is not None and isinstance(ended.news, Ended)
    assert time.monotonic() - began < PATIENCE
    assert alive(int(said.news.line))
    os.kill(int(said.news.line), signal.SIGKILL)


def test_where_workers_run_is_looked_at_while_they_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated world whose router is gone: workers that wait for each other would wait for ever."""

    class Gone:
        interface = ""

        def command(self, device: str, argv: Sequence[str]) -> list[str]:
            return list(argv)

        def slower(self, device: str) -> float:
            return 1.0

        def describe(self) -> str:
            return ""

        def check(self) -> None:
            raise RunError("the router is gone")

    monkeypatch.setattr(local, "_LOOK", 0.05)
    with (
        pytest.raises(RunError, match="the router is gone"),
        started(monkeypatch, "import time; time.sleep(1000)", Gone()) as running,
    ):
        running.next()


def test_half_a_line_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.write(1, b'{'); os.kill(os.getpid(), 9)"
    with started(monkeypatch, code) as running:
        ended = running.next(timeout=PATIENCE)
        assert ended is not None and ended.news == Ended(exit_code=-9, signal="SIGKILL")


@pytest.mark.parametrize("line", ["oops", '{"is": "stepped"}', '{"is": "hello", "more": 1}', "\\xff"])
def test_a_line_that_is_no_event_is_told(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """The thread that reads it used to die, and the run to wait for ever."""
    with started(monkeypatch, f"import os, time; os.write(1, b'{line}\\n'); time.sleep(1000)") as running:
        told = running.next(timeout=PATIENCE)
        assert told is not None and isinstance(told.news, Garbled) and told.worker == A
        assert running.next(timeout=0.2) is None


@pytest.mark.parametrize("stopped", [True, False])
def test_a_worker_without_a_sign_of_life_is_told_once(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    code = HELLO + ("os.kill(os.getpid(), 19)" if stopped else "time.sleep(1000)")
    with started(monkeypatch, code, silence=0.5) as running:
        began = time.monotonic()
        told = running.next(timeout=PATIENCE)
        assert told is not None and isinstance(told.news, Silent) and told.worker == A
        assert 0.4 < time.monotonic() - began < PATIENCE and ("was stopped" in told.news.state) == stopped
        assert running.next(timeout=0.8) is None
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE


@pytest.mark.slow("computes for seconds on purpose")
def test_a_worker_that_computes_with_the_lock_held_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing, and uses its processor."""
    with started(monkeypatch, HELLO + "any(iter(int, 1))", silence=1.0) as running:
        assert running.next(timeout=4.0) is None


def test_signs_of_life_are_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may compute for as long as it likes."""
    code = HELLO + '[(os.write(1, b\'{"is": "alive"}\\n\'), time.sleep(0.05)) for _ in range(20_000)]'
    with needs_quiet(), started(monkeypatch, code, silence=1.0) as running:
        assert running.next(timeout=2.0) is None


def test_a_worker_that_waits_for_a_processor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy with something else it may get next to no processor time."""
    code = HELLO + "os.nice(19); any(iter(int, 1))"
    monkeypatch.setattr(local, "_BUSY", 10.0)  # of a processor, which nobody can use: only the state counts
    with started(monkeypatch, code, silence=0.4) as running:
        assert running.next(timeout=1.2) is None


def test_the_guard_cleans_up_after_a_parent_that_is_gone(tmp_path: Path) -> None:
    """Of two groups of processes the one that was taken off its list stays."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "store").write_text("x")
    first, second = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    try:
        guard = local._Guard(folder)
        for word in (f"+{first.pid}", f"+{second.pid}", f"-{second.pid}"):
            guard.tell(word)
        assert alive(first.pid)
        guard.close()
        assert first.wait() == -signal.SIGKILL and alive(second.pid) and not folder.exists()
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
