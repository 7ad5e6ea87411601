"""The corpus: nasty files, kept or generated, each of which must end as it is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import main
from isthmus.errors import IsthmusError, PlanError
from isthmus.files import read_yaml
from tests.fuzz.generated import GENERATED
from tests.fuzz.kinds import KINDS

FOLDER = Path(__file__).parent / "corpus"
MANIFEST: dict[str, dict[str, Any]] = read_yaml(FOLDER / "manifest.yaml").value


def end_of(kind: str, path: Path) -> IsthmusError | None:
    """Our error, or None where the file was read; any other error is the test's end."""
    try:
        KINDS[kind].read(path)
    except IsthmusError as error:
        return error
    return None


def test_every_file_is_listed_and_there_are_many() -> None:
    found = {path.relative_to(FOLDER).as_posix() for path in FOLDER.glob("*/*")}
    assert found == MANIFEST.keys()
    assert len(MANIFEST) + len(GENERATED) >= 150
    assert {name.split("/")[0] for name in MANIFEST} == KINDS.keys()


@pytest.mark.parametrize("name", MANIFEST)
def test_a_nasty_file_ends_as_listed(name: str) -> None:
    listed, path = MANIFEST[name], FOLDER / name
    error = end_of(path.parent.name, path)
    assert listed["ends"] == ("valid" if error is None else type(error).__name__), error
    if error is None:
        return
    if "rule" in listed:
        assert isinstance(error, PlanError) and error.rule == listed["rule"] and error.where
    else:
        assert error.where == f"{path} {listed.get('where', '')}".strip()
        assert listed.get("says", "") in str(error)


@pytest.mark.parametrize("name", GENERATED)
def test_a_large_nasty_file_ends_as_listed(name: str, tmp_path: Path) -> None:
    nasty = GENERATED[name]
    path = tmp_path / f"nasty{KINDS[nasty.kind].suffix}"
    path.write_bytes(nasty.data())
    error = end_of(nasty.kind, path)
    path.unlink()  # pytest keeps its folders, and some of these are large
    assert nasty.ends == ("valid" if error is None else type(error).__name__), str(error)[:300]
    assert nasty.says in str(error or "")
    assert error is None or error.where


@pytest.mark.parametrize("kind", ["cluster", "model"])
def test_the_command_line_says_it_without_a_traceback(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every nasty cluster and model, shown: exit 0 or 1, and never the words of a bug."""
    for name in (name for name in MANIFEST if name.startswith(f"{kind}/")):
        code = main([kind, "show", str(FOLDER / name), "--json"])
        out, err = capfd.readouterr()
        assert code == (0 if MANIFEST[name]["ends"] == "valid" else 1), name
        assert "Traceback" not in err and "bug in Isthmus" not in err, name
        assert out.startswith("{"), name


def test_the_command_line_says_it_of_profiles_too(
    capfd: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    """A nasty profile is refused before any planning; a good one of something else is no reason not to plan."""
    model, cluster = tmp_path / "model.json", root / "examples" / "clusters" / "one-host.yaml"
    model.write_bytes(KINDS["model"].seeds()[0])
    for name in (name for name in MANIFEST if name.startswith("profile/")):
        good = MANIFEST[name]["ends"] == "valid"
        words = ["plan", str(model), "--cluster", str(cluster), "--profile", str(FOLDER / name), "--calls", "1"]
        code = main([*words, "--json"])
        out, err = capfd.readouterr()
        assert code == (0 if good else 1), name
        assert "Traceback" not in err and "bug in Isthmus" not in err and out.startswith("{"), name
