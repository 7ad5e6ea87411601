"""Every kind of file, given to every command that takes another: what it is, what was expected, what takes it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import safetensors.numpy
from numpy import zeros

from isthmus.files.kinds import KINDS, kind_of
from isthmus.model.load_profile import save_profile
from isthmus.model.profile import Profile
from isthmus.model.saved import save_graph
from isthmus.plan.file import PlanFile, save_plan
from tests.cli.conftest import Isthmus
from tests.plan.golden_files import golden
from tests.plan.small_models import chain

CLUSTER = "kind: cluster\nversion: 1\nname: c\nhosts: {a: {region: r, devices: {T4: 1}}}\n"


class Kind(NamedTuple):
    """What a file is called in the error, what the error says of its use, and how to make one."""

    found: str
    remedy: str
    make: Callable[[Path], object]


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def data(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def checkpoint(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"kind": "checkpoint", "version": 1}')


def checkpoints(path: Path) -> None:
    path.mkdir()
    checkpoint(path / "step-00000003")


JOB = "kind: job\nversion: 1\nname: j\nmodel: zoo:mlp-tiny\nbatch: 4\n"
WORKLOAD = "# two\nversion: 1\nkind: workload\nname: w\njobs: []\n"
FILES = {
    "cluster.yaml": Kind("a cluster file", "isthmus cluster show FILE", text(CLUSTER)),
    "cluster.json": Kind("a cluster file", "isthmus cluster show FILE", text('{"version": 1, "kind": "cluster"}')),
    "job.yaml": Kind("a job file", "isthmus plan FILE --cluster CLUSTER", text(JOB)),
    "workload.yaml": Kind("a workload file", "isthmus plan FILE --cluster CLUSTER", text(WORKLOAD)),
    "model.json": Kind("a saved model", "isthmus plan FILE --cluster", lambda path: save_graph(chain(), path)),
    "plan.json": Kind(
        "a plan", "isthmus simulate FILE", lambda path: save_plan(path, PlanFile(plan=golden("sharded")))
    ),
    "plan.plan": Kind(
        "a plan", "isthmus simulate FILE", lambda path: save_plan(path, PlanFile(plan=golden("sharded")))
    ),
    "profile.json": Kind("a profile", "isthmus plan MODEL --profile FILE", lambda path: save_profile(Profile(), path)),
    "run.jsonl": Kind("the events of a run", "--run FILE", text('{"event": "begin", "job": "j"}\n{"event": "end"}\n')),
    "trace.json": Kind("a timeline", "ui.perfetto.dev", text('{"displayTimeUnit": "ms", "traceEvents": [{}]}')),
    "config.json": Kind("a transformers configuration", "isthmus plan hf:FILE", text('{"model_type": "gpt2"}')),
    "hosts.txt": Kind("a hostfile", "isthmus cluster import FILE", text("# ours\na slots=2\nb slots=4\n")),
    "page.html": Kind("an HTML page", "a browser", text("<!doctype html>\n<title>kind: plan</title>")),
    "code.py": Kind("Python code", "isthmus plan package.module:function", text("def model():\n    pass\n")),
    "checkpoint": Kind("a checkpoint", "isthmus export FOLDER -o FILE", checkpoint),
    "checkpoints": Kind("a folder of checkpoints", "isthmus export FOLDER -o FILE", checkpoints),
    "weights.safetensors": Kind(
        "a safetensors file", "load_model", lambda path: safetensors.numpy.save_file({"w": zeros(3)}, path)
    ),
    "picture.png": Kind("a PNG picture", "", data(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")),
    "picture.json": Kind("a PNG picture", "", data(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")),
    "saved.pt": Kind("a ZIP archive, or what torch.save wrote", "", data(b"PK\x03\x04\0\0\xff\xff")),
    "folder": Kind("a folder", "", Path.mkdir),
    "folder.json": Kind("a folder", "", Path.mkdir),
    "empty.json": Kind("an empty file", "", text("")),
    "blank.yaml": Kind("an empty file", "", text(" \n\n")),
}

FORMS = "zoo:NAME, hf:CONFIG.json"
MODELS = ("model.json",)
JOBS = ("job.yaml", "workload.yaml")
PLANS = ("plan.json", "plan.plan")
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # @: the file; one of what is expected; what is taken
    "cluster show @": (("a cluster file (",), ("cluster.yaml", "cluster.json")),
    "cluster import @ --kind T4 -o made.yaml": (("a hostfile (",), ("hosts.txt",)),
    "model show @": ((FORMS, "a saved model ("), MODELS),
    "model show hf:@": (("a transformers configuration (",), ("config.json",)),
    "plan @ --cluster cluster.yaml": ((FORMS, "a saved model (", "a job file ("), (*MODELS, *JOBS)),
    "plan zoo:mlp-tiny --cluster @": (("a cluster file (",), ("cluster.yaml", "cluster.json")),
    "plan zoo:mlp-tiny --cluster cluster.yaml --profile @": (("a profile (",), ("profile.json",)),
    "simulate @": (("a plan (",), PLANS),
    "simulate plan.json --cluster @": (("a cluster file (",), ("cluster.yaml", "cluster.json")),
    "simulate plan.json --profile @": (("a profile (",), ("profile.json",)),
    "report @ -o page.html": (("a plan (",), PLANS),
    "report plan.json --run @ -o page.html": (("the events of a run (",), ("run.jsonl",)),
    "train @ --cluster cluster.yaml": ((FORMS, "a plan (", "a job file ("), (*JOBS, *PLANS)),
    "train plan.json --cluster @": (("a cluster file (",), ("cluster.yaml", "cluster.json")),
    "profile @ -o made.json": ((FORMS,), MODELS),
    "export @ -o made.safetensors": (("a checkpoint (",), ("checkpoint", "checkpoints")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("files")
    for name, kind in FILES.items():
        kind.make(made / name)
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_the_wrong_kind(
    isthmus: Isthmus, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(folder)
    expected, taken = COMMANDS[command]
    for name in FILES.keys() - set(taken):
        done = isthmus(*command.replace("@", name).split())
        said = done.err.splitlines()[-1]
        assert done.code == 1 and not done.out, (name, said)
        begins = f"isthmus: {name}: this is the wrong kind of file. Found {FILES[name].found}. Expected "
        assert said.startswith(begins), (name, said)
        assert said.removeprefix(begins).startswith(expected), (name, said)
        remedy = FILES[name].remedy
        assert remedy in said and ("use: " in said) == bool(remedy), (name, said)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_is_refused_and_not_waited_for(
    isthmus: Isthmus, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Nobody ever writes to it: whoever opens it as a file waits for ever."""
    monkeypatch.chdir(folder)
    pipe = (tmp_path / "pipe").with_suffix(Path(COMMANDS[command][1][0]).suffix)
    os.mkfifo(pipe)

    def waited(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for somebody to write")

    before = signal.signal(signal.SIGALRM, waited)
    signal.alarm(20)
    try:
        done = isthmus(*command.replace("@", str(pipe)).split())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert done.code == 1 and not done.out and str(pipe) in done.err
    never_opened = command.startswith(("export", "profile"))
    assert never_opened or "this is a pipe, and not a plain file" in done.err, done.err


def test_the_same_for_programs(isthmus: Isthmus, folder: Path) -> None:
    error = isthmus("simulate", folder / "cluster.yaml", "--json").values["error"]
    assert error["found"] == "a cluster file" and error["expected"] == "a plan (what isthmus plan -o FILE writes)"
    assert error["next"] == "For a cluster file use: isthmus cluster show FILE, plan --cluster FILE"


def test_one_checkpoint_is_no_folder_of_checkpoints(isthmus: Isthmus, folder: Path) -> None:
    """There a resumed run would find nothing and begin anew."""
    given = folder / "checkpoints" / "step-00000003"
    done = isthmus("train", folder / "plan.json", "--checkpoint", given, "--resume")
    assert done.code == 2 and f"Did you mean '{folder / 'checkpoints'}'?" in done.err


def test_what_a_file_is(folder: Path) -> None:
    """Every kind is among the files here; nothing is said of what is absent, a pipe, or could be anything."""
    assert {kind_of(folder / name) for name in FILES} == set(KINDS)
    anything = folder / "anything"
    for content in (
        "hello\n",
        "{}",
        '{"kind": "sonnet"}',
        "kind: sonnet\n",
        '{"name": "x"}',
        "[1, 2]",
        "{" * 2000,
        "caf\xe9: 1\n",
        "a\0b",
    ):
        anything.write_bytes(content.encode("latin-1"))
        assert kind_of(anything) is None, content
    assert kind_of(folder / "absent.json") is None and kind_of("") is None and kind_of("a\0b") is None
    assert kind_of("/dev/stdin") is None


def test_only_the_beginning_is_read(folder: Path) -> None:
    large = folder / "large.json"
    large.write_text('{"kind": "plan", "text": "' + "ü" * 2_000_000)
    assert kind_of(large) == "plan"
    lines = [json.dumps({"event": "step", "step": number}) for number in range(60_000)]
    large.write_text("\n".join(lines))
    assert kind_of(large) == "events"
