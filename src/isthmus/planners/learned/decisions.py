"""Decisions that the exact pieces leave open, one after another: who works with whom, and in what way.

A *sort* is all replicas of one kind on one host. A *draft* is built up choice by choice: the size of tensor groups;
then for each sort, the fastest first, whether it stays idle, lets each replica be a lane, is a lane of its own, or
joins a lane that is there; then how many micro-batches there are, how many more are in flight, and how state is held.
The rest (stages, cuts, shares, who recomputes) follows by the exact pieces (`side_by_side`), and the simulator prices
it.

Equal hosts are interchangeable. So their roles never go down, in the order lane 0, lane 1, ..., apart, idle: of all
drafts that differ by a swap of equal hosts few are left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from isthmus.planners.budget import Search
from isthmus.planners.layout.device_groups import all_bundles, tensor_degrees
from isthmus.planners.layout.layout_types import Bundle, LaneOptions
from isthmus.planners.layout.shares import micro_batch_counts
from isthmus.planners.problem import Floats, Problem
from isthmus.planners.search.moves import AHEAD, COUNTS, STATES, Grouping
from isthmus.planners.search_constants import DEGREES

__all__ = ["APART", "IDLE", "KINDS", "NEW", "Asked", "Decision", "Draft", "Drafts", "Prior", "Sort", "even", "path_to"]

Kind = Literal["degree", "role", "micro_batches", "ahead", "state"]
KINDS: tuple[Kind, ...] = ("degree", "role", "micro_batches", "ahead", "state")
Sort = tuple[Bundle, ...]
IDLE, APART, NEW = -1, -2, -3  # roles of a sort; 0 and more: the lane that it joins
_RANK = {APART: 1000, IDLE: 1001}


class Decision(NamedTuple):
    """One choice: of what, and which. States are numbered as in `moves.STATES`."""

    kind: Kind
    value: int


class Draft(NamedTuple):
    """Choices so far; -1: not yet chosen."""

    degree: int = -1
    roles: tuple[int, ...] = ()  # lanes are numbered as they are opened, so a sort that opened one has its number
    micro_batches: int = -1
    ahead: int = -1
    state: int = -1

    def having(self, action: Decision) -> Draft:
        """Return the draft with one choice more."""
        kind, value = action
        if kind == "role":
            return self._replace(roles=(*self.roles, self.lanes if value == NEW else value))
        if kind == "degree":
            return self._replace(degree=value)
        if kind == "micro_batches":
            return self._replace(micro_batches=value)
        return self._replace(ahead=value) if kind == "ahead" else self._replace(state=value)

    @property
    def lanes(self) -> int:
        """Return the number of lanes that others may join."""
        return max((0, *(role + 1 for role in self.roles)))

    @property
    def whole(self) -> bool:
        """Return whether every choice has been made."""
        return self.state >= 0


class Drafts:
    """The choices that one problem offers, and the settings that they lead to."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        every = {degree: all_bundles(problem, degree) for degree in tensor_degrees(problem)[:DEGREES]}
        self.bundles = {degree: bundles for degree, bundles in every.items() if bundles}
        self.degrees = list(self.bundles)
        self._sorts: dict[int, list[Sort]] = {}
        self._equal: dict[int, list[bool]] = {}

    def sorts(self, degree: int) -> list[Sort]:
        """Return bundles of one kind on one host; equal ones side by side, the fastest first."""
        if degree not in self._sorts:
            found: dict[tuple[str, str], list[Bundle]] = {}
            for bundle in self.bundles[degree]:
                found.setdefault((bundle.host, bundle.kind), []).append(bundle)
            ranked = sorted(found.values(), key=lambda members: -sum(bundle.speed for bundle in members))
            ordered: list[Sort] = []
            for sort in map(tuple, ranked):
                after = [i for i, other in enumerate(ordered, start=1) if self._same(other, sort)]
                ordered.insert(after[-1] if after else len(ordered), sort)
            self._sorts[degree] = ordered
            self._equal[degree] = [i > 0 and self._same(ordered[i - 1], sort) for i, sort in enumerate(ordered)]
        return self._sorts[degree]

    def _same(self, a: Sort, b: Sort) -> bool:
        """Return whether two sorts can be swapped: each alone on its host, with equal numbers, links and places."""
        cluster, problem = self.problem.cluster, self.problem
        here, there = cluster.hosts[a[0].host], cluster.hosts[b[0].host]
        shapes = [(s[0].kind, s[0].region, [(len(g.groups), g.hosts) for g in s]) for s in (a, b)]
        if here.shape != there.shape or shapes[0] != shapes[1] or len(here.devices) > 1 or problem.places:
            return False
        others = {bundle.host for bundle in self.bundles[1]} - {here.name, there.name}
        return all(cluster.link(here.name, other) == cluster.link(there.name, other) for other in others)

    def actions(self, draft: Draft) -> list[Decision]:
        """Return the next choices; none once all is chosen, or where too few samples are left for so many lanes."""
        if draft.degree < 0:
            return [Decision("degree", degree) for degree in self.degrees]
        if len(draft.roles) < len(self.sorts(draft.degree)):
            return [Decision("role", role) for role in self._roles(draft)]
        if draft.micro_batches < 0:
            batch, parts = self.problem.job.batch, len(self.parts(draft))
            counts = micro_batch_counts(batch, parts, most=COUNTS) if parts <= batch else []
            return [Decision("micro_batches", count) for count in counts]
        if draft.ahead < 0:
            most = self._most_ahead(draft)
            return [Decision("ahead", ahead) for ahead in AHEAD if ahead <= most]
        return [Decision("state", state) for state in range(len(STATES))] if draft.state < 0 else []

    def _most_ahead(self, draft: Draft) -> int:
        """Return how many more micro-batches in flight make a difference: none if no lane has several stages, or once
        all are in flight.
        """
        several = draft.micro_batches > 1 and any(len(part) > 1 for part in self.parts(draft))
        return next(ahead for ahead in (*AHEAD, draft.micro_batches) if ahead >= draft.micro_batches) if several else 0

    def _roles(self, draft: Draft) -> list[int]:
        sorts, at = self.sorts(draft.degree), len(draft.roles)
        left = self.problem.job.batch - len(self.parts(draft))  # lanes that there are samples for
        own = [NEW] * (left > 0) + [APART] * (1 < len(sorts[at]) <= left)
        rest = all(self._equal[draft.degree][at + 1 :])  # those that come idle too, if this one does
        nobody = rest and all(role == IDLE for role in draft.roles)
        roles = [*range(draft.lanes), *own, *([] if nobody else [IDLE])]
        if not self._equal[draft.degree][at]:
            return roles
        least = _RANK.get(draft.roles[-1], draft.roles[-1])
        ranks = {**_RANK, NEW: draft.lanes}
        return [role for role in roles if ranks.get(role, role) >= least]

    def parts(self, draft: Draft) -> tuple[Sort, ...]:
        """Return the bundles of each lane."""
        joined: list[list[Bundle]] = [[] for _ in range(draft.lanes)]
        apart: list[Sort] = []
        for members, role in zip(self.sorts(draft.degree), draft.roles, strict=False):
            if role == APART:
                apart += [(bundle,) for bundle in members]
            elif role >= 0:
                joined[role] += members
        return (*(tuple(lane) for lane in joined), *apart)

    def setting(self, draft: Draft) -> Grouping:
        """Return the setting that a complete draft describes."""
        return Grouping(self.parts(draft), LaneOptions(draft.micro_batches, draft.ahead, STATES[draft.state]))

    def draft_of(self, setting: Grouping) -> Draft | None:
        """Return the whole draft that describes a setting; None where a sort is divided in a way that no draft has."""
        lane_of = {bundle: i for i, part in enumerate(setting.parts) for bundle in part}
        options = setting.options
        degree = len(setting.parts[0][0].groups[0])
        if options.spill or degree not in self.degrees or options.ahead not in AHEAD:
            return None
        sorts, known = self.sorts(degree), set[Bundle]()
        roles: list[int] = []  # lanes by their number in the setting
        for sort in sorts:
            known |= set(sort)
            at = [lane_of.get(bundle, IDLE) for bundle in sort]
            alone = all(lane >= 0 and len(setting.parts[lane]) == 1 for lane in at) and len(set(at)) == len(at)
            if len(set(at)) > 1 and not alone:
                return None
            roles.append(at[0] if len(set(at)) == 1 else APART)
        if not set(lane_of) <= known:
            return None
        numbered = self._numbered(degree, roles)
        draft = Draft(degree, numbered, options.micro_batches, options.ahead, STATES.index(options.state))
        return draft._replace(ahead=min(options.ahead, self._most_ahead(draft)))

    def _numbered(self, degree: int, roles: Sequence[int]) -> tuple[int, ...]:
        """Number lanes as they are opened, with roles of equal sorts in their order."""
        equal, numbers, found = self._equal[degree], dict[int, int](), list[int]()
        at = 0
        while at < len(roles):
            end = next((i for i in range(at + 1, len(roles)) if not equal[i]), len(roles))
            run = roles[at:end]
            first = {role: i for i, role in reversed(list(enumerate(run)))}
            run = sorted(run, key=lambda role: (_RANK.get(role, numbers.get(role, 500)), first[role]))
            for role in run:
                found.append(role if role < 0 else numbers.setdefault(role, len(numbers)))
            at = end
        return tuple(found)


def path_to(drafts: Drafts, target: Draft) -> Sequence[tuple[Draft, Decision]]:
    """Return the choices that lead to a draft, each with the draft before it."""
    draft, path = Draft(), []
    while draft != target:
        for action in drafts.actions(draft):
            if _leads(draft.having(action), target):
                path.append((draft, action))
                draft = draft.having(action)
                break
        else:
            return []
    return path


def _leads(draft: Draft, target: Draft) -> bool:
    """Return whether all choices that a draft has made so far are the target's."""
    fields = zip(draft, target, strict=True)
    return all(
        target.roles[: len(draft.roles)] == draft.roles if i == 1 else mine in (-1, its)
        for i, (mine, its) in enumerate(fields)
    )


Asked = tuple[Draft, Sequence[Decision]]
Prior = Callable[[Search, Drafts, Sequence[Asked]], list[Floats]]
"""How likely each action is the best one, for several drafts; those of a draft add up to 1."""


def even(search: Search, drafts: Drafts, asked: Sequence[Asked]) -> list[Floats]:
    """Give every action the same chance, as somebody does who knows nothing."""
    return [np.full(len(actions), 1.0 / len(actions)) for _, actions in asked]
