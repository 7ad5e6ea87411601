"""The command `isthmus profile MODEL`."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.load import load_cluster
from isthmus.emulate.act import as_emulated, paces
from isthmus.errors import UsageError
from isthmus.model import source
from isthmus.model.load_profile import save_profile
from isthmus.model.requests import requested_jobs
from isthmus.report.columns import columns
from isthmus.units import format_seconds

if TYPE_CHECKING:
    from isthmus.runtime.profiling.block_times import Measurement
    from isthmus.runtime.profiling.machine import MeasuredMachine

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Measure the blocks of a model on this machine's device, and write the profile."""
    source.parse(args.model)
    output: str = args.output or f"{requested_jobs(args.model)[0].name}.profile.json"
    check_folder(output)
    progress.phase("Looking for a device")
    from isthmus.runtime.profiling.block_times import SAMPLES, profile_model
    from isthmus.runtime.profiling.machine import find_machine

    start = time.monotonic()
    slower = _slower(args)
    machine = (
        find_machine("CPU", args.precision or "fp32", 1)
        if slower
        else find_machine(args.device, args.precision, args.threads)
    )
    progress.phase(f"Measuring {args.model} on {_where(machine)}")
    found = profile_model(
        args.model,
        machine,
        sequence=args.sequence,
        samples=args.samples or SAMPLES,
        listen=lambda block, samples: progress.detail(f"{block}, samples: {samples}"),
    )
    if found.profile.blocks:
        save_profile(as_emulated(found.profile, slower) if slower else found.profile, output)
    file = output if found.profile.blocks else None
    values = _values(machine, found, file, time.monotonic() - start)
    failure = None if file else f"no block of {args.model} fits in the memory of this device; nothing was written"
    return Answer(values=values, text="\n".join(_lines(args, machine, slower, found, output)), failure=failure)


def _slower(args: argparse.Namespace) -> dict[str, float]:
    """Return how many times slower than one core each device kind is emulated; empty without --emulate."""
    if args.emulate is None:
        return {}
    for option in ("device", "threads"):
        if getattr(args, option) is not None:
            raise UsageError(
                f"--{option} cannot be given with --emulate",
                where="isthmus profile",
                expected="one core, slowed down as each kind of the cluster will be",
            )
    return paces(load_cluster(args.emulate))


def _where(machine: MeasuredMachine) -> str:
    threads = f" ({machine.threads} thread{'s' * (machine.threads > 1)})" if machine.device.type == "cpu" else ""
    return f"{machine.name}{threads} in {machine.precision}"


def _values(machine: MeasuredMachine, found: Measurement, file: str | None, seconds: float) -> dict[str, Any]:
    return {
        "file": file,
        "points": len(found.profile.blocks),
        "left_out": [{"block": block, "samples": samples} for block, samples in found.left_out],
        "device": machine.kind,
        "precision": machine.precision,
        "machine": machine.name,
        "threads": machine.threads if machine.device.type == "cpu" else None,
        "samples": sorted({point.samples for point in found.profile.blocks}),
        "seconds": seconds,
    }


def _lines(
    args: argparse.Namespace, machine: MeasuredMachine, slower: Mapping[str, float], found: Measurement, output: str
) -> list[str]:
    points = found.profile.blocks
    left_out = [
        f"left out: {block} on {samples} samples, which do not fit in memory" for block, samples in found.left_out
    ]
    kinds = ", ".join(slower) or machine.kind
    head = f"{found.graph.name} on {_where(machine)}: {len(points)} points for {kinds}"
    if not points:
        return [head, "", *left_out]
    foreign = f"{machine.kind} is not in the catalog: a cluster file must describe it under this name"
    notes = [] if args.emulate or machine.kind in CATALOG else [foreign]
    usage = f"isthmus plan {args.model} --cluster {args.emulate or 'FILE'} --profile {output}"
    return [head, "", *_table(found), "", *left_out, *notes, f"written to {output}; use it: {usage}"]


def _table(found: Measurement) -> list[str]:
    """Return a table of the forward and backward seconds of each distinct block, by samples."""
    equal = Counter(block.digest for block in found.graph.blocks)
    points = {(point.block, point.samples): point for point in found.profile.blocks}
    names = {point.block: point.name for point in found.profile.blocks}
    counts = sorted({samples for _, samples in points})
    rows = [["block", "equal", *(f"{count} sample{'s' * (count > 1)}" for count in counts)]]
    for digest, name in names.items():
        cells = [points.get((digest, count)) for count in counts]
        shown = [
            f"{format_seconds(one.forward_seconds)} + {format_seconds(one.backward_seconds)}" if one else "-"
            for one in cells
        ]
        rows.append([name, str(equal[digest]), *shown])
    return columns(rows, right=range(1, len(rows[0])))
