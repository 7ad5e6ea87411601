"""Data parallelism over all devices with even shares: what a script for DDP makes of the cluster as it is.

It is priced beside the schemes because it is what many users run today. It is no scheme of its own: `data-even` chooses
among sets of devices, and all of them are one of these.
"""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.cost.simulate import Price
from isthmus.plan.types import Outcome, Plan
from isthmus.planners.budget import flaw
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.shares import even_shares, micro_batch_counts
from isthmus.planners.problem import LARGE, Problem
from isthmus.planners.proposal import Idea
from isthmus.planners.schemes.data_parallel import replicated
from isthmus.units import format_bytes

__all__ = ["everywhere"]


def everywhere(problem: Problem) -> Outcome | None:
    """Price the whole model on every device that has the precision, each with an equal share of the batch.

    Micro-batches and recomputing are set as makes it fastest. None for clusters that take too long to play, and for
    batches of fewer samples than devices.
    """
    devices = problem.usable
    if len(devices) > LARGE or problem.job.batch < len(devices):
        return None
    if not all(problem.allowed(device).all() for device in devices):
        return Outcome(state="cannot run", reason="the job's places keep blocks off some devices")
    best: Price | None = None
    wrong = ""
    ideas = sorted(_ideas(problem, devices), key=lambda idea: idea.seconds)
    for plan, bound in _plans(ideas):
        if best is not None and bound >= best.step_seconds:
            continue
        price = problem.simulator.price(plan)
        broken = _broken(price) or flaw(problem, plan)
        if broken is None and (best is None or price.step_seconds < best.step_seconds):
            best = price
        wrong = broken or wrong
    if best is None:
        return Outcome(state="cannot run", reason=wrong, devices=len(devices))
    return Outcome(state="found", seconds=best.step_seconds, devices=len(devices))


def _ideas(problem: Problem, devices: tuple[str, ...]) -> Iterator[Idea]:
    memory = MemoryFit(problem)
    for count in micro_batch_counts(problem.job.batch, len(devices)):
        shares = even_shares(problem.job.batch // count, len(devices))
        yield replicated(problem, memory, devices, shares, count, "ring")


def _plans(ideas: list[Idea]) -> Iterator[tuple[Plan, float]]:
    """Yield plans with their bounds; where none fits, the one that comes closest."""
    found = [(version.make(), version.seconds) for idea in ideas for version in idea.versions()]
    smallest = min(ideas, key=lambda idea: idea.samples)
    nearest = smallest.nearest() if not found else None
    yield from found if nearest is None else [(nearest, smallest.seconds)]


def _broken(price: Price) -> str | None:
    """Say why a plan cannot run; None if it can."""
    if price.impossible:
        return price.impossible
    if price.fits:
        return None
    worst = max(price.shortages, key=lambda each: each.needed - each.available)
    return f"{worst.where} needs {format_bytes(worst.needed)} and has {format_bytes(worst.available)}"
