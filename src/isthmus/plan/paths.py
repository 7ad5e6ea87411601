"""Paths that a plan's jobs hold (`hf:CONFIG.json`, `MODEL.json`, `text:FILE`), valid wherever a plan file is read.

In a plan file a path is relative to the folder of that file, so that a folder with both can be moved. In memory it is
relative to the folder where the program runs. Symlinks are followed, so that `..` means what it means to the operating
system. A path that does not exist is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from isthmus.errors import DataError
from isthmus.model.job import Job
from isthmus.plan.types import Pipeline, Plan

__all__ = ["check_data", "from_file", "named_plan", "names_only", "to_file"]

_PATH = re.compile(r"(?P<head>hf:|text:|tokens:)?(?P<path>.+)", re.DOTALL)


def to_file(plan: Plan, file: Path) -> Plan:
    """Return the plan as it is written into that file."""
    folder = _folders(file)[0]
    return _changed(plan, lambda path: os.path.relpath(_real(Path(path)), folder) if _exists(Path(path)) else path)


def from_file(plan: Plan, file: Path) -> Plan:
    """Return the plan of that file as it is used here."""

    def here(path: str) -> str:
        found = next((folder / path for folder in _folders(file) if _exists(folder / path)), None)
        return path if found is None else os.path.relpath(_real(found))

    return _changed(plan, here)


def check_data(plan: Plan, file: Path) -> None:
    """Raise DataError unless the text files that the jobs are trained on exist; the plan was read from `file`."""
    for job in plan.jobs:
        kind, _, path = job.data.partition(":")
        if kind in ("text", "tokens") and not _exists(Path(path)):
            places = dict.fromkeys(str((folder / path).resolve()) for folder in (*_folders(file), Path.cwd()))
            raise DataError(
                f"there is no such file of {kind}",
                where=f"{file}: {job.data}",
                found=f"none at {', '.join(places)}",
                expected="a path that is relative to the plan's folder",
            )


def _folders(file: Path) -> tuple[Path, ...]:
    """Return the folder where a file lies, without symlinks, and the folder of its name, if that is a link."""
    return Path(os.path.realpath(file)).parent, file.parent


def _real(path: Path) -> Path:
    """Return the path without symlinks to folders; the file keeps the name by which its plan knows it."""
    return Path(os.path.realpath(path.parent), path.name)


def names_only(job: Job) -> Job:
    """Return the job with file names in place of paths, so that it is the same wherever it is looked at from."""
    return _job(job, _name)


def named_plan(plan: Plan) -> Plan:
    """Return the plan with file names in place of the paths in its jobs."""
    return _jobs_changed(plan, names_only)


def _name(path: str) -> str:
    return Path(path).name or path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _changed(plan: Plan, change: Callable[[str], str]) -> Plan:
    def relative(path: str) -> str:
        return path if Path(path).is_absolute() else change(path)

    return _jobs_changed(plan, lambda job: _job(job, relative))


def _jobs_changed(plan: Plan, change: Callable[[Job], Job]) -> Plan:
    parts = [
        replace(part, job=change(part.job))
        if isinstance(part, Pipeline)
        else replace(part, jobs=tuple(replace(item, job=change(item.job)) for item in part.jobs))
        for part in plan.parts
    ]
    return replace(plan, parts=tuple(parts))


def _job(job: Job, change: Callable[[str], str]) -> Job:
    model, data = job.model, job.data
    if model.startswith("hf:") or (model.endswith(".json") and not model.startswith("zoo:")):
        model = _text(model, change)
    if data.startswith(("text:", "tokens:")):
        data = _text(data, change)
    weights = None if job.weights is None else change(job.weights)
    if (model, data, weights) == (job.model, job.data, job.weights):
        return job
    return replace(job, model=model, data=data, weights=weights)


def _text(text: str, change: Callable[[str], str]) -> str:
    match = _PATH.fullmatch(text)
    return f"{match['head'] or ''}{change(match['path'])}" if match else text
