"""Emulated links against what they should be: round trips, what TCP carries, shares, small messages beside large ones.

Theory: a round trip is twice the latency; TCP carries 1460 of every 1500 bytes of the rate, 97.3 %; flows on one trunk
or nic get equal parts; a small message waits for one packet of other connections at most. Each point is measured with
plain sockets of processes on the emulated hosts. Router CPU is in cores, while the flows of the row run.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _results import ROOT, Claim, Options, at_most, finish, options, skip

sys.path.insert(0, str(ROOT))
from tests.emulate.worlds import cluster, rates, round_trips, start

from isthmus.cluster.spec import TCP_PAYLOAD
from isthmus.emulate.world import World, unable

Row = dict[str, Any]
PAIR = {"a": "north", "b": "south"}
RATES = (10, 50, 200, 1000)  # Mbit/s
LATENCIES = (5, 30, 200)  # ms one way


def main() -> int:
    called = options("emulation", __doc__)
    lacks = unable()
    if lacks is not None:
        return skip(called, lacks)
    points = [(10, 5), (100, 50), (1000, 200)] if called.quick else list(itertools.product(RATES, LATENCIES))
    rings = [100] if called.quick else [100, 300, 1000]
    links = [link(rate, ms, called) for rate, ms in points]
    ring_rows = [ring(rate, called) for rate in rings]
    shared = [sharing("trunk", called), sharing("nic", called)]
    beside = small_beside_bulk(called)
    return finish(called, [*links, *ring_rows, *shared, beside], claims(links, ring_rows, shared, beside))


def claims(links: Sequence[Row], rings: Sequence[Row], shared: Sequence[Row], beside: Row) -> list[Claim]:
    return [
        at_most(
            "Worst round-trip error, as a fraction of the allowed 0.5 ms + 2 %",
            max(row["trip_error"] for row in links),
            1.0,
        ),
        at_most(
            "Worst error of TCP throughput against 97.3 % of the link rate", max(row["error"] for row in links), 0.03
        ),
        at_most("Worst throughput error of a flow in a ring of eight hosts", max(row["error"] for row in rings), 0.03),
        at_most(
            "Worst deviation from an equal split of two flows on one trunk or nic",
            max(row["error"] for row in shared),
            0.03,
        ),
        at_most(
            "Extra delay of a small message beside bulk traffic, in ms", beside["trip_ms"] - beside["alone_ms"], 2.5
        ),
    ]


def link(rate: int, ms: int, called: Options) -> Row:
    """One flow between two hosts, sending for some seconds besides five round trips."""
    described = cluster(PAIR, [f"north south, bandwidth: {rate} Mbit/s, latency: {ms} ms"])
    with World(described, shaped=True) as world:
        trips = round_trips(world, "a", "b", 5 if called.quick else 20)
        middle, nominal = trips[len(trips) // 2] * 1e3, 2.0 * ms
        seconds = (1.0 if called.quick else 3.0) + 5 * nominal * 1e-3
        found, cores = measured(world, [("a", "b", float(rate))], seconds)
    return {
        "what": f"{rate} Mbit/s, {ms} ms one way",
        "trip_ms": middle,
        "nominal_ms": nominal,
        "trip_error": abs(middle - nominal) / (0.5 + 0.02 * nominal),
        **carried(found, [TCP_PAYLOAD * rate]),
        "router_cores": cores,
    }


def ring(rate: int, called: Options) -> Row:
    names = [f"h{number}" for number in range(8)]
    described = cluster(dict.fromkeys(names, "here"), [f"here here, bandwidth: {rate} Mbit/s, latency: 20 ms"])
    with World(described, shaped=True) as world:
        flows = [(names[number - 1], names[number], float(rate)) for number in range(8)]
        found, cores = measured(world, flows, 1.5 if called.quick else 3.0)
    return {
        "what": f"ring of 8 hosts, {rate} Mbit/s",
        **carried(found, [TCP_PAYLOAD * rate] * 8),
        "router_cores": cores,
    }


def sharing(what: str, called: Options) -> Row:
    """Two flows that can each take 80 Mbit/s, through something of 100 Mbit/s."""
    trunk = ", trunk: 100 Mbit/s" if what == "trunk" else ""
    hosts = {"a": "north", "b": "north", "c": "south", "d": "south"}
    described = cluster(
        hosts, [f"north south, bandwidth: 80 Mbit/s, latency: 20 ms{trunk}"], {"c": "100 Mbit/s"} if not trunk else None
    )
    with World(described, shaped=True) as world:
        flows = [("a", "c", 50.0), ("b", "d" if trunk else "c", 50.0)]
        found, cores = measured(world, flows, 1.0 if called.quick else 3.0)
    return {"what": f"2 flows, {what} of 100 Mbit/s", **carried(found, [TCP_PAYLOAD * 50] * 2), "router_cores": cores}


def small_beside_bulk(called: Options) -> Row:
    """Round trips of 64 bytes while another connection sends 10 MB and more at 100 Mbit/s."""
    with World(cluster(PAIR, ["north south, bandwidth: 100 Mbit/s, latency: 20 ms"]), shaped=True) as world:
        count = 10 if called.quick else 30
        alone = round_trips(world, "a", "b", count)
        sink = start(world, "b", "sink", world.address("b"), 7100)
        bulk = start(world, "a", "send", world.address("b"), 7100, 25_000_000)
        time.sleep(0.3)
        trips = round_trips(world, "a", "b", count)
        assert sink.poll() is None, "the bulk ended too soon"
        for process in (bulk, sink):
            process.kill()
            process.communicate()
    middle, before = (found[len(found) // 2] * 1e3 for found in (trips, alone))
    return {"what": "64 bytes beside bulk, 100 Mbit/s", "trip_ms": middle, "nominal_ms": 40.0, "alone_ms": before}


def measured(world: World, flows: list[tuple[str, str, float]], seconds: float) -> tuple[list[float], float]:
    """Mbit/s of each flow and the router's cores; on a busy machine the middle of three tries says more than one."""
    tries = []
    for _ in range(3):
        with router_cores(world) as used:
            tries.append((rates(world, flows, seconds), used))
    tries.sort(key=lambda one: sum(one[0]))
    found, used = tries[len(tries) // 2]
    return found, used[0]


@contextmanager
def router_cores(world: World) -> Iterator[list[float]]:
    """CPU seconds a second of the router meanwhile."""
    used: list[float] = []
    assert world.router is not None
    before, start_ = cpu_seconds(world.router), time.monotonic()
    yield used
    used.append((cpu_seconds(world.router) - before) / (time.monotonic() - start_))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def carried(found: Sequence[float], expected: Sequence[float]) -> Row:
    errors = [abs(one / wanted - 1) for one, wanted in zip(found, expected, strict=True)]
    worst = errors.index(max(errors))
    return {"mbit_s": found[worst], "theory_mbit_s": expected[worst], "error": errors[worst]}


if __name__ == "__main__":
    sys.exit(main())
