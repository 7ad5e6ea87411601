"""The usual ways to train, each as good as its users would make it. They are what a planner must beat.

- `data-even`: every device that holds the model has all of it and takes an equal share; gradients by ring.
- `data`: the same with shares that make all finish together, gradients by ring or tree.
- `pipeline`: one chain of stages, cut so that the slowest stage is as fast as can be.
- `grid`: equal tensor x pipeline x data degrees (Megatron): the same cut and shares for all.

Each tries all devices, each region and each kind alone, several micro-batch sizes, and recompute on and off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from isthmus.cost.memory import state_bytes
from isthmus.errors import UsageError
from isthmus.plan.types import How, Layout, Plan
from isthmus.planners.pieces import (
    balanced_cut,
    block_times,
    build_stages,
    even_shares,
    fair_shares,
    make_plan,
    micro_batch_counts,
    whole_times,
)
from isthmus.planners.problem import Problem

__all__ = ["SCHEMES", "Fix", "Ladder", "Scheme", "device_sets", "parse_fix"]


class Fix(NamedTuple):
    """Degrees that `grid` must use; None is free. `micro` counts samples per replica, as in Megatron."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    micro: int | None = None


def parse_fix(text: str) -> Fix:
    """`tp=2,pp=4,dp=2,micro=4`, any of them."""
    values: dict[str, int] = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in Fix._fields or name in values or not number.isdecimal() or int(number) < 1:
            raise UsageError(
                "--fix cannot be read", found=word, expected="degrees like tp=2,pp=4,dp=2,micro=4, each 1 or more, once"
            )
        values[name] = int(number)
    return Fix(**values)


Members = list[list[tuple[tuple[str, ...], int]]]  # stage by stage: devices and share of each replica
Ladder = list[Plan]  # versions of one idea, fastest first: the first that fits is the best of them
Scheme = Callable[[Problem, Fix], Iterator[Ladder]]


def data_even(problem: Problem, fix: Fix) -> Iterator[Ladder]:
    """Equal shares on every device that holds the model."""
    for devices in _holders(problem):
        for count in micro_batch_counts(problem.job.batch, len(devices)):
            shares = even_shares(problem.job.batch // count, len(devices))
            yield _replicated(problem, devices, shares, count, "ring")


def data(problem: Problem, fix: Fix) -> Iterator[Ladder]:
    """Shares by speed on every device that holds the model."""
    for devices in _holders(problem):
        counts = micro_batch_counts(problem.job.batch, len(devices))
        most = problem.job.batch // min(counts, default=1) - len(devices) + 1
        known = {problem.cluster.devices[device].kind: device for device in devices}
        per_kind = {kind: whole_times(problem, device, most) for kind, device in known.items()}
        times = [per_kind[problem.cluster.devices[device].kind] for device in devices]
        for count in counts:
            shares = fair_shares(problem.job.batch // count, times)
            yield _replicated(problem, devices, shares, count, "ring")
            if len({problem.cluster.host_of(device).region for device in devices}) > 1:
                yield _replicated(problem, devices, shares, count, "tree")


def _replicated(problem: Problem, devices: Sequence[str], shares: Sequence[int], count: int, how: How) -> Ladder:
    members = [[((device,), share) for device, share in zip(devices, shares, strict=True)]]
    return [
        make_plan(problem, build_stages(problem, [0], members, recompute=recompute), count, how=how)
        for recompute in (False, True)
    ]


def _holders(problem: Problem) -> list[tuple[str, ...]]:
    """Device sets without the devices that cannot hold the whole model's state (all of them, if none can)."""
    state = state_bytes(problem.precision, problem.job.optimizer).total * problem.graph.elements
    able = {d for d in problem.usable if problem.cluster.kind_of(d).memory > state}
    sets = [tuple(d for d in devices if d in able) for devices in device_sets(problem)]
    return list(dict.fromkeys(members for members in sets if members)) or [problem.usable]


def pipeline(problem: Problem, fix: Fix) -> Iterator[Ladder]:
    """One stage a device, in the order of the cluster file."""
    batch = problem.job.batch
    for devices in device_sets(problem):
        chain = devices[: len(problem.graph.blocks)]
        for count in micro_batch_counts(batch, 1):
            size = batch // count
            firsts = balanced_cut([block_times(problem, (device,), size) for device in chain])
            members = [[((device,), size)] for device in chain]
            yield [
                make_plan(problem, build_stages(problem, firsts, members, recompute=recompute), count)
                for recompute in (False, True)
            ]


def grid(problem: Problem, fix: Fix) -> Iterator[Ladder]:
    """Tensor groups inside, data next, pipeline outermost; the same even cut and shares for all."""
    for devices in device_sets(problem):
        for tp, pp, dp in _degrees(problem, len(devices), fix):
            groups = _groups(problem, devices, tp)
            if len(groups) < pp * dp:
                continue
            for firsts in _cuts(problem, groups[0], pp, fix):
                if tp > 1 and not _all_split(problem, firsts):
                    continue
                for micro in _micro_sizes(problem, dp, fix):
                    members = [[(group, micro) for group in groups[s * dp : (s + 1) * dp]] for s in range(pp)]
                    yield _ladder(problem, firsts, members, problem.job.batch // (dp * micro), dp)


def _ladder(problem: Problem, firsts: Sequence[int], members: Members, count: int, dp: int) -> Ladder:
    layouts: tuple[Layout, ...] = ("replicated",) if dp == 1 else ("replicated", "sharded-optimizer")
    return [
        make_plan(problem, build_stages(problem, firsts, members, recompute=recompute, state=state), count)
        for recompute in (False, True)
        for state in layouts
    ]


def _cuts(problem: Problem, group: tuple[str, ...], pp: int, fix: Fix) -> list[list[int]]:
    """Even layers, as Megatron cuts: what comes once (embedding, head) is not counted; and, if free, even times."""
    often = Counter(block.digest for block in problem.graph.blocks)
    layers = [block.forward_flops if often[block.digest] > 1 else 0.0 for block in problem.graph.blocks]
    times = balanced_cut([block_times(problem, group, 1)] * pp)
    cuts = [balanced_cut([layers] * pp)] if sum(layers) else []
    return cuts if cuts and fix != Fix() else [*cuts, *([times] if times not in cuts else [])]


def _degrees(problem: Problem, count: int, fix: Fix) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, dp) for so many devices; a free data degree fills them as far as the batch divides."""
    blocks, batch = len(problem.graph.blocks), problem.job.batch
    for tp in [fix.tp] if fix.tp else _tensor_degrees(problem):
        rest = count // tp
        depths = {d for d in range(1, rest + 1) if rest % d == 0 or d & (d - 1) == 0}
        for pp in [fix.pp] if fix.pp else sorted(depths):
            dp = fix.dp or next((d for d in range(rest // pp, 0, -1) if batch % d == 0), 0)
            if pp <= blocks and dp and tp * pp * dp <= count and batch % dp == 0:
                yield tp, pp, dp


def _tensor_degrees(problem: Problem) -> list[int]:
    """Degrees that the model's heads and the largest host allow."""
    heads = {block.tensor.heads for block in problem.graph.blocks if block.tensor is not None}
    largest = max(max(host.devices.values(), default=0) for host in problem.cluster.hosts.values())
    return [tp for tp in range(1, largest + 1) if all(h % tp == 0 for h in heads)] if heads else [1]


def _all_split(problem: Problem, firsts: Sequence[int]) -> bool:
    """Whether every stage has something that a tensor group can split."""
    blocks = problem.graph.blocks
    ends = [*firsts[1:], len(blocks)]
    return all(any(block.tensor for block in blocks[a:b]) for a, b in zip(firsts, ends, strict=True))


def _groups(problem: Problem, devices: Sequence[str], tp: int) -> list[tuple[str, ...]]:
    """Tensor groups of equal devices of one host, or of several hosts if none is large enough; a rest stays idle."""
    groups: list[tuple[str, ...]] = []
    kinds = problem.cluster.devices
    wide = tp > max(max(host.devices.values(), default=0) for host in problem.cluster.hosts.values())
    for _, members in groupby(devices, key=lambda d: kinds[d].kind if wide else d.rpartition("/")[0]):
        row = list(members)
        groups.extend(tuple(row[i : i + tp]) for i in range(0, len(row) - tp + 1, tp))
    return groups


def _micro_sizes(problem: Problem, dp: int, fix: Fix) -> list[int]:
    share = problem.job.batch // dp
    if fix.micro:
        return [fix.micro] if share % fix.micro == 0 else []
    return [share // count for count in micro_batch_counts(share, 1, most=5)]


def device_sets(problem: Problem) -> list[tuple[str, ...]]:
    """What a user would try: all usable devices; those of each region; those of each kind; one of each kind."""
    cluster, usable = problem.cluster, problem.usable
    regions = [tuple(d for d in usable if cluster.host_of(d).region == region) for region in cluster.regions]
    kinds = [tuple(d for d in usable if cluster.devices[d].kind == kind) for kind in cluster.kinds]
    sets = [usable, *regions, *kinds, *(kind[:1] for kind in kinds)]
    return list(dict.fromkeys(members for members in sets if members))


SCHEMES: dict[str, Scheme] = {"data-even": data_even, "data": data, "pipeline": pipeline, "grid": grid}
