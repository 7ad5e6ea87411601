"""What all tests share: where things lie, and steady hypothesis settings."""

import os
import resource
import signal
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Two test processes on two cores: one thread each. Captured models and compiled loops are kept between runs (keyed by
# their source): in the clone, or in the user's own cache if the clone belongs to somebody else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if os.access(ROOT, os.W_OK):
    os.environ.setdefault("ISTHMUS_CACHE", str(ROOT / "build" / "test-cache"))

# Gloo opens hundreds of sockets in one process of tests; many systems allow a user 1024 files unless asked for more.
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most if 0 < most < 65536 else 65536, most))

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples on every machine and run, so that a red test is red again; no time limit on a busy machine.
hypothesis.settings.register_profile("steady", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("steady")


# What plans and prices compiles loops, which takes a minute where there are none in the cache yet.
COMPILES = ("cli", "cost", "planners")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what compiles in front: of two processes only the first compiles, and the other begins in the middle."""
    items.sort(key=lambda item: item.path.parent.name not in COMPILES)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Published data beside the clone; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("the folder of published data is not beside this clone")
    return folder
