"""Nothing in the package unpickles, evaluates text, or starts a shell; code is imported by name in few places only.

Read off the syntax tree, with import aliases followed; SECURITY.md says what this is for.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "isthmus"
MODULES = sorted(SOURCE.rglob("*.py"))

# Importing one of these is enough.
BANNED_MODULES = {
    *("pickle", "cPickle", "_pickle", "pickletools", "marshal", "shelve", "dbm", "dill", "cloudpickle", "joblib"),
    *("jsonpickle", "copyreg", "code", "codeop", "runpy", "pty", "torch.package", "torch.hub"),
}
# Naming one of these is enough, called or not. A last part of * stands for everything that begins so.
BANNED_NAMES = (
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.export.load", "torch.export.pt2_archive*"),
    *("torch.distributed.checkpoint.load*", "torch.distributed.checkpoint.FileSystemReader"),
    *("torch.distributed.broadcast_object_list", "torch.distributed.all_gather_object"),
    *("torch.distributed.gather_object", "torch.distributed.scatter_object_list"),
    *("torch.distributed.send_object_list", "torch.distributed.recv_object_list"),
    *("yaml.load*", "yaml.unsafe_load*", "yaml.full_load*", "yaml.Loader", "yaml.CLoader"),
    *("yaml.UnsafeLoader", "yaml.CUnsafeLoader", "yaml.FullLoader", "yaml.CFullLoader", "yaml.BaseLoader"),
    *("os.system", "os.popen", "os.exec*", "os.spawn*", "os.posix_spawn*"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "numpy.core.multiarray*"),
)
# Keywords that may only say False (or True), in any call.
KEYWORDS = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}
# Where a module is imported by a name made at run time. Only the first takes the name from the user, who typed it or
# gave the job file that says it; the others import parts of this package.
BY_NAME = {
    "importlib.import_module",
    "importlib.util.spec_from_file_location",
    "importlib.machinery.SourceFileLoader",
}
IMPORTERS = {
    ("model/function.py", "_import"),
    ("model/zoo/__init__.py", "build"),
    ("cli/main.py", "_run"),
    ("__init__.py", "__getattr__"),
    ("__init__.py", ""),
}


def aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for: `t` -> `torch`, `parse` -> `yaml.parse`."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                known[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """`t.load` -> `torch.load`; also `getattr(t, "load")`."""
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        outer = dotted(node.value, known)
        return f"{outer}.{node.attr}" if outer else None
    match node:
        case ast.Call(func=ast.Name(id="getattr"), args=[outer, ast.Constant(value=str(name)), *_]):
            return f"{dotted(outer, known)}.{name}"
    return None


def is_banned(name: str) -> bool:
    return any(name.startswith(ban[:-1]) if ban.endswith("*") else name == ban for ban in BANNED_NAMES)


def is_banned_module(name: str) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:end]) in BANNED_MODULES for end in range(1, len(parts) + 1))


def findings(tree: ast.AST) -> Iterator[str]:
    """What the code has and must not."""
    known = aliases(tree)
    for name in known.values():
        if is_banned_module(name) or is_banned(name):
            yield f"import {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {alias.name}" for alias in node.names if is_banned_module(alias.name))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            continue  # a field of that name uses nothing
        elif isinstance(node, ast.Name | ast.Attribute | ast.Call):
            name = dotted(node, known)
            if name and (is_banned(name) or is_banned_module(name)):
                yield name
        elif isinstance(node, ast.keyword) and node.arg in KEYWORDS:
            allowed = KEYWORDS[node.arg]
            if not (isinstance(node.value, ast.Constant) and node.value.value is allowed):
                yield f"{node.arg}={ast.unparse(node.value)}"


def importers(node: ast.AST, known: dict[str, str], inside: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions that import by name, as `Class.function` ("": the module itself)."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from importers(child, known, (*inside, child.name) if named else inside)
        if isinstance(child, ast.Call) and dotted(child.func, known) in BY_NAME:
            yield ".".join(inside)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_banned_is_used(path: Path) -> None:
    assert not sorted(set(findings(parsed(path))))


def test_code_is_imported_by_name_in_the_listed_places_only() -> None:
    trees = {path.relative_to(SOURCE).as_posix(): parsed(path) for path in MODULES}
    found = {(path, place) for path, tree in trees.items() for place in importers(tree, aliases(tree))}
    assert found == IMPORTERS


def test_compiled_code_is_cached_in_one_place() -> None:
    """numba pickles what it caches, in the user's own cache folder: no other module may ask it, or anyone, to."""
    users = {path.name for path in MODULES for name in aliases(parsed(path)).values() if name.split(".")[0] == "numba"}
    assert users == {"compiled.py"}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads as l", "import pickle.loads"),
        ("def f():\n    import dill as d", "import dill"),
        ("import torch as t\nt.load(x)", "torch.load"),
        ("from torch import load", "import torch.load"),
        ("import torch\nread = torch.load", "torch.load"),
        ("import torch\ngetattr(torch, 'load')(x)", "torch.load"),
        ("import torch\ntorch.export.load(x)", "torch.export.load"),
        ("import torch.distributed.checkpoint as dcp\ndcp.load(x)", "torch.distributed.checkpoint.load"),
        ("from torch.distributed import all_gather_object", "import torch.distributed.all_gather_object"),
        ("import torch.distributed as dist\ndist.broadcast_object_list(x)", "torch.distributed.broadcast_object_list"),
        ("import yaml\nyaml.load(x, Loader=yaml.SafeLoader)", "yaml.load"),
        ("import yaml\nyaml.parse(x, Loader=yaml.UnsafeLoader)", "yaml.UnsafeLoader"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("compile('1', 'f', 'exec')", "compile"),
        ("__import__('os')", "__import__"),
        ("import os\nos.system('ls')", "os.system"),
        ("from os import execvp", "import os.execvp"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell=True"),
        ("import subprocess\nsubprocess.run('ls', shell=yes)", "shell=yes"),
        ("load(x, weights_only=False)", "weights_only=False"),
        ("AutoModel.from_config(c, trust_remote_code=True)", "trust_remote_code=True"),
        ("import numpy as np\nnp.load(f, allow_pickle=True)", "allow_pickle=True"),
    ],
)
def test_the_reader_sees_it(code: str, found: str) -> None:
    assert found in list(findings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)",
        "import json\njson.load(f)",
        "import yaml\nyaml.parse(x, Loader=yaml.SafeLoader)",
        "model.eval()",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "AutoModel.from_config(c, trust_remote_code=False)",
    ],
)
def test_the_reader_sees_nothing_where_nothing_is(code: str) -> None:
    assert not list(findings(ast.parse(code)))


def test_the_reader_sees_imports_by_name() -> None:
    code = "import importlib as i\nclass A:\n    def f(self):\n        return i.import_module(x)\ni.import_module(y)"
    tree = ast.parse(code)
    assert set(importers(tree, aliases(tree))) == {"A.f", ""}
