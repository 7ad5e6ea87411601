"""The command `isthmus export CHECKPOINT -o FILE.safetensors`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.cli.console import Answer, ProgressLine, check_folder
from isthmus.errors import CheckpointError
from isthmus.files import expecting
from isthmus.units import format_bytes

if TYPE_CHECKING:
    from isthmus.runtime.checkpoint.reading import Checkpoint

__all__ = ["run"]


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Write the weights of a checkpoint, or of the newest in a folder, as one file; check every byte first."""
    into = Path(args.output)
    if not (folder := args.output.endswith("/")):
        check_folder(args.output)
    path, checkpoint = _exported(Path(args.checkpoint), into, progress, folder=folder, average=args.average)
    file = into / "model.safetensors" if folder else into
    saved, size = checkpoint.manifest, file.stat().st_size
    values = {
        "file": args.output,
        "bytes": size,
        "checkpoint": str(path),
        "step": saved.step,
        "job": saved.job.name,
        "model": saved.job.model,
        "precision": saved.precision,
        "average": args.average,
        "parameters": sum(math.prod(shape) for shape in saved.parameters.values()),
    }
    what = f"{values['parameters']:,} parameters of {saved.job.name} ({saved.job.model}) in {saved.precision}"
    averaged = "the average of " if args.average else ""
    text = f"{args.output}: {averaged}{what}, {format_bytes(size)}\nfrom {path}, after step {saved.step}"
    return Answer(values=values, text=text)


def _exported(
    given: Path, output: Path, progress: ProgressLine, *, folder: bool, average: bool
) -> tuple[Path, Checkpoint]:
    """Write the file, and return its checkpoint; begin again if a run has replaced that by a newer one."""
    from isthmus.runtime.checkpoint.reading import export, export_folder, latest, open_checkpoint

    path = latest(given)
    while True:
        try:
            with expecting(given, "checkpoint", "checkpoints", error=CheckpointError):
                progress.phase(f"Checking {path or given}")
                checkpoint = open_checkpoint(path or given, verify=True)
            progress.phase(f"Writing {output}")
            (export_folder if folder else export)(checkpoint, output, average=average)
            return path or given, checkpoint
        except CheckpointError:
            before, path = path, latest(given)
            if path in (None, before) or (before is not None and before.exists()):
                raise
