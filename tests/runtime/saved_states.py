"""A small training state, saved by two workers: each has the first or the second half of every tensor."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from isthmus.model.graph import BlockGraph, Parameter
from isthmus.model.job import Job, Optimizer
from isthmus.runtime.checkpoint.reading import Checkpoint, Header, PartInfo, Piece, finish, write_part

__all__ = [
    "SHAPES",
    "State",
    "assert_holds",
    "folder_in_memory",
    "graph_of",
    "halves",
    "header",
    "parts_of",
    "save",
    "state_of",
]

State = dict[tuple[str, str], Tensor]

SHAPES = {"in.weight": (24, 8), "in.bias": (7,), "out.weight": (8, 5), "scale": ()}
QUANTITIES = ("weight", "exp_avg", "exp_avg_sq")
JOB = Job(name="small", model="zoo:mlp-tiny", batch=8, optimizer=Optimizer(name="adamw"))
WORKERS = ("here/T4/0", "there/T4/0")
MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def folder_in_memory() -> Iterator[Path]:
    """An empty folder, in memory where the system has such a place: to sync it then costs nothing."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def state_of(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> State:
    random = torch.Generator().manual_seed(seed)
    return {(name, kind): torch.randn(shape, generator=random) for name, shape in shapes.items() for kind in QUANTITIES}


def graph_of(shapes: Mapping[str, tuple[int, ...]], ties: Mapping[str, tuple[str, ...]] | None = None) -> BlockGraph:
    parameters = tuple(
        Parameter(name=name, elements=torch.Size(shape).numel(), shape=tuple(shape), ties=(ties or {}).get(name, ()))
        for name, shape in shapes.items()
    )
    return BlockGraph(name="small", blocks=(), tensors=(), parameters=parameters, digest="d" * 64)


def header(step: int, graph: BlockGraph | None = None, job: Job = JOB) -> Header:
    graph = graph or graph_of(SHAPES)
    return Header.of(graph, step=step, job=job, precision="fp32", updates=step, samples=8 * step)


def halves(state: State) -> tuple[list[Piece], list[Piece]]:
    pieces: tuple[list[Piece], list[Piece]] = ([], [])
    for (name, kind), tensor in state.items():
        flat, middle = tensor.reshape(-1), tensor.numel() // 2
        for worker, (lo, hi) in enumerate(((0, middle), (middle, tensor.numel()))):
            piece = Piece(parameter=name, quantity=kind, shape=tuple(tensor.shape), data=flat[lo:hi], start=lo)
            pieces[worker].append(piece)
    return pieces


def parts_of(folder: Path, step: int, state: State) -> list[PartInfo]:
    both = zip(WORKERS, halves(state), strict=True)
    return [write_part(folder, step, worker, pieces) for worker, pieces in both]


def save(folder: Path, step: int, state: State | None = None, *, keep: int = 2) -> Path:
    return finish(folder, parts_of(folder, step, state or state_of(step)), header(step), keep=keep)


def assert_holds(checkpoint: Checkpoint, state: State) -> None:
    for (name, kind), tensor in state.items():
        assert torch.equal(checkpoint.read(name, kind), tensor.reshape(-1)), (name, kind)
