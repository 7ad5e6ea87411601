"""The rule that messages can pass: every pair of hosts that must talk has a link, or a relay that the plan names.

These must talk: replicas of stages that are joined by a tensor, if their samples overlap (activations go one way,
gradients the other); the replicas of a stage that adds up batch statistics, all with each other; and the participants
of each sync. In a `ring` sync neighbours talk; in a `tree` those of one region with each other, and the first of each
region in a ring; with `factors` all with each other; with a `server` each with the root. Where all state is sharded
they all talk with each other, since each fetches weights from all the others. All workers of a job, including those
that only relay, talk with the worker that adds up what all must know, which is the first that computes losses. The
devices of a tensor group need more (rule `tensor-group`), and those of a pool need nothing, since they are on one host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, combinations_with_replacement, pairwise, product

from isthmus.cluster.spec import Cluster
from isthmus.errors import PlanError
from isthmus.plan.resolve import Resolved, ResolvedPipeline, ResolvedReplica, ResolvedSync, suppliers
from isthmus.plan.types import Layout, Via

__all__ = ["apart", "check_reach"]

Pair = tuple[int, int]


def check_reach(resolved: Resolved, cluster: Cluster) -> None:
    """Refuse relays that do not work, and pairs of hosts that must talk and cannot."""
    relayed = _relayed(resolved.plan.via, cluster)
    for pair, where in apart(resolved, cluster):
        if pair not in relayed:
            raise PlanError(
                "reachable",
                "two hosts must talk but have no route",
                where=where,
                found=f"no link between {pair[0]} and {pair[1]}",
                expected="a link, or a relay in the plan",
                next=f"Add the link to the cluster file, or to the plan: via {pair[0]} - {pair[1]} over HOST",
            )


def apart(resolved: Resolved, cluster: Cluster) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield every pair of hosts that must talk and has no link, once, with the place in the plan that asks for it."""
    asked: set[tuple[str, str]] = set()
    talks = (((resolved.devices[a].host, resolved.devices[b].host), where) for a, b, where in _talks(resolved, cluster))
    for pair, where in chain(talks, _relay_pairs(resolved)):
        if pair in asked or pair[0] == pair[1]:
            continue
        asked.update((pair, pair[::-1]))
        if cluster.link(*pair) is None:
            yield pair, where


def _relayed(vias: Sequence[Via], cluster: Cluster) -> set[tuple[str, str]]:
    pairs: set[tuple[str, str]] = set()
    for via in vias:
        where = f"via {via.between[0]} - {via.between[1]}"
        path = (via.between[0], *via.hosts, via.between[1])
        unknown = next((host for host in path if host not in cluster.hosts), None)
        broken = None if unknown else next((hop for hop in pairwise(path) if _no_hop(hop, cluster)), None)
        if unknown is not None:
            raise PlanError("via", "the cluster has no such host", where=where, found=unknown, expected="a host's name")
        if broken is not None:
            raise PlanError(
                "via", "a hop has no link", where=where, found=" - ".join(broken), expected="a link for each hop"
            )
        if not via.hosts or len(set(path)) < len(path) or via.between in pairs:
            raise PlanError(
                "via",
                "the relay is not a path between two hosts",
                where=where,
                found="the pair a second time" if via.between in pairs else " - ".join(path),
                expected="each pair of hosts once, over one host or more, no host twice",
            )
        pairs.update((via.between, via.between[::-1]))
    return pairs


def _no_hop(hop: tuple[str, str], cluster: Cluster) -> bool:
    return hop[0] != hop[1] and cluster.link(*hop) is None


def _talks(resolved: Resolved, cluster: Cluster) -> Iterator[tuple[int, int, str]]:
    """Yield the pairs of devices that exchange messages, with the place in the plan that asks for it.

    Where all devices must talk with all, the pairs of linked regions are left out, because they can.
    """
    linked = {pair for link in cluster.links for pair in (link.between, link.between[::-1])}
    for part in resolved.pipelines:
        where = f"pipeline {part.pipeline.job.name}"
        yield from ((a, b, f"{where}, between stages") for a, b in _stage_pairs(part, resolved))
        yield from ((a, b, f"{where}, batch statistics") for a, b in _mixing_pairs(part, resolved, linked))
        seen: set[tuple[str, int | None, int, int, frozenset[Layout]]] = set()
        for given, sync in zip(part.pipeline.syncs, part.syncs, strict=True):
            holders, states = part.holders[sync.parameters[0]], _states(part, sync)
            alike = (sync.how, sync.root, id(sync.participants), id(holders), states)
            if alike not in seen:
                seen.add(alike)
                pairs = _sync_pairs(part, sync, resolved, linked, states)
                yield from ((a, b, f"{where}, sync {given.bucket}") for a, b in pairs)
        yield from ((a, b, f"{where}, totals of a step") for a, b in _total_pairs(part))


def _stage_pairs(part: ResolvedPipeline, resolved: Resolved) -> Iterator[Pair]:
    joined = {
        (part.stage_of[tensor.source], part.stage_of[target], tensor.grad)
        for tensor in part.graph.tensors
        if tensor.source >= 0
        for target in tensor.targets
    }
    for source, target, grad in sorted(joined):
        if source == target:
            continue
        yield from _flow_pairs(part, source, target, resolved)
        if grad:
            yield from _flow_pairs(part, target, source, resolved)


def _mixing_pairs(part: ResolvedPipeline, resolved: Resolved, linked: set[tuple[str, str]]) -> Iterator[Pair]:
    for stage in part.stages:
        mixes = any(block.statistics for block in part.graph.blocks[stage.first : stage.last + 1])
        if mixes and not stage.duplicate:
            yield from _all_pairs((replica.devices for replica in stage.replicas), resolved, linked)


def _relay_pairs(resolved: Resolved) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield each host that relays messages, paired with the leader's host."""
    for part in resolved.pipelines:
        hosts = {resolved.devices[device].host for pair in _total_pairs(part) for device in pair}
        leader = resolved.devices[part.stages[-1].replicas[0].devices[0]].host
        used = list(resolved.plan.via)
        while over := [via for via in used if set(via.between) <= hosts]:
            hosts.update(host for via in over for host in via.hosts)
            used = [via for via in used if via not in over]
            where = f"pipeline {part.pipeline.job.name}, totals of a step"
            yield from (((host, leader), where) for via in over for host in via.hosts)


def _total_pairs(part: ResolvedPipeline) -> Iterator[Pair]:
    leader = part.stages[-1].replicas[0].devices[0]
    workers = dict.fromkeys(device for stage in part.stages for replica in stage.replicas for device in replica.devices)
    workers.update((sync.root, None) for sync in part.syncs if sync.root is not None)
    return ((device, leader) for device in workers)


def _flow_pairs(part: ResolvedPipeline, source: int, target: int, resolved: Resolved) -> Iterator[Pair]:
    for receiver in part.stages[target].replicas:
        for index, _, _ in suppliers(resolved, part.stages[source], receiver):
            yield from _between(part.stages[source].replicas[index], receiver)


def _between(one: ResolvedReplica, other: ResolvedReplica) -> Iterator[Pair]:
    return ((a, b) for a in one.devices for b in other.devices)


def _sync_pairs(
    part: ResolvedPipeline,
    sync: ResolvedSync,
    resolved: Resolved,
    linked: set[tuple[str, str]],
    states: frozenset[Layout],
) -> Iterator[Pair]:
    groups = _groups(part, sync)
    if sync.how == "server" and sync.root is not None:
        yield from ((device, sync.root) for group in groups.values() for device in group)
    elif sync.how == "tree":
        by_region: dict[str, list[int]] = {}
        for first in sync.participants:
            by_region.setdefault(resolved.regions[first], []).append(first)
        for members in by_region.values():
            yield from _all_pairs((groups[first] for first in members), resolved, linked)
        for a, b in _ring([members[0] for members in by_region.values()]):
            yield from ((x, y) for x in groups[a] for y in groups[b])
    if sync.how == "factors" or "sharded-all" in states:
        yield from _all_pairs((groups[first] for first in sync.participants), resolved, linked)
    if sync.how in ("ring", "sparse") or states != {"replicated"}:
        for a, b in _ring(sync.participants):
            yield from ((x, y) for x in groups[a] for y in groups[b])


def _all_pairs(groups: Iterable[tuple[int, ...]], resolved: Resolved, linked: set[tuple[str, str]]) -> Iterator[Pair]:
    """Yield the pairs of devices of different groups, without the pairs whose regions have a link."""
    by_region: dict[str, list[int]] = {}
    for group in groups:
        for device in group:
            by_region.setdefault(resolved.regions[device], []).append(device)
    for one, other in combinations_with_replacement(by_region, 2):
        if (one, other) not in linked:
            yield from combinations(by_region[one], 2) if one == other else product(by_region[one], by_region[other])


def _groups(part: ResolvedPipeline, sync: ResolvedSync) -> dict[int, tuple[int, ...]]:
    """Return all devices of each participant, by its first device."""
    return {
        replica.devices[0]: replica.devices
        for holder in part.holders[sync.parameters[0]]
        for replica in (part.replica(holder),)
    }


def _ring(members: Sequence[int]) -> Iterator[Pair]:
    return pairwise((*members, members[0])) if len(members) > 1 else iter(())


def _states(part: ResolvedPipeline, sync: ResolvedSync) -> frozenset[Layout]:
    """Return the states of the stages that hold the bucket.

    Sharded state is gathered around the ring, however the gradient came.
    """
    return frozenset(part.pipeline.stages[stage].state for name in sync.parameters for stage, _ in part.holders[name])
