"""`isthmus profile`: measures, writes, and what it wrote is what `plan --profile` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.model.load_profile import load_profile
from isthmus.model.source import load_graph
from tests.cli.conftest import Isthmus

ONE = "{kind: cluster, version: 1, name: one, hosts: {here: {region: r, devices: {CPU: 1}}}}"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow("profiles a transformer")
def test_a_plan_uses_what_was_measured(isthmus: Isthmus, tmp_path: Path) -> None:
    words = ("zoo:gpt-tiny", "--sequence", 32)
    done = isthmus("profile", *words, "--device", "CPU", "--threads", 1, "--samples", "2,1,2", "--json")
    distinct = len({block.digest for block in load_graph("zoo:gpt-tiny", sequence=32).blocks})
    assert done.code == 0 and done.values["file"] == "gpt-tiny.profile.json" and done.values["left_out"] == []
    assert done.values["points"] == 2 * distinct and done.values["samples"] == [1, 2]
    assert (done.values["device"], done.values["precision"], done.values["threads"]) == ("CPU", "fp32", 1)
    profile = load_profile(tmp_path / done.values["file"])
    assert len(profile.blocks) == 2 * distinct and "1 thread, torch " in profile.origin
    cluster = tmp_path / "one.yaml"
    cluster.write_text(ONE)
    planned = isthmus(
        "plan", *words, "--cluster", cluster, "--batch", 2, "--profile", done.values["file"], "--json"
    ).values["times"]
    blocks = planned["measured"]
    assert (
        planned["text"] == f"{blocks} of {blocks} measured (gpt-tiny.profile.json), 0 interpolated, 0 from the catalog"
    )
    assert blocks >= 14 and planned["warning"] is None


def test_text_for_people(isthmus: Isthmus, tmp_path: Path) -> None:
    done = isthmus(
        "profile", "zoo:mlp-tiny", "--samples", "1,16", "--threads", 1, "--device", "quick", "-o", "mine.json"
    )
    assert done.code == 0 and "Measuring zoo:mlp-tiny on " in done.err
    lines = done.out.splitlines()
    assert lines[0].endswith("(1 thread) in fp32: 4 points for quick") and "16 samples" in lines[2]
    assert [line.split()[0] for line in lines[3:5]] == ["layers", "layers#2"]
    assert "quick is not in the catalog: a cluster file must describe it under this name" in lines
    assert lines[-1].endswith("isthmus plan zoo:mlp-tiny --cluster FILE --profile mine.json")
    assert {point.device for point in load_profile(tmp_path / "mine.json").blocks} == {"quick"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("zoo:mlp-tiny", "--samples", "1,0"), 2, "'0' is not a whole number of 1 or more"),
        (("zoo:mlp-tiny", "--samples", "1,,2"), 2, "'' is not a whole number of 1 or more"),
        pytest.param(
            ("zoo:mlp-tiny", "--samples", "1000000000000"),
            2,
            "inputs of that many samples do not fit in memory",
            marks=pytest.mark.slow("starts the process that measures"),
        ),
        (("zoo:mlp-tiny", "--device", "my card"), 2, "cannot be the name of a device kind"),
        (("zoo:mlp-tiny", "-o", "no/such/file.json"), 1, "the folder does not exist"),
        (("saved.json",), 1, "A saved model has no code to build"),
        (("job.yaml",), 1, "This names no model"),
        (("zoo:mlp-tinny",), 1, "Did you mean zoo:mlp-tiny"),
    ],
)
def test_what_users_get_wrong(isthmus: Isthmus, words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    done = isthmus("profile", *words)
    assert done.code == code and said in done.err and not done.out and not [*tmp_path.iterdir()]


def test_interrupted_it_writes_nothing(isthmus: Isthmus, tmp_path: Path) -> None:
    done = isthmus("profile", "tests.cli.rude:interrupted")
    assert done.code == 130 and not done.out and not [*tmp_path.iterdir()]
    assert done.err.splitlines()[-1] == "isthmus: interrupted"
