"""Measured times: of blocks on a device kind, of collectives among hosts, and of what is needed beside both.

A profile is a JSON file (`kind: profile`), measured on some machine or brought from elsewhere. It is a list of points;
times between the points are interpolated (`along`). Blocks are identified by their digest, so equal blocks share their
times, whatever model they are in. Beside the points a profile may have a few constants: of device kinds, and of all
messages.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from isthmus.cluster.spec import Precision
from isthmus.errors import ProfileError
from isthmus.files import Document, encode_json, expecting, is_name, parse_json, show_path, show_value, write_json
from isthmus.files.document import NAME_RULE, read_text

__all__ = [
    "BlockPoints",
    "BlockTime",
    "Collective",
    "CollectiveTime",
    "DeviceCosts",
    "NetworkCosts",
    "Points",
    "Profile",
    "along",
    "load_profile",
    "profile_digest",
    "save_profile",
]

Collective = Literal["ring", "tree", "server"]
Points = tuple[tuple[float, float], ...]  # (x, y) in order of x
Seen = dict[object, tuple[Document, tuple[str | int, ...]]]  # points, and the place of each

_LARGEST = 16_000_000  # bytes of a file: about 60,000 points
_VERSION = 1
_LONGEST_TEXT = 1000  # characters
_LONGEST_TIME = 1e6  # seconds
_MOST_SAMPLES, _MOST_DEVICES, _MOST_BYTES, _MOST_HELD = 10**9, 10**6, 1e18, 100.0
_MOST_RATE = 1e18  # bytes per second
_ALWAYS = ("origin", "blocks", "collectives")  # fields that are written even if they are empty


class BlockTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time that one forward and one backward of a block took on so many samples.

    If `tensor` is above 1, so many devices of one host acted as one, and their all-reduces are in the times.
    `precision` is what the device computed in. The backward is that alone, with nothing recomputed. The loss is in no
    point: a model's last block may be equal to another, so the time of the loss is added to it from the catalog's
    figures.
    """

    block: str  # its digest
    name: str = ""  # for people
    device: str  # kind
    precision: Precision
    samples: int
    tensor: int = 1
    forward_seconds: float
    backward_seconds: float


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time that one all-reduce of so many bytes took, from the moment when all participants were ready.

    `hosts` has one entry for each participant: of a ring in its order, wherever that begins and whichever way it goes;
    of a tree in the order of its participants; of a server in any order. `root` (server only) is the host of the
    server.
    """

    how: Collective
    hosts: tuple[str, ...]
    bytes: float
    seconds: float
    root: str | None = None


class DeviceCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The time and memory that a device kind needs beside its blocks."""

    device: str  # kind
    action_seconds: float = 0.0  # for each forward or backward of a run on a slice: Python, hooks, copies
    step_seconds: float = 0.0  # once per step: zeroing gradients, counting, starting the update
    update_bandwidth: float | None = None  # bytes/s that an update reads and writes; None: as in the catalog
    add_bandwidth: float | None = None  # bytes/s at which received gradients are added; None: that takes no time
    context_bytes: float | None = None  # memory of a worker before its model; None: the usual amount
    held: float = 1.0  # bytes of memory for each byte of activations: allocators round up, and leave gaps
    held_recomputed: float = 1.0  # the same if blocks are recomputed: much is allocated and freed between what stays


class NetworkCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The costs of messages between workers beside the cluster file's figures."""

    payload: float = 1.0  # part of the rate of a link, NIC or trunk that carries data; headers take the rest
    message_seconds: float = 0.0  # for every message, beside latency and bytes


class BlockPoints(NamedTuple):
    """The seconds of a block by number of samples."""

    forward: Points
    backward: Points


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """All points and constants of one file."""

    origin: str = ""  # where the times come from, for people
    blocks: tuple[BlockTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    devices: tuple[DeviceCosts, ...] = ()
    network: NetworkCosts | None = None

    @cached_property
    def device_costs(self) -> dict[str, DeviceCosts]:
        """Return the costs of each device kind, by kind."""
        return {costs.device: costs for costs in self.devices}

    @cached_property
    def block_points(self) -> dict[tuple[str, str, Precision, int], BlockPoints]:
        """Return the points by block digest, device kind, precision and tensor degree."""
        found: dict[tuple[str, str, Precision, int], list[BlockTime]] = {}
        for time in sorted(self.blocks, key=lambda time: time.samples):
            found.setdefault((time.block, time.device, time.precision, time.tensor), []).append(time)
        return {
            key: BlockPoints(
                tuple((float(time.samples), time.forward_seconds) for time in times),
                tuple((float(time.samples), time.backward_seconds) for time in times),
            )
            for key, times in found.items()
        }

    @cached_property
    def _collective_points(self) -> dict[tuple[str, tuple[str, ...], str | None], Points]:
        found: dict[tuple[str, tuple[str, ...], str | None], list[tuple[float, float]]] = {}
        for time in sorted(self.collectives, key=lambda time: time.bytes):
            found.setdefault(_among(time.how, time.hosts, time.root), []).append((time.bytes, time.seconds))
        return {key: tuple(points) for key, points in found.items()}

    def collective(self, how: str, hosts: Iterable[str], root: str | None, size: float) -> tuple[float, bool] | None:
        """Return the seconds of an all-reduce of `size` bytes, and whether exactly that was measured.

        Return None if nothing is known. From one point, the time is in proportion to the bytes above it and constant
        below it; from more points it is as in `along`.
        """
        points = self._collective_points.get(_among(how, tuple(hosts), root))
        if points is None:
            return None
        exact = any(x == size for x, _ in points)
        if len(points) == 1:
            return points[0][1] * max(1.0, size / points[0][0]), exact
        return along(points, size), exact


@lru_cache(maxsize=4096)
def _among(how: str, hosts: tuple[str, ...], root: str | None) -> tuple[str, tuple[str, ...], str | None]:
    """Return a key that is the same for equal collectives; a ring has the first in order of all ways to write it."""
    if how == "ring":
        ways = [way[i:] + way[:i] for way in (hosts, hosts[::-1]) for i in range(len(hosts))]
        return how, min(ways, default=()), root
    return how, hosts if how == "tree" else tuple(sorted(hosts)), root


def along(points: Points, x: float) -> float:
    """Return the value at x of what was measured at two points or more, (x_1, y_1) ... (x_k, y_k), all x above 0.

    Between two points it is on the straight line through them. Above the last it is on the line through the last two,
    or y_k if that line falls. Below the first it is on the line through the first two, kept between y_1 x / x_1 and
    y_1. So it is never below 0, and outside of what was measured it never falls as x grows.
    """
    after = min(max(bisect_left(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    if x in (x0, x1):
        return y0 if x == x0 else y1
    value = y0 + (y1 - y0) * ((x - x0) / (x1 - x0))
    if x < x0:
        return min(y0, max(value, y0 * (x / x0)))
    return max(y1, value) if x > x1 else value


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
        yield from _twice(document, ("collectives", index), (_among(one.how, one.hosts, one.root), one.bytes), seen)
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
