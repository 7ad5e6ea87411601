"""Plain text for people: aligned columns, and long lines cut short. It is ASCII, so that any terminal can show it."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

__all__ = ["columns", "cut", "excerpt", "percent", "rate", "sentence", "times", "wrapped"]

_WIDEST = 118
_OPENING = ("the", "a", "an", "this", "no")  # words that are never a name


def columns(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the rows as lines with aligned columns, two spaces apart; the columns in `right` are right-aligned."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def cut(line: str, width: int = _WIDEST) -> str:
    """Return the line, cut and ending in ... if it is too long."""
    return line if len(line) <= width else line[: width - 3] + "..."


def wrapped(text: str, width: int = _WIDEST) -> list[str]:
    """Return a sentence as lines that are not too long."""
    return textwrap.wrap(text, width)


def excerpt(text: str, lines: int, more: str) -> list[str]:
    """Return the first lines of a text, each cut, with the number of lines left out; `more` says where those are."""
    found = text.splitlines()
    left = len(found) - lines
    tail = [f"... {left} more lines; {more}"] if left > 0 else []
    return [*map(cut, found[:lines]), *tail]


def percent(part: float) -> str:
    """Return a fraction in per cent, 0.123 as `12 %`; what is more than nothing is not shown as 0 %."""
    return "<1 %" if 0.0 < part < 0.005 else f"{100 * part:.0f} %"


def rate(value: float) -> str:
    """Return a rate as text: `10.45`, `22,521`."""
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def sentence(words: str) -> str:
    """Return the words as a sentence; a first word that may be a name (`oslo1 to lima2`) keeps its case."""
    first = words.split(maxsplit=1)[0]
    return (words[0].upper() + words[1:] if first in _OPENING else words) + "."


def times(ratio: float) -> str:
    """Return a ratio as text: 1.234 as `1.23 x`, 12.34 as `12.3 x`, 1938.2 as `1,938 x`, 0.00123 as `0.0012 x`."""
    if ratio >= 999.5:
        return f"{ratio:,.0f} x"
    return f"{ratio:.2g} x" if ratio < 0.095 else f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.3g} x"
