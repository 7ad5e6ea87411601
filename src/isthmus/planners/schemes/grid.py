"""Equal tensor x pipeline x data degrees, as Megatron lays them out: one cut and one share for all.

Tensor groups inside, data next, pipeline outermost. The cut gives even layers (what comes once, an embedding or a head,
is not counted) or even times, as far as memory lets it. `tensor` is the same with one stage, and tensor groups only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from math import gcd
from typing import NamedTuple

import numpy as np

from isthmus.errors import NoPlanError
from isthmus.plan.types import Plan
from isthmus.planners.layout.build_plan import least_ring
from isthmus.planners.layout.cuts import balanced_cut
from isthmus.planners.layout.device_groups import divides_heads, largest_host, tensor_groups
from isthmus.planners.layout.layout_types import Staged, StageOptions
from isthmus.planners.layout.memory_fit import MemoryFit
from isthmus.planners.layout.pipeline_bounds import least_seconds
from isthmus.planners.layout.shares import divisors
from isthmus.planners.problem import Floats, Problem, ReplicaKind
from isthmus.planners.proposal import Idea, Version
from isthmus.planners.schemes.device_sets import device_sets
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.staged_ideas import even_layers, micro_sizes, nearest, staged_plan, versions, ways_of
from isthmus.planners.search_constants import VERSIONS_EFFORT

__all__ = ["cannot_have", "grid", "megatron_plan", "tensor"]


class _Layout(NamedTuple):
    """Degrees with the groups that fill them, stage by stage."""

    groups: tuple[tuple[str, ...], ...]
    kinds: tuple[ReplicaKind, ...]  # kind and links of each group
    tp: int
    pp: int
    dp: int
    micro: int  # samples of a micro-batch on one replica
    micro_batches: int


def grid(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose every layout that the devices, the heads and the batch allow."""
    return (_idea(problem, memory, layout, fix) for layout in _layouts(problem, fix, _tensor_degrees(problem, fix)))


def tensor(problem: Problem, memory: MemoryFit, fix: Fix) -> Iterator[Idea]:
    """Propose the model as one stage of tensor groups of any size, which may span hosts.

    Data parallel over the rest.
    """
    one = Fix(pp=1)
    most = max(Counter(problem.cluster.devices[device].kind for device in problem.usable).values())
    degrees = [tp for tp in range(2, most + 1) if divides_heads(problem, tp)]
    return (_idea(problem, memory, layout, one) for layout in _layouts(problem, one, degrees))


def megatron_plan(problem: Problem, fix: Fix) -> Plan:
    """Return the plain layout of pinned degrees, whether it fits or not: even layers, replicated,
    nothing recomputed.
    """
    layout = next(_layouts(problem, fix, _tensor_degrees(problem, fix)))
    weights, memory = _weights(problem, layout, fix)[0], MemoryFit(problem)
    firsts = balanced_cut([weights] * layout.pp, [memory.splits(layout.tp)] * layout.pp)
    if firsts is None:
        raise cannot_have(problem, fix)
    return staged_plan(problem, _staged(layout), firsts, StageOptions())


def _layouts(problem: Problem, fix: Fix, degrees: Sequence[int]) -> Iterator[_Layout]:
    seen = set()
    for devices in device_sets(problem):
        for tp in degrees:
            groups = tensor_groups(problem, devices, tp)
            kinds = [problem.replica_kind(group) for group in groups]
            for pp, dp in _degrees(problem, len(groups), tp, fix):
                used, known = tuple(groups[: pp * dp]), tuple(kinds[: pp * dp])
                if (used, pp) in seen:
                    continue
                seen.add((used, pp))
                for micro in micro_sizes(problem, dp, fix.micro):
                    yield _Layout(used, known, tp, pp, dp, micro, problem.job.batch // (dp * micro))


def _tensor_degrees(problem: Problem, fix: Fix) -> list[int]:
    """Return the degrees that the model's heads and the largest host allow; a pinned one may span hosts."""
    if fix.tp is not None:
        return [fix.tp] if fix.tp == 1 or divides_heads(problem, fix.tp) else []
    return [tp for tp in range(1, largest_host(problem) + 1) if tp == 1 or divides_heads(problem, tp)]


def _degrees(problem: Problem, groups: int, tp: int, fix: Fix) -> Iterator[tuple[int, int]]:
    """Yield (pp, dp) for so many tensor groups; free data degrees fill them, half of them, ... or whole hosts."""
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


def _idea(problem: Problem, memory: MemoryFit, layout: _Layout, fix: Fix) -> Idea:
    """Return the idea of a layout; no cut of it is faster than one whose stages grow so that all are busy to the end.

    With T seconds for the whole model, m micro-batches and p stages that is T / (1 - (1 - 1 / m)^p), or m T / p where
    stages need not wait for each other.
    """
    blocks = [problem.block_seconds(*kind, layout.micro).sum(axis=0) for kind in dict.fromkeys(layout.kinds)]
    whole = float(np.min(blocks, axis=0).sum())  # each block where it is quickest
    busy = 1.0 - (1.0 - 1.0 / layout.micro_batches) ** layout.pp if problem.serial else layout.pp / layout.micro_batches
    return Idea(
        seconds=max(whole / busy, _slow_links(problem, layout)),
        memory=sum(problem.cluster.kinds[kind].memory for kind, _ in layout.kinds) * layout.tp,
        samples=layout.micro,
        versions=partial(_versions, problem, memory, layout, fix),
        nearest=lambda: nearest(problem, memory, _staged(layout), ways_of(layout.dp)[-1]),
        versions_effort=VERSIONS_EFFORT,
    )


def _slow_links(problem: Problem, layout: _Layout) -> float:
    """Return the least seconds of the messages of a layout over several regions, or of one stage."""
    regions = [problem.cluster.host_of(group[0]).region for group in layout.groups]
    borders = [s for s in range(layout.pp - 1) if regions[s * layout.dp] != regions[(s + 1) * layout.dp]]
    if layout.pp == 1:
        elements = problem.table.span(0, len(problem.graph.blocks) - 1).elements * (problem.kept or 1.0)
        return least_ring(problem, [group[0] for group in layout.groups], elements / layout.tp).sending
    return least_seconds(problem, _staged(layout), borders) if borders else 0.0


def _staged(layout: _Layout) -> Staged:
    members = [(group, layout.micro) for group in layout.groups]
    stages = tuple(tuple(members[s * layout.dp : (s + 1) * layout.dp]) for s in range(layout.pp))
    return Staged(stages, layout.micro_batches)


def _versions(problem: Problem, memory: MemoryFit, layout: _Layout, fix: Fix) -> list[Version]:
    """Return each way to hold the state, with each cut that fits so."""
    rows = [[weights] * layout.pp for weights in _weights(problem, layout, fix)]
    cuts = [lambda _, row=row: row for row in rows]
    return versions(problem, memory, _staged(layout), cuts, ways_of(layout.dp))


def _weights(problem: Problem, layout: _Layout, fix: Fix) -> list[Floats]:
    """Return what stages should share evenly: layers, if there are any, as Megatron cuts; times too if all is free."""
    layers = even_layers(problem)
    times = problem.block_seconds(*layout.kinds[0], 1).sum(axis=0)
    if not layers.any():
        return [times]
    return [layers] if fix != Fix() else [layers, times]


def cannot_have(problem: Problem, fix: Fix) -> NoPlanError:
    """Return the error that says which of the pinned degrees cannot be had, and which could."""
    tp, pp, dp, batch = fix.tp or 1, fix.pp or 1, fix.dp or 1, problem.job.batch
    most = max(Counter(problem.cluster.devices[device].kind for device in problem.usable).values())
    groups = len(tensor_groups(problem, problem.usable, tp))
    degrees = [1, *(d for d in range(2, most + 1) if divides_heads(problem, d))]
    if tp > 1 and not divides_heads(problem, tp):
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
