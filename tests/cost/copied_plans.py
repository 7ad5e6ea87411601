"""Plans of many copies, made from a plan of one: what `cost.fold` finds again."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.plan.types import Pipeline, Plan, Replica, Sync
from isthmus.units import Bytes, BytesPerSecond, Seconds

__all__ = ["copied_cluster", "expand", "host", "link", "name_in"]


def host(
    name: str, region: str, devices: dict[str, int], *, nic: float, bandwidth: float = 50e9, latency: float = 5e-6
) -> Host:
    return Host(
        name=name,
        region=region,
        devices=devices,
        bandwidth=BytesPerSecond(bandwidth),
        latency=Seconds(latency),
        nic=BytesPerSecond(nic),
        bus=BytesPerSecond(12e9),
        memory=Bytes(1e12),
        cores=16,
    )


def link(a: str, b: str, bandwidth: float, latency: float, trunk: float | None = None) -> Link:
    own = None if trunk is None else BytesPerSecond(trunk)
    return Link(between=(a, b), bandwidth=BytesPerSecond(bandwidth), latency=Seconds(latency), trunk=own)


def name_in(name: str, copy: int) -> str:
    """The device or host of another copy."""
    first, *more = name.split("/")
    return "/".join((f"{first}.{copy}", *more))


def copied_cluster(one: Cluster, copies: int) -> Cluster:
    """The cluster with so many of each host; links between hosts become links inside each copy."""
    hosts = {
        made: replace(host, name=made)
        for copy in range(copies)
        for host in one.hosts.values()
        for made in [name_in(host.name, copy)]
    }
    own = [link for link in one.links if link.between[0] in one.hosts]
    inside = [
        replace(link, between=(name_in(link.between[0], copy), name_in(link.between[1], copy)))
        for copy in range(copies)
        for link in own
    ]
    return replace(one, hosts=hosts, links=(*(link for link in one.links if link not in own), *inside))


def expand(plan: Plan, copies: int, *, by_host: bool = False) -> Plan:
    """So many copies of a plan of one pipeline; rings go class by class, or host by host and then class by class."""
    (part,) = plan.parts
    assert isinstance(part, Pipeline)
    stages = tuple(
        replace(stage, replicas=tuple(_in(one, copy) for copy in range(copies) for one in stage.replicas))
        for stage in part.stages
    )
    syncs = tuple(_expand_sync(sync, copies, by_host) for sync in part.syncs)
    job = replace(part.job, batch=part.job.batch * copies)
    return replace(plan, parts=(replace(part, job=job, stages=stages, syncs=syncs),))


def _in(one: Replica, copy: int) -> Replica:
    return replace(one, devices=tuple(name_in(name, copy) for name in one.devices))


def _expand_sync(sync: Sync, copies: int, by_host: bool) -> Sync:
    segments: list[list[str]] = []
    for name in sync.participants:
        if by_host and segments and segments[-1][0].split("/")[0] == name.split("/")[0]:
            segments[-1].append(name)
        else:
            segments.append([name])
    return replace(sync, participants=tuple(_in_order(segments, copies)))


def _in_order(segments: Sequence[Sequence[str]], copies: int) -> list[str]:
    return [name_in(name, copy) for segment in segments for copy in range(copies) for name in segment]
