"""A pipeline as flat arrays: names become numbers, stages and buckets become bytes and seconds.

The plan must have been checked (`plan.validate`). This is the only part of pricing that runs in plain Python, so it
makes one pass over stages, replicas and syncs and leaves everything else to compiled code.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import HOST_ADAM, USUAL, Group
from isthmus.cost.measured_syncs import played_bytes
from isthmus.cost.memory import StateBytes, moment_bytes, state_bytes
from isthmus.cost.network import Fabric, latency_between
from isthmus.cost.profiled import ESTIMATED, INTERPOLATED, MEASURED
from isthmus.cost.tables import ALONE, BucketCost, ModelTable
from isthmus.cost.task_types import (
    DUPLICATE,
    FACTORS,
    GATHERED,
    REGATHERED,
    RESIDENT,
    RING,
    SCATTERED,
    SERVER,
    STREAMED,
    TREE,
    WHOLE,
    Costs,
    Syncs,
)
from isthmus.errors import PlanError
from isthmus.model.profile import Profile
from isthmus.plan.ring import FEWEST_TURNS, room_for
from isthmus.plan.schedule import SCHEDULES, Shape
from isthmus.plan.types import Pipeline, Replica, Stage, Sync

__all__ = ["Flat", "flatten", "group_of"]

Floats = npt.NDArray[np.float64]

_HOW = {"ring": RING, "sparse": RING, "tree": TREE, "server": SERVER, "factors": FACTORS, "duplicate": DUPLICATE}
_MEASURED_AS = {"ring": "ring", "sparse": "ring", "tree": "tree", "server": "server"}  # what profiles call them
_SPILL = {"none": 0, "optimizer": 1, "all": 2}


class Flat(NamedTuple):
    """One pipeline in numbers."""

    job: str
    shape: Shape
    costs: Costs
    syncs: Syncs
    micro_batches: int
    schedule: int
    ahead: int
    state: Floats  # [replicas] bytes of state on each device of the replica
    spilled: Floats  # [replicas] bytes of state in host memory for each device
    activations: Floats  # [3, replicas] bytes per sample: kept for the backward, needed while computing; memory of each
    groups: tuple[tuple[int, ...], ...]  # [replicas] devices
    buffers: float  # bytes of the model's buffers
    rooms: Mapping[int, float]  # device -> bytes that its syncs hold besides scratch
    rings: tuple[int, ...]  # for each sync the number of rows of `syncs` that it became
    sources: npt.NDArray[np.int32]  # for each row of `syncs` where its seconds come from (`cost.profiled`)


def group_of(cluster: Cluster, devices: tuple[str, ...]) -> Group:
    """Return the size of a tensor group, and the latency and bandwidth that its slowest messages get.

    The latency is the longest one around the group's ring. All messages of a round are sent at once, so a resource that
    k of them pass gives each of them the k-th part of its capacity.
    """
    if len(devices) == 1:
        return ALONE
    latency, passed, capacity = 0.0, Counter[str](), dict[str, float]()
    for a, b in zip(devices, (*devices[1:], devices[0]), strict=True):
        after, way = _hop(cluster, a, b)
        latency = max(latency, after)
        capacity.update(way)
        passed.update(way.keys())
    return (len(devices), min(capacity[name] / count for name, count in passed.items()), latency)


def _hop(cluster: Cluster, a: str, b: str) -> tuple[float, dict[str, float]]:
    """Return the latency between two devices, and the capacities of what a message passes (as in `cost.network`)."""
    host, other = cluster.host_of(a), cluster.host_of(b)
    if host.name == other.name:
        return host.latency, {f"{a} out": float(host.bandwidth), f"{b} in": float(host.bandwidth)}
    link, trunk = cluster.link(host.name, other.name), cluster.trunk(host.region, other.region)
    if link is None:
        raise PlanError(
            "tensor-group",
            "a tensor group needs direct links",
            where=f"tensor group of {a} and {b}",
            found=f"no link between {host.name} and {other.name}",
            expected="devices of one host, or of hosts with a link",
        )
    way: dict[str, float] = {f"{host.name} nic out": host.nic, f"{other.name} nic in": other.nic_in}
    way[f"{host.name} to {other.name}"] = link.bandwidth
    return link.latency, way if trunk is None else way | {f"{host.region} to {other.region} trunk": trunk}


def flatten(pipeline: Pipeline, table: ModelTable, cluster: Cluster, fabric: Fabric) -> Flat:
    """Return the arrays of one pipeline."""
    micro_batch = pipeline.job.batch // pipeline.micro_batches
    number, by_name = fabric.number, table.graph.by_name
    first, last, duplicate, stream, starts = [], [], [], [], [0]
    stage_of, device, size, lo, hi, slices, row, update = [], [], [], [], [], [], [], []
    state, spilled, saved, transient, held, rebuild, moved = [], [], [], [], [], [], []
    groups: list[tuple[int, ...]] = []
    finals = _finals(pipeline, table)
    known = table.profile.device_costs if table.profile is not None else {}
    for s, stage in enumerate(pipeline.stages):
        a, b = by_name[stage.first], by_name[stage.last]
        first.append(a)
        last.append(b)
        whole = len(stage.replicas) > 1 and all(r.share == micro_batch for r in stage.replicas)
        duplicate.append(whole)
        stream.append(GATHERED if stage.state == "sharded-all" else STREAMED if stage.spill == "all" else RESIDENT)
        facts = _StageFacts(pipeline, stage, table, a, b, finals, fabric.wires.stands)
        at = 0
        for replica in stage.replicas:
            kind = cluster.devices[replica.devices[0]].kind
            wide = kind in table.wide
            group = group_of(cluster, replica.devices)
            stage_of.append(s)
            groups.append(tuple(number[name] for name in replica.devices))
            device.append(groups[-1][0])
            size.append(group[0])
            lo.append(0 if whole else at)
            hi.append(micro_batch if whole else at + replica.share)
            at += replica.share
            slices.append(replica.slices)
            small = replica.share // replica.slices
            large = small + (1 if replica.share % replica.slices else 0)
            row.append((table.row(kind, group, small), table.row(kind, group, large)))
            sizes = facts.sizes(group[0], wide)
            state.append(sizes[0])
            spilled.append(sizes[1])
            ratio = 1.0
            if kind in known:
                ratio = known[kind].held_recomputed if stage.recompute else known[kind].held
            saved.append(sizes[2] * ratio)
            transient.append(sizes[3] * ratio)
            held.append(ratio)
            moved.append(sizes[4])
            update.append(facts.update(cluster, replica, group[0]))
            rebuild.append((table.flops(kind) or 0.0) * table.efficiency.get(kind, USUAL).matmul)
        starts.append(len(device))
    i, f = np.int32, np.float64
    shape = Shape(
        np.array(first, i), np.array(last, i), np.array(duplicate), np.array(stream, i), np.array(starts, i),
        np.array(stage_of, i), np.array(device, i), np.array(size, i), np.array(lo, i), np.array(hi, i),
        np.array(slices, i), fabric.wires.host_of, fabric.wires.region_of,
    )  # fmt: skip
    width = float(table.width)
    costs = Costs(
        table.times, np.array(row, i), np.array([stage.recompute for stage in pipeline.stages]), table.weight_bytes,
        np.array(moved, f) * width, np.array(update, f),
        np.array([_SPILL[stage.spill] for stage in pipeline.stages], i),
        pipeline.job.optimizer.clip is not None or pipeline.precision == "fp16",
    )  # fmt: skip
    syncs, rings, rooms, sources = _syncs(pipeline, table, fabric, groups, np.array(rebuild, f))
    return Flat(
        pipeline.job.name, shape, costs, syncs, pipeline.micro_batches, SCHEDULES[pipeline.schedule], pipeline.ahead,
        np.array(state, f), np.array(spilled, f), np.array((saved, transient, held), f), tuple(groups),
        table.graph.buffers * 4.0, rooms, rings, sources,
    )  # fmt: skip


def _named(pipeline: Pipeline) -> frozenset[str]:
    return frozenset(name for sync in pipeline.syncs for name in sync.parameters if name[0] != "[")


def _finals(pipeline: Pipeline, table: ModelTable) -> set[int]:
    """Return the blocks at which gathered parts are cut: the lowest of each bucket in each sharded-all stage."""
    stages = [stage for stage in pipeline.stages if stage.state == "sharded-all"]
    found: set[int] = set()
    for sync in pipeline.syncs if stages else ():
        blocks = table.bucket(sync.parameters, _named(pipeline)).blocks
        for stage in stages:
            a, b = table.graph.by_name[stage.first], table.graph.by_name[stage.last]
            found.update(sorted(block for block in blocks if a <= block <= b)[:1])
    return found


class _StageFacts:
    """Bytes and seconds of one stage that are the same for its replicas."""

    def __init__(
        self, pipeline: Pipeline, stage: Stage, table: ModelTable, a: int, b: int, finals: set[int], stands: float
    ) -> None:
        span = table.span(a, b)
        self.stage, self.job, self.replicas, self.span = stage, pipeline.job, len(stage.replicas) * stands, span
        kept = 1.0 if stage.kept is None else stage.kept
        self.kept = (span.elements - (1.0 - kept) * span.pruned) / span.elements if span.elements else 1.0
        self.bytes = state_bytes(pipeline.precision, pipeline.job.optimizer, stage.kept is not None)
        self.table, self.first, self.last, self.blocks = table, a, b, range(a, b + 2)
        self.cuts = sorted(block for block in finals if a < block <= b)
        self.known: dict[tuple[int, bool], tuple[float, float, float, float, float]] = {}

    def sizes(self, degree: int, wide: bool) -> tuple[float, float, float, float, float]:
        """Return the sizes of equal replicas: state on device and host, saved and transient bytes, trained elements."""
        if (degree, wide) not in self.known:
            activations = self.saved(degree, wide), self.transient(wide)
            self.known[degree, wide] = (*self.state(degree, wide), *activations, self.elements(degree))
        return self.known[degree, wide]

    def elements(self, degree: int) -> float:
        """Return the trained elements on each device of a replica."""
        return self.span.elements - self.span.split_elements * (1.0 - 1.0 / degree)

    def state(self, degree: int, wide: bool) -> tuple[float, float]:
        """Return the bytes of state on each device of a replica, and in host memory for it.

        With `wide` the replica computes with an fp32 copy of its weights.
        """
        per: StateBytes = self.bytes
        copy = 4.0 if wide else 0.0
        gathered = self.stage.state == "sharded-all"
        resident = self.elements(degree) * (per.weight + per.gradient) / (self.replicas if gathered else 1)
        optimizer = self.elements(degree) * per.optimizer / (1 if self.stage.state == "replicated" else self.replicas)
        if gathered:
            more = 2 * self._largest(degree) * (per.weight + per.gradient + copy)
        else:
            more = self.elements(degree) * copy
        if self.stage.spill == "none":
            return resident + optimizer + more, 0.0
        return resident + more, optimizer  # in the runtime weights stay on the device, even with spill `all`

    def _largest(self, degree: int) -> float:
        """Return the elements of the largest part that streams in as one.

        That is a block or, in state `sharded-all`, what lies between two cuts at buckets.
        """
        cuts = [self.first, *self.cuts, self.last + 1] if self.stage.state == "sharded-all" else self.blocks
        spans = [self.table.span(a, b - 1) for a, b in pairwise(cuts)]
        return max(span.elements - span.split_elements * (1.0 - 1.0 / degree) for span in spans)

    def saved(self, degree: int, wide: bool) -> float:
        """Return the bytes per sample that are kept from forward to backward."""
        span = self.table.span(self.first, self.last, wide)
        return span.inputs if self.stage.recompute else span.saved - span.split_saved * (1.0 - 1.0 / degree)

    def transient(self, wide: bool) -> float:
        """Return the bytes per sample that are needed while computing."""
        span = self.table.span(self.first, self.last, wide)
        return span.largest_workspace + (span.largest_saved if self.stage.recompute else 0.0)

    def update(self, cluster: Cluster, replica: Replica, degree: int) -> float:
        """Return the seconds of the optimizer's update.

        On a device these are the bytes that it reads and writes, over the bandwidth that it reaches. A spilled
        optimizer is updated by the cores of the host.
        """
        elements = self.elements(degree) * self.kept
        if self.stage.state != "replicated":
            elements /= self.replicas
        if self.stage.spill != "none":
            return elements / (HOST_ADAM * cluster.host_of(replica.devices[0]).cores)
        moved = 12.0 + 2 * moment_bytes(self.job.optimizer)
        return elements * moved / self.table.update_bandwidth[cluster.devices[replica.devices[0]].kind]


def _syncs(
    pipeline: Pipeline,
    table: ModelTable,
    fabric: Fabric,
    groups: list[tuple[int, ...]],
    rebuild: Floats,
) -> tuple[Syncs, tuple[int, ...], Mapping[int, float], npt.NDArray[np.int32]]:
    named = _named(pipeline)
    parted = {f"[{table.graph.blocks[user].name}]" for name in named for user in table.users[name]}
    nobody: frozenset[str] = frozenset()  # no name is left out of these buckets, so the table can remember them
    masked = next((stage.kept for stage in pipeline.stages if stage.kept is not None), None)
    grouped = any(len(group) > 1 for group in groups)
    sharded = any(stage.state == "sharded-optimizer" for stage in pipeline.stages)
    rooms, lines = defaultdict[int, float](float), _Lines(pipeline, table, fabric)
    profile = table.profile if table.profile is not None and table.profile.collectives else None
    played: list[tuple[float, int]] = []
    all_rings: list[int] = []
    numbers: dict[tuple[str, ...], list[int]] = {}
    how, layout, size, segments, root, first, device, holder = [], [], [], [], [], [0], [], []
    first_block, factor, flops = [0], [], []
    block: list[int] = []
    for sync in pipeline.syncs:
        bucket = table.bucket(sync.parameters, nobody if parted.isdisjoint(sync.parameters) else named)
        leads = numbers.get(sync.participants)
        if leads is None:
            leads = numbers[sync.participants] = [fabric.number[name] for name in sync.participants]
        by_first = _leading(pipeline, table, bucket, fabric) if grouped else {}
        rings = _rings(pipeline, table, bucket) if grouped else 1
        all_rings.append(rings)
        elements = bucket.elements - bucket.split * (1.0 - 1.0 / rings)
        if sync.how == "sparse" and masked is not None:
            elements -= (1.0 - masked) * (bucket.pruned - bucket.pruned_split * (1.0 - 1.0 / rings))
        if sharded:
            layout.extend([_layout(pipeline, table, bucket)] * rings)
        known = profile if profile is not None and _replicated(pipeline, table, bucket) else None
        for member in range(rings):
            how.append(_HOW[sync.how])
            size.append(elements * table.width)
            segments.append(sync.segments)
            root.append(fabric.number[sync.root] if sync.root is not None else -1)
            device.extend([by_first[lead][member] for lead in leads] if rings > 1 else leads)
            holder.extend(leads)
            first.append(len(device))
            block.extend(bucket.blocks)
            first_block.append(len(block))
            if known is not None:
                played.append(_measured(known, fabric, sync, device[first[-2] :], root[-1], size[-1]))
            elif profile is not None:
                played.append((size[-1], ESTIMATED))
            factor.append(bucket.factor_bytes)
            flops.append(bucket.rebuild_flops - bucket.rebuild_split * (1.0 - 1.0 / rings))
        if sync.how == "factors":
            lines.add(bucket, leads * rings, device[first[-1 - rings] :])
        elif sync.how == "server" and root[-1] not in leads:
            rooms[root[-1]] += rings * size[-1]  # the root adds them up there
    i, f = np.int32, np.float64
    sent, sources = np.array(size, f), np.full(len(how), ESTIMATED, i)
    if played:
        sent[:], sources[:] = zip(*played, strict=True)
    flat = Syncs(
        np.array(how, i), np.array(layout or [WHOLE] * len(how), i), np.array(size, f), np.array(segments, i),
        np.array(root, i), np.array(first, i), np.array(device, i), np.array(holder, i), np.array(first_block, i),
        np.array(block, i), sent, np.array(factor, f), np.array(flops, f), rebuild,
    )  # fmt: skip
    lines.add_to(rooms)
    return flat, tuple(all_rings), rooms, sources


def _measured(
    profile: Profile, fabric: Fabric, sync: Sync, devices: Sequence[int], root: int, size: float
) -> tuple[float, int]:
    """Return the bytes with which a sync of `size` bytes takes its measured seconds, and the source of these."""
    hosts = [fabric.hosts[fabric.wires.host_of[device]] for device in devices]
    server = fabric.hosts[fabric.wires.host_of[root]] if root >= 0 else None
    found = profile.collective(_MEASURED_AS.get(sync.how, ""), hosts, server, size)
    if found is None:
        return size, ESTIMATED
    played = played_bytes(fabric, _HOW[sync.how], devices, root, sync.segments, size, found[0])
    return played, MEASURED if found[1] else INTERPOLATED


def _replicated(pipeline: Pipeline, table: ModelTable, bucket: BucketCost) -> bool:
    """Return whether every participant holds and updates all of a bucket."""
    return all(stage.state == "replicated" for stage in _stages(pipeline, table, bucket))


def _stages(pipeline: Pipeline, table: ModelTable, bucket: BucketCost) -> list[Stage]:
    """Return the stages that hold some of a bucket's blocks."""
    ends = [table.graph.by_name[stage.last] for stage in pipeline.stages]
    return [pipeline.stages[s] for s in dict.fromkeys(bisect_left(ends, block) for block in bucket.blocks)]


def _layout(pipeline: Pipeline, table: ModelTable, bucket: BucketCost) -> int:
    """Return which part of a bucket's gradient its participants need for their updates."""
    states = {stage.state for stage in _stages(pipeline, table, bucket)}
    if "sharded-optimizer" not in states:
        return WHOLE
    return SCATTERED if len(states) == 1 else REGATHERED


class _Lines:
    """The memory for factors.

    A worker holds the factors of as many of a stage's weights as may be on their way at once, and of two at least.
    Besides, it holds its own output gradients of a micro-batch until they have been sent.
    """

    def __init__(self, pipeline: Pipeline, table: ModelTable, fabric: Fabric) -> None:
        self._pipeline, self._table, self._fabric = pipeline, table, fabric
        self._own = defaultdict[int, float](float)
        self._all = defaultdict[tuple[int, int], float](float)  # (device, stage) -> bytes of a micro-batch
        self._room = defaultdict[tuple[int, int], float](float)

    def add(self, bucket: BucketCost, leads: Sequence[int], devices: Sequence[int]) -> None:
        """Add a bucket that `devices` sync; the replica of each has its first device at the same place in `leads`."""
        stage = _stages(self._pipeline, self._table, bucket)[-1]
        shares = {self._fabric.number[replica.devices[0]]: replica.share for replica in stage.replicas}
        whole = sum(shares.values()) * self._fabric.wires.stands
        largest = max(self._table.largest_factors[block] for block in bucket.blocks)
        number = self._pipeline.stages.index(stage)
        for lead, device in zip(leads, devices, strict=True):
            key = (device, number)
            self._own[device] += shares[lead] * bucket.output_bytes
            self._all[key] += whole * bucket.factor_bytes
            trip = max(self._trip(device, other) for other in devices)
            self._room[key] = max(self._room[key], room_for(math.inf, trip), FEWEST_TURNS * whole * largest)

    def _trip(self, a: int, b: int) -> float:
        wires = self._fabric.wires
        return latency_between(wires, a, b) + latency_between(wires, b, a)

    def add_to(self, rooms: dict[int, float]) -> None:
        """Add the memory for factors to the bytes of each device."""
        for device, size in self._own.items():
            rooms[device] += size
        for key, size in self._all.items():
            rooms[key[0]] += min(size, self._room[key])


def _leading(pipeline: Pipeline, table: ModelTable, bucket: BucketCost, fabric: Fabric) -> dict[int, tuple[int, ...]]:
    """Return, by first device, all devices of the replicas that hold some of a bucket."""
    stages = _stages(pipeline, table, bucket)
    groups = [tuple(fabric.number[name] for name in q.devices) for stage in stages for q in stage.replicas]
    return {group[0]: group for group in groups}


def _rings(pipeline: Pipeline, table: ModelTable, bucket: BucketCost) -> int:
    """Return the number of rings in which a bucket is synchronised.

    Members of equal tensor groups sync their own parts, in as many rings; unequal groups sync as one.
    """
    degrees = {len(q.devices) for stage in _stages(pipeline, table, bucket) for q in stage.replicas}
    return degrees.pop() if len(degrees) == 1 else 1
