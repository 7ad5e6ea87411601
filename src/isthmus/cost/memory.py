"""Peak memory of each device: state, live activations by the device's own order, and workspace.

State per element, with Adam: weights and gradients in the job's width, fp32 master weights (16-bit jobs) and two fp32
moments, which is 16 bytes either way. A pruned stage holds dense state and a mask of one byte, as the runtime does.
`sharded-optimizer` divides the optimizer's part by the replicas; `sharded-all` divides everything, and adds two parts
of gathered weights. `spill` moves the optimizer's part to the host. A replica that computes a 16-bit job in fp32 holds
state as the others do and, of the weights that are on the device, an fp32 copy to compute with, which is 4 bytes an
element more. Its activations have 4 bytes.

Activations follow the device's order: a forward adds the saved bytes of its samples, a backward takes them away, and
each needs the workspace of its largest slice while it computes. `recompute` keeps block inputs only, and needs the
largest block's saved bytes while it computes. A profile may say how much memory a byte of activations takes, since
allocators leave gaps.

Messages need memory as well (`plan.ring`). For those from run to run, in each direction, it is room for some messages
of a step where they arrive and where they are sent from (there with gaps, because what is sent was computed). For a
sync that adds up, it is room for a segment of each bucket and, over all that one worker sends, for what may be on its
way, but for no more than is added. Consecutive syncs that go the same ways count together. A root that has no part in a
bucket holds all of it. With `factors` it is room for the rows of all participants for some weights of a stage, and for
the output gradients of a micro-batch that wait to be sent.

The model's buffers (batch statistics, fp32) count whole on every device that has a stage. CONTEXT is what the driver
and libraries take on a GPU; a profile may say what a worker really takes before its model is loaded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.cluster.spec import Precision
from isthmus.compiled import compiled, inlined
from isthmus.cost.compute import WIDTH_OF
from isthmus.cost.network import Wires, latency_between, members_of
from isthmus.cost.task_types import RING, SCATTERED, SERVER, TREE, Syncs, samples_of
from isthmus.model.job import Optimizer
from isthmus.model.profile import DeviceCosts
from isthmus.plan.ring import AHEAD, LEAVING, goes_whole, room_for, segments_of
from isthmus.plan.schedule import Edges, Orders, StageRuns

__all__ = [
    "CONTEXT",
    "StateBytes",
    "activation_peaks",
    "context_bytes",
    "moment_bytes",
    "scratch_bytes",
    "state_bytes",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_whole, _segments, _room = inlined(goes_whole), inlined(segments_of), inlined(room_for)

CONTEXT = 0.6e9  # bytes


def context_bytes(kind: str, costs: DeviceCosts | None) -> float:
    """Return the bytes that a worker takes on a device of this kind before its model: as measured, or else as usual."""
    if costs is not None and costs.context_bytes is not None:
        return costs.context_bytes
    return CONTEXT if kind != "CPU" else 0.0


class StateBytes(NamedTuple):
    """Bytes per trained element."""

    weight: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the sum of all three."""
        return self.weight + self.gradient + self.optimizer


def moment_bytes(optimizer: Optimizer) -> float:
    """Return the bytes of the optimizer's moments per element."""
    return 4.0 * optimizer.moments


def state_bytes(precision: Precision, optimizer: Optimizer, masked: bool = False) -> StateBytes:
    """Return the bytes of state per element; a pruned stage holds dense state and a mask of one byte."""
    width = WIDTH_OF[precision]
    half = width == 2
    state = (4.0 if half else 0.0) + moment_bytes(optimizer)
    return StateBytes(width + 1.0 if masked else width, width, state)


@compiled
def activation_peaks(
    runs: StageRuns, orders: Orders, forward: Edges, backward: Edges, replicas: Floats, devices: int, micro_batches: int
) -> Floats:
    """Return the peak bytes of live activations on each device, and of messages between runs of different devices.

    `replicas`, [3, replicas], holds the saved bytes per sample, the transient bytes per sample, and the memory that one
    byte takes. Of the replicas of a run all are saved, and one is computed at a time.
    """
    peaks, saved, transient = np.zeros(devices), np.zeros(len(runs.device)), np.zeros(len(runs.device))
    for q in range(replicas.shape[1]):
        saved[runs.of[q]] += replicas[0, q]
        transient[runs.of[q]] = max(transient[runs.of[q]], replicas[1, q])
    for d in range(devices):
        live = 0.0
        for i in range(orders.first[d], orders.first[d + 1]):
            u = orders.run[i]
            share = runs.hi[u] - runs.lo[u]
            piece = -(-share // runs.slices[u])
            if not orders.backward[i]:
                live += share * saved[u]
            peaks[d] = max(peaks[d], live + piece * transient[u])
            if orders.backward[i]:
                live -= share * saved[u]
    for edges in (forward, backward):
        for e in range(len(edges.source)):
            u, v = edges.source[e], edges.target[e]
            if runs.device[u] != runs.device[v]:
                count, size = messages(runs, edges, e)
                peaks[runs.device[u]] += size * min(micro_batches, LEAVING / count) * replicas[2, runs.replica[u]]
                peaks[runs.device[v]] += size * min(micro_batches, (AHEAD + 1) / count)
    return peaks


@compiled
def messages(runs: StageRuns, edges: Edges, e: int) -> tuple[int, float]:
    """Return the number of messages from one run to another in each micro-batch, and their total bytes."""
    u, v = edges.source[e], edges.target[e]
    count, size = 0, 0.0
    for k in range(runs.slices[u]):
        lo, hi = samples_of(runs, u, k)
        for j in range(runs.slices[v]):
            low, high = samples_of(runs, v, j)
            if min(hi, high) > max(lo, low):
                count += 1
                size += (min(hi, high) - max(lo, low)) * edges.per_sample[e] + edges.fixed[e]
    return count, size


@compiled
def scratch_bytes(syncs: Syncs, wires: Wires) -> Floats:
    """Return the bytes on each device for what arrives and waits to be added, in all syncs together."""
    found = np.zeros(len(wires.host_of))
    b = 0
    while b < len(syncs.how):
        end = b + 1
        while end < len(syncs.how) and alike(syncs, b, end):
            end += 1
        devices = syncs.device[syncs.first[b] : syncs.first[b + 1]]
        if syncs.how[b] == RING:
            around(found, syncs, wires, devices, members_of(wires, len(devices)), b, end)
        elif syncs.how[b] == TREE:
            up_the_tree(found, syncs, wires, devices, b, end)
        elif syncs.how[b] == SERVER:
            to_the_root(found, syncs, wires, devices, b, end)
        b = end
    return found


@compiled
def alike(syncs: Syncs, b: int, c: int) -> bool:
    """Return whether two syncs go the same ways: by the same method, with the same root and devices."""
    n = syncs.first[b + 1] - syncs.first[b]
    if syncs.how[b] != syncs.how[c] or syncs.root[b] != syncs.root[c] or syncs.first[c + 1] - syncs.first[c] != n:
        return False
    same = 0
    for i in range(n):
        same += syncs.device[syncs.first[b] + i] == syncs.device[syncs.first[c] + i]
    return bool(same == n)


@compiled
def waiting(wires: Wires, sender: int, receiver: int, added: float, segment: float) -> float:
    """Return the scratch for `added` bytes from one device to another, in segments of `segment` bytes together."""
    trip = latency_between(wires, sender, receiver) + latency_between(wires, receiver, sender)
    return min(added, _room(np.inf, trip) + segment)


@compiled
def around(found: Floats, syncs: Syncs, wires: Wires, devices: Ints, members: int, b: int, end: int) -> None:
    """Add to `found` the scratch of syncs b .. end - 1 around a ring.

    Each device adds what its neighbour sends: all but one piece or, if the bucket goes around whole, all of it. The
    devices stand for `members` participants.
    """
    n = len(devices)
    far = latency_between(wires, devices[0], devices[-1]) + latency_between(wires, devices[-1], devices[0])
    added = segment = 0.0
    for c in range(b, end):
        whole = syncs.layout[c] != SCATTERED and _whole(members, syncs.bytes[c], far)
        piece, planned = syncs.bytes[c] / members, syncs.segments[c]
        if whole:
            piece, planned = syncs.bytes[c], 2 * planned
        added += (members - 1) * piece
        segment += piece / _segments(piece, planned)
    for i in range(n):
        if n > 1:
            found[devices[i]] += waiting(wires, devices[i - 1], devices[i], added, segment)


@compiled
def whole_buckets(syncs: Syncs, b: int, end: int) -> tuple[float, float]:
    """Return the bytes of syncs b .. end - 1, and the bytes of one segment of each of them."""
    added = segment = 0.0
    for c in range(b, end):
        added += syncs.bytes[c]
        segment += syncs.bytes[c] / _segments(syncs.bytes[c], syncs.segments[c])
    return added, segment


@compiled
def up_the_tree(found: Floats, syncs: Syncs, wires: Wires, devices: Ints, b: int, end: int) -> None:
    """Add to `found` the scratch of syncs b .. end - 1 over a tree.

    In the chain of a region all devices but the last add all that arrives; the leaders form a ring.
    """
    added, segment = whole_buckets(syncs, b, end)
    leaders = np.empty(len(devices), np.int32)
    count = 0
    for i in range(len(devices)):
        above = -1
        for k in range(i):
            if wires.region_of[devices[k]] == wires.region_of[devices[i]]:
                above = devices[k]
        if above < 0:
            leaders[count] = devices[i]
            count += 1
        else:
            found[above] += waiting(wires, devices[i], above, added, segment)
    around(found, syncs, wires, leaders[:count], count, b, end)


@compiled
def to_the_root(found: Floats, syncs: Syncs, wires: Wires, devices: Ints, b: int, end: int) -> None:
    """Add to `found` the scratch of syncs b .. end - 1 through a server.

    The server adds what arrives to its own part or, if it has none, to what the first participant sends.
    """
    added, segment = whole_buckets(syncs, b, end)
    root, takes_part = syncs.root[b], False
    for i in range(len(devices)):
        takes_part |= devices[i] == root
    for i in range(len(devices)):
        if devices[i] != root and (takes_part or i > 0):
            found[root] += waiting(wires, devices[i], root, added, segment)
