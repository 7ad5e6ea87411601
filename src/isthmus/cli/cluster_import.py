"""The command `isthmus cluster import`: a cluster file from a hostfile, the Slurm environment or the Hulk data."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from isthmus.cli.arguments import unknown
from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.importers.hostfile import import_hostfile
from isthmus.cluster.importers.hosts import Around
from isthmus.cluster.importers.hulk import import_hulk
from isthmus.cluster.importers.result import Imported
from isthmus.cluster.importers.slurm import import_slurm
from isthmus.cluster.write import cluster_yaml
from isthmus.errors import UsageError
from isthmus.files import is_name, write_whole
from isthmus.report.cluster_text import import_text

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Read the source, write the cluster file, and return what was found, assumed and repaired."""
    _check_usage(args)
    check_folder(args.output)
    imported = _imported(args, Path(args.output).stem)
    write_whole(args.output, cluster_yaml(imported.cluster, tuple(imported.comments())).encode())
    values = {
        "file": args.output,
        "source": imported.source,
        "hosts": list(imported.cluster.hosts),
        "devices": list(imported.cluster.devices),
        "links": len(imported.cluster.links),
        "report": msgspec.to_builtins(imported.findings),
    }
    return Answer(values=values, text=import_text(imported, args.output))


def _imported(args: argparse.Namespace, stem: str) -> Imported:
    name = stem if is_name(stem) else "imported"
    if args.hulk:
        return import_hulk(*args.hulk, name=name, bandwidth=args.bandwidth, fill=args.fill)
    region = args.region or "here"
    around = Around(name=name, kind=args.kind, region=region, bandwidth=args.bandwidth, latency=args.latency)
    return import_slurm(os.environ, around) if args.slurm else import_hostfile(args.source, around)


def _check_usage(args: argparse.Namespace) -> None:
    """Refuse more or less than one source, and options that do not go with it."""
    where = args.parser.prog
    sources = [
        name for name, given in (("SOURCE", args.source), ("--slurm", args.slurm), ("--hulk", args.hulk)) if given
    ]
    if len(sources) != 1:
        found = " and ".join(sources) or "none"
        raise UsageError("one source is needed", where=where, found=found, expected="a hostfile, --slurm or --hulk")
    if not args.hulk and args.kind is None:
        raise UsageError("--kind is missing", where=where, expected="the kind of every device, like --kind A100-40GB")
    if args.kind is not None and args.kind not in CATALOG:
        raise unknown("no device kind", args.kind, list(CATALOG), where)
    surplus = ("kind", "region", "latency") if args.hulk else ("fill",)
    for option in surplus:
        if getattr(args, option):
            raise UsageError(
                f"--{option} cannot be combined with {sources[0]}", where=where, next=f"See {where} --help"
            )
