"""The memory that a stage needs with any blocks, so that a cut knows which stages fit where.

For blocks a .. b - 1 on a replica of a stage, on each of its devices, in bytes (`cost.memory` says why):

    state + share * (in flight * saved + transient) + buffers + context

All are matrices over (a, b). State that is sharded whole is gathered in parts of one block or more. The estimate leaves
out room for what others send, the size of such parts beyond the usual one, and an allocator's gaps: so what it refuses
does not fit; what it lets pass is judged by the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.cost.memory import state_bytes
from isthmus.planners.layout.layout_types import Need, StageOptions
from isthmus.planners.problem import Bools, Floats, Problem

__all__ = ["MemoryFit"]

_MOST_FLIGHT = 1000.0  # micro-batches: as good as any number


class _Spans(NamedTuple):
    """Sums over blocks a .. b - 1, [blocks, blocks + 1]; elements, or bytes per sample."""

    elements: Floats
    split_elements: Floats
    pruned: Floats
    saved: Floats
    split_saved: Floats
    inputs: Floats
    largest_saved: Floats
    workspace: Floats
    largest_elements: Floats


class MemoryFit:
    """The memory side of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._spans: dict[bool, _Spans] = {}
        blocks = len(problem.graph.blocks)
        self.ordered = np.arange(blocks)[:, None] < np.arange(blocks + 1)  # a < b
        self._parts: dict[tuple[object, ...], tuple[Floats, Floats]] = {}

    def fits(self, need: Need, way: StageOptions) -> Bools:
        """Return for which runs of blocks the stage fits on all its devices, can be split,
        and is where places want it.
        """
        kinds = {self.problem.cluster.devices[device].kind for device in need.devices}
        fits = self.allowed(need.devices) & self.splits(need.degree)
        for kind in sorted(kinds):
            fits &= self._bytes(need, way, kind) <= self.problem.cluster.kinds[kind].memory
        return fits

    def flights(self, need: Need, way: StageOptions) -> Floats:
        """Return the most micro-batches in flight for each run of blocks; 0 where the stage does not fit at all.

        `need.devices` names a kind; places are left to `allowed`.
        """
        (kind,) = need.devices
        none = self._bytes(need._replace(in_flight=0), way, kind)
        left, each = self.problem.cluster.kinds[kind].memory - none, need.share * self._saved(need, way, kind)
        most = np.floor(np.minimum(left / np.maximum(each, 1e-9) + 1e-9, _MOST_FLIGHT))
        return np.where(self.splits(need.degree) & (left >= 0.0), most, 0.0)

    def filled(self, need: Need, way: StageOptions) -> Floats:
        """Return the bytes of the device that needs most, as a part of its memory; infinite where a run cannot be."""
        kinds = {self.problem.cluster.devices[device].kind for device in need.devices}
        memory = self.problem.cluster.kinds
        parts = [self._bytes(need, way, kind) / memory[kind].memory for kind in sorted(kinds)]
        return np.where(self.allowed(need.devices) & self.splits(need.degree), np.max(parts, axis=0), np.inf)

    def splits(self, degree: int) -> Bools:
        """Return which runs of blocks have something that a tensor group can split; one device can have any."""
        if degree == 1:
            return self.ordered
        sums = np.concatenate(([0], np.cumsum([block.tensor is not None for block in self.problem.graph.blocks])))
        return np.asarray(sums[None, :] > sums[:-1, None])

    def allowed(self, devices: Sequence[str]) -> Bools:
        """Return which runs of blocks the job's places let be on all these devices."""
        if not self.problem.places:
            return self.ordered.copy()
        blocks = np.all([self.problem.allowed(device) for device in devices], axis=0)
        barred = np.concatenate(([0], np.cumsum(~blocks)))
        return np.asarray(self.ordered & (barred[None, :] == barred[:-1, None]))

    def _bytes(self, need: Need, way: StageOptions, kind: str) -> Floats:
        key = (way, kind, need.degree, need.replicas, need.share)
        if key not in self._parts:
            self._parts[key] = self._held(need, way, kind), self._saved(need, way, kind)
        held, saved = self._parts[key]
        return held + (need.share * need.in_flight) * saved

    def _saved(self, need: Need, way: StageOptions, kind: str) -> Floats:
        spans = self._sums(kind)
        return spans.inputs if way.recompute else spans.saved - spans.split_saved * (1.0 - 1.0 / need.degree)

    def _held(self, need: Need, way: StageOptions, kind: str) -> Floats:
        """Return all bytes that do not grow with the micro-batches in flight."""
        problem, spans = self.problem, self._sums(kind)
        elements = spans.elements - spans.split_elements * (1.0 - 1.0 / need.degree)
        width, gradient, optimizer = state_bytes(problem.precision, problem.job.optimizer, problem.kept is not None)
        if way.spill:
            optimizer = 0.0
        copy = 4.0 if kind in problem.table.wide else 0.0
        if way.state == "sharded-all":
            gathered = 2 * spans.largest_elements / need.degree
            state = elements * (width + gradient + optimizer) / need.replicas + gathered * (width + gradient + copy)
        else:
            parts = need.replicas if way.state == "sharded-optimizer" else 1
            state = elements * (width + gradient + optimizer / parts + copy)
        transient = spans.workspace + (spans.largest_saved if way.recompute else 0.0)
        context = problem.simulator.context[kind] + 4.0 * problem.graph.buffers
        return state + need.share * transient + context

    def _sums(self, kind: str) -> _Spans:
        wide = kind in self.problem.table.wide
        if wide not in self._spans:
            blocks = len(self.problem.graph.blocks)
            sums = np.zeros((9, blocks, blocks + 1))
            for a in range(blocks):
                for b in range(a + 1, blocks + 1):
                    s = self.problem.table.span(a, b - 1, wide)
                    sums[:, a, b] = (
                        s.elements, s.split_elements, s.pruned, s.saved, s.split_saved, s.inputs, s.largest_saved,
                        s.largest_workspace, s.largest_elements,
                    )  # fmt: skip
            self._spans[wide] = _Spans(*sums)
        return self._spans[wide]
