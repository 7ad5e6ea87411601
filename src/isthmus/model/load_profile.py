"""Profile files: reading them with every fault named, joining several, writing them, and their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import ProfileError
from isthmus.files import Document, encode_json, expecting, is_name, parse_json, show_path, show_value, write_json
from isthmus.files.document import NAME_RULE, read_text
from isthmus.model.profile import BlockTime, CollectiveTime, Profile, among

__all__ = ["load_profile", "profile_digest", "save_profile"]

Seen = dict[object, tuple[Document, tuple[str | int, ...]]]  # points, and the place of each

_LARGEST = 16_000_000  # bytes of a file: about 60,000 points
_VERSION = 1
_LONGEST_TEXT = 1000  # characters
_LONGEST_TIME = 1e6  # seconds
_MOST_SAMPLES, _MOST_DEVICES, _MOST_BYTES, _MOST_HELD = 10**9, 10**6, 1e18, 100.0
_MOST_RATE = 1e18  # bytes per second
_ALWAYS = ("origin", "blocks", "collectives")  # fields that are written even if they are empty


def load_profile(path: str | Path, *more: str | Path) -> Profile:
    """Read a profile; if it cannot be read, raise a ProfileError that says what is wrong and where.

    Several files, of other kinds of devices, other models or other hosts, become one with all their points, in an order
    that does not depend on that of the files. No point may be in two of them, because there is no way to tell which of
    two measurements holds.
    """
    seen: Seen = {}
    profiles = [_read(file, seen) for file in (path, *more)]
    if not more:
        return profiles[0]
    return Profile(
        origin="; ".join(sorted({profile.origin for profile in profiles} - {""})),
        blocks=tuple(sorted((time for profile in profiles for time in profile.blocks), key=_block_key)),
        collectives=tuple(sorted((time for profile in profiles for time in profile.collectives), key=repr)),
        devices=tuple(sorted((costs for profile in profiles for costs in profile.devices), key=repr)),
        network=next((profile.network for profile in profiles if profile.network is not None), None),
    )


def _read(path: str | Path, seen: Seen) -> Profile:
    with expecting(path, "profile", error=ProfileError):
        document = parse_json(read_text(path, _LARGEST, ProfileError), name=str(path), error=ProfileError)
        document.check("profile", version=_VERSION)
    profile = document.convert(Profile)
    for fault in _faults(profile, document, seen):
        raise fault
    return profile


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile to a file."""
    write_json(path, {"kind": "profile", "version": _VERSION, **_said(profile)})


def _said(profile: Profile) -> dict[str, Any]:
    """Return the fields of a profile's file.

    Constants are included only if there are some, so that the file of a profile without them does not change.
    """
    plain: dict[str, Any] = msgspec.to_builtins(profile)
    return {field: value for field, value in plain.items() if value not in ((), [], None) or field in _ALWAYS}


def profile_digest(profile: Profile) -> str:
    """Return the SHA-256 of everything that the profile says."""
    return hashlib.sha256(encode_json(_said(profile))).hexdigest()


def _faults(profile: Profile, document: Document, seen: Seen) -> Iterator[ProfileError]:
    """Yield an error for each value that no measurement gives, in file order.

    `seen` has the points of all files so far.
    """
    if not _readable(profile.origin):
        yield _fault(document, ("origin",), profile.origin, _READABLE)
    for index, time in enumerate(profile.blocks):
        yield from _checked(document, ("blocks", index), time, _BLOCK)
        yield from _twice(document, ("blocks", index), _block_key(time), seen)
    for index, one in enumerate(profile.collectives):
        yield from _checked(document, ("collectives", index), one, _COLLECTIVE)
        yield from _root_faults(document, ("collectives", index, "root"), one)
        yield from _twice(document, ("collectives", index), (among(one.how, one.hosts, one.root), one.bytes), seen)
    for index, costs in enumerate(profile.devices):
        yield from _checked(document, ("devices", index), costs, _DEVICE)
        yield from _twice(document, ("devices", index), ("device", costs.device), seen)
    if profile.network is not None:
        yield from _checked(document, ("network",), profile.network, _NETWORK)
        yield from _twice(document, ("network",), "network", seen)


def _readable(text: object) -> bool:
    return isinstance(text, str) and len(text) <= _LONGEST_TEXT and text.isprintable()


def _named(value: object) -> bool:
    return isinstance(value, str) and is_name(value)


def _within(least: float, most: float) -> Any:
    return lambda value: least <= value <= most


_READABLE = f"one line of text that people can see, at most {_LONGEST_TEXT} characters"
_SECONDS = (_within(0.0, _LONGEST_TIME), f"seconds, from 0 to {_LONGEST_TIME:g}")
_BLOCK = {
    "block": (
        lambda text: _readable(text) and text.strip() != "",
        "a block's digest, as isthmus model show --json says",
    ),
    "name": (_readable, _READABLE),
    "device": (_named, NAME_RULE),
    "samples": (_within(1, _MOST_SAMPLES), f"1 to {_MOST_SAMPLES}"),
    "tensor": (_within(1, _MOST_DEVICES), f"1 to {_MOST_DEVICES}"),
    "forward_seconds": _SECONDS,
    "backward_seconds": _SECONDS,
}
_COLLECTIVE = {
    "hosts": (
        lambda hosts: len(hosts) > 1 and all(map(_named, hosts)),
        "the hosts of two participants or more, by their names",
    ),
    "bytes": (lambda size: 0.0 < size <= _MOST_BYTES, f"above 0, at most {_MOST_BYTES:g}"),
    "seconds": _SECONDS,
}


_RATE = (lambda rate: rate is None or 0.0 < rate <= _MOST_RATE, f"bytes a second, above 0, at most {_MOST_RATE:g}")
_HELD = (_within(1.0, _MOST_HELD), f"from 1 to {_MOST_HELD:g}")
_DEVICE = {
    "device": (_named, NAME_RULE),
    "action_seconds": _SECONDS,
    "step_seconds": _SECONDS,
    "update_bandwidth": _RATE,
    "add_bandwidth": _RATE,
    "context_bytes": (
        lambda size: size is None or 0.0 <= size <= _MOST_BYTES,
        f"bytes, from 0 to {_MOST_BYTES:g}",
    ),
    "held": _HELD,
    "held_recomputed": _HELD,
}
_NETWORK = {
    "payload": (lambda part: 0.0 < part <= 1.0, "above 0, at most 1"),
    "message_seconds": _SECONDS,
}


def _checked(
    document: Document, path: tuple[str | int, ...], time: msgspec.Struct, rules: dict[str, tuple[Any, str]]
) -> Iterator[ProfileError]:
    for field, (good, expected) in rules.items():
        value = getattr(time, field)
        if not good(value):
            yield _fault(document, (*path, field), list(value) if isinstance(value, tuple) else value, expected)


def _root_faults(document: Document, path: tuple[str | int, ...], time: CollectiveTime) -> Iterator[ProfileError]:
    if time.how == "server" and not _named(time.root):
        yield _fault(document, path, time.root, "the host of the server")
    if time.how != "server" and time.root is not None:
        yield _fault(document, path, time.root, f"none: a {time.how} has no server")


def _block_key(time: BlockTime) -> tuple[str, str, str, int, int]:
    """Return the key of a block's point: block digest, device kind, precision, tensor degree and samples."""
    return time.block, time.device, time.precision, time.tensor, time.samples


def _twice(document: Document, path: tuple[str | int, ...], key: object, seen: Seen) -> Iterator[ProfileError]:
    file, place = seen.setdefault(key, (document, path))
    if file is document and place != path:
        what, same, remedy = "a point is given twice", show_path(place), "Keep one of the two, or their mean"
    elif file is not document:
        what, same, remedy = "two profiles give the same point", file.where(place), "Leave one of the two files out"
    else:
        return
    yield ProfileError(
        what, where=document.where(path), found=f"the same at {same}", expected="one time for each point", next=remedy
    )


def _fault(document: Document, path: tuple[str | int, ...], value: object, expected: str) -> ProfileError:
    return ProfileError(
        f"{show_path(path)} has an impossible value",
        where=document.where(path),
        found=show_value(value),
        expected=expected,
    )
