"""The cache: keys that see every change, entries that are whole or absent, and a second load without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.files import cache_folder
from isthmus.model import cache
from isthmus.model.capture import Example
from isthmus.model.fingerprint import fingerprint
from isthmus.model.runnable_blocks import cut
from isthmus.model.source import load_graph


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("ISTHMUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "isthmus"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "isthmus"


def test_an_entry_is_read_as_written_and_leaves_nothing_aside(folder: Path) -> None:
    assert cache.read("ab") is None
    cache.write("ab", b"one")
    cache.write("ab", b"two")
    assert cache.read("ab") == b"two"
    assert [path.name for path in folder.iterdir()] == ["ab.json"]


def test_an_unusable_cache_is_as_good_as_none(folder: Path) -> None:
    folder.write_text("a file, not a folder")
    cache.write("ab", b"one")
    assert cache.read("ab") is None


def test_an_entry_that_cannot_be_renamed_leaves_nothing_aside(folder: Path) -> None:
    (folder / "ab.json" / "in the way").mkdir(parents=True)
    cache.write("ab", b"one")
    assert cache.read("ab") is None
    assert [path.name for path in folder.iterdir()] == ["ab.json"]


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_keys_are_equal_only_for_equal_parts(left: list[bytes], right: list[bytes]) -> None:
    assert (cache.content_key(left) == cache.content_key(right)) == (left == right)


def test_versions_name_what_is_absent_too() -> None:
    assert cache.versions("torch", "no-such-package").endswith(f"torch {version('torch')} no-such-package absent")


T = TypeVar("T")


class Scaled(nn.Module):
    """A model of which everything that matters can be changed."""

    def __init__(self, width: int = 4, scale: float = 1.0, options: object = None, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4), nn.Linear(4, 4)
        if tied:
            self.second.weight = self.first.weight
        self.scale, self.options = scale, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


class Renamed(Scaled, Generic[T]):
    """The same tree under another class."""


class Options:
    """Plain settings held by a model."""

    def __init__(self, window: int) -> None:
        self.window = window


class Slotted:
    """Keeps its state where `vars` does not see it."""

    __slots__ = ("window",)


def printed(module: nn.Module, width: int = 4, **kwargs: torch.Tensor) -> str | None:
    return fingerprint(module, Example(args=(torch.zeros(2, width, device="meta"),), kwargs=kwargs))


def closure(value: int) -> object:
    return lambda: value


def test_equal_builds_have_equal_fingerprints() -> None:
    for make in (Scaled, lambda: Scaled(options=Options(3)), lambda: Scaled(options=[torch.relu, {"a": (1, None)}])):
        assert printed(make()) == printed(make()) is not None


def test_every_difference_that_matters_changes_the_fingerprint() -> None:
    builds = [
        printed(Scaled()),
        printed(Scaled(width=8)),
        printed(Scaled(scale=2.0)),
        printed(Scaled(tied=True)),
        printed(Renamed()),
        printed(Scaled().half()),
        printed(Scaled().eval()),
        printed(Scaled(), width=5),
        printed(Scaled(), mask=torch.zeros(2, 1, device="meta")),
        printed(Scaled(options=Options(3))),
        printed(Scaled(options=Options(4))),
        printed(Scaled(options=torch.relu)),
        printed(Scaled(options=torch.tanh)),
        printed(Scaled(options=closure(1))),
        printed(Scaled(options=closure(2))),
        printed(Scaled(options={"a": 1})),
        printed(Scaled(options=torch.float16)),
        printed(Scaled(options=nn.Linear(1, 1))),
    ]
    assert None not in builds
    assert len(set(builds)) == len(builds)


def test_what_cannot_be_described_has_no_fingerprint() -> None:
    assert printed(Scaled(options=iter([1]))) is None
    assert printed(Scaled(options=Slotted())) is None


def test_a_tree_with_a_cycle_ends() -> None:
    module = Scaled()
    module.options = [module]
    assert printed(module) is not None


def test_a_broken_entry_is_captured_again_and_rewritten(folder: Path) -> None:
    first = load_graph("zoo:mlp-tiny")
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    for broken in (b"", b"{", whole[:-20], whole.replace(b"layers.0.weight", b"layers.7.weight")):
        entry.write_bytes(broken)
        assert load_graph("zoo:mlp-tiny") == first
        assert entry.read_bytes() == whole


def test_a_second_load_needs_no_torch_and_no_second(folder: Path) -> None:
    graph = load_graph("zoo:gpt-tiny", sequence=32)
    assert load_graph("zoo:gpt-tiny", sequence=16).sequence == 16
    assert len(list(folder.iterdir())) == 2
    script = (
        "import sys, time; start = time.process_time()\n"
        "from isthmus.model.source import load_graph\n"
        "graph = load_graph('zoo:gpt-tiny', sequence=32)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "print(graph.digest, time.process_time() - start)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    digest, seconds = done.stdout.split()
    assert digest == graph.digest
    assert float(seconds) < 1.0


def test_no_cache_writes_nothing(folder: Path) -> None:
    load_graph("zoo:mlp-tiny", cache=False)
    assert not folder.exists()


class Recurrent(nn.Module):
    """Keeps weak references to its weights, as all recurrent layers of torch do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.cell(x)
        return torch.as_tensor(output)


def recurrent() -> tuple[nn.Module, torch.Tensor]:
    return Recurrent(), torch.zeros(2, 4, 8)


def test_a_recurrent_model_is_captured_once_and_without_warnings() -> None:
    captures: list[bool] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            load_graph("tests.model.test_cache:recurrent", capturing=lambda: captures.append(True))
            cut(*_with_example(recurrent()), name="recurrent")
    assert captures == [True]


def _with_example(built: tuple[nn.Module, torch.Tensor]) -> tuple[nn.Module, Example]:
    return built[0], Example(args=(built[1],))
