"""Find the device of this machine that can be measured, and what a cluster file calls it."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

import torch

from isthmus.cluster.catalog import CATALOG
from isthmus.cluster.spec import PRECISIONS, Precision
from isthmus.errors import UsageError
from isthmus.files import is_name
from isthmus.files.document import NAME_RULE

__all__ = ["MeasuredMachine", "find_machine", "free_memory", "guess_kind"]

_TOKEN = re.compile(r"\d+gb|[a-z]+\d+[a-z]*|\d+|[a-z]+")
_PLAIN = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|generation|sxm\d?|pcie|hbm\de?|\d+gb")


class MeasuredMachine(NamedTuple):
    """The device that is measured, and what the profile calls it."""

    device: torch.device
    name: str  # as the vendor calls it
    kind: str
    precision: Precision
    threads: int


def find_machine(
    kind: str | None = None, precision: Precision | None = None, threads: int | None = None
) -> MeasuredMachine:
    """Return the first CUDA device, or the processor if there is none or if the kind is `CPU`.

    If no kind is given, it is guessed from the device's name. The default precision is the fastest that the catalog
    lists for the kind, as for a plan, or fp32 if the catalog does not list it.
    """
    if kind is not None and not is_name(kind):
        raise UsageError("this cannot be the name of a device kind", found=repr(kind[:80]), expected=NAME_RULE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if kind == "CPU" or not torch.cuda.is_available():
        device, name, guess = torch.device("cpu"), _processor(), "CPU"
    else:
        device, name = torch.device("cuda:0"), torch.cuda.get_device_name(0)
        guess = guess_kind(name) or ""
    if kind is None and not guess:
        raise UsageError(
            "the catalog has no such device",
            found=name,
            expected=f"one of {', '.join(CATALOG)}",
            next="Say what your cluster file calls it: --device KIND",
        )
    known = CATALOG.get(kind or guess) or CATALOG.get(guess)
    rates = known.compute if known is not None else {}
    offered: list[Precision] = [p for p in PRECISIONS if p in rates] or ["fp32"]
    fastest = max(offered, key=lambda p: rates.get(p, 0.0))
    return MeasuredMachine(device, name, kind or guess, precision or fastest, threads or cores)


def guess_kind(name: str) -> str | None:
    """Return the catalog's name of a device from its vendor's name; None if unsure.

    For example, `NVIDIA A100-SXM4-40GB` is A100-40GB. All words of the kind must stand in the name, and no other word
    that might make it another device (`Laptop`, `MIG`). Of several such kinds the one with most words is returned.
    """
    words = set(_TOKEN.findall(name.lower()))
    if any(re.fullmatch(r"sxm\d|hbm\de?", word) for word in words):
        words.add("sxm")
    found = []
    for kind in CATALOG:
        own = set(_TOKEN.findall(kind.lower()))
        if own <= words and all(_PLAIN.fullmatch(word) for word in words - own):
            found.append((len(own), kind))
    return max(found)[1] if found else None


def free_memory() -> float:
    """Return the bytes that a process on this machine may still take; infinity if the system does not say."""
    found = _system_says("meminfo", r"^MemAvailable: +(\d+) kB$")
    return int(found) * 1024.0 if found else float("inf")


def _processor() -> str:
    return _system_says("cpuinfo", r"^model name\s*: (.+)$") or f"{platform.machine()} processor"


def _system_says(file: str, pattern: str) -> str | None:
    """Return what the pattern's group matches in a file under Linux's /proc; None if nothing, as on other systems."""
    try:
        found = re.search(pattern, (Path("/proc") / file).read_text("utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None
