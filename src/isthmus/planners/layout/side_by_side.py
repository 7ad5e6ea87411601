"""Pipelines side by side: the form that all plans of one job have.

A *lane* is a pipeline with some samples of each micro-batch: its stages, each with replicas that share them. Plain data
parallelism is a lane for each device; a plain pipeline is one lane; between them is everything else. Lanes need not be
cut alike: the plan's stages end wherever a stage of some lane ends, and a device of another lane holds several of them.

What a layout leaves open is found by the exact pieces: stages and cuts of a lane (`stage_dp`), shares inside a stage
(`stage_shares`), and samples of the lanes, so that all are done together as far as estimates go (`shares.fair_shares`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from isthmus.plan.types import How, Pipeline, Plan, Replica
from isthmus.plan.types import Stage as PlanStage
from isthmus.planners.layout.build_plan import make_plan
from isthmus.planners.layout.device_groups import orders
from isthmus.planners.layout.layout_types import (
    BUCKET,
    Bundle,
    Groups,
    Lane,
    LaneOptions,
    Layout,
    Staged,
)
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.pipeline_bounds import cut_times
from isthmus.planners.layout.shares import fair_shares
from isthmus.planners.layout.stage_dp import Arranged, Arranger
from isthmus.planners.layout.stage_shares import Sharing
from isthmus.planners.problem import Problem
from isthmus.planners.search_constants import LANE_EFFORT
from isthmus.planners.search_state import SearchState

__all__ = ["BUCKETS", "LaneMaker", "lanes_plan", "layout_key"]

_TRACED = 4  # orders whose slowest stage is quickest: of each depth only these are looked at
_SAME, _SHALLOW, _DEEP = 2, 3, 3  # pipelines of one depth, depths that are always tried, pipelines of other depths
BUCKETS = (12, 1)  # of all gradients, at least: many are sent while the backward pass goes on, few wait less
_NEAR = 0.1  # part of a lane's samples that may change without arranging its bundles anew


class LaneMaker:
    """Completes lanes of one problem; remembers what it has found. `state`: the search that counts its effort."""

    def __init__(self, problem: Problem, memory: MemoryFit, state: SearchState | None = None) -> None:
        self.problem, self.memory, self.state = problem, memory, state or SearchState(problem)
        self.sharing = Sharing(problem)
        self.arranger = Arranger(problem, memory, self.sharing, self.state)
        self._orders: dict[tuple[Bundle, ...], list[tuple[Bundle, ...]]] = {}
        self._best: dict[tuple[object, ...], Lane | None] = {}
        self._seconds: dict[tuple[object, ...], tuple[float, float]] = {}

    def complete(self, parts: Sequence[tuple[Bundle, ...]], options: LaneOptions) -> Layout | None:
        """Return the best lanes for these parts of the cluster; None where some part cannot hold the model."""
        samples = self.problem.job.batch // options.micro_batches
        if not parts or len(parts) > samples:
            return None
        speeds = [sum(bundle.speed for bundle in part) for part in parts]
        given = fair_shares(samples, [partial(_spent, speed) for speed in speeds])
        for _ in range(3):
            found = [self.lane(part, n, options, len(parts) - 1) for part, n in zip(parts, given, strict=True)]
            lanes = [lane for lane in found if lane is not None]
            if len(lanes) < len(found):
                return None
            wanted = self.fair(lanes, samples, options)
            near = all(abs(n - lane.samples) <= _NEAR * lane.samples for n, lane in zip(wanted, lanes, strict=True))
            parts = [part for part, n in zip(parts, wanted, strict=True) if n]
            given = [n for n in wanted if n]
            if near:
                break
        moved = [self.resized(lane, n, options) for lane, n in zip(lanes, wanted, strict=True) if n]
        return self.layout(moved, options)

    def layout(self, lanes: Sequence[Lane], options: LaneOptions) -> Layout:
        """Put lanes side by side, and estimate what they take together."""
        near = sorted(lanes, key=lambda lane: _place(self.problem, lane.stages[0][0][0][0]))  # rings go round in order
        timed = tuple(self.timed(lane, options, alone=len(near) == 1) for lane in near)
        return Layout(timed, options, max(lane.seconds for lane in timed) + self._between(timed))

    def lane(self, part: tuple[Bundle, ...], samples: int, options: LaneOptions, others: int = 0) -> Lane | None:
        """Return the best pipeline of these bundles, in any of the usual orders.

        None where they cannot hold the model.
        """
        key = (part, samples, options, others if options.state != "replicated" else min(others, 1))
        if key not in self._best:
            self._best[key] = next(iter(self.pipelines(part, samples, options, others)), None)
        return self._best[key]

    def pipelines(self, part: tuple[Bundle, ...], samples: int, options: LaneOptions, others: int = 0) -> list[Lane]:
        """Return pipelines of these bundles, one or two of each depth, with their best cuts.

        The most promising comes first.
        """
        fixed = samples, options.micro_batches, options.held, options.ahead, others
        if part not in self._orders:
            self._orders[part] = orders(self.problem, part)
        solved = [self.arranger.solved(order, *fixed) for order in self._orders[part]]
        rough = []
        for depth in range(1, max(len(one.slowest) for one in solved)):
            able = [one for one in solved if one.slowest[depth] < float("inf")]
            quick = heapq.nsmallest(_TRACED, able, key=lambda one: float(one.slowest[depth]))
            made = {found[:3]: found for found in (self.arranger.traced(one, depth) for one in quick)}
            rough += heapq.nsmallest(1 if others else _SAME, made.values(), key=_seconds)
        cuts = [cut for one in _likely(rough) for cut in dict.fromkeys((one, self.arranger.recut(one, *fixed)))]
        return sorted((self._lane(cut, samples, options, not others) for cut in cuts), key=lambda lane: lane.seconds)

    def settled(self, stages: tuple[Groups, ...], samples: int, options: LaneOptions, others: int) -> Lane | None:
        """Return the pipeline of these stages with its best cut; None where it cannot hold the model."""
        found = self.arranger.cut(stages, samples, options.micro_batches, options.held, options.ahead, others)
        return None if found is None else self._lane(found, samples, options, not others)

    def _lane(self, arranged: Arranged, samples: int, options: LaneOptions, alone: bool) -> Lane:
        stages = tuple(self.sharing.stage(groups, samples) for groups in arranged.stages)
        return self.timed(Lane(stages, arranged.firsts, arranged.recompute), options, alone=alone)

    def resized(self, lane: Lane, samples: int, options: LaneOptions) -> Lane:
        """Return the same pipeline with other samples, shared anew."""
        if samples == lane.samples:
            return lane
        stages = tuple(self.sharing.stage([group for group, _ in stage], samples) for stage in lane.stages)
        return self.timed(lane._replace(stages=stages), options)

    def timed(self, lane: Lane, options: LaneOptions, *, alone: bool = False) -> Lane:
        """Return the lane with its lower bound and its estimated time, in seconds. `alone`: there is no other lane."""
        key = (lane.stages, lane.firsts, lane.recompute, options, alone)
        if key not in self._seconds:
            self.state.effort += LANE_EFFORT
            staged = Staged(lane.stages, options.micro_batches, options.ahead)
            ways = [options.held._replace(recompute=again) for again in lane.recompute]
            rings = alone and options.state != "sharded-all" and len(self._regions(lane)) == 1
            self._seconds[key] = cut_times(self.problem, staged, lane.firsts, ways, rings=rings)
        least, seconds = self._seconds[key]
        return lane._replace(least=least, seconds=seconds)

    def _regions(self, lane: Lane) -> set[str]:
        """Return the regions in which a lane has replicas: between several, gradients may be summed up along trees,
        which take less.
        """
        return {self.problem.cluster.host_of(group[0]).region for stage in lane.stages for group, _ in stage}

    def fair(self, lanes: Sequence[Lane], samples: int, options: LaneOptions) -> list[int]:
        """Return the samples with which all lanes are done together; a lane may get none."""
        if len(lanes) == 1:
            return [samples]
        times = {lane: partial(_along, *self._line(lane, options)) for lane in lanes}
        return fair_shares(samples, [times[lane] for lane in lanes], least=0)

    def _line(self, lane: Lane, options: LaneOptions) -> tuple[float, float]:
        """Return the seconds of a lane as `a + c n` for n samples: through what it has and, about,
        half or twice that.
        """
        n = lane.samples
        other = n // 2 or 2
        here, there = lane.seconds, self.resized(lane, other, options).seconds
        slope = max((here - there) / (n - other), 0.0)
        return here - slope * n, max(slope, 1e-12)

    def from_plan(self, plan: Plan) -> Layout | None:
        """Return a plan of one pipeline, in which no device has two stages, as a layout of one lane; None where a lane
        cannot express it.
        """
        (part,) = plan.parts
        if not isinstance(part, Pipeline) or part.schedule != "1f1b":
            return None
        devices = [d for stage in part.stages for replica in stage.replicas for d in replica.devices]
        states = {stage.state for stage in part.stages if len(stage.replicas) > 1} or {"replicated"}
        spills = {stage.spill for stage in part.stages}
        plain = len(spills) == 1 and "all" not in spills and all(r.slices == 1 for s in part.stages for r in s.replicas)
        samples = part.job.batch // part.micro_batches
        shared = all(sum(r.share for r in stage.replicas) == samples for stage in part.stages)
        if len(set(devices)) < len(devices) or len(states) > 1 or not plain or not shared:
            return None
        stages = tuple(tuple((r.devices, r.share) for r in stage.replicas) for stage in part.stages)
        firsts = tuple(self.problem.graph.by_name[stage.first] for stage in part.stages)
        lane = Lane(stages, firsts, tuple(stage.recompute for stage in part.stages))
        return self.layout([lane], LaneOptions(part.micro_batches, part.ahead, states.pop(), spills == {"optimizer"}))

    def _between(self, lanes: Sequence[Lane]) -> float:
        """Estimate the seconds of syncs between lanes that no backward pass hides.

        Syncs between the same hosts take turns; of others the longest counts. A lane's last backward hides some.
        """
        if len(lanes) < 2:
            return 0.0
        problem, table = self.problem, self.problem.table
        elements, width = table.sums.elements, table.width * (problem.kept or 1.0)
        firsts = sorted({first for lane in lanes for first in lane.firsts})
        among: dict[tuple[str, ...], float] = {}
        for a, b in pairwise((*firsts, len(problem.graph.blocks))):
            leads = [lane.stages[bisect_right(lane.firsts, a) - 1][0][0][0] for lane in lanes]
            members = tuple(sorted(leads, key=partial(_place, problem)))
            among[members] = among.get(members, 0.0) + float(elements[b] - elements[a]) * width
        spent: dict[tuple[str, ...], float] = {}
        for members, size in among.items():
            per_byte, waits = self.arranger.runs.ring(members)
            hosts = tuple(dict.fromkeys(problem.cluster.devices[member].host for member in members))
            spent[hosts] = spent.get(hosts, 0.0) + size * per_byte + waits
        return max(spent.values())


def _seconds(arranged: Arranged) -> float:
    return arranged.seconds


def _likely(made: Sequence[Arranged]) -> list[Arranged]:
    """Return shallow pipelines, whose estimates hold best, and the most promising of the others."""
    deep = [one for one in made if len(one.stages) > _SHALLOW]
    return [one for one in made if len(one.stages) <= _SHALLOW] + heapq.nsmallest(_DEEP, deep, key=_seconds)


def _place(problem: Problem, device: str) -> tuple[str, str]:
    host = problem.cluster.host_of(device)
    return host.region, host.name


def _spent(speed: float, samples: int) -> float:
    return samples / speed


def _along(start: float, slope: float, samples: int) -> float:
    return max(0.0, start + slope * samples) if samples else 0.0


def layout_key(problem: Problem, layout: Layout, how: How, buckets: int) -> tuple[object, ...]:
    """Return a key that is equal for layouts that make the same plan, or plans that differ in nothing that is done."""
    lanes = tuple((lane.stages, lane.firsts, lane.recompute) for lane in layout.lanes)
    alone = len(lanes) == 1 and all(len(stage) == 1 for stage in lanes[0][0])
    waits = layout.options.micro_batches > 1 and any(len(firsts) > 1 for _, firsts, _ in lanes)
    options = layout.options._replace(
        state="replicated" if alone else layout.options.state, ahead=layout.options.ahead if waits else 0
    )
    return lanes, options, how, _bucket(problem, buckets)


def _bucket(problem: Problem, buckets: int) -> float:
    """Return the bytes of a bucket, if gradients are cut into so many or more."""
    return min(BUCKET, problem.graph.elements * problem.table.width / buckets)


def lanes_plan(problem: Problem, layout: Layout, how: How = "ring", buckets: int = BUCKETS[0]) -> Plan:
    """Return the layout as a plan: a stage ends where a stage of some lane ends, and recomputes if one of them must.

    Gradients are cut into so many `buckets` or more.
    """
    blocks, options = problem.graph.blocks, layout.options
    bucket = _bucket(problem, buckets)
    firsts = sorted({first for lane in layout.lanes for first in lane.firsts})
    stages = []
    for a, b in pairwise((*firsts, len(blocks))):
        at = [(lane, bisect_right(lane.firsts, a) - 1) for lane in layout.lanes]
        replicas = tuple(Replica(devices=group, share=share) for lane, s in at for group, share in lane.stages[s])
        stages.append(
            PlanStage(
                first=blocks[a].name,
                last=blocks[b - 1].name,
                replicas=replicas,
                recompute=any(lane.recompute[s] for lane, s in at),
                state=options.state if len(replicas) > 1 else "replicated",
                spill="optimizer" if options.spill else "none",
                kept=problem.kept,
            )
        )
    return make_plan(problem, stages, options.micro_batches, how=how, ahead=options.ahead, bucket=bucket)
