"""Totals: what all devices of a job must know of a step before they update.

One is the number of losses. Each device that computes the last stage tells the leader, the first of them, after its
last forward, and the leader tells all. Where gradients are clipped or scaled, the other is the norm of the whole
gradient. Each device tells the leader after all its syncs, once the leader has come that far itself and has said that
it listens; then the leader answers. These messages have no bytes and go over connections of their own, so they take
latency only.

Devices stand for workers: other members of a tensor group are next to its first device, and the root of a server that
has no stage knows its part before the participants do.
"""

from __future__ import annotations

from isthmus.compiled import lean
from isthmus.cost.network import Wires, latency_between
from isthmus.cost.task_list import GATE, TOTALS, TaskList, edge, message, task
from isthmus.cost.task_types import Costs, State
from isthmus.plan.schedule import Shape, StageRuns

__all__ = ["totals"]


@lean
def note(out: TaskList, wires: Wires, ready: int, source: int, target: int, turn: int) -> int:
    """Write a message of no bytes on a connection of its own."""
    return message(out, wires, ready, -1, -1, source, target, 0.0, 0.0, TOTALS, -1, turn)


@lean
def totals(
    out: TaskList, wires: Wires, shape: Shape, runs: StageRuns, costs: Costs, state: State, micro_batches: int
) -> None:
    """Write the tasks that tell all devices, before they update, the number of losses and any gradient norm."""
    s = len(shape.first) - 1
    first, judges = shape.replicas[s], 1 if shape.duplicate[s] else shape.replicas[s + 1] - shape.replicas[s]
    leader = shape.device[first]
    workers = 0
    for d in range(len(state.update)):
        state.settled[d] = state.update[d]
        workers += state.update[d] >= 0
    if workers < 2:
        return
    known = task(out, -1, 0.0, 0.0, -1, GATE, -1, 0)
    for q in range(first, first + judges):
        u = runs.of[q]
        judged = state.finish[0, state.base[u] + micro_batches * runs.slices[u] - 1]
        edge(out, note(out, wires, judged, shape.device[q], leader, 0), known)
    if not costs.measured:
        for d in range(len(state.update)):
            if state.update[d] >= 0:
                edge(out, note(out, wires, known, leader, d, 0), state.update[d])
        return
    for d in range(len(state.update)):
        if state.update[d] >= 0:
            state.settled[d] = note(out, wires, known, leader, d, 0)  # for now: when it knows the counts
    own = task(out, -1, 0.0, 0.0, -1, GATE, -1, 0)  # the leader listens
    told = task(out, -1, 0.0, 0.0, -1, GATE, -1, 0)
    edge(out, own, told)
    for d in range(len(state.update)):
        if state.update[d] < 0:
            continue
        counted = state.settled[d]
        if d != leader:
            state.settled[d] = out.size[0]  # the message that is written next, or its first hop
            after = latency_between(wires, leader, d)
            sent = message(out, wires, counted, state.last[d], -1, d, leader, 0.0, after, TOTALS, -1, 1)
            edge(out, own, state.settled[d])
            edge(out, sent, told)
        else:
            state.settled[d] = own
            edge(out, counted, state.settled[d])
            edge(out, state.last[d], state.settled[d])
        edge(out, note(out, wires, told, leader, d, 1), state.update[d])
