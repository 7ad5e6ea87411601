"""What is compiled is told once; what was compiled before, in this process or another, is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba

from isthmus.compiled import telling

SCRIPT = """
from isthmus.compiled import telling
from isthmus.plan.schedule import stage_at
import numpy as np
with telling(lambda: print("compiling")):
    assert stage_at(np.array([0, 2, 5], np.int32), 3) == 1
"""


def test_compiling_is_told_once() -> None:
    told: list[str] = []
    one, two = (numba.njit(function) for function in (lambda x: x + 1, lambda x: x + 2))
    with telling(lambda: told.append("now")):
        assert one(1) == 2 and two(1) == 3
    assert told == ["now"]
    with telling(lambda: told.append("again")):
        assert one(2) == 3
    assert told == ["now"]
    assert one(1.5) == 2.5 and told == ["now"], "nobody listens any more"


def test_what_is_in_the_cache_is_not_compiled(tmp_path: Path) -> None:
    environment = {"ISTHMUS_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout for _ in range(2)
    ]
    assert said == ["compiling\n", ""]
