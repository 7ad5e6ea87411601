"""Whether latency and fair bandwidth can describe real links: published measurements, fitted and priced again.

The samples are measurements of the TAG authors, brought beside the clone; without them there is nothing to judge. For
each group of samples above 1 MB one link is fitted (`cost.calibrate`), every sample is priced by the event engine as
the messages that were sent, and compared. Three columns of errors:

- of the fit itself, which is claimed. It is judged on the samples it was made from, and made to be off by 15 % at most
  where any link can be: this says what the model of a link can express;
- left out: every sample priced by the fit to the others of its group, the smallest and the largest included;
- least worst: of the fit with the least worst error instead of the least total.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _results import ROOT, at_most, finish, options, skip

from isthmus.cost.calibrate import LinkFit, fit_link
from isthmus.cost.event_engine import WIDTH, Network, Tasks, run

DATA = ROOT.parent / "shared" / "data"
MEGABYTE = 1e6


class Samples(NamedTuple):
    """Measured times of one link: a copy from one device to another, or a ring all-reduce over two."""

    name: str
    ring: int  # participants; 1: a copy
    sizes: np.ndarray
    times: np.ndarray

    @property
    def rounds(self) -> int:
        """Messages that follow each other."""
        return 2 * (self.ring - 1) or 1


def read(path: Path, ring: int, unit: float) -> list[Samples]:
    """Groups of a file whose columns are name, size in `unit` bytes, microseconds; those above 1 MB."""
    groups: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for name, size, microseconds in rows:
            groups.setdefault(name, []).append((float(size) * unit, float(microseconds) * 1e-6))
    large = {name: np.array([row for row in group if row[0] > MEGABYTE]) for name, group in groups.items()}
    return [Samples(name, ring, group[:, 0], group[:, 1]) for name, group in large.items()]


def fit(samples: Samples, cap: float = 0.15) -> LinkFit:
    rounds = samples.rounds
    return fit_link(
        samples.sizes.tolist(),
        samples.times.tolist(),
        latency_coefficient=rounds,
        bytes_coefficient=rounds / samples.ring,
        cap=cap,
    )


def priced(samples: Samples, size: float, link: LinkFit) -> float:
    """Seconds by the engine: in every round each participant sends a chunk to the next, once it has the one before."""
    n, rounds = samples.ring, samples.rounds
    lane = np.tile(np.arange(n, dtype=np.int32), rounds)
    task = np.arange(n * rounds, dtype=np.int32)
    earlier = task[n:] - n - lane[n:] + (lane[n:] - 1) % n  # what its neighbour sent in the round before
    tasks = Tasks(lane, np.zeros(len(task)), np.full(len(task), size / n), lane, earlier.astype(np.int32), task[n:])
    resources = np.full((n, WIDTH), -1, np.int32)
    resources[:, 0] = np.arange(n)
    network = Network(resources, np.full(n, link.latency), np.full(n, link.bandwidth))
    return float(run(tasks, n, network).end.max())


def errors_of(samples: Samples, link: LinkFit) -> np.ndarray:
    prices = np.array([priced(samples, size, link) for size in samples.sizes])
    return np.asarray(np.abs(prices / samples.times - 1))


def errors_left_out(samples: Samples) -> np.ndarray:
    """Each sample's error by the fit to the others."""
    errors = []
    for i in range(len(samples.sizes)):
        others = samples._replace(sizes=np.delete(samples.sizes, i), times=np.delete(samples.times, i))
        one = samples._replace(sizes=samples.sizes[i : i + 1], times=samples.times[i : i + 1])
        errors.append(errors_of(one, fit(others)))
    return np.concatenate(errors)


def row_of(name: str, link: LinkFit | None, errors: dict[str, np.ndarray]) -> dict[str, Any]:
    return {
        "link": name,
        "samples": len(errors["fit"]),
        "latency_us": link.latency * 1e6 if link else None,
        "gigabytes_per_second": link.bandwidth / 1e9 if link else None,
        **{f"{kind}_median": float(np.median(values)) for kind, values in errors.items()},
        **{f"{kind}_worst": float(values.max()) for kind, values in errors.items()},
    }


def main() -> int:
    called = options("calibration", __doc__)
    files = (("tag_allreduce_samples.csv", 2, 1024.0), ("tag_p2p_samples.csv", 1, MEGABYTE))
    if not all((DATA / name).is_file() for name, _, _ in files):
        return skip(called, "the published measurements are not beside this clone (../shared/data)")
    rows, every = [], []
    for samples in (group for name, ring, unit in files for group in read(DATA / name, ring, unit)):
        link = fit(samples)
        errors = {
            "fit": errors_of(samples, link),
            "left_out": errors_left_out(samples),
            "least_worst": errors_of(samples, fit(samples, cap=0.0)),
        }
        rows.append(row_of(samples.name, link, errors))
        every.append(errors)
    together = {kind: np.concatenate([errors[kind] for errors in every]) for kind in every[0]}
    rows.append(row_of("all", None, together))
    claims = [
        at_most("Median error of a fitted link, transfers above 1 MB", float(np.median(together["fit"])), 0.05),
        at_most("Worst error of a fitted link, transfers above 1 MB", float(together["fit"].max()), 0.15),
    ]
    return finish(called, rows, claims)


if __name__ == "__main__":
    sys.exit(main())
