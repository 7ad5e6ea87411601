"""The difference between two plans: which parameters move where, how many bytes move, and which settings differ.

A device must receive what it will hold less what it holds (`plan.parameter_pieces`). Each missing piece comes from the
nearest device that has it: on the same host, then in the same region, then anywhere, in the cluster's order. What no
device of the cluster has is new: it is initialised, or read from a checkpoint. Gradients do not move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from isthmus.cluster.spec import Cluster
from isthmus.model.graph import BlockGraph
from isthmus.plan.parameter_pieces import (
    Key,
    Pieces,
    Range,
    Weight,
    common,
    held_pieces,
    length,
    subtract,
    weights_of,
)
from isthmus.plan.text import render_replica, render_schedule, render_stage, render_sync
from isthmus.plan.types import Pipeline, Plan, Pool
from isthmus.units import format_bytes

__all__ = ["Diff", "Drop", "Move", "SettingChange", "diff"]


class _Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the diff's types: immutable, named fields."""


class Move(_Frozen, frozen=True, kw_only=True):
    """Elements of one parameter that a device receives from one source (None: they are new)."""

    to: str
    source: str | None
    job: str
    parameter: str
    weights: int  # elements
    state: int  # elements
    bytes: float


class Drop(_Frozen, frozen=True, kw_only=True):
    """Elements of one parameter that a device holds and will no longer hold."""

    device: str
    job: str
    parameter: str
    weights: int
    state: int
    bytes: float


class SettingChange(_Frozen, frozen=True, kw_only=True):
    """A setting of a job that differs; its value is None in a plan that lacks it."""

    job: str
    what: str
    old: str | None
    new: str | None


class Diff(_Frozen, frozen=True, kw_only=True):
    """All that changes between two plans."""

    moves: tuple[Move, ...]
    drops: tuple[Drop, ...]
    changes: tuple[SettingChange, ...]

    @property
    def moved_bytes(self) -> float:
        """Return the bytes that go from one device to another."""
        return sum(move.bytes for move in self.moves if move.source is not None)

    @property
    def new_bytes(self) -> float:
        """Return the bytes that no device has, which are initialised or read from a checkpoint."""
        return sum(move.bytes for move in self.moves if move.source is None)

    def text(self) -> str:
        """Return a line for each changed setting and each device that receives or drops something, then the sum."""
        lines = [
            f"{change.job}, {change.what}: {change.old or 'none'} -> {change.new or 'none'}" for change in self.changes
        ]
        devices: dict[str, dict[str, list[Move | Drop]]] = defaultdict(lambda: defaultdict(list))
        for move in self.moves:
            verb = f"receives from {move.source}" if move.source is not None else "starts anew"
            devices[move.to][verb].append(move)
        for drop in self.drops:
            devices[drop.device]["drops"].append(drop)
        for device, verbs in devices.items():
            lines.append(f"{device}: {'; '.join(f'{verb} {_amount(items)}' for verb, items in verbs.items())}")
        lines.append(f"in all: {format_bytes(self.moved_bytes)} moved, {format_bytes(self.new_bytes)} new")
        return "\n".join(lines) + "\n"


def _amount(items: list[Move | Drop]) -> str:
    plural = "" if len(items) == 1 else "s"
    return f"{len(items)} parameter{plural}, {format_bytes(sum(item.bytes for item in items))}"


def diff(old: Plan, new: Plan, cluster: Cluster, models: Mapping[str, BlockGraph]) -> Diff:
    """Return what must be done to go from one plan to the other on the cluster as it is now.

    Devices of the old plan that the cluster no longer has are lost with all they held. `models` has the block graph of
    each job of either plan by the job's name.
    """
    before = {device: held for device, held in held_pieces(old, models).items() if device in cluster.devices}
    after = held_pieces(new, models)
    return Diff(
        moves=tuple(_moves(before, after, cluster, weights_of(new, models))),
        drops=tuple(_drops(before, after, weights_of(old, models))),
        changes=tuple(_changes(old, new)),
    )


class _Sources:
    """The devices that hold each piece, nearest first."""

    def __init__(self, pieces: Pieces, cluster: Cluster) -> None:
        self._pieces = pieces
        self._cluster = cluster
        self._at: dict[tuple[Key, str], list[str]] = defaultdict(list)  # key and host, region or "" -> devices
        for device in cluster.devices:
            host = cluster.host_of(device)
            for key in pieces.get(device, {}):
                for place in (f"host {host.name}", f"region {host.region}", ""):
                    self._at[key, place].append(device)

    def supply(self, device: str, key: Key, missing: list[Range]) -> Iterator[tuple[str | None, int]]:
        """Yield (source, elements) until nothing is missing; the source of what no device has is None."""
        host = self._cluster.host_of(device)
        for place in (f"host {host.name}", f"region {host.region}", ""):
            for source in self._at.get((key, place), ()):
                if not missing:
                    return
                held = self._pieces[source][key]
                taken = length(common(missing, held))
                if taken:
                    missing = subtract(missing, held)
                    yield source, taken
        if missing:
            yield None, length(missing)


def _moves(
    before: Pieces, after: Pieces, cluster: Cluster, weights: Mapping[tuple[str, str], Weight]
) -> Iterator[Move]:
    sources = _Sources(before, cluster)
    for device, held in after.items():
        counts: dict[tuple[str, str, str | None], list[int]] = {}
        for key, ranges in held.items():
            missing = subtract(ranges, before.get(device, {}).get(key, ()))
            for source, elements in sources.supply(device, key, missing):
                counts.setdefault((key[0], key[1], source), [0, 0])[key[2]] += elements
        for (job, name, source), (weight, state) in counts.items():
            size = weights[job, name].bytes(weight, state)
            yield Move(to=device, source=source, job=job, parameter=name, weights=weight, state=state, bytes=size)


def _drops(before: Pieces, after: Pieces, weights: Mapping[tuple[str, str], Weight]) -> Iterator[Drop]:
    for device, held in before.items():
        counts: dict[tuple[str, str], list[int]] = {}
        for key, ranges in held.items():
            gone = length(subtract(ranges, after.get(device, {}).get(key, ())))
            if gone:
                counts.setdefault(key[:2], [0, 0])[key[2]] += gone
        for (job, name), (weight, state) in counts.items():
            size = weights[job, name].bytes(weight, state)
            yield Drop(device=device, job=job, parameter=name, weights=weight, state=state, bytes=size)


def _changes(old: Plan, new: Plan) -> Iterator[SettingChange]:
    before, after = _settings(old), _settings(new)
    for job, what in dict.fromkeys([*before, *after]):
        one, other = before.get((job, what)), after.get((job, what))
        if one != other:
            yield SettingChange(job=job, what=what, old=one, new=other)


def _settings(plan: Plan) -> dict[tuple[str, str], str]:
    """Return the settings of the plan that people would compare, by job and name of the setting."""
    found: dict[tuple[str, str], str] = {}
    for part in plan.parts:
        if isinstance(part, Pipeline):
            found.update({(part.job.name, what): text for what, text in _pipeline_settings(part).items()})
        else:
            found.update(_pool_settings(part))
    return found


def _pipeline_settings(pipeline: Pipeline) -> dict[str, str]:
    found = {"schedule": render_schedule(pipeline), "precision": str(pipeline.precision)}
    for stage in pipeline.stages:
        for replica in stage.replicas:
            what = f"replica at {replica.devices[0]}" if replica.devices else "replica"
            text = f"{render_stage(stage)}, on {render_replica(replica)}"
            found[what] = f"{found[what]}; {text}" if what in found else text
    found.update({f"sync {sync.bucket}": render_sync(sync) for sync in pipeline.syncs})
    return found


def _pool_settings(pool: Pool) -> dict[tuple[str, str], str]:
    devices = ", ".join(
        f"{device} cap {format_bytes(cap)}" for device, cap in zip(pool.devices, pool.caps, strict=False)
    )
    found: dict[tuple[str, str], str] = {}
    for job in pool.jobs:
        found[job.job.name, "pool"] = f"{pool.policy} on {devices}"
        found[job.job.name, "shards"] = "; ".join(f"{shard.first} .. {shard.last}" for shard in job.shards)
        found[job.job.name, "precision"] = job.precision
    return found
