"""The events of a run: read, and held against the plan that they would stand beside."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import msgspec
import pytest

from isthmus.errors import FileError
from isthmus.plan.file import load_plan, plan_digest
from isthmus.plan.types import Pipeline, Plan
from isthmus.report.html import Subject, report_html
from isthmus.report.run import RunRecord, check_run, read_run
from tests.plan.golden_files import FOLDER, golden
from tests.report.subjects import subject


def changed(plan: Plan, **fields: object) -> Plan:
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    return msgspec.structs.replace(plan, parts=(msgspec.structs.replace(part, **fields),))


def events(
    path: Path,
    plan: Plan,
    /,
    leave_out: tuple[str, ...] = (),
    begins: int = 1,
    evaluated: tuple[int, ...] = (),
    **begin: object,
) -> Path:
    """Three steps of a plan's job, and evaluations; `begin` has other values for the first line."""
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    job = {"job": part.job.name, "model": part.job.model, "batch": part.job.batch, "plan": plan_digest(plan), **begin}
    lines = [{"event": "begin", **{key: value for key, value in job.items() if key not in leave_out}}]
    for n in range(begins, begins + 3):
        lines.append({"event": "step", "step": n, "loss": 2.0 / n, "seconds": 0.5 + (n == begins) / 2 + (n == 1) / 2})
        if n in evaluated:
            lines.append({"event": "evaluation", "step": n, "loss": 3.0 / n, "metrics": {"right": 1 / n}})
    lines += [{"event": "done", "bytes_sent": 10}, {"event": "done", "bytes_sent": 20}, {"event": "end", "error": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_is_read(tmp_path: Path) -> None:
    plan = golden("two-depths")
    run = read_run(events(tmp_path / "run.jsonl", plan))
    assert run.steps == (1, 2, 3) and run.step_seconds == 0.5 and run.bytes_sent == 30 and run.error is None
    check_run(run, plan)
    check_run(run, load_plan(FOLDER / "two-depths.json").plan)  # the same as JSON


@pytest.mark.parametrize(
    ("begin", "found", "expected"),
    [
        ({"job": "other"}, "job other", "job "),
        ({"model": "zoo:gpt2"}, "model zoo:gpt2", "model small:"),
        ({"batch": 3}, "batch 3", "batch "),
        ({"plan": "0" * 64}, "digest 000000000000", "digest "),
    ],
)
def test_a_run_of_something_else_is_refused(
    tmp_path: Path, begin: dict[str, object], found: str, expected: str
) -> None:
    plan, path = golden("two-depths"), tmp_path / "run.jsonl"
    with pytest.raises(FileError) as caught:
        check_run(read_run(events(path, plan, **begin)), plan)
    (what,) = begin
    assert f"another {what} than the plan" in caught.value.what and caught.value.where == str(path)
    assert caught.value.found == found and (caught.value.expected or "").startswith(expected)


def test_another_plan_of_the_same_job_is_another_plan(tmp_path: Path) -> None:
    plan = golden("two-depths")
    run = read_run(events(tmp_path / "run.jsonl", plan))
    with pytest.raises(FileError, match="another plan"):
        check_run(run, changed(plan, ahead=7))


def test_what_older_events_do_not_say_is_not_held_against_them(tmp_path: Path) -> None:
    plan = golden("two-depths")
    run = read_run(events(tmp_path / "run.jsonl", plan, leave_out=("plan",)))
    assert run.plan is None
    check_run(run, plan)


def resumed(path: Path, first: Plan, last: Plan) -> Path:
    """Three steps under one plan, then, from the checkpoint after step 2, three under another, with evaluations."""
    events(path, first, evaluated=(2, 3))
    before = path.read_text()
    events(path, last, begins=3, evaluated=(4,), predicted_step_seconds=0.4)
    path.write_text(before + path.read_text())
    return path


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    plan = golden("two-depths")
    other = changed(plan, ahead=7)
    run = read_run(resumed(tmp_path / "run.jsonl", other, plan))
    check_run(run, plan)
    assert run.steps == (1, 2, 3, 4, 5) and run.began == (1, 3) and run.other_plans == 1
    assert run.losses == (2.0, 1.0, 2 / 3, 0.5, 0.4)
    assert run.seconds[2] == 1.0 and run.step_seconds == 0.5 and run.middle == "median of steps 4 to 5"
    assert run.bytes_sent == 60 and run.predicted == 0.4
    assert run.held_out["loss"] == ((2, 4), (1.5, 0.75))  # the evaluation after step 3 was made void by resuming
    assert run.held_out["right"] == ((2, 4), (0.5, 0.25))
    with pytest.raises(FileError, match="another plan"):
        check_run(run, other)
    page = shown(run)[1]
    assert "The run was resumed at step 3. Other plans trained 1 of its 2 parts." in page
    assert "held-out" in page and "right, held-out" in page


def test_a_file_of_two_jobs_is_refused(tmp_path: Path) -> None:
    path, plan = tmp_path / "run.jsonl", golden("two-depths")
    both = events(path, plan, job="other").read_text() + events(path, plan, begins=4).read_text()
    path.write_text(both)
    with pytest.raises(FileError, match="several jobs"):
        read_run(path)


def shown(run: RunRecord) -> tuple[str, str]:
    """The first figure of the page, and all of its text."""
    fields = vars(subject("two-depths"))
    page = report_html(Subject(**{**fields, "run": run}))
    first = re.search('<div class="first"><dt>(.*?)</dt><dd>(.*?)</dd>', page)
    assert first is not None
    return f"{first[1]}: {first[2]}", html.unescape(re.sub("<[^>]*>", " ", page[page.index("</style>") :]))


def test_what_was_measured_comes_first(tmp_path: Path) -> None:
    plan = golden("two-depths")
    run = read_run(events(tmp_path / "run.jsonl", plan, shaped=True, predicted_step_seconds=0.4))
    first, text = shown(run)
    assert first == "step time, measured: 500 ms"
    assert "step time, predicted  400 ms  the run takes 1.25 x" in text
    assert "500 ms measured (median of steps 2 to 3), 400 ms predicted for the emulated devices, 1.25 x" in text
    assert "The run was measured" in text and "not measurements" not in text


@pytest.mark.parametrize("begin", [{}, {"shaped": None}, {"shaped": False}])
def test_no_ratio_to_a_prediction_for_other_devices(tmp_path: Path, begin: dict[str, object]) -> None:
    run = read_run(events(tmp_path / "run.jsonl", golden("two-depths"), predicted_step_seconds=0.4, **begin))
    first, text = shown(run)
    assert first == "step time, measured: 500 ms" and "1.25 x" not in text and "cannot be compared" in text


def test_a_run_without_steps_is_none(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "begin", "job": "j"}\n')
    with pytest.raises(FileError, match="the run has no steps"):
        read_run(path)
    path.write_text('{"event": "begin"}\nhello\n')
    with pytest.raises(FileError, match="line 2: this is not an event"):
        read_run(path)
