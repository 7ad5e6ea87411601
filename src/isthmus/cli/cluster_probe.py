"""The command `isthmus cluster probe CLUSTER`: runs on every host of a cluster, or in an emulation of it."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import socket
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from isthmus.cli.arguments import unknown
from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cluster.load import load_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cluster.write import cluster_yaml
from isthmus.deploy.probing.probe import (
    PairFound,
    ProbeResult,
    ProbeSettings,
    Round,
    expected_seconds,
    host_pairs,
    probe,
    rounds,
)
from isthmus.deploy.probing.probed_cluster import probed_cluster
from isthmus.deploy.probing.prober import LONGEST
from isthmus.deploy.probing.probers import Company, meeting, started, take_part
from isthmus.deploy.probing.sync_times import (
    SIZES,
    Collectives,
    Hosts,
    SyncMeasurement,
    collectives,
    measurements,
    usual_sets,
)
from isthmus.errors import FileError, RunError, UsageError
from isthmus.files import open_file, write_whole
from isthmus.model.load_profile import save_profile
from isthmus.model.profile import Profile
from isthmus.report.columns import columns, cut, excerpt
from isthmus.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["run"]

_SECRET = 16  # characters that a token must have at least
_PLACE = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\[\]:]+):(?P<port>[0-9]{1,5})")
_SHOWN = 60  # pairs that are listed for people


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Lead the probe or take part in it; the leader writes the file."""
    cluster = load_cluster(args.file)
    _check_usage(args, cluster)
    output: str = args.output or f"{Path(args.file).stem}.probed.yaml"
    if not args.emulate and args.host != next(iter(cluster.hosts)):
        return _join(args, cluster, progress)
    check_folder(output)
    check_folder(args.collectives)
    with ExitStack() as ends:
        company, remarks = (_emulated if args.emulate else _met)(args, cluster, progress, ends)
        found = _probe(args, cluster, company, progress)
        missing = [host for host in cluster.hosts if host not in company.addresses]
        answer = _answer(cluster, found, missing, remarks, output)
        if args.collectives is None:
            return answer
        progress.phase(f"The links are in {output}")  # and remain there, even if the all-reduces fail
        reduced = _collectives(args, cluster, found, company, progress)
    return _with_collectives(answer, cluster, reduced, remarks, args.collectives)


def _check_usage(args: argparse.Namespace, cluster: Cluster) -> None:
    where = args.parser.prog
    if args.emulate == (args.host is not None or args.meet is not None):
        expected = "--emulate, or --host NAME and --meet ADDRESS:PORT on every host"
        raise UsageError("the command does not say which hosts take part", where=where, expected=expected)
    if not args.emulate and (args.host is None or args.meet is None):
        raise UsageError(f"--{'meet' if args.host else 'host'} is missing", where=where, next=f"See {where} --help")
    if args.host is not None and args.host not in cluster.hosts:
        raise unknown("no host of the cluster is named", args.host, list(cluster.hosts), where)
    if not 0.1 <= args.seconds <= LONGEST:
        raise UsageError(
            "--seconds is out of range", where=where, found=f"{args.seconds:g}", expected=f"0.1 to {LONGEST:g}"
        )
    if len(cluster.hosts) < 2:
        raise UsageError("the cluster has one host, and no link to measure", where=args.file)
    if args.among and args.collectives is None:
        raise UsageError("--among selects all-reduces, but none are measured without --collectives", where=where,
                         next="Add --collectives PROFILE.json")  # fmt: skip
    _named_sets(args, cluster)


def _named_sets(args: argparse.Namespace, cluster: Cluster) -> list[Hosts]:
    """Return the sets of hosts that the user names."""
    found: dict[Hosts, None] = {}
    for text in args.among:
        hosts = tuple(name.strip() for name in text.split(","))
        for name in hosts:
            if name not in cluster.hosts:
                raise unknown("--among: no host of the cluster is named", name, list(cluster.hosts), args.parser.prog)
        if len(hosts) < 2:
            raise UsageError(
                "--among needs two participants",
                where=args.parser.prog,
                found=repr(text[:80]),
                expected="names of hosts, separated by commas; a host with two participants is named twice",
            )
        found[hosts] = None
    return list(found)


def _place(args: argparse.Namespace, cluster: Cluster) -> tuple[str, int]:
    match = _PLACE.fullmatch(args.meet)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise UsageError("--meet cannot be read", where=args.parser.prog, found=repr(args.meet[:80]),
                         expected="an address and a port, like 10.0.0.1:29400")  # fmt: skip
    host = match["host"].strip("[]")
    if _unspecified(host) and cluster.hosts[args.host].address is None:
        raise UsageError("--meet names no address that others could reach", where=args.parser.prog,
                         found=repr(args.meet[:80]), expected="an address of the first host of the cluster",
                         next=f"Or give {args.host} its address in {args.file}")  # fmt: skip
    return host, int(match["port"])


def _unspecified(host: str) -> bool:
    """Return whether a host stands for every address of a machine: `0.0.0.0`, `0`, `::`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):  # a name
        return False
    return ipaddress.ip_address(str(found[0][4][0]).partition("%")[0]).is_unspecified


def _token(args: argparse.Namespace) -> bytes:
    """Return the secret that all hosts share.

    It is never on the command line, where every user of the machine could see it.
    """
    remedy = "Make one, and give every host the same: openssl rand -hex 32 > token; --token-file token"
    if args.token_file is not None:
        try:
            with open_file(args.token_file) as file:
                token = file.read(4096).strip()
        except OSError as problem:
            raise FileError(f"cannot read the token: {problem.strerror}", where=args.token_file, next=remedy) from None
    else:
        token = os.environ.get("ISTHMUS_TOKEN", "").strip().encode()
    if len(token) < _SECRET:
        found = f"{len(token)} characters" if token else "none: neither --token-file nor ISTHMUS_TOKEN is given"
        raise UsageError("the probe needs a token, so that no stranger takes part", where=args.parser.prog, found=found,
                         expected=f"{_SECRET} characters or more", next=remedy)  # fmt: skip
    return token


def _own_address(cluster: Cluster, host: str) -> str | None:
    address = cluster.hosts[host].address
    return None if address is None else address.strip("[]")


def _join(args: argparse.Namespace, cluster: Cluster, progress: ProgressLine) -> Answer:
    """Take part until the leader ends the probe."""
    token, place = _token(args), _place(args, cluster)
    start = time.monotonic()
    progress.phase(f"{args.host} takes part in the probe that {next(iter(cluster.hosts))} leads at {args.meet}")
    take_part(place, token, args.host, _own_address(cluster, args.host), args.wait)
    values = {"file": None, "host": args.host, "pairs": [], "seconds": time.monotonic() - start}
    return Answer(values=values, text=f"{args.host} took part; {next(iter(cluster.hosts))} has the result")


def _met(
    args: argparse.Namespace, cluster: Cluster, progress: ProgressLine, ends: ExitStack
) -> tuple[Company, list[str]]:
    """Return the hosts that came to the meeting point."""
    token, place = _token(args), _place(args, cluster)
    progress.phase(f"Waiting at {args.meet} for {len(cluster.hosts) - 1} other hosts, {args.wait:g} s at most")
    me = (args.host, _own_address(cluster, args.host) or place[0])
    company = ends.enter_context(meeting(place, token, me, list(cluster.hosts), args.wait, progress.phase))
    if len(company.addresses) < 2:
        raise RunError(
            "no other host came",
            where=args.meet,
            next=f"Run the same command on each, with its name as --host, within {args.wait:g} s",
        )
    return company, []


def _emulated(
    args: argparse.Namespace, cluster: Cluster, progress: ProgressLine, ends: ExitStack
) -> tuple[Company, list[str]]:
    """Start a prober for each host of an emulated cluster."""
    from isthmus.emulate.world import World

    progress.phase(f"Starting {len(cluster.hosts)} hosts")
    world = ends.enter_context(World(cluster))
    company = ends.enter_context(started(list(cluster.hosts), world.command, world.address))
    if world.shaped:
        return company, ["measured in an emulated world on one machine"]
    return company, [f"only this machine's loopback was measured, not these links ({world.reason})"]


def _probe(args: argparse.Namespace, cluster: Cluster, company: Company, progress: ProgressLine) -> ProbeResult:
    settings = ProbeSettings(seconds=args.seconds, trunks=args.trunks, nics=args.nics)
    pairs = host_pairs([host for host in cluster.hosts if host in company.addresses])
    if args.emulate:  # the emulation has no links but those in the file
        pairs = [pair for pair in pairs if cluster.link(*pair) is not None]
    schedule = rounds(cluster, pairs, max(1, (os.cpu_count() or 1) // 2) if args.emulate else None)
    seconds = format_seconds(expected_seconds(cluster, schedule, settings))
    progress.phase(f"Measuring {len(pairs)} pairs of hosts in {len(schedule)} rounds, about {seconds}")

    def listen(what: str, done: int, total: int, pairs: Round) -> None:
        names = ", ".join(" - ".join(pair) for pair in pairs)
        progress.phase(cut(f"Measuring {what}, round {done + 1} of {total}: {names}", 110))

    found = probe(cluster, company, schedule, settings, listen)
    if not found.pairs:
        raise RunError(
            "no pair of hosts could be measured",
            found=next(iter(found.failed.values()), "no link between any two hosts"),
        )
    return found


def _collectives(
    args: argparse.Namespace, cluster: Cluster, found: ProbeResult, company: Company, progress: ProgressLine
) -> Collectives:
    """Measure all-reduces among the hosts that are here, with sizes that suit the links as measured."""
    measured, _ = probed_cluster(cluster, found)
    here = [host for host in cluster.hosts if host in company.addresses and host not in found.lost]
    named = [hosts for hosts in _named_sets(args, cluster) if set(hosts) <= set(here)]
    todo = measurements(measured, named if args.among else usual_sets(cluster, here))
    seconds = format_seconds(sum(one.seconds for one in todo))
    progress.phase(f"Measuring {sum(one.cannot is None for one in todo)} kinds of all-reduces, about {seconds}")

    def listen(one: SyncMeasurement, done: int, total: int) -> None:
        progress.phase(
            cut(f"Measuring all-reduces, {done + 1} of {total}: {one.how} among {', '.join(one.hosts)}", 110)
        )

    return collectives(measured, company, todo, listen, found.lost)


def _with_collectives(answer: Answer, cluster: Cluster, found: Collectives, remarks: list[str], file: str) -> Answer:
    """Return the answer with the all-reduces, and write them if there are any."""
    missed = {**found.skipped, **found.failed}
    notes = [f"not measured: {how} among {', '.join(hosts)} ({why})" for (how, hosts), why in missed.items()]
    if found.times:
        origin = "; ".join([f"isthmus cluster probe of {cluster.name}, {date.today().isoformat()}", *remarks])
        save_profile(Profile(origin=origin, collectives=found.times), file)
    text = [
        answer.text,
        "",
        f"{len(found.times)} all-reduces measured in {format_seconds(found.seconds)}, over Gloo in host memory",
        "",
        *(_reduced_table(found) if found.times else []),
        *notes,
        f"written to {file}; plan with it: isthmus plan ... --profile {file}" if found.times else "nothing was written",
    ]
    values = {**answer.values, "collectives": file if found.times else None, "notes": [*answer.values["notes"], *notes]}
    failures = [*([answer.failure] if answer.failure is not None else []), *_failures(found)]
    return Answer(values=values, text="\n".join(text), failure="; ".join(failures) or None)


def _failures(found: Collectives) -> list[str]:
    if not found.times:
        why = next(iter({**found.failed, **found.skipped}.values()), "none of these sets of hosts is here")
        return [f"no all-reduce could be measured: {why}"]
    return [f"some all-reduces were not measured: {why}" for why in list(found.failed.values())[:1]]


def _reduced_table(found: Collectives) -> list[str]:
    sizes = [size for size in SIZES if any(point.bytes == size for point in found.times)]
    times = {(point.how, point.hosts, point.bytes): point.seconds for point in found.times}
    rows = [["all-reduce", *map(format_bytes, sizes), "among"]]
    for how, hosts in dict.fromkeys((point.how, point.hosts) for point in found.times):
        cells = [format_seconds(times[how, hosts, size]) if (how, hosts, size) in times else "" for size in sizes]
        rows.append([how, *cells, ", ".join(hosts)])
    return excerpt("\n".join(columns(rows, right=range(1, 1 + len(sizes)))), _SHOWN, "the file lists them all")


def _answer(cluster: Cluster, found: ProbeResult, missing: list[str], remarks: list[str], output: str) -> Answer:
    measured, notes = probed_cluster(cluster, found)
    notes = [*remarks, *notes]
    head = f"Links measured by isthmus cluster probe, {date.today().isoformat()}: {len(found.pairs)} pairs of hosts"
    write_whole(output, cluster_yaml(measured, [f"{line}." for line in (head, *notes)]).encode())
    text = [
        f"{cluster.name}: {len(found.pairs)} pairs of hosts measured in {format_seconds(found.seconds)}",
        "",
        *_table(cluster, found),
        "",
        *notes,
        f"written to {output}; look at it: isthmus cluster show {output}",
    ]
    gone = [f"{host} was lost" for host in found.lost] + [f"{host} did not come" for host in missing]
    failure = f"not everything was measured: {', '.join(gone)}; the rest is in {output}" if gone else None
    return Answer(values=_values(cluster, found, notes, output), text="\n".join(text), failure=failure)


def _table(cluster: Cluster, found: ProbeResult) -> list[str]:
    rows = [["pair", "latency", "median", "there", "back", "the file says"]]
    for (a, b), pair in found.pairs.items():
        link = cluster.link(a, b)
        given = f"{format_bandwidth(link.bandwidth)}, {format_seconds(link.latency)}" if link is not None else "no link"
        times = map(format_seconds, (pair.latency, pair.latency_median))
        rows.append([f"{a} - {b}", *times, *map(format_bandwidth, pair.bandwidth), given])
    return excerpt("\n".join(columns(rows, right=range(1, 5))), _SHOWN, "--json lists them all")


def _values(cluster: Cluster, found: ProbeResult, notes: list[str], output: str) -> dict[str, Any]:
    others = [pair for pair in host_pairs(cluster.hosts) if pair not in found.pairs]
    return {
        "file": output,
        "collectives": None,
        "pairs": [_pair_values(a, b, pair) for (a, b), pair in found.pairs.items()],
        "not_measured": [{"a": a, "b": b, "why": found.failed.get((a, b), "not tried")} for a, b in others],
        "trunks": [
            {"between": list(regions), "bandwidth": shared.rate, "holds": shared.holds}
            for regions, shared in found.trunks.items()
        ],
        "nics": [
            {"host": host, "bandwidth": shared.rate, "holds": shared.holds} for host, shared in found.nics.items()
        ],
        "notes": notes,
        "seconds": found.seconds,
    }


def _pair_values(a: str, b: str, pair: PairFound) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "latency": pair.latency,
        "latency_median": pair.latency_median,
        "bandwidth": list(pair.bandwidth),
        "steady": pair.steady,
    }
