"""The description of a checkpoint (`manifest.json`), and the rules by which a checkpoint is complete.

It lists the size and hash of every file, and for every saved tensor which elements of which parameter it has; none of
this depends on the plan. Its `digest` is the hash of everything else in it. The same rules are checked when a
checkpoint is finished and when it is read: every parameter of the model has its weight and the quantities of its
optimizer, with each element exactly once.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from isthmus.cluster.spec import Precision
from isthmus.errors import CheckpointError, IsthmusError
from isthmus.files import parse_json
from isthmus.files.document import read_text
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Optimizer
from isthmus.model.load_job import check_job
from isthmus.runtime.checkpoint.extents import Count, Extent, MemberCut, Shape, part_elements

__all__ = [
    "LARGEST",
    "MANIFEST",
    "WIDTHS",
    "Header",
    "Manifest",
    "PartInfo",
    "PieceInfo",
    "Quantity",
    "SavedScale",
    "check_whole",
    "digest_of",
    "encode_manifest",
    "quantities_of",
    "read_manifest",
]

MANIFEST = "manifest.json"
LARGEST = 64 * 2**20  # bytes of a manifest
WIDTHS = {  # bytes of one element, by safetensors' names
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "C64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_TRAINED = ("F64", "F32", "F16", "BF16")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,240}\.safetensors")
_OLDER = "Use an older checkpoint: this one is damaged, or was edited"

Quantity = Literal["weight", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum", "average", "buffer"]
Run = Annotated[str, msgspec.Meta(max_length=64)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class PieceInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One saved tensor: elements [start, stop) of a part of the parameter (the whole of it without `cut`)."""

    parameter: str
    quantity: Quantity
    dtype: str
    shape: Shape  # of the whole parameter
    start: Count
    stop: Count
    cut: MemberCut | None = None

    @property
    def key(self) -> str:
        """Return the name of the tensor in its file."""
        member = f":{self.cut.member}of{self.cut.members}" if self.cut else ""
        return f"{self.parameter}:{self.quantity}:{self.start}-{self.stop}{member}"

    @property
    def extent(self) -> Extent:
        """Return the elements that the piece has."""
        return Extent(self.start, self.stop, self.cut)

    @property
    def bytes(self) -> int:
        """Return the size of the piece in its file, in bytes."""
        return (self.stop - self.start) * WIDTHS[self.dtype]


class PartInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a checkpoint: what one worker saved."""

    file: str
    sha256: Digest
    bytes: Count
    pieces: tuple[PieceInfo, ...]


class SavedScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The factor on the loss in fp16, and the number of steps since it was last changed."""

    value: float
    steps: Count = 0


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all workers of a run know alike at a step.

    `updates` counts the updates made: a step whose gradients overflowed makes none. `samples` counts all samples used
    since the beginning, so that a resumed run continues after them. `ties` gives the other names of a parameter.
    """

    kind: Literal["checkpoint"] = "checkpoint"
    version: Literal[1] = 1
    step: Count
    job: Job
    model: str  # digest of the captured model
    precision: Precision
    updates: Count
    samples: Count
    parameters: Mapping[str, Shape]
    ties: Mapping[str, tuple[str, ...]] = {}
    loss_scale: SavedScale | None = None
    run: Run = ""  # identity of the run that saved it, which every part has too; older files have none

    @classmethod
    def of(
        cls,
        graph: BlockGraph,
        *,
        step: int,
        job: Job,
        precision: Precision,
        updates: int,
        samples: int,
        loss_scale: SavedScale | None = None,
        run: str = "",
    ) -> Header:
        """Return the header of a run of this model."""
        return cls(
            step=step,
            job=job,
            model=graph.digest,
            precision=precision,
            updates=updates,
            samples=samples,
            parameters={parameter.name: parameter.shape for parameter in graph.parameters},
            ties={parameter.name: parameter.ties for parameter in graph.parameters if parameter.ties},
            loss_scale=loss_scale,
            run=run,
        )


class Manifest(Header, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole manifest."""

    parts: tuple[PartInfo, ...]
    digest: Digest | None = None  # of all the rest; older files have none


def quantities_of(optimizer: Optimizer) -> tuple[Quantity, ...]:
    """Return the quantities kept for each parameter from the first update on; before it, perhaps only the weight."""
    average: tuple[Quantity, ...] = ("average",) if optimizer.average is not None else ()
    if optimizer.name == "sgd":
        return ("weight", *(("momentum",) if optimizer.momentum else ()), *average)
    return ("weight", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if optimizer.amsgrad else ()), *average)


def read_manifest(path: Path) -> Manifest:
    """Read the file and check every rule that can be checked without the files it lists."""
    document = parse_json(read_text(path, LARGEST, CheckpointError), name=str(path), error=CheckpointError)
    document.check("checkpoint")
    manifest = document.convert(Manifest)
    check_whole(manifest, where=str(path), next=_OLDER)
    if manifest.digest not in (None, found := digest_of(document.value)):
        what = "the manifest changed after it was saved"
        raise CheckpointError(what, where=str(path), found=f"hash {found}", expected=manifest.digest, next=_OLDER)
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the content of the file, with its digest."""
    values = json.loads(msgspec.json.encode(manifest))
    values["digest"] = digest_of(values)
    return msgspec.json.format(msgspec.json.encode(values), indent=1) + b"\n"


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the hash of a manifest without its digest, however it is laid out in the file.

    This uses the file's own values and not those of our types, which may get fields that older files do not have.
    """
    rest = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def check_whole(manifest: Manifest, *, where: str, next: str) -> None:
    """Raise an error for the first rule that is broken."""
    for what, found, expected in _faults(manifest):
        raise CheckpointError(what, where=where, found=found, expected=expected, next=next)


_Fault = tuple[str, str | None, str | None]  # what, found, expected


def _faults(manifest: Manifest) -> Iterator[_Fault]:
    try:
        check_job(manifest.job)
    except IsthmusError as problem:
        yield f"its job is not valid: {problem.what}", problem.found, problem.expected
    yield from _header_faults(manifest)
    for index, part in enumerate(manifest.parts):
        yield from _part_faults(part, f"parts[{index}]")
    if twice := _first_twice([part.file for part in manifest.parts]):
        yield f"two parts are the same file {twice}", None, None
    yield from _cover_faults(manifest)


def _header_faults(manifest: Manifest) -> Iterator[_Fault]:
    if manifest.updates > manifest.step:
        yield "it has more updates than steps", f"{manifest.updates} in {manifest.step} steps", None
    scale = manifest.loss_scale
    if scale and not 0 < scale.value < math.inf:
        yield "its loss scale is not valid", str(scale.value), "more than 0"
    names = [*manifest.parameters, *(name for ties in manifest.ties.values() for name in ties)]
    if twice := _first_twice(names):
        yield f"two parameters are named {twice!r}", None, None
    if unknown := manifest.ties.keys() - manifest.parameters.keys():
        yield f"{min(unknown)!r} has ties and is no parameter", None, None


def _part_faults(part: PartInfo, where: str) -> Iterator[_Fault]:
    if not _FILE.fullmatch(part.file):
        expected = "a plain file name that ends in .safetensors"
        yield f"{where}.file is not a file of this folder", repr(part.file[:80]), expected
    for index, piece in enumerate(part.pieces):
        yield from _piece_faults(piece, f"{where}.pieces[{index}]")
    held = sum(piece.bytes for piece in part.pieces)
    if held > part.bytes:
        yield f"{where} is smaller than what it holds", f"{part.bytes} bytes", f"more than {held}"


def _piece_faults(piece: PieceInfo, where: str) -> Iterator[_Fault]:
    allowed = tuple(WIDTHS) if piece.quantity == "buffer" else _TRAINED
    if piece.dtype not in allowed:
        yield f"{where} has a wrong dtype", repr(piece.dtype[:40]), f"one of {', '.join(allowed)}"
    if piece.cut and not piece.cut.fits(piece.shape):
        yield f"{where}.cut does not fit", f"{msgspec.to_builtins(piece.cut)} of the shape {piece.shape}", None
    elements = part_elements(piece.shape, piece.cut)
    if not piece.start <= piece.stop <= elements:
        yield f"{where} lies outside of its parameter", f"{piece.start} to {piece.stop}", f"within 0 to {elements}"


def _cover_faults(manifest: Manifest) -> Iterator[_Fault]:
    """Yield a fault for every tensor that is missing, unknown, or not covered by its pieces."""
    pieces = sorted((piece for part in manifest.parts for piece in part.pieces), key=_tensor)
    found = {key: list(group) for key, group in groupby(pieces, key=_tensor)}
    kept = quantities_of(manifest.job.optimizer)
    known = {(name, kind) for name in manifest.parameters for kind in kept}
    needed = known if manifest.updates else {(name, "weight") for name in manifest.parameters}
    if missing := sorted(needed - found.keys()):
        yield f"{_show(missing[0])} is missing", None, None
    for key, group in found.items():
        first = group[0]
        if key not in known and (first.quantity != "buffer" or first.parameter in manifest.parameters):
            yield f"{_show(key)} belongs to no parameter of the model", None, None
        shape = manifest.parameters.get(first.parameter, first.shape)
        if first.shape != shape:
            yield f"{_show(key)} has another shape than its parameter", str(first.shape)[:80], str(shape)[:80]
        yield from _tensor_faults(_show(key), group)


def _tensor_faults(name: str, pieces: list[PieceInfo]) -> Iterator[_Fault]:
    forms = {(p.shape, p.dtype, p.cut and (p.cut.dim, p.cut.sections, p.cut.members)) for p in pieces}
    if len(forms) > 1:
        yield f"the pieces of {name} do not belong together", "several shapes, dtypes or ways to cut", "one"
    cut = pieces[0].cut
    elements = part_elements(pieces[0].shape, cut)
    by_member = {
        member: list(group)
        for member, group in groupby(sorted(pieces, key=_place), key=lambda p: p.cut.member if p.cut else 0)
    }
    if cut and elements and len(by_member) < cut.members:
        absent = next(member for member in range(cut.members) if member not in by_member)
        yield f"{name} lacks the part of member {absent} of {cut.members}", None, None
    for member, group in by_member.items():
        whose = f"{name} of member {member}" if cut else name
        yield from _gap_faults(whose, group, elements)


def _gap_faults(name: str, pieces: list[PieceInfo], elements: int) -> Iterator[_Fault]:
    """Yield a fault where `pieces`, in order of their places, do not tile [0, elements)."""
    reached = 0
    for piece in pieces:
        if piece.start == piece.stop:
            continue
        if piece.start < reached:
            yield f"{name} is saved twice", f"elements {piece.start} to {min(reached, piece.stop)} in two pieces", None
        if piece.start > reached:
            yield f"{name} is not whole", f"no elements {reached} to {piece.start}", None
        reached = piece.stop
    if reached < elements:
        yield f"{name} is not whole", f"no elements {reached} to {elements}", None


def _tensor(piece: PieceInfo) -> tuple[str, Quantity]:
    return piece.parameter, piece.quantity


def _place(piece: PieceInfo) -> tuple[int, int, int]:
    return piece.cut.member if piece.cut else 0, piece.start, piece.stop


def _show(key: tuple[str, str]) -> str:
    return f"{key[1]} of {key[0][:200]!r}"


def _first_twice(names: list[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
