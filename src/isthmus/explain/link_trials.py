"""Reasons why devices are unused, and links that would make them useful, found by planning anew with better links.

For each group of unused devices more bandwidth is tried and then, where that does not help, more bandwidth with less
latency; for hosts that cannot be reached, a new link. The largest change comes first. Where even that brings no faster
plan with the group in it, smaller ones are not tried; else bisection finds the smallest change that does. Every trial
is a search as `isthmus plan` makes it without a budget. It ends by its effort, so the same inputs give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.errors import NoPlanError
from isthmus.explain.link_changes import FasterLinks, LinkChange, NewLinks
from isthmus.explain.why_unused import Idle, idle_devices, why_left_out
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import LARGE, Problem, make_problem
from isthmus.units import Bytes, format_bytes, format_seconds

__all__ = ["MARGIN", "Useful", "WhyUnused", "explain_unused"]

Listener = Callable[[str], None]  # what is being tried

MARGIN = 0.02  # of the step: what a plan with the devices must save
_LATENCIES = (20e-3, 1e-3)  # seconds one way, of new links
_ALIKE = 0.005  # of the step: two plans that differ by less take as long
_GROUPS = 2  # for which links are tried, those with most devices first


class Useful(NamedTuple):
    """The smallest change of links that was found to make devices useful, and a step of the plan found with it."""

    change: str
    factor: int
    step_seconds: float


class WhyUnused(NamedTuple):
    """The reason why devices are unused. `with_them`: seconds of the fastest plan with them that was found.

    `tried`: the largest change of links that was tried, in words; empty where none was.
    """

    idle: Idle
    why: str
    with_them: float | None = None
    useful: Useful | None = None
    tried: str = ""


class _Fastest:
    """The fastest plan with devices of each group, among all plans that a search prices."""

    def __init__(self, groups: Sequence[Idle]) -> None:
        self.groups = [frozenset(each.devices) for each in groups]
        self.best: dict[frozenset[str], float] = {}

    def __call__(self, price: Price) -> None:
        """Take note of a plan's price."""
        for group in self.groups if price.fits else ():
            if not group.isdisjoint(price.memory):
                self.best[group] = min(price.step_seconds, self.best.get(group, math.inf))

    def using(self, group: Idle) -> float | None:
        """Return the seconds of the fastest plan so far with any of the group's devices."""
        return self.best.get(frozenset(group.devices))


def explain_unused(problem: Problem, price: Price, listen: Listener = lambda text: None) -> tuple[WhyUnused, ...]:
    """Say why each group of unused devices is unused, and which links would make it useful."""
    idle = idle_devices(problem, price.memory)
    open_ = [each for each in idle if each.reason in ("slower", "link")]
    tried = sorted(open_, key=lambda each: -len(each.devices))[:_GROUPS]
    if not price.fits or len(problem.usable) > LARGE:
        tried = []
    now = _Fastest(open_)
    if any(each.reason == "slower" for each in tried):
        listen("plans with devices that are not used")
        _planned(problem, now)
    trials = _Trials(problem, price, listen)
    found = [now.using(each) for each in idle]
    return tuple(
        trials.explained(each, best) if each in tried else WhyUnused(each, _why(problem, each, price, best), best)
        for each, best in zip(idle, found, strict=True)
    )


def _planned(problem: Problem, watch: _Fastest) -> float | None:
    """Return the seconds of the fastest plan, found as `isthmus plan` finds it; None where nothing fits.

    `watch` takes note of all plans that the search prices.
    """
    try:
        choice = choose_plan(problem, beside=False, watch=watch)
    except NoPlanError:
        return None
    if choice.interrupted:
        raise KeyboardInterrupt
    return choice.price.step_seconds


def _on(problem: Problem, cluster: Cluster) -> Problem:
    """Return the same problem on another cluster."""
    return make_problem(cluster, problem.job, problem.graph, problem.precision, problem.seed, problem.profile)


class _Trials:
    """Plans for clusters in which something is better, each beside the step of the given plan."""

    def __init__(self, problem: Problem, price: Price, listen: Listener) -> None:
        self.problem, self.price, self.listen = problem, price, listen
        self.step = price.step_seconds
        self.used = {problem.cluster.devices[name].host for name in price.memory}

    def explained(self, idle: Idle, with_them: float | None) -> WhyUnused:
        """Say why a group is unused, and what would make it useful."""
        why = _why(self.problem, idle, self.price, with_them)
        if with_them is not None and with_them < (1 - MARGIN) * self.step:
            return WhyUnused(idle, why, with_them)
        if with_them is None and (unlimited := self._with_memory(idle)) is not None:
            return WhyUnused(idle._replace(reason="memory"), _short(self.problem, idle, unlimited, self.step))
        most = ""
        for change in self._changes(idle):
            useful, most = self._smallest(idle, change), change.most
            if useful is not None:
                return WhyUnused(idle, why, with_them, useful, most)
        return WhyUnused(idle, why, with_them, None, most)

    def _changes(self, idle: Idle) -> Iterator[LinkChange]:
        cluster = self.problem.cluster
        if idle.reason == "link":
            yield from (NewLinks(cluster, idle.hosts, self.used, latency) for latency in _LATENCIES)
        else:
            yield FasterLinks(cluster, idle.hosts, self.used, latency=False)
            yield FasterLinks(cluster, idle.hosts, self.used, latency=True)

    def _with_memory(self, idle: Idle) -> float | None:
        """Return the seconds of the fastest plan with them that fits if they have enough memory.

        None where they cannot be reached, and where others of their kind are used: then memory is not what they lack.
        """
        cluster = self.problem.cluster
        if idle.reason == "link" or not {cluster.devices[name].kind for name in self.price.memory}.isdisjoint(
            idle.kinds
        ):
            return None
        self.listen(f"more memory for {idle}")
        unlimited = {name: replace(cluster.kinds[name], memory=Bytes(math.inf)) for name in idle.kinds}
        fastest = _Fastest([idle])
        _planned(_on(self.problem, replace(cluster, kinds={**cluster.kinds, **unlimited})), fastest)
        return fastest.using(idle)

    def _smallest(self, idle: Idle, change: LinkChange) -> Useful | None:
        """Return the smallest change with which a plan with the devices saves enough, found by bisection."""
        low, high = 0, len(change.ladder) - 1
        best = self._useful(idle, change, change.ladder[high])
        while best is not None and low < high:
            middle = (low + high) // 2
            found = self._useful(idle, change, change.ladder[middle])
            best, low, high = (found, low, middle) if found is not None else (best, middle + 1, high)
        return best

    def _useful(self, idle: Idle, change: LinkChange, factor: int) -> Useful | None:
        words = change.words(factor)
        self.listen(words)
        found = self._found(idle, change.by(factor))
        return None if found is None or found > (1 - MARGIN) * self.step else Useful(words, factor, found)

    def _found(self, idle: Idle, cluster: Cluster) -> float | None:
        """Return the seconds of the fastest plan on a cluster, if the devices are in it."""
        watch = _Fastest([idle])
        fastest, with_them = _planned(_on(self.problem, cluster), watch), watch.using(idle)
        return with_them if fastest is not None and with_them is not None and with_them <= fastest else None


def _why(problem: Problem, idle: Idle, price: Price, with_them: float | None) -> str:
    step = price.step_seconds
    if idle.reason == "precision":
        return _listed(f"{kind} {why_left_out(problem, kind)}" for kind in idle.kinds)
    if idle.reason == "link":
        return f"no link joins {idle.them} to the devices that are used"
    if idle.reason == "place":
        return "the places that the job gives keep every block elsewhere"
    if with_them is None:
        return f"no plan with {idle.them} was found that is faster"
    if with_them < (1 - MARGIN) * step:
        return f"a new search finds a faster plan with {idle.them}, {format_seconds(with_them)} a step: plan again"
    found, without = format_seconds(with_them), format_seconds(step)
    whole = "the batch stays whole in one replica, which leaves little to share; " * _stays_whole(problem)
    if with_them < (1 + _ALIKE) * step:
        return f"{whole}the fastest plan found with {idle.them} takes as long, {found} a step"
    return f"{whole}the fastest plan found with {idle.them} takes {found} a step, without {idle.them} {without}"


def _stays_whole(problem: Problem) -> bool:
    """Return whether samples may influence each other, so that no plan splits the batch."""
    return not problem.job.trust_independent_samples and any(block.unproven for block in problem.graph.blocks)


def _short(problem: Problem, idle: Idle, unlimited: float, step: float) -> str:
    """Say that memory is what they lack."""
    memory = _listed(f"{kind} has {format_bytes(problem.cluster.kinds[kind].memory)}" for kind in idle.kinds)
    return (
        f"too little memory ({memory}): no plan with {idle.them} that was tried fits; with enough of it "
        f"the fastest takes {format_seconds(unlimited)} a step, without {idle.them} {format_seconds(step)}"
    )


def _listed(names: Iterable[str]) -> str:
    return " and ".join(names)
