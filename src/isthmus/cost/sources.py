"""Where the times of a plan come from: measured, between measured ones, or from the catalog."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cost.network import Fabric
from isthmus.cost.plan_arrays import Flat, flatten
from isthmus.cost.profiled import ALONE, ESTIMATED
from isthmus.cost.simulate import PLAYED_WHOLE, Simulator
from isthmus.cost.tables import ModelTable
from isthmus.cost.task_types import DUPLICATE
from isthmus.plan.types import Pipeline, Plan, Pool

__all__ = ["Sources", "TimesUsed", "times_used"]

Ints = npt.NDArray[np.int32]


class Sources(NamedTuple):
    """The numbers of times that were measured, interpolated, or taken from the catalog (syncs: from the links)."""

    measured: int = 0
    interpolated: int = 0
    estimated: int = 0

    @property
    def total(self) -> int:
        """Return the number of all times."""
        return sum(self)


class TimesUsed(NamedTuple):
    """The times that a plan uses: of each block x kind x samples x group, and of each sync that sends."""

    blocks: Sources
    syncs: Sources
    known: bool  # True if the profile says anything of the plan's models on this cluster, or if there is none
    overheads: tuple[str, ...] = ()  # device kinds of the plan with measurements besides block times; "messages"
    played: tuple[tuple[str, int], ...] = ()  # why syncs lack a measured time, where collectives are known; how many


def times_used(simulator: Simulator, plan: Plan) -> TimesUsed:
    """Return the sources of all times with which the simulator prices a plan."""
    blocks: list[Ints] = [np.empty(0, np.int32)]
    syncs: list[Ints] = [np.empty(0, np.int32)]
    played: Counter[str] = Counter()
    small, net, _ = simulator.small(plan, PLAYED_WHOLE)  # copies have the same times
    for part in small.parts:
        if isinstance(part, Pipeline):
            table = simulator.table(part.job.name, part.precision, part.job.mixed)
            flat = flatten(part, table, simulator.priced_cluster, net)
            blocks.extend(_of_pipeline(flat, table))
            syncs.append(flat.sources[flat.syncs.how != DUPLICATE])
            if simulator.profile is not None and simulator.profile.collectives:
                played.update(_played(part, flat, net))
        else:
            blocks.extend(_of_pool(part, simulator))
    known, overheads = _known(simulator, plan), tuple(_overheads(simulator, plan))
    return TimesUsed(_counted(blocks), _counted(syncs), known, overheads, tuple(played.items()))


def _played(pipeline: Pipeline, flat: Flat, fabric: Fabric) -> Iterator[str]:
    """Yield the reason for each row of syncs that is played on the links."""
    hows = [sync.how for sync, rows in zip(pipeline.syncs, flat.rings, strict=True) for _ in range(rows)]
    rows = flat.syncs
    for row, how in enumerate(hows):
        if flat.sources[row] != ESTIMATED or how == "duplicate":
            continue
        blocks = rows.block[rows.first_block[row] : rows.first_block[row + 1]]
        states = {pipeline.stages[bisect(flat.shape.first, block) - 1].state for block in blocks}
        devices = rows.device[rows.first[row] : rows.first[row + 1]]
        hosts = [fabric.hosts[fabric.wires.host_of[device]] for device in devices]
        if how == "factors":
            yield "factors are not measured"
        elif states != {"replicated"}:
            yield "sharded state is not measured"
        else:
            yield f"no points for {'ring' if how == 'sparse' else how} among {', '.join(hosts)}"


def _overheads(simulator: Simulator, plan: Plan) -> Iterator[str]:
    """Yield the device kinds of the plan, and "messages", if the profile has constants for them."""
    if simulator.profile is None:
        return
    used = dict.fromkeys(device for part in plan.parts for device in _devices(part))
    for kind in dict.fromkeys(simulator.cluster.devices[device].kind for device in used):
        if kind in simulator.profile.device_costs:
            yield kind
    if simulator.profile.network is not None:
        yield "messages"


def _devices(part: Pipeline | Pool) -> tuple[str, ...]:
    if isinstance(part, Pool):
        return part.devices
    return tuple(device for stage in part.stages for replica in stage.replicas for device in replica.devices)


def _counted(marks: list[Ints]) -> Sources:
    return Sources(*np.bincount(np.concatenate(marks), minlength=3).tolist())


def _of_pipeline(flat: Flat, table: ModelTable) -> Iterator[Ints]:
    """Return, for each row of times that is used, the sources of the blocks for which it is used."""
    used = {int(row): np.zeros(len(table.graph.blocks), np.bool_) for row in flat.costs.row.flat}
    for stage, rows in zip(flat.shape.stage, flat.costs.row, strict=True):
        for row in rows.tolist():
            used[row][flat.shape.first[stage] : flat.shape.last[stage] + 1] = True
    return (table.sources(row)[blocks] for row, blocks in used.items())


def _of_pool(pool: Pool, simulator: Simulator) -> Iterator[Ints]:
    """Yield the sources of a pool's times; every device of a pool may take any unit."""
    for job in pool.jobs:
        table = simulator.table(job.job.name, job.precision, job.job.mixed)
        for kind in dict.fromkeys(simulator.cluster.devices[device].kind for device in pool.devices):
            yield table.sources(table.row(kind, ALONE, job.job.batch))


def _known(simulator: Simulator, plan: Plan) -> bool:
    profile, hosts = simulator.profile, simulator.cluster.hosts.keys()
    tables = [simulator.table(item.job.name, item.precision, item.job.mixed) for item in plan.job_parts]
    known = any(table.profiled is not None for table in tables)
    if profile is None or known or any(hosts >= set(time.hosts) for time in profile.collectives):
        return True
    return not profile.blocks and not profile.collectives and any(_overheads(simulator, plan))
