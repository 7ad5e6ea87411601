"""Measured times: of blocks on a device kind, of collectives among hosts, and of what is needed beside both.

A profile is a JSON file (`kind: profile`), measured on some machine or brought from elsewhere. It is a list of points;
times between the points are interpolated (`along`). Blocks are identified by their digest, so equal blocks share their
times, whatever model they are in. Beside the points a profile may have a few constants: of device kinds, and of all
messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import msgspec

from isthmus.cluster.spec import Precision

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
    "among",
]

Collective = Literal["ring", "tree", "server"]
Points = tuple[tuple[float, float], ...]  # (x, y) in order of x


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
            found.setdefault(among(time.how, time.hosts, time.root), []).append((time.bytes, time.seconds))
        return {key: tuple(points) for key, points in found.items()}

    def collective(self, how: str, hosts: Iterable[str], root: str | None, size: float) -> tuple[float, bool] | None:
        """Return the seconds of an all-reduce of `size` bytes, and whether exactly that was measured.

        Return None if nothing is known. From one point, the time is in proportion to the bytes above it and constant
        below it; from more points it is as in `along`.
        """
        points = self._collective_points.get(among(how, tuple(hosts), root))
        if points is None:
            return None
        exact = any(x == size for x, _ in points)
        if len(points) == 1:
            return points[0][1] * max(1.0, size / points[0][0]), exact
        return along(points, size), exact


@lru_cache(maxsize=4096)
def among(how: str, hosts: tuple[str, ...], root: str | None) -> tuple[str, tuple[str, ...], str | None]:
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
