"""Turns the one-line message of a failed msgspec conversion into where, found, expected and next step.

msgspec says ``Expected `str`, got `int` - at `$.hosts[...].nic` ``: the path names fields and list positions but not
the keys of maps (`[...]`). The key is found by bisection: only the first entries of that map are converted, and the
shortest prefix that still gives the same message ends with the faulty entry. What would have been right is derived from
the type.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import msgspec
from msgspec import inspect

__all__ = ["Fault", "ValuePath", "close_name", "explain", "replaced", "show_path", "show_value", "value_at"]

ValuePath = tuple[str | int, ...]

_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_TOKEN = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>[0-9]+)\]|\[\.\.\.\]")
_FIELD = re.compile(r"Object (?P<how>contains unknown|missing required) field `(?P<name>.*)`", re.DOTALL)
_PLAIN = re.compile(r"Expected `[^`]+`(?: of length [0-9]+)?, got .*|Invalid enum value .*", re.DOTALL)
_BEGINS = 2  # letters that a name needs at least to count as the beginning of another
_MOST_NAMES = 8  # offered in place of a wrong name
_WORDS: dict[type[inspect.Type], str] = {
    inspect.StrType: "text",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.DictType: "a map",
    inspect.StructType: "a map",
}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a value, and the place of the value."""

    path: ValuePath
    what: str
    found: str | None = None
    expected: str | None = None
    next: str | None = None
    lacks: str | None = None  # the field that is missing in the value
    meant: str | None = None  # the field that was most likely meant by an unknown one
    placeholder: Any = None  # a value to use while the rest of the file is checked
    passable: bool = False  # whether the rest of the file can be checked with the value as it is
    refers: tuple[ValuePath, ...] = ()  # places where the name in question could have been defined; * is any part


def show_path(path: ValuePath) -> str:
    """Return a path as text, like `links[2].latency`; the empty path is `the file`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def show_value(value: object) -> str:
    """Return a value in a few words: text quoted and cut, maps and lists by their kind only."""
    if isinstance(value, dict):
        return "a map"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def close_name(name: str, names: Iterable[str]) -> str | None:
    """Return `Did you mean 'nic'?` with the known names that `name` may stand for, or None if none is close.

    These are the names that begin with `name`, or else the nearest one.
    """
    near = _near(name, names)
    if not near:
        return None
    shown = [repr(known) for known in near[:_MOST_NAMES]]
    rest = [f"one of {len(near) - _MOST_NAMES} others"] if len(near) > _MOST_NAMES else []
    return f"Did you mean {' or '.join(shown + rest)}?"


def _near(name: str, names: Iterable[str]) -> list[str]:
    """Return the known names that `name` begins.

    If there are none, return the one that is spelt most like it, or else the longest one that begins it.
    """
    by_folded = {known.casefold(): known for known in islice(names, 2000)}
    folded = name[:64].casefold()
    near = [known for known in by_folded if known.startswith(folded)] if len(folded) >= _BEGINS else []
    near = near or difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.6)
    if not near:
        begun = [known for known in by_folded if len(known) >= _BEGINS and folded.startswith(known)]
        near = sorted(begun, key=len)[-1:]
    return [by_folded[known] for known in near]


def explain(value: object, type: Any, complaint: str) -> Fault:
    """Return the fault behind `complaint`, which msgspec gave when it converted `value` to `type`."""
    match = _COMPLAINT.fullmatch(complaint)
    assert match is not None  # every part of the pattern is optional
    path = _locate(value, type, complaint, match["path"] or "", in_key=bool(match["key"]))
    infos = _types_at(inspect.type_info(type), path[:-1] if match["key"] else path)
    if match["key"]:
        return _wrong_key(path, infos)
    if field := _FIELD.fullmatch(match["what"]):
        return _wrong_field(path, infos, field["name"], unknown=field["how"] == "contains unknown")
    return _wrong_value(path, infos, value_at(value, path), match["what"])


def _wrong_key(path: ValuePath, infos: list[inspect.Type]) -> Fault:
    names = [name for info in infos if isinstance(info, inspect.DictType) for name in _literals(info.key_type)]
    key = str(path[-1])
    return Fault(
        path=path,
        what=f"{show_path(path[:-1])} has an unknown key {key!r}",
        expected=f"one of {', '.join(names)}" if names else None,
        next=close_name(key, names),
    )


def _wrong_field(path: ValuePath, infos: list[inspect.Type], name: str, *, unknown: bool) -> Fault:
    structs = [info for info in infos if isinstance(info, inspect.StructType)]
    fields = {field.encode_name: field for struct in structs for field in struct.fields}
    if unknown:
        near = _near(name, fields)
        return Fault(
            path=(*path, name),
            what=f"{show_path(path)} has an unknown field {name!r}",
            expected=f"only {', '.join(fields)}" if fields else None,
            next=close_name(name, fields),
            meant=near[0] if len(near) == 1 else None,
        )
    known = fields[name].type if name in fields else None
    return Fault(
        path=path,
        what=f"{show_path(path)} lacks the field {name!r}",
        expected=_describe(known) if known is not None else None,
        lacks=name,
        placeholder=_placeholder(known),
    )


def _wrong_value(path: ValuePath, infos: list[inspect.Type], value: object, complaint: str) -> Fault:
    what, found, expected, next = show_path(path), show_value(value), "", None
    examples = [example for info in infos if not _is_map(info) for example in _examples(info)]
    names = [name for info in infos for name in _literals(info)]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and examples:
        return Fault(path=path, what=f"{what} lacks its unit", found=found, expected=f"like {examples[0]}")
    if _PLAIN.fullmatch(complaint) and infos:
        expected = " or ".join(dict.fromkeys(_describe(info) for info in infos))
    if number and expected == "text":
        next = f'Quote it: "{value}"'
    if names and isinstance(value, str):
        next = close_name(value, names)
    expected = expected or complaint.removeprefix("Expected ").replace("`", "")
    return Fault(path=path, what=f"{what} has a wrong value", found=found, expected=expected, next=next)


def _locate(value: Any, type: Any, complaint: str, text: str, *, in_key: bool) -> ValuePath:
    """Return the path of a complaint with the keys of maps filled in."""
    path: ValuePath = ()
    for token in _TOKEN.finditer(text):
        if token["field"] is not None:
            path = (*path, token["field"])
        elif token["index"] is not None:
            path = (*path, int(token["index"]))
        else:
            path = _with_key(value, type, complaint, path)
    return _with_key(value, type, complaint, path) if in_key else path


def _with_key(value: Any, type: Any, complaint: str, path: ValuePath) -> ValuePath:
    entries = list(value_at(value, path).items()) if isinstance(value_at(value, path), dict) else []
    if not entries:  # msgspec also writes [...] for the members of a set
        return path
    low, high = 0, len(entries)  # the first `high` entries complain, the first `low` do not

    def first(count: int) -> object:
        return replaced(value, path, lambda _: dict(entries[:count]))

    while high - low > 1:
        middle = (low + high) // 2
        if _complains(first(middle), type, complaint):
            high = middle
        else:
            low = middle
    return (*path, entries[low][0])


def _complains(value: object, type: Any, complaint: str) -> bool:
    try:
        msgspec.convert(value, type, strict=True)
    except msgspec.ValidationError as problem:
        return str(problem) == complaint
    return False


def value_at(value: Any, path: ValuePath) -> Any:
    """Return the part at `path`, or None if there is none: an unknown field's name may itself look like a path."""
    for part in path:
        try:
            value = value[part]
        except (LookupError, TypeError):
            return None
    return value


def replaced(value: Any, path: ValuePath, change: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with the part at `path` changed."""
    if not path:
        return change(value)
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], change)
    return copy


def _types_at(info: inspect.Type, path: ValuePath) -> list[inspect.Type]:
    """Return the types that a value at `path` may have; below a union there are several."""
    infos = _alternatives(info)
    for part in path:
        infos = [inner for outer in infos for child in _children(outer, part) for inner in _alternatives(child)]
    return infos


def _alternatives(info: inspect.Type) -> list[inspect.Type]:
    if isinstance(info, inspect.UnionType):
        members = [member for member in info.types if not isinstance(member, inspect.NoneType)]
        return [inner for member in members for inner in _alternatives(member)]
    return [info]


def _children(info: inspect.Type, part: str | int) -> list[inspect.Type]:
    match info:
        case inspect.Metadata():
            return _children(info.type, part)
        case inspect.StructType():
            return [field.type for field in info.fields if field.encode_name == part]
        case inspect.DictType():
            return [info.value_type]
        case inspect.TupleType() if isinstance(part, int):
            return list(info.item_types[part : part + 1])
        case inspect.CollectionType():
            return [info.item_type]
    return []


def _describe(info: inspect.Type) -> str:
    """Return a type in words."""
    if isinstance(info, inspect.UnionType):
        return " or ".join(_describe(member) for member in _alternatives(info))
    if examples := _examples(info):
        return f"a map like {examples[0]}" if _is_map(info) else f"a quantity with its unit, like {examples[0]}"
    if names := _literals(info):
        return f"one of {', '.join(names)}"
    if isinstance(info, inspect.TupleType):
        return f"a list of {len(info.item_types)}"
    return next((words for known, words in _WORDS.items() if isinstance(info, known)), "a list")


def _placeholder(info: inspect.Type | None) -> Any:
    """Return some value of the type, or None if there is no simple one."""
    if info is not None and (examples := _examples(info)):
        return {} if _is_map(info) else examples[0]
    simple = {inspect.StrType: "x", inspect.IntType: 1, inspect.FloatType: 1.0, inspect.DictType: {}}
    return next((value for known, value in simple.items() if isinstance(info, known)), None)


def _examples(info: inspect.Type) -> list[str]:
    if isinstance(info, inspect.UnionType):
        return [example for member in info.types for example in _examples(member)]
    return (info.extra_json_schema or {}).get("examples", []) if isinstance(info, inspect.Metadata) else []


def _is_map(info: inspect.Type) -> bool:
    return isinstance(info, inspect.Metadata) and isinstance(info.type, inspect.DictType)


def _literals(info: inspect.Type) -> list[str]:
    return [str(value) for value in info.values] if isinstance(info, inspect.LiteralType) else []
