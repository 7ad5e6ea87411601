"""Count how easily a stranger finds their way in this repository.

    python tools/house.py            the counts, as a table
    python tools/house.py --json     the same, for comparing two commits
    python tools/house.py --show     and the sentences and names that were counted

- *package switches*: `isthmus plan zoo:gpt-tiny` visits functions for the first time in some order; how often two
  neighbours of that order are in different top-level packages (`cost`, `planners`, ...).
- *import chain*: the longest chain of modules that import each other at import time.
- *repeated names*: file names and public class names that occur more than once under `src/isthmus`.
- *clauses*: the share of sentences in the docs, and of docstrings of functions, that open with a What/Who/Where/Of
  clause instead of their subject or verb.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "isthmus"
CLUSTER = ROOT / "examples" / "clusters" / "demo.yaml"
CLAUSES = re.compile(
    r"(What|Who|Whose|Whom|Where|Which|Whether|That|Of|How|With what|From what|By what)\b(?! is\b.*\?)"
)
_VISITS = """
import importlib, os, pkgutil, sys
import isthmus
for found in pkgutil.walk_packages(isthmus.__path__, "isthmus."):  # importing is no visit
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
root, seen, order = sys.argv.pop(1) + os.sep, set(), []
def visit(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and code not in seen and not code.co_name.startswith("<"):
        seen.add(code)
        order.append(os.path.relpath(code.co_filename, root))
out = sys.argv.pop(1)
from isthmus.cli.main import main
import threading
sys.setprofile(visit); threading.setprofile(visit)
try:
    main()
except SystemExit:
    pass
finally:
    sys.setprofile(None)
    open(out, "w").write("\\n".join(order))
"""


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="list what was counted")
    given = parser.parse_args()
    order = visits()
    chain = longest_chain()
    files, classes = repeated(file_names()), repeated(class_names())
    pages, docstrings = list(sentences()), list(function_docstrings())
    opened = [s for s in pages if CLAUSES.match(s)], [s for s in docstrings if CLAUSES.match(s)]
    counts = {
        "files visited by isthmus plan": len(set(order)),
        "functions visited": len(order),
        "package switches": switches(order),
        "longest import chain": len(chain),
        "file names that occur more than once": len(files),
        "public class names that occur more than once": len(classes),
        "clause openings of sentences in docs": len(opened[0]) / len(pages),
        "clause openings of docstrings of functions": len(opened[1]) / len(docstrings),
    }
    if given.json:
        print(json.dumps(counts, indent=1))
    else:
        for name, value in counts.items():
            print(f"{name:46}{f'{value:.1%}' if isinstance(value, float) else value:>8}")
    if given.show:
        print("\nlongest chain:", *chain, sep="\n  ")
        print("\nfiles:", *sorted(files), "\nclasses:", *sorted(classes))
        print("\nsentences:", *opened[0], sep="\n  ")
        print("\ndocstrings:", *opened[1], sep="\n  ")
    return 0


def visits() -> list[str]:
    """Return the file of every function that planning a small model visits, in the order of the first visits."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "visits"
        words = ["plan", "zoo:gpt-tiny", "--cluster", str(CLUSTER), "--batch", "32", "--calls", "200"]
        command = [sys.executable, "-c", _VISITS, str(SOURCE), str(out), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return out.read_text().splitlines()


def switches(order: list[str]) -> int:
    """Count how often the top-level package changes."""
    rooms = [Path(file).parts[0] for file in order]
    return sum(a != b for a, b in itertools.pairwise(rooms))


def longest_chain() -> list[str]:
    """Return the longest chain of eager imports; imports of types only, and inside functions, do not count."""
    names = {module(path): path for path in SOURCE.rglob("*.py")}
    graph = {name: sorted(set(eager(path)) & names.keys() - {name}) for name, path in names.items()}

    @functools.cache
    def below(name: str) -> tuple[str, ...]:
        return (name, *max((below(other) for other in graph[name]), key=len, default=()))

    sys.setrecursionlimit(10_000)
    return list(max(map(below, graph), key=len))


def module(path: Path) -> str:
    """Return the dotted name of a file."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def eager(path: Path) -> Iterator[str]:
    """Yield the modules of ours that a file imports when it is imported."""
    todo: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("isthmus"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            todo += node.body + node.orelse
        elif isinstance(node, ast.Try):
            todo += node.body


def file_names() -> list[str]:
    """Return the name of every file but `__init__.py`."""
    return [path.name for path in SOURCE.rglob("*.py") if path.name != "__init__.py"]


def class_names() -> list[str]:
    """Return the name of every public class at the top of a module."""
    trees = (ast.parse(path.read_text()) for path in SOURCE.rglob("*.py"))
    nodes = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return [node.name for node in nodes if not node.name.startswith("_")]


def repeated(names: list[str]) -> list[str]:
    """Return the names that occur more than once."""
    return [name for name, count in Counter(names).items() if count > 1]


def sentences() -> Iterator[str]:
    """Yield the sentences of README, CONTRIBUTING, SECURITY and docs, without code, tables and headings."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        if page.name == "log.md":
            continue
        text = re.sub(r"```.*?```", "\n\n", page.read_text(), flags=re.S)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.)\s)", text):
            plain = " ".join(line.strip() for line in block.splitlines() if not re.match(r"\s*(\||#|>|!\[)", line))
            plain = re.sub(r"^(?:[-*]|\d+\.)\s+", "", plain.strip())
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).replace("*", "").replace("`", "")
            for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z])", plain):
                if len(sentence.split()) > 2:
                    yield sentence


def function_docstrings() -> Iterator[str]:
    """Yield the first line of the docstring of every function and method."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                yield text.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
