"""The event engine: plays a task graph on lanes and shared links, and gives the start and end of each task.

A *task* is fixed work (computing) or a message. It is ready when all tasks before it have ended; then it joins the
queue of its lane, first come, first served. A *lane* is a serial executor (a device computing, a device sending): it
works on one task at a time. Fixed work takes its seconds. A message sends its bytes at its max-min fair rate over the
resources on its route (links, nics, trunks), and leaves its lane and resources when all bytes are `sent`. It arrives
one latency later, and ends its own seconds after that, which is what the receiver must do with it. Those seconds may
be negative, where the tasks that wait for the message need only its beginning; but it never ends before it is sent.

The order is deterministic. At one instant all finishes come first, then newly ready tasks join queues in order of their
numbers, and then free lanes take their next tasks. Zero-length work finishes in a further round. Rates are settled at
the end of the instant.

A route may have a weight. A message on it then stands for that many equal messages: it carries the bytes of all of
them, and its rate is the sum of the rates that they would have.

Max-min rates are computed only where they can have changed. A message alone would run at `solo`, the least capacity on
its route. A resource is *tight* if the solo rates of its messages add up to more than its capacity; a resource that is
not tight limits no message. So a message that starts or ends affects others only through tight resources: the messages
that are reached from it in this way get new rates, and all others keep theirs.

State is kept in arrays of records, so that what is used together lies together in memory and compiled functions take
few arguments. The loop and all that it calls create no arrays (`lean`): atomic reference counting would take a third
of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from isthmus.compiled import compiled, inlined, lean

__all__ = ["WIDTH", "Network", "Tasks", "Times", "run"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.uint32]  # of tasks or resources; unsigned, which saves a check at every use as an index

WIDTH = 4  # resources on a route, at most: nic out, link, trunk, nic in
_SLACK = 1.0 + 1e-9  # a load above the capacity by less is due to rounding


class Tasks(NamedTuple):
    """The tasks, one row each; edges say which task must have ended before another is ready."""

    lane: Ints  # the lane it occupies while it works; -1: none
    seconds: Floats  # fixed work if route is -1; else the time from arrival to end, which may be negative
    bytes: Floats  # message size, where route is not -1
    route: Ints  # row of Network.resources, or -1
    before: Ints  # edge e: before[e] must have ended ...
    after: Ints  # ... for after[e] to be ready


class Network(NamedTuple):
    """Routes over shared resources."""

    resources: Ints  # [routes, WIDTH]: resources on the route, then -1
    latency: Floats  # [routes]
    capacity: Floats  # [resources], bytes a second
    weight: Ints | None = None  # [routes]: for how many messages each message stands; None: for itself


class Times(NamedTuple):
    """When each task started, was sent (left its lane) and ended (a message: arrived and was dealt with)."""

    start: Floats
    sent: Floats
    end: Floats


_TASK = np.dtype(
    [
        ("rate", np.float64),  # bytes a second, while sending; below 0 while being filled
        ("remaining", np.float64),  # bytes not sent at `since`
        ("since", np.float64),
        ("old", np.float64),  # rate before filling
        ("solo", np.float64),  # rate of the message alone, over its weight
        ("waits", np.int32),  # tasks before it that have not ended
        ("first", np.int32),  # its successors start here
        ("queued", np.int32),  # the task behind it in its lane's queue
        ("place", np.int32),  # in the heap, -1: not there
        ("seen", np.int32),
        ("sent", np.int32),
    ],
    align=True,
)
_RESOURCE = np.dtype(
    [
        ("capacity", np.float64),
        ("load", np.float64),  # sum of the rates that its messages would have alone
        ("left", np.float64),  # capacity not given out, while filling
        ("users", np.int32),  # its messages, by weight
        ("rising", np.int32),  # those without a rate, while filling
        ("head", np.int32),  # first slot of its messages
        ("seen", np.int32),
    ],
    align=True,
)
_SLOT = np.dtype([("next", np.int32), ("previous", np.int32)])  # slot = task * WIDTH + k: its k-th resource
_LANE = np.dtype([("head", np.int32), ("tail", np.int32), ("busy", np.int32)])
_EVENT = np.dtype([("time", np.float64), ("task", np.uint32)], align=True)
Records = Any  # arrays of the record types above


def run(tasks: Tasks, lanes: int, network: Network) -> Times:
    """Play the tasks, and raise ValueError if some of them can never be ready (a cycle)."""
    count = len(tasks.lane)
    start, sent, end = np.empty(count), np.empty(count), np.empty(count)
    weight = np.ones(len(network.latency), np.int32) if network.weight is None else network.weight
    ran = play(*tasks, lanes, *network[:3], weight, start, sent, end)
    if ran < count:
        raise ValueError(f"{count - ran} of {count} tasks never ran: they wait for each other")
    return Times(start, sent, end)


@compiled
def play(
    lane: Ints, seconds: Floats, size: Floats, route: Ints, before: Ints, after: Ints, lanes: int, paths: Ints,
    latency: Floats, capacity: Floats, weight: Ints, start: Floats, sent: Floats, end: Floats,
) -> Any:  # fmt: skip
    """Make room for the event loop and run it."""
    count = len(lane)
    state = np.empty(count + 1, _TASK)
    following = successors(state, before, after, count)
    queues = empty_lanes(lanes)
    network = idle_resources(capacity)
    slots = np.empty(WIDTH * count, _SLOT)
    heap = np.empty(count, _EVENT)
    ready = np.empty(count, np.uint32)
    touched = np.empty(2 * count, np.int32)
    joined = np.empty(count, np.uint32)
    dirty = np.empty(2 * WIDTH * count + len(capacity), np.uint32)
    found = np.empty(count, np.uint32)
    return loop(
        lane, seconds, size, route, following, paths, latency, weight, state, queues, network, slots, heap, ready,
        touched, joined, dirty, found, start, sent, end,
    )  # fmt: skip


@lean
def loop(
    lane: Ints, seconds: Floats, size: Floats, route: Ints, following: Numbers, paths: Ints, latency: Floats,
    weight: Ints, state: Records, queues: Records, network: Records, slots: Records, heap: Records, ready: Numbers,
    touched: Ints, joined: Numbers, dirty: Numbers, found: Numbers, start: Floats, sent: Floats, end: Floats,
) -> int:  # fmt: skip
    """Run the event loop of the module's docstring, fill start, sent and end, and return how many tasks ended.

    `touched` lists lanes that may take a task, and -1 - task for a task that needs no lane.
    """
    count = len(lane)
    now, ran, stamp, events = 0.0, 0, 0, 0

    n_ready = 0
    for t in range(count):
        state[t].place, state[t].queued, state[t].seen, state[t].sent = -1, -1, 0, 0
        if state[t].waits == 0:
            ready[n_ready] = t
            n_ready += 1

    while n_ready > 0 or events > 0:
        n_joined = n_dirty = 0
        if n_ready == 0:
            now = heap[0].time
        while n_ready > 0 or (events > 0 and heap[0].time <= now):  # rounds of one instant
            n_touched = 0
            while events > 0 and heap[0].time <= now:
                task = heap[0].task
                if state[task].sent == 0:
                    state[task].sent = 1
                    sent[task] = now
                    if lane[task] >= 0:
                        queues[lane[task]].busy = 0
                        touched[n_touched] = lane[task]
                        n_touched += 1
                    if route[task] >= 0:
                        if size[task] > 0.0:
                            n_dirty = leave(task, paths, route[task], weight, state, network, slots, dirty, n_dirty)
                        wait = latency[route[task]] + seconds[task]
                        if wait > 0.0:
                            events = put(heap, events, state, task, now + wait)
                            continue
                events = drop_first(heap, events, state)
                end[task] = now
                ran += 1
                for i in range(state[task].first, state[task + 1].first):
                    state[following[i]].waits -= 1
                    if state[following[i]].waits == 0:
                        ready[n_ready] = following[i]
                        n_ready += 1

            if n_ready > 1:
                in_order(ready, n_ready)
            for i in range(n_ready):
                touched[n_touched] = enqueue(ready[i], lane[ready[i]], queues, state)
                n_touched += 1
            n_ready = 0

            for i in range(n_touched):
                task = dequeue(touched[i], queues, state)
                if task < 0:
                    continue
                start[task] = now
                if route[task] < 0:
                    events = put(heap, events, state, task, now + seconds[task])
                elif size[task] > 0.0 and paths[route[task], 0] >= 0:
                    join(task, paths, route[task], weight, size[task], now, state, network, slots)
                    joined[n_joined] = task
                    n_joined += 1
                else:
                    events = put(heap, events, state, task, now)

        for i in range(n_joined):
            task = joined[i]
            before_it = n_dirty
            n_dirty = meet(paths, route[task], network, dirty, n_dirty)
            if n_dirty == before_it:
                state[task].rate = state[task].solo * weight[route[task]]
                events = put(heap, events, state, task, now + size[task] / state[task].rate)
        if n_dirty > 0:
            stamp += 1
            n_found, n_tight = reach(dirty, n_dirty, found, route, paths, state, network, slots, stamp)
            fill(dirty, n_tight, found, n_found, route, paths, weight, state, network, slots, stamp)
            for i in range(n_found):
                task = found[i]
                if state[task].rate != state[task].old:
                    gone = state[task].old * (now - state[task].since)
                    state[task].remaining = max(0.0, state[task].remaining - gone)
                    state[task].since = now
                    events = put(heap, events, state, task, now + state[task].remaining / state[task].rate)
    return ran


@compiled
def successors(state: Records, before: Ints, after: Ints, count: int) -> Numbers:
    """Return the tasks after each task, and count what each waits for.

    Those after task t are `[state[t].first : state[t + 1].first]` of the result.
    """
    for t in range(count + 1):
        state[t].waits = 0
        state[t].first = 0
    for e in range(len(before)):
        state[before[e]].first += 1
        state[after[e]].waits += 1
    total = 0
    for t in range(count + 1):
        total += state[t].first
        state[t].first = total  # the end of its successors; each one written below steps it down to their start
    following = np.empty(len(before), np.uint32)
    for e in range(len(before) - 1, -1, -1):
        state[before[e]].first -= 1
        following[state[before[e]].first] = after[e]
    return following


@compiled
def empty_lanes(lanes: int) -> Records:
    """Return lanes with nothing in their queues."""
    queues = np.empty(lanes, _LANE)
    for i in range(lanes):
        queues[i].head, queues[i].tail, queues[i].busy = -1, -1, 0
    return queues


@compiled
def idle_resources(capacity: Floats) -> Records:
    """Return resources that no message uses."""
    network = np.empty(len(capacity), _RESOURCE)
    for r in range(len(capacity)):
        network[r].capacity, network[r].load = capacity[r], 0.0
        network[r].users, network[r].head, network[r].seen = 0, -1, 0
    return network


@inlined
def in_order(ready: Numbers, n: int) -> None:
    """Sort the first n numbers, which are few and mostly sorted, by Shell's method with Knuth's gaps."""
    gap = 1
    while 3 * gap < n:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, n):
            task = ready[i]
            j = i
            while j >= gap and ready[j - gap] > task:
                ready[j] = ready[j - gap]
                j -= gap
            ready[j] = task
        gap //= 3


@inlined
def put(heap: Records, events: int, state: Records, task: int, time: float) -> int:
    """Set the time of the task's next event, whether or not it has one, and return the number of events."""
    i = state[task].place
    if i < 0:
        i = events
        events += 1
    elif heap[i].time < time:
        sink(heap, events, state, i, task, time)
        return events
    while i > 0:
        parent = (i - 1) >> 1
        if heap[parent].time <= time:
            break
        heap[i].time, heap[i].task = heap[parent].time, heap[parent].task
        state[heap[i].task].place = i
        i = parent
    heap[i].time, heap[i].task = time, task
    state[task].place = i
    return events


@inlined
def sink(heap: Records, events: int, state: Records, i: int, task: int, time: float) -> None:
    """Write an event at position i of the heap or below it."""
    while True:
        child = 2 * i + 1
        if child >= events:
            break
        if child + 1 < events and heap[child + 1].time < heap[child].time:
            child += 1
        if heap[child].time >= time:
            break
        heap[i].time, heap[i].task = heap[child].time, heap[child].task
        state[heap[i].task].place = i
        i = child
    heap[i].time, heap[i].task = time, task
    state[task].place = i


@inlined
def drop_first(heap: Records, events: int, state: Records) -> int:
    """Remove the earliest event, and return the number of events."""
    state[heap[0].task].place = -1
    events -= 1
    if events > 0:
        sink(heap, events, state, 0, heap[events].task, heap[events].time)
    return events


@inlined
def enqueue(task: int, lane: int, queues: Records, state: Records) -> int:
    """Put a ready task at the end of its lane's queue; return what may start: the lane or, without one, -1 - task."""
    if lane < 0:
        return -1 - task
    if queues[lane].head < 0:
        queues[lane].head = task
    else:
        state[queues[lane].tail].queued = task
    queues[lane].tail = task
    return lane


@inlined
def dequeue(lane: int, queues: Records, state: Records) -> int:
    """Return the task that starts now on a lane, or -1 if the lane is busy or has no task."""
    if lane < 0:
        return -1 - lane
    task = queues[lane].head
    if task < 0 or queues[lane].busy:
        return -1
    queues[lane].head = state[task].queued
    queues[lane].busy = 1
    return int(task)


@inlined
def join(
    task: int, paths: Ints, route: int, weight: Ints, size: float, now: float, state: Records, network: Records,
    slots: Records,
) -> None:  # fmt: skip
    """Enter a message into the lists of its resources; its rate is settled at the end of the instant."""
    solo = np.inf
    for k in range(WIDTH):
        if paths[route, k] >= 0:
            solo = min(solo, network[paths[route, k]].capacity)
    state[task].solo, state[task].remaining = solo / weight[route], size
    state[task].rate, state[task].since = 0.0, now
    for k in range(WIDTH):
        r = paths[route, k]
        if r < 0:
            break
        slot = task * WIDTH + k
        slots[slot].next, slots[slot].previous = network[r].head, -1
        if network[r].head >= 0:
            slots[network[r].head].previous = slot
        network[r].head = slot
        network[r].users += weight[route]
        network[r].load += solo


@inlined
def leave(
    task: int, paths: Ints, route: int, weight: Ints, state: Records, network: Records, slots: Records, dirty: Numbers,
    n_dirty: int,
) -> int:  # fmt: skip
    """Take a message off its resources, and mark the tight ones as dirty: their other messages may now run faster."""
    n_dirty = meet(paths, route, network, dirty, n_dirty)
    for k in range(WIDTH):
        r = paths[route, k]
        if r < 0:
            break
        slot = task * WIDTH + k
        if slots[slot].previous >= 0:
            slots[slots[slot].previous].next = slots[slot].next
        else:
            network[r].head = slots[slot].next
        if slots[slot].next >= 0:
            slots[slots[slot].next].previous = slots[slot].previous
        network[r].users -= weight[route]
        network[r].load = network[r].load - state[task].solo * weight[route] if network[r].users else 0.0
    return n_dirty


@inlined
def meet(paths: Ints, route: int, network: Records, dirty: Numbers, n_dirty: int) -> int:
    """Add the tight resources on a route to the dirty ones."""
    for k in range(WIDTH):
        r = paths[route, k]
        if r < 0:
            break
        if network[r].load > network[r].capacity * _SLACK:
            dirty[n_dirty] = r
            n_dirty += 1
    return n_dirty


@inlined
def reach(
    dirty: Numbers, n_dirty: int, found: Numbers, route: Ints, paths: Ints, state: Records, network: Records,
    slots: Records, stamp: int,
) -> Any:  # fmt: skip
    """Collect in `found` all messages reached from the dirty resources through tight ones, and those in `dirty`."""
    n_found = n_tight = 0
    for d in range(n_dirty):
        if network[dirty[d]].seen != stamp:
            network[dirty[d]].seen = stamp
            dirty[n_tight] = dirty[d]
            n_tight += 1
    i = 0
    while i < n_tight:
        slot = network[dirty[i]].head
        while slot >= 0:
            task = slot // WIDTH
            if state[task].seen != stamp:
                state[task].seen = stamp
                state[task].old = state[task].rate
                state[task].rate = -1.0
                found[n_found] = task
                n_found += 1
                for k in range(WIDTH):
                    r = paths[route[task], k]
                    if r < 0:
                        break
                    if network[r].seen != stamp and network[r].load > network[r].capacity * _SLACK:
                        network[r].seen = stamp
                        dirty[n_tight] = r
                        n_tight += 1
            slot = slots[slot].next
        i += 1
    return n_found, n_tight


@inlined
def fill(
    tight: Numbers, n_tight: int, found: Numbers, n_found: int, route: Ints, paths: Ints, weight: Ints, state: Records,
    network: Records, slots: Records, stamp: int,
) -> None:  # fmt: skip
    """Set the max-min fair rates of the found messages by progressive filling.

    All rates rise together, each times its weight. The next level is the least share of any resource, which is what it
    has left divided by the number of its messages that still rise. Messages whose solo rate is not above that level
    stop at their solo rate, which lowers no share; if there are none, the messages of that resource stop at the level.
    A rate below 0 marks a message that still rises.
    """
    for i in range(n_tight):
        network[tight[i]].left = network[tight[i]].capacity
        network[tight[i]].rising = network[tight[i]].users
    rising = n_found
    while rising > 0:
        level = np.inf
        fullest = -1
        for i in range(n_tight):
            r = tight[i]
            if network[r].rising > 0 and network[r].left < level * network[r].rising:
                level = network[r].left / network[r].rising
                fullest = r
        stopped = 0
        for i in range(n_found):
            if state[found[i]].rate < 0.0 and state[found[i]].solo <= level:
                settle(found[i], state[found[i]].solo, paths, route[found[i]], weight, state, network, stamp)
                stopped += 1
        if stopped == 0:
            slot = network[fullest].head
            while slot >= 0:
                task = slot // WIDTH
                if state[task].rate < 0.0:
                    settle(task, level, paths, route[task], weight, state, network, stamp)
                    stopped += 1
                slot = slots[slot].next
        rising -= stopped


@inlined
def settle(
    task: int, level: float, paths: Ints, route: int, weight: Ints, state: Records, network: Records, stamp: int
) -> None:
    """Fix one message's rate and take it off the resources that are being filled."""
    rate = level * weight[route]
    state[task].rate = rate
    for k in range(WIDTH):
        r = paths[route, k]
        if r < 0:
            break
        if network[r].seen == stamp:
            network[r].left = max(0.0, network[r].left - rate)
            network[r].rising -= weight[route]
