"""The documentation: its links lead somewhere, its files load, its examples run, its lists are complete.

The pages in RUN are played in an empty folder, block by block (`examples` is there too):

    ```yaml home.yaml    a block with a file's name is written as that file
    ```console           `$ isthmus ...` is run; what is shown below is compared with what it prints
    ```python            is run, after the Python blocks above it; a ```text block right after is what it prints
    ```py                is quoted from a file in `examples`

Shown lines are compared without their figures: what a line says is kept true, how fast something is may change. A page
may leave lines out, best marked by `...`. Exit codes other than 0 are shown by `$ echo $?`.

    python -m tests.test_docs     puts the present figures, and the present rules of plans, into the pages
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from isthmus import errors
from isthmus.cli.main import main
from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.load import parse_cluster
from isthmus.model import zoo
from isthmus.model.load_job import parse_jobs
from isthmus.plan import types
from isthmus.plan.file import load_plan
from isthmus.plan.types import Pipeline
from isthmus.plan.validate import RULES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = DOCS / "tutorial.md"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
RUN = (
    ROOT / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("tutorial", "models", "jobs", "profiles", "python", "errors", "explain", "planner-from-scratch")
    ),
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>\w*)(?: (?P<name>\S+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (?P<words>.+)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.MULTILINE)
RULE = re.compile(r"^\| `(?P<rule>[a-z][a-z-]*)` \| (?P<text>.+?) \| (?P<remedy>.+?) \|$", re.MULTILINE)
LOADERS: dict[str, Callable[..., object]] = {"cluster": parse_cluster, "job": parse_jobs, "workload": parse_jobs}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def anchors(page: Path) -> set[str]:
    """Headings as the forges write their anchors: lower case, no punctuation, hyphens for spaces."""
    titles = HEADING.findall(FENCE.sub("", page.read_text("utf-8")))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_link(page: Path, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return False  # elsewhere on the web
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    return not file.exists() or bool(anchor and file.suffix == ".md" and anchor not in anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(without_code(page.read_text("utf-8")))
    assert [target for target in targets if broken_link(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_whole_files_on_a_page_load(page: Path) -> None:
    """All but those that are called broken."""
    for language, name, body in FENCE.findall(page.read_text("utf-8")):
        kind = re.match(r"(?:#.*\n)*kind: (\w+)$", body, re.MULTILINE)
        if language == "yaml" and kind:
            broken = pytest.raises(errors.IsthmusError) if name.startswith("broken") else contextlib.nullcontext()
            with broken:
                LOADERS[kind[1]](body, where=page.name)


def test_every_page_is_listed() -> None:
    """The README leads to the index, and the index to every page."""
    assert "docs/README.md" in LINK.findall((ROOT / "README.md").read_text("utf-8"))
    listed = {target.partition("#")[0] for target in LINK.findall((DOCS / "README.md").read_text("utf-8"))}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed


class Shown(NamedTuple):
    """What a page says that something printed, where in the page that stands, and what it printed now."""

    command: str
    start: int
    end: int
    lines: list[str]
    real: list[str]


def key(line: str) -> str:
    """What is stable of a line: its first column without figures, and without names that a planner may choose."""
    first = re.split(r"\s{2,}", line.strip())[0]
    first = re.sub(r"\b(planner|digest) \S+", r"\1 #", re.sub(r"^(stage|sync) .*", r"\1", first))
    return re.sub(r"(?<![\w/.-])[\d.,]*\d(?:e[+-]\d+)?(?: [kMGTmu]?(?:B|s|FLOP)\b)?", "#", first)


def unmet(shown: Shown) -> list[str]:
    """Shown lines that nothing like was printed for."""
    real = {key(line) for line in shown.real}
    return [line for line in shown.lines if line.strip() not in ("", "...") and key(line) not in real]


def play(page: Path) -> Iterator[Shown]:
    """Plays a page's blocks in the present folder."""
    known: dict[str, Any] = {}
    printed: str | None = None
    for block in FENCE.finditer(page.read_text("utf-8")):
        language, name, body = block["language"], block["name"], block["body"]
        if name:
            assert not name.startswith("examples"), "that folder is the real one"
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(body, "utf-8")
        elif language == "console":
            yield from _commands(body, block.start("body"))
        elif language == "text" and printed is not None:
            yield Shown("python", block.start("body"), block.end("body"), body.splitlines(), printed.splitlines())
        elif language == "python":
            known, printed = _python(body, known)


def _commands(body: str, offset: int) -> Iterator[Shown]:
    code, commands = 0, list(COMMAND.finditer(body))
    for index, command in enumerate(commands):
        if command["words"] == "echo $?":
            real, code = str(code), 0
        else:
            code, real = _isthmus(shlex.split(command["words"]))
        told = index + 1 < len(commands) and commands[index + 1]["words"] == "echo $?"
        assert code == 0 or told, f"$ {command['words']}: exit {code}\n{real}"
        start, end = (offset + place for place in command.span("shown"))
        yield Shown(command["words"], start, end, command["shown"].splitlines(), real.splitlines())


def _isthmus(words: list[str]) -> tuple[int, str]:
    """Exit code and all that a command prints, but for the lines that say what it is doing."""
    assert words[0] == "isthmus", f"only isthmus is run on a page, not {words[0]}"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words[1:])
    said = [line for line in err.getvalue().splitlines() if not line.endswith(" ...")]
    return code, "\n".join([*out.getvalue().rstrip().splitlines(), *said])


def _python(body: str, known: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Runs a block with the names of the blocks before it; gives all names, and what it printed."""
    script = Path("block.py")
    script.write_text(body, "utf-8")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        names = runpy.run_path(str(script), init_globals=known)
    return {name: value for name, value in names.items() if not name.startswith("__")}, out.getvalue()


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A new working folder with the examples in it; modules imported meanwhile from there are forgotten."""
    before, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "examples").symlink_to(ROOT / "examples")
        os.chdir(name)
        try:
            yield Path(name)
        finally:
            os.chdir(before)
            sys.path[:] = path
            for module in set(sys.modules) - modules:
                if module.split(".")[0] in ("examples", "my_model"):
                    del sys.modules[module]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_first_example_of_a_page_works(page: Path) -> None:
    with empty_folder():
        first = next(shown for shown in play(page) if shown.lines)
    assert unmet(first) == []


@pytest.mark.slow("plays whole pages")
@pytest.mark.parametrize("page", [page for page in RUN if page != TUTORIAL], ids=name_of)
def test_the_page_can_be_followed(page: Path) -> None:
    with empty_folder():
        assert_true(list(play(page)))


def assert_true(played: list[Shown]) -> None:
    """All that a page shows was printed when it was played."""
    assert played and any(shown.lines for shown in played)
    assert {shown.command: lines for shown in played if (lines := unmet(shown))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_quoted_code_is_in_an_example(page: Path) -> None:
    for language, _, body in FENCE.findall(page.read_text("utf-8")):
        assert language != "py" or any(body in path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow("trains in three ways")) if path.name == "demo.py" else path
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
    ids=lambda path: path.name,
)
def test_examples_run(path: Path) -> None:
    with empty_folder(), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(str(path), run_name="__main__")


def test_the_tutorial_can_be_followed_and_is_right_about_its_plans() -> None:
    """On the slow network one card works alone; on the fast one both, the faster one more, and the step is shorter."""
    with empty_folder():
        assert_true(list(play(TUTORIAL)))
        slow, fast = load_plan("plan.json"), load_plan("faster.json")
        assert "<html" in Path("plan.html").read_text("utf-8")[:200]
    shares = []
    for file in (slow, fast):
        (part,) = file.plan.parts
        assert isinstance(part, Pipeline)
        shares.append({replica.devices[0]: replica.share for stage in part.stages for replica in stage.replicas})
    desk, attic = "desk/RTX-3090/0", "attic/RTX-2080Ti/0"
    assert set(shares[0]) == {desk} and set(shares[1]) == {desk, attic} and shares[1][desk] > shares[1][attic]
    assert slow.predicted and fast.predicted and fast.predicted.step_seconds < slow.predicted.step_seconds


def test_the_table_of_rules_is_the_programs() -> None:
    rows = RULE.findall((DOCS / "errors.md").read_text("utf-8"))
    told = {rule: text for rule, text, _ in rows}
    assert len(told) == len(rows), "a rule stands twice"
    assert {rule: told.get(rule) for rule in RULES} == RULES, (
        "docs/errors.md lacks a rule or says it otherwise; `python -m tests.test_docs` writes the table"
    )
    assert [rule for rule, _, remedy in rows if len(remedy.split()) < 3] == [], "what is to be done?"
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "src").rglob("*.py"))
    raised = set(re.findall(r'\bPlanError\(\s*"([a-z-]+)"', sources))
    assert len(raised) > 20 and raised <= set(told)


def test_every_error_class_is_explained() -> None:
    page = (DOCS / "errors.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+Error)` \| (\d) \|", page, re.MULTILINE))
    classes = {name: getattr(errors, name) for name in errors.__all__ if name != "IsthmusError"}
    assert rows == {name: str(kind.exit_code) for name, kind in classes.items()}


def test_the_readme_counts_right() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"(\d+) kinds of devices", page) == [str(len(CATALOG))]
    assert re.findall(r"(\d+) models are", page) == [str(len(zoo.names()))]


def test_words_has_every_word_of_a_plan() -> None:
    """The types of a plan and the values that their fields may take are all in the vocabulary."""
    words = set(re.findall(r"[a-z0-9-]+", (DOCS / "words.md").read_text("utf-8").lower()))
    kinds = {"pipeline", "stage", "replica", "sync", "pool", "shard", "plan", "via", "job", "workload", "bucket"}
    values = {value for choice in (types.How, types.Schedule, types.Layout) for value in choice.__args__}
    assert kinds | values <= words


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One title\n[good](a.md#one-title) [bad](a.md#two) [gone](b.md) ![no](b.png) [web](https://x.org)\n"
        "`[code](c.md)`\n"
        "```console\n$ isthmus --version\nisthmus 7.7.7\n$ isthmus cluster shw\nno such thing\n$ echo $?\n2\n```\n"
        "```python\nx = 1\nprint('one  two')\n```\n```text\none  three\n```\n```python\nprint(x + 1)\n```\n"
        "```text\n3\nmore\n```\n"
    )
    targets = LINK.findall(without_code(page.read_text()))
    assert [target for target in targets if broken_link(page, target)] == ["a.md#two", "b.md", "b.png"]
    with empty_folder():
        played = list(play(page))
    assert [unmet(shown) for shown in played] == [[], ["no such thing"], [], [], ["more"]]
    assert [shown.real for shown in played][2:] == [["2"], ["one  two"], ["2"]]


def refreshed(text: str, played: list[Shown]) -> str:
    """The page with what is printed now, leaving out what it left out."""
    for shown in reversed(played):
        lines = shown.real if "..." not in [line.strip() for line in shown.lines] else _kept(shown)
        body = "".join(f"{line}\n" for line in lines) if shown.lines else ""
        text = text[: shown.start] + body + text[shown.end :]
    return text


def _kept(shown: Shown) -> list[str]:
    """The printed lines that the page shows, in their order; the others, with blank lines beside them, as `...`."""
    wanted = Counter(key(line) for line in shown.lines if line.strip())
    lines: list[str] = []
    for line in shown.real:
        wanted[key(line)] -= 1
        new = line.rstrip() if not line.strip() or wanted[key(line)] >= 0 else "..."
        if new == "..." and lines[-1:] == [""]:
            lines.pop()
        if new not in ("", "...") or lines[-1:] != ["..."]:
            lines.append(new)
    return lines


def refreshed_rules(text: str) -> str:
    """The page with the program's rules; remedies stay, and are to be written for new rules."""
    remedies = {rule: remedy for rule, _, remedy in RULE.findall(text)}
    table = [f"| `{rule}` | {told} | {remedies.get(rule, '?')} |\n" for rule, told in RULES.items()]
    start = next(RULE.finditer(text)).start()
    return text[:start] + "".join(table) + text[text.index("\n\n", start) + 1 :]


if __name__ == "__main__":
    for page in RUN:
        with empty_folder() as folder:
            os.environ["ISTHMUS_CACHE"] = str(folder / "cache")  # every model is captured anew, on every machine
            new = refreshed(page.read_text("utf-8"), list(play(page)))
        page.write_text(refreshed_rules(new) if page.name == "errors.md" else new, "utf-8")
