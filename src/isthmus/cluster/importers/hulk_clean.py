"""Finds errors in a table of times between machines, and corrects or removes the rows that have them.

The rules apply in this order. A row is *strange* when it differs from the median of its pair of cities by more than 15
% and by more than 15 ms.

1. self-loop: the time of a machine to itself. The row is left out.
2. typing-slip: a strange row that also breaks the ascending order of the file. The row is read as meaning another
   machine, if one stands out. Candidates are the machines that the order allows there, that have no row with `a` yet,
   and whose city has that time with `a`'s city. Of these the machine is taken that has rows with the most machines of
   `a`'s city. If there is no such machine, or two, the row is left out.
3. repeats-another-city: a strange row with the time of another city. The row is left out, because nobody can know which
   of the two cities the time belongs to.
4. outlier: the only row of its pair of cities, and faster than light (2 x distance / c). The row is left out.
5. faster-than-light: several rows of a pair of cities that agree with each other. They are kept and reported.
6. given-twice: a pair of machines with several rows. Their median is used.

What is left out can be filled in again from the medians (`import_hulk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from isthmus.cluster.importers.hulk_files import Machines, Row, city_medians, median
from isthmus.cluster.importers.result import Finding
from isthmus.cluster.places import find_place, light_seconds

__all__ = ["Cleaned", "clean"]

_STRANGE = (0.15, 15.0)  # part of the median, and ms: the difference must exceed both
_SAME = 1.0  # ms: two times that differ by no more than this count as the same

Pair = tuple[int, int]


class Cleaned(NamedTuple):
    """Times by pair of machines, in ms as measured, with the rows they come from and the findings."""

    times: dict[Pair, float]
    rows: list[Row]
    findings: list[Finding]


def clean(machines: Machines, rows: Sequence[Row]) -> Cleaned:
    """Apply all the rules, one after another; each rule sees the rows that the rules before it left."""
    findings: list[Finding] = []
    kept = list(rows)
    for rule in (_self_loops, _slips, _repeats, _outliers, _light):
        kept, found = rule(machines, kept)
        findings += found
    times: dict[Pair, list[float]] = {}
    for row in kept:
        times.setdefault(row.pair, []).append(row.ms)
    medians = {pair: median(values) for pair, values in times.items()}
    return Cleaned(medians, kept, [*findings, *_twice(rows, medians)])


def _without(rows: list[Row], found: Sequence[Row]) -> list[Row]:
    gone = {row.index for row in found}
    return [row for row in rows if row.index not in gone]


def _finding(kind: str, what: str, done: str, rows: Sequence[Row]) -> list[Finding]:
    return [Finding(kind=kind, what=what, done=done, rows=tuple(map(str, rows)))] if rows else []


def _self_loops(machines: Machines, rows: list[Row]) -> tuple[list[Row], list[Finding]]:
    found = [row for row in rows if row.a == row.b]
    return _without(rows, found), _finding("self-loop", "a machine's time to itself", "left out", found)


def _strange(machines: Machines, rows: list[Row]) -> list[Row]:
    medians = city_medians(rows, machines)
    part, least = _STRANGE
    usual = {row.index: medians[_cities(machines, row.a, row.b)] for row in rows}
    return [row for row in rows if abs(row.ms - usual[row.index]) > max(part * usual[row.index], least)]


def _cities(machines: Machines, a: int, b: int) -> frozenset[str]:
    return frozenset((machines[a].city, machines[b].city))


def _slips(machines: Machines, rows: list[Row]) -> tuple[list[Row], list[Finding]]:
    strange = {row.index for row in _strange(machines, rows)}
    found = [row for before, row in pairwise(rows) if row.index in strange and before.a == row.a and before.b > row.b]
    meant = {row.index: node for row in found if (node := _meant(machines, rows, row)) is not None}
    mended = [msgspec.structs.replace(row, b=meant.get(row.index, row.b)) for row in rows]
    lost = [row for row in found if row.index not in meant]
    readings = ", ".join(f"{row.a}-{meant[row.index]}" for row in found if row.index in meant)
    done = "; ".join(part for part in (f"read as {readings}" * bool(readings), "left out" * bool(lost)) if part)
    what = "the row breaks the order of the file, and its time is not that of its cities"
    return _without(mended, lost), _finding("typing-slip", what, done, found)


def _meant(machines: Machines, rows: list[Row], row: Row) -> int | None:
    """Return the machine that a row most likely meant, if one stands out among the possible ones (rule 2)."""
    given = {other.pair for other in rows}
    neighbours = [node for node, machine in machines.items() if machine.city == machines[row.a].city]
    votes = {
        node: sum((min(a, node), max(a, node)) in given for a in neighbours) for node in _possible(machines, rows, row)
    }
    best = [node for node, number in votes.items() if number == max(votes.values())]
    return best[0] if len(best) == 1 else None


def _possible(machines: Machines, rows: list[Row], row: Row) -> list[int]:
    """Return the machines of other cities that the row may mean.

    They have this row's time, its order in the file allows them, and `a` has no row with them yet.
    """
    at, medians = rows.index(row), city_medians(rows, machines)
    given = {other.pair for other in rows}
    before = rows[at - 1].b if at and rows[at - 1].a == row.a else -1
    after = rows[at + 1].b if at + 1 < len(rows) and rows[at + 1].a == row.a else max(machines) + 1
    return [
        node
        for node, machine in machines.items()
        if before < node < after
        and machine.city != machines[row.b].city
        and (min(row.a, node), max(row.a, node)) not in given
        and _near(medians, machines[row.a].city, machine.city, row.ms)
    ]


def _repeats(machines: Machines, rows: list[Row]) -> tuple[list[Row], list[Finding]]:
    medians = city_medians(rows, machines)
    found: dict[tuple[str, str], list[Row]] = {}
    for row in _strange(machines, rows):
        own = machines[row.a].city
        others = [city for city in _other_cities(machines, row) if _near(medians, own, city, row.ms)]
        if others:
            found.setdefault((machines[row.b].city, others[0]), []).append(row)
    findings = [
        finding
        for (city, other), repeated in found.items()
        for finding in _finding("repeats-another-city", f"{city} has the times of {other}", "left out", repeated)
    ]
    return _without(rows, [row for repeated in found.values() for row in repeated]), findings


def _other_cities(machines: Machines, row: Row) -> list[str]:
    return list(dict.fromkeys(machine.city for machine in machines.values() if machine.city != machines[row.b].city))


def _near(medians: dict[frozenset[str], float], own: str, city: str, ms: float) -> bool:
    return abs(medians.get(frozenset((own, city)), ms + 2 * _SAME) - ms) <= _SAME


def _too_fast(machines: Machines, rows: list[Row]) -> dict[frozenset[str], list[Row]]:
    """Return the rows that are faster than light there and back, by pair of cities."""
    found: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        a, b = find_place(machines[row.a].city), find_place(machines[row.b].city)
        if a is not None and b is not None and row.ms < 2e3 * light_seconds(a, b):
            found.setdefault(_cities(machines, row.a, row.b), []).append(row)
    return found


def _outliers(machines: Machines, rows: list[Row]) -> tuple[list[Row], list[Finding]]:
    counts: dict[frozenset[str], int] = {}
    for row in rows:
        cities = _cities(machines, row.a, row.b)
        counts[cities] = counts.get(cities, 0) + 1
    found = [fast[0] for cities, fast in _too_fast(machines, rows).items() if counts[cities] == 1]
    meant = " or ".join(f"{row.a}-{node}" for row in found for node in _possible(machines, rows, row))
    what = "the only row of its two cities is faster than light"
    done = f"left out; {meant} may be meant" if meant else "left out"
    return _without(rows, found), _finding("outlier", what, done, found)


def _light(machines: Machines, rows: list[Row]) -> tuple[list[Row], list[Finding]]:
    findings = []
    for cities, fast in _too_fast(machines, rows).items():
        what = f"{' - '.join(sorted(cities))}: faster than light there and back; the rows agree"
        findings += _finding("faster-than-light", what, "kept as measured: the machines may be elsewhere", fast)
    return rows, findings


def _twice(rows: Sequence[Row], medians: dict[Pair, float]) -> list[Finding]:
    """Report the pairs of machines with several rows in the file, as it was before any rule."""
    given: dict[Pair, list[Row]] = {}
    for row in rows:
        if row.a != row.b:
            given.setdefault(row.pair, []).append(row)
    several = {pair: found for pair, found in given.items() if len(found) > 1}
    times = ", ".join(f"{a}-{b} {medians[a, b]:g} ms" for a, b in several if (a, b) in medians)
    quoted = [row for found in several.values() for row in found]
    return _finding("given-twice", "a pair has several rows", f"the median of those that remain: {times}", quoted)
