"""The features that the network of `learned` sees of a problem: groups of blocks and sorts of devices, without units.

Times are parts of the step that all devices could do together if nothing but computing counted; bytes are times over
the link, bus or nic that would carry them; memory is in parts of the model's state. So all sizes look alike.

    nodes   block groups (at most 12, of about equal work)       sorts (`decisions`)
    edges   group -> next, group -> the one before (data flow), sort <-> sort (links), group <-> sort (placement)

`Scene` is what stays the same for one size of tensor groups. A draft adds what was chosen so far, and the best plan so
far adds what the simulator says of it (`Feedback`): who works how long, how full memories are, who has which blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Host
from isthmus.cost.timeline import timeline
from isthmus.plan.types import Pipeline
from isthmus.planners.layout.cuts import crossing_bytes
from isthmus.planners.learned.decisions import APART, IDLE, KINDS, NEW, Decision, Draft, Drafts, Sort
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.search.moves import STATES

__all__ = [
    "ACTION",
    "BLOCK",
    "EDGE",
    "SCENE",
    "SORT",
    "WHOLE",
    "Feedback",
    "Look",
    "Looked",
    "Scene",
    "feedback_of",
]

Array = npt.NDArray[np.float32]

_GROUPS = 12  # block groups
_MOST = 5.0  # of a feature: e^15 times as much as usual
_STATE_BYTES = 16.0  # a parameter: weight, gradient, Adam
SCENE = 2  # raised when features change: a network that was trained for others is of no use


class _Block(IntEnum):
    """Columns of a block group. WORK and WEIGHTS are parts of the model's, OUT and SENT times over the usual nic."""

    WORK, WEIGHTS, OUT, SENT, PLACE = range(5)


class _Sort(IntEnum):
    """Columns of a sort: what it is; what the draft says of it; what the simulator says of it in the best plan."""

    SPEED, SPEED_EACH, COUNT, MEMORY_EACH, MEMORY, BUS, NIC, NEAR, NEAR_SPEED = range(9)
    CHOSEN, CURRENT, IDLE, APART, JOINED, LANE_SPEED = range(9, 15)
    USED, BUSY, FULL, STAGES = range(16, 20)


class _Link(IntEnum):
    """Columns of a link: times of weights, activations, latency, trunk; whether both are in one host, region, lane."""

    WEIGHTS, PASSED, LATENCY, TRUNK, HOST, REGION, LANE = range(7)


class _Place(IntEnum):
    """Columns of a block group on a sort: seconds, state and activations there; the part it has in the best plan."""

    SECONDS, STATE, SAVED, HELD = range(4)


class _Whole(IntEnum):
    """Columns of the whole: the problem; then eight of the draft and twelve of the best plan."""

    BATCH, BATCH_EACH, STATE, DEVICES, SORTS, BLOCKS, REGIONS, PASSED = range(8)
    DRAFT, BEST = 8, 16


class _Choice(IntEnum):
    """Columns of an action: its kind (five), then what it chooses; AS_BEST: the best plan so far has chosen the same.

    An action that joins a lane has the nearest link into it (six columns), and the farthest (two).
    """

    DEGREE, NEW, APART, IDLE, JOINS, LANE_SPEED, LANE_SORTS, NEAREST = range(5, 13)
    COUNT, MICRO_BATCH, MICRO_BATCH_EACH, AS_BEST, FARTHEST = range(19, 24)
    AHEAD, AHEAD_PART, STATE = range(25, 28)


BLOCK, SORT, WHOLE, ACTION = len(_Block), 20, 28, 30  # features of a block group, a sort, the whole, an action
EDGE = {"next": 1, "before": 1, "link": len(_Link), "place": len(_Place), "serve": len(_Place)}
# Column 15 of a sort and 18 of an action are empty: they stay until a network is trained without them.
_FEEDBACK = slice(_Sort.USED, SORT)
_FROM_LINKS = slice(_Choice.NEAREST, _Choice.NEAREST + _Link.LANE)
_FARTHEST = slice(_Choice.FARTHEST, _Choice.FARTHEST + 2)


class Feedback(msgspec.Struct, frozen=True, array_like=True):
    """The simulator's times and memory of a plan."""

    seconds: float
    micro_batches: int
    ahead: int
    state: int
    busy: dict[str, float]  # of the devices that compute: the part of the step that they do
    memory: dict[str, float]  # part of each device's memory
    stages: list[tuple[int, int, list[str]]]  # first block, the one after the last, devices


def feedback_of(problem: Problem, candidate: Candidate) -> Feedback | None:
    """Play the plan once more, and return what the simulator says of it; None where it is no pipeline."""
    (part,) = candidate.plan.parts
    if not isinstance(part, Pipeline):
        return None
    by_name, devices, kinds = problem.graph.by_name, problem.cluster.devices, problem.cluster.kinds
    played = timeline(problem.simulator.play(candidate.plan))
    states = [stage.state for stage in part.stages if len(stage.replicas) > 1]
    return Feedback(
        candidate.price.step_seconds,
        part.micro_batches,
        part.ahead,
        STATES.index(states[0]) if states else 0,
        {use.name: use.computing / max(played.step_seconds, 1e-30) for use in played.devices},
        {
            name: used / kinds[devices[name].kind].memory
            for name, used in candidate.price.memory.items()
            if name in devices
        },
        [
            (by_name[stage.first], by_name[stage.last] + 1, [d for r in stage.replicas for d in r.devices])
            for stage in part.stages
        ],
    )


class Scene(NamedTuple):
    """The features that do not change while a search goes on."""

    blocks: Array  # [groups, BLOCK]
    sorts: Array  # [sorts, SORT]
    flow: Array  # [groups - 1, 1]
    links: Array  # [sorts, sorts, _Link]
    place: Array  # [groups, sorts, _Place]
    whole: Array  # [WHOLE]
    speeds: Array  # [sorts], parts of all
    bounds: tuple[int, ...]  # first block of each group, and the number of blocks
    devices: tuple[tuple[str, ...], ...]  # of each sort


class Looked(NamedTuple):
    """One draft as the network sees it."""

    scene: Scene
    sorts: Array
    links: Array
    place: Array
    whole: Array
    actions: Array  # [actions, ACTION]
    current: int  # the sort whose role is chosen; -1: none is
    lanes: npt.NDArray[np.int64]  # [actions, sorts] 1 where the action joins the lane of that sort


def blinded(one: Looked, blind: str) -> Looked:
    """Hide one part of what the network sees (feedback, devices, model), for ablations."""
    sorts, links, place = one.sorts.copy(), one.links.copy(), one.place.copy()
    whole, actions, scene = one.whole.copy(), one.actions.copy(), one.scene
    if blind == "feedback":
        sorts[:, _FEEDBACK], place[:, :, _Place.HELD] = 0.0, 0.0
        whole[_Whole.BEST :], actions[:, _Choice.AS_BEST] = 0.0, 0.0
    elif blind == "devices":
        sorts[:, : _Sort.CHOSEN], sorts[:, _Sort.LANE_SPEED], sorts[:, _FEEDBACK] = 0.0, 0.0, 0.0
        links[:, :, : _Link.LANE], place[:] = 0.0, 0.0
        whole[_Whole.BATCH_EACH : _Whole.DRAFT], whole[_Whole.BEST :] = 0.0, 0.0
        actions[:, _Choice.LANE_SPEED : _FROM_LINKS.stop], actions[:, _FARTHEST] = 0.0, 0.0
    elif blind == "model":
        scene = scene._replace(blocks=np.zeros_like(scene.blocks), flow=np.zeros_like(scene.flow))
        sorts[:, _Sort.MEMORY_EACH : _Sort.NEAR], links[:, :, : _Link.HOST], place[:] = 0.0, 0.0, 0.0
        whole[[_Whole.STATE, _Whole.BLOCKS, _Whole.PASSED]] = 0.0
        actions[:, _Choice.NEAREST : _Choice.NEAREST + _Link.HOST], actions[:, _FARTHEST] = 0.0, 0.0
    return one._replace(sorts=sorts, links=links, place=place, whole=whole, scene=scene, actions=actions)


class Look:
    """Looks at drafts of one problem; `blind`: at all but one part of them."""

    def __init__(self, problem: Problem, drafts: Drafts, blind: str = "") -> None:
        self.problem, self.drafts, self.blind = problem, drafts, blind
        self._scenes: dict[int, Scene] = {}
        self._after: dict[tuple[int, int], tuple[Scene, Array]] = {}
        self._kept: Feedback | None = None  # the last one, so that its id stays its own

    def scene(self, degree: int) -> Scene:
        """Return the scene for tensor groups of one size."""
        if degree not in self._scenes:
            self._scenes[degree] = _scene(self.problem, self.drafts, degree)
        return self._scenes[degree]

    def at(self, draft: Draft, actions: Sequence[Decision], feedback: Feedback | None) -> Looked:
        """Return what the network sees of a draft, its actions, and the best plan so far."""
        degree = draft.degree if draft.degree > 0 else 1
        scene, told = self._told(degree, feedback)
        sorts, links, whole = scene.sorts.copy(), scene.links.copy(), scene.whole.copy()
        sorts[:, _FEEDBACK] = told[:, :4]
        place = scene.place.copy()
        place[:, :, _Place.HELD] = told[:, 4:].T
        current = len(draft.roles) if draft.degree > 0 and len(draft.roles) < len(sorts) else -1
        share = np.zeros(draft.lanes + 1)
        for i, role in enumerate(draft.roles):
            sorts[i, _Sort.CHOSEN] = 1.0
            sorts[i, _Sort.IDLE : _Sort.LANE_SPEED] = role == IDLE, role == APART, role >= 0
            if role >= 0:
                share[role] += scene.speeds[i]
        for i, role in enumerate(draft.roles):
            sorts[i, _Sort.LANE_SPEED] = share[role] if role >= 0 else 0.0
        if current >= 0:
            sorts[current, _Sort.CURRENT] = 1.0
        roles = np.array([*draft.roles, *([-9] * (len(sorts) - len(draft.roles)))])
        joined = roles >= 0
        links[:, :, _Link.LANE] = (roles[:, None] == roles[None, :]) & joined[:, None]
        whole[_Whole.DRAFT : _Whole.BEST] = _chosen(draft, share)
        whole[_Whole.BEST :] = _best(self.problem, feedback)
        found, lanes = self._choices(scene, draft, actions, feedback, share, current, roles)
        looked = Looked(scene, sorts, links, place, whole, found, current, lanes)
        return blinded(looked, self.blind) if self.blind else looked

    def _told(self, degree: int, feedback: Feedback | None) -> tuple[Scene, Array]:
        """Return the feedback of each sort: used, busy, memory, stages.

        Then the part of it that has each block group.
        """
        key = (degree, id(feedback))
        if key not in self._after:
            scene = self.scene(degree)
            self._after = {at: old for at, old in self._after.items() if at[1] == id(feedback)}
            self._after[key] = scene, _sort_feedback(scene, feedback)
            self._kept = feedback
        return self._after[key]

    def _choices(
        self,
        scene: Scene,
        draft: Draft,
        actions: Sequence[Decision],
        feedback: Feedback | None,
        share: npt.NDArray[np.float64],
        current: int,
        roles: npt.NDArray[np.int64],
    ) -> tuple[Array, npt.NDArray[np.int64]]:
        found = np.zeros((len(actions), ACTION), np.float32)
        lanes = np.zeros((len(actions), len(roles)), np.int64)
        batch = self.problem.job.batch
        parts = max(1, len(self.drafts.parts(draft))) if draft.degree > 0 else 1
        for i, (kind, value) in enumerate(actions):
            row = found[i]
            row[KINDS.index(kind)] = 1.0
            if kind == "degree":
                row[_Choice.DEGREE] = np.log2(value)
            elif kind == "role":
                row[_Choice.NEW : _Choice.LANE_SPEED] = value == NEW, value == APART, value == IDLE, value >= 0
                if value >= 0:
                    members = roles == value
                    lanes[i] = members
                    row[_Choice.LANE_SPEED], row[_Choice.LANE_SORTS] = share[value], float(members.sum()) / len(roles)
                    row[_FROM_LINKS] = scene.links[current, members, : _Link.LANE].min(axis=0)
                    row[_FARTHEST] = scene.links[current, members, : _Link.LATENCY].max(axis=0)
            elif kind == "micro_batches":
                row[_Choice.COUNT] = _log(value)
                row[_Choice.MICRO_BATCH] = _log(batch / value)
                row[_Choice.MICRO_BATCH_EACH] = _log(batch / value / parts)
                row[_Choice.AS_BEST] = feedback is not None and feedback.micro_batches == value
            elif kind == "ahead":
                row[_Choice.AHEAD] = np.log2(1 + value) / 4
                row[_Choice.AHEAD_PART] = value / max(draft.micro_batches, 1)
                row[_Choice.AS_BEST] = feedback is not None and feedback.ahead == value
            else:
                row[_Choice.STATE + value] = 1.0
                row[_Choice.AS_BEST] = feedback is not None and feedback.state == value
        return found, lanes


def _chosen(draft: Draft, share: npt.NDArray[np.float64]) -> list[float]:
    lanes = sum(role == APART for role in draft.roles)
    return [
        np.log2(max(draft.degree, 1)),
        float(draft.degree > 0),
        _log(draft.lanes + 1.0),
        float(lanes > 0),
        float(share.sum()),
        _log(max(draft.micro_batches, 1)),
        float(draft.micro_batches > 0),
        np.log2(1 + max(draft.ahead, 0)) / 4,
    ]


def _best(problem: Problem, feedback: Feedback | None) -> list[float]:
    if feedback is None:
        return [0.0] * 12
    batch, ideal = problem.job.batch, _ideal(problem)
    return [
        1.0,
        _log(feedback.seconds / ideal),
        _log(feedback.micro_batches),
        _log(batch / feedback.micro_batches),
        np.log2(1 + feedback.ahead) / 4,
        *(float(feedback.state == i) for i in range(3)),
        _log(len(feedback.stages)),
        len(feedback.busy) / max(1, len(problem.usable)),
        float(np.mean(list(feedback.busy.values()) or [0.0])),
        max(feedback.busy.values(), default=0.0),
    ]


def _sort_feedback(scene: Scene, feedback: Feedback | None) -> Array:
    told = np.zeros((len(scene.sorts), 4 + len(scene.blocks)), np.float32)
    if feedback is None:
        return told
    holds: dict[str, npt.NDArray[np.float64]] = {}
    bounds = np.array(scene.bounds)
    for first, end, devices in feedback.stages:
        inside = np.minimum(bounds[1:], end) - np.maximum(bounds[:-1], first)
        part = np.maximum(inside, 0) / np.maximum(np.diff(bounds), 1)
        for device in devices:
            holds[device] = holds.get(device, np.zeros(len(part))) + part
    for i, members in enumerate(scene.devices):
        used = [device for device in members if device in feedback.busy]
        if used:
            told[i, 0] = len(used) / len(members)
            told[i, 1] = np.mean([feedback.busy[device] for device in used])
            told[i, 2] = max(feedback.memory.get(device, 0.0) for device in used)
            told[i, 3] = _log(len({end for _, end, those in feedback.stages if not set(those).isdisjoint(used)}))
            told[i, 4:] = np.mean([holds.get(device, np.zeros(len(scene.blocks))) for device in used], axis=0)
    return told


def _log(value: float) -> float:
    return float(np.log(max(value, 1e-9))) / 3.0


def _logs(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.clip(np.log(np.maximum(values, 1e-9)) / 3.0, -_MOST, _MOST)


def _ideal(problem: Problem) -> float:
    """Return the seconds of a step if nothing but computing counted."""
    return problem.job.batch / sum(problem.speed(device) for device in problem.usable)


def _scene(problem: Problem, drafts: Drafts, degree: int) -> Scene:
    sorts, cluster, ideal, bounds = drafts.sorts(degree), problem.cluster, _ideal(problem), _bounds(problem)
    hosts = [cluster.hosts[sort[0].host] for sort in sorts]
    weights, state = problem.graph.elements * problem.table.width, problem.graph.elements * _STATE_BYTES
    passed = crossing_bytes(problem)[bounds[1:-1]] * problem.job.batch
    thinnest = float(passed.min()) if len(passed) else 1.0
    middle = float(np.median([host.nic for host in hosts]))
    parts = np.array([sum(bundle.speed for bundle in sort) for sort in sorts])
    parts /= sum(problem.speed(device) for device in problem.usable)
    blocks, place = _blocks(problem, drafts, degree, bounds, passed, middle)
    return Scene(
        blocks.astype(np.float32),
        _sort_features(problem, sorts, degree, parts).astype(np.float32),
        _logs(passed / middle / ideal)[:, None].astype(np.float32),
        _link_features(problem, hosts, weights, thinnest, ideal).astype(np.float32),
        place.astype(np.float32),
        _whole_features(problem, hosts, state, thinnest / max(weights, 1.0)).astype(np.float32),
        parts.astype(np.float32),
        tuple(bounds),
        tuple(tuple(device for bundle in sort for device in bundle.devices) for sort in sorts),
    )


def _sort_features(
    problem: Problem, sorts: Sequence[Sort], degree: int, parts: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    cluster, ideal = problem.cluster, _ideal(problem)
    weights, state = problem.graph.elements * problem.table.width, problem.graph.elements * _STATE_BYTES
    hosts = [cluster.hosts[sort[0].host] for sort in sorts]
    memory = np.array([float(cluster.kinds[sort[0].kind].memory) * degree for sort in sorts])
    counts = np.array([sum(len(bundle.groups) for bundle in sort) for sort in sorts], float)
    regions = np.array([host.region for host in hosts])
    found = np.zeros((len(sorts), SORT))
    found[:, _Sort.SPEED], found[:, _Sort.SPEED_EACH], found[:, _Sort.COUNT] = (
        _logs(parts), _logs(parts / counts), np.log2(counts),
    )  # fmt: skip
    found[:, _Sort.MEMORY_EACH], found[:, _Sort.MEMORY] = _logs(memory / state), _logs(memory * counts / state)
    found[:, _Sort.BUS] = _logs(np.array([weights / float(host.bandwidth) / ideal for host in hosts]))
    found[:, _Sort.NIC] = _logs(np.array([weights / float(host.nic) / ideal for host in hosts]))
    found[:, _Sort.NEAR] = [np.mean(regions == region) for region in regions]
    found[:, _Sort.NEAR_SPEED] = [parts[regions == region].sum() for region in regions]
    return found


def _whole_features(problem: Problem, hosts: Sequence[Host], state: float, thinnest: float) -> npt.NDArray[np.float64]:
    kinds, devices = problem.cluster.kinds, problem.cluster.devices
    memory = sum(float(kinds[devices[device].kind].memory) for device in problem.usable)
    whole, batch, count = np.zeros(WHOLE), problem.job.batch, len(problem.usable)
    whole[: _Whole.SORTS] = _log(batch), _log(batch / count), _log(state / memory), _log(count)
    whole[_Whole.SORTS : _Whole.DRAFT] = (
        _log(len(hosts)),
        _log(len(problem.graph.blocks)),
        _log(len({host.region for host in hosts})),
        _log(thinnest),
    )
    return whole


def _bounds(problem: Problem) -> list[int]:
    """Return the borders of at most so many groups of about equal work."""
    kind = problem.cluster.devices[problem.usable[0]].kind
    done = np.append(0.0, np.cumsum(problem.table.work(kind, problem.job.batch)))
    blocks = len(done) - 1
    wanted = done[-1] * np.arange(1, min(_GROUPS, blocks)) / min(_GROUPS, blocks)
    inner = np.clip(np.searchsorted(done, wanted), 1, blocks - 1) if blocks > 1 else []
    return [0, *sorted({int(border) for border in inner}), blocks]


def _blocks(
    problem: Problem,
    drafts: Drafts,
    degree: int,
    bounds: Sequence[int],
    passed: npt.NDArray[np.float64],
    middle: float,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the features of the groups, and of each group on each sort."""
    ideal, cluster, batch = _ideal(problem), problem.cluster, problem.job.batch
    elements, saved = problem.table.sums.elements, problem.table.sums.saved
    own = np.diff([float(elements[border]) for border in bounds])
    kept = np.diff([float(saved[border]) for border in bounds])
    kinds: Mapping[str, npt.NDArray[np.float64]] = {
        kind: np.add.reduceat(problem.table.work(kind, batch), bounds[:-1]) * batch
        for kind in dict.fromkeys(sort[0].kind for sort in drafts.sorts(degree))
    }
    blocks = np.zeros((len(own), BLOCK))
    blocks[:, _Block.WORK] = np.mean([row / max(float(row.sum()), 1e-30) for row in kinds.values()], axis=0)
    blocks[:, _Block.WEIGHTS] = own / max(float(own.sum()), 1.0)
    blocks[:-1, _Block.OUT] = _logs(passed / middle / ideal)
    blocks[:, _Block.SENT] = _logs(own * problem.table.width / middle / ideal)
    blocks[:, _Block.PLACE] = np.linspace(0.0, 1.0, len(own))
    place = np.zeros((len(own), len(drafts.sorts(degree)), len(_Place)))
    for i, sort in enumerate(drafts.sorts(degree)):
        memory = float(cluster.kinds[sort[0].kind].memory) * degree
        place[:, i, _Place.SECONDS] = _logs(kinds[sort[0].kind] / degree / ideal)
        place[:, i, _Place.STATE] = _logs(own * _STATE_BYTES / memory)
        place[:, i, _Place.SAVED] = _logs(kept * batch / memory)
    return blocks, place


def _link_features(
    problem: Problem, hosts: Sequence[Host], weights: float, passed: float, ideal: float
) -> npt.NDArray[np.float64]:
    """Return the seconds of all weights and of all activations, the latency, the rate that all pairs share, and whether
    both are in one host or region.
    """
    found = np.zeros((len(hosts), len(hosts), EDGE["link"]))
    for i, a in enumerate(hosts):
        for j, b in enumerate(hosts):
            found[i, j] = _link(problem, a.name, b.name, weights, passed, ideal)
    return found


def _link(problem: Problem, a: str, b: str, weights: float, passed: float, ideal: float) -> list[float]:
    cluster = problem.cluster
    here, there = cluster.hosts[a], cluster.hosts[b]
    if a == b:
        rate, latency, trunk = float(here.bandwidth), float(here.latency), 0.0
    else:
        link = cluster.link(a, b)
        if link is None:  # like one that takes forever
            return [_MOST, _MOST, _MOST, 0.0, 0.0, float(here.region == there.region), 0.0]
        rate, latency = min(float(link.bandwidth), float(here.nic), float(there.nic_in)), float(link.latency)
        cap = cluster.trunk(here.region, there.region)
        trunk = _log(weights / float(cap) / ideal) if cap else 0.0
    times = np.array([weights / rate / ideal, passed / rate / ideal, latency / ideal])
    return [*_logs(times), trunk, float(a == b), float(here.region == there.region), 0.0]
