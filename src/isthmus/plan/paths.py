"""Paths that a plan's jobs hold (`hf:CONFIG.json`, `MODEL.json`, `text:FILE`), kept good wherever a plan file is read.

In a plan file a path is relative to the folder of that file, so that a folder with both can be moved; in memory it is
relative to where the program runs. What does not exist is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from isthmus.model.job import Job
from isthmus.plan.types import Pipeline, Plan

__all__ = ["from_file", "named_plan", "names_only", "to_file"]

_PATH = re.compile(r"(?P<head>hf:|text:)?(?P<path>.+)", re.DOTALL)


def to_file(plan: Plan, folder: Path) -> Plan:
    """The plan as it is written into a file of that folder."""
    return _changed(plan, lambda path: os.path.relpath(path, folder) if _exists(Path(path)) else path)


def from_file(plan: Plan, folder: Path) -> Plan:
    """The plan of a file in that folder, as it is used here."""
    return _changed(plan, lambda path: os.path.relpath(there) if _exists(there := folder / path) else path)


def names_only(job: Job) -> Job:
    """The job with file names in place of paths: the same wherever it is looked at from."""
    return _job(job, _name)


def named_plan(plan: Plan) -> Plan:
    """The plan with such jobs."""
    return _jobs_changed(plan, names_only)


def _name(path: str) -> str:
    return Path(path).name or path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # names that no file can have
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
    if data.startswith("text:"):
        data = _text(data, change)
    return job if (model, data) == (job.model, job.data) else replace(job, model=model, data=data)


def _text(text: str, change: Callable[[str], str]) -> str:
    match = _PATH.fullmatch(text)
    return f"{match['head'] or ''}{change(match['path'])}" if match else text
