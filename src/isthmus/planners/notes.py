"""Notes for the user on a plan that was found, or on why there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.cluster.islands import islands_note
from isthmus.cluster.spec import Cluster
from isthmus.cost.timeline import LinkUse, Timeline
from isthmus.errors import NoPlanError, NoPlanYetError
from isthmus.explain.why_unused import idle_note, why_left_out
from isthmus.model.graph import BlockGraph
from isthmus.plan.types import Pipeline, Plan
from isthmus.planners.layout.build_plan import ONE_BUCKET
from isthmus.planners.problem import Candidate, Problem
from isthmus.planners.schemes.fix import Fix
from isthmus.planners.schemes.grid import cannot_have
from isthmus.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["assumed", "missing_bytes", "notes_on", "nothing_fits", "unfinished_note", "unreached", "why_not"]

_NAMED = 8  # parameters that a note names


_NEEDS = {
    "tensor": "blocks that can be split, and two or more equal devices with links between them",
    "fsdp": "two or more devices with links between them",
    "region": "two or more regions",
}  # what a scheme cannot do without


def notes_on(
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    *,
    spent: bool,
    crowded: int,
    usual: bool = False,
    interrupted: bool = False,
) -> tuple[str, ...]:
    """Return notes on what the plan rests on.

    `spent`: the budget, or somebody, ended the search; `usual`: nobody gave a budget; `crowded`: size of a ring that
    was passed over.
    """
    notes = [f"{kind} is left out: it {why_left_out(problem, kind)}" for kind in problem.left_out]
    notes.extend(note for note in (islands_note(problem.cluster),) if note is not None)
    if problem.job.precision is None:
        notes.append(
            f"precision {problem.precision}: the fastest that every kind of device offers, as the job names none"
        )
    notes.extend(assumed(problem.cluster, timeline))
    notes.extend(idle_note(problem, {use.name for use in timeline.devices}))
    notes.extend(_mixed(problem))
    notes.extend(unreached(problem.graph))
    notes.extend(
        f"{' and '.join(via.between)} have no link: their messages go over {', '.join(via.hosts)}" for via in plan.via
    )
    notes.extend(_crowded(plan, crowded))
    if interrupted:
        notes.append("interrupted: this is the best plan so far")
    elif spent and not usual:
        notes.append("the budget ended the search: this is the best plan so far")
    elif spent:
        notes.append("the search stopped at its default effort; a --budget in seconds may find a faster plan")
    return tuple(notes)


def assumed(cluster: Cluster, timeline: Timeline) -> Iterator[str]:
    """Yield a note where the step time rests on a figure of the busiest link that nobody gave."""
    busiest = max(timeline.links, key=lambda link: link.load, default=None)
    if busiest is not None and (guess := _guess(cluster, busiest)):
        yield f"{busiest.name} is the busiest link; its {guess} is assumed, not given"


def _crowded(plan: Plan, passed_over: int) -> Iterator[str]:
    """Yield notes on where the search was cut short because rings of n devices have 2 n^2 messages."""
    rings = [len(sync.participants) for part in plan.parts if isinstance(part, Pipeline) for sync in part.syncs]
    largest = max(rings, default=0)
    if largest > ONE_BUCKET:
        yield f"gradients of {largest} devices were tried in one bucket only: more would take too long to simulate"
    if passed_over:
        yield f"some rings of {passed_over} devices were passed over: their messages would take too long to simulate"


def _guess(cluster: Cluster, used: LinkUse) -> str:
    """Return the value of a resource that was imputed, as text; empty where it was given."""
    name = used.name.removesuffix(" in").removesuffix(" out")
    host, _, what = name.partition(" ")
    if what == "nic":
        return f"nic of {format_bandwidth(used.capacity)}" if "nic" in cluster.hosts[host].imputed else ""
    if name in cluster.devices:
        return f"bandwidth of {format_bandwidth(used.capacity)}" * ("bandwidth" in cluster.host_of(name).imputed)
    if host in cluster.devices and what == "bus":
        return f"bus of {format_bandwidth(used.capacity)}" if "bus" in cluster.host_of(host).imputed else ""
    a, _, b = name.partition(" to ")
    link = cluster.link(a, b) if a in cluster.hosts and b in cluster.hosts else None
    return f"latency of {format_seconds(link.latency)}" if link is not None and "latency" in link.imputed else ""


def _mixed(problem: Problem) -> Iterator[str]:
    """Yield notes on what may mix samples: it keeps the batch whole, or the user answers for it."""
    unproven = dict.fromkeys(operation for block in problem.graph.blocks for operation in block.unproven)
    if not unproven:
        return
    first = f"{next(iter(unproven))}{f' and {len(unproven) - 1} more' if len(unproven) > 1 else ''}"
    if problem.job.trust_independent_samples:
        yield f"the batch is split although samples may influence each other, because the job says so: {first}"
    else:
        yield f"the batch stays whole in one replica, because samples may influence each other: {first}"
        yield "if they do not, --trust-independent-samples lets plans split the batch; if they do, results would change"


def unreached(graph: BlockGraph) -> Iterator[str]:
    """Name the parameters that are not trained although the model does not say so."""
    if names := graph.unreached:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield f"no loss can reach these parameters, so that they are not trained: {', '.join(names[:_NAMED])}{more}"


def why_not(problem: Problem, scheme: str, wrong: str, *, ideas: bool) -> str:
    """Say why a scheme that was searched to its end has no plan; `wrong`: what is wrong with a plan that would fit."""
    if not ideas and problem.places:
        return "none of its layouts keeps the places that the job gives"
    if not ideas:
        return f"it needs {_NEEDS.get(scheme, 'devices that can talk')}"
    return wrong or "none of its layouts fits in memory"


def unfinished_note(names: Sequence[str], *, usual: bool, interrupted: bool) -> str:
    """Say how many schemes were not searched to their end, and what to do; the table names them."""
    more = "; a --budget in seconds searches longer" if usual else "; a larger --budget or --calls searches longer"
    which = f"the scheme {names[0]} was" if len(names) == 1 else f"{len(names)} schemes were"
    said = f"{which} not searched to the end"
    return said if interrupted else said + more


def missing_bytes(candidate: Candidate) -> float:
    """Return the bytes that are missing over all devices and hosts."""
    return sum(shortage.needed - shortage.available for shortage in candidate.price.shortages)


def nothing_fits(
    problem: Problem, wanted: Sequence[str], fix: Fix | None, nearest: Candidate | None, *, spent: bool
) -> NoPlanError:
    """Return the error that says why there is no plan: what is missing where in the plan that comes closest or, without
    one, what was asked.
    """
    where = f"{problem.job.name} on cluster {problem.cluster.name}"
    if nearest is not None:
        return _too_large(problem, wanted, fix, nearest, where, spent=spent)
    if spent:
        return NoPlanYetError("no layout was priced", where=where, next="Give a larger --budget or --calls")
    if fix is not None:
        return cannot_have(problem, fix)
    if problem.places:
        return NoPlanError(
            f"{_schemes(wanted)} keeps the places that the job gives",
            where=where,
            found="; ".join(f"{pattern!r} in {target}" for pattern, target, _ in problem.places),
            expected="places that a run of blocks in the model's order can keep, on devices that can talk",
            next="Leave out a place, or give a larger one: a region instead of a host",
        )
    needs = _NEEDS.get(wanted[0]) if len(wanted) == 1 else None
    return NoPlanError(
        f"{_schemes(wanted)} can run",
        where=where,
        found=f"{len(problem.usable)} devices",
        expected=needs or "devices that can talk",
        next="Choose another --planner, or leave it out" if needs else "Add links to the cluster file",
    )


def _schemes(wanted: Sequence[str]) -> str:
    return "none of the usual schemes" if len(wanted) > 1 else f"no plan of the scheme {wanted[0]}"


def _too_large(
    problem: Problem, wanted: Sequence[str], fix: Fix | None, nearest: Candidate, where: str, *, spent: bool
) -> NoPlanError:
    shortages = sorted(nearest.price.shortages, key=lambda s: s.available - s.needed)
    parts = [
        f"{s.where} needs {format_bytes(s.needed)}, has {format_bytes(s.available)}: "
        f"{format_bytes(s.needed - s.available)} missing"
        for s in shortages[:4]
    ]
    more = f"; and {len(shortages) - 4} more devices" if len(shortages) > 4 else ""
    pinned = f" with --fix {fix}" if fix is not None else ""
    missing = f"the plan that comes closest is {format_bytes(missing_bytes(nearest))} short"
    remedy = "Leave out --fix, or one of its degrees" if fix else "Add devices or memory, or lower batch or sequence"
    error, limit = (NoPlanYetError, " of those tried before the budget ended") if spent else (NoPlanError, "")
    return error(
        f"{_schemes(wanted)}{pinned} fits in memory{limit}; {missing}",
        where=where,
        found="; ".join(parts) + more,
        expected=f"room for {problem.graph.elements:,} parameters and their activations",
        next=f"Give a larger --budget or --calls. {remedy}" if spent else remedy,
    )
