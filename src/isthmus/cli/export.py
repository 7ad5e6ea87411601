"""`isthmus export CHECKPOINT -o FILE.safetensors`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from isthmus.cli.console import Answer, Progress, check_folder
from isthmus.errors import CheckpointError
from isthmus.files import expecting
from isthmus.units import format_bytes

__all__ = ["run"]


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Writes the weights of a checkpoint, or of the newest in a folder, as one file; every byte is checked first."""
    check_folder(args.output)
    from isthmus.runtime.checkpoint import export, latest, open_checkpoint

    given = Path(args.checkpoint)
    with expecting(given, "checkpoint", "checkpoints", error=CheckpointError):
        path = latest(given) or given
        progress.phase(f"Checking {path}")
        checkpoint = open_checkpoint(path, verify=True)
    progress.phase(f"Writing {args.output}")
    export(checkpoint, args.output)
    saved, size = checkpoint.manifest, Path(args.output).stat().st_size
    values = {
        "file": args.output,
        "bytes": size,
        "checkpoint": str(path),
        "step": saved.step,
        "job": saved.job.name,
        "model": saved.job.model,
        "precision": saved.precision,
        "parameters": sum(math.prod(shape) for shape in saved.parameters.values()),
    }
    text = (
        f"{args.output}: {values['parameters']:,} parameters of {saved.job.name} ({saved.job.model}) in "
        f"{saved.precision}, {format_bytes(size)}\nfrom {path}, after step {saved.step}"
    )
    return Answer(values=values, text=text)
