"""Checkpoints in a hostile world: killed savers, full disks, damaged and forged files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.errors import CheckpointError
from isthmus.model.job import Job, Optimizer
from isthmus.runtime.checkpoint.manifest import digest_of, read_manifest
from isthmus.runtime.checkpoint.reading import (
    MemberCut,
    Piece,
    export,
    finish,
    latest,
    newest_whole,
    open_checkpoint,
    write_part,
)
from isthmus.runtime.checkpoint.saving import set_aside
from tests.conftest import ROOT
from tests.runtime.saved_states import (
    SHAPES,
    assert_holds,
    folder_in_memory,
    graph_of,
    halves,
    header,
    parts_of,
    save,
    state_of,
)

FIRST, SECOND = "here+T4+0.safetensors", "there+T4+0.safetensors"


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(folder: Path) -> None:
    """The script fails by itself where one is not whole; here: that the kills did strike in the middle of saves."""
    command = [sys.executable, "-m", "tests.runtime.killed_saves", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    kills = Counter(row["how"] for row in rows if row["killed"])
    assert kills["moment"] >= 15 and kills["again"] >= 15 and kills["random"] >= 20
    for how, seeds in (("moment", {1, 2}), ("again", {1, 9})):
        assert {row["seed"] for row in rows if row["how"] == how and row["killed"]} == seeds  # before and after
    assert sum(row["unfinished"] for row in rows if row["how"] == "random") >= 5
    assert rows[-1]["step"] > 5  # the saves got on between the kills


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a loss of power, which kills cannot show: what was synced when, by watching the calls."""
    calls: list[tuple[str, str]] = []
    sync, rename = os.fsync, os.rename

    def watched_sync(handle: int) -> None:
        calls.append(("sync", Path(f"/proc/self/fd/{handle}").readlink().name))
        sync(handle)

    def watched_rename(old: Path, new: Path) -> None:
        calls.append(("rename", Path(old).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "rename", watched_rename)
    home = folder / "new" / "run"
    save(home, 1)
    partial = "step-00000001.partial"
    assert calls == [
        *(("sync", name) for name in (folder.name, "new", "run")),
        *(("sync", name) for name in (FIRST, SECOND, "manifest.json", partial)),
        ("rename", partial),
        ("sync", "run"),
    ]


@contextmanager
def failing(call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The n-th call finds the disk full."""
    seen: Counter[str] = Counter()
    real = getattr(os, call)

    def counted(*arguments: Any, **more: Any) -> Any:
        seen[call] += 1
        if seen[call] == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, counted)
        yield seen


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "open"])
def test_a_full_disk_at_any_call_loses_nothing(call: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """keep=1, so that there is nothing to fall back on."""
    for number in range(1, 20):
        save(folder, 1, keep=1)
        with failing(call, number, monkeypatch) as seen:
            try:
                save(folder, 2, keep=1)
                failed = False
            except CheckpointError as error:
                failed = True
                assert "No space left" in error.what and error.where and "Make room" in (error.next or "")
        newest = latest(folder)
        assert newest is not None
        assert_holds(open_checkpoint(newest, verify=True), state_of(1 if newest.name == "step-00000001" else 2))
        assert failed or newest.name == "step-00000002"
        save(folder, 3, keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-00000003"]
        shutil.rmtree(folder / "step-00000003")
        if seen[call] < number:
            return
    raise AssertionError("it was never called less often")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("a small disk can be mounted by root only")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)  # mapped files may not have been forgotten yet


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    save(small_disk, 1)
    large = {"x": (100_000,)}
    with pytest.raises(CheckpointError, match="No space left on device"):
        parts_of(small_disk, 2, state_of(2, large))
    path = small_disk / "model.safetensors"
    filler = small_disk / "filler"
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    newest = latest(small_disk)
    assert newest is not None
    with pytest.raises(CheckpointError, match="No space left on device"):
        export(open_checkpoint(newest), path)
    assert not path.exists()
    filler.unlink()
    assert_holds(open_checkpoint(newest, verify=True), state_of(1))
    save(small_disk, 3)  # there is room again: nothing of the failed save was left
    assert sorted(item.name for item in small_disk.iterdir()) == ["step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the file"):
        save(folder / "file", 1)


# What finish refuses: pieces that do not make up the model.

X = graph_of({"x": (2, 3)})


def piece(lo: int, hi: int, **more: Any) -> Piece:
    parts = {"parameter": "x", "quantity": "weight", "shape": (2, 3), "start": lo, **more}
    return Piece(data=torch.zeros(hi - lo, dtype=parts.pop("dtype", torch.float32)), **parts)


def half(member: int, members: int = 2) -> MemberCut:
    return MemberCut(dim=0, sections=(2,), member=member, members=members)


REFUSED: dict[str, tuple[list[Piece], str]] = {
    "nothing": ([], "weight of 'x' is missing"),
    "a gap": ([piece(0, 2), piece(3, 6)], "no elements 2 to 3"),
    "no beginning": ([piece(1, 6)], "no elements 0 to 1"),
    "no end": ([piece(0, 5)], "no elements 5 to 6"),
    "an overlap": ([piece(0, 4), piece(3, 6)], "elements 3 to 4 in two pieces"),
    "one inside another": ([piece(0, 6), piece(2, 3)], "elements 2 to 3 in two pieces"),
    "too long": ([piece(0, 7)], "lies outside"),
    "two dtypes": ([piece(0, 3), piece(3, 6, dtype=torch.float64)], "do not belong together"),
    "two shapes": ([piece(0, 3), piece(3, 6, shape=(6,))], "do not belong together"),
    "another shape": ([piece(0, 6, shape=(3, 2))], "another shape than its parameter"),
    "whole numbers": ([piece(0, 6, dtype=torch.int64)], "wrong dtype"),
    "an unknown parameter": ([piece(0, 6), piece(0, 6, parameter="y")], "belongs to no parameter"),
    "an unknown quantity": ([piece(0, 6), piece(0, 6, quantity="exp_avg")], "belongs to no parameter"),
    "a parameter as a buffer": ([piece(0, 6), piece(0, 6, quantity="buffer")], "belongs to no parameter"),
    "one member": ([piece(0, 3, cut=half(0))], "lacks the part of member 1 of 2"),
    "half a member": ([piece(0, 3, cut=half(0)), piece(0, 2, cut=half(1))], "of member 1 is not whole"),
    "cut and whole": ([piece(0, 3, cut=half(0)), piece(3, 6)], "do not belong together"),
    "an odd cut": ([piece(0, 2, cut=half(0, 3))], "does not fit"),
    "no such member": ([piece(0, 3, cut=half(2))], "does not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_whole_is_not_finished(name: str, folder: Path) -> None:
    pieces, said = REFUSED[name]
    job = Job(name="j", model="zoo:x", batch=8, optimizer=Optimizer(name="sgd"))
    parts = [write_part(folder, 1, f"w{index}", [piece]) for index, piece in enumerate(pieces)]
    with pytest.raises(CheckpointError, match=re.escape(said)):
        finish(folder, parts, header(1, X, job))
    assert latest(folder) is None


def test_a_missing_moment_a_changed_part_and_a_piece_twice(folder: Path) -> None:
    state = state_of(1)
    del state["scale", "exp_avg_sq"]
    with pytest.raises(CheckpointError, match="exp_avg_sq of 'scale' is missing"):
        save(folder, 1, state)
    parts = parts_of(folder, 2, state_of(2))
    with (folder / "step-00000002.partial" / FIRST).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="changed after it was written"):
        finish(folder, parts, header(2))
    one = halves(state_of(1))[0][0]
    with pytest.raises(CheckpointError, match="to be saved twice"):
        write_part(folder, 3, "w", [one, one])


# What open_checkpoint refuses: manifests and files that somebody changed.


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest with other values, and a digest that knows of them."""
    values = json.loads((path / "manifest.json").read_text())
    change(values)
    values["digest"] = digest_of(values)
    (path / "manifest.json").write_text(json.dumps(values))


def first(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["parts"][0]["pieces"][0]
    return found


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a path upwards": (lambda v: v["parts"][0].update(file="../x.safetensors"), "not a file of this folder"),
    "an absolute path": (lambda v: v["parts"][0].update(file="/etc/passwd"), "not a file of this folder"),
    "a hidden file": (lambda v: v["parts"][0].update(file=".x.safetensors"), "not a file of this folder"),
    "another suffix": (lambda v: v["parts"][0].update(file="x.pt"), "not a file of this folder"),
    "one file twice": (lambda v: v["parts"][1].update(file=v["parts"][0]["file"]), "the same file"),
    "no such file": (lambda v: v["parts"][0].update(file="x.safetensors"), "No such file"),
    "another size": (lambda v: v["parts"][0].update(bytes=10**6), "another size"),
    "too small": (lambda v: v["parts"][0].update(bytes=10), "smaller than what it holds"),
    "not a hash": (lambda v: v["parts"][0].update(sha256="x" * 64), "sha256"),
    "a part less": (lambda v: v["parts"].pop(), "not whole"),
    "a part twice": (lambda v: v["parts"].append({**v["parts"][0], "file": "y.safetensors"}), "saved twice"),
    "another dtype": (lambda v: first(v).update(dtype="I64"), "wrong dtype"),
    "an unknown dtype": (lambda v: first(v).update(dtype="O"), "wrong dtype"),
    "a negative start": (lambda v: first(v).update(start=-1), "start"),
    "a huge stop": (lambda v: first(v).update(stop=2**61), "lies outside"),
    "a number beyond numbers": (lambda v: first(v).update(stop=10**400), "stop"),
    "a huge shape": (lambda v: first(v).update(shape=[2**62] * 64), "another shape"),
    "a long shape": (lambda v: first(v).update(shape=[1] * 65), "shape"),
    "many members": (
        lambda v: [p.update(cut={"dim": 0, "sections": [0], "member": 0, "members": 2**32}) for p in _all(v)],
        "does not fit",
    ),
    "many sections": (
        lambda v: first(v).update(cut={"dim": 0, "sections": [0] * 65, "member": 0, "members": 1}),
        "sections",
    ),
    "an unknown quantity": (lambda v: first(v).update(quantity="velocity"), "quantity"),
    "an unknown field": (lambda v: first(v).update(pickle="x"), "unknown field"),
    "another kind": (lambda v: v.update(kind="plan"), "this is the wrong kind of file"),
    "a newer version": (lambda v: v.update(version=2), "newer than this program"),
    "a job that cannot be": (lambda v: v["job"].update(batch=0), "batch has an impossible value"),
    "more updates than steps": (lambda v: v.update(updates=99), "more updates than steps"),
    "a loss scale of zero": (lambda v: v.update(loss_scale={"value": 0.0}), "loss scale"),
    "another shape": (lambda v: v["parameters"].update({"in.bias": [8]}), "another shape"),
    "a parameter more": (lambda v: v["parameters"].update(more=[8]), "is missing"),
    "a parameter less": (lambda v: v["parameters"].pop("scale"), "belongs to no parameter"),
    "ties of nothing": (lambda v: v.update(ties={"x": ["y"]}), "is no parameter"),
    "a tie that is a parameter": (lambda v: v.update(ties={"scale": ["in.bias"]}), "two parameters are named"),
}


def _all(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [piece for part in values["parts"] for piece in part["pieces"]]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(name: str, folder: Path) -> None:
    change, said = FORGED[name]
    path = save(folder, 1)
    edited(path, change)
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        open_checkpoint(path)
    assert caught.value.where and caught.value.where.startswith(str(path))


def rewritten(path: Path, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """The first part with other tensors, and a manifest that knows its new size."""
    save_file(how(load_file(path / FIRST)), path / FIRST)
    edited(path, lambda values: values["parts"][0].update(bytes=(path / FIRST).stat().st_size))


def padded(path: Path, data: bytes) -> None:
    """The first part as these bytes, filled up to its size."""
    size = (path / FIRST).stat().st_size
    (path / FIRST).write_bytes(data[:size] + bytes(max(0, size - len(data))))


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "zeros": (lambda path: padded(path, b""), "not a safetensors file"),
    "a pickle": (lambda path: padded(path, pickle.dumps({"x": 1})), "header is too long"),
    "a huge header": (lambda path: padded(path, (2**63 - 1).to_bytes(8, "little")), "header is too long"),
    "a header past the end": (lambda path: padded(path, (9000).to_bytes(8, "little")), "not a safetensors file"),
    "a header that is no JSON": (lambda path: padded(path, (64).to_bytes(8, "little") + b"x" * 64), "not a safetens"),
    "another name": (lambda path: rewritten(path, lambda t: {f"x{k}": v for k, v in t.items()}), "the file"),
    "a tensor less": (lambda path: rewritten(path, lambda t: dict([*t.items()][1:])), "the file lacks"),
    "a tensor more": (lambda path: rewritten(path, lambda t: {**t, "zz": torch.ones(99)}), "unknown tensor 'zz'"),
    "another dtype": (lambda path: rewritten(path, lambda t: {k: v.double() for k, v in t.items()}), "another dtype"),
    "another length": (
        lambda path: rewritten(path, lambda t: {k: torch.ones(v.numel() + 1) for k, v in t.items()}),
        "another dtype or shape",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_part_is_refused_when_it_is_read(name: str, folder: Path) -> None:
    damage, said = DAMAGED[name]
    path = save(folder, 1)
    damage(path)
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        open_checkpoint(path).read("in.weight")
    assert caught.value.where == str(path / FIRST)


@pytest.mark.parametrize("name", ["link", "pipe", "folder", "shorter", "gone"])
@pytest.mark.parametrize("file", [FIRST, "manifest.json"])
def test_a_file_that_is_no_plain_file_is_not_opened(name: str, file: str, folder: Path) -> None:
    """A pipe would hold the reader for ever, a link lead out of the folder."""
    path = save(folder, 1)
    target, data = path / file, (path / file).read_bytes()
    target.unlink()
    if name == "link":
        (folder / "elsewhere").write_bytes(data)
        target.symlink_to(folder / "elsewhere")
    elif name == "pipe":
        os.mkfifo(target)
    elif name == "folder":
        target.mkdir()
    elif name == "shorter":
        target.write_bytes(data[:-1] if file == FIRST else data[: len(data) // 2])
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert str(path) in (caught.value.where or "")


def test_one_wrong_bit_is_found_by_its_hash(folder: Path) -> None:
    path = save(folder, 1)
    data = bytearray((path / SECOND).read_bytes())
    data[-1] ^= 1
    (path / SECOND).write_bytes(data)
    open_checkpoint(path)
    with pytest.raises(CheckpointError, match="changed after it was saved") as caught:
        open_checkpoint(path, verify=True)
    assert caught.value.where == str(path / SECOND)


def change_one_float(path: Path) -> None:
    """The last of the file; its size and its header stay as they are."""
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(1e28).tobytes()
    path.write_bytes(data)


def test_the_newest_whole_checkpoint_is_found_behind_damaged_ones(folder: Path) -> None:
    """One float, a missing manifest, a part that is gone; at last none is whole."""
    for step in (1, 2, 3, 4):
        save(folder, step, keep=9)
    change_one_float(folder / "step-00000004" / FIRST)
    (folder / "step-00000003" / "manifest.json").unlink()
    (folder / "step-00000002" / SECOND).unlink()
    whole, refused = newest_whole(folder)
    assert whole is not None and whole.path == folder / "step-00000001"
    assert_holds(whole, state_of(1))
    assert [found.path.name[-1] for found in refused] == ["4", "3", "2"]
    assert "changed after it was saved" in str(refused[0].error) and FIRST in str(refused[0].error)
    change_one_float(folder / "step-00000001" / FIRST)
    with pytest.raises(CheckpointError, match="every checkpoint here is damaged"):
        newest_whole(folder)
    assert newest_whole(folder / "none") == (None, [])


def test_one_that_is_set_aside_is_never_removed_nor_read(folder: Path) -> None:
    save(folder, 1)
    damaged = save(folder, 2)
    change_one_float(damaged / FIRST)
    assert set_aside(damaged) == folder / "step-00000002.damaged"
    for step in (2, 3):
        save(folder, step)
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-00000002.damaged", "step-00000002", "step-00000003"}
    assert set_aside(folder / "step-00000002") == folder / "step-00000002.damaged-2"
    assert latest(folder) == folder / "step-00000003"


def test_a_part_with_one_other_float_is_not_finished(folder: Path) -> None:
    """Its size is right. The checkpoint before stays, although only one is kept."""
    save(folder, 1, keep=1)
    parts = parts_of(folder, 2, state_of(2))
    change_one_float(folder / "step-00000002.partial" / SECOND)
    with pytest.raises(CheckpointError, match="changed after it was written") as caught:
        finish(folder, parts, header(2), keep=1)
    assert caught.value.found is not None and caught.value.found.startswith("hash ")
    assert latest(folder) == folder / "step-00000001"


def test_a_part_of_another_run_is_refused_when_finished_and_when_read(folder: Path) -> None:
    pieces = halves(state_of(1))
    mine = write_part(folder, 1, "here/T4/0", pieces[0], run="mine")
    other = write_part(folder, 1, "there/T4/0", pieces[1], run="other")
    own = msgspec.structs.replace(header(1), run="mine")
    with pytest.raises(CheckpointError, match="part of run 'other'"):
        finish(folder, [mine, other], own)
    again = write_part(folder, 1, "there/T4/0", pieces[1], run="mine")
    path = finish(folder, [mine, again], own)
    assert_holds(open_checkpoint(path, verify=True), state_of(1))
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["run"] == "mine"
    edited(path, lambda values: values.update(run="other"))
    with pytest.raises(CheckpointError, match="another run wrote this file"):
        open_checkpoint(path).read("in.weight", "weight")
    with pytest.raises(CheckpointError, match="another run wrote this file"):
        open_checkpoint(path, verify=True)


EDITS: dict[str, dict[str, Any]] = {
    "updates": {"updates": 1},
    "samples": {"samples": 15},
    "run": {"run": "other"},
    "precision": {"precision": "bf16"},
    "loss_scale": {"loss_scale": {"value": 3.0, "steps": 0}},
    "model": {"model": "e" * 64},
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest_is_passed_over(name: str, folder: Path) -> None:
    """Its own digest tells; no other hash covers it."""
    save(folder, 1)
    path = save(folder, 2) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))  # laid out in another way: the same manifest
    assert newest_whole(folder)[1] == []
    path.write_text(json.dumps(json.loads(path.read_text()) | EDITS[name]))
    whole, refused = newest_whole(folder)
    assert whole is not None and whole.manifest.step == 1
    assert "the manifest changed after it was saved" in str(refused[0].error)


def test_a_manifest_of_another_step_is_passed_over(folder: Path) -> None:
    shutil.copytree(save(folder, 1), folder / "step-00000009")
    whole, refused = newest_whole(folder)
    assert whole is not None and whole.path.name == "step-00000001"
    assert "the manifest of another step. Found 1. Expected 9" in str(refused[0].error)


def test_a_manifest_of_before_digests_is_taken_with_a_note(folder: Path) -> None:
    path = save(folder, 1)
    values = json.loads((path / "manifest.json").read_text())
    del values["digest"]
    (path / "manifest.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(path, verify=True)
    (note,) = checkpoint.differences(graph_of(SHAPES), "fp32", Optimizer())
    assert "edits would go unseen" in note


def test_a_checkpoint_without_its_manifest_is_not_removed(folder: Path) -> None:
    (save(folder, 1) / "manifest.json").unlink()
    for step in (2, 3, 4):
        save(folder, step, keep=1)
    assert {path.name for path in folder.iterdir()} == {"step-00000001", "step-00000004"}
    assert (folder / "step-00000001" / FIRST).is_file()


def test_a_manifest_is_the_same_after_a_round_trip(folder: Path) -> None:
    path = save(folder, 1)
    manifest = read_manifest(path / "manifest.json")
    assert manifest == msgspec.convert(msgspec.to_builtins(manifest), type(manifest))
    assert set(manifest.parameters) == set(SHAPES)
    assert json.loads((path / "manifest.json").read_text())["kind"] == "checkpoint"
