"""Small clusters, and what their emulated hosts say to each other (`talk.py` runs there); the benchmark uses it too."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isthmus.cluster.load import parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.emulate.world import World

TALK = Path(__file__).with_name("talk.py")


def cluster(hosts: dict[str, str], links: Iterable[str], nics: dict[str, str] | None = None) -> Cluster:
    """Hosts with their regions; links like `east west, bandwidth: 1 Gbit/s, latency: 5 ms`."""
    rows = [
        f"  {name}: {{region: {region}, devices: {{T4: 1}}, nic: {(nics or {}).get(name, '100 Gbit/s')}}}"
        for name, region in hosts.items()
    ]
    ends = [(link.partition(",")[0].split(), link.partition(",")[2]) for link in links]
    lines = [f"  - {{between: [{a}, {b}], {rest}}}" for (a, b), rest in ends]
    return parse_cluster("\n".join(["kind: cluster", "version: 1", "name: small", "hosts:", *rows, "links:", *lines]))


def start(world: World, host: str, *words: object) -> subprocess.Popen[str]:
    """One side of a talk; returns when it listens, if it is one that does."""
    argv = [sys.executable, "-I", "-S", str(TALK), *map(str, words)]
    process = subprocess.Popen(world.command(host, argv), stdout=subprocess.PIPE, text=True)
    if words[0] in ("echo", "sink"):
        assert process.stdout is not None and process.stdout.readline() == "listening\n"
    return process


def said(process: subprocess.Popen[str]) -> Any:
    """What it found, when it has ended."""
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out)


def round_trips(world: World, a: str, b: str, count: int = 20) -> list[float]:
    """Seconds, from the shortest to the longest; lost ones are left out."""
    return all_round_trips(world, [(a, b, count)])[0]


def all_round_trips(world: World, pairs: Iterable[tuple[str, str, int]]) -> list[list[float]]:
    """Those of several pairs at once."""
    talks = [(start(world, b, "echo", world.address(b), 7000), a, b, count) for a, b, count in pairs]
    pings = [start(world, a, "ping", world.address(b), 7000, count) for _, a, b, count in talks]
    try:
        return [sorted(said(ping)) for ping in pings]
    finally:
        for echo, *_ in talks:
            echo.kill()
            echo.communicate()


def rates(world: World, flows: Iterable[tuple[str, str, float]], seconds: float) -> list[float]:
    """What TCP carries from host to host at once, in Mbit/s; each sends for so long if its Mbit/s is what it gets."""
    talks = []
    for port, (a, b, megabits) in enumerate(flows, 7100):
        sink = start(world, b, "sink", world.address(b), port)
        talks.append((sink, a, world.address(b), port, int(seconds * megabits * 125e3)))
    senders = [start(world, a, "send", *words) for _, a, *words in talks]
    found = [said(sink)["megabits"] for sink, *_ in talks]
    for sender in senders:
        sender.communicate(timeout=60)
    return found
