"""A pipeline as flat arrays: names become numbers, stages and buckets become bytes and seconds.

The plan is taken as checked (`plan.validate`). This is the only part of pricing that runs in plain Python, so it does
one pass over stages, replicas and syncs and leaves everything else to compiled code.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import USUAL, Group
from isthmus.cost.lower import DUPLICATE, FACTORS, GATHERED, RESIDENT, RING, SERVER, STREAMED, TREE, Costs, Syncs
from isthmus.cost.memory import StateBytes, moment_bytes, state_bytes
from isthmus.cost.network import Fabric
from isthmus.cost.tables import ALONE, ModelTable
from isthmus.plan.schedule import SCHEDULES, Shape
from isthmus.plan.types import Pipeline, Replica, Stage

__all__ = ["HOST_ADAM", "Flat", "flatten", "group_of"]

Floats = npt.NDArray[np.float64]

HOST_ADAM = 0.26e9  # parameters a second that one host core updates (4.2e9 on 16 threads, measured, fp32 AdamW)
_HOW = {"ring": RING, "sparse": RING, "tree": TREE, "server": SERVER, "factors": FACTORS, "duplicate": DUPLICATE}
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
    saved: Floats  # [replicas] bytes per sample kept from forward to backward
    transient: Floats  # [replicas] bytes per sample needed while computing
    groups: tuple[tuple[int, ...], ...]  # [replicas] devices
    bucket: float  # bytes of the largest synced bucket
    rings: tuple[int, ...]  # of each sync: rows of `syncs` that it became


def group_of(cluster: Cluster, devices: tuple[str, ...]) -> Group:
    """Size, slowest bandwidth and longest latency of a tensor group's ring."""
    if len(devices) == 1:
        return ALONE
    bandwidth, latency = float("inf"), 0.0
    for a, b in zip(devices, (*devices[1:], devices[0]), strict=True):
        host, other = cluster.host_of(a), cluster.host_of(b)
        if host.name == other.name:
            bandwidth, latency = min(bandwidth, host.bandwidth), max(latency, host.latency)
        elif (link := cluster.link(host.name, other.name)) is not None:
            bandwidth, latency = min(bandwidth, link.bandwidth, host.nic, other.nic), max(latency, link.latency)
    return (len(devices), bandwidth, latency)


def flatten(pipeline: Pipeline, table: ModelTable, cluster: Cluster, fabric: Fabric) -> Flat:
    """The arrays of one pipeline."""
    micro_batch = pipeline.job.batch // pipeline.micro_batches
    number, by_name = fabric.number, table.graph.by_name
    first, last, duplicate, stream, starts = [], [], [], [], [0]
    stage_of, device, size, lo, hi, slices, row, update = [], [], [], [], [], [], [], []
    state, spilled, saved, transient, rebuild, moved = [], [], [], [], [], []
    groups: list[tuple[int, ...]] = []
    finals = _finals(pipeline, table)
    for s, stage in enumerate(pipeline.stages):
        a, b = by_name[stage.first], by_name[stage.last]
        first.append(a)
        last.append(b)
        whole = len(stage.replicas) > 1 and all(r.share == micro_batch for r in stage.replicas)
        duplicate.append(whole)
        stream.append(GATHERED if stage.state == "sharded-all" else STREAMED if stage.spill == "all" else RESIDENT)
        facts = _StageFacts(pipeline, stage, table, a, b, finals)
        at = 0
        for replica in stage.replicas:
            kind = cluster.devices[replica.devices[0]].kind
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
            on_device, on_host = facts.state(group[0])
            state.append(on_device)
            spilled.append(on_host)
            saved.append(facts.saved(group[0]))
            transient.append(facts.transient)
            moved.append(facts.elements(group[0]))
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
    weight_bytes = np.stack((table.sums.elements, table.sums.split_elements)) * width
    costs = Costs(
        table.times, np.array(row, i), np.array([stage.recompute for stage in pipeline.stages]), weight_bytes,
        np.array(moved, f) * width, np.array(update, f),
        np.array([_SPILL[stage.spill] for stage in pipeline.stages], i),
    )  # fmt: skip
    syncs, rings = _syncs(pipeline, table, fabric, groups, np.array(rebuild, f))
    return Flat(
        pipeline.job.name, shape, costs, syncs, pipeline.micro_batches, SCHEDULES[pipeline.schedule], pipeline.ahead,
        np.array(state, f), np.array(spilled, f), np.array(saved, f), np.array(transient, f), tuple(groups),
        float(syncs.bytes[syncs.how != DUPLICATE].max(initial=0.0)), rings,
    )  # fmt: skip


def _named(pipeline: Pipeline) -> frozenset[str]:
    return frozenset(name for sync in pipeline.syncs for name in sync.parameters if name[0] != "[")


def _finals(pipeline: Pipeline, table: ModelTable) -> set[int]:
    """Where gathered parts are cut: the lowest block of each bucket in each sharded-all stage."""
    stages = [stage for stage in pipeline.stages if stage.state == "sharded-all"]
    found: set[int] = set()
    for sync in pipeline.syncs if stages else ():
        blocks = table.bucket(sync.parameters, _named(pipeline)).blocks
        for stage in stages:
            a, b = table.graph.by_name[stage.first], table.graph.by_name[stage.last]
            found.update(sorted(block for block in blocks if a <= block <= b)[:1])
    return found


class _StageFacts:
    """Bytes and seconds of one stage that its replicas share."""

    def __init__(self, pipeline: Pipeline, stage: Stage, table: ModelTable, a: int, b: int, finals: set[int]) -> None:
        span = table.span(a, b)
        self.stage, self.job, self.replicas, self.span = stage, pipeline.job, len(stage.replicas), span
        kept = 1.0 if stage.kept is None else stage.kept
        self.kept = (span.elements - (1.0 - kept) * span.pruned) / span.elements if span.elements else 1.0
        self.bytes = state_bytes(pipeline.precision, pipeline.job.optimizer, self.kept, stage.kept is not None)
        self.transient = span.largest_workspace + (span.largest_saved if stage.recompute else 0.0)
        self.table, self.first, self.last, self.blocks = table, a, b, range(a, b + 2)
        self.cuts = sorted(block for block in finals if a < block <= b)

    def elements(self, degree: int) -> float:
        """Trained elements on each device of a replica."""
        return self.span.elements - self.span.split_elements * (1.0 - 1.0 / degree)

    def state(self, degree: int) -> tuple[float, float]:
        """Bytes on each device of a replica, and in host memory for it."""
        per: StateBytes = self.bytes
        gathered = self.stage.state == "sharded-all"
        resident = self.elements(degree) * (per.weight + per.gradient) / (self.replicas if gathered else 1)
        optimizer = self.elements(degree) * per.optimizer / (1 if self.stage.state == "replicated" else self.replicas)
        two = 2 * self._largest(degree) * (per.weight + per.gradient) if gathered or self.stage.spill == "all" else 0.0
        if self.stage.spill == "all":
            return two, resident + optimizer
        return (resident + two, optimizer) if self.stage.spill == "optimizer" else (resident + optimizer + two, 0.0)

    def _largest(self, degree: int) -> float:
        """Elements of the largest part that streams in as one: a block or, gathered, from bucket to bucket."""
        cuts = [self.first, *self.cuts, self.last + 1] if self.stage.state == "sharded-all" else self.blocks
        spans = [self.table.span(a, b - 1) for a, b in pairwise(cuts)]
        return max(span.elements - span.split_elements * (1.0 - 1.0 / degree) for span in spans)

    def saved(self, degree: int) -> float:
        """Bytes per sample kept from forward to backward."""
        if self.stage.recompute:
            return self.span.inputs
        return self.span.saved - self.span.split_saved * (1.0 - 1.0 / degree)

    def update(self, cluster: Cluster, replica: Replica, degree: int) -> float:
        """Seconds of the optimizer's update: what it reads and writes, over the memory's bandwidth."""
        elements = self.elements(degree) * self.kept
        if self.stage.state != "replicated":
            elements /= self.replicas
        if self.stage.spill != "none":
            return elements / (HOST_ADAM * cluster.host_of(replica.devices[0]).cores)
        moved = 12.0 + 2 * moment_bytes(self.job.optimizer)
        kind = cluster.kind_of(replica.devices[0])
        reached = self.table.efficiency.get(kind.name, USUAL).memory
        return elements * moved / (kind.memory_bandwidth * reached)


def _syncs(
    pipeline: Pipeline,
    table: ModelTable,
    fabric: Fabric,
    groups: list[tuple[int, ...]],
    rebuild: Floats,
) -> tuple[Syncs, tuple[int, ...]]:
    named = _named(pipeline)
    parted = {f"[{table.graph.blocks[user].name}]" for name in named for user in table.users[name]}
    nobody: frozenset[str] = frozenset()  # what buckets of other blocks leave out: those the table remembers
    masked = next((stage.kept for stage in pipeline.stages if stage.kept is not None), None)
    grouped = any(len(group) > 1 for group in groups)
    all_rings = []
    how, size, segments, root, first, device, holder = [], [], [], [], [0], [], []
    first_block, factor, flops = [0], [], []
    block: list[int] = []
    for sync in pipeline.syncs:
        bucket = table.bucket(sync.parameters, nobody if parted.isdisjoint(sync.parameters) else named)
        leads = [fabric.number[name] for name in sync.participants]
        by_first = _leading(pipeline, table, bucket.blocks, fabric) if grouped else {}
        rings = _rings(leads, by_first) if grouped else 1
        all_rings.append(rings)
        elements = bucket.elements - bucket.split * (1.0 - 1.0 / rings)
        if sync.how == "sparse" and masked is not None:
            elements -= (1.0 - masked) * bucket.pruned / rings
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
            factor.append(bucket.factor_bytes / rings)
            flops.append(bucket.rebuild_flops / rings)
    i, f = np.int32, np.float64
    flat = Syncs(
        np.array(how, i), np.array(size, f), np.array(segments, i), np.array(root, i), np.array(first, i),
        np.array(device, i), np.array(holder, i), np.array(first_block, i), np.array(block, i), np.array(factor, f),
        np.array(flops, f), rebuild,
    )  # fmt: skip
    return flat, tuple(all_rings)


def _leading(
    pipeline: Pipeline, table: ModelTable, blocks: tuple[int, ...], fabric: Fabric
) -> dict[int, tuple[int, ...]]:
    """First device -> all devices of the replicas that hold some of the blocks."""
    ends = [table.graph.by_name[stage.last] for stage in pipeline.stages]
    stages = [pipeline.stages[s] for s in dict.fromkeys(bisect_left(ends, block) for block in blocks)]
    groups = [tuple(fabric.number[name] for name in q.devices) for stage in stages for q in stage.replicas]
    return {group[0]: group for group in groups}


def _rings(leads: list[int], by_first: dict[int, tuple[int, ...]]) -> int:
    """Members of equal tensor groups sync their own parts, in as many rings; unequal groups sync as one."""
    degrees = {len(by_first[lead]) for lead in leads}
    return degrees.pop() if len(degrees) == 1 else 1
