"""Chooses where to cut a list of operations into runs of operations, the blocks.

Operations stand in one topological order, so that any cut between two neighbours leaves a closed prefix. A cut at p (in
front of operation p) costs the elements that *cross* it: values made before p and read at or after it. With s_i the
share of block i in the model's work (FLOPs and parameters, half each), cuts are chosen by dynamic programming to

    minimise   sum_i s_i^2  +  sum_cuts (each + WIDE * (width - 1)),

where `width` is the number of elements that cross, relative to the narrowest place on the wider of the two sides (1
between two layers of a transformer, 2 beside a residual connection). The first term splits work evenly. `each`, the
price of a block, starts at the value at which splitting a block of share 1/limit just pays, and is raised until at most
`limit` blocks remain: equal layers then merge all at once, so that a repetitive model gives repetitive blocks.

Models with branches are also cut in other orders. One runs each branch to its end before the next, so that branches
whose operations alternate become blocks that can be placed apart. The other is found by METIS: groups of operations
with few elements between them, cycles contracted, groups ordered by mean position. These orders are used if clearly
fewer elements cross a cut at the same balance. The mean over the cuts is compared, because blocks that need not hold
two branches are smaller and have more cuts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Item", "choose_blocks"]

_WIDE = 0.0015  # a block of share 0.06 is split at a place of double width, one of 0.05 is not
_TOO_WIDE = 3.0  # a place this wide is never cut if both sides have a narrow place and little work lies between them
_LITTLE = 0.1
_BETTER = 0.9  # another order is used if at most this part of the elements crosses each cut

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One operation as the cutter sees it."""

    reads: tuple[int, ...]  # items that made its inputs
    share: float
    elements: float  # of its result, per sample
    heavy: bool  # does real work (products, embeddings); cuts are placed between two heavy items
    module: str


def choose_blocks(items: Sequence[Item], joins: Iterable[Sequence[int]], limit: int) -> list[list[int]]:
    """Return runs of items in one topological order, at most `limit`; each set in `joins` stays in one run."""
    joined = [sorted(set(join)) for join in joins if len(set(join)) > 1]
    plain = _cut(items, joined, list(range(len(items))), limit)
    best = plain
    for order in _other_orders(items, joined, len(plain.runs)):
        other = _cut(items, joined, order, limit)
        better = other.crossing < _BETTER * best.crossing and other.largest <= best.largest * 1.001
        best = other if better and len(other.runs) >= len(best.runs) else best
    return best.runs


@dataclass(frozen=True)
class _Result:
    runs: list[list[int]]
    crossing: float  # elements that cross a cut, on average
    largest: float  # share


def _cut(items: Sequence[Item], joins: list[list[int]], order: list[int], limit: int) -> _Result:
    crossing = _crossing(items, order)
    done = np.cumsum([0.0, *(items[i].share for i in order)])
    places = _places(items, joins, order, crossing)
    widths = _widths(crossing[places])
    kept = ~_too_wide(crossing[places], done[places])
    places, widths = places[kept], widths[kept]
    depths = np.array([_depth(items[order[p - 1]].module, items[order[p]].module) for p in places])
    chosen = _choose(done, places, widths, depths, limit)
    bounds = [0, *(int(p) for p in chosen), len(order)]
    runs = [order[a:b] for a, b in itertools.pairwise(bounds)]
    shares = np.diff(done[bounds])
    return _Result(runs, float(crossing[chosen].mean()) if len(chosen) else 0.0, float(shares.max(initial=0.0)))


def _crossing(items: Sequence[Item], order: list[int]) -> Floats:
    """Return the number of elements that cross each place p, 0 <= p <= n."""
    position = {item: p for p, item in enumerate(order)}
    last = dict(position)
    for p, item in enumerate(order):
        for source in items[item].reads:
            last[source] = max(last[source], p)
    change = np.zeros(len(order) + 2)
    for item, end in last.items():
        change[position[item] + 1] += items[item].elements
        change[end + 1] -= items[item].elements
    return np.round(np.cumsum(change)[: len(order) + 1], 6)


def _places(items: Sequence[Item], joins: list[list[int]], order: list[int], crossing: Floats) -> npt.NDArray[np.int64]:
    """Return the narrowest allowed place between each two neighbouring heavy items.

    Of equally narrow places, the outermost by modules is taken, then the latest.
    """
    allowed = _allowed(joins, order)
    heavy = [p for p, item in enumerate(order) if items[item].heavy]
    places = []
    for first, second in itertools.pairwise(heavy):
        between = [p for p in range(first + 1, second + 1) if allowed[p]]
        if between:
            places.append(
                min(
                    between, key=lambda p: (crossing[p], _depth(items[order[p - 1]].module, items[order[p]].module), -p)
                )
            )
    return np.array(places, dtype=np.int64)


def _allowed(joins: list[list[int]], order: list[int]) -> npt.NDArray[np.bool_]:
    """Return for each place whether it separates no joined set."""
    position = {item: p for p, item in enumerate(order)}
    open_joins = np.zeros(len(order) + 1, dtype=np.int64)
    for join in joins:
        spots = [position[item] for item in join]
        open_joins[min(spots) + 1] += 1
        open_joins[max(spots) + 1 if max(spots) + 1 <= len(order) else len(order)] -= 1
    closed: npt.NDArray[np.bool_] = np.cumsum(open_joins) == 0
    return closed


def _depth(left: str, right: str) -> int:
    """Return how many leading modules the names of two neighbours have in common."""
    count = 0
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b or not a:
            break
        count += 1
    return count


def _widths(crossing: Floats) -> Floats:
    """Return the elements that cross each place, relative to its wider side, clipped to between 1 and 3.

    The wider side is the one whose narrowest place is crossed by more elements.
    """
    if crossing.size == 0:
        return crossing
    left = np.concatenate(([np.inf], np.minimum.accumulate(crossing)[:-1]))
    right = np.concatenate((np.minimum.accumulate(crossing[::-1])[::-1][1:], [np.inf]))
    base = np.maximum(np.maximum(left, right), 1e-9)
    return np.clip(crossing / base, 1.0, _TOO_WIDE)


def _too_wide(crossing: Floats, done: Floats) -> npt.NDArray[np.bool_]:
    """Return for each place whether there is a nearby place of a third of its width on both sides."""
    result = np.zeros(crossing.size, dtype=np.bool_)
    for i, width in enumerate(crossing):
        narrow = np.flatnonzero(crossing <= width / _TOO_WIDE)
        left, right = narrow[narrow < i], narrow[narrow > i]
        if left.size and right.size:
            result[i] = done[right[0]] - done[left[-1]] < _LITTLE
    return result


def _choose(
    done: Floats, places: npt.NDArray[np.int64], widths: Floats, depths: npt.NDArray[np.int64], limit: int
) -> npt.NDArray[np.int64]:
    """Return the cuts of least total price; the price of a block is doubled, then bisected, until `limit` is kept."""
    each = 0.3 / limit**2

    def cuts(price: float) -> npt.NDArray[np.int64]:
        return _cheapest(done, places, price * (1 + 0.01 * depths) + _WIDE * (widths - 1))

    best = cuts(each)
    low = high = each
    while best.size >= limit:
        low, high = high, high * 2
        best = cuts(high)
    for _ in range(12 if high > each else 0):
        middle = (low * high) ** 0.5
        found = cuts(middle)
        if found.size < limit:
            high, best = middle, found
        else:
            low = middle
    return best


def _cheapest(done: Floats, places: npt.NDArray[np.int64], prices: Floats) -> npt.NDArray[np.int64]:
    """Return the cheapest cuts, found by dynamic programming.

    best[j] = min over i < j of best[i] + price[i] + (work between i and j)^2.
    """
    work = np.concatenate(([0.0], done[places], [done[-1]]))
    toll = np.concatenate(([0.0], prices, [0.0]))
    best = np.zeros(work.size)
    before = np.zeros(work.size, dtype=np.int64)
    for j in range(1, work.size):
        options = best[:j] + toll[:j] + (work[j] - work[:j]) ** 2
        before[j] = int(np.argmin(np.round(options, 15)))
        best[j] = options[before[j]]
    chosen = []
    j = int(before[-1])
    while j > 0:
        chosen.append(j - 1)
        j = int(before[j])
    return places[chosen[::-1]]


def _other_orders(items: Sequence[Item], joins: list[list[int]], parts: int) -> Iterator[list[int]]:
    """Yield topological orders beside the given one; yield none for a model that is like a chain."""
    group = _merged(len(items), joins)
    if parts > 1 and _branchy(items, group):
        yield _depth_first(items)
        yield _metis_order(items, group, parts)


def _depth_first(items: Sequence[Item]) -> list[int]:
    """Return the depth-first order.

    The next item is one that can follow the item before; of several, it is the first.
    """
    readers: list[list[int]] = [[] for _ in items]
    waiting = [len(set(item.reads)) for item in items]
    for index, item in enumerate(items):
        for source in set(item.reads):
            readers[source].append(index)
    ready = [index for index in reversed(range(len(items))) if not waiting[index]]
    order: list[int] = []
    while ready:
        order.append(ready.pop())
        for reader in reversed(readers[order[-1]]):
            waiting[reader] -= 1
            if not waiting[reader]:
                ready.append(reader)
    return order


def _metis_order(items: Sequence[Item], group: list[int], parts: int) -> list[int]:
    """Return a topological order that finishes one part of METIS's partition before the next."""
    import pymetis

    vertex = {g: v for v, g in enumerate(sorted(set(group)))}
    neighbours: list[dict[int, int]] = [{} for _ in vertex]
    work = [1] * len(vertex)
    largest = max(item.elements for item in items) or 1.0
    for index, item in enumerate(items):
        here = vertex[group[index]]
        work[here] += int(10000 * item.share)
        for there in {vertex[group[source]]: source for source in item.reads}.items():
            weight = 1 + int(1000 * items[there[1]].elements / largest)
            if there[0] != here:
                neighbours[here][there[0]] = neighbours[there[0]][here] = weight
    starts = np.cumsum([0, *(len(n) for n in neighbours)]).tolist()
    targets = [other for n in neighbours for other in n]
    weights = [weight for n in neighbours for weight in n.values()]
    _, found = pymetis.part_graph(parts, xadj=starts, adjncy=targets, vweights=work, eweights=weights)
    return _ordered(items, [found[vertex[g]] for g in group])


def _branchy(items: Sequence[Item], group: list[int]) -> bool:
    """Return whether many heavy groups stand side by side, reading nothing from the heavy group in front of them."""
    behind: list[frozenset[int]] = []  # the nearest heavy groups that each item depends on
    beside, heavy, previous = 0, 0, -1
    for index, item in enumerate(items):
        near: frozenset[int] = frozenset().union(*(behind[source] for source in item.reads))
        if item.heavy and group[index] != previous:
            heavy += 1
            beside += previous >= 0 and previous not in near
            previous = group[index]
        behind.append(frozenset([group[index]]) if item.heavy else near)
    return heavy > 8 and beside > 0.2 * heavy


def _ordered(items: Sequence[Item], part: list[int]) -> list[int]:
    """Return the items by strongly connected sets of parts, in topological order.

    Of several possible sets the one of lower mean position comes first.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = {(part[source], part[index]) for index, item in enumerate(items) for source in item.reads}
    rows, columns = zip(*sorted(edges), strict=True)
    size = max(part) + 1
    _, label = connected_components(
        coo_array((np.ones(len(rows)), (rows, columns)), shape=(size, size)), connection="strong"
    )
    return _topological(items, [int(label[p]) for p in part])


def _merged(count: int, sets: list[list[int]]) -> list[int]:
    """Return for each item a representative that is the same for all items of overlapping sets."""
    parent = list(range(count))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for members in sets:
        for other in members[1:]:
            parent[find(other)] = find(members[0])
    return [find(item) for item in range(count)]


def _topological(items: Sequence[Item], rank: list[int]) -> list[int]:
    """Return the items sorted by Kahn's algorithm over sets of equal rank; items inside a set keep their order."""
    members: dict[int, list[int]] = {}
    for number, r in enumerate(rank):
        members.setdefault(r, []).append(number)
    after: dict[int, set[int]] = {r: set() for r in members}
    for index, item in enumerate(items):
        for source in item.reads:
            if rank[source] != rank[index]:
                after[rank[source]].add(rank[index])
    waiting = dict.fromkeys(members, 0)
    for targets in after.values():
        for target in targets:
            waiting[target] += 1
    ready = [(float(np.mean(members[r])), r) for r in members if not waiting[r]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, r = heapq.heappop(ready)
        order += members[r]
        for target in after[r]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, (float(np.mean(members[target])), target))
    return order
