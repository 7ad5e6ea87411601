"""The benchmarks: their files of results are whole, and the figures that pages quote are claims in them.

A page quotes a figure in a row of a table whose first cell is the claim's name, with the figure and a link to the file:

    | whole plans priced per second | 1,290 | [simulator](benchmarks/results/simulator.json) |
"""

from __future__ import annotations

import importlib.util
import json
import operator
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if not path.name.startswith("_"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
KEYS = {
    "name": str,
    "date": str,
    "machine": dict,
    "command": str,
    "quick": bool,
    "seed": int,
    "rows": list,
    "claims": list,
}
OPERATORS = {">=": operator.ge, "<=": operator.le, "==": operator.eq}
QUOTE = re.compile(r"^\|(?P<cells>.*benchmarks/results/(?P<file>[\w.-]+)\.json\).*)\|\s*$", re.MULTILINE)
NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")


@pytest.fixture(scope="module")
def results() -> ModuleType:
    """The module that all benchmarks share; they are scripts, not a package."""
    spec = importlib.util.spec_from_file_location("_results", ROOT / "benchmarks" / "_results.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def faults(result: dict[str, Any], name: str) -> list[str]:
    """What is wrong with a file of results."""
    found = [key for key, kind in KEYS.items() if not isinstance(result.get(key), kind)]
    if found:
        return found
    if result["name"] != name or f"benchmarks/{name}.py" not in result["command"]:
        found.append("another benchmark's")
    if result["quick"]:
        found.append("of a quick run")
    if not {"processor", "cores", "python"} <= set(result["machine"]):
        found.append("machine")
    if not result["rows"] or not result["claims"]:
        found.append("empty")
    return found + [f"claim {claim.get('name')}" for claim in result["claims"] if not sound(claim)]


def sound(claim: dict[str, Any]) -> bool:
    """Whether `holds` follows from target and measured."""
    if set(claim) != {"name", "target", "measured", "holds"}:
        return False
    sign, _, target = claim["target"].partition(" ")
    return sign in OPERATORS and claim["holds"] is OPERATORS[sign](claim["measured"], float(target))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_results_are_whole(path: Path) -> None:
    assert faults(json.loads(path.read_text()), path.stem) == []
    assert path.stem in {script.stem for script in SCRIPTS}


def false_quotes(text: str, folder: Path) -> list[str]:
    """Rows that quote a claim which its file does not have, or another figure than it has (by more than 2 %)."""
    false = []
    for match in QUOTE.finditer(text):
        name, *others = (cell.strip().strip("`") for cell in match["cells"].split("|"))
        path = folder / f"{match['file']}.json"
        claims = {claim["name"]: claim for claim in json.loads(path.read_text())["claims"]} if path.is_file() else {}
        figures = [figure(cell) for cell in others if NUMBER.search(cell) and "benchmarks/results" not in cell]
        if name not in claims or not any(figures_agree(value, claims[name]["measured"]) for value in figures):
            false.append(name)
    return false


def figure(cell: str) -> float:
    match = NUMBER.search(cell)
    assert match is not None
    value = float(match[0].replace(",", ""))
    return value / 100 if "%" in cell else value


def figures_agree(quoted: float, measured: float) -> bool:
    return abs(quoted - measured) <= 0.02 * abs(measured)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_quote_what_was_measured(page: Path) -> None:
    text = page.read_text("utf-8")
    assert false_quotes(text, RESULTS) == []
    named = re.findall(r"benchmarks/(\w+\.py)", text)
    assert [name for name in named if not (ROOT / "benchmarks" / name).is_file()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmarks_say_how_they_are_called(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "--quick" in capsys.readouterr().out


def test_a_claim_that_fails_fails_the_run(results: ModuleType, tmp_path: Path) -> None:
    called = results.Options("trial", False, 7, tmp_path)
    rows = [{"what": "a", "seconds": 1.5, "count": 3}, {"what": "b", "seconds": None}]
    good, bad = results.at_least("speed", 2000.0, 1000), results.at_most("error", 0.2, 0.05)
    assert results.finish(called, rows, [good, results.equal("count", 3, 3)]) == 0
    assert faults(json.loads((tmp_path / "trial.json").read_text()), "trial") == []
    assert results.finish(called, rows, [good, bad], others={"note": {"x": 1.0}}) == 1
    written = json.loads((tmp_path / "trial.json").read_text())
    assert faults(written, "trial") == []
    assert [claim["holds"] for claim in written["claims"]] == [True, False]
    assert written["seed"] == 7 and written["rows"] == rows and written["note"] == {"x": 1.0}


def test_the_checks_can_fail(results: ModuleType, tmp_path: Path) -> None:
    results.finish(results.Options("trial", True, 0, tmp_path), [{"a": 1}], [results.at_most("error", 0.018, 0.05)])
    written = json.loads((tmp_path / "trial.json").read_text())
    assert faults(written, "trial") == ["of a quick run"]
    assert faults(written | {"quick": False}, "other") == ["another benchmark's"]
    assert faults({"name": "trial"}, "trial")[:2] == ["date", "machine"]
    wrong = written["claims"][0] | {"holds": False}
    assert faults(written | {"quick": False, "claims": [wrong]}, "trial") == ["claim error"]
    link = "[trial](benchmarks/results/trial.json)"
    quotes = {"error": ["1.8 %", "0.018", "1.9 %"], "errors": ["1.8 %"]}
    page = "\n".join(f"| {name} | {value} | {link} |" for name, values in quotes.items() for value in values)
    assert false_quotes(page, tmp_path) == ["error", "errors"]
    assert false_quotes("| error | 1.8 % | [gone](../benchmarks/results/gone.json) |", tmp_path) == ["error"]
