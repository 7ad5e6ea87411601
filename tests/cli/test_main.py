"""The command line itself: what it offers, how it starts, and every way in which it can fail."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.cli import console
from isthmus.cli.arguments import Parser, build_parser
from isthmus.cli.console import ProgressLine
from tests.cli.conftest import Isthmus

FLAGS = {
    "isthmus": ["--help", "--version", "-h"],
    "isthmus cluster": ["--help", "-h"],
    "isthmus cluster import": [
        "--bandwidth", "--fill", "--help", "--hulk", "--json", "--kind", "--latency", "--output", "--region", "--slurm",
        "-h", "-o",
    ],
    "isthmus cluster probe": [
        "--among", "--collectives", "--emulate", "--help", "--host", "--json", "--meet", "--nics", "--output",
        "--seconds", "--token-file", "--trunks", "--wait", "-h", "-o",
    ],
    "isthmus cluster show": ["--help", "--json", "-h"],
    "isthmus doctor": ["--help", "--json", "-h"],
    "isthmus emulate": ["--change", "--help", "--json", "--on", "--unshaped", "-h"],
    "isthmus explain": ["--budget", "--cluster", "--help", "--json", "--model", "--profile", "--schemes", "-h"],
    "isthmus export": ["--average", "--help", "--json", "--output", "-h", "-o"],
    "isthmus model": ["--help", "-h"],
    "isthmus model show": ["--help", "--json", "--save", "--sequence", "-h"],
    "isthmus plan": [
        "--batch", "--budget", "--calls", "--cluster", "--fix", "--help", "--json", "--output", "--planner",
        "--precision", "--profile", "--seed", "--sequence", "--trust-independent-samples", "-h", "-o",
    ],
    "isthmus profile": [
        "--device", "--emulate", "--help", "--json", "--output", "--precision", "--samples", "--sequence", "--threads",
        "-h", "-o",
    ],
    "isthmus report": ["--cluster", "--help", "--json", "--model", "--output", "--profile", "--run", "-h", "-o"],
    "isthmus simulate": ["--cluster", "--help", "--json", "--model", "--orders", "--profile", "--trace", "-h"],
    "isthmus train": [
        "--batch", "--checkpoint", "--cluster", "--emulate", "--engine", "--events", "--every", "--export", "--help",
        "--ignore-memory", "--json", "--model", "--nccl", "--precision", "--profile", "--resume", "--sequence",
        "--steps", "--tensorboard", "--trace", "--trust-independent-samples", "--wandb", "-h",
    ],
}  # fmt: skip


def flags(parser: Parser) -> dict[str, list[str]]:
    found = {parser.prog: sorted(parser.options())}
    for inner in parser.commands().values():
        found |= flags(inner)
    return found


def test_the_list_of_flags_is_frozen() -> None:
    """A flag is a promise: whoever changes this list changes what scripts rely on."""
    assert flags(build_parser()) == FLAGS


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from isthmus.cli.main import main; code = main(['--help']); "
        "heavy = {'torch', 'numba', 'numpy', 'msgspec', 'rich', 'transformers'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else code)"
    )
    seconds = []
    for _ in range(3):
        start = sum(os.times()[2:4])  # processor time of children: a busy machine does not count
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        seconds.append(sum(os.times()[2:4]) - start)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert "simulate" in done.stdout
    assert min(seconds) < 0.4, seconds


@pytest.mark.parametrize("words", [("--help",), ("plan", "--help"), ("--version",)])
def test_help_is_good(isthmus: Isthmus, words: tuple[str, ...]) -> None:
    done = isthmus(*words)
    assert done.code == 0 and "isthmus" in done.out and not done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("pln", "zoo:gpt-tiny"), "Did you mean 'plan'?"),
        (("cluster", "shwo"), "Did you mean 'show'?"),
        (("zzzzzz",), "Expected one of doctor, cluster, model, plan, simulate"),
        (("plan", "zoo:gpt-tiny", "--clustr", "x.yaml"), "Did you mean '--cluster'?"),
        (("plan", "zoo:gpt-tiny"), "--cluster is missing"),
        (("plan", "zoo:gpt-tiny", "--cluster"), "expected one argument"),
        (("plan", "zoo:gpt-tiny", "surplus", "--cluster", "x.yaml"), "Found 'surplus'"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--batch", "0"), "whole number of 1 or more"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--budget", "inf"), "not a number of seconds"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--seed", "-1"), "whole number of 0 or more"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--precision", "bf17"), "Did you mean 'bf16'?"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--planner", "gird"), "Did you mean 'grid'?"),
        (("plan", "zoo:gpt-tiny", "--cluster", "x.yaml", "--fix", "tp=0"), "Expected degrees like tp=2"),
        (("model", "show"), "required: MODEL"),
        (("report", "plan.json"), "--output is missing"),
    ],
)
def test_wrong_usage(isthmus: Isthmus, words: tuple[str, ...], said: str) -> None:
    done = isthmus(*words)
    assert done.code == 2 and said in done.err and not done.out
    assert len(done.err.splitlines()) == 1, "one line"


def test_wrong_usage_as_json(isthmus: Isthmus) -> None:
    done = isthmus("plna", "--json")
    assert done.code == 2 and done.values["error"]["type"] == "UsageError"
    assert "Did you mean 'plan'?" in done.values["error"]["next"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cluster", "show", "none.yaml"), "none.yaml: cannot read the file"),
        (("model", "show", "zoo:gpt-tinny"), "Did you mean zoo:gpt-tiny"),
        (("model", "show", "gpt2"), "Try zoo:gpt2"),
        (("simulate", "none.json"), "none.json: cannot read the file"),
        (("report", "none.json", "-o", "page.html"), "none.json: cannot read the file"),
        (("report", "none.json", "-o", "no/such/page.html"), "no/such/page.html: the folder does not exist"),
        (("simulate", "none.json", "--trace", "no/such/t.json"), "no/such/t.json: the folder does not exist"),
        (("model", "show", "zoo:gpt-tiny", "--save", "no/such/m.json"), "Make it: mkdir -p no/such"),
        (("plan", "zoo:gpt-tiny", "--cluster", "c.yaml", "-o", "no/such/p.json"), "the folder does not exist"),
        (("model", "show", "tests.cli.rude:broken"), "ZeroDivisionError: no model today"),
    ],
)
def test_what_users_get_wrong_is_one_line(isthmus: Isthmus, words: tuple[str, ...], said: str) -> None:
    plain, machine = isthmus(*words), isthmus(*words, "--json")
    assert plain.code == machine.code == 1 and said in plain.err and not plain.out
    complaint = [line for line in plain.err.splitlines() if line.startswith("isthmus: ")]
    assert len(complaint) == 1 and "Traceback" not in plain.err
    assert machine.values["error"]["what"] in complaint[0]


def failing(error: BaseException) -> SimpleNamespace:
    def run(args: object, progress: object) -> None:
        raise error

    return SimpleNamespace(run=run)


def test_a_bug_is_called_a_bug(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isthmus.cli.doctor", failing(ZeroDivisionError("division\nby zero")))
    done = isthmus("doctor", "--json")
    assert done.code == 1 and len(done.err.splitlines()) == 1
    assert "this is a bug in Isthmus. ZeroDivisionError: division by zero (test_main.py line " in done.err
    assert done.values["error"]["type"] == "Bug"
    monkeypatch.setenv("ISTHMUS_TRACEBACK", "1")
    assert "Traceback (most recent call last)" in isthmus("doctor").err


def test_code_that_ends_the_program_is_no_success(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isthmus.cli.doctor", failing(SystemExit(0)))
    done = isthmus("doctor")
    assert done.code == 1 and not done.out
    assert "code that the command called has ended the program" in done.err and "Found sys.exit(0)" in done.err


def test_interrupted(isthmus: Isthmus) -> None:
    done = isthmus("model", "show", "tests.cli.rude:interrupted")
    assert done.code == 130 and not done.out
    assert done.err.splitlines()[-1] == "isthmus: interrupted"


@pytest.mark.parametrize("both", [False, True], ids=["output", "output and errors"])
@pytest.mark.parametrize(
    "words", ["--help", "cluster show examples/clusters/many-regions.yaml", "simulate none.json --json"]
)
def test_a_reader_that_goes_away_is_no_bug(root: Path, words: str, both: bool) -> None:
    """As in `isthmus ... | head`: it ends at once and quietly, with the exit code that a shell calls SIGPIPE."""
    end, start = os.pipe()
    os.close(end)
    command = [sys.executable, "-m", "isthmus.cli.main", *words.split()]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    errors = start if both else subprocess.PIPE
    done = subprocess.run(command, stdout=start, stderr=errors, text=True, check=False, cwd=root, env=plain)
    os.close(start)
    assert done.returncode == 141
    assert all(line.startswith("isthmus: none.json: cannot") for line in (done.stderr or "").splitlines())


def test_a_pipe_that_breaks_elsewhere_is_a_bug(isthmus: Isthmus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isthmus.cli.doctor", failing(BrokenPipeError(32, "Broken pipe")))
    done = isthmus("doctor")
    assert done.code == 1 and "this is a bug in Isthmus. BrokenPipeError" in done.err


def test_output_that_a_terminal_cannot_show_is_escaped(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "ciné.yaml"
    command = [sys.executable, "-m", "isthmus.cli.main", "cluster", "show", str(file)]
    done = subprocess.run(command, capture_output=True, check=False, env={"PYTHONIOENCODING": "ascii"}, cwd=root)
    assert done.returncode == 1 and b"cin\\xe9.yaml: cannot read the file" in done.stderr


def test_where_no_line_lives_long_phases_are_told_of_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProgressLine(stream := io.StringIO()) as progress:
        progress.phase("Planning")
        progress.detail("3 plans priced")
        monkeypatch.setattr(console, "_QUIET", -1.0)
        progress.detail("900 plans priced")
    assert stream.getvalue() == "Planning ...\nPlanning: 900 plans priced ...\n"


def test_what_others_say_is_no_markup_of_the_living_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    with ProgressLine(stream := Terminal()) as progress:
        progress.phase("it says [/x]")
        progress.detail("[/y]")
    assert "it says [/x]" in stream.getvalue()
