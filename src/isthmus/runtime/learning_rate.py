"""The learning rate over the steps of a job: a factor on the rate of every parameter group.

With s the number of updates tried so far (0 in the first step), T the steps of the schedule, W those of the warm-up and
e the factor in the end, the factor is s / W while s < W, as in transformers, and then with p = (s - W) / (T - W),
kept between 0 and 1:

    constant              1
    linear                e + (1 - e) (1 - p)
    cosine                e + (1 - e) (1 + cos(pi p)) / 2
    warmup-stable-decay   1, and over the last D steps linearly from 1 to e
    package.module:f      f(s), with no warm-up beside it

The factor depends on the step alone, so a run that is resumed under another plan goes on with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from isthmus.errors import UsageError
from isthmus.model.function import find
from isthmus.model.job import Job, RateSchedule

__all__ = ["rate_factor"]

_LARGEST = 1e12  # factor of a function


def rate_factor(job: Job) -> Callable[[int], float]:
    """Return the function from a step, counted from 0, to the factor on the job's learning rates.

    This imports the code that the schedule names: call it only if `named_code(job)` is trusted.
    """
    schedule = job.optimizer.schedule
    if ":" in schedule.shape:
        return _own(schedule.shape)
    total = schedule.steps or job.steps
    shape = _SHAPES[schedule.shape]

    def factor(step: int) -> float:
        if step < schedule.warmup:
            return step / schedule.warmup
        return shape(step, total, schedule)

    return factor


def _own(name: str) -> Callable[[int], float]:
    function = find(name, UsageError)

    def factor(step: int) -> float:
        try:
            found = function(step)
        except Exception as problem:
            raise UsageError(
                "the schedule failed", where=f"{name}({step})", found=f"{type(problem).__name__}: {problem}"[:200],
                expected="a function from the number of a step, counted from 0, to the factor on the learning rate",
            ) from problem  # fmt: skip
        if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found <= _LARGEST:
            return float(found)
        raise UsageError(
            "the schedule gives no factor",
            where=f"{name}({step})",
            found=repr(found)[:80],
            expected="a number, 0 or more: the factor on the learning rate in this step",
        )

    return factor


def _progress(step: int, total: int, schedule: RateSchedule) -> float:
    return min(1.0, max(0.0, (step - schedule.warmup) / max(1, total - schedule.warmup)))


def _linear(step: int, total: int, schedule: RateSchedule) -> float:
    return schedule.end + (1.0 - schedule.end) * (1.0 - _progress(step, total, schedule))


def _cosine(step: int, total: int, schedule: RateSchedule) -> float:
    return schedule.end + (1.0 - schedule.end) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, total, schedule)))


def _stable(step: int, total: int, schedule: RateSchedule) -> float:
    decay = max(1, total // 10) if schedule.decay is None else schedule.decay
    left = min(1.0, max(0.0, (total - step) / max(1, decay)))
    return schedule.end + (1.0 - schedule.end) * left


_SHAPES: dict[str, Callable[[int, int, RateSchedule], float]] = {
    "constant": lambda step, total, schedule: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "warmup-stable-decay": _stable,
}
