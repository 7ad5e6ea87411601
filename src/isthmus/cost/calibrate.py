"""Calibration: fits a link's latency and bandwidth, and constants of the cost model, to measured times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import UsageError
from isthmus.units import BytesPerSecond, Seconds

__all__ = ["LinkFit", "fit_constants", "fit_link"]

Floats = NDArray[np.float64]


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """The link that explains the samples, with its worst and its median relative error over them."""

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
    cap: float = 0.15,
) -> LinkFit:
    """Return the link that explains measured message times best.

    Among the links with latency L >= 0 and bandwidth B that are nowhere off by more than `cap`, it has the least total
    relative error over the samples larger than `above`. If no link is within `cap`, it has the least worst error.

    With coefficients a and b, sample i of s_i bytes should take a L + b s_i / B and took t_i. With w = 1/B both are
    linear programmes, in (L, w, e_1 .. e_n) and in (L, w, e):

        minimise sum e_i   subject to   | a L + b s_i w - t_i | <= e_i t_i,   e_i <= cap   for all i,   L, w >= 0;
        minimise e         subject to   | a L + b s_i w - t_i | <= e t_i                   for all i,   L, w >= 0.

    The first tolerates a few outliers within `cap`, where the second would bend the link towards them. One message has
    a = b = 1; a ring all-reduce over n equal links has a = 2(n-1) and b = 2(n-1)/n. Use `above` to leave out small
    sizes, whose time consists of overheads that are not the link's.
    """
    sizes, times = _samples(sizes_bytes, seconds, above)
    latency, per_byte = _fit(latency_coefficient / times, bytes_coefficient * sizes / times, cap)
    if per_byte <= 0:
        raise UsageError(
            "the times do not grow with the sizes, so no bandwidth can be fitted",
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


def _samples(sizes_bytes: Sequence[float], seconds: Sequence[float], above: float) -> tuple[Floats, Floats]:
    sizes, times = np.asarray(sizes_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if sizes.shape != times.shape:
        raise UsageError(
            "there are not as many times as sizes",
            found=f"{sizes.size} sizes, {times.size} times",
            expected="one time for each size",
        )
    if not (np.isfinite(sizes) & np.isfinite(times) & (sizes >= 0) & (times > 0)).all():
        raise UsageError(
            "a sample is impossible",
            found="a size below 0, a time of 0 or less, or not a number",
            expected="sizes of 0 or more, and times above 0",
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


def _fit(latency_column: Floats, bytes_column: Floats, cap: float) -> tuple[float, float]:
    """Return L, w >= 0 that minimise the sum of | L x_i + w y_i - 1 | for the columns x and y, each term at most `cap`.

    If there are none within `cap`, return those with the least worst term. Columns are scaled to a largest entry of 1,
    because the solver's tolerance is absolute.
    """
    scale = np.array([latency_column.max(), bytes_column.max()])
    columns = np.column_stack([latency_column, bytes_column]) / scale
    count = len(columns)
    found = _solve(columns, errors=np.eye(count), cap=cap * (1 - 1e-6))  # inside it by more than the solver's tolerance
    if found is None:
        found = _solve(columns, errors=np.ones((count, 1)), cap=None)
    assert found is not None  # L = w = 0, e = 1 is feasible, and e is at least 0
    latency, per_byte = found / scale
    return float(latency), float(per_byte)


def _solve(columns: Floats, errors: Floats, cap: float | None) -> Floats | None:
    """Return L and w with the least sum of the error variables, or None if there are none.

    Row i of `errors` says which of the variables bounds the error of sample i.
    """
    from scipy.optimize import linprog  # imported here because it takes a third of a second

    ones, variables = np.ones(len(columns)), errors.shape[1]
    solution = linprog(
        c=[0.0, 0.0, *[1.0] * variables],
        A_ub=np.block([[columns, -errors], [-columns, -errors]]),
        b_ub=np.concatenate([ones, -ones]),
        bounds=[(0, None), (0, None), *[(0, cap)] * variables],
        method="highs",
    )
    return None if solution.x is None else np.asarray(solution.x[:2])


def fit_constants(
    predict: Callable[[Sequence[float]], Sequence[float]],
    measured: Sequence[float],
    start: Sequence[float],
    least: Sequence[float],
    most: Sequence[float],
) -> tuple[float, ...]:
    """Return constants c, least <= c <= most, for which the predictions p(c) are nearest to the measured times t:

        minimise sum of | log(p_i(c) / t_i) |

    The sum of absolute values tolerates a few outliers. The search (Nelder-Mead) needs no derivatives: predictions have
    corners, because a plan waits for something else as the constants change.
    """
    from scipy.optimize import minimize

    low, size = np.asarray(least, float), np.asarray(most, float) - np.asarray(least, float)
    times = np.log(np.asarray(measured, float))

    def off(point: Floats) -> float:
        return float(np.abs(np.log(np.asarray(predict((low + size * point).tolist()))) - times).sum())

    begin = (np.asarray(start, float) - low) / size
    found = minimize(
        off,
        begin,
        method="Nelder-Mead",
        bounds=[(0.0, 1.0)] * len(begin),
        options={"xatol": 1e-3, "fatol": 1e-5, "maxfev": 120 * len(begin), "initial_simplex": _simplex(begin)},
    )
    return tuple((low + size * found.x).tolist())


def _simplex(begin: Floats) -> Floats:
    """Return the start and, for each constant, a point that is a tenth of the constant's range away."""
    corners = np.tile(begin, (len(begin) + 1, 1))
    for i, value in enumerate(begin):
        corners[i + 1, i] = value + (0.1 if value <= 0.9 else -0.1)
    return corners
