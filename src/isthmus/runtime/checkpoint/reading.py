"""Read checkpoints that were saved under one plan under any other.

    DIR/step-00000120/manifest.json                     what there is, where, and its hashes (manifest.py)
    DIR/step-00000120/va1+A100-40GB+0.safetensors       what that worker held (saving.py)

A worker reads only the elements that it will hold, from whichever files have them (extents.py). Nothing is unpickled,
and every file is checked before it is trusted to be what the manifest says.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.cluster.spec import Precision
from isthmus.errors import CheckpointError, UsageError
from isthmus.files import plain_target, write_whole
from isthmus.model import source
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Optimizer
from isthmus.runtime.checkpoint.extents import Extent, MemberCut, Overlap, Shape, overlaps, part_elements
from isthmus.runtime.checkpoint.manifest import (
    MANIFEST,
    Header,
    Manifest,
    PartInfo,
    PieceInfo,
    Quantity,
    SavedScale,
    read_manifest,
)
from isthmus.runtime.checkpoint.saving import (
    Piece,
    SavedPart,
    Saver,
    clear,
    complete_folders,
    finish,
    saved_folders,
    step_of,
    write_part,
)
from isthmus.runtime.checkpoint.tensor_file import (
    DTYPES,
    TensorEntry,
    check_run,
    hash_files,
    open_tensors,
    sync_folder,
    write_tensors,
    writing,
)

__all__ = [
    "Checkpoint",
    "Header",
    "MemberCut",
    "PartInfo",
    "Piece",
    "RefusedCheckpoint",
    "SavedPart",
    "SavedScale",
    "Saver",
    "assemble",
    "clear",
    "export",
    "export_folder",
    "finish",
    "latest",
    "newest_whole",
    "open_checkpoint",
    "write_part",
]

_OPEN = 64  # files held open at a time
_EXPORTED: Mapping[Precision, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}


def latest(folder: Path | str) -> Path | None:
    """Return the newest complete checkpoint of a folder, or None."""
    return max(complete_folders(Path(folder)).items(), default=(0, None))[1]


class RefusedCheckpoint(NamedTuple):
    """A checkpoint that is not complete, and what is wrong with it."""

    path: Path
    error: CheckpointError


def newest_whole(folder: Path | str) -> tuple[Checkpoint | None, list[RefusedCheckpoint]]:
    """Return the newest checkpoint that is complete to the last byte, and the newer ones that are not.

    Raise CheckpointError if there are some and none is complete.
    """
    refused: list[RefusedCheckpoint] = []
    for path in saved_folders(Path(folder)):
        try:
            return open_checkpoint(path, verify=True), refused
        except CheckpointError as error:
            refused.append(RefusedCheckpoint(path, error))
    if refused:
        raise CheckpointError(
            "every checkpoint here is damaged",
            where=str(folder),
            found=f"{len(refused)} of them; the newest: {refused[0].error.where}: {refused[0].error.what}",
            next="Restore one from a copy, or train into another folder",
        )
    return None, refused


def open_checkpoint(path: Path | str, *, verify: bool = False) -> Checkpoint:
    """Open the checkpoint in folder `path`, and check its manifest and the sizes of its files.

    With `verify` every byte is read and hashed too.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        newest = latest(path)
        raise CheckpointError(
            "there is no checkpoint here",
            where=str(path),
            expected=f"a folder with a {MANIFEST}",
            next=f"The newest in it is {newest}" if newest else None,
        )
    _regular(path / MANIFEST)
    manifest = read_manifest(path / MANIFEST)
    if step_of(path) not in (None, manifest.step):
        raise _damaged(path / MANIFEST, "this is the manifest of another step", str(manifest.step), str(step_of(path)))
    for part in manifest.parts:
        size = _regular(path / part.file).st_size
        if size != part.bytes:
            raise _damaged(path / part.file, "the file has another size", f"{size} bytes", f"{part.bytes} bytes")
    checkpoint = Checkpoint(path, manifest)
    if verify:
        checkpoint.verify()
    return checkpoint


class Checkpoint:
    """An open checkpoint; `manifest` says what it holds."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._parts = {part.file: part for part in manifest.parts}
        self._pieces: dict[tuple[str, Quantity], list[tuple[str, PieceInfo]]] = {}
        for part in manifest.parts:
            for piece in part.pieces:
                self._pieces.setdefault((piece.parameter, piece.quantity), []).append((part.file, piece))
        self._files: dict[str, dict[str, Tensor]] = {}  # tensors of open files, in the order of opening

    def names(self, quantity: Quantity) -> tuple[str, ...]:
        """Return the names of the parameters or buffers that have this quantity."""
        return tuple(name for name, kind in self._pieces if kind == quantity)

    def form(self, parameter: str, quantity: Quantity = "weight") -> tuple[str, Shape]:
        """Return the dtype (`F32`) and shape of a whole tensor."""
        _, piece = self._of(parameter, quantity)[0]
        return piece.dtype, piece.shape

    def read(
        self,
        parameter: str,
        quantity: Quantity = "weight",
        start: int = 0,
        stop: int | None = None,
        cut: MemberCut | None = None,
    ) -> Tensor:
        """Return elements [start, stop) of the flattened part that `cut` makes (None: the whole) in new memory."""
        pieces = self._of(parameter, quantity)
        dtype, shape = self.form(parameter, quantity)
        elements = part_elements(shape, cut)
        wanted = Extent(start, elements if stop is None else stop, cut)
        if (cut and not cut.fits(shape)) or not 0 <= start <= wanted.stop <= elements:
            what = f"{quantity} of {parameter!r} has no such part"
            raise UsageError(what, found=str(wanted), expected=f"within its shape {shape}")
        held = pieces[0][1].cut
        if cut and held and cut.dim != held.dim:
            whole = self.read(parameter, quantity)
            everything = Extent(0, whole.numel())
            return _filled(DTYPES[dtype], wanted, ((whole, overlap) for overlap in overlaps(shape, wanted, everything)))
        return _filled(DTYPES[dtype], wanted, self._sources(pieces, shape, wanted))

    def fits(self, graph: BlockGraph) -> None:
        """Raise CheckpointError unless the model has the parameters of this checkpoint, in their shapes."""
        ours, theirs = self.manifest.parameters, {item.name: item.shape for item in graph.parameters}
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                raise CheckpointError(
                    f"the checkpoint is of another model: parameter {name!r} differs",
                    where=str(self.path),
                    found=str(ours.get(name, "none")),
                    expected=str(theirs.get(name, "none")),
                    next="Resume with the model that was saved, or begin in another folder",
                )

    def compare_buffers(self, buffers: Mapping[str, Shape]) -> tuple[str, ...]:
        """Return notes on buffers that are new or gone; raise CheckpointError if one has another shape.

        `buffers` are those of the model.
        """
        saved = {name: self.form(name, "buffer")[1] for name in self.names("buffer")}
        for name in sorted(saved.keys() & buffers.keys()):
            if saved[name] != buffers[name]:
                raise CheckpointError(
                    f"the checkpoint is of another model: buffer {name!r} has another shape",
                    where=str(self.path),
                    found=str(saved[name]),
                    expected=str(buffers[name]),
                    next="Resume with the model that was saved, or begin in another folder",
                )
        notes = []
        if new := sorted(buffers.keys() - saved.keys()):
            notes.append(f"the checkpoint has no buffer {_listed(new)}: it keeps the value that the model gives it")
        if gone := sorted(saved.keys() - buffers.keys()):
            notes.append(f"the model has no buffer {_listed(gone)} any more: what was saved of it is dropped")
        return tuple(notes)

    def differences(self, graph: BlockGraph, precision: Precision, optimizer: Optimizer) -> tuple[str, ...]:
        """Return notes for people on what a run that resumes from here may do differently from the one that saved."""
        saved, notes = self.manifest, []
        if saved.digest is None:
            notes.append("the checkpoint is of an older Isthmus, whose manifests have no digest: edits would go unseen")
        before, now = saved.job.optimizer.momentum, optimizer.momentum
        if optimizer.name == "sgd" and before and not now:
            notes.append(f"the checkpoint was saved with momentum {before:g}, and this run has none: it is dropped")
        if optimizer.name == "sgd" and now and not before:
            notes.append(f"the checkpoint was saved without momentum, and this run has {now:g}: it begins at 0")
        if saved.precision != precision:
            notes.append(
                f"the checkpoint was saved by a run in {saved.precision}, and this run computes in {precision}, so its "
                "losses will differ a little from those that the other would have had"
            )
        if saved.model != graph.digest:
            notes.append(
                f"the model's code has changed since the checkpoint was saved (digest {saved.model[:12]} then, "
                f"{graph.digest[:12]} now); the parameters fit, so training goes on with what the model computes now"
            )
        return tuple(notes)

    def verify(self) -> None:
        """Read every file; raise CheckpointError if its hash or the run that wrote it differs from the manifest."""
        paths = [self.path / part.file for part in self.manifest.parts]
        for path, part, found in zip(paths, self.manifest.parts, hash_files(paths), strict=True):
            if found != part.sha256:
                raise _damaged(path, "the file changed after it was saved", f"hash {found}", part.sha256)
            check_run(path, self.manifest.run)

    def _of(self, parameter: str, quantity: Quantity) -> list[tuple[str, PieceInfo]]:
        pieces = self._pieces.get((parameter, quantity))
        if pieces is None:
            raise CheckpointError(f"the checkpoint has no {quantity} of {parameter!r}", where=str(self.path))
        return pieces

    def _sources(
        self, pieces: list[tuple[str, PieceInfo]], shape: Shape, wanted: Extent
    ) -> Iterator[tuple[Tensor, Overlap]]:
        """Yield each tensor to copy from, with the overlap to copy; open a file only if it has some of it."""
        for file, piece in pieces:
            found = list(overlaps(shape, wanted, piece.extent))
            if found:
                data = self._file(file)[piece.key]  # memory-mapped: only what is copied is read
                yield from ((data, overlap) for overlap in found)

    def _file(self, file: str) -> dict[str, Tensor]:
        if file not in self._files:
            if len(self._files) == _OPEN:
                del self._files[next(iter(self._files))]
            pieces = self._parts[file].pieces
            entries = {piece.key: TensorEntry(piece.dtype, (piece.stop - piece.start,)) for piece in pieces}
            self._files[file] = open_tensors(self.path / file, entries, self.manifest.run)
        return self._files[file]


def export(
    checkpoint: Checkpoint, path: Path | str, precision: Precision | None = None, *, average: bool = False
) -> Path:
    """Write the weights as one safetensors file, whole or not at all, in the job's precision or the one given.

    With `average`, the moving average of the weights is written in their place.

    Weights and buffers have the names of the original model. Tied weights are written once, under their first name; the
    metadata names the others as `safetensors.torch.save_model` does, so `safetensors.torch.load_model(model, path)`
    loads the file. Only one tensor at a time is in memory.
    """
    path = plain_target(path, CheckpointError)
    dtype = _EXPORTED[precision or checkpoint.manifest.precision]
    weights = {name: TensorEntry(dtype, shape) for name, shape in checkpoint.manifest.parameters.items()}
    buffers = {name: TensorEntry(*checkpoint.form(name, "buffer")) for name in checkpoint.names("buffer")}
    ties = {other: name for name, others in checkpoint.manifest.ties.items() for other in others}

    quantity: Quantity = "average" if average else "weight"
    if average and not set(weights) <= set(checkpoint.names("average")):
        raise CheckpointError(
            "the checkpoint has no average of the weights",
            where=str(checkpoint.path),
            expected="a job whose optimizer has an average, like average: 0.999, after its first update",
            next="Export the weights themselves: leave out --average",
        )

    def load(name: str) -> Tensor:
        return checkpoint.read(name, quantity).to(DTYPES[dtype]) if name in weights else checkpoint.read(name, "buffer")

    aside = path.with_name(f".{path.name}.aside")
    with writing(path, next="Free some space, or check its folder"):
        try:
            write_tensors(aside, buffers | weights, load, {"format": "pt", **ties})
            aside.replace(path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)  # already gone if all went well
    return path


def export_folder(checkpoint: Checkpoint, folder: Path, *, average: bool = False) -> Path:
    """Write the weights and the configuration of a transformers model, as `from_pretrained` reads them."""
    found = source.parse(checkpoint.manifest.job.model)
    if not isinstance(found, source.Config):
        raise UsageError(
            "only a transformers model has a folder to be loaded from",
            found=f"the model {checkpoint.manifest.job.model}",
            expected="a model of the form hf:CONFIG.json",
            next="Name a file: -o weights.safetensors",
        )
    try:
        config = found.path.read_bytes()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        where, reason = str(problem.filename), str(problem.strerror)
        raise CheckpointError("the folder cannot be written", where=where, found=reason) from None
    export(checkpoint, folder / "model.safetensors", average=average)
    write_whole(folder / "config.json", config)
    return folder


def assemble(pieces: Sequence[Piece]) -> Tensor:
    """Return a whole tensor, joined from the pieces that cover it."""
    shape = pieces[0].shape
    whole = Extent(0, part_elements(shape, None))
    sources = ((piece.data, box) for piece in pieces for box in overlaps(shape, whole, piece.info.extent))
    return _filled(pieces[0].data.dtype, whole, sources).view(shape)


def _filled(dtype: torch.dtype, wanted: Extent, sources: Iterable[tuple[Tensor, Overlap]]) -> Tensor:
    """Return the wanted elements, copied box by box."""
    result = torch.empty(wanted.stop - wanted.start, dtype=dtype)
    for data, box in sources:
        size = (box.rows, box.columns)
        taken = data[box.other_at :].as_strided(size, (box.other_stride, 1))
        result[box.at :].as_strided(size, (box.stride, 1)).copy_(taken)
    return result


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _regular(path: Path) -> os.stat_result:
    """Return the file status of a plain file; refuse a link, a pipe or a folder without opening it."""
    try:
        found = path.lstat()
    except OSError as problem:
        raise _damaged(path, f"cannot read the file: {problem.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path, "this is not a plain file", stat.filemode(found.st_mode))
    return found


def _damaged(path: Path, what: str, found: str | None = None, expected: str | None = None) -> CheckpointError:
    return CheckpointError(what, where=str(path), found=found, expected=expected, next="Use an older checkpoint")
