"""The limits of a plan: its seconds by place, and changes that would help, found by trying them in the simulator.

The step is the chain of `cost.critical`; its legs are added up by place. What binds is the place with most seconds, or
memory, where a way to do the same that needs more of it would bring more than any one faster device or link. What would
help is told for this very plan: its cuts and shares stay, though on other machines a new plan may do better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from isthmus.cluster.spec import Cluster
from isthmus.cost.critical import critical_path
from isthmus.cost.simulate import Played, Price, Shortage
from isthmus.cost.timeline import LinkUse, timeline
from isthmus.errors import NoPlanError, NoPlanYetError
from isthmus.explain.group_talk import talk_of
from isthmus.explain.what_if import Alternative, Culprit, PricedPlan, ladders, with_more_memory
from isthmus.plan.types import Outcome
from isthmus.planners.portfolio import choose_plan
from isthmus.planners.problem import Problem
from isthmus.planners.schemes.all_schemes import SCHEMES
from isthmus.units import format_bytes, format_seconds

__all__ = ["Binding", "Explanation", "SchemeBinding", "TimePart", "WhatIf", "explain", "explain_schemes", "place_of"]

Listener = Callable[[str], None]  # what is being tried

_PLACES = 4  # at most, at which something is tried
_LEAST = 0.01  # of the step: what is worth trying, and worth telling
_MUCH = 0.25  # of a place's seconds: where a change saves that, no wider one is tried
_MORE = 1.5  # times what a narrower change saves: what a wider one must save to be told
_TOLD = 3  # places at most that say why a scheme is slow ...
_MOST = 0.6  # ... or fewer, that take so much of its step
_CARRIED = {
    "activation": "activations", "gradient": "activation gradients", "sync": "gradients", "load": "weights",
    "store": "spilled state", "totals": "counts", "gate": "requests for weights", "tensor": "parts of blocks",
}  # fmt: skip


class TimePart(NamedTuple):
    """Seconds of the step that one place takes in one way."""

    what: str  # cost.critical.What
    place: Culprit
    seconds: float
    kinds: Mapping[str, float]  # seconds by kind of task


class Binding(NamedTuple):
    """The limit of a plan. `sort`: memory, or the sort of a place."""

    sort: str
    name: str
    seconds: float  # of the step; for memory: what more of it would save
    text: str


class WhatIf(NamedTuple):
    """A change, and what a step of the same plan takes with it."""

    sort: str
    change: str
    step_seconds: float
    wide: bool = False  # more than one device or link is changed
    fits: bool = True  # memory: whether there is enough of it as it is


class Explanation(NamedTuple):
    """The whole explanation; `what_if` has the change that saves most first."""

    step_seconds: float
    parts: tuple[TimePart, ...]
    binding: Binding
    what_if: tuple[WhatIf, ...]


class SchemeBinding(NamedTuple):
    """A scheme's best plan and what binds that, or why it has none."""

    outcome: Outcome
    binding: Binding | None
    why: str  # what takes its time


def explain(given: PricedPlan, listen: Listener = lambda text: None) -> Explanation:
    """Explain what limits the step time of a plan, and what would help."""
    price, played = given.price(), given.simulator.play(given.plan)
    parts = _parts(given, played)
    tried = list(_machines(given, price, played, parts, listen)) if price.fits else []
    with_memory = list(_memory(given, price, listen)) if price.fits else []
    found = sorted([*tried, *(each for each, _ in with_memory)], key=lambda each: each.step_seconds)
    binding = _binding(parts, played, given.cluster, price)
    best, short = min(with_memory, key=lambda item: item[0].step_seconds, default=(None, ()))
    if best is not None and short and all(best.step_seconds <= each.step_seconds for each in tried if not each.wide):
        binding = _short_of(short, price.step_seconds - best.step_seconds, _way(price, best))
    return Explanation(price.step_seconds, parts, binding, tuple(found))


def explain_schemes(
    problem: Problem, budget: float | None, listen: Listener, names: Collection[str] = tuple(SCHEMES)
) -> dict[str, SchemeBinding]:
    """Explain what limits the best plan of every scheme, found anew within `budget` seconds each."""
    return {name: _scheme(problem, name, budget, listen) for name in names}


def _scheme(problem: Problem, name: str, budget: float | None, listen: Listener) -> SchemeBinding:
    listen(f"scheme {name}")
    try:
        choice = choose_plan(problem, planner=name, budget=budget, beside=False)
    except NoPlanYetError as error:
        return SchemeBinding(Outcome(state="unfinished", reason=error.what), None, "")
    except NoPlanError as error:
        return SchemeBinding(Outcome(state="cannot run", reason=error.what), None, "")
    if choice.interrupted:
        raise KeyboardInterrupt
    given = PricedPlan(choice.plan, problem.cluster, {problem.job.name: problem.graph}, problem.profile)
    played = problem.simulator.play(choice.plan)
    parts = _parts(given, played)
    binding = _binding(parts, played, problem.cluster, choice.price)
    return SchemeBinding(choice.outcomes[name], binding, _why(parts, choice.price.step_seconds))


def place_of(cluster: Cluster, where: str) -> Culprit:
    """Return the place of a leg of the chain: `where` is a device, a host, or a resource of the fabric."""
    if where in cluster.devices:
        return Culprit("device", (where,))
    if where in cluster.hosts:
        return Culprit("processor", (where,))
    a, _, b = where.removesuffix(" trunk").partition(" to ")
    if b and where.endswith(" trunk"):
        return Culprit("trunk", next(link.between for link in cluster.links if set(link.between) == {a, b}))
    if b:
        link = cluster.link(a, b)
        assert link is not None
        return Culprit("link", link.between)
    name, _, what = where.partition(" ")
    if what.startswith("nic"):
        return Culprit("nic", (name,))
    return Culprit("bus" if what.startswith("bus") else "inside", (cluster.devices[name].host,))


def _parts(given: PricedPlan, played: Played) -> tuple[TimePart, ...]:
    """Add up the chain by place, the largest part first.

    What tensor groups send while they compute counts as sending.
    """
    found: dict[tuple[str, Culprit], dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(what: str, place: Culprit, kind: str, seconds: float) -> None:
        found[what, place][kind] += seconds

    for leg in critical_path(played):
        add(leg.what, place_of(given.cluster, leg.where), leg.kind, leg.seconds)
    grouped = {played.fabric.devices[first] for first in played.groups}
    for (what, place), kinds in list(found.items()):
        if what == "computing" and place.names[0] in grouped and (talk := talk_of(given, place.names[0])):
            computed = sum(kinds.values())
            add("sending", talk.narrowest, "tensor", talk.sending * computed)
            add("latency", talk.longest, "tensor", talk.latency * computed)
            found[what, place] = {k: v * (1.0 - talk.sending - talk.latency) for k, v in kinds.items()}
    merged = _together(given.cluster, {key: sum(kinds.values()) for key, kinds in found.items()})
    for (what, place), kinds in list(found.items()):
        if place in merged:
            del found[what, place]
            for kind, seconds in kinds.items():
                add(what, merged[place], kind, seconds)
    parts = [TimePart(what, place, sum(kinds.values()), dict(kinds)) for (what, place), kinds in found.items()]
    return tuple(sorted((part for part in parts if part.seconds > 0.0), key=lambda part: -part.seconds))


def _together(cluster: Cluster, seconds: Mapping[tuple[str, Culprit], float]) -> dict[Culprit, Culprit]:
    """Join devices of one kind and region into one entry if none takes half of their seconds, as in a long pipeline."""
    classes: dict[tuple[str, str], dict[Culprit, float]] = defaultdict(lambda: defaultdict(float))
    for (_, place), spent in seconds.items():
        if place.sort == "device":
            device = cluster.devices[place.names[0]]
            classes[device.kind, cluster.hosts[device.host].region][place] += spent
    merged: dict[Culprit, Culprit] = {}
    for members in classes.values():
        if max(members.values()) < sum(members.values()) / 2:
            largest = sorted(members, key=lambda place: -members[place])
            merged |= dict.fromkeys(members, Culprit("device", tuple(place.names[0] for place in largest)))
    return merged


def _by_place(parts: Sequence[TimePart]) -> dict[Culprit, list[TimePart]]:
    """Group the parts by place, that with most seconds first."""
    found: dict[Culprit, list[TimePart]] = defaultdict(list)
    for part in parts:
        found[part.place].append(part)
    return dict(sorted(found.items(), key=lambda item: -_seconds(item[1])))


def _seconds(parts: Sequence[TimePart]) -> float:
    return sum(part.seconds for part in parts)


# What binds, in words.


def _binding(parts: Sequence[TimePart], played: Played, cluster: Cluster, price: Price) -> Binding:
    """Return what limits the step: memory that is missing, or the place with most seconds."""
    if price.shortages:
        return _short_of(price.shortages, 0.0, "the plan does not fit")
    places = _by_place(parts)
    if not places:
        return Binding("nothing", "nothing", 0.0, "no part of the step takes any time")
    place, own = next(iter(places.items()))
    total = _seconds(own)
    text = f"{place}: {_percent(total / price.step_seconds)} of the step ({_spent(own)}"
    used = _use(cluster, place, timeline(played).links)
    return Binding(place.sort, str(place), total, f"{text}; {format_bytes(used)} a step)" if used else f"{text})")


def _spent(parts: Sequence[TimePart]) -> str:
    """Say how long each thing takes: `1.2 s sending gradients, 300 ms latency`."""
    return ", ".join(f"{format_seconds(part.seconds)} {_doing(part)}" for part in parts)


def _doing(part: TimePart) -> str:
    kind = max(part.kinds, key=lambda name: part.kinds[name])
    return f"sending {_CARRIED.get(kind, kind)}" if part.what == "sending" else part.what


def _why(parts: Sequence[TimePart], step: float) -> str:
    """Name the places that take most of a step: `link a - b 61 % (sending gradients, latency), ...`."""
    told, words = 0.0, []
    for place, own in list(_by_place(parts).items())[:_TOLD]:
        doing = ", ".join(_doing(part) for part in own if part.seconds >= _LEAST * step)
        more = f" ({doing})" if place.sort != "device" else ""
        words.append(f"{place} {_percent(_seconds(own) / step)}{more}")
        told += _seconds(own)
        if told >= _MOST * step:
            break
    return ", ".join(words)


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _use(cluster: Cluster, place: Culprit, links: Sequence[LinkUse]) -> float:
    """Return the bytes a step that pass a place, both ways."""
    return sum(link.bytes for link in links if place_of(cluster, link.name) == place)


def _short_of(shortages: Sequence[Shortage], saves: float, why: str) -> Binding:
    """Return memory as what limits the step, at the device where most of it is missing."""
    worst = max(shortages, key=lambda short: short.needed - short.available)
    text = f"memory of {worst.where}: {format_bytes(worst.needed)} needed, {format_bytes(worst.available)} available"
    more = f" (and {len(shortages) - 1} more)" if len(shortages) > 1 else ""
    return Binding("memory", f"memory of {worst.where}", saves, f"{text}{more}; {why}")


def _way(price: Price, best: WhatIf) -> str:
    was, then = format_seconds(price.step_seconds), format_seconds(best.step_seconds)
    return f"with enough of it a step would take {then} instead of {was}"


# What would help.


def _machines(
    given: PricedPlan, price: Price, played: Played, parts: Sequence[TimePart], listen: Listener
) -> Iterator[WhatIf]:
    """Try faster devices and links at the places that take most of the step."""
    names, tried = played.fabric.devices, set[str]()
    groups = {names[first]: [names[d] for d in members] for first, members in played.groups.items()}
    for place, own in list(_by_place(parts).items())[:_PLACES]:
        total = _seconds(own)
        what = {part.what for part in own if part.seconds >= _LEAST * price.step_seconds}
        members = list(dict.fromkeys(each for name in place.names for each in groups.get(name, [name])))
        if total >= _LEAST * price.step_seconds:
            for ladder in ladders(given, place, what, members):
                yield from _climbed(place, ladder, price, total, tried, listen)


def _climbed(
    place: Culprit, ladder: Sequence[Alternative], price: Price, total: float, tried: set[str], listen: Listener
) -> Iterator[WhatIf]:
    """Yield the changes that save something, up to one that was tried; try wider ones only where narrower ones save
    little.
    """
    told = _LEAST * price.step_seconds / _MORE
    for change in ladder:
        if change.words in tried:
            return
        tried.add(change.words)
        listen(change.words)
        after = change.made().price()
        saved = price.step_seconds - after.step_seconds
        if after.fits and saved >= _MORE * told:
            told = saved
            yield WhatIf(place.sort, change.words, after.step_seconds, wide=change.wide)
        if saved >= _MUCH * total:
            return


def _memory(given: PricedPlan, price: Price, listen: Listener) -> Iterator[tuple[WhatIf, tuple[Shortage, ...]]]:
    """Yield ways to do the same that need more memory and are faster, with what they lack."""
    for words, other in with_more_memory(given):
        listen(words)
        after = other.price()
        if after.impossible or price.step_seconds - after.step_seconds < _LEAST * price.step_seconds:
            continue
        if after.fits:
            change = f"{words}: fits as it is, so another plan is faster than this"
        else:
            worst = max(after.shortages, key=lambda short: short.needed - short.available)
            more = f" and more on {len(after.shortages) - 1} others" if len(after.shortages) > 1 else ""
            change = f"{words}, with {format_bytes(worst.needed)} of memory on {worst.where}{more}"
        yield WhatIf("memory", change, after.step_seconds, fits=after.fits), after.shortages
