"""Random profiles for a plan: some of its blocks and syncs are known, some by one point only, times are anything."""

from __future__ import annotations

from random import Random

from isthmus.cluster.spec import PRECISIONS, Cluster
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import BlockTime, CollectiveTime, DeviceCosts, NetworkCosts, Profile
from isthmus.plan.types import Pipeline, Plan

__all__ = ["random_profile"]


def random_profile(plan: Plan, cluster: Cluster, graph: BlockGraph, seed: int) -> Profile:
    """Up to four points of each block, kind, precision and degree, and of the participants of each sync."""
    random = Random(seed)
    blocks = [
        BlockTime(
            block=digest,
            device=kind,
            precision=precision,
            samples=samples,
            tensor=tensor,
            forward_seconds=10 ** random.uniform(-6, -2.5),
            backward_seconds=10 ** random.uniform(-6, -2.5),
        )
        for digest in dict.fromkeys(block.digest for block in graph.blocks)
        for kind in cluster.kinds
        for precision in PRECISIONS
        for tensor in (1, 2)
        if random.random() < 0.7
        for samples in random.sample(range(1, 13), random.choice((1, 1, 2, 3, 4)))
    ]
    return Profile(
        origin="dice",
        blocks=tuple(blocks),
        collectives=tuple(_collectives(plan, cluster, random)),
        devices=tuple(_device_costs(kind, random) for kind in cluster.kinds if random.random() < 0.6),
        network=random.choice((None, NetworkCosts(payload=random.uniform(0.5, 1.0), message_seconds=_short(random)))),
    )


def _short(random: Random) -> float:
    return 10 ** random.uniform(-6, -3.5)


def _device_costs(kind: str, random: Random) -> DeviceCosts:
    """Updates slower or quicker than the catalog's."""
    return DeviceCosts(
        device=kind,
        action_seconds=_short(random),
        step_seconds=_short(random),
        update_bandwidth=random.choice((None, 10 ** random.uniform(10, 13))),
        add_bandwidth=random.choice((None, 10 ** random.uniform(7, 10))),
        context_bytes=random.choice((None, 1e8)),
        held=random.choice((1.0, 1.5)),
        held_recomputed=random.choice((1.0, 2.5)),
    )


def _collectives(plan: Plan, cluster: Cluster, random: Random) -> list[CollectiveTime]:
    """Each kind of sync of the plan among its hosts, sometimes; of tensor groups, all members are on like hosts."""
    found: dict[tuple[object, ...], list[CollectiveTime]] = {}
    for sync in (sync for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs):
        how = "ring" if sync.how == "sparse" else sync.how
        if how in ("factors", "duplicate") or random.random() < 0.3:
            continue
        hosts = [cluster.host_of(device).name for device in sync.participants]
        root = cluster.host_of(sync.root).name if sync.root else None
        key = (how, tuple(sorted(hosts)), root)
        if key not in found:
            if how == "server" or random.random() < 0.1:
                random.shuffle(hosts)
            elif how == "ring":
                at = random.randrange(len(hosts))
                hosts = (hosts[at:] + hosts[:at])[:: random.choice((1, -1))]
            found[key] = [
                CollectiveTime(how=how, hosts=tuple(hosts), root=root, bytes=size, seconds=10 ** random.uniform(-5, -1))
                for size in random.sample(_SIZES, random.choice((1, 2, 3, 8)))
            ]
    return [time for times in found.values() for time in times]


_SIZES = [float(size) for size in (1e3, 1e4, 3e4, 64e3, 128e3, 256e3, 512e3, 1024e3)]
