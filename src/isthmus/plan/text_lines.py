"""The line form under the plan's text: words, clauses after commas, and two spaces of indent for each level.

A name is written bare if it consists of letters, digits and `_ . / * @ [ ] -` (and inner colons), and otherwise as a
JSON string. Empty lines and lines that begin with `#` are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from isthmus.errors import PlanError

__all__ = ["Line", "Reader", "quote", "read_lines"]

Reader = Callable[["Line"], Any]

_BARE = re.compile(r"[\w./*@\[\]-]+(?::[\w./*@\[\]-]+)*")
_SEPARATORS = ("over", "..", "-")  # words that end or join names
_TOKEN = re.compile(r'[ ]*("(?:[^"\\]|\\.)*"|[,:+](?=[ ,]|$)|[^\s",:#]+(?::[^\s",:#]+)*)')
_INTEGER = re.compile(r"-?[0-9]{1,40}", re.ASCII)
_NUMBER = re.compile(r"-?(?:[0-9]{1,400}(?:\.[0-9]{1,400})?(?:e[+-]?[0-9]{1,3})?|inf)", re.ASCII)


def quote(name: str) -> str:
    """Return the name as it is written in a line: bare if it can be read back, else as a JSON string."""
    if _BARE.fullmatch(name) and name not in _SEPARATORS:
        return name
    return json.dumps(name, ensure_ascii=not name.isprintable())


class Line:
    """One line, read word by word from the left, with the lines indented below it."""

    def __init__(self, where: str, tokens: list[str]) -> None:
        self.where = where
        self.children: list[Line] = []
        self._tokens = tokens
        self._next = 0

    def fail(self, what: str, *, expected: str, next: str | None = None) -> NoReturn:
        """Raise PlanError at the present word."""
        found = (self.peek() or "the end of the line")[:80]
        raise PlanError("text", what, where=self.where, found=found, expected=expected, next=next)

    def peek(self) -> str | None:
        """Return the present word as written (strings with their quotes); None at the end of the line."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def accept(self, word: str) -> bool:
        """Return whether the present word is `word`, and move past it if so."""
        if self.peek() != word:
            return False
        self._next += 1
        return True

    def expect(self, word: str) -> None:
        """Move past `word`, or fail if it is not the present word."""
        if not self.accept(word):
            self.fail("the line cannot be read", expected=f"`{word}`")

    def choice(self, words: Collection[str]) -> str:
        """Read one of the words."""
        word = self.peek()
        if word is None or word not in words:
            close = get_close_matches((word or "")[:64], words, n=1)
            self.fail(
                "the line cannot be read",
                expected=", ".join(words),
                next=f"Did you mean {close[0]}?" if close else None,
            )
        self._next += 1
        return word

    def name(self) -> str:
        """Read a name, bare or quoted."""
        token = self.peek()
        if token is None or (token[0] != '"' and (not _BARE.fullmatch(token) or token in _SEPARATORS)):
            self.fail("a name is missing", expected='a name, or "a quoted name"')
        if token[0] != '"':
            self._next += 1
            return token
        try:
            name = str(json.loads(token))
            name.encode()  # half of a surrogate pair is not text
        except ValueError:
            self.fail("the string cannot be read", expected="a JSON string")
        self._next += 1
        return name

    def names(self, end: str = ",") -> tuple[str, ...]:
        """Read names up to the word `end` or the end of the line."""
        found = []
        while self.peek() not in (end, ",", None):
            found.append(self.name())
        return tuple(found)

    def integer(self) -> int:
        """Read a whole number."""
        token = self.peek()
        if token is None or not _INTEGER.fullmatch(token):
            self.fail("a whole number is missing", expected="digits")
        self._next += 1
        return int(token)

    def number(self) -> float:
        """Read a number as Python prints it, infinity included."""
        token = self.peek()
        if token is None or not _NUMBER.fullmatch(token):
            self.fail("a number is missing", expected="a number like 0.5 or 1e-05")
        self._next += 1
        return float(token)

    def clauses(self, readers: Mapping[str, Reader]) -> dict[str, Any]:
        """Read `key value, key value, ...` to the end of the line, each key at most once, with the key's reader."""
        found: dict[str, Any] = {}
        while True:
            key = self.choice(readers)
            if key in found:
                self._next -= 1
                self.fail("the line has a key twice", expected="each key once")
            found[key] = readers[key](self)
            if not self.accept(","):
                self.end()
                return found

    def more_clauses(self, readers: Mapping[str, Reader]) -> dict[str, Any]:
        """Read `, key value, ...` to the end of the line, or nothing."""
        if self.accept(","):
            return self.clauses(readers)
        self.end()
        return {}

    def end(self) -> None:
        """Fail if anything follows on the line."""
        if self.peek() is not None:
            self.fail(
                "the line goes on after its end", expected="the end of the line, or a comma before another clause"
            )

    def leaf(self) -> None:
        """Fail if anything is indented below the line."""
        if self.children:
            self.children[0].fail("nothing belongs below the line above", expected="a line with less indent")


def read_lines(text: str, where: str) -> Line:
    """Return the lines of a text as a tree: the root is empty, and its children are the lines without indent."""
    root = Line(where, [])
    path = [root]
    for number, raw in enumerate(text.split("\n"), start=1):
        raw = raw.removesuffix("\r")
        body = raw.lstrip(" ")
        if not body or body.startswith("#"):
            continue
        line = Line(f"{where} line {number}", _tokens(body, f"{where} line {number}"))
        depth, odd = divmod(len(raw) - len(body), 2)
        if odd or depth >= len(path):
            line.fail("the indent fits no line above", expected="two spaces for each level")
        del path[depth + 1 :]
        path[-1].children.append(line)
        path.append(line)
    return root


def _tokens(body: str, where: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(body.rstrip(" "))
    while position < end:
        match = _TOKEN.match(body, position, end)
        if match is None:
            raise PlanError(
                "text",
                "the line cannot be read",
                where=where,
                found=body[position : position + 20].strip(),
                expected='words, numbers, commas, or "quoted names"',
            )
        tokens.append(match[1])
        position = match.end()
    return tokens
