"""The places of the cards on a map: as on the globe, or far apart where latency is long, and without overlap.

If not all places are known, positions minimise the stress  sum_ij (|x_i - x_j| - d_ij)^2  by majorisation (SMACOF: each
step moves every point to the mean of where the others want it), with d_ij from the latencies. Cards that overlap are
then pushed apart along the axis on which they overlap less. All of it is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["arrange", "bounds", "globe", "separate", "spread"]

Floats = npt.NDArray[np.float64]

_ROUNDS = 200
_FLAT = 0.45  # height of a wide map as a fraction of its width
_STRETCH = 0.01  # of the map's size, in each round in which cards still overlap
_NEAREST = 0.35  # distance of two points with no latency, where the longest latency is 1


def arrange(points: Floats, sizes: Floats, margin: float, tall: bool) -> Floats:
    """Return the centres of cards of the given sizes [n, 2] on a wide or tall map, from points in the unit square.

    A wide map has about the area that the cards and their margins need; on a tall map they form a winding column.
    """
    if tall:
        room = np.array([sizes[:, 0].max() * 0.4, (sizes[:, 1] + margin).sum() * 0.8])
        return separate(points[:, ::-1] * room, sizes, margin)
    side = np.sqrt((sizes + margin).prod(axis=1).sum())
    return separate(points * [side / np.sqrt(_FLAT), side * np.sqrt(_FLAT)], sizes, margin)


def globe(degrees: Floats) -> Floats:
    """Return points in the unit square for places [n, 2] in degrees north and east.

    The globe is cut where the widest empty stretch is.
    """
    east = np.sort(degrees[:, 1] % 360.0)
    gaps = np.diff(np.concatenate((east, east[:1] + 360.0)))
    cut = east[(int(np.argmax(gaps)) + 1) % len(east)]
    return _unit(np.stack([(degrees[:, 1] - cut) % 360.0, -degrees[:, 0]], axis=1))


def spread(latency: Floats) -> Floats:
    """Return points in the unit square whose distances follow the latencies [n, n]: seconds, inf if two cannot talk."""
    count = len(latency)
    if count == 1:
        return np.full((1, 2), 0.5)
    finite = np.isfinite(latency)
    longest = max(float(latency[finite].max()), 1e-9)
    wanted = np.where(finite, _NEAREST + np.sqrt(np.where(finite, latency, 0.0) / longest), 1.2 + _NEAREST)
    angles = np.arange(count) * 2 * np.pi / count
    points = np.stack([np.cos(angles), np.sin(angles) * 0.9], axis=1)
    for _ in range(_ROUNDS):
        apart = points[:, None] - points[None]
        length = np.maximum(np.sqrt((apart**2).sum(axis=2)), 1e-9)
        pull = wanted / length
        np.fill_diagonal(pull, 0.0)
        points = (pull[:, :, None] * apart).sum(axis=1) / count
    return _unit(_flat(points - points.mean(axis=0)))


def _unit(points: Floats) -> Floats:
    """Return the points stretched to fill the unit square."""
    span, low = np.ptp(points, axis=0), points.min(axis=0)
    return np.where(span > 1e-6, (points - low) / np.maximum(span, 1e-6), 0.5)


def _flat(points: Floats) -> Floats:
    """Return the points turned so that the first is on the left above the middle and the longest axis is horizontal."""
    _, axes = np.linalg.eigh(points.T @ points)
    turned: Floats = points @ axes[:, ::-1]
    signs = np.where(turned[0] > 0, -1.0, 1.0)
    return turned * signs


def separate(centres: Floats, sizes: Floats, margin: float) -> Floats:
    """Return the centres, moved until no two cards are nearer than the margin.

    Each round also stretches the map, so that the rounds end.
    """
    places = centres.copy()
    number = np.arange(len(places))
    later = np.where(number[:, None] >= number[None], 1.0, -1.0)[:, :, None]  # which of two at one place moves away
    needed = (sizes[:, None] + sizes[None]) / 2 + margin
    for _ in range(_ROUNDS):
        apart = places[:, None] - places[None]
        overlap = needed - np.abs(apart)
        near = overlap.min(axis=2) > 1e-6
        np.fill_diagonal(near, False)
        if not near.any():
            break
        less = overlap == overlap.min(axis=2, keepdims=True)
        less[:, :, 1] &= ~less[:, :, 0]
        away = np.where(apart == 0.0, later, np.sign(apart))
        places += np.where(near[:, :, None] & less, away * overlap / 2, 0.0).sum(axis=1)
        places += _STRETCH * (places - places.mean(axis=0))
    return places


def bounds(centres: Floats, sizes: Floats) -> Sequence[float]:
    """Return the left, top, right and bottom of all cards."""
    low, high = (centres - sizes / 2).min(axis=0), (centres + sizes / 2).max(axis=0)
    return [float(low[0]), float(low[1]), float(high[0]), float(high[1])]
