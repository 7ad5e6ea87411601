"""Write checkpoints: each worker writes its part in the background, and one process finishes the whole.

A step's parts are written to `step-00000120.partial`. When every element of every parameter is there exactly once, and
all of it is on the disk, the folder is renamed to `step-00000120`. This is a single rename, so a folder with that name
is complete at every moment, whatever is killed when. Older checkpoints are removed after that, never before.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from isthmus.errors import CheckpointError
from isthmus.runtime.checkpoint.extents import MemberCut
from isthmus.runtime.checkpoint.manifest import (
    LARGEST,
    MANIFEST,
    Header,
    Manifest,
    PartInfo,
    PieceInfo,
    Quantity,
    check_whole,
    encode_manifest,
)
from isthmus.runtime.checkpoint.tensor_file import (
    DTYPES,
    TensorEntry,
    hash_files,
    run_metadata,
    run_of,
    sync_folder,
    write_tensors,
    writing,
)

__all__ = [
    "Piece",
    "SavedPart",
    "Saver",
    "clear",
    "complete_folders",
    "finish",
    "saved_folders",
    "set_aside",
    "step_of",
    "write_part",
]

_FOLDER = re.compile(r"step-(?P<step>[0-9]{8,18})(?P<state>\.partial|\.old)?")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ROOM = "Earlier checkpoints are whole. Free some space or repair the folder, then continue with --resume"


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """What one worker holds of one tensor, to be saved: elements from `start` on of its flattened part.

    `shape` is that of the whole tensor; `cut` says which part of it this worker's tensor group member has (None: the
    whole). `data` is flat, in host memory, and must not change until it is saved.
    """

    parameter: str
    quantity: Quantity
    shape: tuple[int, ...]
    data: Tensor
    start: int = 0
    cut: MemberCut | None = None

    @property
    def info(self) -> PieceInfo:
        """Return everything about the piece but its data."""
        return PieceInfo(
            parameter=self.parameter,
            quantity=self.quantity,
            dtype=_NAMES[self.data.dtype],
            shape=tuple(self.shape),
            start=self.start,
            stop=self.start + self.data.numel(),
            cut=self.cut,
        )


class SavedPart(NamedTuple):
    """A part that is on the disk."""

    step: int
    part: PartInfo


def write_part(folder: Path, step: int, name: str, pieces: Iterable[Piece], *, run: str = "") -> PartInfo:
    """Write what worker `name` (its device) of a run holds at `step`; `finish` makes the part count."""
    file = _partial(folder, step) / f"{name.replace('/', '+')}.safetensors"
    pieces = tuple(pieces)
    for piece in pieces:
        _check(piece, str(file))
    infos = tuple(piece.info for piece in pieces)
    data = {info.key: piece.data for info, piece in zip(infos, pieces, strict=True)}
    if len(data) < len(pieces):
        twice = Counter(info.key for info in infos).most_common(1)[0][0]
        raise CheckpointError(f"{twice!r} is to be saved twice", where=str(file))
    entries = {info.key: TensorEntry(info.dtype, (info.stop - info.start,)) for info in infos}
    with writing(file, next=_ROOM):
        try:
            _make_folder(file.parent)
            written = write_tensors(file, entries, data.__getitem__, run_metadata(run))
        except OSError:
            file.unlink(missing_ok=True)  # a full disk needs the space
            raise
    return PartInfo(file=file.name, sha256=written.sha256, bytes=written.bytes, pieces=infos)


def _check(piece: Piece, where: str) -> None:
    data = piece.data
    sound = data.dim() == 1 and data.device.type == "cpu" and data.dtype in _NAMES
    if not sound:
        raise CheckpointError(
            f"{piece.quantity} of {piece.parameter!r} cannot be saved in this form",
            where=where,
            found=f"{data.dtype} of shape {tuple(data.shape)} on {data.device}",
            expected=f"flat, on cpu, one of {', '.join(_NAMES.values())}",
        )


def finish(folder: Path, parts: Sequence[PartInfo], header: Header, *, keep: int = 2) -> Path:
    """Turn the parts of `header.step` into a checkpoint if they are complete; then remove old ones but `keep` - 1.

    Every byte of the parts is read again and compared with what was written, so a checkpoint is only removed once its
    successor is known to be complete.
    """
    partial, final = _partial(folder, header.step), _folder(folder, header.step)
    manifest = Manifest(**msgspec.structs.asdict(header), parts=tuple(parts))
    check_whole(manifest, where=str(partial), next="Earlier checkpoints are whole; this is a bug in Isthmus")
    text = encode_manifest(manifest)
    if len(text) > LARGEST:
        raise CheckpointError("its manifest is too large", where=str(partial), found=f"{len(text)} bytes")
    with writing(partial, next=_ROOM):
        try:
            _check_files(partial, parts, header.run)
            _write(partial / MANIFEST, text)
            sync_folder(partial)
            _name_finally(partial, final)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
            raise
    _remove_older(folder, header.step, keep)
    return final


def clear(folder: Path) -> None:
    """Remove what ended runs left unfinished; call this before a run saves anything."""
    for path, _, state in _listed(folder):
        if state == ".partial":
            _remove(path)


def complete_folders(folder: Path) -> dict[int, Path]:
    """Return complete checkpoints by step, in order.

    A folder `.old` counts if a kill came between the two renames of a replacement.
    """
    found: dict[int, Path] = {}
    for path, step, state in sorted(_listed(folder), key=lambda item: item[1:]):  # the plain name comes before `.old`
        if state != ".partial" and (path / MANIFEST).is_file():
            found.setdefault(step, path)
    return found


def saved_folders(folder: Path) -> list[Path]:
    """Return all that should be complete checkpoints, newest first; within a step the plain name before `.old`."""
    listed = [item for item in _listed(folder) if item[2] != ".partial"]
    return [path for path, _, _ in sorted(listed, key=lambda item: (-item[1], item[2]))]


def step_of(path: Path) -> int | None:
    """Return the step after which a checkpoint's folder is named; None if it has another kind of name."""
    match = _FOLDER.fullmatch(path.name)
    return int(match["step"]) if match else None


def set_aside(path: Path) -> Path | None:
    """Rename a damaged checkpoint, so that nothing takes it for a complete one or removes it.

    Return its new path, or None if renaming fails.
    """
    names = (path.with_name(f"{path.name}.damaged{number}") for number in ("", *(f"-{n}" for n in range(2, 100))))
    aside = next(name for name in names if not name.exists())
    try:
        path.rename(aside)
    except OSError:
        return None
    return aside


def _listed(folder: Path) -> list[tuple[Path, int, str]]:
    """Return everything in a folder of checkpoints that is ours: path, step, state."""
    matches = [(path, _FOLDER.fullmatch(path.name)) for path in folder.iterdir()] if folder.is_dir() else []
    return [(path, int(match["step"]), match["state"] or "") for path, match in matches if match]


def _folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _partial(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.partial"


def _make_folder(folder: Path) -> None:
    """Create a folder and those above it; each new one is on the disk before anything is written into it."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _check_files(partial: Path, parts: Sequence[PartInfo], run: str) -> None:
    """Check that the parts are complete and as this run wrote them; remove what an earlier run left beside them."""
    paths = [partial / part.file for part in parts]
    for path, part in zip(paths, parts, strict=True):
        if (size := path.stat().st_size) != part.bytes:
            raise _changed(path, f"{size} bytes", f"{part.bytes}")
    for path, part, digest in zip(paths, parts, hash_files(paths), strict=True):
        if digest != part.sha256:
            raise _changed(path, f"hash {digest}", part.sha256)
        if (writer := run_of(path)) != run:
            raise _changed(path, f"a part of run {writer!r}", f"one of run {run!r}")
    for stray in {path.name for path in partial.iterdir()} - {part.file for part in parts}:
        (partial / stray).unlink()


def _changed(path: Path, found: str, expected: str) -> CheckpointError:
    what = "a part changed after it was written"
    next = "Earlier checkpoints are whole. See who else writes to this folder, then continue with --resume"
    return CheckpointError(what, where=str(path), found=found, expected=expected, next=next)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _name_finally(partial: Path, final: Path) -> None:
    """Rename the folder, which is the moment at which the checkpoint exists.

    A checkpoint of the same step (of a run that was resumed from further back) is moved out of the way.
    """
    old = final.with_name(f"{final.name}.old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # left by a kill, after its successor was named
        final.rename(old)
    partial.rename(final)
    sync_folder(final.parent)


def _remove_older(folder: Path, step: int, keep: int) -> None:
    """Remove what this checkpoint supersedes; what cannot be removed now is tried again at the next one.

    Parts of later steps may be in progress already, so they stay. So does a folder without a manifest: what it holds
    was once a checkpoint, and somebody may repair it.
    """
    kept = [path for of, path in complete_folders(folder).items() if of <= step][-max(keep, 1) :]
    for path, of, state in _listed(folder):
        superseded = state == ".partial" or (path / MANIFEST).is_file()
        if of <= step and superseded and path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    """Rename a checkpoint before its files are removed, so that no half of one looks complete."""
    doomed = path.with_name(f"{path.name.partition('.')[0]}.partial")
    if path != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            path.rename(doomed)
        except OSError:
            return
    shutil.rmtree(doomed, ignore_errors=True)


class Saver:
    """Writes one worker's parts in a thread while training goes on; one at a time.

    An error in the thread is raised by the next call, whichever it is.
    """

    def __init__(self, folder: Path, name: str, run: str = "") -> None:
        self._folder, self._name, self._run = folder, name, run
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._future: Future[SavedPart] | None = None
        self._saved: list[SavedPart] = []

    def save(self, step: int, pieces: Iterable[Piece]) -> None:
        """Start to write a part; wait first for the one before if that is not on the disk yet."""
        self._collect()
        self._future = self._thread.submit(self._write, step, tuple(pieces))

    def saved(self, *, wait: bool = False) -> list[SavedPart]:
        """Return the parts written since the last call; with `wait`, also the one in progress."""
        if wait or (self._future and self._future.done()):
            self._collect()
        found, self._saved = self._saved, []
        return found

    def close(self) -> list[SavedPart]:
        """Wait for the part in progress, and end the thread."""
        self._thread.shutdown(wait=True)
        return self.saved(wait=True)

    def _write(self, step: int, pieces: tuple[Piece, ...]) -> SavedPart:
        return SavedPart(step, write_part(self._folder, step, self._name, pieces, run=self._run))

    def _collect(self) -> None:
        future, self._future = self._future, None
        if future:
            self._saved.append(future.result())
