"""Imports go downwards or sideways only, and no module grows past reading.

0  errors units files progress compiled       4  runtime
1  cluster model plan       5  deploy
2  cost                     6  report
3  planners explain         7  api cli
   emulate imports 0 and 1 only, and only 7 imports it; runtime never imports planners
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "isthmus"
MODULES = sorted(SOURCE.rglob("*.py"))
LAYERS = (
    ("errors", "units", "files", "compiled", "progress"),
    ("cluster", "model", "plan"),
    ("cost",),
    ("planners", "explain"),
    ("runtime",),
    ("deploy",),
    ("report",),
    ("api", "cli"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
LEVEL |= {"__init__": 7, "__main__": 7}
LONGEST = 600


def imports_of(tree: ast.AST, package: list[str]) -> Iterator[str]:
    """Dotted names that the code imports anywhere, inside functions too; relative ones made whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def parts_imported(tree: ast.AST, package: list[str]) -> set[str]:
    """Parts of the project (`cost`, `plan`) that the code imports."""
    names = [name.split(".") for name in imports_of(tree, package)]
    parts = {name[1] for name in names if name[0] == "isthmus" and len(name) > 1}
    return {part for part in parts if not part.startswith("__")}


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def allowed(part: str, other: str) -> bool:
    if part == "emulate":
        return other == "emulate" or LEVEL[other] <= 1
    if "runtime" in (part, other) and {part, other} & {"planners", "explain"}:
        return False
    if other == "emulate":
        return LEVEL[part] == 7
    return LEVEL[other] <= LEVEL[part]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    package = ["isthmus", *path.relative_to(SOURCE).parts[:-1]]
    found = parts_imported(ast.parse(path.read_text("utf-8")), package)
    wrong = sorted(other for other in found if not allowed(part_of(path), other))
    assert not wrong, f"{path.relative_to(SOURCE)} imports {wrong}, which lie above it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_is_too_long(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("import isthmus.cost.event_engine", {"cost"}),
        ("from isthmus import cli", {"cli"}),
        ("from isthmus import __version__", set()),
        ("from ..planners import split", {"planners"}),
        ("from . import text", {"plan"}),
        ("def f():\n    from isthmus.runtime.worker import run", {"runtime"}),
        ("import importlib\nimportlib.import_module('isthmus.deploy.local')", {"deploy"}),
        ("import torch, numpy.linalg", set()),
    ],
)
def test_the_reader_sees_every_form_of_import(code: str, parts: set[str]) -> None:
    assert parts_imported(ast.parse(code), ["isthmus", "plan"]) == parts


def test_the_rules_themselves() -> None:
    assert allowed("cost", "plan") and allowed("plan", "cluster") and allowed("cli", "report")
    assert not allowed("plan", "cost") and not allowed("runtime", "planners") and not allowed("planners", "runtime")
    assert allowed("emulate", "plan") and not allowed("emulate", "cost") and not allowed("deploy", "emulate")
    assert allowed("cli", "emulate")


def test_descriptions_do_not_need_torch() -> None:
    cheap = "isthmus.cluster.load, isthmus.model.load_job, isthmus.model.graph, isthmus.plan.types, isthmus.files"
    code = f"import sys, {cheap}; sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numba')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
