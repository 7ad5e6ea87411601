"""Runs, what flows between them, and every device's order: `plan.schedule` again, slowly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from isthmus.plan.resolve import Resolved, ResolvedPipeline, suppliers
from tests.cost.reference_costs import WIDTH, weights_come

__all__ = ["Flows", "Order", "Run", "depths", "flows_of", "orders_of", "runs_of"]

Flows = dict[tuple[int, int], list[float]]  # (from run, to run) -> bytes per sample, and bytes of every message
Order = list[tuple[int, str, int]]  # run, "F" or "B", micro-batch


@dataclass(eq=False)
class Run:
    """Neighbouring stages on the same devices with the same samples; `copies` has (stage, replica) of each."""

    number: int
    devices: tuple[str, ...]
    lo: int
    hi: int
    slices: int
    copies: list[tuple[int, int]]

    @property
    def device(self) -> str:
        return self.devices[0]

    @property
    def share(self) -> int:
        return self.hi - self.lo

    def slice(self, k: int) -> tuple[int, int]:
        """Samples of slice k: as even as whole samples allow."""
        return self.lo + self.share * k // self.slices, self.lo + self.share * (k + 1) // self.slices


def runs_of(part: ResolvedPipeline, names: list[str]) -> list[Run]:
    runs: list[Run] = []
    owner: dict[tuple[int, int], Run] = {}
    for s, stage in enumerate(part.stages):
        for r, replica in enumerate(stage.replicas):
            key = (tuple(names[d] for d in replica.devices), replica.lo, replica.hi, replica.slices)
            same = s > 0 and weights_come(part.pipeline.stages[s]) == weights_come(part.pipeline.stages[s - 1])
            before = [owner[s - 1, q] for q in range(len(part.stages[s - 1].replicas))] if same else []
            found = [u for u in before if (u.devices, u.lo, u.hi, u.slices) == key]
            run = found[0] if found else Run(len(runs), *key, copies=[])
            if not found:
                runs.append(run)
            run.copies.append((s, r))
            owner[s, r] = run
    return runs


def flows_of(resolved: Resolved, part: ResolvedPipeline, runs: list[Run], back: bool) -> Flows:
    """Bytes between runs. Each tensor goes once to each later stage that uses it; gradients come back where they do."""
    owner = {copy: run for run in runs for copy in run.copies}
    width = WIDTH[part.pipeline.precision]
    sizes: dict[tuple[int, int], list[float]] = {}
    for tensor in part.graph.tensors:
        if tensor.source < 0 or (back and not tensor.grad):
            continue
        s = part.stage_of[tensor.source]
        for t in {part.stage_of[target] for target in tensor.targets} - {s}:
            pair = sizes.setdefault((t, s) if back else (s, t), [0.0, 0.0])
            pair[0] += tensor.elements * (tensor.width or width)
            pair[1] += tensor.fixed * (tensor.width or width)
    flows: Flows = {}
    for run in runs:
        for t, r in run.copies:
            for s in sorted(s for s, to in sizes if to == t):
                for q, _, _ in suppliers(resolved, part.stages[s], part.stages[t].replicas[r]):
                    if owner[s, q] is not run:
                        flow = flows.setdefault((owner[s, q].number, run.number), [0.0, 0.0])
                        flow[0] += sizes[s, t][0]
                        flow[1] += sizes[s, t][1]
    return flows


def orders_of(
    runs: list[Run],
    forward: Iterable[tuple[int, int]],
    backward: Iterable[tuple[int, int]],
    micro: int,
    how: str,
    ahead: int = 0,
    places: dict[str, tuple[str, str]] | None = None,
) -> dict[str, Order]:
    """Every device's order by the rules of `plan.schedule`; `forward` and `backward` say which run feeds which.

    `places` has the region and host of each device.
    """
    forward, backward = list(forward), list(backward)
    if how == "interleaved":
        orders = looped(runs, depths(len(runs), forward), micro)
        if orders is not None and finishes(orders, forward, backward):
            return orders
    late = min(ahead, micro) if how == "1f1b" else 0
    return played(runs, forward, backward, micro, how, late, far_pairs(runs, places or {}))


def far_pairs(runs: list[Run], places: dict[str, tuple[str, str]]) -> set[tuple[int, int]]:
    """Pairs of runs in different regions or, if there is but one, on different hosts."""
    where = {u.number: places.get(u.device, ("", "")) for u in runs}
    which = 0 if len({region for region, _ in where.values()}) > 1 else 1
    return {(a, b) for a in where for b in where if where[a][which] != where[b][which]}


def played(
    runs: list[Run],
    forward: list[tuple[int, int]],
    backward: list[tuple[int, int]],
    micro: int,
    how: str,
    late: int,
    far: set[tuple[int, int]],
) -> dict[str, Order]:
    """Tick by tick, on what was done before the tick; what comes from afar is `late` ticks older."""
    orders: dict[str, Order] = {u.device: [] for u in runs}
    room = [1] * len(runs)
    for u in reversed(range(len(runs))):
        room[u] = max([1, *(1 + room[t] + late * ((s, t) in far) for s, t in forward if s == u)])
    done = {(way, u): 0 for way in "FB" for u in range(len(runs))}
    history = [dict(done)] * (late + 1)
    while any(through < micro for through in done.values()):
        then = dict(done)
        history = [*history[1:], then]

        def seen(way: str, s: int, t: int, history: list[dict[tuple[str, int], int]] = history) -> int:
            return history[0 if (s, t) in far else -1][way, s]

        for device, order in orders.items():
            mine = [u.number for u in runs if u.device == device]
            fed = {u: min([micro, *(seen("F", s, t) for s, t in forward if t == u)]) for u in mine}
            back = {u: min([then["F", u], *(seen("B", s, t) for s, t in backward if t == u)]) for u in mine}
            ahead_of = {u: then["F", u] - then["B", u] for u in mine}
            forwards = [u for u in mine if then["F", u] < fed[u] and (how != "1f1b" or ahead_of[u] < room[u])]
            waits = how == "fill-drain" and any(then["F", u] < micro for u in mine)
            backwards = [u for u in mine if then["B", u] < back[u] and not waits]
            if backwards:
                way, u = "B", min(backwards, key=lambda u: (then["B", u], u))
            elif forwards:
                way, u = "F", max(forwards)
            else:
                continue
            order.append((u, way, then[way, u]))
            done[way, u] += 1
        assert done != then or late, "nothing can go on"
    return orders


def looped(runs: list[Run], depth: list[int], micro: int) -> dict[str, Order] | None:
    """Megatron's interleaved order; None where the pipeline is not regular."""
    mine: dict[str, list[int]] = {}
    for u in runs:
        mine.setdefault(u.device, []).append(u.number)
    gaps = {depth[a] - depth[b] for numbers in mine.values() for a, b in pairwise(numbers)}
    if len(gaps) != 1 or len({len(numbers) for numbers in mine.values()}) != 1:
        return None
    p = gaps.pop()
    if p <= 0 or micro % p:
        return None
    orders = {}
    for device, numbers in mine.items():
        groups = [range(start, start + p) for start in range(0, micro, p)]
        forwards = [(u, "F", m) for group in groups for u in numbers for m in group]
        backwards = [(u, "B", m) for group in groups for u in reversed(numbers) for m in group]
        rank = max(depth) - depth[numbers[0]]
        warm = 2 * (p - rank - 1) + (len(numbers) - 1) * p
        if warm < 0:
            return None
        steady = [op for pair in zip(forwards[warm:], backwards, strict=False) for op in pair]
        orders[device] = forwards[:warm] + steady + backwards[len(forwards[warm:]) :]
    return orders


def finishes(orders: dict[str, Order], forward: list[tuple[int, int]], backward: list[tuple[int, int]]) -> bool:
    """Whether the orders can be played to their end."""
    left = {device: list(order) for device, order in orders.items()}
    done: set[tuple[int, str, int]] = set()
    while True:
        before = len(done)
        for order in left.values():
            while order and all(need in done for need in _needs(order[0], forward, backward)):
                done.add(order.pop(0))
        if len(done) == before:
            return not any(left.values())


def _needs(
    op: tuple[int, str, int], forward: list[tuple[int, int]], backward: list[tuple[int, int]]
) -> list[tuple[int, str, int]]:
    u, way, m = op
    flows = forward if way == "F" else backward
    own = [(u, "F", m)] if way == "B" else []
    return [(s, way, m) for s, t in flows if t == u] + own + ([(u, way, m - 1)] if m else [])


def depths(runs: int, forward: list[tuple[int, int]]) -> list[int]:
    """Runs on the longest way from each run to the end; runs only feed runs with higher numbers."""
    depth = [1] * runs
    for u in reversed(range(runs)):
        depth[u] = max([1, *(1 + depth[t] for s, t in forward if s == u)])
    return depth
