"""Fits a link's latency and bandwidth to measured times."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.units import BytesPerSecond, Seconds

__all__ = ["LinkFit", "fit_link"]


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """A link that explains the samples, and how far off it is: the worst and the median relative error over them."""

    latency: Seconds
    bandwidth: BytesPerSecond
    worst: float
    median: float


def fit_link(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    *,
    latency_coefficient: float = 1.0,
    bytes_coefficient: float = 1.0,
    above: float = 0.0,
) -> LinkFit:
    """The latency L >= 0 and bandwidth B with the least worst relative error over the samples larger than `above`.

    With coefficients a and b, sample i of s_i bytes should take a L + b s_i / B and took t_i. With w = 1/B this is a
    linear programme in (L, w, e):

        minimise e   subject to   | a L + b s_i w - t_i | <= e t_i for all i,   L, w, e >= 0.

    One message has a = b = 1; a ring all-reduce over n equal links a = 2(n-1), b = 2(n-1)/n. Leave out the small
    sizes, by `above`, where overheads that are not the link's make up the time.
    """
    sizes, times = _samples(sizes_bytes, seconds, above)
    latency, per_byte = _least_worst(latency_coefficient / times, bytes_coefficient * sizes / times)
    if per_byte <= 0:
        raise UsageError(
            "the times do not grow with the sizes, so they say nothing of a bandwidth",
            found=f"{len(sizes)} samples of {sizes.min():g} to {sizes.max():g} bytes",
            expected="times that grow with the size",
            next="Measure larger sizes, or leave out the small ones with above=",
        )
    errors = np.abs((latency_coefficient * latency + bytes_coefficient * sizes * per_byte) / times - 1)
    return LinkFit(
        latency=Seconds(latency),
        bandwidth=BytesPerSecond(1 / per_byte),
        worst=float(errors.max()),
        median=float(np.median(errors)),
    )


def _samples(
    sizes_bytes: Sequence[float], seconds: Sequence[float], above: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if sizes.shape != times.shape:
        raise UsageError(
            "every size needs its time", found=f"{sizes.size} sizes, {times.size} times", expected="as many of each"
        )
    if not (np.isfinite(sizes) & np.isfinite(times) & (sizes >= 0) & (times > 0)).all():
        raise UsageError(
            "a sample cannot be", found="a size below 0, a time of 0 or less, or no number", expected="real samples"
        )
    kept = sizes > above
    if len(np.unique(sizes[kept])) < 2:
        raise UsageError(
            "too few samples to tell latency from bandwidth",
            found=f"{len(np.unique(sizes[kept]))} different sizes above {above:g} bytes",
            expected="at least 2",
            next="Measure more sizes, or lower above=",
        )
    return sizes[kept], times[kept]


def _least_worst(latency_column: NDArray[np.float64], bytes_column: NDArray[np.float64]) -> tuple[float, float]:
    """L, w >= 0 that minimise e with | L x_i + w y_i - 1 | <= e for the columns x and y.

    Columns are scaled to a largest entry of 1, because the solver's tolerance is absolute.
    """
    from scipy.optimize import linprog  # a third of a second to import, needed only here

    scale = np.array([latency_column.max(), bytes_column.max()])
    columns = np.column_stack([latency_column, bytes_column]) / scale
    ones = np.ones((len(columns), 1))
    solution = linprog(
        c=[0.0, 0.0, 1.0],
        A_ub=np.block([[columns, -ones], [-columns, -ones]]),
        b_ub=np.concatenate([ones[:, 0], -ones[:, 0]]),
        method="highs",
    )
    assert solution.x is not None, solution.message  # L = w = 0, e = 1 is feasible, and e is at least 0
    latency, per_byte = solution.x[:2] / scale
    return float(latency), float(per_byte)
