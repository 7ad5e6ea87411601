"""From what a caller gives (a name, a file, a `Job`, a captured model) to jobs, and from jobs to block graphs."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from isthmus.cluster.spec import Precision
from isthmus.errors import DataError, UsageError
from isthmus.model import hf, source
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Workload
from isthmus.model.load_job import check_job, load_jobs, named_code
from isthmus.model.parameter_groups import check_groups

__all__ = ["Request", "check_functions", "check_kind", "models_of", "requested_jobs"]

Request = str | Path | Job | Workload | BlockGraph  # a name or a file; a job; several jobs; a captured model

_BATCH = 32  # samples, where neither a job nor a flag says


def requested_jobs(
    what: Request,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    precision: Precision | None = None,
    trust_independent_samples: bool | None = None,
) -> tuple[Job, ...]:
    """Return the jobs that are meant. The keywords override what a job or a model says itself."""
    given = {
        "batch": batch,
        "sequence": sequence,
        "precision": precision,
        "trust_independent_samples": trust_independent_samples,
    }
    check_kind(what)
    changes: dict[str, Any] = {field: value for field, value in given.items() if value is not None}
    if isinstance(what, (str, Path)):
        what = load_jobs(what) if str(what).endswith((".yaml", ".yml")) else _job_of(str(what))
    if isinstance(what, Workload):
        if changes:
            fields = ", ".join(changes)
            raise UsageError(f"{fields} cannot be given for a whole workload", next="Write it in the workload's jobs")
        return what.jobs
    if isinstance(what, BlockGraph):
        what = Job(name=_job_name(what.name), model=f"{_job_name(what.name)}.json", batch=_BATCH)
    return (check_job(msgspec.structs.replace(what, **changes)),)


def check_kind(what: object) -> None:
    """Refuse what is neither a job nor a model, and say what to do about it."""
    if isinstance(what, (str, Path, Job, Workload, BlockGraph)):
        return
    kind = type(what)
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in kind.__mro__):
        raise UsageError("a module must be captured first", next="isthmus.capture(module, example)")
    raise UsageError(
        "this is neither a job nor a model",
        found=f"an object of type {kind.__name__}",
        expected="a name or a file, a Job, a Workload, or what isthmus.capture gives",
    )


def models_of(jobs: Collection[Job]) -> dict[str, BlockGraph]:
    """Return the block graph of each job by the job's name."""
    models = {job.name: source.load_graph(job.model, sequence=job.sequence, frozen=job.frozen) for job in jobs}
    for job in jobs:
        check_groups(job, models[job.name])
    return models


def check_functions(jobs: Collection[Job]) -> None:
    """Import the data and losses that jobs name, and that are trusted, so that a misspelt name is known at once."""
    for job in jobs:
        named = [name for name in (job.data, job.loss, job.optimizer.schedule.shape) if name in named_code(job)]
        if named:
            from isthmus.model.function import find

            for name in named:
                find(name, DataError)


def _job_of(spec: str) -> Job:
    match source.parse(spec):
        case source.Zoo(name=name) | source.Function(function=name):
            pass
        case source.Config(path=path):
            name = hf.name_of(path)
        case source.SavedModel(path=path):
            name = path.stem
    return Job(name=_job_name(name), model=spec, batch=_BATCH)


def _job_name(text: str) -> str:
    """Return the text with every character that a job name may not have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:64].lstrip(".-") or "job"
