"""`--profile`: measured times from a file, through `plan`, `simulate` and `report`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import isthmus as verbs
from isthmus.model.load_profile import save_profile
from isthmus.model.profile import BlockTime, CollectiveTime, Profile
from isthmus.plan.file import load_plan
from tests.cli.conftest import Isthmus
from tests.plan.small_models import chain

SLOW = 0.25  # seconds of every block, both ways


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """All blocks of the small model on one kind, at 1 and 64 samples: always the same time."""
    times = tuple(
        BlockTime(
            block=digest,
            device="RTX-3090",
            precision="fp32",
            samples=samples,
            forward_seconds=SLOW / 2,
            backward_seconds=SLOW / 2,
        )
        for digest in dict.fromkeys(block.digest for block in chain().blocks)
        for samples in (1, 64)
    )
    path = tmp_path / "measured.json"
    save_profile(Profile(blocks=times), path)
    return path


@pytest.fixture
def words(saved_model: Path, box: Path) -> tuple[object, ...]:
    return ("plan", saved_model, "--cluster", box, "--batch", 16, "--precision", "fp32", "--planner", "data-even")


def test_plan_and_simulate_use_it_and_say_so(
    isthmus: Isthmus, words: tuple[object, ...], box: Path, measured: Path, tmp_path: Path
) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "page.html"
    plain = isthmus(*words, "--json").values
    assert plain["times"]["text"] == "roofline from the catalog" and plain["times"]["profile"] is None
    planned = isthmus(*words, "--profile", measured, "-o", file, "--json").values
    used = {device.split("/")[1] for device in planned["memory"]}
    assert used == {"GTX-1080Ti"}, "the other kind was measured to be slow"
    assert planned["times"]["warning"] is None and planned["times"]["measured"] == 0
    cards = tmp_path / "cards.yaml"
    cards.write_text(box.read_text().replace(", GTX-1080Ti: 2", ""))
    layout = ("--cluster", cards, "--fix", "tp=1,pp=2,dp=1,micro=1")
    fixed = isthmus(*words[:-2], *layout, "--profile", measured, "-o", file, "--json").values
    assert fixed["step_seconds"] >= 8 * SLOW
    counts = {key: fixed["times"][key] for key in ("measured", "interpolated", "estimated")}
    assert counts == {"measured": 8, "interpolated": 0, "estimated": 0}
    assert fixed["times"]["text"] == f"8 of 8 measured ({measured}), 0 interpolated, 0 from the catalog"
    again = isthmus("simulate", file, "--profile", measured, "--json").values
    assert again["step_seconds"] == fixed["step_seconds"] and again["inputs_match"] is True
    assert again["times"] == fixed["times"]
    other = isthmus("simulate", file, "--json").values
    assert other["step_seconds"] < SLOW and other["inputs_match"] is False
    assert "\ntimes    roofline from the catalog\nnote     the plan file" in isthmus("simulate", file).out
    assert f"\ntimes  8 of 8 measured ({measured})" in isthmus("simulate", file, "--profile", measured).out
    assert isthmus("report", file, "--profile", measured, "-o", page).code == 0
    assert f"8 of 8 measured ({measured})" in page.read_text("utf-8") and "lower bound" in page.read_text("utf-8")
    assert isthmus("report", file, "-o", page).code == 0
    text = page.read_text("utf-8")
    assert "roofline from the catalog" in text
    assert "<dt>lower bound</dt>" not in text, "that of the file was found with other times"
    assert load_plan(file).inputs != ""


def test_several_files_are_one_profile(
    isthmus: Isthmus, words: tuple[object, ...], measured: Path, tmp_path: Path
) -> None:
    """One of each kind of device, in any order; a point that two of them have is refused."""
    other, file = tmp_path / "other.json", tmp_path / "plan.json"
    blocks = tuple(msgspec.structs.replace(time, device="GTX-1080Ti") for time in verbs.load_profile(measured).blocks)
    save_profile(Profile(blocks=blocks), other)
    both = ("--profile", measured, "--profile", other)
    planned = isthmus(*words, *both, "-o", file, "--json").values
    assert planned["step_seconds"] >= 8 * SLOW, "nothing is left that was not measured to be slow"
    assert planned["times"]["profile"] == f"{measured}, {other}" and planned["times"]["estimated"] == 0
    again = isthmus("simulate", file, "--profile", other, "--profile", measured, "--json").values
    assert again["step_seconds"] == planned["step_seconds"] and again["inputs_match"] is True
    page = isthmus("report", file, *both, "-o", tmp_path / "page.html")
    assert page.code == 0 and f"({measured}, {other})" in page.out
    twice = isthmus(*words, "--profile", measured, *both)
    assert twice.code == 1 and "two profiles give the same point" in twice.err and "Leave one" in twice.err
    given = verbs.plan(chain(), words[3], batch=16, precision="fp32", planner="data-even", profile=[measured, other])  # type: ignore[arg-type]
    assert given.price.step_seconds == planned["step_seconds"]


def test_a_profile_of_something_else_is_a_warning(
    isthmus: Isthmus, words: tuple[object, ...], measured: Path, tmp_path: Path
) -> None:
    save_profile(
        Profile(
            blocks=(
                BlockTime(
                    block="x", device="TPU", precision="bf16", samples=1, forward_seconds=1.0, backward_seconds=1.0
                ),
            ),
            collectives=(CollectiveTime(how="ring", hosts=("far", "away"), bytes=1.0, seconds=1.0),),
        ),
        measured,
    )
    done = isthmus(*words, "--profile", measured, "--json")
    said = "has no times for this model on these devices; it has 1 block on TPU in bf16 and collectives among away, far"
    assert done.code == 0 and done.values["times"]["warning"] == f"{measured} {said}"
    assert done.values["step_seconds"] == isthmus(*words, "--json").values["step_seconds"]
    assert any(
        line.startswith("warning  ") and said in line
        for line in isthmus(*words, "--profile", measured).out.splitlines()
    )


def test_a_broken_profile_ends_it(isthmus: Isthmus, words: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text('{"kind": "profile", "version": 1, "blocks": {}}')
    done = isthmus(*words, "--profile", path, "--json")
    assert done.code == 1 and done.values["error"]["type"] == "ProfileError"
    assert isthmus("plan", "x.json", "--cluster", "none.yaml", "--profile", path).code == 1


def test_the_verbs_take_it(box: Path, measured: Path) -> None:
    cluster, graph, profile = verbs.load_cluster(box), chain(), verbs.load_profile(measured)
    by_path = verbs.plan(graph, cluster, batch=16, precision="fp32", profile=measured, fix="tp=1,pp=1,dp=1,micro=1")
    given = verbs.plan(graph, cluster, batch=16, precision="fp32", profile=profile, fix="tp=1,pp=1,dp=1,micro=1")
    assert by_path.plan == given.plan
    assert by_path.lower_bound <= by_path.price.step_seconds
    assert any(note.startswith("times: ") and f"({measured})" in note for note in by_path.notes)
    again = verbs.simulate(given.plan, cluster, {"chain": graph}, profile=profile)
    assert again.price == given.price and again.times.blocks.total == 8
    plain = verbs.simulate(given.plan, cluster, {"chain": graph})
    assert plain.times.known and plain.times.blocks.estimated == 8
