"""Syncs whose time was measured: the number of bytes with which their messages are played.

A measured time is that of a sync with nothing beside it, but in a plan a sync shares links, overlaps others, and waits
for participants that are late. So its usual messages are played, with as many bytes as make the sync take the measured
m seconds when it is alone and all participants are ready. T(x) is the seconds that x bytes take alone on these links,
and s is the bytes of the sync. The secant method finds the x with T(x) = m: the first guess lies on the line through
T(0) and T(s), and each further guess lies on the line through the two before, the first two being s and x:

    x = s (m - T(0)) / (T(s) - T(0))        x'' = x' + (m - T(x')) (x' - x) / (T(x') - T(x))

The search ends when T differs from m by no more than a millionth, when five plays were made besides that of no bytes,
or when T falls as x grows. T jumps where a collective changes its form, so no guess is more than 4 times, or less than
a quarter of, the one before. The guess that came nearest is taken. It is no bytes if m <= T(0), and s if bytes take no
time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from isthmus.cost.bucket_tasks import sync_alone
from isthmus.cost.event_engine import run
from isthmus.cost.network import Fabric
from isthmus.cost.task_list import new_list

__all__ = ["played_bytes"]

_PLAYS, _NEAR, _STRIDE = 5, 1e-6, 4.0


def played_bytes(
    fabric: Fabric, how: int, devices: Sequence[int], root: int, segments: int, size: float, seconds: float
) -> float:
    """Return the bytes with which a sync of `size` bytes takes `seconds` alone, and remember them in the fabric."""
    key = (how, tuple(devices), root, segments, size, seconds)
    if key not in fabric.remembered:
        fabric.remembered[key] = _Alone(fabric, how, devices, root, segments).bytes_for(seconds, size)
    return fabric.remembered[key]


class _Alone:
    """One sync, which can be played with any number of bytes."""

    def __init__(self, fabric: Fabric, how: int, devices: Sequence[int], root: int, segments: int) -> None:
        self._fabric, self._how, self._root, self._segments = fabric, how, root, segments
        self._devices = np.array(devices, np.int32)
        self._out = new_list(1024, 2048)

    def bytes_for(self, seconds: float, size: float) -> float:
        none, taken = self._seconds(0.0), self._seconds(size)
        if seconds <= none:
            return 0.0
        if taken <= none:
            return size
        found = [(abs(taken - seconds), size)]
        before, x = size, size * (seconds - none) / (taken - none)
        while len(found) < _PLAYS and min(found)[0] > _NEAR * seconds:
            now = self._seconds(x)
            found.append((abs(now - seconds), x))
            if (now - taken) * (x - before) <= 0.0:
                break
            line = x + (seconds - now) * (x - before) / (now - taken)
            before, taken, x = x, now, min(max(line, x / _STRIDE), x * _STRIDE)
        return min(found)[1]

    def _seconds(self, size: float) -> float:
        """Return T(size); devices that cannot talk take no time here, and are refused when the whole plan is played."""
        while True:
            out = self._out
            out.size[:] = 0
            out.size[4] = self._fabric.lanes
            sync_alone(out, self._fabric.wires, self._how, self._devices, size, self._segments, self._root)
            if not out.short:
                return float(run(out.tasks(), out.lanes, self._fabric.network).end.max())
            self._out = new_list(int(out.size[0] * 1.5), int(out.size[1] * 1.5))
