"""What a plan costs: seconds per step and peak memory, found by playing one step of all its parts together.

    plan ─▶ flat arrays ─▶ runs, edges, orders ─▶ tasks ───────▶ event engine ──▶ price, timeline
            plan_arrays    plan.schedule          build_tasks    event_engine     timeline

A `Simulator` knows one cluster and the models of some jobs. It keeps what does not change between plans (routes, sums
over blocks, time tables), so that a planner can price a thousand plans a second. Plans of many devices that are copies
of a smaller plan are priced by a few of the copies (`cost.replicas.folding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, Precision
from isthmus.compiled import compiled
from isthmus.cost.build_tasks import lower
from isthmus.cost.compute import Efficiency
from isthmus.cost.event_engine import Times, run
from isthmus.cost.memory import activation_peaks, context_bytes, scratch_bytes
from isthmus.cost.network import Fabric, fabric, with_overheads
from isthmus.cost.plan_arrays import Flat, flatten
from isthmus.cost.pool import PreparedPool, prepare_pool, write_pool
from isthmus.cost.replicas.folded_network import folded_fabric, with_copies
from isthmus.cost.replicas.folding import Folded, Folder
from isthmus.cost.tables import ModelTable, stage_links
from isthmus.cost.task_list import TaskList, new_list
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import DeviceCosts, Profile
from isthmus.plan.schedule import Edges, Orders, StageRuns, make_orders, merge_stages, run_edges
from isthmus.plan.types import Pipeline, Plan, Pool

__all__ = ["PLAYED_WHOLE", "Played", "Prepared", "Price", "Shortage", "Simulator"]

Floats = npt.NDArray[np.float64]

_PRICED_WHOLE = 64  # devices; plans with more are folded
PLAYED_WHOLE = 256  # ... if every task is asked for
_MOST = 4096  # devices of a plan that is not folded
_MOST_MESSAGES = 200_000_000  # ... and messages of its rings
_KEPT_FABRICS = 16


class Shortage(NamedTuple):
    """Memory that a plan needs and that a device or host does not have."""

    where: str
    needed: float
    available: float


class Price(NamedTuple):
    """What a plan costs; `shortages` is empty if everything fits."""

    step_seconds: float
    jobs: Mapping[str, float]
    memory: Mapping[str, float]
    shortages: tuple[Shortage, ...]
    impossible: str = ""  # why the plan cannot run at all; its times are infinite then

    @property
    def fits(self) -> bool:
        """Return whether the plan can run, and every device and host can hold its part."""
        return not self.shortages and not self.impossible


class Played(NamedTuple):
    """One played step, task by task."""

    fabric: Fabric
    tasks: TaskList
    times: Times
    jobs: tuple[str, ...]  # the job of each number in tasks.part
    labels: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]  # names of the runs and of the buckets of each job
    groups: Mapping[int, tuple[int, ...]]  # first device -> all devices of a tensor group
    senders: npt.NDArray[np.int32]  # the device that sends on each lane after those of the fabric


class Prepared(NamedTuple):
    """A pipeline with its runs, what flows between them, and every device's order."""

    flat: Flat
    runs: StageRuns
    forward: Edges
    backward: Edges
    orders: Orders


class Simulator:
    """Prices plans on one cluster, for jobs whose models are given by the jobs' names."""

    def __init__(
        self,
        cluster: Cluster,
        models: Mapping[str, BlockGraph],
        efficiency: Mapping[str, Efficiency] | None = None,
        profile: Profile | None = None,
    ) -> None:
        """Prepare to price plans on the cluster.

        `efficiency` has what device kinds reach of their catalog figures, where that is known better than usual.
        `profile` has measured times of blocks and collectives, which take precedence over all figures, and what else
        was measured.
        """
        self.cluster, self.models, self.efficiency, self.profile = cluster, models, efficiency, profile
        self.tasks = 0  # of all plans priced so far
        # with the rates and latencies that messages meet
        self.priced_cluster = with_overheads(cluster, profile.network) if profile is not None else cluster
        self._fabrics: dict[tuple[object, ...], Fabric] = {}
        self._tables: dict[tuple[str, Precision, bool], ModelTable] = {}
        self._out = new_list(4096, 8192)

    def price(self, plan: Plan) -> Price:
        """Return the seconds per step and the peak memory of a plan."""
        try:
            plan, net, folded = self.small(plan, _PRICED_WHOLE)
        except PlanError as problem:
            return Price(math.inf, {job.name: math.inf for job in plan.jobs}, {}, (), problem.what)
        parts = [self.prepare(part, net) for part in plan.parts]
        out, jobs = self._write(parts, net, self._out)
        self._out = out
        memory, shortages = self._memory(parts, net)
        if folded is not None:
            memory, shortages = self._of_all(folded, memory, shortages)
        try:
            times = _run(out, net)
        except PlanError as problem:
            return Price(math.inf, dict.fromkeys(jobs, math.inf), memory, shortages, problem.what)
        self.tasks += len(times.end)
        ends = ends_by_part(times.end, out.part, len(jobs)).tolist()
        return Price(max(ends, default=0.0), dict(zip(jobs, ends, strict=True)), memory, shortages)

    def play(self, plan: Plan) -> Played:
        """Play one step, task by task; of a plan of very many devices that can be folded, play a few copies."""
        plan, net, _ = self.small(plan, PLAYED_WHOLE)
        parts = [self.prepare(part, net) for part in plan.parts]
        out, jobs = self._write(parts, net, new_list(4096, 8192))
        labels = [label for part, prepared in zip(plan.parts, parts, strict=True) for label in _labels(part, prepared)]
        groups = {
            group[0]: group for part in parts if isinstance(part, Prepared) for group in part.flat.groups if group[1:]
        }
        return Played(net, out, _run(out, net), jobs, tuple(labels), groups, _senders(parts))

    def table(self, job: str, precision: Precision, mixed: bool) -> ModelTable:
        """Return the sums and times of a job's model in one precision."""
        key = (job, precision, mixed)
        if key not in self._tables:
            graph = self.models[job]
            self._tables[key] = ModelTable(self.priced_cluster, graph, precision, mixed, self.efficiency, self.profile)
        return self._tables[key]

    def small(self, plan: Plan, most: int) -> tuple[Plan, Fabric, Folded | None]:
        """Return the plan to play for this one, its fabric, and how it was folded.

        Only a plan of more than `most` devices is folded, if it consists of copies; otherwise it is played itself.
        """
        measured = self.profile is not None and self.profile.collectives  # then plans are not folded
        many = len(self.cluster.devices) > most and not measured and len(_used(plan)) > most
        folded = self._folder.fold(plan) if many else None
        if folded is None:
            if many:
                _check_playable("sync messages", _ring_messages(plan), _MOST_MESSAGES)
            return plan, self.fabric(plan), None
        hosts, copies = folded.kept_hosts()
        names = [self._folder.hosts[host] for host in hosts]
        if (hosts, copies) not in self._fabrics:
            self._keep((hosts, copies), folded_fabric(self.priced_cluster, names, copies, self._costs))
        base, senders = self._fabrics[hosts, copies], [folded.senders.get(name, 1) for name in names]
        return folded.plan, with_copies(base, folded.kept, folded.copies, senders, folded.rounds), folded

    def fabric(self, plan: Plan) -> Fabric:
        """Return the network as this plan uses it: of a large cluster only the hosts that the plan uses."""
        hosts = self._hosts(plan) if len(self.cluster.devices) > PLAYED_WHOLE else None
        if (plan.via, hosts) not in self._fabrics:
            there = {v.between: v.hosts for v in plan.via}
            back = {v.between[::-1]: v.hosts[::-1] for v in plan.via}
            all_hosts = self.priced_cluster.hosts
            own = all_hosts if hosts is None else {name: all_hosts[name] for name in hosts}
            _check_playable("devices", sum(sum(host.devices.values()) for host in own.values()), _MOST)
            cluster = self.priced_cluster if hosts is None else replace(self.priced_cluster, hosts=own)
            self._keep((plan.via, hosts), fabric(cluster, there | back, self._costs))
        return self._fabrics[plan.via, hosts]

    def _keep(self, key: tuple[object, ...], made: Fabric) -> None:
        while len(self._fabrics) >= _KEPT_FABRICS:
            del self._fabrics[next(iter(self._fabrics))]
        self._fabrics[key] = made

    def _hosts(self, plan: Plan) -> tuple[str, ...]:
        """Return the hosts that a plan names, in the cluster's order."""
        named = {self.cluster.devices[name].host for name in _used(plan)}
        named.update(host for via in plan.via for host in (*via.between, *via.hosts))
        return tuple(name for name in self.cluster.hosts if name in named)

    @cached_property
    def _folder(self) -> Folder:
        return Folder(self.priced_cluster)

    @cached_property
    def _costs(self) -> Mapping[str, DeviceCosts]:
        return self.profile.device_costs if self.profile is not None else {}

    @cached_property
    def context(self) -> Mapping[str, float]:
        """Return the bytes that a worker takes before its model, by kind of its device."""
        costs = self.profile.device_costs if self.profile is not None else {}
        return {kind: context_bytes(kind, costs.get(kind)) for kind in self.cluster.kinds}

    def prepare(self, part: Pipeline | Pool, net: Fabric) -> Prepared | PreparedPool:
        """Return a part as arrays: who computes what in which order, and what is sent."""
        if isinstance(part, Pool):
            tables = [self.table(job.job.name, job.precision, job.job.mixed) for job in part.jobs]
            return prepare_pool(part, tables, self.cluster, net)
        table = self.table(part.job.name, part.precision, part.job.mixed)
        flat = flatten(part, table, self.priced_cluster, net)
        runs = merge_stages(flat.shape)
        links = stage_links(flat.shape.first, table.tensors)
        forward = run_edges(flat.shape, runs, links[0], links[1], False)
        backward = run_edges(flat.shape, runs, links[2], links[3], True)
        rules = flat.micro_batches, flat.schedule, flat.ahead
        orders = make_orders(flat.shape, runs, forward, backward, len(net.devices), *rules)
        return Prepared(flat, runs, forward, backward, orders)

    def _write(
        self, parts: Sequence[Prepared | PreparedPool], net: Fabric, out: TaskList
    ) -> tuple[TaskList, tuple[str, ...]]:
        """Write all parts as tasks, in a longer list if this one is too short, and return the list and the jobs."""
        while True:
            out.size[:] = 0
            out.size[4] = net.lanes
            jobs: list[str] = []
            for part in parts:
                out.size[2] = len(jobs)
                if isinstance(part, PreparedPool):
                    write_pool(out, net, part)
                    jobs.extend(part.jobs)
                else:
                    lower(
                        out, net.wires, part.flat.shape, part.runs, part.forward, part.backward, part.orders,
                        part.flat.costs, part.flat.syncs, part.flat.micro_batches,
                    )  # fmt: skip
                    jobs.append(part.flat.job)
            if not out.short:
                return out, tuple(jobs)
            out = new_list(int(out.size[0] * 1.5), int(out.size[1] * 1.5))

    def _memory(
        self, parts: Sequence[Prepared | PreparedPool], net: Fabric
    ) -> tuple[dict[str, float], tuple[Shortage, ...]]:
        """Return the peak bytes of every device that is used, and the memory that is missing."""
        peak, spilled = np.zeros(len(net.devices)), np.zeros(len(net.hosts))
        caps: dict[int, float] = {}
        for part in parts:
            if isinstance(part, PreparedPool):
                peak[part.devices] += part.peak
                caps.update(zip(part.devices.tolist(), part.caps, strict=True))
                spilled[net.wires.host_of[part.devices[0]]] += part.spilled
                continue
            for q, group in enumerate(part.flat.groups):
                for device in group:
                    peak[device] += part.flat.state[q]
                    spilled[net.wires.host_of[device]] += part.flat.spilled[q]
            add_activations(part, peak, net)
        memory, short = {}, []
        for d in np.flatnonzero(peak).tolist():
            name = net.devices[d]
            kind = self.cluster.kind_of(name)
            memory[name] = float(peak[d]) + self.context[kind.name]
            limit = caps.get(d, kind.memory)
            if memory[name] > limit:
                short.append(Shortage(name, memory[name], limit))
        for h in np.flatnonzero(spilled).tolist():
            host = self.cluster.hosts[net.hosts[h]]
            if spilled[h] > host.memory:
                short.append(Shortage(f"host {host.name}", float(spilled[h]), host.memory))
        return memory, tuple(short)

    def _of_all(
        self, folded: Folded, memory: Mapping[str, float], shortages: Sequence[Shortage]
    ) -> tuple[dict[str, float], tuple[Shortage, ...]]:
        """Return the memory and shortages of all copies' devices and hosts, each as the kept copy that it is like."""
        short = {shortage.where: shortage for shortage in shortages}
        more: list[Shortage] = []
        everywhere: dict[str, float] = {}
        for names, rows in (
            (self._folder.names, folded.devices),
            ([f"host {name}" for name in self._folder.hosts], folded.hosts),
        ):
            for row in rows.T.tolist():
                for own, like in zip(row, folded.like, strict=True):
                    where = names[row[like]]
                    if where in memory:
                        everywhere[names[own]] = memory[where]
                    if where in short:
                        more.append(short[where]._replace(where=names[own]))
        return everywhere, tuple(more)


def _used(plan: Plan) -> set[str]:
    """Return the devices that a plan names."""
    found: set[str] = set()
    for part in plan.parts:
        if isinstance(part, Pool):
            found.update(part.devices)
        else:
            found.update(device for stage in part.stages for replica in stage.replicas for device in replica.devices)
            found.update(sync.root for sync in part.syncs if sync.root is not None)
    return found


def _ring_messages(plan: Plan) -> int:
    return sum(len(sync.participants) ** 2 for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs)


def _check_playable(what: str, found: int, most: int) -> None:
    if found > most:
        raise PlanError(
            "size", "the plan is too large to be simulated device by device", where="plan", found=f"{found:,} {what}",
            expected=f"at most {most:,}, or copies of a smaller plan",
        )  # fmt: skip


def _run(out: TaskList, net: Fabric) -> Times:
    """Return when each task starts and ends; raise PlanError if the plan cannot run."""
    if out.size[3]:
        raise PlanError(
            "reachable", "some devices must talk but have no route", found=f"{out.size[3]} messages without a route"
        )
    try:
        return run(out.tasks(), out.lanes, net.network)
    except ValueError as problem:
        raise PlanError(
            "deadlock",
            "replicas that share their state wait for each other",
            found=str(problem),
            expected="replicas of a sharded-all stage whose devices go through their stages in the same order",
        ) from None


def _senders(parts: Sequence[Prepared | PreparedPool]) -> npt.NDArray[np.int32]:
    """Return the sending device of every lane between runs, in the order in which these are written."""
    found = [
        part.runs.device[edges.source]
        for part in parts
        if isinstance(part, Prepared)
        for edges in (part.forward, part.backward)
    ]
    return np.concatenate([np.empty(0, np.int32), *found])


def _labels(part: Pipeline | Pool, prepared: Prepared | PreparedPool) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return names of the runs and buckets of a part for people, job by job."""
    if isinstance(part, Pool):
        return [(tuple(f"shard {s.first}..{s.last}" for s in job.shards), ()) for job in part.jobs]
    assert isinstance(prepared, Prepared)
    spans = zip(prepared.runs.first.tolist(), prepared.runs.last.tolist(), strict=True)
    runs = tuple(f"stage {a}" if a == b else f"stages {a}-{b}" for a, b in spans)
    buckets = (sync.bucket for sync, rings in zip(part.syncs, prepared.flat.rings, strict=True) for _ in range(rings))
    return [(runs, tuple(buckets))]


def add_activations(part: Prepared, peak: Floats, net: Fabric) -> None:
    """Add to the bytes of each device all that is not state: activations, the model's buffers, incoming data."""
    flat = part.flat
    activations = activation_peaks(
        part.runs, part.orders, part.forward, part.backward, flat.activations, len(peak), flat.micro_batches
    )
    peak += activations
    for first, member in {(group[0], device) for group in flat.groups for device in group[1:]}:
        peak[member] += activations[first]
    if flat.buffers:
        peak[list({device for group in flat.groups for device in group})] += flat.buffers
    if len(flat.syncs.how):
        peak += scratch_bytes(flat.syncs, net.wires)
    for device, size in flat.rooms.items():
        peak[device] += size


@compiled
def ends_by_part(end: Floats, part: npt.NDArray[np.int32], parts: int) -> Floats:
    """Return when the last task of each part ends."""
    last = np.zeros(parts)
    for t in range(len(end)):
        last[part[t]] = max(last[part[t]], end[t])
    return last
