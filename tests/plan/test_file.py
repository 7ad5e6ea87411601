from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from isthmus.errors import DataError, FileError, PlanError
from isthmus.plan.file import PlanFile, inputs_digest, load_plan, plan_digest, save_plan
from isthmus.plan.paths import check_data
from isthmus.plan.types import Prediction
from tests.plan.golden_files import FOLDER, cluster, golden, jobs, whole_file


def test_json_keeps_all_of_it(tmp_path: Path) -> None:
    predicted = Prediction(step_seconds=1.5, jobs={"tied": 1.5}, memory={"va1/fast/0": 1e9}, lower_bound_seconds=0.1)
    file = msgspec.structs.replace(whole_file("tied"), predicted=predicted, planner="search", seed=7)
    save_plan(tmp_path / "a.json", file)
    assert load_plan(tmp_path / "a.json") == file
    assert list(load_plan(tmp_path / "a.json").cluster.devices) == list(cluster().devices)  # type: ignore[union-attr]


@pytest.mark.parametrize("suffix", ["plan", "txt"])
def test_text_keeps_the_plan(tmp_path: Path, suffix: str) -> None:
    save_plan(tmp_path / f"a.{suffix}", whole_file("tied"))
    assert load_plan(tmp_path / f"a.{suffix}") == PlanFile(plan=golden("tied"))


def test_text_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.plan").write_text("plan for x\npipe\n")
    with pytest.raises(PlanError, match=r"a\.plan line 2"):
        load_plan(tmp_path / "a.plan")


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    for name in ("a.plan", "a.json"):
        with pytest.raises(FileError, match="cannot write"):
            save_plan(tmp_path / "nowhere" / name, whole_file("tied"))
        with pytest.raises(FileError, match="cannot read"):
            load_plan(tmp_path / "nowhere" / name)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["kind"], "cluster", "this is the wrong kind of file"),
        (["version"], 2, "newer than this program"),
        (["plan", "parts", 0, "stages", 0, "stat"], "replicated", "stat"),
        (["plan", "parts", 0, "stages", 0, "state"], "sharded", "sharded-all"),
        (["plan", "parts", 0, "micro_batches"], "3", "micro_batches"),
        (["cluster", "hosts", "va1", "nic"], -1.0, "host va1"),
        (["cluster", "hosts", "va1", "name"], "va3", "host va1"),
        (["cluster", "hosts", "va1", "devices"], {"unknown": 1}, "host va1"),
        (["cluster", "hosts", "va1", "devices"], {"fast": 10**9}, "number of devices"),
        (["cluster", "kinds", "old", "memory"], 0.0, "device kind old"),
        (["cluster", "links", 0, "bandwidth"], 0.0, "link virginia - virginia"),
        (["cluster", "links", 0, "between"], ["virginia", "va1"], "link virginia - va1"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path: Path, path: list[str | int], value: object, says: str) -> None:
    document = json.loads((FOLDER / "tied.json").read_text())
    inner = document
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(FileError, match=says):
        load_plan(tmp_path / "a.json")


def test_the_inputs_hash_changes_with_every_input() -> None:
    atlantic, made = cluster(), jobs(golden("two-jobs"))
    digests = {"one": "a", "two": "b"}
    other_job = [msgspec.structs.replace(made[0], batch=33), made[1]]
    hashes = [
        inputs_digest(atlantic, made, digests),
        inputs_digest(msgspec.structs.replace(atlantic, links=atlantic.links[1:]), made, digests),
        inputs_digest(atlantic, other_job, digests),
        inputs_digest(atlantic, made[::-1], digests),
        inputs_digest(atlantic, made, {"one": "a", "two": "c"}),
    ]
    assert len(set(hashes)) == len(hashes)
    assert inputs_digest(atlantic, made, {"two": "b", "one": "a"}) == hashes[0]


def with_data(data: str) -> PlanFile:
    plan = golden("sharded")
    job = msgspec.structs.replace(plan.parts[0].job, data=data)  # type: ignore[union-attr]
    return PlanFile(plan=msgspec.structs.replace(plan, parts=(msgspec.structs.replace(plan.parts[0], job=job),)))


def data_of(path: Path | str) -> Path:
    return Path(load_plan(path).plan.parts[0].job.data.removeprefix("text:"))  # type: ignore[union-attr]


def test_paths_in_a_plan_follow_symlinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To folders, in the path itself, and to the plan file."""
    (tmp_path / "deep" / "down" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to("deep/down/real")
    (tmp_path / "deep" / "book.txt").write_text("words")
    monkeypatch.chdir(tmp_path)
    save_plan("link/plan.json", with_data("text:deep/book.txt"))
    (tmp_path / "to-plan.json").symlink_to("link/plan.json")
    (tmp_path / "deep" / "down" / "by-hand.txt").write_text("words")
    save_plan("up.json", with_data("text:link/../by-hand.txt"))  # not ./by-hand.txt
    for file in ("link/plan.json", "deep/down/real/plan.json", "to-plan.json", "up.json"):
        assert data_of(file).read_text() == "words"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "linked.json").symlink_to("../link/beside.json")
    (tmp_path / "there" / "beside.txt").write_text("beside the link")
    save_plan("deep/down/real/beside.json", with_data("text:beside.txt"))  # not there yet: left as it is
    assert data_of("there/linked.json").read_text() == "beside the link"


def test_data_that_is_not_there_is_said_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plans").mkdir()
    monkeypatch.chdir(tmp_path)
    save_plan("plans/plan.json", with_data("text:none.txt"))
    with pytest.raises(DataError, match="there is no such file of text") as caught:
        check_data(load_plan("plans/plan.json").plan, Path("plans/plan.json"))
    assert caught.value.found == f"none at {tmp_path}/plans/none.txt, {tmp_path}/none.txt"


@pytest.mark.parametrize("name", ["plan.json", "mine.plan"])
def test_paths_in_a_plan_work_from_anywhere_and_move_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "work" / "plans").mkdir(parents=True)
    (tmp_path / "work" / "config.json").write_text("{}")
    (tmp_path / "work" / "book.txt").write_text("words")
    monkeypatch.chdir(tmp_path / "work")
    plan = golden("sharded")
    job = msgspec.structs.replace(plan.parts[0].job, model="hf:config.json", data="text:book.txt")  # type: ignore[union-attr]
    plan = msgspec.structs.replace(plan, parts=(msgspec.structs.replace(plan.parts[0], job=job),))
    save_plan(f"plans/{name}", PlanFile(plan=plan))
    assert load_plan(f"plans/{name}").plan == plan
    (tmp_path / "work").rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = load_plan(tmp_path / "moved" / "plans" / name).plan
    there = found.parts[0].job  # type: ignore[union-attr]
    assert Path(there.model.removeprefix("hf:")).read_text() == "{}"
    assert Path(there.data.removeprefix("text:")).read_text() == "words"
    assert plan_digest(found) == plan_digest(plan)
