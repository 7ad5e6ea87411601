"""Plain text for people: columns that line up, long things cut short. ASCII, so that it survives any terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

__all__ = ["columns", "cut", "excerpt", "percent", "rate", "sentence", "times", "wrapped"]

_WIDEST = 118
_OPENING = ("the", "a", "an", "this", "no")  # words that are never a name


def columns(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines with aligned columns, two spaces between; the columns in `right` end together."""
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
    """The line, ending in ... where it is too long."""
    return line if len(line) <= width else line[: width - 3] + "..."


def wrapped(text: str, width: int = _WIDEST) -> list[str]:
    """Return a sentence as lines that are not too long."""
    return textwrap.wrap(text, width)


def excerpt(text: str, lines: int, more: str) -> list[str]:
    """The first lines of a text, each cut; what is left out is counted, and `more` says where it is."""
    found = text.splitlines()
    left = len(found) - lines
    tail = [f"... {left} more lines; {more}"] if left > 0 else []
    return [*map(cut, found[:lines]), *tail]


def percent(part: float) -> str:
    """0.123 -> `12 %`; what is not nothing is not called 0 %."""
    return "<1 %" if 0.0 < part < 0.005 else f"{100 * part:.0f} %"


def rate(value: float) -> str:
    """Something a second: `10.45`, `22,521`."""
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"


def sentence(words: str) -> str:
    """The words as a sentence of its own; a first word that may be a name (`oslo1 to lima2`) stays as it is."""
    first = words.split(maxsplit=1)[0]
    return (words[0].upper() + words[1:] if first in _OPENING else words) + "."


def times(ratio: float) -> str:
    """1.234 -> `1.23 x`; 12.34 -> `12.3 x`; 1938.2 -> `1,938 x`; 0.00123 -> `0.0012 x`."""
    if ratio >= 999.5:
        return f"{ratio:,.0f} x"
    return f"{ratio:.2g} x" if ratio < 0.095 else f"{ratio:.2f} x" if ratio < 10 else f"{ratio:.3g} x"
