"""Plans that consist of copies of a smaller plan, and their price from a few of the copies.

A plan is F-fold when

- the replicas of every stage are F runs of one pattern (kind, tensor degree, share, slices), where run j is copy j's;
- the copies have their devices on hosts of their own, and these correspond: equal shape, same region, same links;
- every sync lists its participants in *segments*, each of which lists some participants of copy after copy: a b of the
  first copy, a b of the second, ... and then c, c, c. So a ring that is written class by class crosses to another
  region as often as that of one copy, and one that is written host by host stays inside a host as long.

By symmetry all copies do the same at the same time. C copies are kept with their samples (two or more, with at least 32
devices), and each stands for F / C. What they compute, send from stage to stage and hold in memory is theirs alone, so
it is exact. What depends on the number of all participants, N = n F with n in each copy, is corrected:

- a ring of N participants: of its N hops, one inside a copy stands for F / C, one from a copy to the next stands for
  w = (F - 1) / (C - 1), and one from the last copy to the next segment stands for itself. Each participant sends the
  bytes of one of N participants, in as many rounds as n C need (or fewer, in a very large plan), and these rounds share
  the latencies of all hops evenly. This is exact when all hops are equal or one link is the bottleneck, and close in
  between.
- a chain (tree): a hop takes as long as all hops that it stands for. This is exact where nothing else uses the links,
  and up to a tenth too fast where hosts of several devices are written class by class and chains meet.
- messages from every participant to all (`sharded-all`, `factors`): w messages to another copy become one, which shares
  links as w would. This is exact where they are sent at the same time.
- trunks: this is exact for what all copies send and for what is sent once, but not where the two meet
  (`cost.replicas.folded_network`); so `sharded-all` over a trunk is up to an eighth too fast.
- totals: these take latencies only, which are the same for all copies but the leader's own, so they are exact.

`docs/cost-model.md` says what the tests compare with plans that are played whole.

Plans with several parts, relays, servers or duplicates are not folded, because a root is not in every copy. Plans with
measured times for their syncs are not folded either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from isthmus.cluster.spec import Cluster
from isthmus.plan.resolve import is_duplicate
from isthmus.plan.types import Pipeline, Plan, Stage

__all__ = ["FEWEST", "Folded", "Folder"]

Ints = npt.NDArray[np.int64]

FEWEST = 4  # the fewest copies that are worth folding
_KEPT = 32  # the fewest devices in the copies that are kept
_MESSAGES = 200_000  # about as many as the rings of one step may have
_ROUNDS = 8  # the fewest rounds of a ring that are played


class Folded(NamedTuple):
    """A plan of `kept` copies that stands for a plan of `copies`."""

    plan: Plan
    kept: int
    copies: int
    rounds: int  # the most rounds of a ring that are played
    devices: Ints  # [copies, devices of a copy]: device numbers; a column has a device of each copy
    hosts: Ints  # [copies, hosts of a copy]
    senders: Mapping[str, int]  # host -> how many of its replicas are sharded together

    @property
    def like(self) -> list[int]:
        """Return the kept copy that each copy is like.

        Rings enter the first copy and leave the last one, and the others are between them.
        """
        return [0, *[1] * (self.copies - 2), self.kept - 1]

    def kept_hosts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the hosts of the kept copies, by number, and the copy of each."""
        own = self.hosts[: self.kept].ravel()
        order = np.argsort(own)
        return tuple(own[order].tolist()), tuple((order // self.hosts.shape[1]).tolist())


class _StageColumns(NamedTuple):
    signs: Ints  # [replicas]: equal for equal kind, degree, share and slices
    devices: Ints  # of all replicas, one after another


class Folder:
    """Finds the copies in plans for one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.names = tuple(cluster.devices)
        self.hosts = tuple(cluster.hosts)
        self._number = {name: i for i, name in enumerate(self.names)}
        self._kind = [device.kind for device in cluster.devices.values()]
        numbers = {name: i for i, name in enumerate(self.hosts)}
        self._host_of = np.array([numbers[device.host] for device in cluster.devices.values()])
        shapes: dict[tuple[object, ...], int] = {}
        self._shape = np.array([shapes.setdefault(host.shape, len(shapes)) for host in cluster.hosts.values()])
        self._pairs = [
            (numbers[link.between[0]], numbers[link.between[1]], (link.bandwidth, link.latency))
            for link in cluster.links
            if link.between[0] in numbers and link.between[1] in numbers
        ]

    def fold(self, plan: Plan) -> Folded | None:
        """Return a few copies of the plan, of as many as it can have; None if these are fewer than `FEWEST`."""
        part = plan.parts[0]
        if len(plan.parts) > 1 or plan.via or not isinstance(part, Pipeline) or not _can_fold(part):
            return None
        most = math.gcd(*(len(stage.replicas) for stage in part.stages))
        if most < FEWEST:
            return None
        signs: dict[tuple[object, ...], int] = {}
        columns = [self._columns(stage, signs) for stage in part.stages]
        for copies in _divisors(most):
            rows = self._rows(columns, copies)
            if rows is None:
                continue
            kept = max(2, -(-_KEPT // rows[0].shape[1]))
            rings = self._rings(part, rows[0], kept)
            if kept < copies and rings is not None:
                small = _some(part, kept, copies, rings)
                return Folded(replace(plan, parts=(small,)), kept, copies, _rounds(small), *rows, _senders(small))
        return None

    def _columns(self, stage: Stage, signs: dict[tuple[object, ...], int]) -> _StageColumns:
        own: list[int] = []
        devices: list[int] = []
        number, kind = self._number, self._kind
        for replica in stage.replicas:
            devices.extend(number[name] for name in replica.devices)
            first = number[replica.devices[0]]
            sign = (kind[first], len(replica.devices), replica.share, replica.slices)
            own.append(signs.setdefault(sign, len(signs)))
        return _StageColumns(np.array(own), np.array(devices))

    def _rows(self, columns: Sequence[_StageColumns], copies: int) -> tuple[Ints, Ints] | None:
        """Return the devices and hosts of so many copies, or None if the plan does not consist of so many."""
        for column in columns:
            signs = column.signs.reshape(copies, -1)
            if (signs != signs[0]).any():
                return None
        devices = np.concatenate([column.devices.reshape(copies, -1) for column in columns], axis=1)
        hosts = self._host_of[devices]
        shapes = self._shape[hosts]
        if (shapes != shapes[0]).any():
            return None
        own, homes = _each_once(devices), _each_once(hosts)
        if own is None or homes is None or not self._pairs_correspond(homes):
            return None
        return own, homes

    def _pairs_correspond(self, hosts: Ints) -> bool:
        """Return whether links between two of the hosts are inside a copy, and every copy has the same ones."""
        count = hosts.shape[1]
        place = np.full(len(self.hosts), -1)
        place[hosts] = np.arange(hosts.size).reshape(hosts.shape)
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for one, other, link in self._pairs:
            a, b = sorted((int(place[one]), int(place[other])))
            if a < 0:
                continue
            if a // count != b // count:
                return False
            found.setdefault((a % count, b % count), []).append(link)
        return all(len(links) == len(hosts) and len(set(links)) == 1 for links in found.values())

    def _rings(self, part: Pipeline, devices: Ints, kept: int) -> dict[tuple[str, ...], tuple[str, ...]] | None:
        """Return, by the participants of each sync, those of the kept copies; None if a sync is not in segments."""
        place = np.full(len(self.names), -1)
        place[devices] = np.arange(devices.size).reshape(devices.shape)
        found: dict[tuple[str, ...], tuple[str, ...]] = {}
        for sync in part.syncs:
            if sync.participants not in found:
                at = place[[self._number[name] for name in sync.participants]]
                own = _segments(at, len(devices), devices.shape[1], kept)
                if own is None:
                    return None
                found[sync.participants] = tuple(self.names[d] for d in devices.ravel()[own].tolist())
        return found


def _can_fold(part: Pipeline) -> bool:
    micro_batch = part.job.batch // part.micro_batches
    rooted = any(sync.how in ("server", "duplicate") for sync in part.syncs)
    return not rooted and not any(is_duplicate(stage, micro_batch) for stage in part.stages)


def _divisors(most: int) -> Iterator[int]:
    """Return the numbers of copies to try, from the largest to the fewest worth folding."""
    return (most // parts for parts in range(1, most // FEWEST + 1) if most % parts == 0)


def _each_once(rows: Ints) -> Ints | None:
    """Return the columns without those that repeat an earlier one; None if rows repeat differently or share a value."""
    _, index, inverse = np.unique(rows[0], return_index=True, return_inverse=True)
    own = rows[:, index]
    if (rows != own[:, inverse]).any() or len(np.unique(own)) < own.size:
        return None
    return own


def _segments(at: Ints, copies: int, count: int, kept: int) -> Ints | None:
    """Return the participants of the first copies, out of those of all copies; None if these are not in segments.

    Participants are numbered copy * count + device. Every segment goes through the copies in the same order, whichever
    that is.
    """
    copy, device = np.divmod(at, count)
    starts = np.flatnonzero(np.diff(copy, prepend=-1))
    if (at < 0).any() or len(starts) % copies:
        return None
    order = copy[starts].reshape(-1, copies)
    lengths = np.diff(starts, append=len(at)).reshape(-1, copies)
    if (order != order[0]).any() or (lengths != lengths[:, :1]).any() or len(np.unique(order[0])) < copies:
        return None
    found: list[Ints] = []
    for first, length in zip(starts[::copies].tolist(), lengths[:, 0].tolist(), strict=True):
        table = device[first : first + copies * length].reshape(copies, length)
        if (table != table[0]).any():
            return None
        found.extend(copy * count + table[0] for copy in range(kept))
    return np.concatenate(found)


def _some(part: Pipeline, kept: int, copies: int, rings: dict[tuple[str, ...], tuple[str, ...]]) -> Pipeline:
    """Return the pipeline with only the kept copies, and with their samples."""
    return replace(
        part,
        job=replace(part.job, batch=part.job.batch * kept // copies),
        stages=tuple(
            replace(stage, replicas=stage.replicas[: len(stage.replicas) * kept // copies]) for stage in part.stages
        ),
        syncs=tuple(replace(sync, participants=rings[sync.participants]) for sync in part.syncs),
    )


def _senders(part: Pipeline) -> Counter[str]:
    """Return, by host, the most replicas of one sharded-all stage that it has."""
    found: Counter[str] = Counter()
    for stage in part.stages:
        if stage.state == "sharded-all":
            found |= Counter(replica.devices[0].split("/")[0] for replica in stage.replicas)
    return found


def _rounds(part: Pipeline) -> int:
    """Return as many rounds of a ring as keep the messages of a step few, an even number."""
    sharded = [stage for stage in part.stages if stage.state == "sharded-all"]
    turns = part.micro_batches * max((stage.replicas[0].slices for stage in sharded), default=0)
    members = max(len(replica.devices) for stage in part.stages for replica in stage.replicas)
    each_round = sum(len(sync.participants) for sync in part.syncs) * max(1, turns) * members
    return max(_MESSAGES // max(each_round, 1), _ROUNDS) // 2 * 2
