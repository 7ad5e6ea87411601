"""Damaged files, a few hundred always from one seed; `make soak` reads ten thousand from a new one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import ClusterError
from tests.fuzz.cases import Case, case_data, cases, judge
from tests.fuzz.kinds import KINDS

SEED = 20261115
COUNT = 490


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_end_in_an_object_or_our_error(kind: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")  # pytest shows it where the test fails
    ends: Counter[str] = Counter()
    for case in (case for case in cases(SEED, COUNT) if case.kind == kind):
        path = tmp_path / f"damaged{KINDS[kind].suffix}"
        path.write_bytes(case_data(case))
        verdict = judge(kind, path)
        assert verdict.wrong is None, f"{case}: {verdict.wrong}; again: python -m tests.fuzz.run --case {case}"
        ends[verdict.outcome] += 1
    assert ends["valid"] and ends.total() > 2 * ends["valid"]  # the damage is neither nothing nor always the same


@pytest.mark.parametrize("kind", KINDS)
def test_good_files_stand(kind: str, tmp_path: Path) -> None:
    for number, data in enumerate(KINDS[kind].seeds()):
        path = tmp_path / f"{number}{KINDS[kind].suffix}"
        path.write_bytes(data)
        assert judge(kind, path).outcome == "valid"


def test_a_case_is_the_same_again() -> None:
    assert all(case_data(Case(3, kind, 5)) == case_data(Case(3, kind, 5)) for kind in KINDS)
    assert len({case_data(case) for case in cases(3, 60)}) > 50


def test_the_judge_sees_a_foreign_error_and_a_missing_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: Exception) -> str | None:
        def read(path: Path) -> object:
            raise error

        monkeypatch.setitem(KINDS, "cluster", replace(KINDS["cluster"], read=read))
        return judge("cluster", tmp_path / "x.yaml").wrong

    assert "KeyError" in (fails(KeyError("x")) or "")
    assert "no place" in (fails(ClusterError("bad")) or "")
    assert "no place" in (fails(ClusterError("bad", where="elsewhere.yaml")) or "")
    assert fails(ClusterError("bad", where=f"{tmp_path / 'x.yaml'} line 2")) is None
