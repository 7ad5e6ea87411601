"""Which links would make unused devices useful, found by planning for clusters in which these links are faster.

For each group of unused devices two levers are tried: more bandwidth, and then more bandwidth with less latency. The
largest change comes first; where even that brings no faster plan with the group in it, smaller ones cannot. Else the
smallest change that does is found by bisection. Every search is a short one over the usual schemes, which ends by its
effort: so the same inputs give the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, product
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.cost.simulate import Price, Simulator
from isthmus.errors import NoPlanError
from isthmus.plan.types import Plan
from isthmus.planners.budget import Limits
from isthmus.planners.portfolio import scheme_plans
from isthmus.planners.problem import LARGE, Problem
from isthmus.planners.unused import Idle, idle_devices
from isthmus.planners.what_if import Place
from isthmus.units import BytesPerSecond, Seconds, format_bandwidth, format_seconds

__all__ = ["Useful", "WhyUnused", "explain_unused"]

FACTORS = (2, 4, 8, 16, 32, 64)
MARGIN = 0.02  # of the step: what a plan with the devices must save
_EFFORT = 0.25  # seconds on a usual machine, for one search
_GROUPS = 3  # for which links are tried, those with most devices first
_PAIRS = 20_000  # of hosts whose links are looked at
_NAMED = 2  # links that are written out


class Useful(NamedTuple):
    """The smallest change of links that was found to make devices useful, and a step of the plan found with it."""

    change: str
    factor: int
    step_seconds: float


class WhyUnused(NamedTuple):
    """Why devices are unused. `with_them`: seconds of the fastest plan with them that a short search finds.

    `tried`: whether faster links were tried.
    """

    idle: Idle
    why: str
    with_them: float | None = None
    useful: Useful | None = None
    tried: bool = False


class _Watched(Problem):
    """A problem that remembers the fastest plan with devices of each group, and of all."""

    def __init__(self, given: Problem, cluster: Cluster, groups: Sequence[Idle]) -> None:
        super().__init__(cluster, given.job, given.graph, given.precision, given.seed, given.profile)
        self.groups = [frozenset(each.devices) for each in groups]
        self.best: dict[frozenset[str], float] = {}

    def priced(self, simulator: Simulator, plan: Plan) -> Price:
        """Prices a plan, and notes whom it uses."""
        price = super().priced(simulator, plan)
        if price.fits:
            for group in self.groups:
                if not group.isdisjoint(price.memory):
                    self.best[group] = min(price.step_seconds, self.best.get(group, price.step_seconds))
        return price


def explain_unused(
    problem: Problem, price: Price, listen: Callable[[str], None] = lambda text: None
) -> tuple[WhyUnused, ...]:
    """Why each group of unused devices is unused, and which links would make it useful."""
    idle = idle_devices(problem, price.memory)
    slower = [each for each in idle if each.reason == "slower"]
    largest = sorted(slower, key=lambda each: -len(each.devices))[:_GROUPS]
    now = _Watched(problem, problem.cluster, slower)
    if slower and price.fits and len(problem.usable) <= LARGE:
        listen("plans with devices that are not used")
        _fastest(now)
    else:
        largest = []
    told = []
    for each in idle:
        with_them, useful = now.best.get(frozenset(each.devices)), None
        better = with_them is not None and with_them < (1 - MARGIN) * price.step_seconds
        tried = each in largest and not better
        if tried:
            listen(f"faster links for {each}")
            useful = _useful(problem, each, price)
        told.append(WhyUnused(each, _why(problem, each, price.step_seconds, with_them), with_them, useful, tried))
    return tuple(told)


def _why(problem: Problem, idle: Idle, step: float, with_them: float | None) -> str:
    if idle.reason == "precision":
        return f"left out: {' and '.join(idle.kinds)} lacks {problem.precision} or is slow in it"
    if idle.reason == "link":
        return "no link joins them to the devices that are used"
    if idle.reason == "place":
        return "the job's places keep every block elsewhere"
    if with_them is None:
        return "no plan with them was found that is faster"
    if with_them < (1 - MARGIN) * step:
        return f"a short search finds a faster plan with them, {format_seconds(with_them)}; plan again"
    return (
        f"the fastest plan found with them takes {format_seconds(with_them)} a step instead of {format_seconds(step)}"
    )


def _fastest(problem: Problem) -> float | None:
    try:
        return scheme_plans(problem, Limits(effort=_EFFORT))[0].price.step_seconds
    except NoPlanError:
        return None


def _useful(problem: Problem, idle: Idle, price: Price) -> Useful | None:
    used = {problem.cluster.devices[name].host for name in price.memory}
    for latency in (False, True):
        change = _Faster(problem.cluster, idle.hosts, tuple(used | {*idle.hosts}), latency)
        found = _smallest(problem, idle, change, price.step_seconds)
        if found is not None:
            return found
    return None


def _smallest(problem: Problem, idle: Idle, change: _Faster, step: float) -> Useful | None:
    """The smallest factor for which a plan with the devices was found that saves enough; by bisection."""
    low, high = 0, len(FACTORS) - 1
    best = _tried(problem, idle, change, FACTORS[high], step)
    while best is not None and low < high:
        middle = (low + high) // 2
        found = _tried(problem, idle, change, FACTORS[middle], step)
        best, low, high = (found, low, middle) if found is not None else (best, middle + 1, high)
    return best


def _tried(problem: Problem, idle: Idle, change: _Faster, factor: int, step: float) -> Useful | None:
    """The fastest plan with such links, if the devices are in it and it saves enough."""
    trial = _Watched(problem, change.by(factor), [idle])
    fastest = _fastest(trial)
    with_them = trial.best.get(frozenset(idle.devices))
    if fastest is None or with_them is None or with_them > min(fastest, (1 - MARGIN) * step):
        return None
    return Useful(change.words(factor), factor, with_them)


class _Faster:
    """A cluster in which some hosts reach each other and all others of a plan faster.

    A nic that is narrower than a link becomes as wide. With `latency` it falls as the bandwidth grows.
    """

    def __init__(self, cluster: Cluster, hosts: Sequence[str], others: Sequence[str], latency: bool) -> None:
        self.cluster, self.latency = cluster, latency
        self.hosts, self.ends = hosts, {*hosts, *others}
        pairs = islice(product(hosts, sorted(others)), _PAIRS)
        links = {link.between: link for a, b in pairs if a != b and (link := cluster.link(a, b)) is not None}
        self.links = [link for link in cluster.links if link.between in links]
        self.inside = [name for name in hosts if sum(cluster.hosts[name].devices.values()) > 1]

    def by(self, factor: int) -> Cluster:
        """Bandwidth times `factor`, and latency divided by it."""
        links = tuple(self._link(link, factor) if link in self.links else link for link in self.cluster.links)
        widest = max((factor * link.bandwidth for link in self.links), default=0.0)
        hosts = {name: self._host(host, factor, widest) for name, host in self.cluster.hosts.items()}
        return replace(self.cluster, links=links, hosts=hosts)

    def _link(self, link: Link, factor: int) -> Link:
        trunk = None if link.trunk is None else BytesPerSecond(factor * link.trunk)
        latency = Seconds(link.latency / factor) if self.latency else link.latency
        return replace(link, bandwidth=BytesPerSecond(factor * link.bandwidth), trunk=trunk, latency=latency)

    def _host(self, host: Host, factor: int, widest: float) -> Host:
        if host.name not in self.ends:
            return host
        inside = factor if host.name in self.inside else 1
        nic = BytesPerSecond(max(host.nic, widest))
        return replace(host, nic=nic, bandwidth=BytesPerSecond(inside * host.bandwidth))

    def words(self, factor: int) -> str:
        """`link virginia - frankfurt at 16 Gbit/s instead of 2 Gbit/s, 5.5 ms instead of 44 ms one way`."""
        named = [self._words(link, factor) for link in self.links[:_NAMED]]
        rest = len(self.links) - _NAMED
        named += [f"{rest} more link{'s' * (rest > 1)} {factor} times as fast"] if rest > 0 else []
        if self.inside:
            named.append(
                f"links inside {self.inside[0]}{' and its like' * (len(self.inside) > 1)} {factor} times as fast"
            )
        return " and ".join(named)

    def _words(self, link: Link, factor: int) -> str:
        new = self._link(link, factor)
        words = f"{Place('link', link.between)} at {format_bandwidth(new.bandwidth)}"
        words += f" instead of {format_bandwidth(link.bandwidth)}"
        if self.latency:
            words += f", {format_seconds(new.latency)} instead of {format_seconds(link.latency)} one way"
        return words
