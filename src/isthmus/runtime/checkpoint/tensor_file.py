"""Write safetensors files tensor by tensor and hash them on the way; open them only if they hold what they should.

The format is 8 bytes for the length of a JSON header, the header (dtype, shape and place of each tensor), the tensors.
The safetensors library writes whole dictionaries, but a model's weights may not fit in this machine's memory at once.
And what is hashed while it is written need not be read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from isthmus.errors import CheckpointError
from isthmus.runtime.checkpoint.manifest import WIDTHS

__all__ = [
    "DTYPES",
    "TensorEntry",
    "Written",
    "check_run",
    "hash_files",
    "open_tensors",
    "run_metadata",
    "run_of",
    "sync_folder",
    "write_tensors",
    "writing",
]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_RUN = "run"  # the key in a part's metadata
_CHUNK = 16 * 2**20  # bytes written and hashed at a time, with Python's lock released


class TensorEntry(NamedTuple):
    """A tensor's dtype, by safetensors' name, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return WIDTHS[self.dtype] * torch.Size(self.shape).numel()


class Written(NamedTuple):
    """The hash and the size of a file that was written."""

    sha256: str
    bytes: int


def write_tensors(
    path: Path,
    entries: Mapping[str, TensorEntry],
    load: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write the tensors that `load` returns for each name, one after the other, to the disk (fsync)."""
    widest_first = sorted(
        entries, key=lambda name: -WIDTHS[entries[name].dtype]
    )  # so that each begins at a multiple of its width
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in _chunks(widest_first, entries, load, metadata):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return Written(digest.hexdigest(), size)


def _chunks(
    names: list[str],
    entries: Mapping[str, TensorEntry],
    load: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None,
) -> Iterator[bytes | memoryview]:
    yield _header(names, entries, metadata)
    for name in names:
        data = load(name)
        assert data.dtype == DTYPES[entries[name].dtype] and data.numel() * data.element_size() == entries[name].bytes
        content = data.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        yield from (content[at : at + _CHUNK] for at in range(0, len(content), _CHUNK))


def _header(names: list[str], entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None) -> bytes:
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        begin, end = end, end + entries[name].bytes
        header[name] = {"dtype": entries[name].dtype, "shape": entries[name].shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def open_tensors(path: Path, entries: Mapping[str, TensorEntry], run: str | None = None) -> dict[str, Tensor]:
    """Return the file's tensors, memory-mapped, if it holds exactly these; with `run`, only if that run wrote it."""
    _check_header(path, limit=4096 + sum(len(name.encode()) * 6 + 1024 for name in entries))
    try:
        file: Any = safe_open(path, framework="pt")
        found: dict[str, Tensor] = file.get_tensors()
        writer = (file.metadata() or {}).get(_RUN, "")
    except (SafetensorError, OSError) as problem:
        raise _damaged(path, "this is not a safetensors file", found=str(problem)[:200]) from None
    if run is not None:
        _check_writer(path, writer, run)
    if odd := sorted(found.keys() ^ entries.keys()):
        how = "lacks" if odd[0] in entries else "has an unknown tensor"
        raise _damaged(path, f"the file {how} {odd[0][:200]!r}", expected=f"{len(entries)} tensors")
    for name, data in found.items():
        dtype, shape = entries[name]
        if data.dtype != DTYPES[dtype] or data.shape != shape:
            what = f"tensor {name[:200]!r} has another dtype or shape"
            raise _damaged(path, what, found=f"{data.dtype} {tuple(data.shape)}", expected=f"{DTYPES[dtype]} {shape}")
    return found


def run_metadata(run: str) -> dict[str, str]:
    """Return the metadata of a part that a run writes."""
    return {_RUN: run} if run else {}


def run_of(path: Path) -> str:
    """Return the identity of the run that wrote a part; an empty text if it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get(_RUN, ""))
    except (SafetensorError, OSError) as problem:
        raise _damaged(path, "this is not a safetensors file", found=str(problem)[:200]) from None


def check_run(path: Path, run: str) -> None:
    """Raise CheckpointError if another run wrote this part."""
    _check_writer(path, run_of(path), run)


def _check_writer(path: Path, writer: str, run: str) -> None:
    if writer != run:
        raise _damaged(path, "another run wrote this file", found=_named(writer), expected=_named(run))


def _named(run: str) -> str:
    return f"run {run[:64]!r}" if run else "no run's name"


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the SHA-256 of each file, several at a time, as hashing does not hold Python's lock."""

    def hashed(path: Path) -> str:
        try:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as problem:
            raise _damaged(path, f"cannot read the file: {problem.strerror or problem}") from None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1), thread_name_prefix="hash") as threads:
        return list(threads.map(hashed, paths))


def _check_header(path: Path, limit: int) -> None:
    """Refuse a header that is longer than its tensors can need, before it is parsed."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
    except OSError as problem:
        raise _damaged(path, f"cannot read the file: {problem.strerror}") from None
    if length > limit:
        raise _damaged(path, "its header is too long", found=f"{length} bytes", expected=f"at most {limit}")


def _damaged(path: Path, what: str, *, found: str | None = None, expected: str | None = None) -> CheckpointError:
    return CheckpointError(what, where=str(path), found=found, expected=expected, next="Use an older checkpoint")


@contextmanager
def writing(path: Path, next: str) -> Iterator[None]:
    """Turn the system's errors into ours; `next` says what to do."""
    try:
        yield
    except OSError as problem:
        what = f"cannot write the file: {problem.strerror or problem}"
        raise CheckpointError(what, where=str(problem.filename or path), next=next) from None


def sync_folder(folder: Path) -> None:
    """Wait until the folder's entries (names created, renamed, removed) are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
