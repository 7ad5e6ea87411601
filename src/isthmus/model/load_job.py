"""Reads job and workload files, and checks the rules that every job must keep, also a job given by flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from isthmus.errors import FileError, JobError
from isthmus.files import (
    NAME_RULE,
    Document,
    ValuePath,
    build_document,
    is_name,
    load_yaml,
    parse_yaml,
    show_path,
)
from isthmus.model.job import SHAPES, Job, Optimizer, ParameterGroup, RateSchedule, Workload
from isthmus.units import parse_seconds

__all__ = ["check_job", "load_job", "load_jobs", "load_workload", "named_code", "parse_jobs"]

_FUNCTION = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"
_MODEL = re.compile(rf"zoo:[A-Za-z0-9][A-Za-z0-9._-]*|hf:.+|.+\.json|{_FUNCTION}", re.ASCII)
_DATA = re.compile(rf"synthetic|(?:text|tokens):.+|{_FUNCTION}", re.ASCII)
_SOUND: dict[str | int, object] = {"name": "job", "model": "zoo:gpt2", "batch": 1}  # for required fields
_SHAPE = re.compile(rf"{'|'.join(SHAPES)}|{_FUNCTION}", re.ASCII)
_LOSS = re.compile(rf"default|{_FUNCTION}", re.ASCII)


class _Broken(NamedTuple):
    """A rule that a job breaks: the field, what it holds, and what it should hold."""

    path: ValuePath
    found: object
    expected: str


def load_job(path: str | Path) -> Job:
    """Load the job that a file describes."""
    return load_yaml(path, {"job": _job}, error=JobError)


def load_workload(path: str | Path) -> Workload:
    """Load the workload that a file describes."""
    return load_yaml(path, {"workload": _workload}, error=JobError)


def load_jobs(path: str | Path) -> Job | Workload:
    """Load the job or the workload that a file describes, whichever kind the file states."""
    return load_yaml(path, _EITHER, error=JobError)


def parse_jobs(text: str, where: str = "job.yaml") -> Job | Workload:
    """Return the job or the workload that the text of a file describes; errors name the file `where`."""
    return build_document(parse_yaml(text, name=where, error=JobError), _EITHER)


def check_job(job: Job, where: str | None = None) -> Job:
    """Return the job itself if it keeps every rule, else raise a JobError; `where` says where the job was given."""
    for path, found, expected in _broken_rules(job):
        raise JobError(f"{show_path(path)} has an impossible value", where=where, found=repr(found), expected=expected)
    return job


def named_code(job: Job) -> tuple[str, ...]:
    """Return all code that a job names as package.module:function, for its model, data and loss.

    It must be trusted before it runs: a function may be imported only if the user named it, on the command line or in a
    job file given there.
    """
    given = (
        (job.model, ("zoo:", "hf:")),
        (job.data, ("text:", "tokens:")),
        (job.loss, ()),
        (job.optimizer.schedule.shape, ()),
    )
    named = [text for text, others in given if re.fullmatch(_FUNCTION, text, re.ASCII) and not text.startswith(others)]
    return tuple(dict.fromkeys(named))


def _job(document: Document) -> Job:
    job = document.convert(Job)
    _check(document, job, ())
    return job


def _workload(document: Document) -> Workload:
    workload = document.convert(Workload)
    if not is_name(workload.name):
        raise _fault(document, _Broken(("name",), workload.name, NAME_RULE))
    if not workload.jobs:
        raise document.fault(("jobs",), "the workload has no jobs", expected="at least one job")
    seen: dict[str, int] = {}
    for index, job in enumerate(workload.jobs):
        _check(document, job, ("jobs", index))
        first = seen.setdefault(job.name, index)
        if first != index:
            found = f"it at {document.where(('jobs', first, 'name'))} as well"
            raise document.fault(("jobs", index, "name"), f"two jobs are named {job.name!r}", found=found)
    return workload


_EITHER: dict[str, Callable[[Document], Job | Workload]] = {"job": _job, "workload": _workload}


def _check(document: Document, job: Job, base: ValuePath) -> None:
    for broken in _broken_rules(job):
        raise _fault(document, broken._replace(path=(*base, *broken.path)))


def _fault(document: Document, broken: _Broken) -> FileError:
    found = repr(broken.found)[:80]
    return document.fault(
        broken.path,
        f"{show_path(broken.path)} has an impossible value",
        found=found,
        expected=broken.expected,
        placeholder=_SOUND.get(broken.path[-1]),
    )


def _broken_rules(job: Job) -> Iterator[_Broken]:
    """Yield every rule that the job breaks."""
    yield from _broken_texts(job)
    for field, low, high in (
        ("batch", 1, 10**9),
        ("sequence", 1, 10**9),
        ("steps", 1, 10**12),
        ("seed", 0, 2**63 - 1),
    ):
        value = getattr(job, field)
        if value is not None and not low <= value <= high:
            yield _Broken((field,), value, f"{low} to {high}")
    if job.sparsity is not None and not 0 <= job.sparsity < 1:
        yield _Broken(("sparsity",), job.sparsity, "0 or more and less than 1: the fraction of weights that is pruned")
    if not 0 < job.priority <= 1e9:
        yield _Broken(("priority",), job.priority, "more than 0")
    if job.deadline is not None and not _is_duration(job.deadline):
        yield _Broken(("deadline",), job.deadline, "a duration with its unit, like 12 h")
    yield from _broken_optimizer(job.optimizer)
    rates, total = job.optimizer.schedule, job.optimizer.schedule.steps or job.steps
    if rates.warmup + (rates.decay or 0) > total:
        parts = "warmup and decay" if rates.decay else "warmup"
        yield _Broken(
            ("optimizer", "schedule", "warmup"), rates.warmup, f"{parts} within the {total} steps of the schedule"
        )


def _broken_texts(job: Job) -> Iterator[_Broken]:
    if not is_name(job.name):
        yield _Broken(("name",), job.name, NAME_RULE)
    if not _MODEL.fullmatch(job.model):
        yield _Broken(("model",), job.model, "zoo:NAME, hf:CONFIG.json, package.module:function or MODEL.json")
    if not _DATA.fullmatch(job.data):
        yield _Broken(("data",), job.data, "synthetic, text:FILE, tokens:FILE or package.module:function")
    if not _LOSS.fullmatch(job.loss):
        yield _Broken(("loss",), job.loss, "default or package.module:function")
    if job.weights == "":
        yield _Broken(("weights",), job.weights, "a safetensors file, or a folder of them")
    for index, pattern in enumerate(job.frozen):
        if not pattern:
            yield _Broken(("frozen", index), pattern, "a pattern of parameters, like transformer.wte.*")
    for pattern, place in job.place.items():
        if not pattern or not is_name(place):
            yield _Broken(("place", pattern), place, "a block or parameter pattern, and a region or host that holds it")


def _broken_optimizer(optimizer: Optimizer) -> Iterator[_Broken]:
    path = ("optimizer",)
    if not 0 < optimizer.learning_rate <= 1e6:
        yield _Broken((*path, "learning_rate"), optimizer.learning_rate, "more than 0")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield _Broken((*path, "betas"), list(optimizer.betas), "two numbers, each 0 or more and less than 1")
    if not 0 <= optimizer.momentum < 1:
        yield _Broken((*path, "momentum"), optimizer.momentum, "0 or more and less than 1")
    if optimizer.momentum and optimizer.name != "sgd":
        yield _Broken((*path, "momentum"), optimizer.momentum, f"no momentum: {optimizer.name} has betas instead")
    if not 0 <= optimizer.decay <= 1e6:
        yield _Broken((*path, "weight_decay"), optimizer.weight_decay, "0 or more")
    if optimizer.clip is not None and not 0 < optimizer.clip <= 1e12:
        yield _Broken((*path, "clip"), optimizer.clip, "more than 0")
    if not 0 < optimizer.eps <= 1:
        yield _Broken((*path, "eps"), optimizer.eps, "more than 0")
    if not 0 <= optimizer.dampening <= 1:
        yield _Broken((*path, "dampening"), optimizer.dampening, "0 to 1")
    for field in ("dampening", "nesterov") if optimizer.name != "sgd" else ("amsgrad",):
        if getattr(optimizer, field):
            others = "adam and adamw" if field == "amsgrad" else "sgd"
            yield _Broken((*path, field), getattr(optimizer, field), f"no {field}: only {others} can have it")
    if optimizer.nesterov and (not optimizer.momentum or optimizer.dampening):
        yield _Broken((*path, "nesterov"), True, "a momentum, and no dampening")
    if optimizer.average is not None and not 0 < optimizer.average < 1:
        yield _Broken((*path, "average"), optimizer.average, "more than 0 and less than 1, like 0.999")
    yield from _broken_schedule(optimizer.schedule, (*path, "schedule"))
    for index, group in enumerate(optimizer.groups):
        yield from _broken_group(group, (*path, "groups", index))


def _broken_schedule(schedule: RateSchedule, path: ValuePath) -> Iterator[_Broken]:
    if not _SHAPE.fullmatch(schedule.shape):
        yield _Broken((*path, "shape"), schedule.shape, f"{', '.join(SHAPES)} or package.module:function")
    for field, least in (("warmup", 0), ("decay", 1), ("steps", 1)):
        value = getattr(schedule, field)
        if value is not None and not least <= value <= 10**12:
            yield _Broken((*path, field), value, f"a number of steps, {least} or more")
    if not 0 <= schedule.end <= 1:
        yield _Broken((*path, "end"), schedule.end, "0 to 1: the part of the learning rate that is left in the end")
    if schedule.decay is not None and schedule.shape != "warmup-stable-decay":
        yield _Broken((*path, "decay"), schedule.decay, "no decay: only warmup-stable-decay has steps of decay")
    if schedule.end and schedule.shape == "constant":
        yield _Broken((*path, "end"), schedule.end, "no end: a constant learning rate does not fall")
    if ":" in schedule.shape and schedule != RateSchedule(shape=schedule.shape):
        yield _Broken(path, "settings beside a function", "only the function: it gives the factor of every step")


def _broken_group(group: ParameterGroup, path: ValuePath) -> Iterator[_Broken]:
    if not group.parameters or not all(group.parameters):
        yield _Broken((*path, "parameters"), list(group.parameters), 'patterns of parameters, like ["*.bias"]')
    if group.learning_rate is not None and not 0 <= group.learning_rate <= 1e6:
        yield _Broken((*path, "learning_rate"), group.learning_rate, "0 or more")
    if group.weight_decay is not None and not 0 <= group.weight_decay <= 1e6:
        yield _Broken((*path, "weight_decay"), group.weight_decay, "0 or more")


def _is_duration(text: str) -> bool:
    try:
        return parse_seconds(text) > 0
    except ValueError:
        return False
