"""A problem: what is to be trained where. Planners take one and give a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import PRECISIONS, Cluster, Precision
from isthmus.cost.compute import Group
from isthmus.cost.plan_arrays import group_of
from isthmus.cost.simulate import Price, Simulator
from isthmus.cost.tables import ModelTable
from isthmus.errors import NoPlanError, UsageError
from isthmus.model.graph import Block, BlockGraph
from isthmus.model.job import Job
from isthmus.model.profile import Profile
from isthmus.plan.relays import joined, relays
from isthmus.plan.rules.stages import placed_blocks
from isthmus.plan.types import Plan, Via

__all__ = [
    "LARGE",
    "Candidate",
    "Problem",
    "ReplicaKind",
    "build_problem",
    "divided_work",
    "make_problem",
    "pick_precision",
]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
ReplicaKind = tuple[str, Group]  # what a replica's time depends on besides its samples: kind and links of its devices
_Sort = TypeVar("_Sort", bound=Hashable)
_Result = TypeVar("_Result")
LARGE = 64  # devices: what is planned whole, and with relays


class Candidate(NamedTuple):
    """A plan with its price."""

    plan: Plan
    price: Price


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """One job on one cluster, with the simulator that prices plans for it and what is known before any search.

    Nothing of it ever changes, except that it remembers what was computed from it. `build_problem` makes one.
    """

    cluster: Cluster
    job: Job
    graph: BlockGraph
    precision: Precision
    seed: int
    profile: Profile | None
    simulator: Simulator
    network: Cluster  # with the rates that messages reach, for bounds and estimates
    usable: tuple[str, ...]  # devices that compute in the precision
    left_out: tuple[str, ...]  # kinds that lack the precision or are slow in it
    places: tuple[tuple[str, str, list[int]], ...]  # pattern, host or region, and the blocks that must stay there
    vias: tuple[Via, ...]  # relays for hosts without a link, which every plan has
    table: ModelTable  # the model's sums and times in the precision
    kind_speeds: Mapping[str, float]  # samples of the whole model in a second, by kind
    serial: bool  # every block feeds the next and gets a gradient back: then no two stages are independent
    steps: Floats  # bytes a sample that at least pass from each block to the next, and back
    _seconds: dict[tuple[str, Group, int], Floats] = field(default_factory=dict, repr=False)
    _both: dict[tuple[str, Group, int], Floats] = field(default_factory=dict, repr=False)
    _whole: dict[tuple[str, Group, int], float] = field(default_factory=dict, repr=False)
    _kinds: dict[tuple[str, ...], ReplicaKind] = field(default_factory=dict, repr=False)
    _results: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)  # of `remembered`

    @cached_property
    def with_relays(self) -> Problem:
        """Return the same problem with a link for every two hosts that a relay joins, as good as the relay at its best.

        The links are in `network` alone: bounds and estimates know them, the simulator sends messages over the relays.
        """
        return replace(self, network=joined(self.network, self.vias), _results={}) if self.vias else self

    def remembered(self, function: Callable[..., _Result], *arguments: Hashable) -> _Result:
        """Return `function(self, *arguments)`, computed once."""
        key = (function, *arguments)
        if key not in self._results:
            self._results[key] = function(self, *arguments)
        found: _Result = self._results[key]
        return found

    @property
    def kept(self) -> float | None:
        """Return the fraction that masks keep of pruned tensors; None where nothing is pruned."""
        return float(f"{1.0 - self.job.sparsity:.12g}") if self.job.sparsity else None  # 0.1, not 0.0999...8

    @cached_property
    def thinnest(self) -> float:
        """Return the bytes a sample that at least pass between neighbouring blocks, each way; 0 where they are not
        serial.
        """
        return float(self.steps.min(initial=np.inf)) if len(self.steps) else 0.0

    def speed(self, device: str) -> float:
        """Return the samples of the whole model in a second, where nothing but the work counts (or was measured)."""
        return self.kind_speeds[self.cluster.devices[device].kind]

    def replica_kind(self, devices: tuple[str, ...]) -> ReplicaKind:
        """Return the kind and the links of devices that act as one replica."""
        if devices not in self._kinds:
            kind = self.cluster.devices[devices[0]].kind
            self._kinds[devices] = kind, group_of(self.simulator.priced_cluster, devices)
        return self._kinds[devices]

    def block_seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """Return the seconds of every block on so many samples, [2, blocks]: forward and backward."""
        key = (kind, group, samples)
        if key not in self._seconds:
            self._seconds[key] = np.diff(self.table.seconds(kind, group, samples))
        return self._seconds[key]

    def both_seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """Return the seconds of every block on so many samples, [blocks]: forward and backward together."""
        key = (kind, group, samples)
        if key not in self._both:
            self._both[key] = self.block_seconds(kind, group, samples).sum(axis=0)
        return self._both[key]

    def whole_seconds(self, kind: str, group: Group, samples: int) -> float:
        """Return the seconds of the whole model on so many samples, both ways; nothing for no samples."""
        key = (kind, group, samples)
        if key not in self._whole:
            self._whole[key] = float(self.block_seconds(kind, group, samples).sum()) if samples else 0.0
        return self._whole[key]

    def allowed(self, device: str) -> Bools:
        """Return which blocks the job's places let be on a device."""
        host = self.cluster.host_of(device)
        allowed = np.ones(len(self.graph.blocks), np.bool_)
        for _, target, blocks in self.places:
            if target not in (host.name, host.region):
                allowed[blocks] = False
        return allowed

    def may_slice(self, blocks: Iterable[Block]) -> bool:
        """Return whether these blocks can work on parts of a micro-batch: they take no statistics, mix no samples."""
        trusted = self.job.trust_independent_samples
        return not any(block.statistics or (block.unproven and not trusted) for block in blocks)

    def price(self, plan: Plan) -> Candidate:
        """Return the plan with its price."""
        return Candidate(plan, self.simulator.price(plan))


def pick_precision(cluster: Cluster, job: Job) -> Precision:
    """Return the job's own precision; else the fastest that every kind of the cluster has, by the sum of all devices'
    rates.
    """
    if job.precision is not None:
        return job.precision
    kinds = [cluster.kinds[device.kind].compute for device in cluster.devices.values()]
    offered = [p for p in PRECISIONS if all(p in rates for rates in kinds)]
    return max(offered, key=lambda p: sum(rates[p] for rates in kinds), default="fp32")


def build_problem(
    cluster: Cluster,
    jobs: tuple[Job, ...],
    models: Mapping[str, BlockGraph],
    seed: int = 0,
    profile: Profile | None = None,
) -> Problem:
    """Build the problem of training one job on a cluster, with measured times where there are any."""
    if len(jobs) != 1:
        raise UsageError(
            "planning several jobs at once is not supported yet",
            found=f"{len(jobs)} jobs",
            expected="one job",
            next="Plan each job on its own part of the cluster; `isthmus simulate` prices a plan of several jobs",
        )
    job = jobs[0]
    return make_problem(cluster, job, models[job.name], pick_precision(cluster, job), seed, profile)


def make_problem(
    cluster: Cluster,
    job: Job,
    graph: BlockGraph,
    precision: Precision,
    seed: int = 0,
    profile: Profile | None = None,
    *,
    relays_allowed: bool = True,
) -> Problem:
    """Return the problem of one job in a given precision; plans of large clusters have no relays."""
    simulator = Simulator(cluster, {job.name: graph}, profile=profile)
    able = {name for name, kind in cluster.kinds.items() if kind.computes_in(precision, job.mixed) is not None}
    usable = tuple(device.name for device in cluster.devices.values() if device.kind in able)
    places = placed_blocks(job, graph, cluster, f"job {job.name}")
    _check_devices(cluster, job, precision, usable, places)
    table = simulator.table(job.name, precision, job.mixed)
    kinds = dict.fromkeys(cluster.devices[device].kind for device in usable)
    seconds = {kind: float(table.work(kind, job.batch).sum()) for kind in kinds}
    return Problem(
        cluster=cluster,
        job=job,
        graph=graph,
        precision=precision,
        seed=seed,
        profile=profile,
        simulator=simulator,
        network=simulator.priced_cluster,
        usable=usable,
        left_out=tuple(kind for kind in cluster.kinds if kind not in kinds),
        places=tuple(places),
        vias=relays(cluster) if relays_allowed and len(usable) <= LARGE else (),
        table=table,
        kind_speeds={kind: 1.0 / spent if spent > 0.0 else 1.0 for kind, spent in seconds.items()},
        serial=_serial(graph),
        steps=_step_bytes(graph, table),
    )


def _check_devices(
    cluster: Cluster,
    job: Job,
    precision: Precision,
    usable: Sequence[str],
    places: Sequence[tuple[str, str, list[int]]],
) -> None:
    """Refuse a job for which no device, or no device of some place, computes in the precision."""
    if not usable:
        raise NoPlanError(
            f"no device computes in {precision}",
            where=f"cluster {cluster.name}",
            found=", ".join(cluster.kinds),
            expected=f"a kind with a {precision} rate not below its fp32 rate",
            next="Choose another precision, or let such devices compute in fp32 with `mixed: true`",
        )
    hosts = {cluster.devices[device].host for device in usable}
    open_to = hosts | {cluster.hosts[host].region for host in hosts}
    for pattern, target, _ in places:
        if target not in open_to:
            there = [h for h in cluster.hosts.values() if target in (h.name, h.region)]
            raise NoPlanError(
                f"{pattern!r} must stay in {target}, and no device there computes in {precision}",
                where=f"job {job.name}",
                found=", ".join(dict.fromkeys(kind for h in there for kind in h.devices)) or "no devices",
                expected=f"a kind with a {precision} rate not below its fp32 rate"
                + ("" if job.precision else f"; the job gives no precision, so {precision} was chosen"),
                next="Give another precision (--precision fp32), let such devices compute in fp32 with "
                "`mixed: true` in the job, or change the place",
            )


def _serial(graph: BlockGraph) -> bool:
    """Return whether every block feeds the next and gets a gradient back."""
    tensors = [tensor for tensor in graph.tensors if tensor.grad and tensor.elements]
    steps = {(tensor.source, target) for tensor in tensors for target in tensor.targets}
    return all((b, b + 1) in steps for b in range(len(graph.blocks) - 1))


def _step_bytes(graph: BlockGraph, model: ModelTable) -> Floats:
    """Return the bytes a sample that at least pass from each block to the next, and back."""
    steps, table = np.zeros(len(graph.blocks) - 1), model.tensors
    for i, source in enumerate(table.source):
        if source + 1 in table.target[table.first[i] : table.first[i + 1]] and table.grad[i]:
            steps[source] += table.per_sample[i]
    return steps


def divided_work(seconds: Mapping[_Sort, Floats], counts: Mapping[_Sort, int]) -> float:
    """Return the seconds below which no division of blocks among so many devices of each sort can go.

    With x[d, b] the part of block b on device d, and c[d, b] its seconds there, the least T with sum_d x[d, b] = 1 and
    sum_b c[d, b] x[d, b] <= T is a linear programme. Its dual gives a bound for any weights z[d] that add up to 1:

        T >= sum_b min_d z[d] c[d, b]

    With z[d] in proportion to 1 / sum_b c[d, b] this is the optimum itself when sorts differ by one factor. A sort on
    which the whole model takes no time takes all of it: the bound is 0.
    """
    totals = {sort: float(seconds[sort].sum()) for sort in counts}
    if min(totals.values()) <= 0.0:
        return 0.0
    speed = sum(count / totals[sort] for sort, count in counts.items())
    return float(np.min([seconds[sort] / totals[sort] for sort in counts], axis=0).sum()) / speed
