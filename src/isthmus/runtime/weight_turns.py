"""The order in which a worker uses the weights of its stretches, and whether all workers reach the end of a step.

A *turn* is the forward or backward of one stretch on one slice of a micro-batch. With state `sharded-all` a backward
begins when there is room for its gradients: all sums that were begun before the last backward turn are done, and so is
the last sum of each of its own buckets. A sum is done when all members of its bucket have come to it. Besides that, a
turn waits for the activations or gradients of its samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from isthmus.model.graph import BlockGraph
from isthmus.runtime.program import Program, StageRun, samples_of_slice

__all__ = ["Turn", "can_play", "last_uses", "stretch_parameters", "turns"]

_Pass = tuple[str, int, int, bool, int]  # device, number of its run, micro-batch, whether backward, slice
_Sum = tuple[int, str, int]  # number of a bucket, its first member, number of sums before this one


class Turn(NamedTuple):
    """One use of the weights of a stretch; `run` is an index into the program's runs."""

    run: int
    stretch: int
    micro_batch: int
    slice: int
    backward: bool


def turns(program: Program) -> list[Turn]:
    """Return all turns of a step in order, if no action overtakes another."""
    found = []
    for run, micro_batch, backward in program.actions:
        stretches = range(len(program.runs[run].stretches))
        for k in range(program.runs[run].slices):
            for u in reversed(stretches) if backward else stretches:
                found.append(Turn(run, u, micro_batch, k, backward))
    return found


def stretch_parameters(run: StageRun, graph: BlockGraph) -> list[list[str]]:
    """Return the parameters that each stretch of a run uses."""
    return [
        list(dict.fromkeys(name for b in range(first, last + 1) for name in graph.blocks[b].parameters))
        for first, last in run.stretches
    ]


def last_uses(uses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each stretch the items that it uses and no stretch before it does.

    A backward goes downwards, so it uses these for the last time there.
    """
    seen: set[int] = set()
    found = []
    for used in uses:
        found.append([number for number in used if number not in seen])
        seen.update(used)
    return found


def can_play(programs: Mapping[str, Program], graph: BlockGraph) -> bool:
    """Return whether all workers finish a step; if not, replicas of `sharded-all` stages wait for each other."""
    done: set[_Pass] = set()
    come: Counter[_Sum] = Counter()
    players = [_Player(program, graph, done, come) for program in programs.values()]
    while sum(player.play() for player in players):
        continue
    return not any(player.left for player in players)


class _Player:
    """The turns of one worker; `done` and `come` are the passes and sums that all workers have reached."""

    def __init__(self, program: Program, graph: BlockGraph, done: set[_Pass], come: Counter[_Sum]) -> None:
        self.program, self._done, self._come = program, done, come
        self.left = deque(turns(program))
        self._specs = {bucket.number: bucket for bucket in program.buckets if bucket.layout == "sharded-all"}
        home = {name: number for number, bucket in self._specs.items() for name in bucket.parameters}
        self._uses = [
            [list(dict.fromkeys(home[n] for n in names if n in home)) for names in stretch_parameters(run, graph)]
            for run in program.runs
        ]
        self._ends = [last_uses(uses) for uses in self._uses]
        self._sums: Counter[int] = Counter()  # begun, of each bucket
        self._begun: deque[list[tuple[int, int]]] = deque()  # ... turn by turn, those that are not known to be done
        self._open: set[int] = set()

    def play(self) -> bool:
        """Take all turns that can be taken now, and return whether there were any."""
        before = len(self.left)
        while self.left and self._come_in(self.left[0]) and self._has_room(self.left[0]):
            self._take(self.left.popleft())
        return len(self.left) < before

    def _come_in(self, turn: Turn) -> bool:
        """Return whether all that the first stretch of a pass needs has arrived; True for a later stretch."""
        run = self.program.runs[turn.run]
        if turn.stretch != (len(run.stretches) - 1 if turn.backward else 0):
            return True
        lo, hi = samples_of_slice(run, turn.slice)
        for flow in run.returns if turn.backward else run.inputs:
            for k in range(flow.slices):
                low, high = samples_of_slice(flow, k)
                key = (flow.peer, flow.run, turn.micro_batch, turn.backward, k)
                if max(lo, low) < min(hi, high) and key not in self._done:
                    return False
        return True

    def _has_room(self, turn: Turn) -> bool:
        opened = [number for number in self._uses[turn.run][turn.stretch] if number not in self._open]
        if not turn.backward or not opened:
            return True
        while len(self._begun) > 1 and all(self._complete(*each) for each in self._begun[0]):
            self._begun.popleft()
        own = all(self._complete(number, self._sums[number] - 1) for number in opened if self._sums[number])
        return len(self._begun) < 2 and own

    def _complete(self, number: int, before: int) -> bool:
        members = self._specs[number].members
        return self._come[number, members[0], before] == len(members)

    def _take(self, turn: Turn) -> None:
        run = self.program.runs[turn.run]
        if turn.stretch == (0 if turn.backward else len(run.stretches) - 1):
            self._done.add((self.program.device, run.number, turn.micro_batch, turn.backward, turn.slice))
        if turn.backward:
            ended = self._ends[turn.run][turn.stretch]
            self._open.update(self._uses[turn.run][turn.stretch])
            self._open.difference_update(ended)
            if ended:
                self._begun.append([(number, self._sums[number]) for number in ended])
            for number in ended:
                self._come[number, self._specs[number].members[0], self._sums[number]] += 1
                self._sums[number] += 1
