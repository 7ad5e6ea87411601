"""Measured times of the judge (`tests/cost/reference_plan.py`), point by point from docs/profiles.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import USUAL
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import Profile
from isthmus.plan.resolve import ResolvedSync
from tests.cost.reference_costs import block_seconds, computing, sending

__all__ = ["block_times", "sync_seconds"]


def block_times(
    profile: Profile,
    graph: BlockGraph,
    b: int,
    cluster: Cluster,
    group: tuple[str, ...],
    precision: str,
    mixed: bool,
    samples: int,
) -> tuple[float, float]:
    """Forward and backward of one block: what was measured inside a host, or of one device, else the roofline."""
    kind, block = cluster.kind_of(group[0]), graph.blocks[b]
    own = precision if computing(kind, precision, mixed)[0] == kind.compute.get(precision) else "fp32"
    points = {
        degree: [
            (time.samples, time.forward_seconds, time.backward_seconds)
            for time in profile.blocks
            if (time.block, time.device, time.precision, time.tensor) == (block.digest, kind.name, own, degree)
        ]
        for degree in (1, len(group))
    }
    outside = len({cluster.host_of(device).name for device in group}) > 1
    plain = _without_loss(graph)

    def roofline(members: tuple[str, ...], count: int) -> tuple[float, float]:
        return block_seconds(plain, b, cluster, members, precision, mixed, count)

    if points[len(group)] and not outside:
        times = _over_samples(points[len(group)], samples, lambda count: roofline(group, count))
    elif points[1]:
        one = _over_samples(points[1], samples, lambda count: roofline(group[:1], count))
        catalog, together = roofline(group[:1], samples), roofline(group, samples)
        sent = sending(plain, b, cluster, group, precision, mixed, samples)
        times = [one[way] * (together[way] - sent) / catalog[way] + sent for way in (0, 1)]
    else:
        return block_seconds(graph, b, cluster, group, precision, mixed, samples)
    if b == len(graph.blocks) - 1:
        f = min(1.0, block.tensor.flops / block.forward_flops) if block.tensor else 0.0
        copy = 4 * graph.outputs * samples / (USUAL.memory * kind.memory_bandwidth)
        copy *= (1 - f) + f / len(group)
        times = [times[0] + 3 * copy, times[1] + 2 * copy]
    return times[0], times[1]


def _over_samples(
    points: list[tuple[int, float, float]], samples: int, roofline: Callable[[int], tuple[float, float]]
) -> list[float]:
    """Both ways on so many samples, from what was measured on others."""
    if len(points) > 1:
        return [_straight([(point[0], point[1 + way]) for point in points], samples) for way in (0, 1)]
    there, here = roofline(points[0][0]), roofline(samples)
    return [points[0][1 + way] * (here[way] / there[way]) for way in (0, 1)]


def _without_loss(graph: BlockGraph) -> BlockGraph:
    return BlockGraph(
        name=graph.name, blocks=graph.blocks, tensors=graph.tensors, parameters=graph.parameters, outputs=0.0
    )


def _straight(points: list[tuple[float, float]], x: float) -> float:
    """Through the two nearest points; outside, neither falling nor (below) more than in proportion."""
    xs, ys = zip(*sorted(points), strict=True)
    if xs[0] <= x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    if x < xs[0]:
        slope = (ys[1] - ys[0]) / (xs[1] - xs[0])
        return float(np.median([ys[0], ys[0] - slope * (xs[0] - x), ys[0] * x / xs[0]]))
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    return ys[-1] + max(0.0, slope) * (x - xs[-1])


def sync_seconds(
    profile: Profile, sync: ResolvedSync, devices: list[str], names: list[str], cluster: Cluster, size: float
) -> float | None:
    """Of all collectives among the same hosts, done the same way."""
    hosts = [cluster.host_of(device).name for device in devices]
    root = None if sync.root is None else cluster.host_of(names[sync.root]).name
    how = "ring" if sync.how == "sparse" else sync.how
    points = [
        (time.bytes, time.seconds)
        for time in profile.collectives
        if time.how == how and _equal(how, list(time.hosts), hosts) and time.root == root
    ]
    if len(points) == 1:
        return points[0][1] * (size / points[0][0] if size > points[0][0] else 1.0)
    return _straight(points, size) if points else None


def _equal(how: str, one: list[str], other: list[str]) -> bool:
    """A ring: as seen from any participant, in either direction; a tree: as it is; a server: in any order."""
    if how == "tree" or len(one) != len(other):
        return one == other
    if how == "server":
        return Counter(one) == Counter(other)
    twice = [*one, *one]
    return any(twice[i : i + len(one)] in (other, other[::-1]) for i in range(len(one)))
