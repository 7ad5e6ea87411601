"""Other machines for the same plan, and more memory for it: what each would bring is found by playing it.

A change is a cluster with one thing changed (and the plan's device names, and measured times, where a device changes
its kind). Changes come in ladders, the narrowest first: twice the speed of one device brings nothing where equal ones
wait for each other, and then all of its kind are tried, and then all devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from isthmus.cluster.spec import Cluster, DeviceKind, Host, Link
from isthmus.cost.simulate import Price, Simulator
from isthmus.errors import PlanError
from isthmus.model.graph import BlockGraph
from isthmus.model.profile import BlockTime, DeviceCosts, Profile
from isthmus.plan.types import Pipeline, Plan, Pool, Stage
from isthmus.plan.validate import check
from isthmus.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, format_bandwidth, format_seconds

__all__ = ["Alternative", "Culprit", "PricedPlan", "ladders", "swapped", "with_more_memory"]

Sort = Literal["device", "processor", "link", "trunk", "nic", "bus", "inside"]


class Culprit(NamedTuple):
    """A part of a cluster that can hold a step up: a device, or what one line of the cluster file gives.

    `names`: the devices (several where equal ones take turns), the host, or the two ends of the link.
    """

    sort: Sort
    names: tuple[str, ...]

    def __str__(self) -> str:
        """Return the place in words."""
        if self.sort == "device":
            return self.names[0] + (f" and {len(self.names) - 1} more like it" if len(self.names) > 1 else "")
        ends = " - ".join(self.names)
        if self.sort == "link" and len(set(self.names)) == 1:
            return f"links in {self.names[0]}"
        words = {"processor": "processor of ", "nic": "nic of ", "bus": "bus of "}
        return {"inside": "links inside ", **words}.get(self.sort, f"{self.sort} ") + ends


class PricedPlan(NamedTuple):
    """A plan and all that its price depends on."""

    plan: Plan
    cluster: Cluster
    models: Mapping[str, BlockGraph]
    profile: Profile | None

    @property
    def simulator(self) -> Simulator:
        """Return a simulator for this cluster."""
        return Simulator(self.cluster, self.models, profile=self.profile)

    def price(self) -> Price:
        """Return the price of the plan on this cluster."""
        return self.simulator.price(self.plan)


class Alternative(NamedTuple):
    """A change in words, and how to make it."""

    words: str
    made: Callable[[], PricedPlan]
    wide: bool = False  # whether it is more than what is at one place


def ladders(
    given: PricedPlan, place: Culprit, what: Collection[str], members: Sequence[str]
) -> Iterator[list[Alternative]]:
    """Yield what may help where the step does `what`; `members`: its devices and all that act as one with them."""
    if place.sort == "device":
        yield _faster_devices(given, place, members)
        yield _fastest_kind(given, place, members)
    elif place.sort == "link":
        yield from _links(given, place, what)
    elif place.sort == "trunk":
        yield [_trunk(given, place)]
    else:
        yield _host_field(given, place)


# Devices.


def _faster_devices(given: PricedPlan, place: Culprit, members: Sequence[str]) -> list[Alternative]:
    """Try those devices twice as fast, then all of their kind, then all; where these are the same, use the narrower
    words.
    """
    kind = given.cluster.devices[members[0]].kind
    alike = [name for name, each in given.cluster.devices.items() if each.kind == kind]
    others = " with all that act as one" if len(members) > len(place.names) else ""
    rungs = {
        f"{place}{others} twice as fast": members,
        f"every {kind} twice as fast": alike,
        "every device twice as fast": list(given.cluster.devices),
    }
    sizes = [len(devices) for devices in rungs.values()]
    wider = [index == 0 or sizes[index - 1] < size for index, size in enumerate(sizes)]
    return [
        Alternative(words, partial(_twice, given, devices), devices is not members)
        for (words, devices), new in zip(rungs.items(), wider, strict=True)
        if new
    ]


def _twice(given: PricedPlan, devices: Collection[str]) -> PricedPlan:
    """Let those devices compute, and use their memory, twice as fast; the size of their memory stays as it is."""
    for name in dict.fromkeys(given.cluster.devices[device].kind for device in devices):
        kind = given.cluster.kinds[name]
        faster = replace(
            kind,
            name=f"{name}-x2",
            compute={precision: FlopsPerSecond(2 * rate) for precision, rate in kind.compute.items()},
            memory=Bytes(math.inf),
            memory_bandwidth=BytesPerSecond(2 * kind.memory_bandwidth),
        )
        members = [device for device in devices if given.cluster.devices[device].kind == name]
        renamed, names = swapped(given._replace(profile=_sped_up(given.profile, name, faster.name)), members, faster)
        devices = [names[device] for device in devices]
        given = renamed
    return given


def _sped_up(profile: Profile | None, kind: str, faster: str) -> Profile | None:
    """Add the measured times of a kind as times of one that is twice as fast; Python and sending stay as they are."""
    if profile is None:
        return None

    def block(time: BlockTime) -> BlockTime:
        return replace(
            time, device=faster, forward_seconds=time.forward_seconds / 2, backward_seconds=time.backward_seconds / 2
        )

    def costs(known: DeviceCosts) -> DeviceCosts:
        rate = known.update_bandwidth
        return replace(known, device=faster, update_bandwidth=None if rate is None else 2 * rate)

    blocks = tuple(block(time) for time in profile.blocks if time.device == kind)
    devices = tuple(costs(known) for known in profile.devices if known.device == kind)
    return replace(profile, blocks=profile.blocks + blocks, devices=profile.devices + devices)


def _fastest_kind(given: PricedPlan, place: Culprit, members: Sequence[str]) -> list[Alternative]:
    """Try the cluster's fastest kind in place of theirs, if that is another."""
    device, own = members[0], given.cluster.devices[members[0]].kind
    job = next(job for job in _jobs(given.plan) if device in job[0])
    table = given.simulator.table(job[1], job[2], job[3])
    able = [name for name, kind in given.cluster.kinds.items() if kind.computes_in(job[2], job[3]) is not None]
    seconds = {name: float(table.work(name, 1).sum()) for name in able}
    best = min(able, key=lambda name: seconds[name])
    if seconds[best] >= seconds[own]:
        return []
    words = f"{best} instead of {device}" if len(members) == 1 else f"{len(members)} {best} instead of {own}, {place}"
    return [Alternative(words, lambda: swapped(given, members, given.cluster.kinds[best])[0])]


def _jobs(plan: Plan) -> Iterator[tuple[set[str], str, Any, bool]]:
    """Return devices, name, precision and `mixed` of each job."""
    for part in plan.parts:
        if isinstance(part, Pool):
            yield from ((set(part.devices), job.job.name, job.precision, job.job.mixed) for job in part.jobs)
        else:
            devices = {device for stage in part.stages for replica in stage.replicas for device in replica.devices}
            roots = {sync.root for sync in part.syncs if sync.root}
            yield devices | roots, part.job.name, part.precision, part.job.mixed


def swapped(given: PricedPlan, devices: Collection[str], kind: DeviceKind) -> tuple[PricedPlan, dict[str, str]]:
    """Make those devices ones of another kind; return the new name of every device too, as the index counts within a
    kind.
    """
    cluster, names = given.cluster, dict[str, str]()
    hosts = {name: Counter[str]() for name in cluster.hosts}
    for name, device in cluster.devices.items():
        if name not in devices:
            names[name] = f"{device.host}/{device.kind}/{hosts[device.host][device.kind]}"
            hosts[device.host][device.kind] += 1
    for name in devices:
        host = cluster.devices[name].host
        names[name] = f"{host}/{kind.name}/{hosts[host][kind.name]}"
        hosts[host][kind.name] += 1
    changed = replace(
        cluster,
        kinds={**cluster.kinds, kind.name: kind},
        hosts={name: replace(host, devices=dict(hosts[name])) for name, host in cluster.hosts.items()},
    )
    return given._replace(cluster=changed, plan=_renamed(given.plan, names)), names


def _renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    def all_of(devices: Sequence[str]) -> tuple[str, ...]:
        return tuple(names[device] for device in devices)

    def stage(old: Stage) -> Stage:
        return replace(old, replicas=tuple(replace(each, devices=all_of(each.devices)) for each in old.replicas))

    def part(old: Pipeline | Pool) -> Pipeline | Pool:
        if isinstance(old, Pool):
            return replace(old, devices=all_of(old.devices))
        syncs = tuple(
            replace(sync, participants=all_of(sync.participants), root=sync.root and names[sync.root])
            for sync in old.syncs
        )
        return replace(old, stages=tuple(map(stage, old.stages)), syncs=syncs)

    return replace(plan, parts=tuple(map(part, plan.parts)))


# Links and hosts.


def _links(given: PricedPlan, place: Culprit, what: Collection[str]) -> Iterator[list[Alternative]]:
    link = next(link for link in given.cluster.links if link.between == place.names)
    if "sending" in what:
        rate = BytesPerSecond(2 * link.bandwidth)
        words = f"{place} at {format_bandwidth(rate)} instead of {format_bandwidth(link.bandwidth)}"
        wide = f"{place} and the nics there twice as fast"
        yield [
            Alternative(words, lambda: _with_link(given, link, bandwidth=rate)),
            Alternative(wide, lambda: _with_nics(_with_link(given, link, bandwidth=rate), place.names), wide=True),
        ]
    if "latency" in what:
        wait = Seconds(link.latency / 2)
        words = f"{place} at {format_seconds(wait)} instead of {format_seconds(link.latency)} one way"
        yield [Alternative(words, lambda: _with_link(given, link, latency=wait))]


def _trunk(given: PricedPlan, place: Culprit) -> Alternative:
    link = next(link for link in given.cluster.links if link.between == place.names)
    trunk = BytesPerSecond(link.trunk or 0.0)
    words = f"{place} at {format_bandwidth(2 * trunk)} instead of {format_bandwidth(trunk)}"
    return Alternative(words, lambda: _with_link(given, link, trunk=BytesPerSecond(2 * trunk)))


def _with_link(given: PricedPlan, link: Link, **fields: Any) -> PricedPlan:
    """Replace one link; nics that nobody gave still have as much as their links (as in `cluster.load`)."""
    new = replace(link, **fields)

    def host(old: Host) -> Host:
        filled = "nic" in old.imputed and (old.name in link.between or old.region in link.between)
        return replace(old, nic=max(old.nic, new.bandwidth)) if filled else old

    links = tuple(new if each is link else each for each in given.cluster.links)
    hosts = {name: host(each) for name, each in given.cluster.hosts.items()}
    return given._replace(cluster=replace(given.cluster, links=links, hosts=hosts))


def _with_nics(given: PricedPlan, names: Collection[str]) -> PricedPlan:
    return _with_hosts(given, "nic", [h.name for h in given.cluster.hosts.values() if {h.name, h.region} & {*names}])


_FIELDS = {"nic": "nic", "bus": "bus", "inside": "bandwidth", "processor": "cores"}


def _host_field(given: PricedPlan, place: Culprit) -> list[Alternative]:
    """Try twice of what a host has, and of what every host has."""
    field, (name,) = _FIELDS[place.sort], place.names
    value = getattr(given.cluster.hosts[name], field)
    old, new = (f"{v} cores" if field == "cores" else format_bandwidth(v) for v in (value, 2 * value))
    every = str(place).replace(name, "every host")
    return [
        Alternative(f"{place} at {new} instead of {old}", lambda: _with_hosts(given, field, [name])),
        Alternative(
            f"{every} at twice as much", lambda: _with_hosts(given, field, list(given.cluster.hosts)), wide=True
        ),
    ]


def _with_hosts(given: PricedPlan, field: str, names: Collection[str]) -> PricedPlan:
    def doubled(host: Host) -> Host:
        down = {"down": BytesPerSecond(2 * host.nic_in)} if field == "nic" and host.nic_in != host.nic else {}
        return replace(host, **{field: 2 * getattr(host, field)}, **down)

    hosts = {name: doubled(host) if name in names else host for name, host in given.cluster.hosts.items()}
    return given._replace(cluster=replace(given.cluster, hosts=hosts))


# Memory.


def with_more_memory(given: PricedPlan) -> Iterator[tuple[str, PricedPlan]]:
    """Yield ways to do the same that need more memory, each with how it is done,
    where the rules of plans allow them.
    """
    for words, way in _WAYS.items():
        parts = tuple(part if isinstance(part, Pool) else way(part) for part in given.plan.parts)
        other = given._replace(plan=replace(given.plan, parts=parts))
        if other.plan == given.plan:
            continue
        try:
            check(other.plan, given.cluster, given.models)
        except PlanError:
            continue
        yield words, other


def _resident(part: Pipeline) -> Pipeline:
    return replace(part, stages=tuple(replace(stage, spill="none") for stage in part.stages))


def _kept(part: Pipeline) -> Pipeline:
    return replace(part, stages=tuple(replace(stage, recompute=False) for stage in part.stages))


def _whole(part: Pipeline) -> Pipeline:
    return replace(part, stages=tuple(replace(stage, state="replicated") for stage in part.stages))


def _ahead(part: Pipeline) -> Pipeline:
    depth = len(part.stages)
    more = part.schedule == "1f1b" and depth > 1 and part.ahead + depth < part.micro_batches
    return replace(part, ahead=part.ahead + depth) if more else part


def _larger(part: Pipeline) -> Pipeline:
    if part.micro_batches % 2:
        return part
    stages = tuple(
        replace(stage, replicas=tuple(replace(each, share=2 * each.share) for each in stage.replicas))
        for stage in part.stages
    )
    return replace(part, stages=stages, micro_batches=part.micro_batches // 2)


_WAYS: dict[str, Callable[[Pipeline], Pipeline]] = {
    "nothing computed again": _kept,
    "nothing spilled": _resident,
    "state not sharded": _whole,
    "half as many micro-batches, twice as large": _larger,
    "more micro-batches in flight": _ahead,
}
