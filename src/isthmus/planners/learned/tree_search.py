"""Tree search over drafts (PUCT): the simulator's word spreads to all choices that led to a plan.

At a draft that was passed N times the action is taken that has most of

    Q(a) + c (1 + 2 d) P(a) sqrt(N) / (1 + N(a)),    Q = half the mean and half the most of what its leaves were worth

where a leaf is worth (seconds of the best plan at the start) / (its seconds), nothing if it does not fit or was priced
before, and P is the prior: even, or a network's (`prior`). The doubt d grows from 0 to 1 while nothing better is
found: P is then (1 - d) times the prior, and d times an even one. Several descents go down side by side, so that priors
are asked for many drafts at once; until a descent is done it counts as one that was worth nothing, which keeps the
others from its way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from isthmus.planners.learned.decisions import Asked, Decision, Draft, Drafts, Prior
from isthmus.planners.problem import Floats
from isthmus.planners.search.candidates import Candidates, ways
from isthmus.planners.search.moves import Grouping
from isthmus.planners.search_constants import (
    TREE_CLOSE,
    TREE_DESCENTS,
    TREE_DOUBTED,
    TREE_DOUBTING,
    TREE_EXPLORE,
    TREE_FEW,
    TREE_FREE,
    TREE_KNOWN,
    TREE_TRUSTED,
)

__all__ = ["Leaves", "SearchTree", "propose"]


_NOISE = 1e-3  # part of a prior


def propose(prior: Prior, candidates: Candidates) -> None:
    """Price what a prior likes best, for others to go on from, until some rounds in a row find nothing better."""
    tree = SearchTree(candidates, prior)
    while not candidates.search.spent() and tree.same < TREE_FEW:
        tree.round()


class _Node:
    """A draft in the tree: its actions, how often each was taken, and what came of it."""

    def __init__(self, actions: Sequence[Decision], prior: Floats) -> None:
        self.actions, self.prior = actions, prior
        self.taken, self.total, self.most = np.zeros((3, len(actions)))

    def pick(self, doubt: float) -> int:
        """Return the action to take; it counts as taken from now on."""
        seen = self.taken > 0
        prior = (1.0 - doubt) * self.prior + doubt / len(self.prior)
        worth = np.where(seen, (self.total / np.maximum(self.taken, 1.0) + self.most) / 2, self._unknown())
        explore = TREE_EXPLORE * (1.0 + TREE_DOUBTED * doubt)
        scores = worth + explore * prior * np.sqrt(self.taken.sum() + 1.0) / (1.0 + self.taken)
        action = int(np.argmax(scores))
        self.taken[action] += 1
        return action

    def _unknown(self) -> float:
        """Return the value of an action that was never taken: the average of all others."""
        taken = float(self.taken.sum())
        return float(self.total.sum()) / taken if taken else 0.0

    def learn(self, action: int, worth: float) -> None:
        """Note that a leaf below the action was worth so much."""
        self.total[action] += worth
        self.most[action] = max(self.most[action], worth)


class Leaves:
    """The seconds of whole drafts, by the exact pieces and the simulator; each is priced once."""

    def __init__(self, candidates: Candidates, drafts: Drafts) -> None:
        self.candidates, self.drafts = candidates, drafts
        self.seconds: dict[object, float] = {}  # by the settings' signatures; infinite where nothing fits

    def price(self, draft: Draft) -> float:
        """Return the seconds of the best plan that was priced for a draft."""
        setting = self.drafts.setting(draft)
        key = setting.signature
        if key not in self.seconds:
            self.seconds[key] = self._priced(setting, draft.degree)
        return self.seconds[key]

    def _priced(self, setting: Grouping, degree: int) -> float:
        candidates, best = self.candidates, float("inf")
        layout = candidates.lanes.complete(setting.parts, setting.options)
        if layout is None:
            return best
        hows = ways(candidates.problem, layout, copied=candidates.search.state.copied)
        for how, buckets in hows[::-1]:  # few buckets first, by trees where there are any
            if candidates.search.spent() or TREE_CLOSE * candidates.limit < best < float("inf"):
                break
            candidate = candidates.price_one(setting, self.drafts.bundles[degree], layout, how, buckets)
            if candidate is None or not candidate.price.fits:
                break
            best = min(best, candidate.price.step_seconds)
        return best


class SearchTree:
    """The search itself. `told` is called with every whole draft and its seconds; without `noise` the first of actions
    that are alike is taken.
    """

    def __init__(
        self,
        candidates: Candidates,
        prior: Prior,
        told: Callable[[Draft, float], None] | None = None,
        noise: float = _NOISE,
    ) -> None:
        self.candidates, self.prior, self.told, self.noise = candidates, prior, told, noise
        self.drafts = Drafts(candidates.problem)
        self.leaves = Leaves(candidates, self.drafts)
        self.scale, self.best = candidates.limit, float("inf")  # seconds at the start; of the best leaf
        self.same = 0  # rounds in a row that brought nothing better
        self._draw = np.random.default_rng(candidates.problem.seed)  # for actions that are otherwise alike
        self._nodes: dict[Draft, _Node] = {}

    def grow(self) -> None:
        """Go down to leaves again and again, until the budget ends or nothing new is found."""
        known = free = 0
        while not self.candidates.search.spent() and known < TREE_KNOWN and free < TREE_FREE:
            before, made = len(self.leaves.seconds), self.candidates.search.made
            self.round()
            known = 0 if len(self.leaves.seconds) > before else known + 1
            free = 0 if self.candidates.search.made > made else free + 1
            self.candidates.search.tell("search")

    def round(self) -> None:
        """Make some descents side by side."""
        doubt, before = min(1.0, TREE_DOUBTING * max(0, self.same - TREE_TRUSTED)), self.best
        paths: list[list[tuple[_Node, int]]] = [[] for _ in range(TREE_DESCENTS)]
        ends = [Draft()] * TREE_DESCENTS
        going = list(range(TREE_DESCENTS))
        while going:
            asked = {ends[i]: self.drafts.actions(ends[i]) for i in going if ends[i] not in self._nodes}
            self._expand([(draft, actions) for draft, actions in asked.items() if actions])
            going = [i for i in going if ends[i] in self._nodes]
            for i in going:
                node = self._nodes[ends[i]]
                action = node.pick(doubt)
                paths[i].append((node, action))
                ends[i] = ends[i].having(node.actions[action])
        for draft, path in zip(ends, paths, strict=True):
            worth = 0.0 if self.candidates.search.spent() or not draft.whole else self._worth(draft)
            for node, action in path:
                node.learn(action, worth)
        self.same = 0 if self.best < before else self.same + 1

    def _expand(self, asked: Sequence[Asked]) -> None:
        choices = [one for one in asked if len(one[1]) > 1]
        priors = self.prior(self.candidates.search, self.drafts, choices) if choices else []
        known = {draft: prior for (draft, _), prior in zip(choices, priors, strict=True)}
        for draft, actions in asked:
            prior = known.get(draft, np.ones(1))
            self._nodes[draft] = _Node(actions, prior * (1.0 + self.noise * self._draw.random(len(prior))))

    def _worth(self, draft: Draft) -> float:
        before = len(self.leaves.seconds)
        seconds = self.leaves.price(draft)
        self.best = min(self.best, seconds)
        if self.told is not None:
            self.told(draft, seconds)
        if not self.scale < float("inf"):
            self.scale = seconds
        new = len(self.leaves.seconds) > before
        return min(2.0, self.scale / seconds) if new and seconds < float("inf") else 0.0
