"""Errors say what, where, found, expected and the next step, in that order."""

import inspect
import re

import pytest

from isthmus import errors
from isthmus.errors import ClusterError, FileError, IsthmusError, PlanError, UsageError


def test_text_has_every_part_in_order() -> None:
    error = ClusterError(
        "link tokyo–paris has bandwidth 0",
        where="cluster.yaml line 22",
        found="0 Gbit/s",
        expected="more than 0",
        next="Leave it out",
    )
    assert str(error) == (
        "cluster.yaml line 22: link tokyo–paris has bandwidth 0. Found 0 Gbit/s. Expected more than 0. Leave it out."
    )


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "It broke."),
        ({"next": "Did you mean 'nic'?"}, "It broke. Did you mean 'nic'?"),
        ({"found": "x.", "where": "f"}, "f: It broke. Found x."),
    ],
)
def test_absent_parts_leave_no_trace(parts: dict[str, str], text: str) -> None:
    error = IsthmusError("It broke", **parts)
    assert str(error) == text
    assert error.as_dict() == {"what": "It broke", **parts}


def test_exit_codes_and_rule() -> None:
    assert (IsthmusError("x").exit_code, UsageError("x").exit_code, FileError("x").exit_code) == (1, 2, 1)
    assert PlanError("memory", "too much", where="stage 1").rule == "memory"


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = set(re.findall(r"\w+Error", errors.__doc__ or ""))
    real = {name for name, item in vars(errors).items() if inspect.isclass(item) and issubclass(item, IsthmusError)}
    assert drawn == real == set(errors.__all__)
