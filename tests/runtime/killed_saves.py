"""Saves that are killed with SIGKILL, each in a process of its own, and what is found afterwards.

python -m tests.runtime.killed_saves FOLDER    prints one JSON object per kill

The processes are forked from this one, which has one thread and torch imported, so that a kill costs milliseconds.
`moment` kills before the n-th call that changes the disk, for every n; `again` the same, while a checkpoint is replaced
by one of the same step; `random` some time after
a save began that is followed by others, from half of what one takes on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import torch

from isthmus.runtime.checkpoint.reading import finish, latest, open_checkpoint
from tests.runtime.saved_states import assert_holds, graph_of, header, parts_of, save, state_of

CALLS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
KILLED = -signal.SIGKILL
RANDOM = 22
LARGE = {"a": (400, 500), "b": (3000,)}  # so that most of the time goes into writing


def die_at(number: int) -> None:
    """This process is killed before its `number`-th call that makes, renames, removes, opens for writing or syncs."""
    calls, sync = count(1), os.fsync

    def reached() -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in CALLS or (event == "open" and arguments[1] == "w"):
            reached()

    def counted_sync(handle: int) -> None:
        reached()
        sync(handle)

    sys.addaudithook(hook)
    os.fsync = counted_sync


def in_child(work: Callable[[], None]) -> int:
    """The number of the child."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def found(folder: Path, seeds: dict[int, tuple[int, ...]]) -> int:
    """Which of its possible states the newest step holds; fails unless it is whole to the last byte."""
    newest = latest(folder)
    assert newest is not None, sorted(path.name for path in folder.iterdir())
    checkpoint = open_checkpoint(newest, verify=True)
    step = checkpoint.manifest.step
    for seed in seeds[step]:
        try:
            assert_holds(checkpoint, state_of(seed))
        except AssertionError:
            continue
        return seed
    raise AssertionError(f"step {step} holds none of {seeds[step]}")


def at_every_moment(folder: Path, how: str) -> None:
    """One checkpoint only is kept: if the next harms it, nothing is left."""
    step, seed = (2, 2) if how == "moment" else (1, 9)

    def work(number: int) -> None:
        die_at(number)
        save(folder, step, state_of(seed), keep=1)

    for number in count(1):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1, keep=1)
        end = ended(in_child(partial(work, number)))
        report(folder, how=how, at=number, killed=end == KILLED, seed=found(folder, {1: (1, 9), 2: (2,)}))
        save(folder, 3, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        if end == 0:
            return


def at_random(folder: Path) -> None:
    """The saves go on from whatever the kill before left behind."""
    shutil.rmtree(folder, ignore_errors=True)
    state = state_of(0, LARGE)

    def save_large(step: int) -> None:
        marked = {key: tensor + step for key, tensor in state.items()}
        finish(folder, parts_of(folder, step, marked), header(step, graph_of(LARGE)), keep=1)

    def work(step: int) -> None:
        while True:
            step += 1
            save_large(step)

    took = []
    for step in (1, 2, 3):
        began = time.perf_counter()
        save_large(step)
        took.append(time.perf_counter() - began)
    for number in range(RANDOM):
        child = in_child(partial(work, step))
        time.sleep(statistics.median(took) * (0.5 + number / 4))
        os.kill(child, signal.SIGKILL)
        end = ended(child)
        newest = latest(folder)
        assert newest is not None
        checkpoint = open_checkpoint(newest, verify=True)
        assert checkpoint.manifest.step >= step
        step = checkpoint.manifest.step
        assert_holds(checkpoint, {key: tensor + step for key, tensor in state.items()})
        report(folder, how="random", at=number, killed=end == KILLED, step=step)


def report(folder: Path, **parts: object) -> None:
    unfinished = any(path.name.endswith(".partial") for path in folder.iterdir())
    print(json.dumps({**parts, "unfinished": unfinished}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)  # others would not live on in the children
    for how in ("moment", "again"):
        at_every_moment(Path(sys.argv[1]), how)
    at_random(Path(sys.argv[1]))
