"""How many steps the tests of plans train."""

import pytest


@pytest.fixture(params=[5, pytest.param(20, marks=pytest.mark.slow("the same over four times as many steps"))])
def steps(request: pytest.FixtureRequest) -> int:
    """Return the number of steps; what differs in one step mostly shows in five."""
    count: int = request.param
    return count
