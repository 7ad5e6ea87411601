"""Finds groups of hosts that no link joins; a plan can use only one of these groups."""

from __future__ import annotations

from isthmus.cluster.spec import Cluster

__all__ = ["islands", "islands_note"]

_MOST = 4  # groups named in the note, and hosts named of each group


def islands(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the hosts with devices, grouped by which can reach each other over links, relays included.

    Groups and hosts are in the cluster's order.
    """
    root = {name: name for name in cluster.hosts}

    def top(name: str) -> str:
        while root[name] != name:
            root[name] = name = root[root[name]]
        return name

    inside: dict[str, list[str]] = {}
    for host in cluster.hosts.values():
        inside.setdefault(host.region, []).append(host.name)
    for link in cluster.links:
        ends = [name for end in dict.fromkeys(link.between) for name in inside.get(end, [end])]
        for name in ends[1:]:
            root[top(name)] = top(ends[0])
    groups: dict[str, list[str]] = {}
    for host in cluster.hosts.values():
        if host.devices:
            groups.setdefault(top(host.name), []).append(host.name)
    return tuple(map(tuple, groups.values()))


def islands_note(cluster: Cluster) -> str | None:
    """Return a note that says which hosts cannot talk to which, or None if all can."""
    groups = islands(cluster)
    if len(groups) < 2:
        return None
    shown = [_named(group) for group in groups[:_MOST]]
    rest = [f"{len(groups) - _MOST} more"] if len(groups) > _MOST else []
    return (
        f"no link joins {' | '.join(shown + rest)}: a plan uses only one of these {len(groups)} groups of hosts. "
        "Add links to the cluster file to use more"
    )


def _named(group: tuple[str, ...]) -> str:
    more = f" and {len(group) - _MOST} more" if len(group) > _MOST else ""
    return ", ".join(group[:_MOST]) + more
