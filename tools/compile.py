"""Compile the simulator and the planners: the last step of the installation.

Compiled code is kept in the user's cache. Tests have a cache of their own (`tests/conftest.py`), which gets a copy.
"""

import shutil
from pathlib import Path

import numba

from isthmus.planners.warm_up import warm_up

TESTS = Path(__file__).resolve().parents[1] / "build" / "test-cache"

if __name__ == "__main__":
    warm_up()
    folder = Path(numba.config.CACHE_DIR)
    if folder.name.startswith("numba-") and folder.parent != TESTS:  # not one that the user has set
        shutil.copytree(folder, TESTS / folder.name, dirs_exist_ok=True)
