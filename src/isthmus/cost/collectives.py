"""Collectives as the messages that the runtime sends.

Each function takes, for every participant, the task after which it is ready, and gives the task after which it has the
result. Messages of one device leave one after another, in the order they are ready; so while one travels the next is
sent, and several segments or buckets in flight hide the latency.

- ring: n participants, chunks of bytes / n; in round k each sends on to its neighbour what it got in round k - 1.
  All-reduce takes 2(n - 1) rounds, reduce-scatter and all-gather n - 1 each.
- tree: in each region a chain towards its first participant (the leader), a ring of the leaders, the chain back.
- server: all send to the root, the root sends the sum back to all.
- factors: every participant sends its inputs and output gradients of each micro-batch to every other. Members of
  tensor groups send all of them to their like (which side of a weight is split is not known), and each redoes its own
  part of the product.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled, lean
from isthmus.cost.emit import GATE, SYNCING, TaskList, edge, message, task
from isthmus.cost.network import SYNC, Wires

__all__ = ["server", "spread", "steps_of_ring", "tree"]

Ints = npt.NDArray[np.int32]


@lean
def steps_of_ring(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, size: float, rounds: int, kind: int, owner: int
) -> None:
    """`rounds` rounds of a ring over `devices` with chunks of size / n; `done` is not `ready`.

    Until round n - 1 a participant adds its own part to what it sends on, so it must be ready itself.
    """
    n = len(devices)
    lanes = SYNC * len(wires.host_of)
    for i in range(n):
        done[i] = ready[i]
    for k in range(rounds):
        held = done[0]
        for i in range(n):
            j = (i + 1) % n
            own = ready[i] if 0 < k < n and kind == SYNCING else -1
            got = message(out, wires, held, own, lanes + devices[i], devices[i], devices[j], size / n, kind, owner, k)
            held, done[j] = done[j], got


@compiled
def tree(out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, size: float, owner: int) -> None:
    """Reduce along a chain inside each region, ring over the leaders, and back along the chains."""
    n = len(devices)
    lanes = SYNC * len(wires.host_of)
    leader = np.empty(n, np.int32)  # of each participant
    leaders = np.empty(n, np.int32)
    count = 0
    for i in range(n):
        leader[i] = i
        for q in range(count):
            if wires.region_of[devices[leaders[q]]] == wires.region_of[devices[i]]:
                leader[i] = leaders[q]
        if leader[i] == i:
            leaders[count] = i
            count += 1
    held = ready.copy()
    for q in range(count):
        last = -1  # the chain runs from the region's last participant to its leader
        for i in range(n - 1, -1, -1):
            if leader[i] == leaders[q]:
                if last >= 0:
                    got = message(
                        out, wires, held[last], -1, lanes + devices[last], devices[last], devices[i], size, SYNCING,
                        owner, 0,
                    )  # fmt: skip
                    held[i] = combine(out, held[i], got, owner)
                last = i
    heads = devices[leaders[:count]]
    summed = held[leaders[:count]]
    if count > 1:
        steps_of_ring(out, wires, heads, held[leaders[:count]], summed, size, 2 * (count - 1), SYNCING, owner)
    for q in range(count):
        last = leaders[q]
        done[last] = summed[q]
        for i in range(n):
            if leader[i] == leaders[q] and i != leaders[q]:
                done[i] = message(
                    out,
                    wires,
                    done[last],
                    -1,
                    lanes + devices[last],
                    devices[last],
                    devices[i],
                    size,
                    SYNCING,
                    owner,
                    1,
                )
                last = i


@lean
def server(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, size: float, root: int, owner: int
) -> None:
    """All to the root, the root to all."""
    lanes = SYNC * len(wires.host_of)
    summed = task(out, -1, 0.0, 0.0, -1, GATE, owner, 0)
    for i in range(len(devices)):
        arrived = message(out, wires, ready[i], -1, lanes + devices[i], devices[i], root, size, SYNCING, owner, 0)
        edge(out, arrived, summed)
    for i in range(len(devices)):
        done[i] = message(out, wires, summed, -1, lanes + root, root, devices[i], size, SYNCING, owner, 1)


@lean
def spread(
    out: TaskList, wires: Wires, devices: Ints, sender: int, ready: int, size: float, got: Ints, owner: int
) -> None:
    """One participant's message to every other; each arrival is awaited by the others' task `got`."""
    lane = SYNC * len(wires.host_of) + devices[sender]
    for i in range(len(devices)):
        if i != sender:
            edge(
                out, message(out, wires, ready, -1, lane, devices[sender], devices[i], size, SYNCING, owner, 0), got[i]
            )


@lean
def combine(out: TaskList, a: int, b: int, owner: int) -> int:
    """A task that has ended when both have."""
    both = task(out, -1, 0.0, 0.0, -1, GATE, owner, 0)
    edge(out, a, both)
    edge(out, b, both)
    return both
