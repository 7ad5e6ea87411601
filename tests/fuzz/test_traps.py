"""Booby-trapped files of each kind: code is named in every way that some reader would run, and none of it runs.

Each trap leaves a marker where it goes off; it is first shown to work on a reader that trusts files. The traps of
transformers configurations (`auto_map`) are in tests/model/test_source.py.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isthmus import api
from isthmus.errors import IsthmusError, PlanError
from isthmus.model.requests import requested_jobs
from isthmus.model.source import load_graph
from tests.fuzz.kinds import KINDS, sign

TRAP = "booby_trap:build"


class Trap:
    """Unpickled, it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.marker,))


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that a trap makes, or a module beside it that is imported; it may not be there at the end."""
    path = tmp_path / "went-off"
    (tmp_path / "booby_trap.py").write_text(f"import os\nos.mkdir({str(path)!r})\ndef build():\n    return None\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    assert not path.exists()
    assert "booby_trap" not in sys.modules


def yaml_traps(marker: Path) -> list[str]:
    name = json.dumps(str(marker))
    return [
        f"!!python/object/apply:os.mkdir [{name}]",
        f"!!python/object/apply:subprocess.check_call [[mkdir, {name}]]",
        f"!!python/object/apply:builtins.exec ['import os; os.mkdir({name})']",
        "!!python/module:booby_trap",
        "!!python/name:booby_trap.build",
    ]


def json_traps(marker: Path) -> list[Any]:
    return [
        {"__reduce__": ["os.mkdir", [str(marker)]]},
        {"py/reduce": [{"py/function": "os.mkdir"}, {"py/tuple": [str(marker)]}]},
        {"__class__": "pathlib.Path", "__init__": [str(marker)], "__call__": "mkdir"},
        {"$type": "booby_trap.build"},
        TRAP,
        f"__import__('os').mkdir('{marker}')",
        f"$(mkdir {marker})",
        f"{{{{ os.mkdir('{marker}') }}}}",
    ]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a file's values."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def placed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = placed(value[path[0]], path[1:], new)
    return copy


def read(kind: str, path: Path, data: bytes | str) -> None:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    with contextlib.suppress(IsthmusError):
        KINDS[kind].read(path)


def went_off(marker: Path) -> bool:
    """Whether the trap did, and it is set again."""
    there = marker.is_dir()
    if there:
        marker.rmdir()
    sys.modules.pop("booby_trap", None)
    return there


def test_the_traps_work(marker: Path) -> None:
    for text in yaml_traps(marker):
        yaml.unsafe_load(text)
        assert went_off(marker), text
    pickle.loads(pickle.dumps(Trap(marker)))
    assert went_off(marker)
    importlib.import_module("booby_trap")
    assert went_off(marker)


@pytest.mark.parametrize("kind", ["cluster", "job", "workload"])
def test_no_tag_is_obeyed_anywhere_in_a_yaml_file(kind: str, marker: Path, tmp_path: Path) -> None:
    seed = yaml.safe_load(KINDS[kind].seeds()[0])
    for number, trap in enumerate(yaml_traps(marker)):
        for path in list(places(seed))[number % 2 :: 2]:
            text = json.dumps(placed(seed, path, "TRAP")).replace('"TRAP"', trap)
            read(kind, tmp_path / "trap.yaml", text)


@pytest.mark.parametrize("kind", ["plan", "model", "profile", "checkpoint"])
def test_no_object_is_made_from_a_json_file(kind: str, marker: Path, tmp_path: Path) -> None:
    seed = json.loads(KINDS[kind].seeds()[0])
    spots = list(places(seed))
    for trap in json_traps(marker):
        for path in spots[:: max(1, len(spots) // 12)]:
            read(kind, tmp_path / "trap.json", json.dumps(sign(placed(seed, path, trap))))


@pytest.mark.parametrize("kind", KINDS)
def test_no_pickle_is_opened(kind: str, marker: Path, tmp_path: Path) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read(kind, tmp_path / f"trap{KINDS[kind].suffix}", pickle.dumps(Trap(marker), protocol))


def test_job_files_name_code_and_loading_them_runs_none(marker: Path, tmp_path: Path) -> None:
    text = f"kind: job\nversion: 1\nname: j\nbatch: 1\nmodel: {TRAP}\ndata: {TRAP}\nloss: {TRAP}\n"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    (job,) = requested_jobs(path)
    assert job.model == TRAP


@pytest.mark.parametrize("field", ["model", "data", "loss"])
@pytest.mark.parametrize("suffix", [".json", ".plan"])
def test_a_plan_that_names_code_is_refused_or_the_code_not_run(
    field: str, suffix: str, marker: Path, tmp_path: Path, root: Path
) -> None:
    """The model of the plan is code in any case (`small:chain`); named by the plan alone, none is imported."""
    golden = root / "tests" / "plan" / "golden"
    if suffix == ".json":
        values = json.loads((golden / "tied.json").read_text())
        values["plan"]["parts"][0]["job"][field] = TRAP
        text = json.dumps(values)
    else:
        old, new = ("small:tied", TRAP) if field == "model" else ("  schedule", f"  job {field} {TRAP}\n  schedule")
        text = (golden / "tied.plan").read_text().replace(old, new)
    path = tmp_path / f"trap{suffix}"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        api.simulate(path, api.load_cluster(golden / "atlantic.yaml"))
    assert caught.value.rule == "trust"


def test_a_saved_model_that_names_code_is_data(marker: Path, tmp_path: Path) -> None:
    seed = json.loads(KINDS["model"].seeds()[0])
    seed["graph"] |= {"name": TRAP}
    seed["graph"]["blocks"][0]["mixes_samples"] = [TRAP, f"os.mkdir({str(marker)!r})"]
    path = tmp_path / "trap.json"
    path.write_text(json.dumps(sign(seed)))
    assert load_graph(str(path)).name == TRAP


def test_a_profile_that_names_code_is_data(marker: Path, tmp_path: Path, root: Path) -> None:
    seed = json.loads(KINDS["profile"].seeds()[0])
    seed |= {"origin": f"__import__('os').mkdir({str(marker)!r})"}
    seed["blocks"][0] |= {"block": TRAP, "name": f"$(mkdir {marker})"}
    path, model = tmp_path / "trap.json", tmp_path / "model.json"
    path.write_text(json.dumps(seed))
    model.write_bytes(KINDS["model"].seeds()[0])
    choice = api.plan(str(model), root / "examples" / "clusters" / "one-host.yaml", profile=path, calls=5)
    assert any("has no times" in note for note in choice.notes)
