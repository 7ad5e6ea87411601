"""Random layouts for hypothesis: lanes of any depth on any devices, with any cuts and shares."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from isthmus.planners.layout.layout_types import Bundle, Lane, LaneOptions
from isthmus.planners.layout.shares import divisors
from isthmus.planners.problem import Problem

__all__ = ["random_lanes", "random_options", "random_parts"]

Group = tuple[str, ...]


def random_options(problem: Problem, random: Random) -> LaneOptions:
    """Any number of micro-batches that divides the batch; state is sharded or spilled now and then."""
    state = random.choice(("replicated", "replicated", "sharded-optimizer", "sharded-all"))
    counts = random.choice(divisors(problem.job.batch)), random.choice((0, 0, 1, 3))
    return LaneOptions(*counts, state, random.random() < 0.2)


def random_parts(bundles: Sequence[Bundle], random: Random) -> tuple[tuple[Bundle, ...], ...]:
    """Some of the bundles, in lanes."""
    chosen = random.sample(list(bundles), random.randint(1, len(bundles)))
    count = random.randint(1, min(3, len(chosen)))
    return tuple(tuple(chosen[i::count]) for i in range(count))


def random_lanes(problem: Problem, random: Random, options: LaneOptions, *, pairs: bool = False) -> list[Lane]:
    """One lane to four, on some of the devices. `pairs`: of tensor groups now and then, which no rule may allow."""
    groups = _groups(problem, random, pairs and random.random() < 0.3)
    samples = problem.job.batch // options.micro_batches
    count = random.randint(1, min(4, len(groups), samples))
    parts = [groups[i::count] for i in range(count)]
    return [_lane(problem, random, part, n) for part, n in zip(parts, _shares(random, samples, count), strict=True)]


def _groups(problem: Problem, random: Random, paired: bool) -> list[Group]:
    """Some devices in any order; or pairs of one host and kind, if there are any and something to split."""
    by_kind: dict[str, list[str]] = {}
    for device in problem.usable:
        by_kind.setdefault(device.rpartition("/")[0], []).append(device)
    pairs = [(mates[i], mates[i + 1]) for mates in by_kind.values() for i in range(0, len(mates) - 1, 2)]
    if paired and pairs and any(block.tensor is not None for block in problem.graph.blocks):
        return pairs
    return [(device,) for device in random.sample(problem.usable, random.randint(1, len(problem.usable)))]


def _lane(problem: Problem, random: Random, groups: Sequence[Group], samples: int) -> Lane:
    blocks = len(problem.graph.blocks)
    depth = random.randint(1, min(len(groups), blocks))
    ends = sorted(random.sample(range(1, len(groups)), depth - 1))
    stages = []
    for a, b in zip((0, *ends), (*ends, len(groups)), strict=True):
        members = groups[a:b][:samples]
        stages.append(tuple(zip(members, _shares(random, samples, len(members)), strict=True)))
    firsts = (0, *sorted(random.sample(range(1, blocks), depth - 1)))
    return Lane(tuple(stages), firsts, tuple(random.random() < 0.3 for _ in firsts))


def _shares(random: Random, samples: int, parts: int) -> list[int]:
    ends = sorted(random.sample(range(1, samples), parts - 1))
    return [b - a for a, b in zip((0, *ends), (*ends, samples), strict=True)]
