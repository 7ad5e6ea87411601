"""Equal tensor x pipeline x data degrees, as Megatron lays them out: one cut and one share for all.

Tensor groups inside, data next, pipeline outermost. The cut gives even layers (what comes once, an embedding or a head,
is not counted) or even times, as far as memory lets it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np

from isthmus.cost.compute import Group
from isthmus.cost.flat import group_of
from isthmus.errors import NoPlanError, UsageError
from isthmus.plan.types import Plan
from isthmus.planners.cuts import balanced_cut, best_cut, pipeline_seconds, stage_sums
from isthmus.planners.devices import device_sets, largest_host, tensor_groups
from isthmus.planners.ideas import Idea, Version
from isthmus.planners.pieces import build_stages, make_plan, ring_seconds
from isthmus.planners.problem import Bools, Floats, Problem
from isthmus.planners.room import Need, Room, Way
from isthmus.planners.shares import divisors, micro_batch_counts

__all__ = ["Fix", "cannot_have", "grid", "megatron_plan", "parse_fix"]


class Fix(NamedTuple):
    """Degrees that `grid` must use; None is free. `micro` counts samples per replica, as in Megatron."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro: int | None = None

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self._asdict().items() if value is not None)


class _Layout(NamedTuple):
    """Degrees with the groups that fill them, stage by stage."""

    groups: tuple[tuple[str, ...], ...]
    facts: tuple[tuple[str, Group], ...]  # kind and links of each group
    tp: int
    pp: int
    dp: int
    micro: int  # samples of a micro-batch on one replica
    micro_batches: int


def parse_fix(text: str) -> Fix:
    """`tp=2,pp=4,dp=2,micro=4`, any of them."""
    values: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in Fix._fields or name in values or not number.isdecimal() or not 1 <= len(number) <= 9:
            number = "0"
        if int(number) < 1:
            raise UsageError(
                "--fix cannot be read", found=word, expected="degrees like tp=2,pp=4,dp=2,micro=4, each 1 or more, once"
            )
        values[name] = int(number)
    return Fix(**values)


def grid(problem: Problem, room: Room, fix: Fix) -> Iterator[Idea]:
    """Every layout that the devices, the heads and the batch allow."""
    return (_idea(problem, room, layout, fix) for layout in _layouts(problem, fix))


def megatron_plan(problem: Problem, fix: Fix) -> Plan:
    """The plain layout of pinned degrees, whether it fits or not: even layers, replicated, nothing recomputed."""
    layout = next(_layouts(problem, fix))
    weights = _weights(problem, layout, fix)[0]
    firsts = balanced_cut([weights] * layout.pp, [_can_split(problem, layout.tp)] * layout.pp)
    if firsts is None:
        raise cannot_have(problem, fix)
    return _plan(problem, layout, firsts, Way())


def _layouts(problem: Problem, fix: Fix) -> Iterator[_Layout]:
    seen = set()
    for devices in device_sets(problem):
        for tp in _tensor_degrees(problem, fix):
            groups = tensor_groups(problem, devices, tp)
            facts = [(problem.cluster.devices[group[0]].kind, group_of(problem.cluster, group)) for group in groups]
            for pp, dp in _degrees(problem, len(groups), tp, fix):
                used, known = tuple(groups[: pp * dp]), tuple(facts[: pp * dp])
                if (used, pp) in seen:
                    continue
                seen.add((used, pp))
                for micro in _micro_sizes(problem, dp, fix):
                    yield _Layout(used, known, tp, pp, dp, micro, problem.job.batch // (dp * micro))


def _tensor_degrees(problem: Problem, fix: Fix) -> list[int]:
    """Degrees that the model's heads and the largest host allow; a pinned one may span hosts."""
    if fix.tp is not None:
        return [fix.tp] if fix.tp == 1 or _divides_heads(problem, fix.tp) else []
    return [tp for tp in range(1, largest_host(problem) + 1) if tp == 1 or _divides_heads(problem, tp)]


def _divides_heads(problem: Problem, tp: int) -> bool:
    heads = {block.tensor.heads for block in problem.graph.blocks if block.tensor is not None}
    return bool(heads) and all(head % tp == 0 for head in heads)


def _degrees(problem: Problem, groups: int, tp: int, fix: Fix) -> Iterator[tuple[int, int]]:
    """(pp, dp) for so many tensor groups; free data degrees fill them, half of them, ... or whole hosts."""
    batch, host = problem.job.batch, largest_host(problem)
    ways = divisors(batch)
    depths = {d for d in range(1, groups + 1) if groups % d == 0 or d & (d - 1) == 0}
    for pp in sorted(depths) if fix.pp is None else [fix.pp]:
        most = groups // pp
        whole = host // gcd(host, tp * pp)  # data degrees that fill hosts are its multiples
        fitting = [d for d in ways if d <= most]
        chosen = {max(d for d in fitting if d <= most >> i) for i in range(most.bit_length())}
        chosen.update([d for d in fitting if d % whole == 0][-2:])
        for dp in sorted(chosen, reverse=True) if fix.dp is None else [fix.dp]:
            if pp <= len(problem.graph.blocks) and dp in fitting:
                yield pp, dp


def _micro_sizes(problem: Problem, dp: int, fix: Fix) -> list[int]:
    share = problem.job.batch // dp
    if fix.micro is not None:
        return [fix.micro] if share % fix.micro == 0 else []
    return [share // count for count in micro_batch_counts(share, 1, most=5)]


def _idea(problem: Problem, room: Room, layout: _Layout, fix: Fix) -> Idea:
    """A layout; no cut of it is faster than one whose stages grow so that all are busy to the end.

    With T seconds for the whole model, m micro-batches and p stages that is T / (1 - (1 - 1 / m)^p).
    """
    rows = {fact: problem.block_seconds(*fact, layout.micro) for fact in dict.fromkeys(layout.facts)}
    whole = min(float(row.sum()) for row in rows.values())
    seconds = whole / (1.0 - (1.0 - 1.0 / layout.micro_batches) ** layout.pp)
    memory = sum(problem.cluster.kinds[kind].memory for kind, _ in layout.facts) * layout.tp
    return Idea(
        seconds,
        memory,
        layout.micro,
        partial(_versions, problem, room, layout, fix),
        partial(_nearest, problem, room, layout),
    )


def _ways(layout: _Layout) -> list[Way]:
    ways = [Way(recompute=recompute) for recompute in (False, True)]
    sharded = [Way(way.recompute, "sharded-optimizer") for way in ways] if layout.dp > 1 else []
    return [*ways, *sharded]


def _stage(layout: _Layout, s: int) -> slice:
    return slice(s * layout.dp, (s + 1) * layout.dp)


def _needs(layout: _Layout) -> list[Need]:
    stages = [tuple(d for group in layout.groups[_stage(layout, s)] for d in group) for s in range(layout.pp)]
    return [
        Need(devices, layout.tp, layout.dp, layout.micro, min(layout.pp - s, layout.micro_batches))
        for s, devices in enumerate(stages)
    ]


def _versions(problem: Problem, room: Room, layout: _Layout, fix: Fix) -> list[Version]:
    """Each way to hold the state, with each cut that fits so."""
    rows = {fact: problem.block_seconds(*fact, layout.micro) for fact in dict.fromkeys(layout.facts)}
    needs, found = _needs(layout), {}
    split = _can_split(problem, layout.tp)
    for way in _ways(layout):
        fits = [room.fits(need, way) & split for need in needs]
        for weights in _weights(problem, layout, fix):
            firsts = balanced_cut([weights] * layout.pp, fits)
            if firsts is not None and (way, tuple(firsts)) not in found:
                seconds = _seconds(problem, layout, rows, firsts, way)
                found[way, tuple(firsts)] = Version(seconds, partial(_plan, problem, layout, firsts, way))
    return sorted(found.values(), key=lambda version: version.seconds)


def _nearest(problem: Problem, room: Room, layout: _Layout) -> Plan | None:
    way, split = _ways(layout)[-1], _can_split(problem, layout.tp)
    firsts = best_cut(np.where(split, room.filled(need, way), np.inf) for need in _needs(layout))
    return None if firsts is None else _plan(problem, layout, firsts, way)


def _can_split(problem: Problem, tp: int) -> Bools:
    """Which runs of blocks have something that a tensor group can split; one device can have any."""
    able = [tp == 1 or block.tensor is not None for block in problem.graph.blocks]
    sums = np.concatenate(([0], np.cumsum(able)))
    return np.asarray(sums[None, :] > sums[:-1, None])


def _weights(problem: Problem, layout: _Layout, fix: Fix) -> list[Floats]:
    """What is to be even: layers, as Megatron cuts and, if all is free, times."""
    often = Counter(block.digest for block in problem.graph.blocks)
    layers = np.array([block.forward_flops if often[block.digest] > 1 else 0.0 for block in problem.graph.blocks])
    times = problem.block_seconds(*layout.facts[0], 1).sum(axis=0)
    if not layers.any():
        return [times]
    return [layers] if fix != Fix() else [layers, times]


def _seconds(
    problem: Problem, layout: _Layout, rows: dict[tuple[str, Group], Floats], firsts: Sequence[int], way: Way
) -> float:
    """What the layout needs at least with this cut: its slowest replicas' computing, or its slowest ring."""
    sums = {fact: stage_sums(row[0] * (2 if way.recompute else 1) + row[1], firsts) for fact, row in rows.items()}
    slowest = [max(sums[fact][s] for fact in layout.facts[_stage(layout, s)]) for s in range(layout.pp)]
    sending = 0.0
    for s, (a, b) in enumerate(zip(firsts, (*firsts[1:], len(problem.graph.blocks)), strict=True)):
        span = problem.table.span(a, b - 1)
        elements = (span.elements - span.split_elements * (1.0 - 1.0 / layout.tp)) * (problem.kept or 1.0)
        members = [group[0] for group in layout.groups[_stage(layout, s)]]
        sending = max(sending, ring_seconds(problem, members, elements))
    return max(sending, pipeline_seconds(np.array(slowest), layout.micro_batches))


def _plan(problem: Problem, layout: _Layout, firsts: Sequence[int], way: Way) -> Plan:
    members = [[(group, layout.micro) for group in layout.groups[_stage(layout, s)]] for s in range(layout.pp)]
    return make_plan(problem, build_stages(problem, firsts, members, way), layout.micro_batches)


def cannot_have(problem: Problem, fix: Fix) -> NoPlanError:
    """Which of the pinned degrees cannot be had, and which could."""
    tp, pp, dp, batch = fix.tp or 1, fix.pp or 1, fix.dp or 1, problem.job.batch
    most = max(Counter(problem.cluster.devices[device].kind for device in problem.usable).values())
    groups = len(tensor_groups(problem, problem.usable, tp))
    degrees = [1, *(d for d in range(2, most + 1) if _divides_heads(problem, d))]
    if tp > 1 and not _divides_heads(problem, tp):
        what, expected = f"the model cannot be split {tp} ways", f"tp one of {', '.join(map(str, degrees))}"
    elif not groups:
        what, expected = f"there are no {tp} equal devices that can talk", f"tp at most {max(degrees)}"
    elif pp > len(problem.graph.blocks):
        what, expected = f"the model has too few blocks for pp={pp}", f"pp at most {len(problem.graph.blocks)}"
    elif batch % dp or (fix.micro is not None and batch // dp % fix.micro):
        what, expected = f"dp={dp} with micro={fix.micro or 1} does not divide the batch", f"a divisor of {batch}"
    elif pp * dp > groups:
        what, expected = f"tp={tp},pp={pp},dp={dp} needs {tp * pp * dp} devices", f"pp * dp at most {groups}"
    else:
        what, expected = "no layout has these degrees", "tp * pp * dp devices that can talk and may hold the blocks"
    return NoPlanError(
        what,
        where=f"{problem.job.name} on cluster {problem.cluster.name}",
        found=f"--fix {fix}; {len(problem.usable)} devices, batch {batch}",
        expected=expected,
        next="Leave out --fix, or one of its degrees",
    )
