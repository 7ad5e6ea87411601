"""Sums over a few workers in the middle of a step: for tensor groups and batch statistics.

All members call in the same order. Every member sends its part to every other and adds the parts in the order of the
members, so all get the same bits; large tensors of more than two members go around a ring.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.runtime.comm.channel import Channel, Channels
from isthmus.runtime.comm.syncs import Ring
from isthmus.runtime.pace import Pace

__all__ = ["Meeting"]

_LARGE = 1 << 16  # elements


class Meeting:
    """The members of a group, this worker among them, that sum tensors together."""

    def __init__(self, name: str, members: tuple[str, ...], me: str, network: Channels, pace: Pace) -> None:
        self.members, self.me, self._pace = members, me, pace
        self._channels: dict[str, Channel] = {
            other: network.channel(f"{name} meeting", other) for other in members if other != me
        }
        self._ring = _ring(name, members, me, network) if len(members) > 2 else None
        self._calls = 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all members' tensors as a new tensor."""
        self._pace.keep()
        total = self._sum(tensor)
        self._pace.start()
        return total

    def _sum(self, tensor: Tensor) -> Tensor:
        if self._ring is not None and tensor.numel() >= _LARGE:
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._ring.all_reduce(total.view(-1))
            return total
        own = tensor.detach().contiguous()
        tag, self._calls = self._calls % (1 << 20), self._calls + 1
        parts = {other: torch.empty_like(own) for other in self._channels}
        receives = [self._channels[other].receive(part, tag) for other, part in parts.items()]
        sends = [channel.send(own, tag) for channel in self._channels.values()]
        for work in receives:
            work.wait()
        total = torch.zeros_like(own)
        for member in self.members:
            total += own if member == self.me else parts[member]
        for work in sends:
            work.wait()
        return total


def _ring(name: str, members: tuple[str, ...], me: str, network: Channels) -> Ring:
    position, count = members.index(me), len(members)
    previous, following = members[position - 1], members[(position + 1) % count]
    return Ring(network.channel(f"{name} ring", previous), network.channel(f"{name} ring", following), position, count)
