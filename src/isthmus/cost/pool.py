"""A pool in numbers: one step of each of its jobs, unit by unit, on whichever device is free.

A job of s shards has 2s - 1 units a step: forwards of all shards but the last, forward and backward of the last in one,
backwards of the others. A backward recomputes its shard's forward from the shard's saved input. All state lives in host
memory: a unit loads its shard's weights and its input over the bus, a backward stores the shard's gradients, the host
updates. A unit that follows on the same device finds its boundary tensor there. With `buffered` the next unit's
weights are loaded while the present one computes.

Which device takes which unit is decided by the pool's policy as devices become free, on expected times (compute plus
exposed loading); the event engine then plays those choices with everything else that uses the buses and hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster
from isthmus.cost.emit import BACKWARD, FORWARD, HOST_UPDATE, LOADING, STORING, TaskList, edge, task
from isthmus.cost.flat import HOST_ADAM
from isthmus.cost.memory import StateBytes, state_bytes
from isthmus.cost.network import COMPUTE, LANE_KINDS, LOAD, STORE, Fabric
from isthmus.cost.tables import ALONE, ModelTable
from isthmus.plan.policy import POLICIES, Candidate
from isthmus.plan.types import Pool, PoolJob

__all__ = ["PreparedPool", "Unit", "prepare_pool", "units_of", "write_pool"]


class Unit(NamedTuple):
    """Forward or backward of one shard; `seconds` by device of the pool."""

    job: int
    shard: int
    backward: bool
    seconds: tuple[float, ...]
    weights: float  # bytes loaded
    gradients: float  # bytes stored
    boundary: float  # bytes of its input (or of its output's gradient)
    update: float  # elements the host updates afterwards
    memory: float  # bytes on the device while it runs


class PreparedPool(NamedTuple):
    """A pool with the device of every unit."""

    jobs: tuple[str, ...]
    units: tuple[Unit, ...]  # in the order they were taken
    taken: tuple[int, ...]  # position in `devices` of each
    devices: npt.NDArray[np.int32]
    caps: tuple[float, ...]
    peak: npt.NDArray[np.float64]  # bytes on each device
    spilled: float  # bytes in the memory of its hosts, together
    buffered: bool
    cores: tuple[int, ...]  # of each device's host


def prepare_pool(pool: Pool, tables: Sequence[ModelTable], cluster: Cluster, net: Fabric) -> PreparedPool:
    """Cut every job into units and let the policy place them."""
    chains = [
        units_of(job, number, table, pool, cluster)
        for number, (job, table) in enumerate(zip(pool.jobs, tables, strict=True))
    ]
    units, taken = _assign(chains, pool, cluster)
    peak = np.zeros(len(pool.devices))
    for unit, device in zip(units, taken, strict=True):
        peak[device] = max(peak[device], unit.memory)
    if pool.buffered:
        peak += max(unit.weights for unit in units)
    spilled = sum(table.graph.elements * _state(job, table).total for job, table in zip(pool.jobs, tables, strict=True))
    return PreparedPool(
        jobs=tuple(job.job.name for job in pool.jobs),
        units=tuple(units),
        taken=tuple(taken),
        devices=np.array([net.number[name] for name in pool.devices], np.int32),
        caps=pool.caps,
        peak=peak,
        spilled=spilled,
        buffered=pool.buffered,
        cores=tuple(cluster.host_of(name).cores for name in pool.devices),
    )


def _state(job: PoolJob, table: ModelTable) -> StateBytes:
    """Bytes per trained element of a job's model, pruned or not."""
    span = table.span(0, len(table.graph.blocks) - 1)
    pruned = (1.0 - (1.0 if job.kept is None else job.kept)) * span.pruned
    kept = 1.0 - pruned / span.elements if span.elements else 1.0
    return state_bytes(job.precision, job.job.optimizer, kept, job.kept is not None)


def units_of(job: PoolJob, number: int, table: ModelTable, pool: Pool, cluster: Cluster) -> list[Unit]:
    """The 2s - 1 units of one step of a job, in order."""
    ranges = [(table.graph.by_name[shard.first], table.graph.by_name[shard.last] + 1) for shard in job.shards]
    forwards = [_unit(job, number, s, False, ranges, table, pool, cluster) for s in range(len(ranges) - 1)]
    backwards = [_unit(job, number, s, True, ranges, table, pool, cluster) for s in reversed(range(len(ranges)))]
    return forwards + backwards


def _unit(
    job: PoolJob, number: int, s: int, back: bool, ranges: list[tuple[int, int]], table: ModelTable, pool: Pool,
    cluster: Cluster,
) -> Unit:  # fmt: skip
    a, b = ranges[s]
    batch, sums = job.job.batch, table.sums
    elements = table.span(a, b - 1).elements
    seconds = []
    for name in pool.devices:
        times = table.seconds(cluster.devices[name].kind, ALONE, batch)
        forward, backward = times[:, b] - times[:, a]
        last = s == len(ranges) - 1
        seconds.append(float(forward if not back else backward + (forward if job.recompute or last else 0.0)))
    per = _state(job, table)
    entering = float(sums.inputs[a + 1] - sums.inputs[a]) * batch
    live = float(sums.saved[b] - sums.saved[a] if back or not job.recompute else sums.block_saved[a:b].max()) * batch
    return Unit(
        job=number, shard=s, backward=back, seconds=tuple(seconds), weights=elements * per.weight,
        gradients=elements * per.gradient if back else 0.0, boundary=entering, update=elements if back else 0.0,
        memory=elements * (per.weight + (per.gradient if back else 0.0)) + live + entering,
    )  # fmt: skip


def _assign(chains: list[list[Unit]], pool: Pool, cluster: Cluster) -> tuple[list[Unit], list[int]]:
    """List scheduling: the device that is free first takes the unit that the policy picks."""
    policy = POLICIES[pool.policy]
    bus = [cluster.host_of(name).bus for name in pool.devices]
    free = [0.0] * len(pool.devices)
    at = [0] * len(chains)
    ready = [0.0] * len(chains)
    last = [-1] * len(chains)
    left = [sum(unit.seconds[0] for unit in chain) for chain in chains]
    units: list[Unit] = []
    taken: list[int] = []
    while any(at[j] < len(chain) for j, chain in enumerate(chains)):
        device = min(range(len(free)), key=lambda d: (free[d], d))
        waiting = [j for j, chain in enumerate(chains) if at[j] < len(chain)]
        now = max(free[device], min(ready[j] for j in waiting))
        here = [j for j in waiting if ready[j] <= now]
        pick = policy.pick([Candidate(j, ready[j], left[j], last[j] == device) for j in here])
        j = here[pick]
        unit = chains[j][at[j]]
        loading = unit.weights / bus[device]
        exposed = max(0.0, loading - (now - free[device])) if not pool.buffered else 0.0
        free[device] = now + exposed + unit.seconds[device]
        ready[j], last[j] = free[device], device
        left[j] -= unit.seconds[0]
        at[j] += 1
        units.append(unit)
        taken.append(device)
    return units, taken


def write_pool(out: TaskList, net: Fabric, pool: PreparedPool) -> None:
    """The units as tasks: load, compute, store, update on the host."""
    devices, first_part = len(net.devices), int(out.size[2])
    compute_of = [-1] * len(pool.devices)  # last compute of each device
    before_that = [-1] * len(pool.devices)
    chain: dict[int, tuple[int, int]] = {}  # job -> its last task and where
    for unit, where in zip(pool.units, pool.taken, strict=True):
        d = int(pool.devices[where])
        out.size[2] = first_part + unit.job
        load, store = int(net.wires.bus[0, d]), int(net.wires.bus[1, d])
        weights = task(out, LOAD * devices + d, 0.0, unit.weights, load, LOADING, unit.shard, 0)
        edge(out, before_that[where] if pool.buffered else compute_of[where], weights)
        kind = BACKWARD if unit.backward else FORWARD
        compute = task(out, COMPUTE + d, unit.seconds[where], 0.0, -1, kind, unit.shard, 0)
        edge(out, weights, compute)
        edge(out, compute_of[where], compute)
        previous, previous_device = chain.get(unit.job, (-1, where))
        if previous >= 0 and previous_device != where:
            leaving = int(pool.devices[previous_device])
            out_of = task(
                out,
                STORE * devices + leaving,
                0.0,
                unit.boundary,
                int(net.wires.bus[1, leaving]),
                STORING,
                unit.shard,
                0,
            )
            edge(out, previous, out_of)
            into = task(out, LOAD * devices + d, 0.0, unit.boundary, load, LOADING, unit.shard, 0)
            edge(out, out_of, into)
            edge(out, into, compute)
        else:
            edge(out, previous, compute)
        if unit.backward:
            gradients = task(out, STORE * devices + d, 0.0, unit.gradients, store, STORING, unit.shard, 0)
            edge(out, compute, gradients)
            lane = LANE_KINDS * devices + int(net.wires.host_of[d])
            seconds = unit.update / (HOST_ADAM * pool.cores[where])
            edge(out, gradients, task(out, lane, seconds, 0.0, -1, HOST_UPDATE, unit.shard, 0))
        chain[unit.job] = (compute, where)
        before_that[where], compute_of[where] = compute_of[where], compute
    out.size[2] = first_part
