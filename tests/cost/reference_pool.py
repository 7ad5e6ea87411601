"""Pools of the judge (`tests/cost/reference_plan.py`): units, the devices that take them, their tasks and bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.cost.plan_arrays import HOST_ADAM
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import Profile
from isthmus.plan.policy import POLICIES, ReadyJob
from isthmus.plan.resolve import ResolvedPool
from isthmus.plan.types import PoolJob
from tests.cost.reference_costs import WIDTH, computing, state_of
from tests.cost.reference_profile import block_times
from tests.cost.reference_tasks import Net, Task, Writer

__all__ = ["PoolWriter"]


@dataclass(eq=False)
class Unit:
    """Forward or backward of one shard of one job; bytes."""

    job: int
    shard: int
    back: bool
    alone: bool  # the last shard: its forward and backward are one unit
    seconds: list[float]  # by device of the pool
    memory: list[float]  # by device of the pool
    elements: float
    weight: float
    gradient: float
    entering: float  # what it gets from the unit before: its inputs, or its outputs' gradient
    kept: float  # what stays in host memory from the shard's forward to its backward


class PoolWriter:
    """One step of every job of a pool: units on the devices that the policy gave them."""

    def __init__(self, part: ResolvedPool, net: Net, tasks: list[Task], profile: Profile) -> None:
        self.part, self.pool, self.net, self.tasks, self.cluster = part, part.pool, net, tasks, net.cluster
        self.profile = profile
        self.chains = [self.units(j) for j in range(len(self.pool.jobs))]
        self.taken = list(self.assign())

    def units(self, j: int) -> list[Unit]:
        """Forwards of all shards but the last, then backwards of all; the last shard's forward is in its backward."""
        shards = range(len(self.part.shards[j]))
        return [self.unit(j, s, False) for s in shards[:-1]] + [self.unit(j, s, True) for s in reversed(shards)]

    def unit(self, j: int, s: int, back: bool) -> Unit:
        job, graph = self.pool.jobs[j], self.part.graphs[j]
        first, last = self.part.shards[j][s]
        alone = s == len(self.part.shards[j]) - 1
        names = dict.fromkeys(name for block in graph.blocks[first : last + 1] for name in block.parameters)
        elements = float(sum(graph.parameter[name].elements for name in names))
        weight, gradient, _ = self.state(job, graph)
        inputs, outputs = self.inputs(job, graph, first, last), self.gradients(job, graph, first, last)
        widest = max(self.width(job, device) for device in self.pool.devices)
        saved = job.job.batch * sum(self.saved(graph, first, last, widest))
        seconds, memory = [], []
        for device in self.pool.devices:
            seconds.append(self.seconds(job, graph, device, range(first, last + 1), back, job.recompute or alone))
            width = self.width(job, device)
            size = elements * (weight + (4.0 if width > WIDTH[job.precision] else 0.0) + (gradient if back else 0.0))
            each = self.saved(graph, first, last, width)
            held = sum(each) if back or not job.recompute else max(each)
            space = width * max(block.workspace for block in graph.blocks[first : last + 1])
            boundary = (outputs if back and not alone else 0.0) + (
                inputs if not back or alone or job.recompute else 0.0
            )
            memory.append(size + job.job.batch * (held + space) + boundary + 4.0 * graph.buffers)
        return Unit(
            j, s, back, alone, seconds, memory, elements, elements * weight, elements * gradient,
            outputs if back and not alone else inputs, 0.0 if alone else inputs if job.recompute else saved,
        )  # fmt: skip

    def seconds(self, job: PoolJob, graph: BlockGraph, device: str, blocks: range, back: bool, again: bool) -> float:
        rows = [
            block_times(self.profile, graph, b, self.cluster, (device,), job.precision, job.job.mixed, job.job.batch)
            for b in blocks
        ]
        forward, backward = sum(row[0] for row in rows), sum(row[1] for row in rows)
        return backward + (forward if again else 0.0) if back else forward

    def width(self, job: PoolJob, device: str) -> int:
        """Bytes of a computed element on a device."""
        return computing(self.cluster.kind_of(device), job.precision, job.job.mixed)[1]

    def saved(self, graph: BlockGraph, first: int, last: int, width: int) -> list[float]:
        """Bytes per sample that each block saves; the loss keeps the outputs in fp32."""
        each = [width * block.saved for block in graph.blocks[first : last + 1]]
        each[-1] += 4 * graph.outputs if last == len(graph.blocks) - 1 else 0.0
        return each

    def inputs(self, job: PoolJob, graph: BlockGraph, first: int, last: int) -> float:
        """Bytes of all that enters a shard, in the job's width."""
        return sum(
            (t.elements * job.job.batch + t.fixed) * (t.width or WIDTH[job.precision])
            for t in graph.tensors
            if t.source < first and any(first <= target <= last for target in t.targets)
        )

    def gradients(self, job: PoolJob, graph: BlockGraph, first: int, last: int) -> float:
        """Bytes of the gradient of all that leaves a shard."""
        return sum(
            (t.elements * job.job.batch + t.fixed) * (t.width or WIDTH[job.precision])
            for t in graph.tensors
            if t.grad and first <= t.source <= last < max(t.targets)
        )

    def assign(self) -> Iterator[tuple[Unit, int]]:
        """The device that is free first takes the unit that the policy picks, on expected times (to nine digits)."""
        free = [0.0] * len(self.pool.devices)
        waiting = {j: list(chain) for j, chain in enumerate(self.chains)}
        ready, last = dict.fromkeys(waiting, 0.0), dict.fromkeys(waiting, -1)
        while waiting := {j: chain for j, chain in waiting.items() if chain}:
            d = free.index(min(free))
            now = max(free[d], min(ready[j] for j in waiting))
            here = [j for j in waiting if ready[j] <= now]
            left = {j: float(f"{sum(unit.seconds[0] for unit in waiting[j]):.9g}") for j in here}
            offers = [ReadyJob(j, ready[j], left[j], last[j] == d) for j in here]
            j = here[POLICIES[self.pool.policy].pick(offers)]
            unit = waiting[j].pop(0)
            bus = self.cluster.host_of(self.pool.devices[d]).bus
            idle = now - free[d]  # the load already ran in it
            exposed = 0.0 if self.pool.buffered else max(0.0, unit.weight / bus - idle)
            moved = unit.kept if unit.back or not self.pool.jobs[j].recompute else 0.0
            free[d] = now + exposed + moved / bus + unit.seconds[d]
            ready[j], last[j] = free[d], d
            yield unit, d

    def write(self) -> None:
        """Weights and what the forward kept come in, and the boundary tensor where it is not there.

        The input of a shard that recomputes goes to the host when it is made; what another saves goes there after its
        forward, before the device computes on and, unbuffered, loads on. A backward's gradients go to the host.
        """
        computed: dict[int, list[Task]] = {d: [] for d in range(len(self.pool.devices))}
        blocked: dict[int, Task | None] = {}  # saved activations that are leaving a device
        before: dict[int, tuple[Task, int]] = {}
        kept: dict[tuple[int, int], Task | None] = {}
        for unit, d in self.taken:
            job = self.pool.jobs[unit.job]
            w = Writer(self.net, job.job.name, self.tasks)
            device, back = self.pool.devices[d], 2 if self.pool.buffered else 1
            room = computed[d][-back] if len(computed[d]) >= back else None
            still = None if self.pool.buffered else blocked.get(d)
            waits: list[Task | None] = [w.bus("load", device, unit.weight, room, still)]
            if unit.back and not unit.alone:
                waits.append(w.bus("load", device, unit.kept, kept[unit.job, unit.shard], *computed[d][-1:]))
            kind = "backward" if unit.back else "forward"
            task = w.fixed(kind, ("compute", device), unit.seconds[d], *waits, *computed[d][-1:], blocked.pop(d, None))
            keeps = not unit.back and job.recompute
            stored = None
            if unit.job in before:
                previous, there = before[unit.job]
                if there != d or keeps:
                    stored = w.bus("store", self.pool.devices[there], unit.entering, previous)
                task.after.append(w.bus("load", device, unit.entering, stored) if there != d else previous)
            if keeps:
                kept[unit.job, unit.shard] = stored
            elif not unit.back:
                kept[unit.job, unit.shard] = blocked[d] = w.bus("store", device, unit.kept, task)
            if unit.back:
                host = self.cluster.host_of(device)
                out = w.bus("store", device, unit.gradient, task)
                w.fixed("host update", ("processor", host.name), unit.elements / (HOST_ADAM * host.cores), out)
            computed[d].append(task)
            before[unit.job] = task, d

    def memory(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of each device its largest unit and, buffered, the largest weights beside it; of the host all it keeps."""
        ahead = max(unit.weight for unit, _ in self.taken) if self.pool.buffered else 0.0
        devices: dict[str, float] = {}
        for d, device in enumerate(self.pool.devices):
            units = [unit.memory[d] for unit, where in self.taken if where == d]
            if units or ahead:
                devices[device] = max(units, default=0.0) + ahead
        state = sum(
            graph.elements * sum(self.state(job, graph)) + 4.0 * graph.buffers
            for job, graph in zip(self.pool.jobs, self.part.graphs, strict=True)
        )
        kept = sum(unit.kept for unit, _ in self.taken if not unit.back)
        return devices, {self.cluster.host_of(self.pool.devices[0]).name: state + kept}

    def state(self, job: PoolJob, graph: BlockGraph) -> tuple[float, float, float]:
        """Bytes per element; of a pruned job, exempt tensors count as kept."""
        if job.kept is None:
            return state_of(job.precision, job.job.optimizer, None)
        uses = [name for block in graph.blocks for name in block.parameters if graph.parameter[name].linear]
        pruned = sum(graph.parameter[name].elements for name in uses)
        return state_of(job.precision, job.job.optimizer, 1.0 - (1.0 - job.kept) * pruned / graph.elements)
