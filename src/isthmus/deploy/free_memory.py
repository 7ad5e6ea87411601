"""Find out how much memory is free on this machine, and refuse workers that need more.

Free host memory is what the kernel calls available, or what is left of the limits of this process's control groups
(versions 1 and 2), whichever is least. The memory of GPUs is asked of the driver's own libraries, because a query
through torch would itself take memory. What cannot be found out is not checked.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from isthmus.cost.memory import CONTEXT
from isthmus.errors import RunError
from isthmus.units import format_bytes

__all__ = ["FreeMemory", "check_fit", "free_on_gpus", "free_on_host", "gpu_needs", "host_needs"]

_PROCESS = 0.2e9  # bytes of a worker's process before its model; the shared pages of libraries are not counted
_UNLIMITED = 2**60  # bytes; version 1 reports a number above this if there is no limit
_NAMED = 4  # workers that an error message names
_FILES = (  # files of a control group by version: limit, use, and the part of the use that the kernel can reclaim
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class FreeMemory(NamedTuple):
    """Free memory in bytes, and where the figure comes from."""

    bytes: float
    source: str


def check_fit(where: str, needs: Mapping[str, float], free: FreeMemory | None) -> None:
    """Raise RunError if the workers' needs (bytes by name) add up to more than is free."""
    total = sum(needs.values())
    if free is None or total <= free.bytes:
        return
    largest = sorted(needs, key=lambda name: -needs[name])
    named = [f"{name} {format_bytes(needs[name])}" for name in largest[:_NAMED]]
    more = [f"{len(needs) - _NAMED} more"] if len(needs) > _NAMED else []
    count = f"{len(needs)} worker{'s' * (len(needs) > 1)}"
    raise RunError(
        f"the workers would need more memory than is free: {format_bytes(total)} predicted, "
        f"{format_bytes(free.bytes)} free",
        where=where,
        found=f"{count}: {', '.join(named + more)}",
        expected=f"at most {format_bytes(free.bytes)} together ({free.source})",
        next="Free some memory, train a smaller batch or model, or take the risk with --ignore-memory "
        "(LocalEngine(ignore_memory=True) in Python)",
    )


def free_on_host(system: Path = Path("/")) -> FreeMemory | None:
    """Return the free host memory, or None if the system does not report it.

    `system` is the root of the system's files.
    """
    found = [*_available(system / "proc/meminfo"), *_left_by_groups(system)]
    return min(found, default=None)


def _available(meminfo: Path) -> Iterator[FreeMemory]:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(meminfo), re.MULTILINE)
    if match:
        yield FreeMemory(int(match[1]) * 1024, "MemAvailable")


def _left_by_groups(system: Path) -> Iterator[FreeMemory]:
    """Yield what the limits of this process's control group, and of those above it, leave free."""
    for line in _text(system / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = system / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = top / name.lstrip("/")
        for folder in (group, *group.parents):  # in a container the name may be that of an outer one: the top remains
            yield from _left_in(folder)
            if folder == top:
                break


def _left_in(folder: Path) -> Iterator[FreeMemory]:
    for limit, use, given_back in _FILES:
        most, used = _text(folder / limit).strip(), _text(folder / use).strip()
        if most.isdecimal() and used.isdecimal() and int(most) < _UNLIMITED:
            cached = re.search(rf"^{given_back} (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            left = int(most) - int(used) + (int(cached[1]) if cached else 0)
            yield FreeMemory(max(0, left), f"the limit of {format_bytes(int(most))} in {folder / limit}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class _MemoryInfo(ctypes.Structure):
    """The C structure `nvmlMemory_t`."""

    _fields_: ClassVar = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def free_on_gpus(count: int) -> list[FreeMemory | None]:
    """Return the free memory of each CUDA device in CUDA's order; None for a device that the driver does not report."""
    try:
        cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
        if cuda.cuInit(0) or nvml.nvmlInit_v2():
            return [None] * count
        return [_free_on_gpu(cuda, nvml, number) for number in range(count)]
    except (OSError, AttributeError):
        return [None] * count


def _free_on_gpu(cuda: ctypes.CDLL, nvml: ctypes.CDLL, number: int) -> FreeMemory | None:
    """Return the free memory of a CUDA device; None if the driver does not report it.

    CUDA and the management library number devices differently, so the device is found by its UUID.
    """
    device, identity = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid(identity, device):
        return None
    digits = bytes(identity).hex()
    name = "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    handle, info = ctypes.c_void_p(), _MemoryInfo()
    if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info)):
        return None
    return FreeMemory(float(info.free), "the driver's figure")


def host_needs(own: Mapping[str, float], building: float, on_gpus: bool) -> dict[str, float]:
    """Return the bytes of host memory that each worker needs.

    That is its process, and the larger of the model while it is built and what the worker trains. On a machine with
    GPUs, what it trains lies there.
    """
    return {worker: _PROCESS + (building if on_gpus else max(building, bytes)) for worker, bytes in own.items()}


def gpu_needs(own: Mapping[str, float], count: int) -> list[dict[str, float]]:
    """Return the bytes that each worker needs, by GPU; worker i has GPU i modulo the number of GPUs."""
    workers = list(own)
    return [{worker: own[worker] + CONTEXT for worker in workers[gpu::count]} for gpu in range(count)]
