"""Writing task graphs in compiled code: tasks, edges, and messages with relays.

A list counts what is written even when it is full, so that a caller whose list was too short learns the room it needs
and writes again.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import inlined
from isthmus.cost.event_engine import Tasks
from isthmus.cost.network import Wires

__all__ = [
    "ACTIVATION",
    "BACKWARD",
    "FORWARD",
    "GATE",
    "GRADIENT",
    "HOST_UPDATE",
    "KINDS",
    "LOADING",
    "REBUILD",
    "STORING",
    "SYNCING",
    "TOTALS",
    "UPDATE",
    "TaskList",
    "beside",
    "edge",
    "message",
    "new_list",
    "task",
]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

FORWARD, BACKWARD, UPDATE, ACTIVATION, GRADIENT, SYNCING, LOADING, STORING, REBUILD, HOST_UPDATE, GATE = range(11)
TOTALS = 11
KINDS = (
    "forward", "backward", "update", "activation", "gradient", "sync", "load", "store", "rebuild", "host update",
    "gate", "totals",
)  # fmt: skip


LANE, ROUTE, KIND, PART, OWNER, TURN = range(6)
SECONDS, BYTES = range(2)


class TaskList(NamedTuple):
    """The tasks being written.

    `owner` is a run (computing, messages between runs) or a bucket (syncs) of part `part`.
    """

    ints: Ints  # [6, room]: rows LANE, ROUTE, KIND, PART, OWNER, TURN
    floats: Floats  # [2, room]: rows SECONDS, BYTES
    edges: Ints  # [2, room]: before, after
    size: npt.NDArray[np.int64]  # tasks, edges, present part, messages between devices that cannot talk, lanes

    @property
    def kind(self) -> Ints:
        """Return the kind of each task as an index into KINDS."""
        return self.ints[KIND, : self.size[0]]

    @property
    def part(self) -> Ints:
        """Return the job of each task, by its number in the plan."""
        return self.ints[PART, : self.size[0]]

    @property
    def owner(self) -> Ints:
        """Return the run or bucket of each task."""
        return self.ints[OWNER, : self.size[0]]

    @property
    def turn(self) -> Ints:
        """Return the micro-batch of each task, or the round of its collective."""
        return self.ints[TURN, : self.size[0]]

    @property
    def lanes(self) -> int:
        """Return the number of lanes: those of the fabric and one for each pair of runs and direction."""
        return int(self.size[4])

    @property
    def short(self) -> bool:
        """Return whether more was written than there is room for."""
        return bool(self.size[0] > self.ints.shape[1] or self.size[1] > self.edges.shape[1])

    def tasks(self) -> Tasks:
        """Return the tasks that were written, in the form that the engine takes."""
        n, e = self.size[0], self.size[1]
        return Tasks(
            lane=self.ints[LANE, :n],
            seconds=self.floats[SECONDS, :n],
            bytes=self.floats[BYTES, :n],
            route=self.ints[ROUTE, :n],
            before=self.edges[0, :e],
            after=self.edges[1, :e],
        )


def new_list(tasks: int, edges: int) -> TaskList:
    """Return an empty list with room for so many tasks and edges."""
    return TaskList(
        np.empty((6, tasks), np.int32), np.empty((2, tasks)), np.empty((2, edges), np.int32), np.zeros(5, np.int64)
    )


@inlined
def task(out: TaskList, lane: int, seconds: float, bytes_: float, route: int, kind: int, owner: int, turn: int) -> int:
    """Write one task, and return its number."""
    n = out.size[0]
    out.size[0] = n + 1
    if n < out.ints.shape[1]:
        out.ints[LANE, n], out.ints[ROUTE, n], out.ints[KIND, n] = lane, route, kind
        out.ints[PART, n], out.ints[OWNER, n], out.ints[TURN, n] = out.size[2], owner, turn
        out.floats[SECONDS, n], out.floats[BYTES, n] = seconds, bytes_
    return int(n)


@inlined
def edge(out: TaskList, before: int, after: int) -> None:
    """Let task `after` wait for task `before`; a number below 0 means nothing to wait for."""
    if before < 0 or after < 0:
        return
    n = out.size[1]
    out.size[1] = n + 1
    if n < out.edges.shape[1]:
        out.edges[0, n], out.edges[1, n] = before, after


@inlined
def beside(lane: int) -> int:
    """Return the lane of a message that bypasses the queue of `lane`.

    The message shares links with others but does not occupy the lane, although a timeline shows it there. The engine
    takes any number below 0 for no lane; the same function gives the lane back.
    """
    return -2 - lane


@inlined
def message(
    out: TaskList, wires: Wires, ready: int, also: int, lane: int, source: int, target: int, bytes_: float,
    after: float, kind: int, owner: int, turn: int,
) -> int:  # fmt: skip
    """Write a message between two devices once `ready` and `also` have ended, relayed where the route says so.

    Return the task that ends when the message has been dealt with, `after` seconds after its arrival. Messages between
    devices that cannot talk are counted; a plan with such messages has no price.
    """
    if source == target:
        return ready
    route = wires.route_of[source, target]
    if route < 0:
        out.size[3] += 1
        return ready
    last = ready
    while True:
        here = lane if wires.hops[1, route] < 0 else wires.hops[1, route]
        following = wires.hops[0, route]
        sent = task(out, here, after if following < 0 else 0.0, bytes_, route, kind, owner, turn)
        edge(out, last, sent)
        if last == ready:
            edge(out, also, sent)
        last, route = sent, following
        if route < 0:
            return last
