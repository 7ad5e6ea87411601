"""The messages of tensor groups while they compute: those all-reduces are inside the seconds of their blocks.

With T(n, rate, latency) what the blocks of a group of n devices take on links of that rate and latency, the part of
its computing that is sending is (T(n, rate, 0) - T(n, inf, 0)) / T, and latency (T - T(n, rate, 0)) / T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from isthmus.cluster.spec import Cluster
from isthmus.cost.compute import Group
from isthmus.cost.plan_arrays import group_of
from isthmus.explain.what_if import Culprit, PricedPlan
from isthmus.plan.types import Pipeline, Replica, Stage

__all__ = ["Talk", "talk_of"]


class Talk(NamedTuple):
    """Parts of a group's computing that are messages, and the places that hold them up."""

    sending: float
    narrowest: Culprit
    latency: float
    longest: Culprit


def talk_of(given: PricedPlan, device: str) -> Talk | None:
    """Return how much messages slow the tensor group whose first device this is, and where; None where it is none."""
    found = [(part, stage, replica) for part, stage, replica in _replicas(given) if replica.devices[0] == device]
    if not found or len(found[0][2].devices) == 1:
        return None
    simulator, (_, _, replica) = given.simulator, found[0]
    size, rate, latency = group_of(simulator.priced_cluster, replica.devices)
    kind = given.cluster.devices[device].kind

    def seconds(group: Group) -> float:
        total = 0.0
        for part, stage, each in found:
            table = simulator.table(part.job.name, part.precision, part.job.mixed)
            sums = table.seconds(kind, group, math.ceil(each.share / each.slices))
            number = given.models[part.job.name].by_name
            spent = sums[:, number[stage.last] + 1] - sums[:, number[stage.first]]
            total += float(spent.sum() + (spent[0] if stage.recompute else 0.0))
        return total

    whole, unsent, free = seconds((size, rate, latency)), seconds((size, rate, 0.0)), seconds((size, math.inf, 0.0))
    if whole <= 0.0:
        return None
    hops = [_hop(given.cluster, a, b) for a, b in _ring(replica)]
    return Talk(
        max(0.0, unsent - free) / whole, min(hops)[2], max(0.0, whole - unsent) / whole, max(hops, key=_latency)[2]
    )


def _replicas(given: PricedPlan) -> Iterator[tuple[Pipeline, Stage, Replica]]:
    for part in given.plan.parts:
        if isinstance(part, Pipeline):
            yield from ((part, stage, replica) for stage in part.stages for replica in stage.replicas)


def _ring(replica: Replica) -> Iterator[tuple[str, str]]:
    return zip(replica.devices, (*replica.devices[1:], replica.devices[0]), strict=True)


def _hop(cluster: Cluster, a: str, b: str) -> tuple[float, float, Culprit]:
    """Return the bandwidth and latency between two devices, and whose those are."""
    host, other = cluster.host_of(a), cluster.host_of(b)
    link = cluster.link(host.name, other.name) if host.name != other.name else None
    if link is None:
        return host.bandwidth, host.latency, Culprit("inside", (host.name,))
    return link.bandwidth, link.latency, Culprit("link", link.between)


def _latency(hop: tuple[float, float, Culprit]) -> float:
    return hop[1]
