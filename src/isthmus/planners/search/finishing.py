"""Settle the details that a layout leaves open: syncs, blocks that all replicas compute alike, and slices.

Duplicates and slices come when the search has ended: bounds of layouts know nothing of them, so that a plan which has
them would rule out too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from isthmus.plan.types import Plan
from isthmus.planners.layout.build_plan import more_slices, only_pipeline
from isthmus.planners.schemes.data_parallel import data
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.search.candidates import Candidates, distinct, replicated, resync, sync_anew
from isthmus.planners.search.duplicates import could_duplicate, with_duplicates
from isthmus.planners.search_constants import DUPLICATED_ENDS, DUPLICATES_NEAR, DUPLICATES_PART, GAIN, SYNC_GAIN, SYNCED

__all__ = ["finish"]


def finish(pool: Candidates, *, synced: bool = False) -> None:
    """Settle all that a layout leaves open; nothing is searched after that. `synced`: syncs were chosen already."""
    if not synced:
        resync(pool)
    with pool.search.within(DUPLICATES_PART):
        duplicate_blocks(pool)
    slice_stages(pool)


def duplicate_blocks(pool: Candidates) -> None:
    """Let ends of stages be computed by all replicas on all samples, as long as that gains: in the best plans, and in
    the whole model on each set of devices, which the search passes over where its gradients are many.

    Plans of copies are left alone.
    """
    if pool.search.state.copied:
        return
    whole = [found for found in pool.found if replicated(found.layout) and found.layout.pace.state != "sharded-all"]
    near = [found.candidate.plan for found in distinct(whole, SYNCED) if found.seconds < SYNC_GAIN * pool.limit]
    best = [pool.best.plan] if pool.best is not None else []
    for start in chain(best, near, _side_by_side(pool)):
        current: Plan | None = start
        while current is not None:
            current = _duplicated(pool, current)


def _side_by_side(pool: Candidates) -> Iterator[Plan]:
    """Yield the whole model on every device, for each set of devices in the fewest micro-batches that may fit."""
    seen = set[frozenset[str]]()
    for idea in data(pool.problem, pool.lanes.memory, Fix()) if could_duplicate(pool.problem) else ():
        if pool.search.spent():
            return
        version = next(iter(idea.versions()), None)
        if version is None:
            continue
        plan = version.make()
        (stage,) = only_pipeline(plan).stages
        devices = frozenset(replica.devices[0] for replica in stage.replicas)
        if len(devices) > 1 and devices not in seen:
            seen.add(devices)
            yield plan


def _duplicated(pool: Candidates, start: Plan) -> Plan | None:
    """Return a plan with one more end of a stage duplicated, and its syncs chosen anew, if it is the best so far."""
    for plan in islice(with_duplicates(pool.problem, start), DUPLICATED_ENDS):
        candidate = None if pool.search.spent() else pool.search.price(plan)
        pool.search.tell("duplicates")
        near = candidate is not None and candidate.price.step_seconds < DUPLICATES_NEAR * pool.limit
        if candidate is not None and near and pool.keep(candidate):
            before = pool.limit
            found = sync_anew(pool, candidate)
            if found is not None and found.price.step_seconds <= before:
                return found.plan
    return None


def slice_stages(pool: Candidates) -> None:
    """Let stages of the best plan run their shares in more slices, one stage at a time, as long as that gains.

    A slice's messages leave before the next one is computed; work on few samples is less efficient. Where there is one
    stage nothing is sent.
    """
    stage, since = 0, 0
    while pool.best is not None and not pool.search.spent():
        stages = len(only_pipeline(pool.best.plan).stages)
        if stages < 2 or since == stages:
            return
        plan, before = more_slices(pool.problem, pool.best.plan, stage % stages), pool.limit
        candidate = None if plan is None else pool.search.price(plan)
        pool.search.tell("slices")
        if candidate is not None and candidate.price.step_seconds < GAIN * before and pool.keep(candidate):
            since = 0
        else:
            stage, since = stage + 1, since + 1
