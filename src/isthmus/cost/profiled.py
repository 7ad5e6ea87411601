"""Block times of one model from a profile.

For a block on s samples, on a kind that computes in some precision, as one device or as a tensor group of n, there are

- two points or more of that block, kind, precision and n: the time lies on a straight line (`model.profile.along`);
- one point (s_1, t_1): the time is what the roofline says, times t_1 over what it says at s_1;
- no point, but a time t_1 of one device alone: the time is c_n t_1 / c_1 + a_n, where c is what the roofline says of
  computing and a_n what it says of the all-reduces on the group's links. What slows one device down slows down each
  device of a group, and says nothing about their links;
- no times at all: the time is the roofline's.

Times of a tensor group were measured inside a host, so they do not hold for a group whose links are not those of a host
with such devices. No point contains the loss: the last block gets it from the roofline, as memory traffic
(`cost.compute`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Cluster, Precision
from isthmus.cost.compute import Group
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import BlockPoints, Profile, along

__all__ = ["ALONE", "ESTIMATED", "INTERPOLATED", "MEASURED", "Profiled"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Roofline = Callable[[str, Group, int], Floats]  # kind, group, samples
Work = Callable[[str, Group], Floats]  # kind, group
Known = dict[int, tuple[Ints, BlockPoints]]  # equal blocks and their points, by the first of the blocks

ALONE: Group = (1, float("inf"), 0.0)  # a device that is no tensor group

MEASURED, INTERPOLATED, ESTIMATED = 0, 1, 2  # where a time comes from


class Profiled:
    """The times of one model's blocks on one cluster, as far as a profile has them."""

    def __init__(
        self,
        profile: Profile,
        graph: BlockGraph,
        cluster: Cluster,
        computed: Mapping[str, Precision | None],
        roofline: Roofline,
        bare: Roofline,
        loss: Roofline,
    ) -> None:
        """Collect the points of the profile that apply to the model on the cluster.

        `computed` has the precision in which each kind computes. `roofline` gives sums over blocks, `bare` the seconds
        of blocks without the loss, [2, blocks], and `loss` the seconds of the loss, [2].
        """
        self._roofline, self._loss, self._blocks = roofline, loss, len(graph.blocks)
        self._bare = lru_cache(64)(bare)
        self._links: dict[str, set[tuple[float, float]]] = {kind: set() for kind in cluster.kinds}
        devices, together = Counter[str](), dict.fromkeys(cluster.kinds, 0)  # of each kind: all, most on one host
        for host in cluster.hosts.values():
            devices.update(host.devices)
            for kind, count in host.devices.items():
                self._links[kind].add((host.bandwidth, host.latency))
                together[kind] = max(together[kind], count)
        splits = any(block.tensor is not None for block in graph.blocks)
        self._grouped = {kind for kind, count in devices.items() if splits and count > 1}
        where: dict[str, list[int]] = {}
        for index, block in enumerate(graph.blocks):
            where.setdefault(block.digest, []).append(index)
        self._points: dict[tuple[str, int], Known] = {}
        for (digest, kind, precision, degree), points in profile.block_points.items():
            possible = degree == 1 or (splits and degree <= together.get(kind, 0))
            if digest in where and computed.get(kind) == precision and possible:
                blocks = np.array(where[digest], np.int32)
                self._points.setdefault((kind, degree), {})[where[digest][0]] = (blocks, points)

    @property
    def kinds(self) -> set[str]:
        """Return the kinds on which some block was measured."""
        return {kind for kind, _ in self._points}

    def _known(self, kind: str, group: Group) -> Known:
        """Return the measured block times of such a group; empty if there are none."""
        inside = group[0] == 1 or group[1:] in self._links[kind]
        return self._points.get((kind, group[0]), {}) if inside else {}

    def _alone(self, kind: str, group: Group) -> Known:
        """Return the block times measured of one device alone and not of a group like this one."""
        own = self._known(kind, group)
        return {first: known for first, known in self._points.get((kind, 1), {}).items() if first not in own}

    def seconds(self, kind: str, group: Group, samples: int) -> Floats:
        """Return cumulative seconds over blocks, [2, blocks + 1]: the roofline's, or measured where possible."""
        sums, own, alone = self._roofline(kind, group, samples), self._known(kind, group), self._alone(kind, group)
        if not own and not alone:
            return sums
        times = np.diff(sums)
        for blocks, points in own.values():
            times[:, blocks] = self._at(kind, group, samples, blocks, points)
        for blocks, points in alone.values():
            times[:, blocks] = self._together(kind, group, samples, blocks, points)
        if any(blocks[-1] == self._blocks - 1 for blocks, _ in (*own.values(), *alone.values())):
            times[:, -1] += self._loss(kind, group, samples)
        return np.concatenate((np.zeros((2, 1)), np.cumsum(times, axis=1)), axis=1)

    def _together(self, kind: str, group: Group, samples: int, blocks: Ints, points: BlockPoints) -> Floats:
        """Return the seconds of equal blocks on a group of which only one device was measured, [2, blocks]."""
        one, many = (self._bare(kind, (n, np.inf, 0.0), samples)[:, blocks] for n in (1, group[0]))
        ratio = np.ones(one.shape)
        np.divide(many, one, out=ratio, where=one > 0.0)
        sending = self._bare(kind, group, samples)[:, blocks] - many
        return np.asarray(ratio * self._at(kind, ALONE, samples, blocks, points) + sending)

    def _at(self, kind: str, group: Group, samples: int, blocks: Ints, points: BlockPoints) -> Floats:
        """Return the seconds of equal blocks on `samples` samples, [2, blocks or 1]."""
        if len(points.forward) > 1:
            return np.array([[along(points.forward, samples)], [along(points.backward, samples)]])
        (once, forward), (_, backward) = points.forward[0], points.backward[0]
        there, here = (self._bare(kind, group, s)[:, blocks] for s in (int(once), samples))
        ratio = np.full(there.shape, samples / once)
        np.divide(here, there, out=ratio, where=there > 0.0)
        return np.asarray(ratio * np.array([[forward], [backward]]))

    def sources(self, kind: str, group: Group, samples: int) -> Ints:
        """Return for each block where its times come from: MEASURED, INTERPOLATED or ESTIMATED."""
        marks = np.full(self._blocks, ESTIMATED, np.int32)
        for blocks, _ in self._alone(kind, group).values():
            marks[blocks] = INTERPOLATED
        for blocks, points in self._known(kind, group).values():
            marks[blocks] = MEASURED if any(x == samples for x, _ in points.forward) else INTERPOLATED
        return marks

    def least(self, kind: str, samples: int, work: Work) -> Floats:
        """Return for each block the least seconds per sample, both ways, on this kind and up to `samples` samples.

        If n devices take t(s) for s samples, they spend n t(s) / s on each. Along a straight line t / s is least at one
        of its ends; where the roofline gives t or scales it, t / s falls as s grows. So the least is at a measured
        number of samples or at the largest, of a measured degree or of one device. Groups of which only one device was
        measured spend no less than that device: they divide a part f of the work, so c_n >= c_1 (1 - f + f / n) and n
        c_n >= c_1. In groups that were not measured at all it is the roofline's `work`: for n devices it is n - f (n -
        1) times that of one, which is least for two devices.
        """
        groups = [ALONE]
        groups += [(n, *links) for of, n in self._points if of == kind and n > 1 for links in self._links[kind]]
        least = np.full(self._blocks, np.inf)
        for group in groups:
            known = self._known(kind, group).values()
            counts = {int(x) for _, points in known for x, _ in points.forward if x < samples}
            for count in (*counts, samples):
                both = np.diff(self.seconds(kind, group, count)).sum(axis=0)
                least = np.minimum(least, both * (group[0] / count))
        if kind in self._grouped:
            free = 2 * work(kind, (2, np.inf, 0.0))
            for blocks, _ in self._points.get((kind, 1), {}).values():
                free[blocks] = np.inf
            least = np.minimum(least, free)
        return least
