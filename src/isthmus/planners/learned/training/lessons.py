"""The lessons of a record: for each draft, how likely each action is the best one.

Below action a of a draft the fastest leaf takes t(a), the fastest of all t. The action's part of the target is

    p(a) ~ exp(-(t(a) / t - 1) / 0.05),        nothing for actions below which no leaf was priced.

Drafts that cannot lead to a good plan matter little: one whose fastest leaf takes u counts exp(-(u / best - 1) / 0.2).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from isthmus.planners.learned.decisions import Decision, Draft, Drafts, path_to
from isthmus.planners.learned.features import Look, Looked
from isthmus.planners.learned.training.problems import random_problem
from isthmus.planners.learned.training.record import Record
from isthmus.planners.problem import Floats

__all__ = ["Lesson", "Lessons", "Sample"]

_SHARP, _MATTERS = 0.05, 0.2
_LEAST = 0.05  # of what counts: drafts that matter less are left out
_BLIND = 0.15  # part of the samples that come without feedback


class Lesson(NamedTuple):
    """A draft, its actions, and how likely each is the best."""

    draft: Draft
    actions: Sequence[Decision]
    target: Floats
    weight: float


class Sample(NamedTuple):
    """A lesson as the network sees it."""

    looked: Looked
    target: Floats


class Lessons:
    """All lessons of one record."""

    def __init__(self, record: Record, blind: str = "") -> None:
        self.record = record
        self.drafts = Drafts(random_problem(record.seed))
        self.look = Look(self.drafts.problem, self.drafts, blind)
        self.lessons = list(self._lessons())

    def _lessons(self) -> Iterator[Lesson]:
        below: dict[Draft, dict[Decision, float]] = {}
        best = float("inf")
        for leaf in self.record.leaves:
            path = path_to(self.drafts, leaf.draft)
            best = min(best, leaf.seconds) if path else best  # some settings of `auto` no choices lead to
            for draft, action in path:
                known = below.setdefault(draft, {})
                known[action] = min(leaf.seconds, known.get(action, float("inf")))
        for draft, known in below.items():
            actions, fastest = self.drafts.actions(draft), min(known.values())
            weight = float(np.exp(-(fastest / best - 1.0) / _MATTERS))
            if len(actions) > 1 and weight > _LEAST and (len(known) > 1 or fastest < 1.02 * best):
                seconds = np.array([known.get(action, float("inf")) for action in actions])
                target = np.exp(-(seconds / fastest - 1.0) / _SHARP)
                yield Lesson(draft, actions, target / target.sum(), weight)

    def some(self, count: int, draw: random.Random) -> Iterator[Sample]:
        """Draw so many lessons, those that matter more often,
        each seen with the feedback of one of the record's plans.
        """
        if not self.lessons:
            return
        told = self.record.feedback[:-1] or self.record.feedback
        weights = [lesson.weight for lesson in self.lessons]
        for lesson in draw.choices(self.lessons, weights, k=count):
            feedback = None if draw.random() < _BLIND else draw.choice(told)
            yield Sample(self.look.at(lesson.draft, lesson.actions, feedback), lesson.target)
