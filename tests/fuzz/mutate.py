"""Small damage to files: to their bytes, lines and words here, to their values in `mutate_values`."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

__all__ = ["damage"]

_WORD = re.compile(r"[\w.+-]+|[^\w\s]")
_NUMBER = re.compile(r"(?<![\w.])-?[0-9][0-9.]*(?:e-?[0-9]+)?")
_UNIT = re.compile(r"\b[kMGTP]?i?(?:B/s|bit/s|FLOP/s|B|s)\b|\b(?:ms|us|ns|h|min)\b")
_UNITS = ("", "GB", "GB/s", "Gbit/s", "bit", "ms", "h", "TFLOP/s", "FLOP", "GiB/s", "gb", "%", "parsec")
_NUMBERS = (
    *("0", "-1", "1e999", "-0.0", "1e-320", "010", "0x10", "1_000", "22:22", ".nan", ".inf", "NaN", "Infinity", "-inf"),
    *(str(2**63), str(2**64), "9" * 39, "9" * 400, "1e308", "0.1.2", "1e", "+1", "٣", "½"),
)
_WORDS = (
    *("yes", "no", "on", "null", "~", "true", "''", '""', "{", "}", "[", "]", ":", ": ", ",", "- ", "? ", "#", "|"),
    *("&a", "*a", "<<", "<<: *a", "!!int", "!!python/object/apply:os.getcwd []", "!", "%YAML 1.1", "---", "...", "@"),
    *("../..", "/etc/passwd", "-o", ";", "\\n", "\\", '"\\ud800"', '"\\u0000"', "\u202e", "\u2028", "\ufeff", "é", "𝕏"),
    *("over", "..", "+", "[b0]", "share 1", "os:getcwd", "zoo:gpt2", "x" * 3000, "\t", "\r", "\x1b[31m", "\x85"),
    *("\x00", ">", "`"),
)


def damage(data: bytes, random: Random) -> bytes:
    """The file with one piece of damage."""
    return random.choices(_ALL, _WEIGHTS)[0](data, random)


def _as_text(change: Callable[[str, Random], str]) -> Callable[[bytes, Random], bytes]:
    """A change of text as one of bytes; bytes that are no text pass through it unharmed."""
    return lambda data, random: change(data.decode("utf-8", "surrogateescape"), random).encode(
        "utf-8", "surrogateescape"
    )


def _span(length: int, random: Random, most: int) -> tuple[int, int]:
    start = random.randint(0, length)
    return start, min(length, start + random.randint(0, most))


def _bytes(data: bytes, random: Random) -> bytes:
    """A few bytes away, others in their place."""
    start, end = _span(len(data), random, 4)
    return data[:start] + random.randbytes(random.randint(0, 3)) + data[end:]


def _flip(data: bytes, random: Random) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def _cut_off(data: bytes, random: Random) -> bytes:
    return data[: random.randint(0, len(data))]


def _repeat(data: bytes, random: Random) -> bytes:
    start, end = _span(len(data), random, 200)
    return data[:end] + data[start:end] * random.choice((1, 2, 50)) + data[end:]


def _encoding(text: str, random: Random) -> bytes:
    codec = random.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "utf-7", "cp037"))
    return text.replace("a", "ä", 1).encode(codec, "replace")


def _line_ends(text: str, random: Random) -> str:
    return text.replace("\n", random.choice(("\r\n", "\r", "\n\n", "\u2028", "\x85", "\n\t", "")))


def _lines(text: str, random: Random) -> str:
    """A line taken away, doubled, moved, indented otherwise, or several at once."""
    lines = text.split("\n")
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            del lines[at : at + random.randint(1, 3)]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = random.choice(("  ", " ", "\t", "    ")) + lines[at]
        case _:
            lines[at] = lines[at][random.randint(1, 3) :]
    return "\n".join(lines)


def _replace(pattern: re.Pattern[str], choices: tuple[str, ...]) -> Callable[[str, Random], str]:
    """One place where the pattern matches becomes one of the choices."""

    def change(text: str, random: Random) -> str:
        places = [match.span() for match in pattern.finditer(text)]
        start, end = random.choice(places or [(0, 0)])
        return text[:start] + random.choice(choices) + text[end:]

    return change


def _swap_words(text: str, random: Random) -> str:
    """A word of the file in another's place: right words where they do not belong."""
    words = [match.span() for match in _WORD.finditer(text)] or [(0, 0)]
    (start, end), (a, b) = random.choice(words), random.choice(words)
    return text[:start] + text[a:b] + text[end:]


def _insert(text: str, random: Random) -> str:
    at = random.randint(0, len(text))
    return text[:at] + random.choice((*_WORDS, *_NUMBERS)) + text[at:]


def _deep(text: str, random: Random) -> str:
    at = random.randint(0, len(text))
    depth = random.choice((20, 70, 3000))
    return text[:at] + random.choice(("[", "{a: ", '{"a":', "- ", "? ", "  ")) * depth + text[at:]


_ALL = (
    *(_bytes, _flip, _cut_off, _repeat, _as_text(_line_ends), _as_text(_lines), _as_text(_replace(_WORD, _WORDS))),
    *(_as_text(_replace(_NUMBER, _NUMBERS)), _as_text(_replace(_UNIT, _UNITS)), _as_text(_swap_words)),
    *(_as_text(_insert), _as_text(_deep)),
    lambda data, random: _encoding(data.decode("utf-8", "replace"), random),
)
_WEIGHTS = (2, 1, 2, 1, 1, 4, 4, 4, 4, 4, 3, 1, 1)
