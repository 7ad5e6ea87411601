"""HTML and SVG that cannot be broken by what is written into it: text is escaped unless it is markup already."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

__all__ = ["Markup", "escape", "join", "prose", "tag"]

_CODE = re.compile("`([^`]+)`")


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Return the text as HTML.

    Markup stays as it is. Characters that cannot be seen (controls, changes of direction) are made visible.
    """
    if isinstance(text, Markup):
        return text
    seen = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    return Markup(html.escape(seen))


def join(parts: Iterable[str]) -> Markup:
    """Return the parts one after the other, each escaped if it must be."""
    return Markup("".join(map(escape, parts)))


def prose(text: str) -> Markup:
    """Return a sentence as HTML, with what is between backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", escape(text)))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """Return one element.

    `class_="x"` writes class, and `aria_label` writes aria-label. An attribute that is None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _value(value: str | float | None) -> str:
    """Return an attribute's value as text; numbers are rounded to a hundredth, as drawings need no more."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
