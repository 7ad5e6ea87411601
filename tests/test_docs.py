"""The documentation: its links lead somewhere, its files load, its examples run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.cluster.load import parse_cluster
from isthmus.model.load_job import parse_jobs

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LOADERS = {"cluster": parse_cluster, "job": parse_jobs, "workload": parse_jobs}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(without_code(page.read_text("utf-8")))
    assert [target for target in targets if broken_link(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_whole_files_on_a_page_load(page: Path) -> None:
    for language, body in FENCE.findall(page.read_text("utf-8")):
        kind = re.match(r"(?:#.*\n)*kind: (\w+)$", body, re.MULTILINE)
        if language == "yaml" and kind:
            LOADERS[kind[1]](body, where=page.name)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text(
        "# One title\n[good](a.md#one-title) [bad](a.md#two) [gone](b.md) [web](https://x.org)\n`[code](c.md)`"
    )
    targets = LINK.findall(without_code(page.read_text()))
    assert [target for target in targets if broken_link(page, target)] == ["a.md#two", "b.md"]
