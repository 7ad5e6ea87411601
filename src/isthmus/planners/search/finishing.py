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


def finish(candidates: Candidates, *, synced: bool = False) -> None:
    """Settle all that a layout leaves open; nothing is searched after that. `synced`: syncs were chosen already."""
    if not synced:
        resync(candidates)
    with candidates.search.within(DUPLICATES_PART):
        duplicate_blocks(candidates)
    slice_stages(candidates)


def duplicate_blocks(candidates: Candidates) -> None:
    """Let ends of stages be computed by all replicas on all samples, as long as that gains: in the best plans, and in
    the whole model on each set of devices, which the search passes over where its gradients are many.

    Plans of copies are left alone.
    """
    if candidates.search.state.copied:
        return
    whole = [
        found for found in candidates.found if replicated(found.layout) and found.layout.options.state != "sharded-all"
    ]
    near = [found.candidate.plan for found in distinct(whole, SYNCED) if found.seconds < SYNC_GAIN * candidates.limit]
    best = [candidates.best.plan] if candidates.best is not None else []
    for start in chain(best, near, _side_by_side(candidates)):
        current: Plan | None = start
        while current is not None:
            current = _duplicated(candidates, current)


def _side_by_side(candidates: Candidates) -> Iterator[Plan]:
    """Yield the whole model on every device, for each set of devices in the fewest micro-batches that may fit."""
    seen = set[frozenset[str]]()
    for idea in data(candidates.problem, candidates.lanes.memory, Fix()) if could_duplicate(candidates.problem) else ():
        if candidates.search.spent():
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


def _duplicated(candidates: Candidates, start: Plan) -> Plan | None:
    """Return a plan with one more end of a stage duplicated, and its syncs chosen anew, if it is the best so far."""
    for plan in islice(with_duplicates(candidates.problem, start), DUPLICATED_ENDS):
        candidate = None if candidates.search.spent() else candidates.search.price(plan)
        candidates.search.tell("duplicates")
        near = candidate is not None and candidate.price.step_seconds < DUPLICATES_NEAR * candidates.limit
        if candidate is not None and near and candidates.keep(candidate):
            before = candidates.limit
            found = sync_anew(candidates, candidate)
            if found is not None and found.price.step_seconds <= before:
                return found.plan
    return None


def slice_stages(candidates: Candidates) -> None:
    """Let stages of the best plan run their shares in more slices, one stage at a time, as long as that gains.

    A slice's messages leave before the next one is computed; work on few samples is less efficient. Where there is one
    stage nothing is sent.
    """
    stage, since = 0, 0
    while candidates.best is not None and not candidates.search.spent():
        stages = len(only_pipeline(candidates.best.plan).stages)
        if stages < 2 or since == stages:
            return
        plan, before = more_slices(candidates.problem, candidates.best.plan, stage % stages), candidates.limit
        candidate = None if plan is None else candidates.search.price(plan)
        candidates.search.tell("slices")
        if candidate is not None and candidate.price.step_seconds < GAIN * before and candidates.keep(candidate):
            since = 0
        else:
            stage, since = stage + 1, since + 1
