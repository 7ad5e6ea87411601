"""A cluster with the links that were measured, and notes on them.

If the pairs of two regions agree, they become one link between the regions, else links between hosts. What was not
measured stays as it was, and a note says so. One figure, the lower, stands for both directions of a link.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.cluster.write import cluster_yaml
from isthmus.deploy.probing.probe import Pair, PairFound, ProbeResult, SharedCapacity, host_pairs
from isthmus.units import BytesPerSecond, Seconds, format_bandwidth, format_seconds, parse_bandwidth, parse_seconds

__all__ = ["probed_cluster"]

_ALIKE = 0.1  # figures that differ by less than this fraction count as equal
_NEAR = 1e-4  # seconds; latencies that differ by less count as equal too: a late answer causes that much
_LISTED = 20  # pairs that a note lists


def probed_cluster(cluster: Cluster, found: ProbeResult) -> tuple[Cluster, list[str]]:
    """Return the cluster as it would be loaded from its file, and notes for the people who use it."""
    links = tuple(link for regions in _region_pairs(cluster) for link in _between_regions(cluster, found, regions))
    hosts = {name: _host(host, found) for name, host in cluster.hosts.items()}
    measured = parse_cluster(cluster_yaml(msgspec.structs.replace(cluster, hosts=hosts, links=links)))
    return measured, [*_notes(cluster, found), *_shared_notes(cluster, measured, found)]


def _region_pairs(cluster: Cluster) -> list[Pair]:
    """Return every pair of regions, also of one with itself; those with links come first, in their order."""
    place: dict[frozenset[str], int] = {}
    for index, link in enumerate(cluster.links):
        ends = (cluster.hosts[end].region if end in cluster.hosts else end for end in link.between)
        place.setdefault(frozenset(ends), index)
    pairs = combinations_with_replacement(cluster.regions, 2)
    return sorted(pairs, key=lambda pair: place.get(frozenset(pair), len(cluster.links)))


def _between_regions(cluster: Cluster, found: ProbeResult, regions: Pair) -> Iterator[Link]:
    """Yield the links of two regions, or of one region with itself.

    This is one link for all hosts if every pair was measured and they agree.
    """
    given = {frozenset(link.between): link for link in cluster.links}
    whole = given.get(frozenset(regions))
    pairs = _pairs(cluster, regions)
    measured = {pair: found.pairs[pair] for pair in pairs if pair in found.pairs}
    every = bool(pairs) and len(measured) == len(pairs)
    trunk = _trunk(whole, found.trunks.get(regions), measured)
    one = every and _agree(list(measured.values()))
    if every and (one or trunk is not None):
        middle = list(measured.values())
        yield _link(
            whole.between if whole else regions,
            statistics.median(each.lower for each in middle),
            statistics.median(each.latency for each in middle),
            trunk,
        )
    elif whole is not None and not every:
        yield msgspec.structs.replace(whole, trunk=trunk)
    if one:
        return
    for pair in pairs:
        if pair in measured:
            yield _link(pair, measured[pair].lower, measured[pair].latency)
        elif frozenset(pair) in given:
            yield given[frozenset(pair)]


def _pairs(cluster: Cluster, regions: Pair) -> list[Pair]:
    """Return every pair of hosts with one host in each region, in the cluster's order."""
    wanted = frozenset(regions)
    hosts = [name for name, host in cluster.hosts.items() if host.region in wanted]
    return [pair for pair in host_pairs(hosts) if {cluster.hosts[name].region for name in pair} == wanted]


def _agree(pairs: Sequence[PairFound]) -> bool:
    rates, latencies = [pair.lower for pair in pairs], [pair.latency for pair in pairs]
    near = max(latencies) - min(latencies) <= max(_NEAR, _ALIKE * min(latencies))
    return near and max(rates) <= (1 + _ALIKE) * min(rates)


def _link(between: Pair, bandwidth: float, latency: float, trunk: BytesPerSecond | None = None) -> Link:
    """Return a link with figures rounded to four digits, which is more than a measurement is worth."""
    return Link(
        between=between,
        bandwidth=_rate(bandwidth),
        latency=Seconds(parse_seconds(format_seconds(latency))),
        trunk=None if trunk is None else _rate(trunk),
    )


def _rate(value: float) -> BytesPerSecond:
    return parse_bandwidth(format_bandwidth(value))


def _trunk(
    link: Link | None, shared: SharedCapacity | None, measured: Mapping[Pair, PairFound]
) -> BytesPerSecond | None:
    """Return the trunk that was seen to hold flows back; else the file's, unless more than that came through."""
    if shared is not None and shared.holds:
        return _rate(shared.rate)
    if link is None or link.trunk is None:
        return None
    through = [shared.rate] if shared is not None else [pair.lower for pair in measured.values()]
    return link.trunk if max(through, default=0.0) <= (1 + _ALIKE) * link.trunk else None


def _host(host: Host, found: ProbeResult) -> Host:
    """Return the host with its measured NIC rate.

    This is the rate that was seen to hold flows back; else the file's, raised to what came through.
    """
    shared = found.nics.get(host.name)
    through = [pair.lower for names, pair in found.pairs.items() if host.name in names]
    through += [shared.rate] if shared is not None else []
    if shared is not None and shared.holds:
        nic = shared.rate
    elif "nic" not in host.imputed and max(through, default=0.0) > (1 + _ALIKE) * host.nic:
        nic = BytesPerSecond(max(through))
    else:
        return host
    down = host.down if host.down is msgspec.UNSET else max(host.down, _rate(nic))
    return msgspec.structs.replace(host, nic=_rate(nic), down=down, imputed=host.imputed - {"nic"})


def _notes(cluster: Cluster, found: ProbeResult) -> Iterator[str]:
    """Yield notes on what differs by direction, was unsteady, or was not measured and why."""
    for (a, b), pair in found.pairs.items():
        if max(pair.bandwidth) > (1 + _ALIKE) * pair.lower:
            there, back = map(format_bandwidth, pair.bandwidth)
            yield f"{a} to {b} reaches {there}, {b} to {a} {back}: the lower one is written"
    unsteady = [pair for pair, figures in found.pairs.items() if not figures.steady]
    if unsteady:
        yield f"the rate was not steady, measure longer (--seconds): {_listed(unsteady)}"
    others = [pair for pair in host_pairs(cluster.hosts) if pair not in found.pairs]
    kept = [pair for pair in others if cluster.link(*pair) is not None]
    if kept:
        yield f"not measured, kept as given: {_listed(kept)}"
    unlinked = [pair for pair in found.failed if cluster.link(*pair) is None]
    if unlinked:
        yield f"no link was given, and none was found between: {_listed(unlinked)}"
    for why, pairs in _reasons(found.failed).items():
        yield f"could not be measured ({why}): {_listed(pairs)}"


def _reasons(failed: Mapping[Pair, str]) -> dict[str, list[Pair]]:
    reasons: dict[str, list[Pair]] = {}
    for pair, why in failed.items():
        reasons.setdefault(why, []).append(pair)
    return reasons


def _listed(pairs: Sequence[Pair]) -> str:
    shown = ", ".join(" - ".join(pair) for pair in pairs[:_LISTED])
    return shown if len(pairs) <= _LISTED else f"{shown} and {len(pairs) - _LISTED} more"


def _shared_notes(cluster: Cluster, measured: Cluster, found: ProbeResult) -> Iterator[str]:
    """Yield notes on trunks and NICs: which were observed, and which stay as they were given."""
    seen = {frozenset(regions) for regions, shared in found.trunks.items() if shared.holds}
    trunks = {link.between: link.trunk for link in measured.links if link.trunk is not None}
    for (a, b), trunk in trunks.items():
        if frozenset((a, b)) in seen:
            yield f"trunk {a} - {b}: flows reach {format_bandwidth(trunk)} together"
    given = [link.between for link in cluster.links if link.trunk is not None]
    if kept := [pair for pair in given if pair in trunks and frozenset(pair) not in seen]:
        yield f"trunks that were not observed, kept as given: {_listed(kept)}"
    if dropped := [pair for pair in given if pair not in trunks]:
        yield f"trunks left out, because more than the given bandwidth came through: {_listed(dropped)}"
    held = [name for name, shared in found.nics.items() if shared.holds]
    if held:
        yield f"nics set to what flows reached together: {', '.join(held)}"
    stated = [name for name, host in measured.hosts.items() if "nic" not in host.imputed and name not in held]
    if raised := [name for name in stated if measured.hosts[name].nic != cluster.hosts[name].nic]:
        yield f"nics raised, because more than the given bandwidth came through: {', '.join(raised)}"
    if kept_nics := [name for name in stated if name not in raised]:
        yield f"nics that were not observed, kept as given: {', '.join(kept_nics)}"
