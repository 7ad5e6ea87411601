"""The blocks that a worker computes: divided for tensor groups, with batch statistics over replicas, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from isthmus.model.runnable_blocks import Pieces
from isthmus.model.tensor_parallel.member_blocks import ParameterSlice, divide_blocks
from isthmus.runtime.batch_statistics import synchronised
from isthmus.runtime.checkpoint.extents import MemberCut
from isthmus.runtime.comm.channel import Channels
from isthmus.runtime.comm.step_sums import Meeting
from isthmus.runtime.pace import Pace
from isthmus.runtime.program import Program, StageRun
from isthmus.runtime.random.draws import Draw, Split

__all__ = ["Draws", "Placed", "on_device", "place"]

Draws = Sequence[Sequence[Draw]]  # the random operations of every block of a model


@dataclass
class Placed:
    """The modules of each run (by index), the cuts of tensor groups, and every block's random operations."""

    modules: dict[int, list[nn.Module]]
    cuts: dict[str, MemberCut]
    draws: list[Sequence[Draw]]


def place(
    program: Program, pieces: Pieces, draws: Draws, network: Channels, device: torch.device, pace: Pace
) -> Placed:
    """Return a worker's blocks, ready to run."""
    placed = Placed({}, {}, list(draws))
    for index, run in enumerate(program.runs):
        blocks = range(run.first, run.last + 1)
        modules = [pieces.blocks[block] for block in blocks]
        if len(run.group) > 1:
            modules = _divided(program, pieces, run, network, placed, pace)
        for stage, (first, last), replicas in zip(run.stages, run.ranges, run.replicas, strict=True):
            mixing = [b for b in range(first, last + 1) if pieces.graph.blocks[b].statistics]
            if mixing and len(replicas) > 1:
                meeting = Meeting(f"{program.job.name} statistics {stage}", replicas, program.device, network, pace)
                for block in mixing:
                    modules[block - run.first] = synchronised(modules[block - run.first], meeting.sum)
        placed.modules[index] = [on_device(module, device) for module in modules]
    return placed


def _divided(
    program: Program, pieces: Pieces, run: StageRun, network: Channels, placed: Placed, pace: Pace
) -> list[nn.Module]:
    """Return the run's blocks as this member of its tensor group computes them."""
    member, members = run.group.index(program.device), len(run.group)
    meeting = Meeting(f"{program.job.name} group {run.number}", run.group, program.device, network, pace)
    blocks = range(run.first, run.last + 1)
    own = divide_blocks(pieces, member=member, members=members, blocks=blocks, reduce=meeting.sum)
    placed.cuts |= {name: MemberCut.of(part) for name, part in own.slices.items()}
    for block in blocks:
        placed.draws[block] = [
            replace(draw, split=_split(own.random[draw.node])) if draw.node in own.random else draw
            for draw in placed.draws[block]
        ]
    return list(own.blocks)


def _split(part: ParameterSlice) -> Split:
    (start, _), whole = part.ranges[0], sum(part.sections)
    return Split(dim=part.dim, start=start, whole=whole)


def on_device(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a block to a device, with the constants and factory calls of its graph, which name the capturing device."""
    if device.type != "cpu":
        for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
            _move(inner, device)
    return module.to(device)


def _move(module: fx.GraphModule, device: torch.device) -> None:
    def moved(argument: Any) -> Any:
        return device if isinstance(argument, torch.device) else argument

    for node in module.graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
        content = _attribute(module, node.target) if node.op == "get_attr" else None
        if isinstance(content, torch.Tensor) and not isinstance(content, nn.Parameter):
            _set(module, node.target, content.to(device))
    module.recompile()


def _attribute(module: nn.Module, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _set(module: nn.Module, name: str, content: torch.Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        module = getattr(module, part)
    setattr(module, last, content)
