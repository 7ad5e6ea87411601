"""What each worker does in a step, compiled before anything runs: plain data, without torch.

    plan ─▶ runs, flows, orders (as the simulator has them) ─▶ one Program for each worker

A worker drives one device. Its *stage runs* (`runs`) are stages merged as in `plan.schedule`. A *flow* is what passes
between one of them and a stage run of another worker (or of its own): for every micro-batch, the samples that both
have. Members of a tensor group all compute the group's runs: member i receives from member i mod n of the sending
group.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from isthmus.cluster.spec import Cluster, Precision
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedReplica, resolve, suppliers
from isthmus.plan.types import How, Layout, Plan, Spill

__all__ = ["Action", "BucketSpec", "Flow", "Program", "StageRun", "programs", "samples_of_slice"]


if TYPE_CHECKING:
    from isthmus.cost.simulate import Prepared

_Table = dict[tuple[int, int], dict[str, None]]  # (sending run, receiving run) -> tensors, in the graph's order


class _Frozen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the program's types: immutable, named fields, saved as JSON."""


class Flow(_Frozen, frozen=True, kw_only=True):
    """Tensors that pass between a run of this worker and another run, with the samples [lo, hi) of that run."""

    peer: str  # device
    run: int  # the other run's number
    lo: int
    hi: int
    slices: int
    tensors: tuple[str, ...]


class StageRun(_Frozen, frozen=True, kw_only=True):
    """Blocks first .. last on samples [lo, hi) of each micro-batch, in slices.

    Activations come in from `inputs` and go to `outputs`; gradients come in from `returns` and go to `gradients`.
    """

    number: int
    stages: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # first and last block of each stage
    first: int
    last: int
    lo: int
    hi: int
    slices: int
    recompute: tuple[bool, ...]  # of each block
    stretches: tuple[tuple[int, int], ...]  # first and last block of what is computed in one go
    counts: bool  # its losses count: false on all but the first replica of a duplicate stage
    saves: tuple[bool, ...]  # for each stage: whether it saves the batch statistics for all its replicas
    group: tuple[str, ...]  # devices of its tensor group, this one included
    replicas: tuple[tuple[str, ...], ...]  # for each stage: devices that split its micro-batch, by samples
    inputs: tuple[Flow, ...] = ()
    outputs: tuple[Flow, ...] = ()
    gradients: tuple[Flow, ...] = ()
    returns: tuple[Flow, ...] = ()


class Action(NamedTuple):
    """Forward or backward of a micro-batch by a stage run (an index into the program's `runs`)."""

    run: int
    micro_batch: int
    backward: bool


class BucketSpec(_Frozen, frozen=True, kw_only=True):
    """Parameters that are kept as one flat tensor, and how their gradients are synchronised.

    `how` is None if no other worker has them. `members` are the devices that take part, in order, this one among them
    unless it is only the root of a server. `groups` lists for each participant the devices of its tensor group; if
    their sizes differ, parts are joined on the first device of each.
    """

    name: str
    number: int
    how: How | None
    parameters: tuple[str, ...]
    members: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()  # of the members
    root: str | None = None
    segments: int = 1
    layout: Layout = "replicated"
    late: bool = False  # sums gradients only at the end of a step, even if state is fully sharded
    spill: Spill = "none"
    kept: float | None = None
    pruned: tuple[str, ...] = ()  # the parameters to which the mask applies: linear weights
    groups: tuple[tuple[str, ...], ...] = ()


class Program(_Frozen, frozen=True, kw_only=True):
    """Everything that one worker needs to know of a plan."""

    device: str
    job: Job
    precision: Precision
    micro_batches: int
    micro_batch: int  # samples
    runs: tuple[StageRun, ...]
    actions: tuple[Action, ...]
    buckets: tuple[BucketSpec, ...]
    workers: tuple[str, ...]  # all of the job
    leader: str  # adds up the totals that all workers must know
    judges: tuple[str, ...]  # workers that compute losses that count
    ways: Mapping[str, tuple[str, ...]] = {}  # by worker that cannot be reached directly: the relays on the way
    carries: tuple[str, ...] = ()  # the neighbours on other workers' ways that go over this worker


def samples_of_slice(run: StageRun | Flow, k: int) -> tuple[int, int]:
    """Return the samples [lo, hi) of slice k."""
    share = run.hi - run.lo
    return run.lo + share * k // run.slices, run.lo + share * (k + 1) // run.slices


def programs(plan: Plan, cluster: Cluster, models: Mapping[str, BlockGraph]) -> dict[str, Program]:
    """Return the program of each worker of a checked plan, by device."""
    from isthmus.cost.runnable import check_runnable  # compiled code, which workers do without
    from isthmus.cost.simulate import Prepared, Simulator
    from isthmus.runtime.weight_turns import can_play  # imports this module

    simulator = Simulator(cluster, models)
    resolved, net = resolve(plan, cluster, models), simulator.fabric(plan)
    check_runnable(resolved, simulator)
    found: dict[str, Program] = {}
    for part in resolved.pipelines:
        prepared = simulator.prepare(part.pipeline, net)
        assert isinstance(prepared, Prepared)
        made = _Compiler(resolved, part, prepared, cluster).programs()
        shared = any(bucket.layout == "sharded-all" for program in made.values() for bucket in program.buckets)
        found |= made if not shared or can_play(made, part.graph) else _late(made)
    return found


def _late(programs: Mapping[str, Program]) -> dict[str, Program]:
    """Return programs whose workers do not wait for each other's gradients before the end of a step."""
    return {
        device: msgspec.structs.replace(
            program, buckets=tuple(msgspec.structs.replace(bucket, late=True) for bucket in program.buckets)
        )
        for device, program in programs.items()
    }


def _carried(ways: Mapping[tuple[str, str], tuple[str, ...]]) -> dict[str, dict[str, None]]:
    """Return the neighbours of each relay on all ways that lead over it."""
    found: dict[str, dict[str, None]] = {}
    for (one, other), way in ways.items():
        for before, relay, after in zip((one, *way), way, (*way[1:], other), strict=False):
            found.setdefault(relay, {}).update({before: None, after: None})
    return found


def _first_device(cluster: Cluster, host: str) -> str:
    return next(name for name, device in cluster.devices.items() if device.host == host)


class _Compiler:
    """Compiles one pipeline into programs."""

    def __init__(self, resolved: Resolved, part: ResolvedPipeline, prepared: Prepared, cluster: Cluster) -> None:
        self.resolved, self.part, self.prepared, self.cluster = resolved, part, prepared, cluster
        self.names = [device.name for device in resolved.devices]
        self.graph, self.runs = part.graph, prepared.runs
        replicas = [(s, r) for s, stage in enumerate(part.stages) for r in range(len(stage.replicas))]
        self.run_of = {key: int(self.runs.of[i]) for i, key in enumerate(replicas)}
        self.replicas_of: dict[int, list[tuple[int, int]]] = {}
        for key, run in self.run_of.items():
            self.replicas_of.setdefault(run, []).append(key)
        self.blocks_of = {
            run: (part.stages[keys[0][0]].first, part.stages[keys[-1][0]].last)
            for run, keys in self.replicas_of.items()
        }
        self.activations, self.gradients = self._activations(), self._gradients()
        states = [stage.state for stage in part.pipeline.stages]
        self.layouts = [
            {states[stage] for name in sync.parameters for stage, _ in part.holders[name]} for sync in part.syncs
        ]

    def programs(self) -> dict[str, Program]:
        """Return the programs by device: of all devices with a run, and of roots and relays without one."""
        pipeline, last = self.part.pipeline, self.part.stages[-1]
        judges = [last.replicas[0]] if last.duplicate else list(last.replicas)
        runs: dict[str, list[StageRun]] = {}
        for number in self.replicas_of:
            for run, device in self._members(number):
                runs.setdefault(device, []).append(run)
        roots = [self.names[sync.root] for sync in self.part.syncs if sync.root is not None]
        workers = tuple(dict.fromkeys([*runs, *roots]))
        while len(joined := self._with_relays(workers)) > len(workers):  # a relay may need another to reach the leader
            workers = joined
        ways = self._ways(workers)
        carries = _carried(ways)
        return {
            device: Program(
                device=device,
                job=pipeline.job,
                precision=pipeline.precision,
                micro_batches=pipeline.micro_batches,
                micro_batch=self.part.micro_batch,
                runs=tuple(runs.get(device, ())),
                actions=self._actions(runs.get(device, [])),
                buckets=self._buckets(device, runs.get(device, [])),
                workers=workers,
                leader=self.names[judges[0].devices[0]],
                judges=tuple(self.names[replica.devices[0]] for replica in judges),
                ways={other: way for (one, other), way in ways.items() if one == device},
                carries=tuple(carries.get(device, ())),
            )
            for device in workers
        }

    def _with_relays(self, workers: tuple[str, ...]) -> tuple[str, ...]:
        ways = self._ways(workers)
        return tuple(dict.fromkeys([*workers, *(relay for way in ways.values() for relay in way)]))

    def _ways(self, workers: tuple[str, ...]) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the relays between each two workers, as the plan says: one device of each relaying host."""
        at: dict[str, list[str]] = {}
        for device in workers:
            at.setdefault(self.cluster.devices[device].host, []).append(device)
        ways: dict[tuple[str, str], tuple[str, ...]] = {}
        for via in self.resolved.plan.via:
            relays = tuple(at[host][0] if host in at else _first_device(self.cluster, host) for host in via.hosts)
            for one, other in product(at.get(via.between[0], ()), at.get(via.between[1], ())):
                ways[one, other], ways[other, one] = relays, relays[::-1]
        return ways

    def _members(self, number: int) -> list[tuple[StageRun, str]]:
        """Return a run as each member of its tensor group has it, with the member's device."""
        keys = self.replicas_of[number]
        replica, ending = self.part.replica(keys[0]), self.part.replica(keys[-1])
        group = self._group(number)
        first, last = self.blocks_of[number]
        ranges = tuple((self.part.stages[s].first, self.part.stages[s].last) for s, _ in keys)
        stages = self.part.pipeline.stages
        streams = stages[keys[0][0]].state == "sharded-all"
        return [
            (
                StageRun(
                    number=number,
                    stages=tuple(s for s, _ in keys),
                    first=first,
                    last=last,
                    lo=replica.lo,
                    hi=replica.hi,
                    slices=replica.slices,
                    recompute=tuple(stages[self.part.stage_of[b]].recompute for b in range(first, last + 1)),
                    ranges=ranges,
                    stretches=self._stretches(ranges) if streams else ((first, last),),
                    counts=member == 0 and not (self.part.stages[keys[-1][0]].duplicate and ending.number > 0),
                    saves=tuple(member == 0 and r == 0 for _, r in keys),
                    group=group,
                    replicas=tuple(self._sharers(key, member) for key in keys),
                    inputs=self._incoming(self.activations, number, member),
                    outputs=self._outgoing(self.activations, number, member),
                    gradients=self._outgoing(self.gradients, number, member),
                    returns=self._incoming(self.gradients, number, member),
                ),
                device,
            )
            for member, device in enumerate(group)
        ]

    def _stretches(self, ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Split stages whose weights stream into stretches, each from a bucket's lowest block to that of the next."""
        found = []
        for first, last in ranges:
            seen: set[int] = set()
            starts = [first]
            for block in range(first, last + 1):
                names = self.graph.blocks[block].parameters
                new = {self.part.sync_of[name] for name in names if name in self.part.sync_of} - seen
                seen |= new
                if new and block > first:
                    starts.append(block)
            found += [(a, b - 1) for a, b in pairwise([*starts, last + 1])]
        return tuple(found)

    def _sharers(self, key: tuple[int, int], member: int) -> tuple[str, ...]:
        """Return the devices that split a stage's micro-batch with this replica; only its own if duplicate."""
        stage = self.part.stages[key[0]]
        replicas = [stage.replicas[key[1]]] if stage.duplicate else stage.replicas
        return tuple(self.names[replica.devices[member % len(replica.devices)]] for replica in replicas)

    def _group(self, number: int) -> tuple[str, ...]:
        return tuple(self.names[d] for d in self.part.replica(self.replicas_of[number][0]).devices)

    def _incoming(self, table: _Table, number: int, member: int) -> tuple[Flow, ...]:
        """Return the flows that member i receives: from member i mod n of each group of n that sends to its run."""
        return tuple(
            self._flow(source, group[member % len(group)], tensors)
            for (source, target), tensors in table.items()
            if target == number
            for group in [self._group(source)]
        )

    def _outgoing(self, table: _Table, number: int, member: int) -> tuple[Flow, ...]:
        """Return the flows that the member sends: to every member i of a group that receives from it."""
        size = len(self._group(number))
        return tuple(
            self._flow(target, peer, tensors)
            for (source, target), tensors in table.items()
            if source == number
            for i, peer in enumerate(self._group(target))
            if i % size == member
        )

    def _flow(self, other: int, peer: str, tensors: dict[str, None]) -> Flow:
        replica = self.part.replica(self.replicas_of[other][0])
        return Flow(peer=peer, run=other, lo=replica.lo, hi=replica.hi, slices=replica.slices, tensors=tuple(tensors))

    def _activations(self) -> _Table:
        """Return (sending run, receiving run) -> tensors; a run receives a tensor once, however many stages use it."""
        table: _Table = {}
        for number, keys in self.replicas_of.items():
            first, last = self.blocks_of[number]
            receivers = dict(keys)
            for tensor in self.graph.tensors:
                used = [block for block in tensor.targets if first <= block <= last]
                if tensor.source < 0 or first <= tensor.source <= last or not used:
                    continue
                stage = self.part.stage_of[used[0]]
                receiver = self.part.stages[stage].replicas[receivers[stage]]
                source = self.part.stage_of[tensor.source]
                for replica, _, _ in suppliers(self.resolved, self.part.stages[source], receiver):
                    table.setdefault((self.run_of[source, replica], number), {})[tensor.name] = None
        return table

    def _gradients(self) -> _Table:
        """Return (sending run, receiving run) -> tensors with gradients; a run sends the sum over all its uses."""
        table: _Table = {}
        for tensor in self.graph.tensors:
            if tensor.source < 0 or not tensor.grad:
                continue
            source = self.part.stage_of[tensor.source]
            users = dict.fromkeys(self.part.stage_of[block] for block in tensor.targets)
            for replica in self.part.stages[source].replicas:
                own = self.run_of[source, replica.number]
                senders = [self._senders(user, replica) for user in users if user != source]
                for sender in dict.fromkeys(run for found in senders for run in found if run != own):
                    self._check_whole(tensor.name, sender, source, list(users), replica)
                    table.setdefault((sender, own), {})[tensor.name] = None
        return table

    def _senders(self, stage: int, receiver: ResolvedReplica) -> list[int]:
        """Return the runs that send the receiver gradients from their part of a stage."""
        return [self.run_of[stage, r] for r, _, _ in suppliers(self.resolved, self.part.stages[stage], receiver)]

    def _check_whole(self, tensor: str, sender: int, source: int, users: list[int], receiver: ResolvedReplica) -> None:
        """Raise PlanError if a run's sum of a tensor's gradients would count a use twice.

        All uses of a tensor in a run must be wanted from that run, because its gradients come as one sum.
        """
        held = [stage for stage, _ in self.replicas_of[sender]]
        inside = [stage for stage in held if stage in users]
        if source in held or any(sender not in self._senders(stage, receiver) for stage in inside):
            raise PlanError(
                "run",
                f"the gradient of {tensor} would be counted twice",
                where=f"pipeline {self.part.pipeline.job.name}",
                found="a duplicate stage that runs as one with a stage that is not duplicated, both using the tensor",
                expected="the two on different devices, or duplicated alike",
            )

    def _actions(self, runs: list[StageRun]) -> tuple[Action, ...]:
        """Return the actions of a device in order; in a tensor group all follow the order of the first device."""
        if not runs:
            return ()
        index = {run.number: position for position, run in enumerate(runs)}
        lead = self.names.index(runs[0].group[0])
        orders = self.prepared.orders
        rows = range(orders.first[lead], orders.first[lead + 1])
        return tuple(
            Action(index[int(orders.run[i])], int(orders.micro_batch[i]), bool(orders.backward[i]))
            for i in rows
            if int(orders.run[i]) in index
        )

    def _buckets(self, device: str, runs: list[StageRun]) -> tuple[BucketSpec, ...]:
        """Return the synced buckets that the device takes part in or serves, then its unsynced ones, run by run."""
        found = [spec for number in range(len(self.part.syncs)) for spec in self._synced(number, device)]
        taken = set(self.part.sync_of)
        for run in runs:
            blocks = self.graph.blocks[run.first : run.last + 1]
            names = dict.fromkeys(name for block in blocks for name in block.parameters)
            alone = tuple(name for name in names if name not in taken)
            taken.update(alone)
            for stage in dict.fromkeys(self._home(name, run) for name in alone):
                told = self.part.pipeline.stages[stage]
                here = tuple(name for name in alone if self._home(name, run) == stage)
                found.append(
                    BucketSpec(
                        name=f"stage {stage}",
                        number=len(self.part.syncs) + stage,
                        how=None,
                        parameters=here,
                        spill=told.spill,
                        kept=told.kept,
                        pruned=self._pruned(here, told.kept),
                        groups=(run.group,),
                    )
                )
        return tuple(found)

    def _pruned(self, parameters: tuple[str, ...], kept: float | None) -> tuple[str, ...]:
        """Return the linear weights if there is a mask; other parameters are exempt."""
        known = self.graph.parameter
        return tuple(name for name in parameters if kept is not None and known[name].linear is not None)

    def _home(self, parameter: str, run: StageRun) -> int:
        """Return the first stage of the run that uses a parameter."""
        return next(
            self.part.stage_of[block]
            for block in range(run.first, run.last + 1)
            if parameter in self.graph.blocks[block].parameters
        )

    def _synced(self, number: int, device: str) -> list[BucketSpec]:
        """Return the buckets that the device has in a sync; none if it takes no part in it."""
        sync, plain = self.part.syncs[number], self.part.pipeline.syncs[number]
        groups = tuple(self._group_of(sync.parameters[0], lead, plain.bucket) for lead in sync.participants)
        root = None if sync.root is None else self.names[sync.root]
        holders = [group for group in groups if device in group]
        if not holders and device != root:
            return []
        equal = len({len(group) for group in groups}) == 1
        layouts = self.layouts[number]
        member = holders[0].index(device) if holders and equal else 0
        members = tuple(group[member] for group in groups)
        stages = [self.part.pipeline.stages[s] for s, _ in self.part.holders[sync.parameters[0]]]
        regions = dict(zip(self.names, self.resolved.regions, strict=True))
        whole = BucketSpec(
            name=plain.bucket,
            number=number,
            how=sync.how,
            parameters=sync.parameters,
            members=members,
            regions=tuple(regions[name] for name in members),
            root=root,
            segments=sync.segments,
            layout=next(iter(layouts)) if len(layouts) == 1 else "sharded-optimizer",
            spill=stages[0].spill,
            kept=stages[0].kept,
            pruned=self._pruned(sync.parameters, stages[0].kept),
            groups=groups,
        )
        return self._by_stage(whole) if whole.layout == "sharded-all" else [whole]

    def _by_stage(self, whole: BucketSpec) -> list[BucketSpec]:
        """Split a `sharded-all` bucket into one for each stage, as it is summed after each backward of its stage."""
        homes = {name: self.part.holders[name][0][0] for name in whole.parameters}
        found: list[BucketSpec] = []
        for stage in dict.fromkeys(homes.values()):
            told = self.part.pipeline.stages[stage]
            here = tuple(name for name in homes if homes[name] == stage)
            more = len(self.part.syncs) + len(self.part.stages) * (1 + whole.number) + stage  # no other bucket's number
            found.append(
                msgspec.structs.replace(
                    whole,
                    number=more if found else whole.number,
                    parameters=here,
                    spill=told.spill,
                    kept=told.kept,
                    pruned=self._pruned(here, told.kept),
                )
            )
        return found

    def _group_of(self, parameter: str, lead: int, bucket: str) -> tuple[str, ...]:
        """Return the tensor group that holds a parameter for the participant `lead`."""
        replicas = [self.part.replica(holder) for holder in self.part.holders[parameter]]
        groups = dict.fromkeys(replica.devices for replica in replicas if replica.devices[0] == lead)
        if len(groups) > 1:
            raise PlanError(
                "run",
                f"{parameter} is held by a tensor group and by its first device alone",
                where=f"pipeline {self.part.pipeline.job.name}, sync {bucket}",
                found=" and ".join(" + ".join(self.names[d] for d in group) for group in groups),
                expected="one way to hold it on a device",
            )
        return tuple(self.names[d] for d in next(iter(groups)))
