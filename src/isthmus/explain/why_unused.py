"""The devices that a plan does not use, and why, as far as that is known without another search."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, NamedTuple

from isthmus.cluster.spec import Cluster
from isthmus.planners.problem import Problem

__all__ = ["Idle", "Reason", "idle_devices", "idle_note", "why_left_out"]

Reason = Literal["precision", "place", "link", "memory", "slower"]

_NAMED = 2  # hosts and classes that are written out


class Idle(NamedTuple):
    """Unused devices on hosts of one shape that stay out for one reason."""

    reason: Reason
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    kinds: Mapping[str, int]

    def __str__(self) -> str:
        """Describe the devices: `4 V100-16GB and 2 lab-card of va2`."""
        counts = " and ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        rest = len(self.hosts) - _NAMED
        more = f" and {rest} more host{'s' * (rest > 1)}" if rest > 0 else ""
        return f"{counts} of {', '.join(self.hosts[:_NAMED])}{more}"

    @property
    def them(self) -> str:
        """Return the pronoun by which a sentence names the devices again."""
        return "it" if len(self.devices) == 1 else "them"


def idle_devices(problem: Problem, used: Collection[str]) -> tuple[Idle, ...]:
    """Return the devices that are not among `used`, by shape of their host and by reason, in the order of the file.

    `slower` is what remains: the device could take part, and no faster plan with it was found. Trials may find that it
    has too little `memory`.
    """
    cluster, groups = problem.cluster, dict[tuple[object, Reason], list[str]]()
    able, taken = set(problem.usable), set(used)
    near = _connected(cluster, {cluster.devices[name].host for name in taken})
    for name, device in cluster.devices.items():
        if name not in taken:
            reason: Reason = "slower"
            if name not in able:
                reason = "precision"
            elif device.host not in near:
                reason = "link"
            elif not problem.allowed(name).any():
                reason = "place"
            groups.setdefault((cluster.hosts[device.host].shape, reason), []).append(name)
    return tuple(_idle(cluster, reason, names) for (_, reason), names in groups.items())


def _idle(cluster: Cluster, reason: Reason, names: list[str]) -> Idle:
    devices = [cluster.devices[name] for name in names]
    hosts = tuple(dict.fromkeys(device.host for device in devices))
    return Idle(reason, hosts, tuple(names), dict(Counter(device.kind for device in devices)))


def _connected(cluster: Cluster, hosts: set[str]) -> set[str]:
    """Return the hosts that messages from any of `hosts` can reach, over others where two have no link.

    Links name hosts or regions, and a region's link joins all of its hosts: so names are joined, not pairs of hosts.
    """
    ends, members = defaultdict[str, set[str]](set), defaultdict[str, list[str]](list)
    for link in cluster.links:
        for a, b in (link.between, link.between[::-1]):
            ends[a].add(b)
    for host in cluster.hosts.values():
        for name in {host.name, host.region}:
            members[name].append(host.name)
    found, done, open_ = set(hosts), set[str](), list(hosts)
    while open_:
        host_name = open_.pop()
        for name in {host_name, cluster.hosts[host_name].region} - done:
            done.add(name)
            new = {member for end in ends[name] for member in members[end]} - found
            found |= new
            open_ += new
    return found


def idle_note(problem: Problem, used: Collection[str]) -> Iterator[str]:
    """Yield a line about all unused devices, if some could take part; those that cannot have notes of their own."""
    idle = idle_devices(problem, used)
    count = sum(len(each.devices) for each in idle)
    hosts = list(dict.fromkeys(name for each in idle for name in each.hosts))
    if any(each.reason == "slower" for each in idle):
        are = "is" if count == 1 else "are"
        more = f" and {len(hosts) - _NAMED} more host{'s' * (len(hosts) > _NAMED + 1)}" if len(hosts) > _NAMED else ""
        named = (" and " if len(hosts) == _NAMED else ", ").join(hosts[:_NAMED])
        said = f"{count} of {len(problem.cluster.devices)} devices {are} not used (on {named}{more})"
        yield f"{said}; `isthmus explain` says why"


def why_left_out(problem: Problem, kind: str) -> str:
    """Say why a kind of device does not take part: `has no bf16`, `computes slower in fp16 than in fp32`."""
    if problem.precision not in problem.cluster.kinds[kind].compute:
        return f"has no {problem.precision}"
    return f"computes slower in {problem.precision} than in fp32"
