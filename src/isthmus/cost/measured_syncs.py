"""Syncs whose time was measured: with how many bytes their messages are played.

A measured time is that of a sync with nothing beside it, but in a plan it shares links, overlaps others, and waits for
those who are late. So it is played as the messages that it always is, with as many bytes as make it take the measured
m seconds alone, all participants being ready. With T(x) the seconds that x bytes take alone on these links, and s the
bytes that it has, the first guess is by the line through T(0) and T(s), each further one by that through the two
before, the first two being s and x:

    x = s (m - T(0)) / (T(s) - T(0))        x'' = x' + (m - T(x')) (x' - x) / (T(x') - T(x))

until T is m but for a millionth, five plays were made beside that of no bytes, or T falls as x grows: it jumps where a
collective changes its form, and so no guess is more than 4 times, or less than a quarter of, the one before. What came
nearest is taken. No bytes where m <= T(0); s where bytes take no time.
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
    """The bytes with which a sync of `size` bytes takes so long alone; remembered for each fabric."""
    key = (how, tuple(devices), root, segments, size, seconds)
    if key not in fabric.remembered:
        fabric.remembered[key] = _Alone(fabric, how, devices, root, segments).bytes_for(seconds, size)
    return fabric.remembered[key]


class _Alone:
    """One sync, to be played with any number of bytes."""

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
        """T(size); what cannot talk takes no time here, and is refused when all is played."""
        while True:
            out = self._out
            out.size[:] = 0
            out.size[4] = self._fabric.lanes
            sync_alone(out, self._fabric.wires, self._how, self._devices, size, self._segments, self._root)
            if not out.short:
                return float(run(out.tasks(), out.lanes, self._fabric.network).end.max())
            self._out = new_list(int(out.size[0] * 1.5), int(out.size[1] * 1.5))
