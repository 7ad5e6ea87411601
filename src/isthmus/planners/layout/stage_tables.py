"""Bundles that could stand in one stage, and what they would do there: the rows that `stage_dp` reads.

Every run of bundles is looked up once and gets a row. Rows stay, so that the table of an order of bundles is no more
than their numbers. Seconds and memory do not depend on the order in a run; what its sync takes does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from isthmus.planners.layout.layout_types import Bundle, Groups, Need, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.stage_shares import Sharing, StageShare
from isthmus.planners.problem import Floats, Problem

__all__ = ["Distances", "Ints", "Shorts", "StageTables", "sync_seconds"]

Ints = npt.NDArray[np.int32]
Shorts = npt.NDArray[np.int16]
_Number = TypeVar("_Number", bound=np.generic)
_Stand = tuple[Floats, Floats, int, int]  # seconds before each border, forward and backward; row of flights; hosts
_REGIONS = 2  # that a stage has bundles of, at most


class StageTables:
    """The rows of one problem, at the borders that models are cut at."""

    def __init__(self, problem: Problem, memory: MemoryFit, sharing: Sharing, borders: npt.NDArray[np.int64]) -> None:
        self.problem, self.memory, self.sharing, self.borders = problem, memory, sharing, borders
        count = len(borders)
        self.forward: Floats = np.zeros((64, count))  # [rows, borders] seconds of all blocks before each, a micro-batch
        self.backward: Floats = np.zeros((64, count))
        self.per_byte: Floats = np.zeros(64)  # [rows] seconds of a sync for each byte
        self.waits: Floats = np.zeros(64)  # [rows] seconds of a sync beside its bytes
        self.hosts: Ints = np.zeros(64, np.int32)  # [rows] that send at a time
        self.kept: Ints = np.zeros(64, np.int32)  # [rows] the row of `flights`
        self.flights: Shorts = np.zeros((8, 2, count - 1, count), np.int16)  # that fit, plain and recomputed
        self._rows, self._flight_rows = 0, dict[int, int]()  # rows in use; rows of flights by what fits
        self._numbers: dict[Bundle, int] = {}  # of bundles that were met
        self._known: dict[
            tuple[int, StageOptions, int], tuple[dict[tuple[int, ...], int], dict[frozenset[int], _Stand]]
        ] = {}
        self._fits: dict[tuple[object, ...], Shorts] = {}
        self._rings: dict[tuple[str, ...], tuple[float, float]] = {}

    def table(self, bundles: Sequence[Bundle], samples: int, held: StageOptions, others: int) -> Ints:
        """Return the row of bundles i .. j - 1, [bundles, bundles + 1]; -1 where they are in too many regions."""
        count = len(bundles)
        table = np.full((count, count + 1), -1, np.int32)
        numbers = tuple(self._numbers.setdefault(bundle, len(self._numbers)) for bundle in bundles)
        rows, stands = self._known.setdefault((samples, held, others), ({}, {}))
        for i in range(count):
            regions: set[str] = set()
            for j in range(i + 1, count + 1):
                regions.add(bundles[j - 1].region)
                if len(regions) > _REGIONS:
                    break
                key = numbers[i:j]
                if key not in rows:
                    groups = tuple(group for bundle in bundles[i:j] for group in bundle.groups)
                    same = frozenset(key)
                    if same not in stands:
                        stands[same] = self._stand(groups, samples, held, others)
                    rows[key] = self._added(stands[same], self.ring(tuple(group[0] for group in groups)))
                table[i, j] = rows[key]
        return table

    def _added(self, stand: _Stand, ring: tuple[float, float]) -> int:
        row, self._rows = self._rows, self._rows + 1
        if row == len(self.forward):
            self.forward, self.backward = _twice(self.forward), _twice(self.backward)
            self.per_byte, self.waits = _twice(self.per_byte), _twice(self.waits)
            self.hosts, self.kept = _twice(self.hosts), _twice(self.kept)
        self.forward[row], self.backward[row], self.kept[row], self.hosts[row] = stand
        self.per_byte[row], self.waits[row] = ring
        return row

    def _stand(self, groups: Groups, samples: int, held: StageOptions, others: int) -> _Stand:
        shared = self.sharing.of(groups, samples)
        fits = self.fitting(groups, shared, held, others)
        if id(fits) not in self._flight_rows:  # it stays, and so does its id
            if len(self._flight_rows) == len(self.flights):
                self.flights = _twice(self.flights)
            self.flights[len(self._flight_rows)] = fits[:, self.borders[:-1, None], self.borders]
            self._flight_rows[id(fits)] = len(self._flight_rows)
        hosts = len({self.problem.cluster.devices[group[0]].host for group in groups})
        forward, backward = shared.seconds[:, self.borders]
        return forward, backward, self._flight_rows[id(fits)], hosts

    def fitting(self, groups: Groups, shared: StageShare, held: StageOptions, others: int) -> Shorts:
        """Return the micro-batches in flight that fit, for every run of blocks, plain and recomputed; 0 where places
        forbid it.
        """
        replicas = len(groups) + others
        places = tuple(sorted({group[0] for group in groups})) if self.problem.places else ()
        key = (shared.most, held, replicas if held.state != "replicated" else min(replicas, 2), places)
        if key not in self._fits:
            both = []
            for way in (held._replace(recompute=again) for again in (False, True)):
                needs = [Need((kind,), group[0], replicas, share, 1) for (kind, group), share in shared.most]
                both.append(np.min([self.memory.flights(need, way) for need in needs], axis=0))
            found = np.where(self.memory.allowed(places), both, 0) if places else np.array(both)
            self._fits[key] = found.astype(np.int16)
        return self._fits[key]

    def ring(self, leads: tuple[str, ...]) -> tuple[float, float]:
        """Return about the least cost of a gradient sync: seconds for each byte, and seconds beside them."""
        if leads not in self._rings:
            self._rings[leads] = sync_seconds(self.problem, leads)
        return self._rings[leads]


class Distances:
    """Latency between hosts, and seconds a byte of one pair and of all pairs of their regions together."""

    def __init__(self, problem: Problem) -> None:
        self.cluster = problem.network
        self._numbers: dict[str, int] = {}
        self._known: Floats = np.zeros((3, 0, 0))

    def between(self, bundles: Sequence[Bundle]) -> tuple[Floats, Floats, Floats]:
        """Return latency, seconds a byte of one pair, and of all pairs of the regions, each [bundles, bundles]."""
        new = dict.fromkeys(bundle.host for bundle in bundles if bundle.host not in self._numbers)
        if new:
            self._add(list(new))
        at = [self._numbers[bundle.host] for bundle in bundles]
        latency, link, trunk = np.ascontiguousarray(self._known[:, np.array(at)[:, None], at])
        return latency, link, trunk  # in one order of memory: so `solve` is compiled once

    def _add(self, new: Sequence[str]) -> None:
        old = self._known
        self._numbers |= {name: old.shape[1] + i for i, name in enumerate(new)}
        names = list(self._numbers)
        self._known = np.zeros((3, len(names), len(names)))
        self._known[:, : old.shape[1], : old.shape[1]] = old
        for i, a in enumerate(names):
            for j in range(old.shape[1] if i < old.shape[1] else 0, len(names)):
                self._known[:, i, j] = self._distance(a, names[j])

    def _distance(self, a: str, b: str) -> tuple[float, float, float]:
        cluster = self.cluster
        here, there = cluster.hosts[a], cluster.hosts[b]
        if a == b:
            return float(here.latency), 1.0 / here.bandwidth, 0.0
        pair, cap = cluster.link(a, b), cluster.trunk(here.region, there.region)
        shared = 1.0 / cap if cap else 0.0
        if pair is None:
            return float("inf"), float("inf"), shared
        slowest = min(pair.bandwidth, here.nic, there.nic_in)
        return float(pair.latency), 1.0 / slowest if slowest else float("inf"), shared


def _twice(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    """Return an array with as many rows again."""
    return np.concatenate((array, np.zeros_like(array)))


def sync_seconds(problem: Problem, leads: Sequence[str]) -> tuple[float, float]:
    """Return the seconds of a sync for each byte of a bucket, and beside them: around a ring or, between regions, in
    each region first.
    """
    count, cluster = len(leads), problem.network
    if count < 2:
        return 0.0, 0.0
    inside, across, waits, apart = np.inf, np.inf, 0.0, False
    for a, b in pairwise((*leads, leads[0])):
        host, other = cluster.host_of(a), cluster.host_of(b)
        if host.name == other.name:
            inside, waits = min(inside, float(host.bandwidth)), waits + float(host.latency)
            continue
        link = cluster.link(host.name, other.name)
        if link is None:
            return np.inf, np.inf
        rate, waits = min(float(link.bandwidth), float(host.nic), float(other.nic_in)), waits + float(link.latency)
        if host.region == other.region:
            inside = min(inside, rate)
        else:
            across, apart = min(across, rate), True
    ring = 2.0 * (count - 1) / count / min(inside, across), 2.0 * waits * (count - 1) / count
    if not apart:
        return ring
    return min(ring, (2.0 / inside + 2.0 / across, 2.0 * waits))
