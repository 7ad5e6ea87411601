"""One run at a time in a folder of checkpoints, whoever is killed when."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.errors import CheckpointError
from isthmus.runtime.checkpoint.folder_lock import LOCK, lock_folder

HOLDER = """
import sys, time
from pathlib import Path
from isthmus.runtime.checkpoint.folder_lock import lock_folder
with lock_folder(Path(sys.argv[1]), "first"):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held_by_another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def no_locks(handle: int, how: int) -> None:
    """As some network file systems do."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def names(folder: Path, **changes: object) -> None:
    owner = {"host": socket.gethostname(), "process": os.getppid(), "command": "c", "run": "r", "since": "s"}
    (folder / LOCK).write_text(json.dumps(owner | changes))


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        pass
    return process.pid


def test_the_error_names_the_owner_until_it_is_killed(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as owner:
        with (
            pytest.raises(CheckpointError, match="another run is using this folder") as caught,
            lock_folder(tmp_path, ""),
        ):
            pass
        found = caught.value.found
        assert found is not None and caught.value.where == str(tmp_path)
        assert f"process {owner.pid} on host {socket.gethostname()} since 20" in found
        assert f" -c {tmp_path} " in found.replace("'", "") and "run first" in found
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with lock_folder(tmp_path, "second"):
            assert json.loads((tmp_path / LOCK).read_text())["run"] == "second"


@pytest.mark.parametrize("take", [None, no_locks])
def test_twice_in_one_process_and_again_after_an_error(tmp_path: Path, take: object) -> None:
    more = {} if take is None else {"take": take}
    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path, "a", **more):  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "), lock_folder(tmp_path, "b", **more):  # type: ignore[arg-type]
            pass
        raise ZeroDivisionError
    with lock_folder(tmp_path, "c", **more):  # type: ignore[arg-type]
        pass


def test_without_locks_of_the_system_the_file_decides(tmp_path: Path) -> None:
    names(tmp_path)
    with pytest.raises(CheckpointError, match="If that run has ended, remove"), lock_folder(tmp_path, "", no_locks):
        pass
    names(tmp_path, process=gone(), host="elsewhere")
    with pytest.raises(CheckpointError, match="on host elsewhere"), lock_folder(tmp_path, "", no_locks):
        pass
    names(tmp_path, process=gone())
    with lock_folder(tmp_path, "mine", no_locks):
        assert "mine" in (tmp_path / LOCK).read_text()


def test_the_lock_ends_with_its_owner_though_a_forked_child_lives(tmp_path: Path) -> None:
    """The child has the open file too."""
    with lock_folder(tmp_path, "first"):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with lock_folder(tmp_path, "second"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


NOBODY = """
import os, sys
from pathlib import Path
from isthmus.errors import CheckpointError
from isthmus.runtime.checkpoint.folder_lock import lock_folder
os.setuid(65534)
try:
    with lock_folder(Path(sys.argv[1]), "other"):
        print("held")
except CheckpointError as error:
    print(error.found)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_lock_that_another_user_has_left_is_used_if_it_is_free() -> None:
    """It cannot be written, but it can be locked, and read for its owner."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)

        def other() -> str:
            command = [sys.executable, "-c", NOBODY, name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        with lock_folder(folder, "mine"):
            (folder / LOCK).chmod(0o644)
            assert f"process {os.getpid()} on host" in other()
        assert other() == "held\n"


def test_what_is_not_a_plain_file_is_no_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="cannot lock the folder"), lock_folder(tmp_path, ""):
        pass
    assert not (tmp_path / "other").exists()
