"""Processes that stand in for workers: whatever these leave running, the engine comes back and leaves nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

import pytest

from isthmus.deploy import local
from isthmus.deploy.engine import Ended, Said
from isthmus.errors import RunError
from isthmus.plan.types import Pipeline
from isthmus.runtime.program import programs
from isthmus.runtime.protocol import Order
from tests.deploy.jobs import A, alive, graph, two_stages

CHILD = """
import os, subprocess, sys, time
sys.stdin.readline()
child = subprocess.Popen(["sleep", "20"], stdout=sys.stdout, start_new_session={away})
print(child.pid, file=sys.stderr, flush=True)
{then}
"""


def started(monkeypatch: pytest.MonkeyPatch, code: str, setting: local.Setting | None = None) -> local._Processes:
    monkeypatch.setattr(local, "_COMMAND", (sys.executable, "-S", "-c", code))
    file = two_stages()
    part = file.plan.parts[0]
    assert isinstance(part, Pipeline) and file.cluster is not None
    program = programs(file.plan, file.cluster, {part.job.name: graph()})[A]
    return local.LocalEngine(setting).start({A: Order(program=program, model=graph().digest, first=0, stop=1)})


@pytest.mark.parametrize("then", ["sys.exit(3)", "time.sleep(20)"])
def test_what_a_worker_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """The child holds both pipes of a worker that is gone, or that is ended here."""
    with started(monkeypatch, CHILD.format(away=False, then=then)) as running:
        said = running.next(timeout=5.0)
        assert said is not None and isinstance(said.news, Said)
        child = int(said.news.line)
        if "exit" in then:
            ended = running.next(timeout=5.0)
            assert ended is not None and ended.news == Ended(exit_code=3, last=(str(child),))
            assert not alive(child)
        began = time.monotonic()
    assert time.monotonic() - began < 0.5 and not alive(child)


def test_a_process_that_went_away_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, and holds the pipes until its end, which nobody waits for."""
    with started(monkeypatch, CHILD.format(away=True, then="sys.exit(3)")) as running:
        said = running.next(timeout=5.0)
        assert said is not None and isinstance(said.news, Said)
        began = time.monotonic()
        ended = running.next(timeout=5.0)
        assert ended is not None and isinstance(ended.news, Ended)
    assert time.monotonic() - began < 3.0
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
        started(monkeypatch, "import time; time.sleep(20)", Gone()) as running,
    ):
        running.next()


def test_half_a_line_is_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; os.write(1, b'{'); os.kill(os.getpid(), 9)"
    with started(monkeypatch, code) as running:
        ended = running.next(timeout=5.0)
        assert ended is not None and ended.news == Ended(exit_code=-9, signal="SIGKILL")
