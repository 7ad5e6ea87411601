"""A command line inside the test process, and a small saved model that needs no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from isthmus.cli.main import main
from isthmus.model.saved import save_graph
from tests.plan.small_models import chain


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def values(self) -> dict[str, Any]:
        """Standard output as the one JSON object that it must be."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Isthmus = Callable[..., Done]


@pytest.fixture
def isthmus(capfd: pytest.CaptureFixture[str]) -> Isthmus:
    def run(*words: object) -> Done:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return Done(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "chain.json"
    save_graph(chain(), path)
    return path


@pytest.fixture(scope="session")
def box(root: Path) -> Path:
    return root / "examples" / "clusters" / "one-host.yaml"
