"""Stages made of bundles that follow each other, with their blocks: exact, by dynamic programming.

For k bundles in a given order and m micro-batches of n samples, a stage takes some bundles in a row, which are its
replicas and share its samples, and some blocks in a row; bundles between two stages stay idle. With V[d][i, a] the
least time of the slowest of d stages, the first of which starts with bundle i and block a:

    V[d][i, a] = min over j > i, b > a of  max( cost(i, j, a, b), rest(i, j, b) )
    rest(i, j, b) = min over j' >= j of  max( pass(i, j, j', b), V[d - 1][j', b] ),  or 0 where b is the end and d = 1

    cost   m (forward + backward of blocks a .. b - 1 on bundles i .. j - 1) + what of their sync no backward hides;
           with a second forward where d micro-batches in flight, and `ahead` more before the last stage, fit in memory
           only if activations are made again; infinite where they do not fit even so, or places forbid it
    pass   m n (bytes a sample that go to block b and later ones) over the links between bundles j - 1 and j', as many
           at a time as the stage has hosts, and over the trunk of their regions

Every depth d is solved at once, until deeper ones gain nothing; what a pipeline takes to fill is left to whoever
compares depths. Models of many blocks are cut at some of their borders only (`borders`), the thinnest near to where
equal work would end; `recut` then finds the best cut at any border for stages that are settled, as far as computing
goes. A stage has bundles of two regions at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled
from isthmus.planners.layout.cuts import crossing_bytes
from isthmus.planners.layout.layout_types import Bundle, Groups, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.stage_shares import Sharing
from isthmus.planners.layout.stage_tables import Distances, Ints, Shorts, StageTables
from isthmus.planners.problem import Floats, Problem
from isthmus.planners.search_constants import CUT_EFFORT, PAIR_EFFORT
from isthmus.planners.search_state import SearchState

__all__ = ["Arranged", "Arranger", "Solved", "crossing_bytes"]

_Row = tuple[Floats, Shorts, tuple[float, float]]

_DEEPEST = 64  # stages of one pipeline
_BORDERS = 28  # at which a model is cut while stages are not settled
PATIENCE = 4  # depths that are tried beyond the last that gained


class Arranged(NamedTuple):
    """Stages of a pipeline."""

    stages: tuple[Groups, ...]  # the replicas of each
    firsts: tuple[int, ...]  # its first block
    recompute: tuple[bool, ...]  # whether it must make its activations again
    seconds: float  # that it takes, roughly


class Solved(NamedTuple):
    """The result of the dynamic programme for bundles in an order."""

    bundles: Sequence[Bundle]
    table: Ints  # of `StageTables`
    far: tuple[Floats, Floats, Floats]  # of `Distances`
    picks: Ints
    starts: npt.NDArray[np.intp]  # the first bundle, by depth
    slowest: Floats  # seconds of the slowest stage or crossing, by depth; infinite where none is possible
    samples: int
    micro_batches: int
    ahead: int

    @property
    def depths(self) -> list[int]:
        """Return the depths at which an arrangement is possible."""
        return [depth for depth in range(1, len(self.slowest)) if self.slowest[depth] < np.inf]


class Arranger:
    """Arranges bundles of one problem; remembers what it has looked up."""

    def __init__(self, problem: Problem, memory: MemoryFit, sharing: Sharing, state: SearchState | None = None) -> None:
        self.problem, self.memory, self.sharing, self.state = problem, memory, sharing, state or SearchState(problem)
        table = problem.table
        width = table.width * (problem.kept or 1.0)
        self._weights = np.asarray(table.sums.elements) * width
        self._passed = crossing_bytes(problem)
        ends = {0, len(problem.graph.blocks) - 1}
        self._tied = width * sum(count for users, count in table.tied if ends <= set(users))
        self.runs = StageTables(problem, memory, sharing, _borders(problem, self._passed))
        self.distances = Distances(problem)
        self._known: dict[tuple[object, ...], tuple[Ints, tuple[Floats, Floats, Floats]]] = {}
        self._rows: dict[tuple[object, ...], _Row] = {}

    @property
    def borders(self) -> npt.NDArray[np.int64]:
        """Return the borders at which the model is cut while stages are not settled."""
        return self.runs.borders

    def arrange(
        self,
        bundles: Sequence[Bundle],
        samples: int,
        micro_batches: int,
        held: StageOptions,
        ahead: int = 0,
        others: int = 0,
    ) -> list[Arranged]:
        """Return the best arrangement of each depth that is possible. `held`: how state is; `others`: replicas beside
        it.
        """
        solved = self.solved(bundles, samples, micro_batches, held, ahead, others)
        return [self.traced(solved, depth) for depth in solved.depths]

    def solved(
        self,
        bundles: Sequence[Bundle],
        samples: int,
        micro_batches: int,
        held: StageOptions,
        ahead: int = 0,
        others: int = 0,
    ) -> Solved:
        """Find the seconds of the slowest stage of each depth; `traced` gives the stages."""
        others = others if held.state != "replicated" else min(others, 1)
        key = (tuple(bundles), samples, held, others)
        if key not in self._known:
            self._known[key] = self.runs.table(bundles, samples, held, others), self.distances.between(bundles)
        self.state.effort += PAIR_EFFORT * len(bundles) ** 2
        (table, far), rows, at = self._known[key], self.runs, self.borders
        deepest = min(_DEEPEST, len(bundles), len(at) - 1)
        best, picks = solve(
            table, rows.forward, rows.backward, rows.flights, rows.kept, rows.per_byte, rows.waits, rows.hosts,
            *far[1:], self._weights[at], self._passed[at], float(samples), micro_batches, ahead, deepest,
        )  # fmt: skip
        slowest, starts = best[:, :, 0].min(axis=1), best[:, :, 0].argmin(axis=1)
        return Solved(bundles, table, far, picks, starts, slowest, samples, micro_batches, ahead)

    def traced(self, solved: Solved, depth: int) -> Arranged:
        """Return the stages behind the best value of a depth, and roughly what they take with filling the pipeline."""
        rows, at = self.runs, self.borders
        picked, (around, busiest, synced) = walked(
            solved.picks, solved.table, int(solved.starts[depth]), depth, rows.forward, rows.backward, rows.per_byte,
            rows.waits, rows.hosts, *solved.far, self._weights[at], self._passed[at], float(solved.samples),
        )  # fmt: skip
        period = max(busiest, around / min(depth + solved.ahead, solved.micro_batches))
        seconds = around + (solved.micro_batches - 1) * period + synced
        first, end, border, again = picked.T.tolist()
        stages = tuple(
            tuple(group for bundle in solved.bundles[i:j] for group in bundle.groups)
            for i, j in zip(first, end, strict=True)
        )
        if depth > 1 and self._tied:  # what the first block and the last share is synced at the very end
            per_byte, waits = self.runs.ring(tuple(group[0] for group in (*stages[0], *stages[-1])))
            seconds += self._tied * per_byte + waits
        return Arranged(stages, tuple(at[border].tolist()), tuple(map(bool, again)), seconds)

    def recut(
        self, arranged: Arranged, samples: int, micro_batches: int, held: StageOptions, ahead: int = 0, others: int = 0
    ) -> Arranged:
        """Return the same stages with the best cut at any border (`cut`), where not all borders were looked at."""
        if len(self.borders) == len(self.problem.graph.blocks) + 1 or len(arranged.stages) == 1:
            return arranged
        found = self.cut(arranged.stages, samples, micro_batches, held, ahead, others)
        return arranged if found is None else found._replace(seconds=arranged.seconds)

    def cut(
        self, stages: tuple[Groups, ...], samples: int, micro_batches: int, held: StageOptions, ahead: int, others: int
    ) -> Arranged | None:
        """Return settled stages with the best cut at any border, as far as computing, syncs and memory go; None: none
        fits.
        """
        self.state.effort += CUT_EFFORT
        depth, rows = len(stages), [self._row(groups, samples, held, others) for groups in stages]
        flight = [min(depth - s + (ahead if s < depth - 1 else 0), micro_batches) for s in range(depth)]
        seconds, fits, rings = (np.array(column) for column in zip(*rows, strict=True))
        firsts, again = settled_cut(seconds, fits, rings, self._weights, np.array(flight), micro_batches)
        return Arranged(stages, tuple(firsts.tolist()), tuple(again.tolist()), 0.0) if len(firsts) else None

    def _row(
        self, groups: Groups, samples: int, held: StageOptions, others: int
    ) -> tuple[Floats, Shorts, tuple[float, float]]:
        """Return a stage's seconds before each block, the micro-batches that fit, and the times of its sync."""
        key = (groups, samples, held, others if held.state != "replicated" else min(others, 1))
        if key not in self._rows:
            shared = self.sharing.of(groups, samples)
            ring = self.runs.ring(tuple(group[0] for group in groups))
            self._rows[key] = shared.seconds, self.runs.fitting(groups, shared, held, others), ring
        return self._rows[key]


def _borders(problem: Problem, passed: Floats) -> npt.NDArray[np.int64]:
    """Return the borders at which the model is cut: all, or the thinnest near to each of so many equal parts of the
    work.
    """
    blocks = len(problem.graph.blocks)
    if blocks <= _BORDERS:
        return np.arange(blocks + 1)
    kind = problem.cluster.devices[problem.usable[0]].kind
    done = np.append(0.0, np.cumsum(problem.table.work(kind, problem.job.batch)))
    parts = np.clip(np.floor(done / max(done[-1], 1e-30) * _BORDERS + 0.5).astype(int), 0, _BORDERS)
    chosen = [np.flatnonzero(parts == part) for part in range(_BORDERS + 1)]
    inner = [int(near[np.argmin(passed[near])]) for near in chosen if len(near)]
    return np.unique([0, *inner, blocks])


@compiled
def solve(
    run: Ints, forward: Floats, backward: Floats, flights: Shorts, kept: Ints, per_byte: Floats, waits: Floats,
    hosts: Ints, link: Floats, trunk: Floats, weights: Floats, passed: Floats, samples: float,
    micro_batches: int, ahead: int, deepest: int,
) -> tuple[Floats, Ints]:  # fmt: skip
    """Compute V of the module's docstring, [depth, bundle, block], and what gives it: the stage's end, the next bundle
    and block, and whether it recomputes.
    """
    bundles, blocks = run.shape[0], forward.shape[1] - 1
    best = np.full((deepest + 1, bundles + 1, blocks + 1), np.inf)
    picks = np.zeros((deepest + 1, bundles + 1, blocks + 1, 4), np.int32)
    widest, least, since = 1, np.inf, 0
    for r in run.flat:
        widest = max(widest, hosts[r]) if r >= 0 else widest
    for d in range(1, deepest + 1):
        flight = min(d + (ahead if d > 1 else 0), micro_batches)
        rest, following = rests(best[d - 1], link, trunk, passed, widest, micro_batches * samples, d == 1)
        for i in range(bundles - 1, -1, -1):
            for j in range(i + 1, bundles + 1):
                r = run[i, j]
                if r < 0:
                    break
                plain, second, after = flights[kept[r], 0], flights[kept[r], 1], rest[hosts[r], j]
                for a in range(blocks):
                    for b in range(a + 1, blocks + 1):
                        ahead_of, behind = forward[r, b] - forward[r, a], backward[r, b] - backward[r, a]
                        cost = micro_batches * (ahead_of + behind)
                        if cost >= best[d, i, a]:
                            break
                        if after[b] >= best[d, i, a] or second[a, b] < flight:
                            continue
                        again = plain[a, b] < flight
                        if again:
                            cost += micro_batches * ahead_of
                        cost += max(0.0, per_byte[r] * (weights[b] - weights[a]) + waits[r] - behind)
                        cost = max(cost, after[b])
                        if cost < best[d, i, a]:
                            best[d, i, a] = cost
                            picks[d, i, a, 0], picks[d, i, a, 1] = j, following[hosts[r], j, b]
                            picks[d, i, a, 2], picks[d, i, a, 3] = b, again
        since += 1
        if best[d, :, 0].min() < 0.98 * least:
            least, since = best[d, :, 0].min(), 0
        if since >= PATIENCE and least < np.inf:  # deeper ones only take longer to fill
            break
    return best, picks


@compiled
def walked(
    picks: Ints, run: Ints, start: int, depth: int, forward: Floats, backward: Floats, per_byte: Floats, waits: Floats,
    hosts: Ints, latency: Floats, link: Floats, trunk: Floats, weights: Floats, passed: Floats, samples: float,
) -> tuple[Ints, tuple[float, float, float]]:  # fmt: skip
    """Return the stages that `solve` picked, [depth, 4]: first bundle, the one after the last, first border, whether it
    recomputes. Return also seconds: of a micro-batch all around, of the busiest stage or message, of the syncs that
    nothing hides.
    """
    found = np.zeros((depth, 4), np.int32)
    around, busiest, synced = 0.0, 0.0, 0.0
    i, a = start, 0
    for s in range(depth):
        end, after, b, second = picks[depth - s, i, a]
        found[s, 0], found[s, 1], found[s, 2], found[s, 3] = i, end, a, second
        r = run[i, end]
        back = backward[r, b] - backward[r, a]
        own, hop = (forward[r, b] - forward[r, a]) * (1 + second) + back, 0.0
        synced = max(synced, per_byte[r] * (weights[b] - weights[a]) + waits[r] - back)
        if s < depth - 1:
            hop = max(link[end - 1, after] / hosts[r], trunk[end - 1, after]) * samples * passed[b]
            around += 2 * (hop + latency[end - 1, after])
        around, busiest = around + own, max(busiest, own, hop)
        i, a = after, b
    return found, (around, busiest, synced)


@compiled
def settled_cut(
    seconds: Floats, fits: Shorts, rings: Floats, weights: Floats, flight: Ints, micro_batches: int
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return the cut of settled stages whose slowest is as fast as can be: first blocks, and which recompute; empty:
    none fits.

    `seconds` [stages, 2, blocks + 1], `fits` [stages, 2, blocks, blocks + 1], `rings` [stages, 2], `flight` [stages].
    """
    stages, blocks = seconds.shape[0], seconds.shape[2] - 1
    best = np.full((stages + 1, blocks + 1), np.inf)
    picks = np.zeros((stages, blocks + 1), np.int32)
    best[0, 0] = 0.0
    for s in range(stages):
        if not rings[s, 0] < np.inf:
            return np.empty(0, np.int32), np.empty(0, np.bool_)
        for a in range(s, blocks):
            if not best[s, a] < np.inf:
                continue
            for b in range(a + 1, blocks + 1):
                if fits[s, 1, a, b] < flight[s]:
                    continue
                ahead_of = seconds[s, 0, b] - seconds[s, 0, a]
                behind = seconds[s, 1, b] - seconds[s, 1, a]
                cost = micro_batches * (ahead_of + behind)
                if fits[s, 0, a, b] < flight[s]:
                    cost += micro_batches * ahead_of
                cost += max(0.0, rings[s, 0] * (weights[b] - weights[a]) + rings[s, 1] - behind)
                cost = max(cost, best[s, a])
                if cost < best[s + 1, b]:
                    best[s + 1, b] = cost
                    picks[s, b] = a
    if not best[stages, blocks] < np.inf:
        return np.empty(0, np.int32), np.empty(0, np.bool_)
    firsts, again, end = np.zeros(stages, np.int32), np.zeros(stages, np.bool_), blocks
    for s in range(stages - 1, -1, -1):
        firsts[s] = picks[s, end]
        again[s] = fits[s, 0, firsts[s], end] < flight[s]
        end = firsts[s]
    return firsts, again


@compiled
def rests(
    best: Floats, link: Floats, trunk: Floats, passed: Floats, widest: int, samples: float, last: bool
) -> tuple[Floats, Ints]:
    """Return the seconds of the slowest part after a stage that ends before bundle j and block b, and its first bundle.

    Both are indexed [hosts of the stage, j, b]. `last`: nothing follows.
    """
    bundles, blocks = len(link), len(passed) - 1
    rest = np.full((widest + 1, bundles + 1, blocks + 1), np.inf)
    following = np.zeros((widest + 1, bundles + 1, blocks + 1), np.int32)
    if last:
        rest[:, :, blocks] = 0.0
        return rest, following
    for h in range(1, widest + 1):
        for j in range(1, bundles):
            for after in range(j, bundles):
                rate = samples * max(link[j - 1, after] / h, trunk[j - 1, after])
                for b in range(1, blocks):
                    seconds = max(rate * passed[b], best[after, b])
                    if seconds < rest[h, j, b]:
                        rest[h, j, b], following[h, j, b] = seconds, after
    return rest, following
