"""`isthmus export`: the weights of a checkpoint as one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isthmus.errors import FileError
from isthmus.files import write_whole
from isthmus.runtime.checkpoint import reading as checkpoint
from tests.cli.conftest import Isthmus
from tests.runtime.saved_states import SHAPES, State, folder_in_memory, save, state_of


@pytest.fixture
def folder() -> Iterator[Path]:
    """Checkpoints of two steps, each saved by two workers that had half of every tensor."""
    with folder_in_memory() as path:
        for step in (2, 4):
            save(path, step, state_of(step))
        yield path


def holds(path: Path, state: State) -> bool:
    found = load_file(path)
    return found.keys() == SHAPES.keys() and all(torch.equal(found[name], state[name, "weight"]) for name in SHAPES)


def test_an_average_that_was_not_kept(isthmus: Isthmus, folder: Path, tmp_path: Path) -> None:
    done = isthmus("export", folder, "-o", tmp_path / "a.safetensors", "--average")
    assert done.code == 1 and "no average of the weights" in done.err and not (tmp_path / "a.safetensors").exists()


def test_the_newest_of_a_folder_or_the_one_that_is_named(isthmus: Isthmus, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    done = isthmus("export", folder, "-o", file, "--json")
    assert done.code == 0 and holds(file, state_of(4))
    assert done.values == {
        "file": str(file),
        "bytes": file.stat().st_size,
        "checkpoint": str(folder / "step-00000004"),
        "step": 4,
        "job": "small",
        "model": "zoo:mlp-tiny",
        "precision": "fp32",
        "average": False,
        "parameters": 24 * 8 + 7 + 8 * 5 + 1,
    }
    said = isthmus("export", folder / "step-00000002", "-o", file)
    assert said.code == 0 and holds(file, state_of(2))
    assert f"{file}: 240 parameters of small (zoo:mlp-tiny) in fp32" in said.out and "after step 2" in said.out


def test_damage_is_found_and_nothing_is_written(isthmus: Isthmus, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    part = next((folder / "step-00000004").glob("*.safetensors"))
    bytes_ = bytearray(part.read_bytes())
    bytes_[-3] ^= 1
    part.write_bytes(bytes_)
    done = isthmus("export", folder, "-o", file)
    assert done.code == 1 and "the file changed after it was saved" in done.err and not file.exists()
    assert isthmus("export", folder / "step-00000002", "-o", file).code == 0


def test_one_that_a_run_removes_meanwhile_makes_way_for_the_newest(
    isthmus: Isthmus, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, real = tmp_path / "weights.safetensors", checkpoint.open_checkpoint

    def saved_meanwhile(path: Path, *, verify: bool) -> checkpoint.Checkpoint:
        if path.name == "step-00000004":
            save(folder, 6, state_of(6), keep=1)
        return real(path, verify=verify)

    monkeypatch.setattr(checkpoint, "open_checkpoint", saved_meanwhile)
    done = isthmus("export", folder, "-o", file)
    assert done.code == 0 and holds(file, state_of(6)) and "after step 6" in done.out


def test_only_a_plain_file_is_replaced(isthmus: Isthmus, folder: Path, tmp_path: Path) -> None:
    """A link leads to it; a pipe, a device and a folder stay what they are."""
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("real.safetensors")
    os.mkfifo(pipe)
    assert isthmus("export", folder, "-o", link).code == 0
    assert link.is_symlink() and holds(tmp_path / "real.safetensors", state_of(4))
    for target, said in ((pipe, "this is a pipe, a device or a socket"), (tmp_path, "Name a file in it")):
        done = isthmus("export", folder, "-o", target)
        assert done.code == 1 and said in done.err and "aside" not in done.err
        with pytest.raises(FileError, match=said):
            write_whole(target, b"")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("none",), 2, "--output is missing"),
        (("none", "-o", "no/such/w.safetensors"), 1, "the folder does not exist"),
        (("none", "-o", "w.safetensors"), 1, "none: there is no checkpoint here"),
        ((".", "-o", "w.safetensors"), 1, "Found a folder. Expected a checkpoint"),
    ],
)
def test_what_cannot_be_is_said(
    isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = isthmus("export", *words)
    assert done.code == code and said in done.err and list(tmp_path.iterdir()) == []
