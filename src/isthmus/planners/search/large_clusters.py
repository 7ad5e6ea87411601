"""Large clusters are planned small: as F copies of a plan for an F-th of their hosts.

Hosts of one region and shape, with no links of their own, form a class; of its N hosts each copy has N // F, the others
stay idle. A copy gets an F-th of the batch, and of every trunk an F-th, as all copies use it at the same time. Beside
each other the copies train data parallel: the ring of a bucket has, for every participant of the small plan, its F
copies in a row, so that a region is crossed as often as in the small plan. While one copy is planned, every plan of it
is priced as all copies together: what is best alone need not be best with syncs between copies.

The cost of planning so grows with the number of classes, and hardly with that of devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster
from isthmus.cost.simulate import Price
from isthmus.plan.types import How, Pipeline, Plan, Replica, Stage
from isthmus.planners.layout.build_plan import make_plan, only_pipeline
from isthmus.planners.layout.shares import divisors
from isthmus.planners.problem import LARGE, Candidate, Problem, make_problem
from isthmus.planners.search_constants import COPIES_PRICE_EFFORT, COPY_TOO_LARGE, COPY_WORTH
from isthmus.planners.search_state import SearchState
from isthmus.units import BytesPerSecond

__all__ = ["COPIED", "Copies", "CopiesState", "copied_plan", "small_problem", "treed", "whole_plan"]

COPIED: tuple[How, ...] = ("ring", "tree")  # how gradients of copies may become equal


class Copies(NamedTuple):
    """A small problem, and the hosts that each of its hosts stands for."""

    problem: Problem
    number: int
    hosts: Mapping[str, tuple[str, ...]]  # host of the small cluster -> one for each copy


def small_problem(problem: Problem) -> Copies | None:
    """Return the problem of one copy.

    None where the cluster is small, or has no equal hosts, or its batch no divisor.
    """
    if len(problem.usable) <= LARGE:
        return None
    classes = _classes(problem)
    ways = [f for f in divisors(problem.job.batch) if len(problem.usable) >= LARGE // 4 * f]
    count = max(ways, key=lambda f: _rating(problem, classes, f))
    hosts: dict[str, tuple[str, ...]] = {}
    for members in classes:
        each = len(members) // count
        hosts.update({members[i]: tuple(members[i : each * count : each]) for i in range(each)})
    regions = {problem.cluster.hosts[host].region for host in hosts}
    if count == 1 or any(target not in hosts and target not in regions for _, target, _ in problem.places):
        return None
    job = replace(problem.job, batch=problem.job.batch // count)
    cluster = _cluster(problem.cluster, hosts, count)
    small = make_problem(
        cluster, job, problem.graph, problem.precision, problem.seed, problem.profile, relays_allowed=False
    )
    return Copies(small, count, hosts)


class CopiesState(SearchState):
    """The state of a search for the plan of one copy, whose plans are priced as all copies side by side."""

    copied = True

    def __init__(self, whole: Problem, copies: Copies) -> None:
        super().__init__(copies.problem)
        self.whole, self.copies = whole, copies

    @property
    def price_effort(self) -> float:
        """Return the seconds to price one plan, besides what its tasks take."""
        return COPIES_PRICE_EFFORT

    def price(self, plan: Plan) -> Candidate:
        """Return the plan of one copy with the price of all copies, with the syncs between them."""
        return Candidate(plan, min(self._prices(plan), key=lambda price: (not price.fits, price.step_seconds)))

    def _prices(self, plan: Plan) -> list[Price]:
        made = [copied_plan(self.whole, self.copies, plan, how) for how in _hows(plan)]
        return [self.counted_price(self.whole.simulator, whole) for whole in made]


def _hows(plan: Plan) -> tuple[How, ...]:
    """Return how to sync the gradients of copies: as the small plan does, or either way where it has no syncs."""
    syncs = only_pipeline(plan).syncs
    if not syncs:
        return COPIED
    return ("tree",) if any(sync.how == "tree" for sync in syncs) else ("ring",)


def treed(problem: Problem, plan: Plan) -> Plan | None:
    """Return the small plan with its gradients summed up along trees; None where they are, or it has none to sum up."""
    part = only_pipeline(plan)
    if any(sync.how == "tree" for sync in part.syncs):
        return None
    made = make_plan(problem, part.stages, part.micro_batches, schedule=part.schedule, how="tree", ahead=part.ahead)
    return made if any(sync.how == "tree" for sync in only_pipeline(made).syncs) else None


def whole_plan(state: SearchState, copies: Copies, plan: Plan) -> Candidate:
    """Return the plan of the whole cluster that has this plan in every copy; its price is that of the small plan."""
    made = [state.price(copied_plan(state.problem, copies, plan, how)) for how in _hows(plan)]
    return min(made, key=lambda one: (not one.price.fits, one.price.step_seconds))


def _classes(problem: Problem) -> list[list[str]]:
    """Return groups of hosts that may stand for each other."""
    cluster = problem.cluster
    own = {end for link in cluster.links for end in link.between if end in cluster.hosts}
    placed = {target for _, target, _ in problem.places}
    found: dict[object, list[str]] = {}
    for name, host in cluster.hosts.items():
        alone = name in own or name in placed
        found.setdefault(name if alone else host.shape, []).append(name)
    return list(found.values())


def _rating(problem: Problem, classes: list[list[str]], count: int) -> float:
    """Return a score for so many copies: higher the more of the cluster they use and the smaller they are."""
    used, whole, devices = 0.0, 0.0, 0
    for members in classes:
        kinds = problem.cluster.hosts[members[0]].devices
        mine = {kind: number for kind, number in kinds.items() if kind not in problem.left_out}
        speed = sum(number * problem.kind_speeds[kind] for kind, number in mine.items())
        used += speed * (len(members) // count) * count
        whole += speed * len(members)
        devices += sum(mine.values()) * (len(members) // count)
    too_large = max(1.0, devices / LARGE)
    return used / whole - COPY_WORTH * max(0, devices.bit_length() - 5) - COPY_TOO_LARGE * (too_large - 1.0)


def _cluster(cluster: Cluster, hosts: Collection[str], count: int) -> Cluster:
    """Return some of the hosts, with trunks as narrow as one copy finds them."""
    regions = {cluster.hosts[name].region for name in hosts}
    links = tuple(
        link if link.trunk is None else replace(link, trunk=BytesPerSecond(link.trunk / count))
        for link in cluster.links
        if all(end in hosts or end in regions for end in link.between)
    )
    return replace(cluster, hosts={name: host for name, host in cluster.hosts.items() if name in hosts}, links=links)


def copied_plan(problem: Problem, copies: Copies, plan: Plan, how: How) -> Plan:
    """Return the small plan as often as there are copies, for the whole problem; rings go from copy to copy of each
    device.
    """
    part = only_pipeline(plan)
    stages = [_copied_stage(copies, stage) for stage in part.stages]
    made = make_plan(problem, stages, part.micro_batches, schedule=part.schedule, how=how, ahead=part.ahead)
    whole = only_pipeline(made)
    place = {device: (at, copy) for at, copy, device in _places(copies, part)}
    syncs = (replace(s, participants=tuple(sorted(s.participants, key=place.__getitem__))) for s in whole.syncs)
    return replace(made, parts=(replace(whole, syncs=tuple(syncs)),))


def _places(copies: Copies, part: Pipeline) -> Iterator[tuple[int, int, str]]:
    """Yield every first device of a replica, with its place in the small plan and its copy; regions stand together."""
    leads = dict.fromkeys(replica.devices[0] for stage in part.stages for replica in stage.replicas)
    cluster = copies.problem.cluster
    near = sorted(leads, key=lambda device: (cluster.host_of(device).region, cluster.devices[device].host))
    for at, device in enumerate(near):
        yield from ((at, copy, _device(copies, device, copy)) for copy in range(copies.number))


def _copied_stage(copies: Copies, stage: Stage) -> Stage:
    replicas = tuple(
        Replica(devices=tuple(_device(copies, d, c) for d in r.devices), share=r.share, slices=r.slices)
        for c in range(copies.number)
        for r in stage.replicas
    )
    return replace(stage, replicas=replicas)


def _device(copies: Copies, device: str, copy: int) -> str:
    host, _, rest = device.partition("/")
    return f"{copies.hosts[host][copy]}/{rest}"
