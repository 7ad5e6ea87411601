"""A test that needs a quiet machine fails there, and is skipped elsewhere."""

import pytest

from tests import quiet


@pytest.mark.parametrize(("taken", "ends"), [(0.02, AssertionError), (0.4, pytest.skip.Exception)])
def test_only_a_busy_machine_is_an_excuse(
    taken: float, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quiet, "taken_by_others", lambda: taken)
    with pytest.raises(ends), quiet.needs_quiet():
        raise AssertionError("too slow")
    with pytest.raises(ZeroDivisionError), quiet.needs_quiet():
        raise ZeroDivisionError
    with quiet.needs_quiet():
        pass


def test_what_others_take_is_a_part() -> None:
    assert -0.01 <= quiet.taken_by_others(0.05) < 1.0
