"""A problem: what is to be trained where. Planners take one and give a plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple, TypeVar

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
from isthmus.planners.stop import Stop

__all__ = ["LARGE", "Candidate", "Fact", "Problem", "build_problem", "divided_work", "pick_precision"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Fact = tuple[str, Group]  # what a replica's time depends on besides its samples: kind and links of its devices
_Sort = TypeVar("_Sort", bound=Hashable)
LARGE = 64  # devices: what is planned whole, and with relays
_PRICE, _PRICE_DEVICE, _TASK = 4e-4, 2e-5, 2.5e-7  # seconds to price a plan: at least, a device, and a task


class Candidate(NamedTuple):
    """A plan with its price."""

    plan: Plan
    price: Price


class Problem:
    """One job on one cluster, with the simulator that judges plans for it.

    Counts its calls and, as `effort`, the seconds that planning takes on a usual machine: each piece of work adds what
    it takes there, about. So a search that ends by its effort gives the same plan on every machine.
    """

    copied = False  # whether plans are priced as several copies side by side
    stop: Stop | None = None  # where the present search ends

    def __init__(
        self,
        cluster: Cluster,
        job: Job,
        graph: BlockGraph,
        precision: Precision,
        seed: int,
        profile: Profile | None = None,
    ) -> None:
        self.cluster, self.job, self.graph, self.precision, self.seed = cluster, job, graph, precision, seed
        self.profile = profile
        self.simulator = Simulator(cluster, {job.name: graph}, profile=profile)
        self.roads = self.simulator.priced  # as messages pass it, for bounds and estimates
        self.calls, self.effort = 0, 0.0
        able = {name for name, kind in cluster.kinds.items() if kind.computes_in(precision, job.mixed) is not None}
        self.usable = tuple(device.name for device in cluster.devices.values() if device.kind in able)
        self.places = placed_blocks(job, graph, cluster, f"job {job.name}")
        self._seconds: dict[tuple[str, Group, int], Floats] = {}
        # What `pipeline_bounds` found of pairs of stages:
        self.crossings: dict[Hashable, tuple[float, float, float]] = {}
        self.ends: dict[Hashable, tuple[float, float, float]] = {}  # and of each stage: its ring, its update
        self._both: dict[tuple[str, Group, int], Floats] = {}
        self._whole: dict[tuple[str, Group, int], float] = {}
        self._facts: dict[tuple[str, ...], Fact] = {}
        if not self.usable:
            raise NoPlanError(
                f"no device computes in {precision}",
                where=f"cluster {cluster.name}",
                found=", ".join(cluster.kinds),
                expected=f"a kind with a {precision} rate not below its fp32 rate",
                next="Choose another precision, or let such devices compute in fp32 with `mixed: true`",
            )
        self._check_places()

    def _check_places(self) -> None:
        """Refuses a place whose devices all stay out of the job because of its precision."""
        hosts = {self.cluster.devices[device].host for device in self.usable}
        open_to = hosts | {self.cluster.hosts[host].region for host in hosts}
        for pattern, target, _ in self.places:
            if target not in open_to:
                there = [h for h in self.cluster.hosts.values() if target in (h.name, h.region)]
                raise NoPlanError(
                    f"{pattern!r} must stay in {target}, and no device there computes in {self.precision}",
                    where=f"job {self.job.name}",
                    found=", ".join(dict.fromkeys(kind for h in there for kind in h.devices)) or "no devices",
                    expected=f"a kind with a {self.precision} rate not below its fp32 rate"
                    + ("" if self.job.precision else f"; the job gives no precision, so {self.precision} was chosen"),
                    next="Give another precision (--precision fp32), let such devices compute in fp32 with "
                    "`mixed: true` in the job, or change the place",
                )

    @cached_property
    def vias(self) -> tuple[Via, ...]:
        """Relays for hosts without a link, which every plan has; none in large clusters."""
        return relays(self.cluster) if len(self.usable) <= LARGE and not self.copied else ()

    @contextmanager
    def over_relays(self) -> Iterator[None]:
        """Meanwhile `roads` has a link for every two hosts that a relay joins, as good as the relay at its best."""
        before = self.roads, self.crossings, self.ends
        self.roads, self.crossings, self.ends = joined(self.roads, self.vias), {}, {}
        try:
            yield
        finally:
            self.roads, self.crossings, self.ends = before

    @contextmanager
    def stopping(self, stop: Stop) -> Iterator[None]:
        """Meanwhile pricing a plan raises SearchEnded where `stop` has nothing left."""
        before, self.stop = self.stop, stop
        try:
            yield
        finally:
            self.stop = before

    @cached_property
    def table(self) -> ModelTable:
        """The model's sums and times in the job's precision."""
        return self.simulator.table(self.job.name, self.precision, self.job.mixed)

    @property
    def kept(self) -> float | None:
        """The fraction that masks keep of pruned tensors; None where nothing is pruned."""
        return float(f"{1.0 - self.job.sparsity:.12g}") if self.job.sparsity else None  # 0.1, not 0.0999...8

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Kinds that do not take part because they lack the precision or are slow in it."""
        used = {self.cluster.devices[name].kind for name in self.usable}
        return tuple(kind for kind in self.cluster.kinds if kind not in used)

    @cached_property
    def serial(self) -> bool:
        """Return whether every block feeds the next and gets a gradient back: then no two stages are independent."""
        tensors = [tensor for tensor in self.graph.tensors if tensor.grad and tensor.elements]
        steps = {(tensor.source, target) for tensor in tensors for target in tensor.targets}
        return all((b, b + 1) in steps for b in range(len(self.graph.blocks) - 1))

    @cached_property
    def steps(self) -> Floats:
        """Bytes a sample that at least pass from each block to the next, and back."""
        steps, table = np.zeros(len(self.graph.blocks) - 1), self.table.tensors
        for i, source in enumerate(table.source):
            if source + 1 in table.target[table.first[i] : table.first[i + 1]] and table.grad[i]:
                steps[source] += table.per_sample[i]
        return steps

    @cached_property
    def thinnest(self) -> float:
        """Bytes a sample that at least pass between neighbouring blocks, each way; 0 where they are not serial."""
        return float(self.steps.min(initial=np.inf)) if len(self.steps) else 0.0

    @cached_property
    def _speeds(self) -> Mapping[str, float]:
        kinds = dict.fromkeys(self.cluster.devices[device].kind for device in self.usable)
        seconds = {kind: float(self.table.work(kind, self.job.batch).sum()) for kind in kinds}
        return {kind: 1.0 / spent if spent > 0.0 else 1.0 for kind, spent in seconds.items()}

    def speed(self, device: str) -> float:
        """Samples of the whole model in a second, where nothing but the work counts (or was measured)."""
        return self._speeds[self.cluster.devices[device].kind]

    def kind_speed(self, kind: str) -> float:
        """The same, of a kind that takes part."""
        return self._speeds[kind]

    def fact(self, devices: tuple[str, ...]) -> Fact:
        """Kind and links of devices that act as one replica."""
        if devices not in self._facts:
            self._facts[devices] = self.cluster.devices[devices[0]].kind, group_of(self.simulator.priced, devices)
        return self._facts[devices]

    def block_seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """Seconds of every block on so many samples, [2, blocks]: forward and backward."""
        key = (kind, group, samples)
        if key not in self._seconds:
            self._seconds[key] = np.diff(self.table.seconds(kind, group, samples))
        return self._seconds[key]

    def both_seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """The same, [blocks]: forward and backward together."""
        key = (kind, group, samples)
        if key not in self._both:
            self._both[key] = self.block_seconds(kind, group, samples).sum(axis=0)
        return self._both[key]

    def whole_seconds(self, kind: str, group: Group, samples: int) -> float:
        """The same of the whole model; nothing for no samples."""
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

    @property
    def price_effort(self) -> float:
        """Return the seconds to price one plan, besides what its tasks take."""
        return _PRICE + _PRICE_DEVICE * len(self.usable)

    def price(self, plan: Plan) -> Candidate:
        """The plan with its price."""
        return Candidate(plan, self.priced(self.simulator, plan))

    def count_call(self) -> None:
        """Count a call of the simulator; raises SearchEnded where the search may make no more."""
        if self.stop is not None:
            self.stop.take()
        self.calls += 1

    def priced(self, simulator: Simulator, plan: Plan) -> Price:
        """Return a plan's price; counts the call and its effort."""
        self.count_call()
        before = simulator.tasks
        price = simulator.price(plan)
        self.effort += self.price_effort + _TASK * (simulator.tasks - before)
        return price


def pick_precision(cluster: Cluster, job: Job) -> Precision:
    """The job's own; else the fastest that every kind of the cluster has, by the sum of all devices' rates."""
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
    """The problem of training one job on a cluster, with measured times where there are any."""
    if len(jobs) != 1:
        raise UsageError(
            "planning several jobs at once is not supported yet",
            found=f"{len(jobs)} jobs",
            expected="one job",
            next="Plan each job on its own part of the cluster; `isthmus simulate` prices a plan of several jobs",
        )
    job = jobs[0]
    return Problem(cluster, job, models[job.name], pick_precision(cluster, job), seed, profile)


def divided_work(seconds: Mapping[_Sort, Floats], counts: Mapping[_Sort, int]) -> float:
    """Seconds below which no division of blocks among so many devices of each sort can go.

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
