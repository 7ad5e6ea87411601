"""Imports the nodes of a Slurm job from the variables that Slurm sets inside it.

SLURM_JOB_NODELIST names the nodes (`gpu[01-04,07],login1`). The number of devices is read from SLURM_GPUS_ON_NODE, or
else from SLURM_JOB_GPUS (a list of numbers). Both describe the node that this runs on, and the others are assumed to be
like it. Without either, SLURM_TASKS_PER_NODE (`4(x2),2`) is read as one device per task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import product

from isthmus.cluster.importers.hosts import Around, cluster_of
from isthmus.cluster.importers.result import Finding, Imported
from isthmus.errors import ClusterError

__all__ = ["expand_counts", "expand_nodes", "import_slurm"]

_MOST = 200_000  # nodes, in all and in one bracket
_NODES = "gpu[01-04,07],login1"
_PART = re.compile(r"\[(?P<list>[^\[\]]*)\]|(?P<text>[^\[\],]+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?", re.ASCII)
_COUNT = re.compile(r"(?P<count>[0-9]{1,6})(?:\(x(?P<times>[0-9]{1,6})\))?", re.ASCII)


def import_slurm(environment: Mapping[str, str], around: Around) -> Imported:
    """Import the cluster of the Slurm job whose variables `environment` holds."""
    listed = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not listed:
        raise ClusterError(
            "this is not inside a Slurm job",
            found="no SLURM_JOB_NODELIST",
            next="Run it in the job: salloc or sbatch, then isthmus cluster import --slurm",
        )
    nodes = expand_nodes(listed)
    counts, findings = _counts(environment, nodes)
    cluster, more = cluster_of(dict(zip(nodes, counts, strict=True)), around, "the Slurm environment")
    return Imported(cluster=cluster, source=f"the Slurm job on {listed[:200]}", findings=(*findings, *more))


def expand_nodes(text: str, where: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Expand `gpu[01-04,07],login1` to gpu01 ... gpu04, gpu07, login1; several brackets give every combination."""
    names: list[str] = []
    for entry in _entries(text, where):
        names += _names(entry, text, where, _MOST - len(names))
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ClusterError(f"node {name!r} is listed twice", where=where, found=repr(text[:80]))
        seen.add(name)
    return names


def _entries(text: str, where: str) -> Iterator[list[re.Match[str]]]:
    """Yield the entries between commas outside brackets, each as its parts: plain text and lists in brackets."""
    parts: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is not None:
            parts.append(match)
            at = match.end()
        elif text[at] == "," and parts:
            yield parts
            parts, at = [], at + 1
        else:
            raise _unreadable(text, where)
    if not parts:
        raise _unreadable(text, where)
    yield parts


def _names(parts: list[re.Match[str]], text: str, where: str, most: int) -> list[str]:
    choices = [[part["text"]] if part["list"] is None else _numbers(part["list"], text, where) for part in parts]
    total = 1
    for choice in choices:
        total *= len(choice)
    if total > most:
        raise ClusterError(
            "the list has too many nodes", where=where, found=repr(text[:80]), expected=f"at most {_MOST}"
        )
    return ["".join(pieces) for pieces in product(*choices)]


def _numbers(listed: str, text: str, where: str) -> list[str]:
    """Expand `01-04,07` to 01 02 03 04 07, with the width that the numbers are written with."""
    numbers: list[str] = []
    for piece in listed.split(","):
        match = _RANGE.fullmatch(piece)
        first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (1, 0)
        if match is None or not 0 <= last - first < _MOST - len(numbers):
            raise _unreadable(text, where)
        numbers += [f"{number:0{len(match['first'])}d}" for number in range(first, last + 1)]
    return numbers


def _unreadable(text: str, where: str) -> ClusterError:
    return ClusterError(
        "this list of nodes cannot be read", where=where, found=repr(text[:80]), expected=f"a list like {_NODES}"
    )


def expand_counts(text: str, where: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Expand `4(x2),2` to 4, 4, 2."""
    counts: list[int] = []
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece)
        times = int(match["times"] or 1) if match else 0
        if match is None or not 1 <= times <= _MOST - len(counts):
            raise ClusterError(
                "these counts cannot be read", where=where, found=repr(text[:80]), expected="counts like 4(x2),2"
            )
        counts += [int(match["count"])] * times
    return counts


def _counts(environment: Mapping[str, str], nodes: list[str]) -> tuple[list[int], tuple[Finding, ...]]:
    """Return the number of devices of each node, and a finding that says how they were found."""
    tasks = environment.get("SLURM_TASKS_PER_NODE", "")
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS"):
        text = environment.get(variable)
        if text:
            return [_devices(variable, text)] * len(nodes), _alike(variable, text, tasks, len(nodes))
    if not tasks:
        raise ClusterError(
            "Slurm does not say how many devices its nodes have",
            found="none of SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS, SLURM_TASKS_PER_NODE",
            next="Ask for them: salloc --gpus-per-node=4",
        )
    counts = expand_counts(tasks)
    if len(counts) != len(nodes) or min(counts) < 1:
        raise ClusterError(
            "these counts do not match the nodes",
            where="SLURM_TASKS_PER_NODE",
            found=repr(tasks[:80]),
            expected=f"{len(nodes)} counts of 1 or more",
        )
    done = f"one device is taken for each task: SLURM_TASKS_PER_NODE={tasks[:80]}"
    return counts, (Finding(kind="tasks-for-devices", what="Slurm does not say how many devices there are", done=done),)


def _devices(variable: str, text: str) -> int:
    """Return the number of devices that a variable gives.

    `SLURM_GPUS_ON_NODE=4` is a number, `SLURM_JOB_GPUS=0,1,4-5` a list of numbers.
    """
    number = text if variable == "SLURM_GPUS_ON_NODE" else str(len(_numbers(text, text, variable)))
    if not re.fullmatch(r"[0-9]{1,6}", number, re.ASCII) or int(number) < 1:
        raise ClusterError("this number of devices cannot be read", where=variable, found=repr(text[:80]))
    return int(number)


def _alike(variable: str, text: str, tasks: str, nodes: int) -> tuple[Finding, ...]:
    if nodes == 1:
        return ()
    unequal = len(set(expand_counts(tasks))) > 1 if tasks else False
    warning = f"; SLURM_TASKS_PER_NODE={tasks[:80]} differs between nodes, so check them" if unequal else ""
    return (
        Finding(
            kind="assumed-alike",
            what=f"{variable}={text[:80]} speaks of one node",
            done=f"all {nodes} nodes are taken to be like it{warning}",
        ),
    )
