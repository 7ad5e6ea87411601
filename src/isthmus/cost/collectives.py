"""Collectives, written as the messages that the runtime sends.

Each function takes, for every participant, the task after which it is ready, and gives the task after which it has the
result. The messages of one device leave one after another, in the order in which they become ready. While one travels
the next is sent, so several buckets in flight hide the latency.

- ring: n participants send chunks of bytes / n; in round k each passes on to its neighbour what it got in round k - 1.
  All-reduce takes 2(n - 1) rounds, or n - 1 in which all bytes go around (`plan.ring`); reduce-scatter and all-gather
  take n - 1 each.
- tree: each region reduces along a chain towards its first participant (the leader), the leaders form a ring, and the
  result goes back along the chains.
- server: all participants send to the root, and the root sends the sum back to all of them at the same time.
- factors: every participant sends its inputs and output gradients of each micro-batch to every other participant at
  the same time. Members of tensor groups send all of them to their counterparts, because it is not known which side of
  a weight is split, and each member rebuilds its own part of the product.

**Segments.** A message that is passed on is cut into s segments (`plan.ring`), and each is sent on as soon as it has
arrived and been added. Suppose that a message takes T alone, that adding all of it takes A
(`DeviceCosts.add_bandwidth`), and that the message on which it is passed on takes T'. Its segments arrive evenly over T
and are added one by one. The first is done A / s after it has arrived, and the last is done
max(A / s, A - T (1 - 1 / s)) after all have arrived. The next message may begin when the first segment is done, but it
must not end before the last one is done. Counted from when all have arrived, it begins at

    max(A / s - T (1 - 1 / s), max(A / s, A - T (1 - 1 / s)) - T' (1 - 1 / s))

Messages around a ring are played in this way, which is a little too slow where adding takes longer than the message
itself. Messages of chains and servers are played segment by segment, with at most 8 segments.

**Folded** (`cost.replicas.folding`). A few participants stand for N. Their ring sends the bytes of N participants in
fewer rounds, each of which stands for several. Alone, such a round takes as many times the mean of N - 1 hops (all but
the shortest) as it stands for rounds; so passing through n - 1 hops takes as long as passing through all N - 1. A hop
of a chain that stands for w hops takes as long as w.

**Readiness.** A participant does not send before the receiver has said that it is ready to receive, which the receiver
does when it begins with the sync itself. So a message between two participants that begin at the same time leaves a
latency later. It is played as sent when both are ready, with that latency behind it, which is right unless the
receiver has been ready for long. Later messages of the sync find the receiver ready, and so do messages that bring a
result to a participant that sent its part before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled, inlined, lean
from isthmus.cost.network import (
    ADDING,
    SINGLE,
    SYNC,
    Wires,
    by_way,
    flows_of,
    hops_of,
    latency_between,
    members_of,
    seconds_to_send,
)
from isthmus.cost.task_list import GATE, SYNCING, TaskList, beside, edge, message, task
from isthmus.plan.ring import goes_whole, segments_of

__all__ = ["all_reduce", "server", "spread", "steps_of_ring", "tree"]

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

_PLAYED = 8  # segments of a chain or server, at most: more change little and take long to play

_whole = inlined(goes_whole)
_segments = inlined(segments_of)


@inlined
def until_taken(adding: float, coming: float, segments: int) -> float:
    """Return the seconds from when all of a message has arrived to when all of it has been added."""
    return max(adding / segments, adding - coming * (1.0 - 1.0 / segments))


@inlined
def until_passed_on(adding: float, coming: float, going: float, segments: int) -> float:
    """Return the seconds from when all of a message has arrived to when the message that passes it on begins.

    The result is negative if that message begins before.
    """
    part = 1.0 - 1.0 / segments
    return max(adding / segments - coming * part, until_taken(adding, coming, segments) - going * part)


@compiled
def steps_of_ring(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, chunk: float, planned: int, rounds: int,
    adds: int, kind: int, owner: int,
) -> None:  # fmt: skip
    """Write `rounds` rounds of a ring over `devices`, and add what arrives in the first `adds` of them.

    No participant passes anything on before it is ready itself; what arrives in round n - 1 or later has passed through
    all participants. `done` must not be the same array as `ready`.
    """
    n, segments = len(devices), _segments(chunk, planned)
    after = np.empty((3, n))  # of a message to i, seconds until it is: passed on; added and passed on; kept
    for i in range(n):
        done[i] = ready[i]
        here = devices[i]
        adding = chunk * wires.overheads[ADDING, here]
        coming = seconds_to_send(wires, devices[i - 1], here, chunk)
        going = seconds_to_send(wires, here, devices[(i + 1) % n], chunk)
        after[0, i] = until_passed_on(0.0, coming, going, segments)
        after[1, i] = until_passed_on(adding, coming, going, segments)
        after[2, i] = until_taken(adding if rounds <= adds else 0.0, coming, segments)
    shared = n  # rounds in which what arrives has not passed through all participants
    if wires.stands != 1.0:
        played = min(rounds * (n - 1) // (members_of(wires, n) - 1), wires.rounds)
        fold_hops(wires, devices, chunk, rounds / played, 1 if rounds <= adds else 0, after)
        shared = played if rounds < members_of(wires, n) else played // 2 + 1
        chunk, adds, rounds = chunk * rounds / played, adds * played // rounds, played
    write_rounds(out, wires, devices, ready, done, chunk, rounds, adds, shared, after, kind, owner)


@lean
def fold_hops(wires: Wires, devices: Ints, chunk: float, together: float, last: int, after: Floats) -> None:
    """Adjust `after` for messages that each stand for `together` rounds, so that alone all hops take equally long."""
    n = len(devices)
    mean_add = mean_pass = 0.0
    least_add = least_pass = np.inf
    for i in range(n):
        a, b = devices[i - 1], devices[i]
        part = hops_of(wires, a, b) / (members_of(wires, n) - 1)
        far, sending = latency_between(wires, a, b), seconds_to_send(wires, a, b, chunk)
        passing, adding = sending + max(0.0, far + after[0, i]), sending + max(0.0, far + after[1, i])
        mean_pass += part * passing
        mean_add += part * adding
        least_pass, least_add = min(least_pass, passing), min(least_add, adding)
    mean_pass -= least_pass / (members_of(wires, n) - 1)
    mean_add -= least_add / (members_of(wires, n) - 1)
    for i in range(n):
        a, b = devices[i - 1], devices[i]
        far, sending = latency_between(wires, a, b), seconds_to_send(wires, a, b, chunk)
        spent = together * sending + far
        before = (together - 1.0) * (mean_add if last == 1 else mean_pass)
        after[2, i] = before + sending + max(0.0, far + after[2, i]) - spent
        after[0, i] = together * mean_pass - spent
        after[1, i] = together * mean_add - spent


@lean
def write_rounds(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, chunk: float, rounds: int, adds: int,
    shared: int, after: Floats, kind: int, owner: int,
) -> None:  # fmt: skip
    """Write the messages of a ring."""
    n = len(devices)
    lanes = SYNC * len(wires.host_of)
    for k in range(rounds):
        held = done[0]
        row = 2 if k == rounds - 1 else 1 if k < adds else 0
        for i in range(n):
            j = i + 1 if i + 1 < n else 0
            a, b = devices[i], devices[j]
            wait = after[row, j]
            also = ready[i] if 0 < k < shared else -1
            if k == 0:
                also = ready[j]
                wait = max(wait, -latency_between(wires, a, b)) + latency_between(wires, b, a)
            got = message(out, wires, held, also, lanes + a, a, b, chunk, wait, kind, owner, k)
            held, done[j] = done[j], got


@compiled
def all_reduce(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, size: float, planned: int, owner: int
) -> None:
    """Write an all-reduce, a ring after which every participant has the sum of a tensor."""
    n = members_of(wires, len(devices))
    far = latency_between(wires, devices[0], devices[-1]) + latency_between(wires, devices[-1], devices[0])
    if _whole(n, size, far):
        steps_of_ring(out, wires, devices, ready, done, size, 2 * planned, n - 1, n - 1, SYNCING, owner)
    else:
        steps_of_ring(out, wires, devices, ready, done, size / n, planned, 2 * (n - 1), n - 1, SYNCING, owner)


@inlined
def alone(wires: Wires, source: int, target: int, size: float) -> float:
    """Return the seconds of a message that shares nothing, from its beginning to its arrival."""
    return seconds_to_send(wires, source, target, size) + latency_between(wires, source, target)


@compiled
def tree(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, whole: float, planned: int, owner: int
) -> None:
    """Write a reduction along a chain in each region, a ring over the leaders, and the way back along the chains."""
    n = len(devices)
    lanes = SYNC * len(wires.host_of)
    segments = min(_segments(whole, planned), _PLAYED)
    size = whole / segments
    leader = np.empty(n, np.int32)  # the leader of each participant
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
    come = np.full(segments, -1, np.int32)  # the segments that arrived last
    for q in range(count):
        last = -1  # the chain runs from the region's last participant to its leader
        come[:] = -1
        for i in range(n - 1, -1, -1):
            if leader[i] != leaders[q]:
                continue
            if last >= 0:
                a, b = devices[last], devices[i]
                after = size * wires.overheads[ADDING, b] + latency_between(wires, b, a)
                after += (hops_of(wires, b, a) - 1.0) * (alone(wires, a, b, size) + after)
                for p in range(segments):
                    sent = out.size[0]
                    come[p] = message(out, wires, ready[last], come[p], lanes + a, a, b, size, after, SYNCING, owner, 0)
                    edge(out, ready[i], sent)
            last = i
        if come[0] >= 0:
            held[last] = combine(out, held[last], come[segments - 1], owner)
    heads = devices[leaders[:count]]
    summed = held[leaders[:count]]
    if count > 1:
        all_reduce(out, by_way(wires, SINGLE), heads, held[leaders[:count]], summed, whole, planned, owner)
    for q in range(count):
        last = leaders[q]
        done[last] = summed[q]
        come[:] = summed[q]
        for i in range(n):
            if leader[i] == leaders[q] and i != leaders[q]:
                a, b = devices[last], devices[i]
                after = (hops_of(wires, a, b) - 1.0) * alone(wires, a, b, size)
                for p in range(segments):
                    come[p] = message(out, wires, come[p], -1, lanes + a, a, b, size, after, SYNCING, owner, 1)
                done[i] = come[segments - 1]
                last = i


@lean
def server(
    out: TaskList, wires: Wires, devices: Ints, ready: Ints, done: Ints, whole: float, planned: int, root: int,
    owner: int,
) -> None:  # fmt: skip
    """Write a sync over a server: all participants send to the root, and the root sends the sum to all of them.

    A root that takes no part in the bucket is ready from the beginning.
    """
    lanes = SYNC * len(wires.host_of)
    segments = min(_segments(whole, planned), _PLAYED)
    size = whole / segments
    serves = -1
    for i in range(len(devices)):
        if devices[i] == root:
            serves = ready[i]
    for _ in range(segments):
        summed = task(out, -1, 0.0, 0.0, -1, GATE, owner, 0)
        for i in range(len(devices)):
            d = devices[i]
            after = size * wires.overheads[ADDING, root]
            if serves >= 0:
                after += latency_between(wires, root, d)
            edge(out, message(out, wires, ready[i], serves, lanes + d, d, root, size, after, SYNCING, owner, 0), summed)
        for i in range(len(devices)):
            done[i] = message(
                out, wires, summed, -1, beside(lanes + root), root, devices[i], size, 0.0, SYNCING, owner, 1
            )


@lean
def spread(
    out: TaskList, wires: Wires, devices: Ints, sender: int, ready: int, size: float, got: Ints, owner: int
) -> None:
    """Write one participant's message to every other; each receiver's task `got` waits for the arrival."""
    lane = beside(SYNC * len(wires.host_of) + devices[sender])
    for i in range(len(devices)):
        if i != sender:
            a, b = devices[sender], devices[i]
            sent = message(out, wires, ready, -1, lane, a, b, size * flows_of(wires, a, b), 0.0, SYNCING, owner, 0)
            edge(out, sent, got[i])


@lean
def combine(out: TaskList, a: int, b: int, owner: int) -> int:
    """Write a task that has ended when both of the given tasks have, and return it."""
    both = task(out, -1, 0.0, 0.0, -1, GATE, owner, 0)
    edge(out, a, both)
    edge(out, b, both)
    return both
