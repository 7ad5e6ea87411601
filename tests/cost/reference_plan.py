"""What a plan costs, again: slow, plain Python on names and lists, the judge of the compiled path.

Written from DESIGN, docs/events.md and the docstrings of `cost` and `plan.schedule`. It shares with the compiled path
only `plan.resolve` (names to numbers, who supplies whom) and the constants of the cost model; the task graph it makes
is played by the event engine, which has a judge of its own (`tests/cost/reference.py`).

    plan ─▶ runs, flows, orders ─▶ Task objects ─▶ arrays ─▶ engine ─▶ Judgement
            (reference_order)      (reference_tasks; pools: reference_pool)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import USUAL
from isthmus.cost.event_engine import run as play
from isthmus.cost.memory import CONTEXT
from isthmus.cost.plan_arrays import HOST_ADAM
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import DeviceCosts, NetworkCosts, Profile
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedPool, ResolvedSync, resolve
from isthmus.plan.types import Plan, Stage
from tests.cost.reference_costs import WIDTH, StageFacts, computing, weights_come
from tests.cost.reference_memory import pipeline_memory
from tests.cost.reference_order import Flows, Run, flows_of, orders_of, runs_of
from tests.cost.reference_pool import PoolWriter
from tests.cost.reference_profile import block_times, sync_seconds
from tests.cost.reference_tasks import Net, Task, Writer, arrays, ring, rounds, server, tree

__all__ = ["Judgement", "judge"]


@dataclass(eq=False)
class Judgement:
    """Seconds by job, memory by device and host, and every task with when it ended."""

    jobs: dict[str, float]
    memory: dict[str, float]
    hosts: dict[str, float]  # bytes spilled to each host
    ends: list[tuple[str, float]]  # kind, end

    @property
    def step_seconds(self) -> float:
        return max(self.jobs.values())


class PipelineWriter:
    """One step of one pipeline as tasks."""

    def __init__(self, resolved: Resolved, part: ResolvedPipeline, w: Writer, profile: Profile) -> None:
        self.part, self.w, self.cluster, self.profile = part, w, w.net.cluster, profile
        self.pipeline, self.graph = part.pipeline, part.graph
        self.names = [device.name for device in resolved.devices]
        self.micro, self.width = self.pipeline.micro_batches, WIDTH[self.pipeline.precision]
        self.runs = runs_of(part, self.names)
        self.forward = flows_of(resolved, part, self.runs, back=False)
        self.backward = flows_of(resolved, part, self.runs, back=True)
        places = {name: (self.cluster.host_of(name).region, self.cluster.host_of(name).name) for name in self.names}
        rules = self.micro, self.pipeline.schedule, self.pipeline.ahead
        self.orders = orders_of(self.runs, self.forward, self.backward, *rules, places)
        self.cuts = {run.number: self.cuts_of(run) for run in self.runs}
        self.parts: dict[tuple[int, str, int, int], list[tuple[int, Task]]] = {}  # of an operation: lowest block, task
        self.streamed: dict[str, list[Task]] = {}  # parts with streamed weights of each device, in order
        self.gates: dict[Task, Task] = {}  # of a part whose weights are gathered: when gathering may start
        self.last: dict[str, Task] = {}
        self.stores: dict[tuple[str, int], list[Task]] = {}  # (device, stage) -> gradients on their way to the host
        self.held: dict[str, int] = {}  # device -> first block of the part whose weights it gathered last
        self.backs: dict[str, list[tuple[int, Task]]] = {}  # its backward parts with such weights: first block, task
        self.updates: dict[str, Task] = {}
        self.settled: dict[str, Task] = {}  # device -> what waits for its syncs
        self.fresh: dict[tuple[str, int], Task] = {}  # (device, stage) -> after which its new weights are there

    def write(self) -> None:
        for device in self.names:
            for u, way, m in self.orders.get(device, ()):
                for k in range(self.runs[u].slices):
                    self.operation(self.runs[u], way, m, k)
        self.messages("activation", "F", self.forward)
        self.messages("gradient", "B", self.backward)
        self.update_all()
        self.totals()
        self.gather_all()
        for sync in self.part.syncs:
            self.sync(sync)

    # Computing.

    def blocks(self, run: Run) -> range:
        return range(self.part.stages[run.copies[0][0]].first, self.part.stages[run.copies[-1][0]].last + 1)

    def stage(self, s: int) -> Stage:
        return self.pipeline.stages[s]

    def cuts_of(self, run: Run) -> set[int]:
        """Blocks at which a part starts: the run's first, where streamed weights come, where buckets become final."""
        cuts = {self.blocks(run)[0]}
        for s, _ in run.copies:
            stage = self.part.stages[s]
            if weights_come(self.stage(s)) == "gathered":
                cuts.add(stage.first)
            elif weights_come(self.stage(s)) == "loaded":
                cuts.update(range(stage.first, stage.last + 1))
        for sync in self.part.syncs:
            if sync.how != "duplicate" and run.device in self.leads(sync):
                cuts.update(self.users(sync, run)[:1])
        return cuts

    def leads(self, sync: ResolvedSync) -> list[str]:
        return [self.names[d] for d in sync.participants]

    def users(self, sync: ResolvedSync, run: Run) -> list[int]:
        """The run's blocks that use a parameter of the bucket."""
        return [b for b in self.blocks(run) if set(self.graph.blocks[b].parameters) & set(sync.parameters)]

    def seconds(self, run: Run, way: str, blocks: range, samples: int) -> float:
        total = 0.0
        for b in blocks:
            precision, mixed = self.pipeline.precision, self.pipeline.job.mixed
            forward, backward = block_times(
                self.profile, self.graph, b, self.cluster, run.devices, precision, mixed, samples
            )
            again = self.stage(self.part.stage_of[b]).recompute
            total += (forward if way == "F" or again else 0.0) + (backward if way == "B" else 0.0)
        return total

    def operation(self, run: Run, way: str, m: int, k: int) -> None:
        """One slice forward or backward, in parts where weights stream in and in the run's last backward."""
        come = weights_come(self.stage(run.copies[0][0]))
        final = way == "B" and m == self.micro - 1 and k == run.slices - 1
        blocks = self.blocks(run)
        starts = sorted(self.cuts[run.number]) if final or come != "resident" else [blocks[0]]
        spans = [range(a, b) for a, b in zip(starts, [*starts[1:], blocks[-1] + 1], strict=True)]
        lo, hi = run.slice(k)
        written = self.parts.setdefault((run.number, way, m, k), [])
        around = self.costs(run.device).action_seconds
        for span in spans if way == "F" else reversed(spans):
            kind = "forward" if way == "F" else "backward"
            seconds = self.seconds(run, way, span, hi - lo) + (0.0 if written else around)
            task = self.w.fixed(kind, ("compute", run.device), seconds, self.last.get(run.device))
            self.last[run.device] = task
            written.append((span[0], task))
            if come != "resident":
                self.stream(run, way, span, task, come)

    def costs(self, device: str) -> DeviceCosts:
        """What its kind needs beside its blocks."""
        kind = self.cluster.devices[device].kind
        return self.w.net.costs.get(kind, DeviceCosts(device=kind))

    def stream(self, run: Run, way: str, span: range, task: Task, come: str) -> None:
        """The weights of one part; they may come while the part before computes, not earlier."""
        earlier = self.streamed.setdefault(run.device, [])
        room = earlier[-2] if len(earlier) > 1 else None
        size = self.weight_bytes(span, len(run.devices))
        if come == "loaded":
            task.after.append(self.w.bus("load", run.device, size, room))
            if way == "B":
                stored = self.w.bus("store", run.device, size, task)
                self.stores.setdefault((run.device, self.part.stage_of[span[0]]), []).append(stored)
        elif size:
            self.ask(run, way, span, task, room)
        else:
            return
        earlier.append(task)

    def ask(self, run: Run, way: str, span: range, task: Task, room: Task | None) -> None:
        """Weights that are not there from the part before are asked for; all others know when the farthest does."""
        if self.held.get(run.device) != span[0]:
            stage = self.part.stages[self.part.stage_of[span[0]]]
            others = [self.names[q.devices[0]] for q in stage.replicas]
            farthest = max(self.w.net.latency(run.device, other) for other in others)
            self.gates[task] = self.w.fixed("gate", None, farthest, room)
        self.held[run.device] = span[0]
        if way == "B":
            self.backs.setdefault(run.device, []).append((span[0], task))

    def weight_bytes(self, blocks: Iterable[int], degree: int) -> float:
        """Weights (or gradients) of some blocks on each device of a group; what is tied among them counts once."""
        split = {name for b in blocks if (t := self.graph.blocks[b].tensor) for name in t.parameters}
        names = dict.fromkeys(name for b in blocks for name in self.graph.blocks[b].parameters)
        size = sum(self.graph.parameter[n].elements / (degree if n in split else 1) for n in names)
        return size * self.width

    # Sending.

    def messages(self, kind: str, way: str, flows: Flows) -> None:
        """For each pair of slices the samples that both have; what does not grow with samples is in every message."""
        for m in range(self.micro):
            for (u, v), (each, always) in flows.items():
                a, b = self.runs[u], self.runs[v]
                for k in range(a.slices):
                    for j in range(b.slices):
                        (lo, hi), (low, high) = a.slice(k), b.slice(j)
                        both = min(hi, high) - max(lo, low)
                        if both > 0:
                            done, waiting = self.parts[u, way, m, k][-1][1], self.parts[v, way, m, j][0][1]
                            size = both * each + always
                            lane = f"{self.w.job} {kind} {u} to {v}"  # a connection for each pair of runs
                            waiting.after.append(self.w.message(kind, lane, a.device, b.device, size, done))

    # Updating.

    def update_all(self) -> None:
        """One update a device after all it computes; spilled state is updated on the host."""
        for device in self.names:
            if device not in self.last:
                continue
            mine = [(s, r) for s, st in enumerate(self.part.stages) for r, q in enumerate(st.replicas)
                    if self.names[q.devices[0]] == device]  # fmt: skip
            here = sum(self.update_seconds(s, r) for s, r in mine if self.stage(s).spill == "none")
            here += self.costs(device).step_seconds
            update = self.updates[device] = self.w.fixed("update", ("compute", device), here, self.last[device])
            for s, r in mine:
                spilled = self.stage(s).spill != "none"
                self.fresh[device, s] = self.host_update(device, s, r, update) if spilled else update

    def host_update(self, device: str, s: int, r: int, update: Task) -> Task:
        stage = self.part.stages[s]
        size = self.weight_bytes(range(stage.first, stage.last + 1), len(stage.replicas[r].devices))
        waits = [update, *self.stores.get((device, s), ())]
        if self.stage(s).spill == "optimizer":
            waits = [self.w.bus("store", device, size, update)]
        lane = ("processor", self.cluster.host_of(device).name)
        host = self.w.fixed("host update", lane, self.update_seconds(s, r), *waits)
        return self.w.bus("load", device, size, host) if self.stage(s).spill == "optimizer" else host

    def update_seconds(self, s: int, r: int) -> float:
        """Read and write master weight and moments, read the gradient: over memory, or by the host's cores."""
        replica, stage = self.part.stages[s].replicas[r], self.stage(s)
        device = self.names[replica.devices[0]]
        facts = StageFacts(self.part, s, self.cluster.kind_of(device))
        elements = facts.elements(len(replica.devices)) * facts.kept
        elements /= 1 if stage.state == "replicated" else len(stage.replicas)
        if stage.spill != "none":
            return elements / (HOST_ADAM * self.cluster.host_of(device).cores)
        optimizer = self.pipeline.job.optimizer
        moments = 8.0 if optimizer.name != "sgd" else 4.0 if optimizer.momentum else 0.0
        usual = self.cluster.kind_of(device).memory_bandwidth * USUAL.memory
        return elements * (12.0 + 2 * moments) / (self.costs(device).update_bandwidth or usual)

    # Knowing.

    def totals(self) -> None:
        """Counts of losses go to the first that has some, and to all; where gradients are measured, lengths likewise.

        A device tells the length when it knows the counts and has computed and synced everything, and after a note that
        the leader has too.
        """
        self.settled = dict(self.updates)
        if len(self.updates) == 1:
            return
        last, s = self.part.stages[-1], len(self.part.stages) - 1
        judges = [next(u for u in self.runs if (s, r) in u.copies) for r in range(len(last.replicas))]
        judges = judges[:1] if last.duplicate else judges
        leader = judges[0].device
        counted = self.w.gate()
        for u in judges:
            done = self.parts[u.number, "F", self.micro - 1, u.slices - 1][-1][1]
            counted.after.append(self.w.note(u.device, leader, done))
        knows = {device: self.w.note(leader, device, counted) for device in self.updates}
        if self.pipeline.job.optimizer.clip is None and self.pipeline.precision != "fp16":
            for device, update in self.updates.items():
                update.after.append(knows[device])
            return
        listens, whole = self.w.gate(), self.w.gate()
        whole.after.append(listens)
        for device, update in self.updates.items():
            if device == leader:
                listens.after += [knows[device], self.last[device]]
                self.settled[device] = listens
            else:
                first, waits = len(self.w.tasks), [knows[device], self.last[device], listens]
                note = self.w.net.latency(leader, device)
                told = self.w.message("totals", None, device, leader, 0.0, *waits, seconds=note)
                whole.after.append(told)
                self.settled[device] = self.w.tasks[first]
            update.after.append(self.w.note(leader, device, whole))

    # Making equal.

    def gather_all(self) -> None:
        """Sharded-all: every part waits until it has the pieces of all its stage's replicas."""
        for s, stage in enumerate(self.part.stages):
            if weights_come(self.stage(s)) != "gathered":
                continue
            copies = [next(u for u in self.runs if (s, r) in u.copies) for r in range(len(stage.replicas))]
            firsts = sorted(c for c in self.cuts[copies[0].number] if stage.first <= c <= stage.last)
            for way in "FB":
                for m in range(self.micro):
                    for k in range(copies[0].slices):
                        for a, b in zip(firsts, [*firsts[1:], stage.last + 1], strict=True):
                            self.gather(copies, [dict(self.parts[u.number, way, m, k])[a] for u in copies], range(a, b))

    def gather(self, copies: list[Run], parts: list[Task], blocks: range) -> None:
        """All who asked get a piece from everybody else, on connections of their own.

        First devices of tensor groups stand for all: between hosts their messages have the bytes of every member's.
        """
        degree = len(copies[0].devices)
        size = self.weight_bytes(blocks, degree) / len(copies)
        for run, task in zip(copies, parts, strict=True):
            for other in copies if task in self.gates else ():
                if other is not run:
                    near = other.device.split("/")[0] == run.device.split("/")[0]
                    sent = size if near else degree * size
                    got = self.w.message("load", None, other.device, run.device, sent, self.gates[task])
                    task.after.append(got)

    def sync(self, sync: ResolvedSync) -> None:
        """Equal tensor groups sync member by member, each its own part; other replicas by their first devices."""
        if sync.how == "duplicate":
            return
        leads, degree = self.leads(sync), self.degree(sync)
        groups = [self.group(sync, lead) for lead in leads]
        for member in range(degree):
            devices = [group[member] for group in groups] if degree > 1 else leads
            size = self.bucket_bytes(sync, degree)
            measured = sync_seconds(self.profile, sync, devices, self.names, self.cluster, size)
            replicated = self.states(sync) == {"replicated"}
            if sync.how == "factors":
                self.factors(sync, leads, devices)
            elif measured is not None and replicated:
                self.reduce(sync, leads, devices, self.as_measured(sync, devices, size, measured))
            else:
                self.reduce(sync, leads, devices, size)
            if "sharded-optimizer" in self.states(sync):
                self.gather_new(sync, leads, devices, self.bucket_bytes(sync, degree))

    def stages_of(self, sync: ResolvedSync) -> list[int]:
        users = (b for b, block in enumerate(self.graph.blocks) if set(block.parameters) & set(sync.parameters))
        return list(dict.fromkeys(self.part.stage_of[b] for b in users))

    def states(self, sync: ResolvedSync) -> set[str]:
        """How the stages that use the bucket hold their state."""
        return {self.stage(s).state for s in self.stages_of(sync)}

    def gather_new(self, sync: ResolvedSync, leads: list[str], devices: list[str], size: float) -> None:
        """Each participant has updated its piece of the weights: the pieces go around."""
        ready = []
        for lead in leads:
            ready.append(self.w.gate(*(self.fresh[lead, s] for s in self.stages_of(sync) if (lead, s) in self.fresh)))
        rounds(self.w, "load", devices, ready, size / len(devices), sync.segments, len(devices) - 1)

    def degree(self, sync: ResolvedSync) -> int:
        degrees = {len(u.devices) for u in self.runs if self.users(sync, u)}
        return degrees.pop() if len(degrees) == 1 else 1

    def group(self, sync: ResolvedSync, lead: str) -> tuple[str, ...]:
        return next(u.devices for u in self.runs if u.device == lead and self.users(sync, u))

    def bucket_bytes(self, sync: ResolvedSync, degree: int) -> float:
        """Each member's part of the bucket; `sparse` sends kept values only, and exempt tensors are kept whole."""
        split = {name for block in self.graph.blocks if block.tensor for name in block.tensor.parameters}
        kept = next((stage.kept for stage in self.pipeline.stages if stage.kept is not None), 1.0)
        size = 0.0
        for name in sync.parameters:
            parameter = self.graph.parameter[name]
            elements = parameter.elements / (degree if name in split else 1)
            size += elements * (kept if sync.how == "sparse" and parameter.linear else 1.0) * self.width
        return size

    def reduce(self, sync: ResolvedSync, leads: list[str], devices: list[str], size: float) -> None:
        sharded = "sharded-all" in self.states(sync)
        scattered = sharded or self.states(sync) == {"sharded-optimizer"}  # each needs only its piece of the sum
        slices = next(u.slices for u in self.runs if self.users(sync, u))
        turns = [(m, k) for m in range(self.micro) for k in range(slices)] if sharded else [(self.micro - 1, -1)]
        for m, k in turns:
            ready = [self.final(sync, lead, m, k) for lead in leads]
            n = len(devices)
            if sync.how == "server":
                assert sync.root is not None
                done = server(self.w, devices, ready, size, sync.segments, self.names[sync.root])
            elif sync.how == "tree":
                done = tree(self.w, devices, ready, size, sync.segments)
            elif scattered:
                done = rounds(self.w, "sync", devices, ready, size / n, sync.segments, n - 1)
            else:
                done = ring(self.w, devices, ready, size, sync.segments)
            for lead, task in zip(leads, done, strict=True):
                self.settled[lead].after.append(task)
                if sharded:
                    self.make_room(sync, lead, m, k, task)

    def make_room(self, sync: ResolvedSync, lead: str, m: int, k: int, summed: Task) -> None:
        """Gradients of two parts may be there: the next part's but one, or the next part's if it is the same again."""
        for u in self.runs:
            if u.device == lead and (users := self.users(sync, u)):
                own = next((low, task) for low, task in self.parts[u.number, "B", m, k % u.slices] if low <= users[0])
                parts = self.backs[lead]
                at = parts.index(own)
                again = at + 1 < len(parts) and parts[at + 1][0] == own[0]
                for _, waiting in parts[at + 1 : at + 2] if again else parts[at + 2 : at + 3]:
                    waiting.after.append(summed)

    def as_measured(self, sync: ResolvedSync, devices: list[str], size: float, seconds: float) -> float:
        """Bytes for which the sync alone takes so long: the best of five, guessed by lines through two before."""
        taken = {x: self.alone(sync, devices, x) for x in (0.0, size)}
        if seconds <= taken[0.0]:
            return 0.0
        if taken[size] <= taken[0.0]:
            return size
        tried = [size, (seconds - taken[0.0]) / (taken[size] - taken[0.0]) * size]
        while len(taken) < 6 and all(abs(t - seconds) > 1e-6 * seconds for x, t in taken.items() if x):
            a, b = tried[-2:]
            taken[b] = self.alone(sync, devices, b)
            if (slope := (taken[b] - taken[a]) * (b - a)) <= 0:
                break
            line = a + (seconds - taken[a]) * (b - a) ** 2 / slope
            tried.append(float(np.clip(line, b / 4, b * 4)))
        return min((x for x in taken if x), key=lambda x: abs(taken[x] - seconds))

    def alone(self, sync: ResolvedSync, devices: list[str], size: float) -> float:
        """Seconds of the sync if nothing else happens, and everybody is ready at once."""
        w = Writer(self.w.net, "alone", [])
        ready = [w.gate() for _ in devices]
        if sync.how == "server":
            assert sync.root is not None
            server(w, devices, ready, size, sync.segments, self.names[sync.root])
        elif sync.how == "tree":
            tree(w, devices, ready, size, sync.segments)
        else:
            ring(w, devices, ready, size, sync.segments)
        return float(play(*arrays(w.tasks, w.net)).end.max())

    def final(self, sync: ResolvedSync, lead: str, m: int, k: int) -> Task:
        """After which the lead has its gradients of the bucket: the lowest parts of all its runs that use it."""
        tasks = []
        for u in self.runs:
            if u.device == lead and self.users(sync, u):
                parts = self.parts[u.number, "B", m, k % u.slices]
                tasks.append(next(task for low, task in parts if low <= self.users(sync, u)[0]))
        return tasks[0] if len(tasks) == 1 else self.w.gate(*tasks)

    def factors(self, sync: ResolvedSync, leads: list[str], devices: list[str]) -> None:
        """After each backward all its inputs and output gradients go to every other.

        Once a participant has all of a micro-batch from the others it redoes their part of the product; of a weight
        that its tensor group splits, only its own part of that.
        """
        linear = [p.linear for name in sync.parameters if (p := self.graph.parameter[name]).linear]
        size = sum(x.rows * (x.inputs + x.outputs) for x in linear) * self.width
        split = {name for block in self.graph.blocks if block.tensor for name in block.tensor.parameters}
        product = 0.0
        for name in sync.parameters:
            if x := self.graph.parameter[name].linear:
                product += 2.0 * x.rows * x.inputs * x.outputs / (self.degree(sync) if name in split else 1)
        copies = [next(u for u in self.runs if u.device == lead and self.users(sync, u)) for lead in leads]
        rebuilds: list[list[Task]] = []  # of each participant, by micro-batch
        for run, member in zip(copies, devices, strict=True):
            others = sum(u.share for u in copies if u is not run)
            flops, _ = computing(self.cluster.kind_of(run.device), self.pipeline.precision, self.pipeline.job.mixed)
            seconds = others * product / (flops * USUAL.matmul)
            rebuilds.append([self.w.fixed("rebuild", ("compute", member), seconds) for _ in range(self.micro)])
            self.settled[run.device].after.extend(rebuilds[-1])
        for i, run in enumerate(copies):
            for m in range(self.micro):
                for k in range(run.slices):
                    lo, hi = run.slice(k)
                    done = self.parts[run.number, "B", m, k][-1][1]
                    for j in range(len(copies)):
                        if j != i:
                            got = self.w.message("sync", None, devices[i], devices[j], (hi - lo) * size, done)
                            rebuilds[j][m].after.append(got)


def _add(sums: dict[str, float], key: str, more: float) -> None:
    sums[key] = sums.get(key, 0.0) + more


def _met(cluster: Cluster, costs: NetworkCosts) -> Cluster:
    """Links as messages meet them: a part of every rate between hosts, and some seconds more wherever they go."""
    replace, part, more = msgspec.structs.replace, costs.payload, costs.message_seconds
    hosts = {
        h.name: replace(h, nic=h.nic * part, down=h.nic_in * part, latency=h.latency + more)
        for h in cluster.hosts.values()
    }
    links = [
        replace(x, bandwidth=x.bandwidth * part, latency=x.latency + more, trunk=x.trunk and x.trunk * part)
        for x in cluster.links
    ]
    return replace(cluster, hosts=hosts, links=tuple(links))


def judge(plan: Plan, cluster: Cluster, models: Mapping[str, BlockGraph], profile: Profile | None = None) -> Judgement:
    """What the plan costs."""
    known = profile or Profile()
    cluster = _met(cluster, known.network or NetworkCosts())
    resolved = resolve(plan, cluster, models)
    net, tasks = Net(cluster, plan, known), []  # type: tuple[Net, list[Task]]
    device_bytes: dict[str, float] = {}
    host_bytes: dict[str, float] = {}
    for part in resolved.parts:
        if isinstance(part, ResolvedPool):
            pool = PoolWriter(part, net, tasks, known)
            pool.write()
            for sums, more in zip((device_bytes, host_bytes), pool.memory(), strict=True):
                for name, size in more.items():
                    _add(sums, name, size)
        else:
            pipeline = PipelineWriter(resolved, part, Writer(net, part.pipeline.job.name, tasks), known)
            pipeline.write()
            pipeline_memory(pipeline, device_bytes, host_bytes)
    times = play(*arrays(tasks, net))
    jobs: dict[str, float] = {}
    for task, end in zip(tasks, times.end.tolist(), strict=True):
        jobs[task.job] = max(jobs.get(task.job, 0.0), end)
    context = {device: 0.0 if cluster.kind_of(device).name == "CPU" else CONTEXT for device in device_bytes}
    for device in context:
        costs = net.costs.get(cluster.devices[device].kind)
        if costs is not None and costs.context_bytes is not None:
            context[device] = costs.context_bytes
    return Judgement(
        jobs=jobs,
        memory={device: size + context[device] for device, size in device_bytes.items()},
        hosts={host: size for host, size in host_bytes.items() if size},
        ends=[(task.kind, end) for task, end in zip(tasks, times.end.tolist(), strict=True)],
    )
