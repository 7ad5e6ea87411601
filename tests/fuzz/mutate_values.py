"""Damage to what a file says: its values are changed, and it is written again, well formed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import yaml

__all__ = ["damage_values"]

_DEEP: list[Any] = []
for _ in range(100):
    _DEEP = [_DEEP]

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63)),
    *(0.0, -0.0, 0.5, 1.0, 1e-320, 1e300, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "x", "yes", "0", "-1 GB", "0 GB", "5", "5 GB", "1e400 GB/s", "1 Gbit/s", "1e-99 s", "1e30 s", "12 h"),
    *("../x", "/", "a/b/0", "-oProxyCommand=x", "a;b", "a\nb", "a\tb", "a\0b", "\ud800", "\u202eabc", "\u200b", "é"),
    *("𝕏", "\x1b[31m", "%s", "{}", "[b]", "..", "over", "va1", "virginia", "os:getcwd", "zoo:gpt2", "hf:x", "x.json"),
    *("a` - at `$.b", "a` - at `$.b[...]", "`", "$", "bf16", "fp32", "ring", "server", "all", "1f1b", "x" * 2000),
    *("h[1-3]", "h[1-999999]", "x" * 99 + "[1-99999]"),
    *([], {}, [[]], [None], {"": 0}, {"a": {}}, ["x"], [1, 2], {"__class__": "os.system"}, {"$ref": "#"}, _DEEP),
)
_KEYS = (*(value for value in _VALUES if isinstance(value, str)), "kind", "version", "name", "tensor", "__proto__")

Path = tuple[str | int, ...]


def damage_values(data: bytes, random: Random, *, as_json: bool) -> bytes:
    """A file that was well formed with some values changed, written as JSON or as YAML."""
    value = json.loads(data) if as_json else yaml.safe_load(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = _changed(value, random)
    return written(value, random, as_json=as_json)


def written(value: Any, random: Random, *, as_json: bool) -> bytes:
    """The values as a file; JSON is YAML too, so half of the YAML is written that way."""
    if as_json or random.random() < 0.5:
        text = json.dumps(value, indent=random.choice((None, 2)), ensure_ascii=random.random() < 0.5)
    else:
        style = random.choice((None, True))
        text = yaml.safe_dump(value, allow_unicode=True, sort_keys=False, default_flow_style=style)
    return text.encode("utf-8", "surrogatepass")


def _changed(value: Any, random: Random) -> Any:
    paths = list(_paths(value, ()))
    path = random.choice(paths)
    old = _at(value, path)
    match random.randrange(7):
        case 0 if path:
            return _without(value, path)
        case 1:
            return _with(value, path, _at(value, random.choice(paths)))
        case 2:
            return _with(value, path, random.choice(([old], {"a": old}, [old, old])))
        case 3:
            return _with(value, path, _inserted(old, random))
        case 4:
            return _with(value, path, _renamed(old, random))
        case 5:
            return _with(value, path, _scaled(old, random))
    return _with(value, path, random.choice(_VALUES))


def _paths(value: Any, path: Path) -> Iterator[Path]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if len(path) < 30:
        for key, inner in items:
            yield from _paths(inner, (*path, key))


def _at(value: Any, path: Path) -> Any:
    for part in path:
        value = value[part]
    return value


def _with(value: Any, path: Path, new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _with(value[path[0]], path[1:], new)
    return copy


def _without(value: Any, path: Path) -> Any:
    outer = _at(value, path[:-1]).copy()
    del outer[path[-1]]
    return _with(value, path[:-1], outer)


def _inserted(value: Any, random: Random) -> Any:
    """One more entry or item, new or a copy."""
    if isinstance(value, dict):
        return value | {random.choice(_KEYS): random.choice((*value.values(), random.choice(_VALUES)))}
    if isinstance(value, list):
        return [*value, random.choice((*value, random.choice(_VALUES)))]
    return random.choice(_VALUES)


def _renamed(value: Any, random: Random) -> Any:
    if not isinstance(value, dict) or not value:
        return random.choice(_KEYS)
    old = random.choice(list(value))
    new = random.choice((*_KEYS, *value))
    return {new if key == old else key: inner for key, inner in value.items()}


def _scaled(value: Any, random: Random) -> Any:
    """A number of another size; text with its first number of another size."""
    factor = random.choice((-1, 0, 1e-12, 2, 1000, 1e12, 1e300))
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
        return type(value)(min(max(value * factor, -1e300), 1e300))
    head, _, tail = value.partition(" ") if isinstance(value, str) else ("", "", "")
    return f"{random.choice((0, -3, 7, '1e9', '1e-9'))} {tail}" if head[:1].isdigit() else random.choice(_VALUES)
