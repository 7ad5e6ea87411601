"""Reads the two files of the Hulk data: machines (`node,City,Capability,Memory`) and times between them (`a b ms`)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from isthmus.errors import ClusterError
from isthmus.files import NAME_RULE, is_name
from isthmus.files.document import read_text

__all__ = ["HulkMachine", "Machines", "Row", "city_medians", "median", "read_machines", "read_rows"]

_LARGEST = 16 * 2**20  # bytes
_HEAD = ["node", "City", "Capability", "Memory"]
_ROW = re.compile(r"(?P<a>[0-9]{1,6})\s+(?P<b>[0-9]{1,6})\s+(?P<ms>[0-9]{1,9}(?:\.[0-9]{1,9})?)", re.ASCII)


class HulkMachine(msgspec.Struct, frozen=True, kw_only=True):
    """One machine; `city` in the form of a region's name (`new-delhi`), `memory` in bytes, `row` as the file has it."""

    node: int
    city: str
    capability: float
    memory: float
    row: str
    blank: bool  # whether the city was written with a superfluous blank

    @property
    def host(self) -> str:
        """Return the name of the host, which is made of its city and its number."""
        return f"{self.city}-{self.node}"


Machines = Mapping[int, HulkMachine]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured time; `index` counts the rows of the file from 0."""

    index: int
    a: int
    b: int
    ms: float

    @property
    def pair(self) -> tuple[int, int]:
        """Return both machines, the smaller number first."""
        return min(self.a, self.b), max(self.a, self.b)

    def __str__(self) -> str:
        return f"line {self.index + 1}: {self.a} {self.b} {self.ms:g}"


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two in the middle."""
    return float(statistics.median(values))


def city_medians(rows: Sequence[Row], machines: Machines) -> dict[frozenset[str], float]:
    """Return the median time of each pair of cities that has rows."""
    times: dict[frozenset[str], list[float]] = {}
    for row in rows:
        times.setdefault(frozenset((machines[row.a].city, machines[row.b].city)), []).append(row.ms)
    return {cities: median(values) for cities, values in times.items()}


def read_machines(path: str | Path) -> dict[int, HulkMachine]:
    """Return the machines by number, in the order of the file."""
    lines = read_text(path, _LARGEST, ClusterError).splitlines()
    if not lines or [field.strip() for field in lines[0].split(",")] != _HEAD:
        found = repr(lines[0][:80]) if lines else "an empty file"
        raise ClusterError("this is not a file of machines", where=str(path), found=found, expected=",".join(_HEAD))
    machines: dict[int, HulkMachine] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        machine = _machine(line, f"{path} line {number}")
        if machine.node in machines:
            raise ClusterError(f"machine {machine.node} is given twice", where=f"{path} line {number}")
        machines[machine.node] = machine
    if not machines:
        raise ClusterError("the file has no machines", where=str(path), expected="rows under its head")
    return machines


def _machine(line: str, where: str) -> HulkMachine:
    fields = line.split(",")
    try:
        node, city, capability, memory = int(fields[0]), fields[1], float(fields[2]), float(fields[3])
        if len(fields) != 4 or node < 0 or not math.isfinite(capability) or not 0 < memory < math.inf:
            raise ValueError
    except (ValueError, IndexError):
        expected = "number, city, compute capability, memory in GB"
        raise ClusterError("this row cannot be read", where=where, found=repr(line[:80]), expected=expected) from None
    name = city.strip().lower().replace(" ", "-")
    if not is_name(f"{name}-{node}"):
        raise ClusterError("this is not a valid city name", where=where, found=repr(city[:80]), expected=NAME_RULE)
    blank = city != city.strip()
    return HulkMachine(
        node=node, city=name, capability=capability, memory=memory * 1e9, row=line.rstrip("\r"), blank=blank
    )


def read_rows(path: str | Path, machines: Machines) -> list[Row]:
    """Return the measured times, row by row."""
    return list(_rows(read_text(path, _LARGEST, ClusterError), str(path), machines))


def _rows(text: str, path: str, machines: Machines) -> Iterator[Row]:
    for index, line in enumerate(text.splitlines()):
        if not line.strip():
            continue
        where = f"{path} line {index + 1}"
        match = _ROW.fullmatch(line.strip())
        if match is None or float(match["ms"]) == 0:
            expected = "two machines and milliseconds, like 0 1 10"
            raise ClusterError("this row cannot be read", where=where, found=repr(line[:80]), expected=expected)
        row = Row(index=index, a=int(match["a"]), b=int(match["b"]), ms=float(match["ms"]))
        unknown = [node for node in (row.a, row.b) if node not in machines]
        if unknown:
            raise ClusterError(
                f"machine {unknown[0]} is not in the file of machines", where=where, found=repr(line[:80])
            )
        yield row
