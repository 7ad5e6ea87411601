"""A pool in numbers: one step of each of its jobs, unit by unit, on whichever device is free.

A job of s shards has 2s - 1 units a step: the forwards of all shards but the last, the forward and backward of the last
in one, and the backwards of the others. All devices are on one host, and all state lives in its memory: a unit loads
its shard's weights over the bus, a backward stores the shard's gradients, and the host updates. With `buffered` the
next unit's weights are loaded while the present unit computes.

Between units, a forward (and the last shard's unit) takes the shard's inputs, and a backward takes the gradient of its
outputs. A unit that follows on the same device finds them there; otherwise they go out over one bus and in over the
other. From a shard's forward to its backward the host keeps the following, which the backward loads over the bus once
its device is free:

- with `recompute` the shard's inputs, stored by the device that made them; the backward computes the forward again;
- otherwise all that the forward saves, stored after it. The device computes on (and, where not `buffered`, loads the
  next weights) when that is out, so it never holds the saved tensors of two units.

The pool's policy decides which device takes which unit as devices become free, on expected times (compute, exposed
loading of weights, loading what was kept, storing what was saved). The event engine then plays those choices with
everything else that uses the buses and hosts. A unit's tasks are written in the order weights, what was kept,
computing, boundary, what was saved, gradients, update.

The memory of a running unit consists of the weights (and an fp32 copy where the kind computes in fp32), a backward's
gradients, what the shard saves (or, of a forward that is computed again, what its largest block saves), the largest
workspace, the boundary (and a recomputing backward's inputs), and the model's buffers. With `buffered` the largest
weights of any unit come on top. Boundaries have the job's width, and what is saved has the device's width; in host
memory it has that of the pool's widest device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import HOST_ADAM
from isthmus.cost.memory import StateBytes, state_bytes
from isthmus.cost.network import COMPUTE, LANE_KINDS, LOAD, STORE, Fabric
from isthmus.cost.tables import ALONE, ModelTable
from isthmus.cost.task_list import BACKWARD, FORWARD, HOST_UPDATE, LOADING, STORING, TaskList, edge, task
from isthmus.plan.policy import POLICIES, ReadyJob
from isthmus.plan.types import Pool, PoolJob

__all__ = ["PreparedPool", "Unit", "prepare_pool", "units_of", "write_pool"]


class Unit(NamedTuple):
    """The forward or backward of one shard, or both of the last shard.

    `seconds` and `memory` have a value for each device of the pool.
    """

    job: int
    shard: int
    backward: bool
    last: bool
    seconds: tuple[float, ...]
    weights: float  # bytes loaded
    gradients: float  # bytes stored
    boundary: float  # bytes that it gets from the unit before
    kept: float  # bytes that the host keeps from the shard's forward to its backward
    recompute: bool  # whether `kept` is its inputs, from which the backward computes the forward again
    update: float  # elements the host updates afterwards
    memory: tuple[float, ...]  # bytes on the device while it runs

    @property
    def moved(self) -> float:
        """Return the bytes over the bus that the device waits for, besides weights and boundary."""
        return self.kept if self.backward or not self.recompute else 0.0


class PreparedPool(NamedTuple):
    """A pool with the device of every unit."""

    jobs: tuple[str, ...]
    units: tuple[Unit, ...]  # in the order they were taken
    taken: tuple[int, ...]  # position in `devices` of each
    devices: npt.NDArray[np.int32]
    caps: tuple[float, ...]
    peak: npt.NDArray[np.float64]  # bytes on each device
    spilled: float  # bytes in its host's memory
    buffered: bool
    cores: int  # of its host


def prepare_pool(pool: Pool, tables: Sequence[ModelTable], cluster: Cluster, net: Fabric) -> PreparedPool:
    """Cut every job into units and let the policy place them."""
    chains = [
        units_of(job, number, table, pool, cluster)
        for number, (job, table) in enumerate(zip(pool.jobs, tables, strict=True))
    ]
    units, taken = _assign(chains, pool, cluster)
    peak = np.zeros(len(pool.devices))
    for unit, device in zip(units, taken, strict=True):
        peak[device] = max(peak[device], unit.memory[device])
    if pool.buffered:
        peak += max(unit.weights for unit in units)
    state = sum(
        table.graph.elements * _state(job).total + table.graph.buffers * 4.0
        for job, table in zip(pool.jobs, tables, strict=True)
    )
    return PreparedPool(
        jobs=tuple(job.job.name for job in pool.jobs),
        units=tuple(units),
        taken=tuple(taken),
        devices=np.array([net.number[name] for name in pool.devices], np.int32),
        caps=pool.caps,
        peak=peak,
        spilled=state + sum(unit.kept for unit in units if not unit.backward),
        buffered=pool.buffered,
        cores=cluster.host_of(pool.devices[0]).cores,
    )


def _state(job: PoolJob) -> StateBytes:
    """Return the bytes per trained element of a job's model, pruned or not."""
    return state_bytes(job.precision, job.job.optimizer, job.kept is not None)


def units_of(job: PoolJob, number: int, table: ModelTable, pool: Pool, cluster: Cluster) -> list[Unit]:
    """Return the 2s - 1 units of one step of a job, in order."""
    ranges = [(table.graph.by_name[shard.first], table.graph.by_name[shard.last]) for shard in job.shards]
    forwards = [_unit(job, number, s, False, ranges, table, pool, cluster) for s in range(len(ranges) - 1)]
    backwards = [_unit(job, number, s, True, ranges, table, pool, cluster) for s in reversed(range(len(ranges)))]
    return forwards + backwards


def _unit(
    job: PoolJob, number: int, s: int, back: bool, ranges: list[tuple[int, int]], table: ModelTable, pool: Pool,
    cluster: Cluster,
) -> Unit:  # fmt: skip
    a, b = ranges[s]
    last = s == len(ranges) - 1
    kinds = [cluster.devices[name].kind for name in pool.devices]
    elements, per = table.span(a, b).elements, _state(job)
    inputs, outputs = _boundaries(table, a, b, job.job.batch)
    widest = table.span(a, b, any(kind in table.wide for kind in kinds))
    boundary = outputs if back and not last else inputs
    resident = boundary + (inputs if back and not last and job.recompute else 0.0) + table.graph.buffers * 4.0
    return Unit(
        job=number, shard=s, backward=back, last=last,
        seconds=tuple(_seconds(job, table, kind, a, b, back, last) for kind in kinds),
        weights=elements * per.weight, gradients=elements * per.gradient if back else 0.0, boundary=boundary,
        kept=0.0 if last else inputs if job.recompute else widest.saved * job.job.batch, recompute=job.recompute,
        update=elements if back else 0.0,
        memory=tuple(_live(job, table, per, kind, a, b, back) + resident for kind in kinds),
    )  # fmt: skip


def _boundaries(table: ModelTable, a: int, b: int, batch: int) -> tuple[float, float]:
    """Return the bytes of all that enters blocks a .. b, and of the gradient of all that leaves them."""
    inputs = outputs = 0.0
    for tensor in table.graph.tensors:
        size = (tensor.elements * batch + tensor.fixed) * (tensor.width or table.width)
        if tensor.source < a and any(a <= target <= b for target in tensor.targets):
            inputs += size
        elif a <= tensor.source <= b and tensor.grad and max(tensor.targets) > b:
            outputs += size
    return inputs, outputs


def _seconds(job: PoolJob, table: ModelTable, kind: str, a: int, b: int, back: bool, last: bool) -> float:
    times = table.seconds(kind, ALONE, job.job.batch)
    forward, backward = times[:, b + 1] - times[:, a]
    return float(forward if not back else backward + (forward if job.recompute or last else 0.0))


def _live(job: PoolJob, table: ModelTable, per: StateBytes, kind: str, a: int, b: int, back: bool) -> float:
    """Return the bytes of weights, gradients and activations of blocks a .. b while a unit of them runs."""
    wide = kind in table.wide
    span = table.span(a, b, wide)
    state = span.elements * (per.weight + (4.0 if wide else 0.0) + (per.gradient if back else 0.0))
    saved = span.saved if back or not job.recompute else span.largest_saved
    return state + (saved + span.largest_workspace) * job.job.batch


def _assign(chains: list[list[Unit]], pool: Pool, cluster: Cluster) -> tuple[list[Unit], list[int]]:
    """Place all units by list scheduling: the device that is free first takes the unit that the policy picks.

    Return the units in the order in which they were taken, and the device of each.
    """
    policy = POLICIES[pool.policy]
    bus = cluster.host_of(pool.devices[0]).bus
    free = [0.0] * len(pool.devices)
    at = [0] * len(chains)
    ready = [0.0] * len(chains)
    last = [-1] * len(chains)
    left = [_remaining(chain) for chain in chains]
    units: list[Unit] = []
    taken: list[int] = []
    while any(at[j] < len(chain) for j, chain in enumerate(chains)):
        device = min(range(len(free)), key=lambda d: (free[d], d))
        waiting = [j for j, chain in enumerate(chains) if at[j] < len(chain)]
        now = max(free[device], min(ready[j] for j in waiting))
        here = [j for j in waiting if ready[j] <= now]
        pick = policy.pick([ReadyJob(j, ready[j], left[j][at[j]], last[j] == device) for j in here])
        j = here[pick]
        unit = chains[j][at[j]]
        exposed = max(0.0, unit.weights / bus - (now - free[device])) if not pool.buffered else 0.0
        free[device] = now + exposed + unit.moved / bus + unit.seconds[device]
        ready[j], last[j] = free[device], device
        at[j] += 1
        units.append(unit)
        taken.append(device)
    return units, taken


def _remaining(chain: list[Unit]) -> list[float]:
    """Return the seconds of work left before each unit, rounded to nine digits.

    The policy must see jobs with equal work left as equal.
    """
    sums = accumulate(unit.seconds[0] for unit in reversed(chain))
    return [float(f"{seconds:.9g}") for seconds in sums][::-1]


class _Writer:
    """Writes units as tasks, and knows what each device and each job did last."""

    def __init__(self, out: TaskList, net: Fabric, pool: PreparedPool) -> None:
        self.out, self.net, self.pool, self.devices = out, net, pool, len(net.devices)
        self.computed = [-1] * len(pool.devices)  # last compute of each device
        self.before_that = [-1] * len(pool.devices)
        self.leaving = [-1] * len(pool.devices)  # saved activations on their way out, for which the device waits
        self.chain: dict[int, tuple[int, int]] = {}  # job -> its last task and where
        self.kept: dict[tuple[int, int], int] = {}  # job and shard -> the task that brings what it keeps to the host

    def load(self, where: int, size: float, shard: int, *after: int) -> int:
        d = int(self.pool.devices[where])
        return self._bus(LOAD * self.devices + d, int(self.net.wires.bus[0, d]), LOADING, size, shard, after)

    def store(self, where: int, size: float, shard: int, *after: int) -> int:
        d = int(self.pool.devices[where])
        return self._bus(STORE * self.devices + d, int(self.net.wires.bus[1, d]), STORING, size, shard, after)

    def _bus(self, lane: int, route: int, kind: int, size: float, shard: int, after: tuple[int, ...]) -> int:
        written = task(self.out, lane, 0.0, size, route, kind, shard, 0)
        for before in after:
            edge(self.out, before, written)
        return written

    def unit(self, unit: Unit, where: int) -> None:
        """Write a unit's tasks: load, compute, store, and update on the host."""
        room = (self.before_that[where],) if self.pool.buffered else (self.computed[where], self.leaving[where])
        loads = [self.load(where, unit.weights, unit.shard, *room)]
        if unit.backward and not unit.last:
            kept = self.kept[unit.job, unit.shard]
            loads.append(self.load(where, unit.kept, unit.shard, kept, self.computed[where]))
        kind = BACKWARD if unit.backward else FORWARD
        d = int(self.pool.devices[where])
        compute = task(self.out, COMPUTE + d, unit.seconds[where], 0.0, -1, kind, unit.shard, 0)
        for before in (*loads, self.computed[where], self.leaving[where], self.boundary(unit, where)):
            edge(self.out, before, compute)
        self.leaving[where] = -1
        if not unit.backward and not unit.recompute:
            self.leaving[where] = self.kept[unit.job, unit.shard] = self.store(where, unit.kept, unit.shard, compute)
        if unit.backward:
            self.update(unit, where, self.store(where, unit.gradients, unit.shard, compute))
        self.chain[unit.job] = (compute, where)
        self.before_that[where], self.computed[where] = self.computed[where], compute

    def boundary(self, unit: Unit, where: int) -> int:
        """Return the task after which the result of the unit before is on this unit's device.

        A forward that is computed again also leaves its inputs with the host.
        """
        previous, there = self.chain.get(unit.job, (-1, where))
        keeps = not unit.backward and unit.recompute
        stored = -1
        if previous >= 0 and (there != where or keeps):
            stored = self.store(there, unit.boundary, unit.shard, previous)
        if keeps:
            self.kept[unit.job, unit.shard] = stored
        return previous if there == where else self.load(where, unit.boundary, unit.shard, stored)

    def update(self, unit: Unit, where: int, gradients: int) -> None:
        """Write the host's update of a shard."""
        lane = LANE_KINDS * self.devices + int(self.net.wires.host_of[self.pool.devices[where]])
        seconds = unit.update / (HOST_ADAM * self.pool.cores)
        edge(self.out, gradients, task(self.out, lane, seconds, 0.0, -1, HOST_UPDATE, unit.shard, 0))


def write_pool(out: TaskList, net: Fabric, pool: PreparedPool) -> None:
    """Write the units as tasks, in the order in which they were taken."""
    first_part, writer = int(out.size[2]), _Writer(out, net, pool)
    for unit, where in zip(pool.units, pool.taken, strict=True):
        out.size[2] = first_part + unit.job
        writer.unit(unit, where)
    out.size[2] = first_part
