"""Emulate a cluster for training: its hosts and links as a `World`, and its devices by their relative speeds.

No processor here is as fast as the devices of most clusters, so the devices keep only their proportions. Let r_d be
the fp32 rate of device d and R the largest of these rates. Then d computes c R / r_d times slower than one core of
this machine, with the smallest c >= 1 for which all devices of the cluster together need no more than `cores` cores:

    sum over d of r_d / (c R) <= cores

One machine can emulate the links as they are, so links are not slowed down. Training times measured here therefore
compare plans for a cluster in which computing relates to sending as it does here. A plan for such a world is made with
times measured in it (`isthmus profile MODEL --emulate CLUSTER`), and its step time is predicted from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from isthmus.cluster.spec import TCP_PAYLOAD, Cluster, DeviceKind
from isthmus.emulate.world import World
from isthmus.model.profile import BlockTime, DeviceCosts, NetworkCosts, Profile

__all__ = ["Emulation", "as_emulated", "paces"]


class Emulation:
    """A world with devices of unequal speed. Leaving the context removes everything."""

    def __init__(self, cluster: Cluster, hosts: Sequence[str] | None = None, *, cores: float = 1.0) -> None:
        """Emulate the given hosts of the cluster (default: all); the other hosts have nothing to do."""
        self._cluster, self._paces = cluster, paces(cluster, cores)
        self.world = World(cluster, hosts=hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.world.close()

    @property
    def interface(self) -> str:
        """Return the network interface on which workers listen; empty for loopback."""
        return self.world.interface if self.world.shaped else ""

    def command(self, device: str, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` on the device's host."""
        return self.world.command(self._cluster.devices[device].host, argv)

    def slower(self, device: str) -> float:
        """Return how many times slower than a core of this machine a device computes."""
        return self._paces[self._cluster.devices[device].kind]

    def check(self) -> None:
        """Raise RunError if the world was broken from outside; in that case the world is removed."""
        self.world.check()

    def describe(self) -> str:
        """Return a text for people that says how and where the devices run; it follows `2 devices of the plan,`."""
        slowest, fastest = max(self._paces.values()), min(self._paces.values())
        speed = f"1/{fastest:.3g}" if slowest == fastest else f"1/{fastest:.3g} to 1/{slowest:.3g}"
        hosts = len(self.world.hosts)
        where = f"{hosts} emulated host{'s' * (hosts > 1)}" if self.world.shaped else "loopback, links not emulated"
        return f"emulated on this machine: {where}, at {speed} of a core's speed"


def paces(cluster: Cluster, cores: float = 1.0) -> dict[str, float]:
    """Return for each kind of device how many times slower than a core of this machine it is emulated."""
    kinds = {name: cluster.kinds[name] for host in cluster.hosts.values() for name in host.devices}
    rates = {name: _rate(kind) for name, kind in kinds.items()}
    fastest = max(rates.values())
    together = sum(rates[device.kind] for device in cluster.devices.values()) / fastest
    slowed = max(1.0, together / cores)
    return {name: slowed * fastest / rate for name, rate in rates.items()}


def _rate(kind: DeviceKind) -> float:
    return kind.compute.get("fp32") or max(kind.compute.values())


def as_emulated(measured: Profile, slower: Mapping[str, float]) -> Profile:
    """Turn a profile of one core of this machine into a profile of the device kinds that are emulated on it.

    Everything that the computing thread does is slowed down; adding up gradients and sending are not. Packets on the
    emulated links carry headers, so the network's payload fraction is that of TCP unless it was measured.
    """

    def block(time: BlockTime, kind: str, factor: float) -> BlockTime:
        seconds = {name: getattr(time, name) * factor for name in ("forward_seconds", "backward_seconds")}
        return msgspec.structs.replace(time, device=kind, **seconds)

    def device(costs: DeviceCosts, kind: str, factor: float) -> DeviceCosts:
        rate = costs.update_bandwidth
        return msgspec.structs.replace(
            costs,
            device=kind,
            action_seconds=costs.action_seconds * factor,
            step_seconds=costs.step_seconds * factor,
            update_bandwidth=None if rate is None else rate / factor,
        )

    return msgspec.structs.replace(
        measured,
        blocks=tuple(block(time, kind, factor) for kind, factor in slower.items() for time in measured.blocks),
        network=measured.network or NetworkCosts(payload=TCP_PAYLOAD),
        devices=tuple(device(costs, kind, factor) for kind, factor in slower.items() for costs in measured.devices),
    )
