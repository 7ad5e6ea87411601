"""A sync between tensor groups of different sizes, whose members hold different parts of the same parameters.

Every member sends its gradients to the first of its group. That one joins them, takes part in the sync among the
groups' first members, and sends each member its part of the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.model.graph import BlockGraph
from isthmus.model.tensor_parallel.member_slices import ParameterSlice
from isthmus.runtime.checkpoint.extents import MemberCut
from isthmus.runtime.comm.channel import Channel, Channels
from isthmus.runtime.comm.syncs import SyncMethod, make_sync
from isthmus.runtime.program import BucketSpec, Program

__all__ = ["UnequalGroups"]

_UP, _DOWN = 1, 2  # tags


class UnequalGroups:
    """The sum over groups that each hold the bucket in parts of their own."""

    scatters = False

    def __init__(
        self, spec: BucketSpec, program: Program, network: Channels, graph: BlockGraph, cuts: Mapping[str, MemberCut]
    ) -> None:
        self.group = next(group for group in spec.groups if program.device in group)
        self.leads = self.group[0] == program.device
        others = self.group[1:] if self.leads else self.group[:1]
        self._channels: dict[str, Channel] = {
            other: network.channel(f"{program.job.name} parts {spec.name}", other) for other in others
        }
        self._sync: SyncMethod | None = make_sync(spec, program, network) if self.leads else None
        self._shapes = {name: graph.parameter[name].shape for name in spec.parameters}
        self._slices = {
            name: [
                ParameterSlice(dim=cut.dim, sections=cut.sections, member=member, members=len(self.group))
                for member in range(len(self.group))
            ]
            for name, cut in cuts.items()
            if name in self._shapes
        }

    def all_reduce(self, flat: Tensor) -> None:
        """Replace `flat` by this member's part of the sum over all groups."""
        if not self.leads:
            channel = self._channels[self.group[0]]
            down = channel.receive(flat, _DOWN)
            channel.send(flat.clone(), _UP).wait()
            down.wait()
            return
        parts = [flat, *(torch.empty_like(flat) for _ in self.group[1:])]
        for work in [self._channels[o].receive(parts[i], _UP) for i, o in enumerate(self.group) if i]:
            work.wait()
        whole = self._joined(parts)
        if self._sync is not None:
            self._sync.all_reduce(whole)
        sent = []
        for member, other in enumerate(self.group):
            part = self._cut(whole, member)
            if other == self.group[0]:
                flat.copy_(part)
            else:
                sent.append(self._channels[other].send(part, _DOWN))
        for work in sent:
            work.wait()

    reduce_scatter = all_reduce

    def all_gather(self, flat: Tensor) -> None:
        """Do nothing: state cannot be sharded over groups of different sizes, so the weights are whole everywhere."""

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole bucket, flat, joined from the members' flat parts."""
        found, at = [], 0
        for name, shape in self._shapes.items():
            slices = self._slices.get(name)
            local = list(shape)
            if slices is not None:
                local[slices[0].dim] //= len(self.group)
            size = torch.Size(local).numel()
            rows = [part[at : at + size].view(local) for part in parts]
            found.append((rows[0] if slices is None else slices[0].join(rows)).reshape(-1))
            at += size
        return torch.cat(found)

    def _cut(self, whole: Tensor, member: int) -> Tensor:
        found, at = [], 0
        for name, shape in self._shapes.items():
            size = torch.Size(shape).numel()
            tensor = whole[at : at + size].view(shape)
            slices = self._slices.get(name)
            found.append((tensor if slices is None else slices[member].cut(tensor)).reshape(-1))
            at += size
        return torch.cat(found)
