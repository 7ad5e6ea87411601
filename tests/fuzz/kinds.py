"""The kinds of file that Isthmus reads: good ones to start from, how each is read, and what a good one must then stand.

A new kind of file is one more row of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from isthmus.cluster.load import cluster_digest, load_cluster, parse_cluster
from isthmus.cluster.spec import Cluster
from isthmus.cluster.write import cluster_yaml
from isthmus.files import encode_json
from isthmus.model.digest import digest_of
from isthmus.model.graph import BlockGraph
from isthmus.model.job import Job, Workload
from isthmus.model.load_job import check_job, load_jobs
from isthmus.model.load_profile import load_profile
from isthmus.model.profile import (
    BlockTime,
    CollectiveTime,
    DeviceCosts,
    NetworkCosts,
    Profile,
    along,
)
from isthmus.model.saved import read_graph
from isthmus.plan.file import PlanFile, load_plan
from isthmus.plan.text import parse, render
from isthmus.plan.types import Pipeline
from isthmus.plan.validate import check
from isthmus.runtime.checkpoint.manifest import Manifest, encode_manifest, read_manifest
from tests.plan import golden_files
from tests.plan.small_models import chain

__all__ = ["KINDS", "Kind", "sign"]

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`read` gives an object or raises one of our errors; `stands` asserts what every object that was read can do."""

    suffix: str
    seeds: Callable[[], tuple[bytes, ...]]
    read: Callable[[Path], Any]
    stands: Callable[[Any], None]


def sign(plain: Any) -> Any:
    """A model file's values with the digest that they should have, so that what lies behind the digest is read too."""
    try:
        graph = msgspec.convert(plain["graph"], BlockGraph)
        return {**plain, "graph": {**plain["graph"], "digest": digest_of(graph)}}
    except (msgspec.MsgspecError, OverflowError, LookupError, TypeError, UnicodeError):
        return plain  # no graph, so no digest


def _files(folder: str, pattern: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((ROOT / folder).glob(pattern)))


def _of_kind(kind: bytes) -> tuple[bytes, ...]:
    return tuple(data for data in _files("examples/jobs", "*.yaml") if b"kind: " + kind in data)


def _models() -> tuple[bytes, ...]:
    graphs = (chain(4), chain(3, tied=True), chain(5, heads=0, skips=True))
    files = ({"kind": "model", "version": 1, "graph": graph} for graph in graphs)
    return tuple(msgspec.json.format(msgspec.json.encode(file)) for file in files)


def _profiles() -> tuple[bytes, ...]:
    point = BlockTime(
        block="ab12", name="h.0", device="A40", precision="bf16", samples=4, forward_seconds=1e-3, backward_seconds=2e-3
    )
    more = (point, *(msgspec.structs.replace(point, samples=samples, tensor=2) for samples in (1, 2, 16)))
    ring = CollectiveTime(how="ring", hosts=("va1", "va1", "fra"), bytes=25e6, seconds=0.5)
    server = CollectiveTime(how="server", hosts=("va1", "fra"), bytes=1e6, seconds=0.1, root="fra")
    costs = DeviceCosts(device="A40", action_seconds=1e-4, update_bandwidth=1e11, add_bandwidth=3e9, context_bytes=6e8)
    profiles = (
        Profile(
            origin="a machine, a date", blocks=more, collectives=(ring, server), devices=(costs,),
            network=NetworkCosts(payload=0.973, message_seconds=1e-4),
        ),
        Profile(blocks=(point,)),
    )  # fmt: skip
    return tuple(msgspec.json.format(msgspec.json.encode(_profile_file(profile))) for profile in profiles)


def _profile_file(profile: Profile) -> dict[str, Any]:
    return {"kind": "profile", "version": 1, **msgspec.to_builtins(profile)}


@cache
def _known() -> tuple[Cluster, BlockGraph, BlockGraph]:
    return golden_files.cluster(), chain(), chain(tied=True)


def _read_plan(path: Path) -> PlanFile:
    """The plan, re-checked against its own cluster or the one in hand, as before every use."""
    file = load_plan(path)
    cluster, plain, tied = _known()
    parts = [(part,) if isinstance(part, Pipeline) else part.jobs for part in file.plan.parts]
    jobs = [item.job for part in parts for item in part]
    models = {job.name: tied if job.model == "small:tied" else plain for job in jobs}
    check(file.plan, file.cluster or cluster, models)
    return file


def _cluster_stands(cluster: Cluster) -> None:
    assert cluster_digest(parse_cluster(cluster_yaml(cluster))) == cluster_digest(cluster)


def _jobs_stand(found: Job | Workload) -> None:
    for job in found.jobs if isinstance(found, Workload) else (found,):
        check_job(job)
    encode_json(found)


def _plan_stands(file: PlanFile) -> None:
    assert parse(render(file.plan)) == file.plan
    encode_json(file)


def _model_stands(graph: BlockGraph) -> None:
    assert digest_of(graph) == graph.digest
    encode_json(graph)


def _checkpoint_stands(manifest: Manifest) -> None:
    again = msgspec.json.decode(encode_manifest(manifest), type=Manifest)
    assert msgspec.structs.replace(again, digest=manifest.digest) == manifest  # older files have none


def _profile_stands(profile: Profile) -> None:
    """It comes back from its own file, and gives a time for any number of samples and bytes."""
    assert msgspec.convert(msgspec.to_builtins(profile), Profile) == profile
    encode_json(profile)
    for points in profile.block_points.values():
        lines = [row for row in points if len(row) > 1]
        assert all(0.0 <= along(row, samples) < float("inf") for row in lines for samples in (1, 7, 10**9))
    for time in profile.collectives:
        found = profile.collective(time.how, time.hosts, time.root, time.bytes)
        assert found == (time.seconds, True)


KINDS = {
    "cluster": Kind(
        suffix=".yaml",
        seeds=lambda: _files("examples/clusters", "*.yaml") + _files("tests/plan/golden", "*.yaml"),
        read=load_cluster,
        stands=_cluster_stands,
    ),
    "job": Kind(suffix=".yaml", seeds=lambda: _of_kind(b"job"), read=load_jobs, stands=_jobs_stand),
    "workload": Kind(suffix=".yaml", seeds=lambda: _of_kind(b"workload"), read=load_jobs, stands=_jobs_stand),
    "plan": Kind(
        suffix=".json",
        seeds=lambda: tuple((golden_files.FOLDER / f"{name}.json").read_bytes() for name in golden_files.NAMES),
        read=_read_plan,
        stands=_plan_stands,
    ),
    "plan-text": Kind(
        suffix=".plan",
        seeds=lambda: _files("tests/plan/golden", "*.plan"),
        read=_read_plan,
        stands=_plan_stands,
    ),
    "model": Kind(suffix=".json", seeds=_models, read=read_graph, stands=_model_stands),
    "profile": Kind(suffix=".json", seeds=_profiles, read=load_profile, stands=_profile_stands),
    "checkpoint": Kind(
        suffix=".json",
        seeds=lambda: _files("tests/fuzz/corpus/checkpoint", "whole*.json"),
        read=read_manifest,
        stands=_checkpoint_stands,
    ),
}
