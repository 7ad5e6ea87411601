"""Degrees that a user pins: `--fix tp=2,pp=4`."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.errors import UsageError

__all__ = ["Fix", "parse_fix"]


class Fix(NamedTuple):
    """Degrees that `grid` must use; None is free. `micro` counts samples per replica, as in Megatron."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro: int | None = None

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if value is not None)


def parse_fix(text: str) -> Fix:
    """Read pinned degrees: `tp=2,pp=4,dp=2,micro=4`, any of them."""
    values: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in Fix._fields or name in values or not number.isdecimal() or not 1 <= len(number) <= 9:
            number = "0"
        if int(number) < 1:
            raise UsageError(
                "--fix cannot be read", found=word, expected="degrees like tp=2,pp=4,dp=2,micro=4, each 1 or more, once"
            )
        values[name] = int(number)
    return Fix(**values)
