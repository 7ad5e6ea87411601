"""The parser of the plan's text; `plan.text` shows the form and writes it."""

from __future__ import annotations

from typing import Any, get_args

from isthmus.cluster.spec import Precision
from isthmus.model.job import Job, Optimizer, ParameterGroup, RateSchedule
from isthmus.plan.text_lines import Line, Reader, read_lines
from isthmus.plan.types import (
    How,
    Pipeline,
    Plan,
    Policy,
    Pool,
    PoolJob,
    Replica,
    Schedule,
    Shard,
    Spill,
    Stage,
    Sync,
    Via,
)
from isthmus.units import parse_bytes

__all__ = ["parse"]


def parse(text: str, where: str = "plan") -> Plan:
    """Return the plan that a text describes; raise PlanError (rule "text") with the line that cannot be read."""
    root = read_lines(text, where)
    if not root.children:
        root.fail("the text is empty", expected="plan for CLUSTER")
    head, *rest = root.children
    head.expect("plan")
    head.expect("for")
    cluster = head.name()
    _finish(head)
    vias: list[Via] = []
    parts: list[Pipeline | Pool] = []
    for line in rest:
        word = line.choice(("via", "pipeline", "pool"))
        if word == "via":
            vias.append(_via(line))
        else:
            parts.append(_pipeline(line) if word == "pipeline" else _pool(line))
    return Plan(cluster=cluster, parts=tuple(parts), via=tuple(vias))


def _finish(line: Line) -> None:
    line.end()
    line.leaf()


def _via(line: Line) -> Via:
    a = line.name()
    line.expect("-")
    b = line.name()
    line.expect("over")
    hosts = line.names()
    _finish(line)
    return Via(between=(a, b), hosts=hosts)


def _one_of(kind: Any) -> Reader:
    return lambda line: line.choice(get_args(kind))


def _flag(line: Line) -> bool:
    return True


def _two_numbers(line: Line) -> tuple[float, float]:
    return line.number(), line.number()


def _places(line: Line) -> dict[str, str]:
    places: dict[str, str] = {}
    while line.peek() not in (",", None):
        pattern = line.name()
        if pattern in places:
            line.fail("a pattern is placed twice", expected=f"one place for {pattern}")
        places[pattern] = line.name()
    return places


def _bytes(line: Line) -> float:
    """Read a size: `20 GB`, or any number of `B`."""
    value = line.number()
    unit = line.name()
    try:
        return value if unit == "B" else parse_bytes(f"{value!r} {unit}")
    except ValueError as problem:
        line.fail("the size cannot be read", expected=str(problem))


_HEAD: dict[str, Reader] = {
    "batch": Line.integer,
    "sequence": Line.integer,
    "precision": _one_of(Precision),
    "digest": Line.name,
    "no-recompute": _flag,
    "kept": Line.number,
}
_OPTIMIZER: dict[str, Reader] = {
    "optimizer": lambda line: line.choice(("adamw", "adam", "sgd")),
    "learning-rate": Line.number,
    "betas": _two_numbers,
    "eps": Line.number,
    "amsgrad": _flag,
    "momentum": Line.number,
    "dampening": Line.number,
    "nesterov": _flag,
    "maximize": _flag,
    "weight-decay": Line.number,
    "clip": Line.number,
    "average": Line.number,
}
_RATES: dict[str, Reader] = {
    "warmup": Line.integer,
    "decay": Line.integer,
    "end": Line.number,
    "steps": Line.integer,
}
_GROUP: dict[str, Reader] = {"learning-rate": Line.number, "weight-decay": Line.number}
_JOB: dict[str, Reader] = {
    "asks": _one_of(Precision),
    "steps": Line.integer,
    "mixed": _flag,
    "compile": _flag,
    "trust-independent-samples": _flag,
    "seed": Line.integer,
    "weights": Line.name,
    "frozen": Line.names,
    "data": Line.name,
    "loss": Line.name,
    "sparsity": Line.number,
    "place": _places,
    "priority": Line.number,
    "deadline": Line.name,
}
_OF_JOB = ("job", "rates", "group")  # lines of a job, below its pipeline or its place in a pool
_STAGE: dict[str, Reader] = {
    "sharded-optimizer": _flag,
    "sharded-all": _flag,
    "recompute": _flag,
    "spill": _one_of(Spill),
    "kept": Line.number,
}


def _fields(found: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    return {renamed.get(key, key).replace("-", "_"): value for key, value in found.items()}


def _need(line: Line, found: dict[str, Any], *keys: str) -> None:
    missing = [key for key in keys if key not in found]
    if missing:
        line.fail("the line lacks a part", expected=" and ".join(missing))


def _head(line: Line, keys: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `NAME: MODEL, batch 256, ...` as fields of the job and fields of the part."""
    name = line.name()
    line.expect(":")
    model = line.name()
    found = line.more_clauses({key: _HEAD[key] for key in keys})
    _need(line, found, "batch", "precision")
    job = {"name": name, "model": model} | {key: found.pop(key) for key in ("batch", "sequence") if key in found}
    part = {"model_digest": found.pop("digest", "")} | found
    return job, part


def _job(job: dict[str, Any], below: dict[str, list[Line]]) -> Job:
    """Return the job of a head, with the fields of its lines `job`, `rates` and `group`."""
    found: dict[str, Any] = {}
    for word in ("job", "rates"):
        if len(below[word]) > 1:
            below[word][1].fail("the job is described twice", expected=f"one `{word}` line")
    for line in below["job"]:
        found = line.clauses(_OPTIMIZER | _JOB)
        line.leaf()
    optimizer = {key: found.pop(key) for key in list(found) if key in _OPTIMIZER}
    for line in below["rates"]:
        optimizer["schedule"] = RateSchedule(shape=line.name(), **_fields(line.more_clauses(_RATES), {}))
        line.leaf()
    if below["group"]:
        optimizer["groups"] = tuple(map(_group, below["group"]))
    if optimizer:
        found["optimizer"] = Optimizer(**_fields(optimizer, {"optimizer": "name"}))
    return Job(**job, **_fields(found, {"asks": "precision"}))


def _group(line: Line) -> ParameterGroup:
    parameters = line.names()
    found = _fields(line.more_clauses(_GROUP), {})
    line.leaf()
    return ParameterGroup(parameters=parameters, **found)


def _children(line: Line, words: tuple[str, ...]) -> dict[str, list[Line]]:
    """Return the lines below by their first word, and move past that word."""
    found: dict[str, list[Line]] = {word: [] for word in words}
    for child in line.children:
        found[child.choice(words)].append(child)
    return found


def _pipeline(line: Line) -> Pipeline:
    job, part = _head(line, ("batch", "sequence", "precision", "digest"))
    below = _children(line, (*_OF_JOB, "schedule", "stage", "sync"))
    if len(below["schedule"]) != 1:
        line.fail("the pipeline needs one schedule", expected="one line like `schedule 1f1b, micro-batches 8`")
    return Pipeline(
        job=_job(job, below),
        stages=tuple(_stage(child) for child in below["stage"]),
        syncs=tuple(_sync(child) for child in below["sync"]),
        **part,
        **_schedule(below["schedule"][0]),
    )


def _schedule(line: Line) -> dict[str, Any]:
    schedule = line.choice(get_args(Schedule))
    found = line.more_clauses({"micro-batches": Line.integer, "ahead": Line.integer})
    _need(line, found, "micro-batches")
    line.leaf()
    return _fields(found, {}) | {"schedule": schedule}


def _run(line: Line) -> tuple[str, str]:
    first = line.name()
    line.expect("..")
    return first, line.name()


def _stage(line: Line) -> Stage:
    first, last = _run(line)
    found = line.more_clauses(_STAGE)
    layouts = [key for key in ("sharded-optimizer", "sharded-all") if found.pop(key, False)]
    if len(layouts) > 1:
        line.fail("the state is laid out in two ways", expected=" or ".join(layouts))
    state: Any = layouts[0] if layouts else "replicated"
    replicas = tuple(_replica(child) for child in line.children)
    return Stage(first=first, last=last, replicas=replicas, state=state, **found)


def _replica(line: Line) -> Replica:
    devices: list[str] = []
    while not line.accept(":"):
        if devices and not line.accept("+"):
            line.fail("the line cannot be read", expected="`:` and a share, or `+` and another device")
        devices.append(line.name())
    found = line.clauses({"share": Line.integer, "slices": Line.integer})
    _need(line, found, "share")
    line.leaf()
    return Replica(devices=tuple(devices), **found)


def _sync(line: Line) -> Sync:
    bucket = line.name()
    how: Any = line.choice(get_args(How))
    line.expect(":")
    parameters = line.names(end="over")
    line.expect("over")
    participants = line.names()
    found = line.more_clauses({"root": Line.name, "segments": Line.integer})
    line.leaf()
    return Sync(bucket=bucket, how=how, parameters=parameters, participants=participants, **found)


def _pool(line: Line) -> Pool:
    policy: Any = line.choice(get_args(Policy))
    unbuffered = line.more_clauses({"unbuffered": _flag})
    below = _children(line, ("device", "cap", "pool-job"))
    devices, caps = _devices(below["device"])
    for child in below["cap"]:
        caps.append(_bytes(child))
        _finish(child)
    jobs = tuple(_pool_job(child) for child in below["pool-job"])
    return Pool(jobs=jobs, devices=tuple(devices), caps=tuple(caps), policy=policy, buffered=not unbuffered)


def _devices(lines: list[Line]) -> tuple[list[str], list[float]]:
    devices: list[str] = []
    caps: list[float] = []
    for line in lines:
        devices.append(line.name())
        found = line.more_clauses({"cap": _bytes})
        if found and len(caps) < len(devices) - 1:
            line.fail("a device before this one has no cap", expected=f"a cap for {devices[len(caps)]}")
        caps.extend(found.values())
        line.leaf()
    return devices, caps


def _pool_job(line: Line) -> PoolJob:
    job, part = _head(line, tuple(_HEAD))
    below = _children(line, (*_OF_JOB, "shard"))
    recompute = not part.pop("no-recompute", False)
    shards = tuple(_shard(child) for child in below["shard"])
    return PoolJob(job=_job(job, below), shards=shards, recompute=recompute, **part)


def _shard(line: Line) -> Shard:
    first, last = _run(line)
    _finish(line)
    return Shard(first=first, last=last)
