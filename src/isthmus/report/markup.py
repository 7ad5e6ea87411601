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
    """The text as HTML. Markup stays as it is; what cannot be seen (controls, changes of direction) is made visible."""
    if isinstance(text, Markup):
        return text
    seen = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    return Markup(html.escape(seen))


def join(parts: Iterable[str]) -> Markup:
    """The parts one after the other, each escaped where it must be."""
    return Markup("".join(map(escape, parts)))


def prose(text: str) -> Markup:
    """A sentence as HTML; what stands between backticks is shown as code, without them."""
    return Markup(_CODE.sub(r"<code>\1</code>", escape(text)))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """One element. `class_="x"` writes class, `aria_label` writes aria-label; an attribute that is None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _value(value: str | float | None) -> str:
    """Numbers to a hundredth: drawings need no more."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
