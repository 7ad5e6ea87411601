"""The plan file: a plan with the cluster it is for, how it was made, and what the simulator predicts for it.

JSON (`kind: plan`) holds all of it. A path that ends in `.plan` or `.txt` holds only the text form of the plan, for
people to write and to compare; the cluster then comes from elsewhere.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from isthmus.cluster.load import cluster_digest
from isthmus.cluster.spec import Cluster, Host, Link
from isthmus.errors import FileError
from isthmus.files import encode_json, expecting, is_name, read_json, write_json, write_whole
from isthmus.files.document import read_text
from isthmus.model.job import Job
from isthmus.model.load_profile import profile_digest
from isthmus.model.profile import Profile
from isthmus.plan.paths import from_file, named_plan, names_only, to_file
from isthmus.plan.text import parse, render
from isthmus.plan.types import Plan, Prediction

__all__ = ["PlanFile", "inputs_digest", "load_plan", "plan_digest", "save_plan"]

_TEXT = (".plan", ".txt")
_LATER_OF_JOBS = ("weights", "frozen", "compile")
_LATER_OF_OPTIMIZERS = (
    "eps", "amsgrad", "dampening", "nesterov", "maximize", "schedule", "groups", "average",
)  # fmt: skip
_LARGEST_TEXT = 64 * 2**20  # bytes
_MOST_DEVICES = 200_000


class PlanFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a plan file; a text file has no planner, no cluster and no prediction."""

    kind: Literal["plan"] = "plan"
    version: Literal[1] = 1
    planner: str = ""
    seed: int = 0
    inputs: str = ""  # hash of the cluster, the jobs, the models and the profile it was made from
    plan: Plan
    cluster: Cluster | None = None
    predicted: Prediction | None = None


def inputs_digest(
    cluster: Cluster, jobs: Iterable[Job], model_digests: Mapping[str, str], profile: Profile | None = None
) -> str:
    """Return the SHA-256 of what a plan is made from.

    That is the cluster, the jobs in order, the model digest of each job by name and, if there is one, the profile.
    """
    measured = () if profile is None else (profile_digest(profile),)
    plain = [_without_later_defaults(names_only(job)) for job in jobs]
    inputs = (cluster_digest(cluster), plain, dict(sorted(model_digests.items())), *measured)
    return hashlib.sha256(encode_json(inputs)).hexdigest()


def _without_later_defaults(job: Job) -> dict[str, Any]:
    """Return a job's fields without those that came later and have their defaults: older files know nothing of them."""
    plain: dict[str, Any] = msgspec.to_builtins(job)
    default: dict[str, Any] = msgspec.to_builtins(Job(name="", model="", batch=1))
    for fields, usual, later in (
        (plain, default, _LATER_OF_JOBS),
        (plain["optimizer"], default["optimizer"], _LATER_OF_OPTIMIZERS),
    ):
        for field in later:
            if fields[field] == usual[field]:
                del fields[field]
    return plain


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of what a plan says, which is the same for its JSON and its text, wherever its file lies."""
    return hashlib.sha256(encode_json(named_plan(plan))).hexdigest()


def save_plan(path: str | Path, file: PlanFile) -> None:
    """Write the file, as text (the plan alone) if the path ends in `.plan` or `.txt`, else as JSON."""
    path = Path(path)
    plan = to_file(file.plan, path)
    if path.suffix in _TEXT:
        write_whole(path, render(plan).encode())
    else:
        write_json(path, msgspec.structs.replace(file, plan=plan))


def load_plan(path: str | Path) -> PlanFile:
    """Read the file, as text if the path ends in `.plan` or `.txt`, else as JSON."""
    path = Path(path)
    with expecting(path, "plan"):
        if path.suffix in _TEXT:
            plan = parse(read_text(path, _LARGEST_TEXT, FileError), where=str(path))
            return PlanFile(plan=from_file(plan, path))
        file = read_json(path, PlanFile, kind="plan")
    file = msgspec.structs.replace(file, plan=from_file(file.plan, path))
    if file.cluster is not None:
        _check_cluster(file.cluster, str(path))
    return file


def _check_cluster(cluster: Cluster, where: str) -> None:
    """Check that a cluster from a plan file is as sound as one from a cluster file: valid names and figures above 0."""
    _need(is_name(cluster.name), "name", where)
    for key, kind in cluster.kinds.items():
        rates = (*kind.compute.values(), kind.memory, kind.memory_bandwidth, kind.bus, kind.peer)
        _need(kind.name == key and is_name(key) and _positive(*rates), f"device kind {key}", where)
    for key, host in cluster.hosts.items():
        _need(host.name == key and _sound_host(host, cluster), f"host {key}", where)
    _need(
        sum(sum(host.devices.values()) for host in cluster.hosts.values()) <= _MOST_DEVICES, "number of devices", where
    )
    for link in cluster.links:
        _need(_sound_link(link, cluster), f"link {' - '.join(link.between)}", where)


def _need(sound: bool, what: str, where: str) -> None:
    if not sound:
        raise FileError(
            f"the {what} of the embedded cluster is impossible",
            where=f"{where} at cluster",
            expected="known names and figures above 0",
            next="Make the plan again from its cluster file: isthmus plan",
        )


def _positive(*figures: float) -> bool:
    return all(0 < figure < math.inf for figure in figures)


def _sound_host(host: Host, cluster: Cluster) -> bool:
    known = is_name(host.name) and is_name(host.region) and all(host.devices[kind] > 0 for kind in host.devices)
    known = known and host.devices.keys() <= cluster.kinds.keys()
    return (
        known
        and _positive(host.bandwidth, host.nic, host.nic_in, host.bus, host.memory, host.cores)
        and host.latency >= 0
    )


def _sound_link(link: Link, cluster: Cluster) -> bool:
    hosts = all(name in cluster.hosts for name in link.between)
    regions = all(name in cluster.regions for name in link.between)
    trunk = (link.trunk,) if link.trunk is not None else ()
    return (hosts or regions) and _positive(link.bandwidth, *trunk) and 0 <= link.latency < math.inf
