"""Lock a folder of checkpoints for one run, because two runs would remove each other's files.

The lock is the system's (`flock`) on the file `.lock`, so it ends with the process that holds it, however that ends.
The file names the owner, unless another user left it and it cannot be written. On a file system without such locks the
file alone must do: an owner on this host whose process is gone does not count, and any other counts until somebody
removes the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from isthmus.errors import CheckpointError
from isthmus.runtime.checkpoint.tensor_file import writing

__all__ = ["LOCK", "lock_folder"]

LOCK = ".lock"
_LARGEST = 4096  # bytes
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


class _Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a lock."""

    host: str
    process: int
    command: str
    run: str
    since: str

    def __str__(self) -> str:
        run = f" (run {self.run})" if self.run else ""
        return f"process {self.process} on host {self.host} since {self.since}: {self.command}{run}"


@contextmanager
def lock_folder(folder: Path, run: str, take: Callable[[int, int], None] = fcntl.flock) -> Iterator[None]:
    """Hold the lock of an existing folder; raise CheckpointError with the owner's name if another run holds it."""
    path = folder / LOCK
    handle, writable = _opened(path)
    try:
        if not _take(handle, path, take) and not writable:
            raise _unusable(path, os.strerror(errno.EACCES))
        try:
            if writable:
                _write(handle, _ours(run), path)
            yield
        finally:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, 0)  # an empty file names no owner
            with contextlib.suppress(OSError):
                take(handle, fcntl.LOCK_UN)  # a forked child that lives on has the handle too
    finally:
        os.close(handle)


def _opened(path: Path) -> tuple[int, bool]:
    """Open the lock, and return whether it can be written; a file of another user can still be locked."""
    how = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | how, 0o644), True
        except PermissionError:
            return os.open(path, os.O_RDONLY | how), False
    except OSError as problem:
        raise _unusable(path, problem.strerror) from None


def _unusable(path: Path, why: str | None) -> CheckpointError:
    what = f"cannot lock the folder: {why}"
    return CheckpointError(what, where=str(path), next="Name a folder that you can write to")


def _take(handle: int, path: Path, take: Callable[[int, int], None]) -> bool:
    """Take the lock; return whether the system holds it, or else only the file's content does."""
    try:
        take(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(handle)
        next = "Wait for it or stop it, or name another folder"
        raise _taken(path, str(owner) if owner else "a process that does not say its name", next) from None
    except OSError as problem:
        if problem.errno not in _NO_LOCKS:
            raise CheckpointError(f"cannot lock the folder: {problem.strerror}", where=str(path)) from None
        owner = _owner(handle)
        if owner is not None and not _gone(owner):
            raise _taken(path, str(owner), f"If that run has ended, remove {path}") from None
        return False
    return True


def _taken(path: Path, found: str, next: str) -> CheckpointError:
    what = "another run is using this folder of checkpoints"
    return CheckpointError(what, where=str(path.parent), found=found, expected="one run at a time", next=next)


def _ours(run: str) -> bytes:
    owner = _Owner(
        host=socket.gethostname(),
        process=os.getpid(),
        command=shlex.join(sys.argv)[:400],
        run=run,
        since=time.strftime("%Y-%m-%d %H:%M:%S"),
    )
    return msgspec.json.encode(owner) + b"\n"


def _write(handle: int, data: bytes, path: Path) -> None:
    """Write the lock file; raise an error on a full disk, where nothing could be saved anyway."""
    with writing(path, next="Free some space, or name another folder"):
        os.ftruncate(handle, 0)
        os.pwrite(handle, data, 0)


def _owner(handle: int) -> _Owner | None:
    """Return the owner that the lock file names, or None if it names nobody."""
    try:
        return msgspec.json.decode(os.pread(handle, _LARGEST, 0), type=_Owner)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _gone(owner: _Owner) -> bool:
    """Return whether it is certain that the lock's owner has ended."""
    if owner.host != socket.gethostname() or owner.process == os.getpid():
        return False
    try:
        os.kill(owner.process, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False
