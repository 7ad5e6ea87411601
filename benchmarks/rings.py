"""Our ring beside torch's all-reduce over Gloo, on emulated hosts and links, in turns in the same processes.

Floor: every host sends and gets 2 (n - 1) / n of the bytes over its link, in rounds that take a latency each; a link
carries 97.3 % of its rate.

    python benchmarks/rings.py --quick        two hosts and four, few links
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from _results import ROOT, at_least, finish, options

from isthmus.cluster.load import parse_cluster
from isthmus.emulate.world import World

WORKER = ROOT / "benchmarks" / "_ring_worker.py"
HOSTS, RATES, LATENCIES = (2, 4, 8), (100, 1000), (5, 50, 200)  # Mbit/s, ms one way
BYTES = {100: 4 << 20, 1000: 32 << 20}
REPEATS = 2


def main() -> int:
    given = options("rings", __doc__)
    space = list(product(HOSTS, RATES, LATENCIES))
    if given.quick:
        space = [(2, 1000, 5), (4, 100, 5), (4, 1000, 200)]
    rows = [measure(*point) for point in space]
    far = [row["ratio"] for row in rows if (row["rate_mbit"], row["latency_ms"]) == (1000, 200)]
    claims = [
        at_least("Worst-case speed-up of the ring over torch's all_reduce", min(row["ratio"] for row in rows), 0.95),
        at_least("Worst-case speed-up of the ring over torch's all_reduce at 1 Gbit/s and 200 ms", min(far), 3.0),
    ]
    return finish(given, rows, claims)


def measure(hosts: int, rate: int, latency: int) -> dict[str, Any]:
    """Both on one world; medians."""
    size = BYTES[rate]
    times = run(hosts, rate, latency, size)
    stock, ours = (statistics.median(times[name]) for name in ("stock", "ours"))
    rounds = 2 * (hosts - 1)
    floor = rounds * latency / 1e3 + rounds / hosts * size * 8 / (rate * 1e6 * 0.973)
    row = {
        "hosts": hosts, "rate_mbit": rate, "latency_ms": latency, "bytes": size, "stock": stock, "ours": ours,
        "ratio": stock / ours, "ring_of_rounds": floor,
    }  # fmt: skip
    print(row, flush=True)
    return row


def run(hosts: int, rate: int, latency: int, size: int) -> dict[str, list[float]]:
    """Seconds of each repeat, of the slowest host."""
    names = [f"h{index}" for index in range(hosts)]
    listed = ", ".join(f"{name}: {{region: r, devices: {{CPU: 1}}, nic: 100 Gbit/s}}" for name in names)
    links = f"[{{between: [r, r], bandwidth: {rate} Mbit/s, latency: {latency} ms}}]"
    cluster = parse_cluster(f"{{kind: cluster, version: 1, name: rings, hosts: {{{listed}}}, links: {links}}}")
    with tempfile.TemporaryDirectory() as folder, World(cluster, shaped=True) as world:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": world.interface, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen(
                world.command(
                    name,
                    [
                        sys.executable,
                        str(WORKER),
                        str(rank),
                        str(hosts),
                        str(Path(folder) / "store"),
                        world.interface,
                        str(size),
                        str(REPEATS),
                    ],
                ),
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank, name in enumerate(names)
        ]
        told = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"workers ended with {[process.returncode for process in started]}")
    found: dict[str, list[float]] = json.loads(told[0])
    return found


if __name__ == "__main__":
    sys.exit(main())
