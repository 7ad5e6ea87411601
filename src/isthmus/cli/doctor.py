"""The command `isthmus doctor`: what this machine can do, what is missing, and the command that repairs it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from isthmus.cli.console import Answer, ProgressLine
from isthmus.files import cache_folder
from isthmus.report.columns import columns
from isthmus.units import format_bytes, format_seconds

__all__ = ["Check", "run", "verdict"]

_LEAST_MEMORY = 2e9  # bytes: torch and a captured model


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check; `next` repairs it, and what is not `required` may be absent."""

    name: str
    ok: bool
    found: str
    next: str | None = None
    required: bool = True


def run(args: argparse.Namespace, progress: ProgressLine) -> Answer:
    """Run every check once."""
    progress.phase("Looking at this machine")
    simulator = partial(_simulator, progress.compiling)
    return verdict(
        [check() for check in (_python, _cores, _memory, _torch, simulator, _cache, _transformers, _emulation)]
    )


def verdict(checks: list[Check]) -> Answer:
    """Return the answer, which is good if everything that is required is there."""
    broken = [check.name for check in checks if check.required and not check.ok]
    rows = [(_mark(check), check.name, check.found) for check in checks]
    remedies = [f"{check.name}: {check.next}" for check in checks if check.next]
    text = "\n".join([*columns(rows), *(["", *remedies] if remedies else [])])
    failure = f"not ready: {', '.join(broken)}" if broken else None
    return Answer(values={"ok": not broken, "checks": [asdict(check) for check in checks]}, text=text, failure=failure)


def _mark(check: Check) -> str:
    return "ok" if check.ok else "MISSING" if check.required else "absent"


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    remedy = None if ok else "Install Python 3.11 or newer, then: make PYTHON=/path/to/python3.11"
    return Check(name="python", ok=ok, found=f"{platform.python_version()} on {platform.system()}", next=remedy)


def _cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check(name="cores", ok=True, found=str(cores))


def _memory() -> Check:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return Check(name="memory", ok=False, found="unknown: this system does not report it", required=False)
    ok = total >= _LEAST_MEMORY
    return Check(
        name="memory", ok=ok, found=format_bytes(total), next=None if ok else "Use a machine with 2 GB or more"
    )


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(name="torch", ok=False, found=_said(error), next=_install("torch"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    return Check(name="torch", ok=True, found=f"{torch.__version__}, {names or 'no CUDA device (planning needs none)'}")


def _simulator(compiling: Callable[[], None]) -> Check:
    """Price a plan of one block, and compile what has not been compiled yet."""
    start = time.monotonic()
    try:
        from isthmus.planners.warm_up import warm_up

        warm_up(compiling)
    except Exception as error:  # a broken numba may raise anything
        remedy = f"{_install('numba')}; if its cache cannot be written, set NUMBA_CACHE_DIR to a folder of yours"
        return Check(name="simulator", ok=False, found=_said(error), next=remedy)
    from isthmus.cost.build_tasks import lower

    stats: Any = getattr(lower, "stats", None)  # numba's count of what it loaded and what it compiled
    compiled = "compiled now" if stats and sum(stats.cache_misses.values()) else "compiled before"
    took = format_seconds(time.monotonic() - start)
    return Check(
        name="simulator", ok=True, found=f"works; {compiled}, first plan after {took} (numba {_version('numba')})"
    )


def _cache() -> Check:
    folder = cache_folder()
    remedy = "Set ISTHMUS_CACHE to a folder that you can write; until then every model is captured anew"
    if folder is None:
        return Check(name="cache", ok=False, found="no home folder", next=remedy, required=False)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(name="cache", ok=False, found=f"{folder}: {error.strerror}", next=remedy, required=False)
    return Check(name="cache", ok=True, found=f"{folder}, captured models: {len(list(folder.glob('*.json')))}")


def _transformers() -> Check:
    found = _version("transformers")
    if found is not None:
        return Check(name="transformers", ok=True, found=found, required=False)
    why = f"only hf:CONFIG.json models need it: {_install('transformers')}"
    return Check(name="transformers", ok=False, found="not installed", next=why, required=False)


def _emulation() -> Check:
    """Make an emulated host, and remove it."""
    from isthmus.emulate.world import unable

    reason = unable()
    if reason is None:
        return Check(name="emulation", ok=True, found="hosts with emulated links work", required=False)
    remedy = "only emulated links need it: Linux as root, iproute2 and /dev/net/tun; without, all hosts are on loopback"
    return Check(name="emulation", ok=False, found=reason, next=remedy, required=False)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _install(package: str) -> str:
    """Return the command that installs the package in the range that Isthmus asks for."""
    asked = [re.split(r"[;\s]", text)[0] for text in requires("isthmus") or ()]
    wanted = next((text for text in asked if re.match(rf"{package}\b", text)), package)
    return f"{sys.executable} -m pip install '{wanted}'"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}"
